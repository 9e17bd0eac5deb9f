"""One review: recordings, index, vocabulary, engines and labels, as one thing to ask.

Knows: how the parts of a review belong together; every figure a screen shows comes from here.
Must not know: Textual, screens, keys; formats, sockets or files by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.branching import Arm, Branch, prefix_of
from kldtui.detail import Detail, align
from kldtui.engines import Engine, EngineInfo, open_engine
from kldtui.errors import EngineError, KldtuiError, LabelFileError
from kldtui.floor import SelfRuns
from kldtui.hints import Hint
from kldtui.hints import hint as guess
from kldtui.index import Bound, Index, Kind, State
from kldtui.labels import (
    BY_ID,
    BY_KEY,
    LabelRecord,
    LabelStore,
    ReviewIdentity,
    default_path,
)
from kldtui.listing import Filter, Lookups, Order, list_roots
from kldtui.position import Position
from kldtui.recordings import Recording, open_recording
from kldtui.roots import Thresholds, flips_at, near_tie_from_floor
from kldtui.verify import VerifyResult
from kldtui.vocab import Vocabulary, find_vocabulary, from_server


@dataclass(frozen=True, slots=True)
class Quant:
    """A quant of this review: its name on screen and in labels, and its recording."""

    name: str
    recording: Recording


@dataclass(slots=True)
class EngineSlot:
    """A server of this review: `role` is "ref", or the name of the quant it serves."""

    role: str
    engine: Engine
    info: EngineInfo | None = None
    state: str = "waiting"
    """waiting, connecting, loading, ready, failed"""
    words: str = ""
    verified: VerifyResult | None = None


@dataclass(frozen=True, slots=True)
class RootFacts:
    """What the index says of one position and one quant; log-probabilities in nats."""

    index: int
    position: Position
    quant: int
    kind: Kind
    state: State
    stream_id: int
    ref_id: int
    quant_id: int
    kld: float
    margin: float
    cost: float
    ref_p_ref: float
    ref_p_quant: float
    quant_p_ref: float
    quant_p_quant: float
    ref_stream: float
    quant_stream: float
    ref_rank_quant: int
    quant_rank_ref: int
    stream_rank: int
    near_tie: bool
    bounds: Bound
    flips: tuple[int, ...]

    @property
    def is_root(self) -> bool:
        return self.state == State.SCORED and self.kind == Kind.ROOT


def split_named(spec: str) -> tuple[str | None, str]:
    """Split `NAME=REST`; a name has no slash, so that paths and URLs with `=` stay whole."""
    name, sep, rest = spec.partition("=")
    if sep and name and "/" not in name and ":" not in name and rest:
        return name, rest
    return None, spec


def name_quants(specs: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and paths of `[NAME=]FILE` specs; names default to file stems and are unique."""
    out: list[tuple[str, Path]] = []
    taken: set[str] = set()
    for spec in specs:
        name, rest = split_named(spec)
        if name is not None and Path(spec).exists():
            name, rest = None, spec
        path = Path(rest)
        stem = path.name.removesuffix(".gz").rsplit(".", 1)[0] or path.name
        wanted = name or stem
        unique, n = wanted, 2
        while unique in taken:
            if name is not None:
                raise KldtuiError(f"two quants are named {name!r}; give each its own NAME=FILE")
            unique, n = f"{wanted}-{n}", n + 1
        taken.add(unique)
        out.append((unique, path))
    return out


