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
from kldtui.errors import EngineError, LabelFileError
from kldtui.facts import Counts, RootFacts, count_pair, facts_at, is_rollout
from kldtui.floor import SelfRuns
from kldtui.hints import Hint
from kldtui.hints import hint as guess
from kldtui.index import Bound, Index
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
from kldtui.recordings import Recording, open_quant, open_recording
from kldtui.roots import Thresholds, flips_at, near_tie_from_floor
from kldtui.search import find_text
from kldtui.spans import call_tokens
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
    counts: list[Counts] = field(default_factory=list)
    """Of each pair, the floor's last; as `count_anew` left them."""
    _calls: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    rollout: bool | None = None
    """Whether the stream is the reference's own greedy rollout; None while unknown."""
    tokenizer: Path | None = None
    """What the user named to read text with; a server that takes text needs it too."""

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

        def text() -> Vocabulary:
            return find_vocabulary([reference], tokenizer)

        opened = tuple(Quant(name, open_quant(path, reference, text)) for name, path in quants)
        null = open_quant(floor, reference, text) if floor is not None else None
        compared = [quant.recording for quant in opened] + ([null] if null else [])
        vocab = find_vocabulary([reference, *compared], tokenizer)
        if near_tie is not None:
            thresholds = Thresholds(near_tie, "given")
        else:
            thresholds = Thresholds(default_near_tie, "default")
        session = cls(reference, opened, null, vocab, Index(reference, compared), thresholds)
        session.tokenizer = tokenizer
        session.count_anew()
        return session

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
            self.count_anew()

    def chunk_tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[length]."""
        return self.ref.tokens(chunk)

    def flat(self, position: Position) -> int | None:
        return self.index.layout.index(position)

    def scored_before(self, position: Position) -> int:
        """How many scored positions lie before one: the flat index it has or would have."""
        where = self.index.layout.chunk_slice(position.chunk)
        ts = self.index.layout.t(where)
        return int(where.start) + int(np.searchsorted(ts, position.t))

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
        stream = int(self.chunk_tokens(position.chunk)[position.t])
        return facts_at(self.index, i, quant, stream, self.thresholds, self.flips(i))

    def detail(self, position: Position, quant: int, n: int) -> Detail:
        """Both rows of a position, aligned. Raises RecordingChanged."""
        tokens = self.chunk_tokens(position.chunk)
        stream = int(tokens[position.t]) if position.t < tokens.size else None
        other = self.quants[quant].recording.row(position) if self.quants else None
        return align(self.ref.row(position), other, stream, n)

    def listed(self, wanted: Filter, order: Order) -> NDArray[np.int64]:
        """Flat indices of the root list."""
        lookups = Lookups(self._label_key, self._root_text, self._in_call)
        return list_roots(self.index, wanted, order, self.thresholds, self.names, lookups)

    def _label_key(self, i: int, quant: int) -> str | None:
        class_id = self.class_of(self.position(i), quant)
        return BY_ID[class_id].key if class_id in BY_ID else class_id

    def _in_call(self, found: NDArray[np.int64]) -> NDArray[np.bool_]:
        out = np.zeros(found.size, bool)
        for k, i in enumerate(found.tolist()):
            position = self.position(i)
            held = self._calls.get(position.chunk)
            if held is None:
                held = call_tokens(self.vocab, self.chunk_tokens(position.chunk).tolist())
                self._calls[position.chunk] = held
            out[k] = held[position.t]
        return out

    def _root_text(self, i: int, quant: int) -> str:
        facts = self.facts(i, quant)
        return self.vocab.text([facts.ref_id]) + "\n" + self.vocab.text([facts.quant_id])

    def count_anew(self) -> None:
        """Count what the index holds by now: after a step of the scan, or another threshold."""
        self.counts = [
            count_pair(self.index, k, self.thresholds) for k in range(len(self.index.pairs))
        ]
        self.rollout = is_rollout(self.index)

    def search(self, needle: str, start: int = 0) -> Iterator[tuple[int, list[Position]]]:
        """Find text in the stream, as `find_text` does."""
        return find_text(self.ref, self.vocab, needle, start)

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

    def skip(self, facts: RootFacts) -> None:
        """Pass a root by without a label, so that a review resumes behind it, and undo returns."""
        if self.labels is not None:
            self.labels.skip(facts.position, self.quants[facts.quant].name)

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
        """(labelled, all) over every root of every quant, as counted last."""
        total = sum(counts.roots for counts in self.counts[: len(self.quants)])
        return (self.labels.count() if self.labels is not None else 0), total

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
        side: Literal["ref", "quant"] = "ref" if role == "ref" else "quant"
        engine = open_engine(url, side, build=build, tokenizer=self.tokenizer)
        slot = EngineSlot(role, engine)
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
        """An empty branch of this arm, its prefix as the recording's own model saw it.

        Where verification found that the recording agrees with another BOS rule than the
        server's, that rule holds.
        """
        if slot.info is None:
            raise EngineError(f"{slot.role} server: not connected; {slot.words or 'press c'}")
        checked = slot.verified
        by_answers = checked is not None and checked.verdict == "bos"
        prefix = prefix_of(
            self.ref,
            facts.position,
            checked.add_bos if checked is not None and by_answers else slot.info.add_bos,
            slot.info.bos_id,
            own_rule=not by_answers,
        )
        start = facts.ref_id if arm.start == "ref" else facts.quant_id
        return Branch(
            position=facts.position,
            arm=arm,
            quant=self.quants[facts.quant].name,
            start_id=start,
            start_data=self.vocab.piece(start) or b"",
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