@dataclass
class Session:
    """Everything a screen is given. Build it with `Session.open`."""

    ref: Recording
    quants: tuple[Quant, ...]
    floor: Recording | None
    vocab: Vocabulary
    index: Index
    thresholds: Thresholds
    labels: LabelStore | None = None
    slots: dict[str, EngineSlot] = field(default_factory=dict)
    branches: dict[tuple[Position, str], dict[str, Branch]] = field(default_factory=dict)
    self_runs: dict[Position, SelfRuns] = field(default_factory=dict)
    """What the reference said against itself, at the roots where it was asked."""

    @classmethod
    def open(
        cls,
        ref: Path,
        quants: Sequence[tuple[str, Path]],
        *,
        floor: Path | None = None,
        tokenizer: Path | None = None,
        near_tie: float | None = None,
        default_near_tie: float = 0.3,
    ) -> Session:
        """Open recordings and find a vocabulary. Raises RecordingError or VocabularyError."""
        reference = open_recording(ref)
        opened = tuple(Quant(name, open_recording(path)) for name, path in quants)
        null = open_recording(floor) if floor is not None else None
        compared = [quant.recording for quant in opened] + ([null] if null else [])
        vocab = find_vocabulary([reference, *compared], tokenizer)
        if near_tie is not None:
            thresholds = Thresholds(near_tie, "given")
        else:
            thresholds = Thresholds(default_near_tie, "default")
        return cls(reference, opened, null, vocab, Index(reference, compared), thresholds)

    def close(self) -> None:
        """Save where the cursor stood, and close the files. Raises LabelFileError."""
        if self.labels is not None:
            self.labels.close()
        for recording in (self.ref, *(quant.recording for quant in self.quants)):
            recording.close()
        if self.floor is not None:
            self.floor.close()

    # ── figures ──────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(quant.name for quant in self.quants)

    @property
    def floor_number(self) -> int | None:
        """The number of the null recording among `index.pairs`."""
        return len(self.quants) if self.floor is not None else None

    def settle_thresholds(self) -> None:
        """After the scan: take the near-tie threshold from the floor, where one was recorded."""
        if self.floor_number is None or self.thresholds.near_tie_source != "default":
            return
        measured = near_tie_from_floor(self.index, self.floor_number)
        if math.isfinite(measured):
            self.thresholds = Thresholds(measured, "floor")

    def chunk_tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[length]."""
        return self.ref.tokens(chunk)

    def flat(self, position: Position) -> int | None:
        return self.index.layout.index(position)

    def position(self, i: int) -> Position:
        return self.index.layout.position(i)

    def flips(self, i: int) -> tuple[int, ...]:
        """The quants (never the floor) that flip at flat index `i`."""
        return tuple(k for k in flips_at(self.index, i) if k < len(self.quants))

    def floor_flips(self, i: int) -> bool:
        """Whether the reference's own null recording flips here too."""
        return self.floor_number is not None and self.floor_number in flips_at(self.index, i)

    def facts(self, i: int, quant: int) -> RootFacts:
        """All the index holds of flat position `i` for quant number `quant`."""
        position = self.position(i)
        ref, pair = self.index.ref[i], self.index.pairs[quant][i]
        cost = float(ref["ref_p_ref"]) - float(pair["ref_p_quant"])
        return RootFacts(
            index=i,
            position=position,
            quant=quant,
            kind=Kind(int(pair["kind"])),
            state=State(int(pair["state"])),
            stream_id=int(self.chunk_tokens(position.chunk)[position.t]),
            ref_id=int(ref["ref_id"]),
            quant_id=int(pair["quant_id"]),
            kld=float(pair["kld"]),
            margin=float(ref["margin"]),
            cost=cost,
            ref_p_ref=float(ref["ref_p_ref"]),
            ref_p_quant=float(pair["ref_p_quant"]),
            quant_p_ref=float(pair["quant_p_ref"]),
            quant_p_quant=float(pair["quant_p_quant"]),
            ref_stream=float(ref["ref_stream"]),
            quant_stream=float(pair["quant_stream"]),
            ref_rank_quant=int(pair["ref_rank_quant"]),
            quant_rank_ref=int(pair["quant_rank_ref"]),
            stream_rank=int(ref["stream_rank"]),
            near_tie=cost < self.thresholds.near_tie,
            bounds=Bound(int(pair["bounds"]) | int(ref["bounds"])),
            flips=self.flips(i),
        )

    def detail(self, position: Position, quant: int, n: int) -> Detail:
        """Both rows of a position, aligned. Raises RecordingChanged."""
        tokens = self.chunk_tokens(position.chunk)
        stream = int(tokens[position.t]) if position.t < tokens.size else None
        other = self.quants[quant].recording.row(position) if self.quants else None
        return align(self.ref.row(position), other, stream, n)

    def listed(self, wanted: Filter, order: Order) -> NDArray[np.int64]:
        """Flat indices of the root list."""
        lookups = Lookups(self._label_key, self._root_text)
        return list_roots(self.index, wanted, order, self.thresholds, self.names, lookups)

    def _label_key(self, i: int, quant: int) -> str | None:
        class_id = self.class_of(self.position(i), quant)
        return BY_ID[class_id].key if class_id in BY_ID else class_id

    def _root_text(self, i: int, quant: int) -> str:
        facts = self.facts(i, quant)
        return self.vocab.text([facts.ref_id]) + "\n" + self.vocab.text([facts.quant_id])

    def counts(self, quant: int) -> dict[str, int]:
        """Roots, near ties, ties, invalid and scored positions of one pair, as scanned so far."""
        pair = self.index.pairs[quant]
        scored = pair["state"] == State.SCORED
        roots = scored & (pair["kind"] == Kind.ROOT)
        costs = self.index.ref["ref_p_ref"][roots] - pair["ref_p_quant"][roots]
        return {
            "positions": int(np.count_nonzero(scored)),
            "roots": int(np.count_nonzero(roots)),
            "near_ties": int(np.count_nonzero(costs < self.thresholds.near_tie)),
            "ties": int(np.count_nonzero(scored & (pair["kind"] == Kind.TIE))),
            "invalid": int(np.count_nonzero(pair["state"] == State.INVALID)),
            "missing": int(np.count_nonzero(pair["state"] == State.MISSING)),
        }

    def search(self, needle: str, start: int = 0) -> Iterator[tuple[int, list[Position]]]:
        """Find text in the stream: yields (chunk, hits in it) for every chunk from `start` on.

        Case is ignored unless the needle has capitals. A hit is the token its first byte lies in.
        """
        fold = needle == needle.lower()
        wanted = needle.encode("utf-8", "surrogatepass")
        for chunk in range(start, self.ref.shape.n_chunk):
            pieces = [self.vocab.piece(int(t)) or b"" for t in self.chunk_tokens(chunk)]
            text = b"".join(pieces)
            if fold:
                text = _fold(text)
            ends = np.cumsum([len(piece) for piece in pieces])
            hits, at = [], text.find(wanted) if wanted else -1
            while at >= 0:
                hits.append(Position(chunk, int(np.searchsorted(ends, at, side="right"))))
                at = text.find(wanted, at + len(wanted))
            yield chunk, hits

    def rollout(self) -> bool | None:
        """Whether the stream is the reference's own greedy rollout; None while unknown.

        It is one where every scored stream token is the reference's argmax (ties count for it).
        """
        state = self.index.ref["state"]
        scored = state == State.SCORED
        if bool(np.any(self.index.ref["stream_rank"][scored] > 1)):
            return False
        return True if scored.any() and not np.any(state == State.PENDING) else None

    # ── labels ───────────────────────────────────────────────────────────────────────────────

    def keep_labels(self, path: Path | None, reviewer: str) -> LabelStore:
        """Open the label file, and the branches stored with it. Raises LabelFileError."""
        named = {quant.name: quant.recording for quant in self.quants}
        place = path if path is not None else default_path(self.ref.path, self.names)
        self.labels = LabelStore.open(place, ReviewIdentity.of(self.ref, named), reviewer)
        return self.labels

    def class_of(self, position: Position, quant: int) -> str | None:
        """The class id of a root, for lists of many."""
        if self.labels is None:
            return None
        return self.labels.class_of(position, self.quants[quant].name)

    def set_label(self, facts: RootFacts, key: str | None, how: str) -> None:
        """Give a root the class of this key, or take it away; on disk at once.

        Raises LabelFileError if the disk refuses (the label stays in memory, and is tried again).
        """
        if self.labels is None:
            raise LabelFileError("this review keeps no labels")
        name = self.quants[facts.quant].name
        if key is None:
            self.labels.set(facts.position, name, None)
            return
        hint = self.hint(facts.position, facts.quant)
        if hint is not None:
            told = {"class": "malformed_tool_call", "text": hint.words, "source": hint.kind}
            self.labels.set_hint(facts.position, name, told)
        branches = [
            branch.to_json() for branch in self.recall(facts.position, facts.quant).values()
        ]
        self.labels.set(
            facts.position, name, BY_KEY[key].id, self.evidence(facts), branches, reached=how
        )

    def set_note(self, facts: RootFacts, text: str, how: str) -> None:
        """Write a note on a position. Raises LabelFileError as `set_label`."""
        if self.labels is None:
            raise LabelFileError("this review keeps no labels")
        name = self.quants[facts.quant].name
        self.labels.note(facts.position, name, text, self.evidence(facts), reached=how)

    def step(self, what: Literal["undo", "redo"]) -> tuple[str, Position, int] | None:
        """Undo or redo: what was, where, and of which quant; None if there is nothing."""
        if self.labels is None:
            return None
        action = self.labels.undo() if what == "undo" else self.labels.redo()
        if action is None:
            return None
        quant = self.names.index(action.quant) if action.quant in self.names else 0
        return str(action), action.position, quant

    def label(self, position: Position, quant: int) -> LabelRecord | None:
        if self.labels is None or not self.quants:
            return None
        return self.labels.get(position, self.quants[quant].name)

    def labelled(self) -> tuple[int, int]:
        """(labelled, all) over every root of every quant, as scanned so far."""
        total = done = 0
        for k in range(len(self.quants)):
            pair = self.index.pairs[k]
            roots = (pair["state"] == State.SCORED) & (pair["kind"] == Kind.ROOT)
            total += int(np.count_nonzero(roots))
        if self.labels is not None:
            done = self.labels.count()
        return done, total

    def evidence(self, facts: RootFacts) -> dict[str, Any]:
        """What a label stands on, with stable names (docs/labels.md); nats."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        floor = self.floor_number
        runs = self.self_runs.get(facts.position)
        return {
            "stream_id": facts.stream_id,
            "ref_id": facts.ref_id,
            "quant_id": facts.quant_id,
            "stream_text": self.vocab.text([facts.stream_id]),
            "ref_text": self.vocab.text([facts.ref_id]),
            "quant_text": self.vocab.text([facts.quant_id]),
            "kld": number(facts.kld),
            "kld_is_lower_bound": bool(facts.bounds & Bound.KLD),
            "margin": number(facts.margin),
            "cost": number(facts.cost),
            "ref_p_ref": number(facts.ref_p_ref),
            "ref_p_quant": number(facts.ref_p_quant),
            "quant_p_ref": number(facts.quant_p_ref),
            "quant_p_quant": number(facts.quant_p_quant),
            "near_tie": facts.near_tie,
            "near_tie_threshold": self.thresholds.near_tie,
            "near_tie_source": self.thresholds.near_tie_source,
            "floor_flips": self.floor_flips(facts.index) if floor is not None else None,
            "self_runs": runs.to_json() if runs is not None else None,
        }

    # ── branches ─────────────────────────────────────────────────────────────────────────────

    def add_server(self, role: str, url: str, build: str = "") -> EngineSlot:
        """Name the server of a role ("ref" or a quant's name); it is not contacted yet.

        `build` names the build of a server that does not know its own. Raises EngineError for
        what is no URL.
        """
        slot = EngineSlot(role, open_engine(url, "ref" if role == "ref" else "quant", build=build))
        self.slots[role] = slot
        return slot

    async def learn_text(self, slot: EngineSlot) -> bool:
        """Take the vocabulary from a connected server, where nothing else gave one.

        True if it did. Raises EngineError.
        """
        if self.vocab or slot.info is None:
            return False
        n_vocab = slot.info.n_vocab or self.ref.shape.n_vocab
        if n_vocab != self.ref.shape.n_vocab:
            return False
        self.vocab = await from_server(
            slot.engine.pieces,
            range(n_vocab),
            slot.engine.url,
            n_vocab=n_vocab,
            bos_id=slot.info.bos_id,
            add_bos=slot.info.add_bos,
        )
        return bool(self.vocab)

    def slot_for(self, engine: str, quant: int) -> EngineSlot | None:
        """The server that plays the `ref` or `quant` engine; with one server, that one."""
        name = self.quants[quant].name if self.quants else ""
        wanted = self.slots.get("ref") if engine == "ref" else self.slots.get(name)
        if wanted is not None:
            return wanted
        usable: Iterable[EngineSlot] = self.slots.values()
        mine = [slot for slot in usable if slot.role in ("ref", name)]
        return mine[0] if mine else None

    def new_branch(self, facts: RootFacts, arm: Arm, slot: EngineSlot) -> Branch:
        """An empty branch of this arm, its prefix as the recording's own model saw it."""
        if slot.info is None:
            raise EngineError(f"{slot.role} server: not connected; {slot.words or 'press c'}")
        prefix = prefix_of(self.ref, facts.position, slot.info.add_bos, slot.info.bos_id)
        start = facts.ref_id if arm.start == "ref" else facts.quant_id
        return Branch(
            position=facts.position,
            arm=arm,
            quant=self.quants[facts.quant].name,
            start_id=start,
            prefix_ids=prefix,
            engine=slot.info.to_json(),
            settings=dict(slot.engine.settings),
            verify=slot.verified.to_json() if slot.verified else None,
        )

    def hint(self, position: Position, quant: int) -> Hint | None:
        """The program's guess at what is wrong with the quant's own branch; never a label."""
        branch = self.recall(position, quant).get("Q·q")
        if branch is None or branch.stop is None:
            return None
        return guess(self.text_before(branch), branch.text, complete=branch.complete)

    def text_before(self, branch: Branch) -> str:
        """The prefix and start token as text: a tool call may have opened there."""
        return self.vocab.text([*branch.prefix_ids, branch.start_id]) if self.vocab else ""

    def remember(self, branch: Branch) -> None:
        """Keep a branch with its root, so that coming back shows it without asking again."""
        key = (branch.position, branch.quant)
        self.branches.setdefault(key, {})[branch.arm.code] = branch

    def recall(self, position: Position, quant: int) -> dict[str, Branch]:
        """The branches of a root by arm code: this session's, else those stored with its label."""
        if not self.quants:
            return {}
        name = self.quants[quant].name
        key = (position, name)
        if key not in self.branches and self.labels is not None:
            stored = [Branch.from_json(data) for data in self.labels.branches_of(position, name)]
            if stored:
                self.branches[key] = {branch.arm.code: branch for branch in stored}
        return self.branches.get(key, {})


def _fold(text: bytes) -> bytes:
    """Lower case without moving any byte: what would change its length stays as it is."""
    if text.isascii():
        return text.lower()
    whole = text.decode("utf-8", "surrogateescape")
    return b"".join(
        low if len(low) == len(raw) else raw
        for raw, low in (
            (c.encode("utf-8", "surrogateescape"), c.lower().encode("utf-8", "surrogateescape"))
            for c in whole
        )
    )
