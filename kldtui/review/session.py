"""One review: recordings, index, vocabulary, engines and labels, as one thing to ask.

Knows: how the parts of a review belong together; every figure a screen shows comes from here.
Must not know: Textual, screens, keys; formats, sockets or files by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.branching import (
    DEFAULT_LENGTH,
    QQ,
    RECORDED,
    RR,
    Arm,
    Branch,
    Place,
    Start,
    default_arms,
    follow_stream,
    prefix_of,
)
from kldtui.engines import Engine, open_engine
from kldtui.errors import EngineError, KldtuiError, LabelFileError, RecordingError
from kldtui.facts import RootFacts
from kldtui.floor import SelfRuns
from kldtui.hints import Hint
from kldtui.hints import hint as guess
from kldtui.index import Bound, State
from kldtui.labels import (
    BY_ID,
    BY_KEY,
    LabelRecord,
    LabelStore,
    ReviewIdentity,
    default_path,
)
from kldtui.position import Position
from kldtui.recorder.free import own_branch
from kldtui.review.branch_log import BranchLog
from kldtui.review.figures import Figures
from kldtui.review.listing import Filter, Lookups, Order, list_roots
from kldtui.review.shelf import Shelf
from kldtui.review.slots import EngineSlot
from kldtui.vocab import from_server


@dataclass
class Session(Figures):
    """Everything a screen is given. Build it with `Session.open`."""

    labels: LabelStore | None = None
    slots: dict[str, EngineSlot] = field(default_factory=dict)
    shelf: Shelf = field(default_factory=Shelf)
    branch_tokens: int = DEFAULT_LENGTH
    """How many tokens a branch gets at a time."""
    self_runs: dict[Position, SelfRuns] = field(default_factory=dict)
    """What the reference said against itself, at the roots where it was asked."""
    _hint: tuple[tuple[object, ...], Hint | None] = ((), None)

    def close(self) -> None:
        """Save where the cursor stood, and close the files. Raises LabelFileError."""
        try:
            if self.labels is not None:
                self.labels.close()
        finally:
            super().close()

    # ── labels ───────────────────────────────────────────────────────────────────────────────

    def listed(self, wanted: Filter, order: Order) -> NDArray[np.int64]:
        """Flat indices of the root list."""
        lookups = Lookups(
            self._label_keys,
            self._token_text,
            self._in_call,
            self.run_of,
            self._branched,
            self.floor_number,
        )
        return list_roots(self.index, wanted, order, self.thresholds, self.names, lookups)

    def _label_keys(self, quant: int) -> dict[int, str]:
        found = self.labels.classes(self.quants[quant].name) if self.labels is not None else {}
        flat = ((self.flat(position), class_id) for position, class_id in found.items())
        return {
            i: BY_ID[class_id].key if class_id in BY_ID else class_id
            for i, class_id in flat
            if i is not None
        }

    def _branched(self, quant: int) -> set[int]:
        """The flat indices at which a quant has branches: made now, labelled, made ahead."""
        name = self.quants[quant].name
        found = self.shelf.positions(name)
        if self.labels is not None:
            found |= {r.position for r in self.labels.records(name) if r.branches}
        return {i for i in map(self.flat, found) if i is not None}

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
        told = None
        if hint is not None:
            told = {"class": "malformed_tool_call", "text": hint.words, "source": hint.kind}
        self.labels.set_hint(facts.position, name, told)
        judged = [_as_it_stood(b) for b in self.recall(facts.position, facts.quant).values()]
        for branch in judged:
            self.shelf.put(branch)
        branches = [branch.to_json() for branch in judged]
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
        if self.labels is None:
            return 0, total
        return sum(map(self.labels.count, self.names)), total

    def evidence(self, facts: RootFacts) -> dict[str, Any]:
        """What a label stands on, with stable names (docs/labels.md); nats."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        floor = self.floor_number
        runs = self.self_run(facts.position, facts.quant)
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
            "ref_p_quant_is_bound": bool(facts.bounds & Bound.REF_P_QUANT),
            "quant_p_ref": number(facts.quant_p_ref),
            "quant_p_ref_is_bound": bool(facts.bounds & Bound.QUANT_P_REF),
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
        side: Literal["ref", "quant"] = "quant" if role in self.names else "ref"
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

    def add_engine(self, role: str, engine: Engine) -> EngineSlot:
        """Give a role an engine that kldtui runs itself; it is not started yet."""
        slot = self.slots[role] = EngineSlot(role, engine)
        return slot

    @property
    def context_needed(self) -> int:
        """Tokens that an engine must hold: the longest prefix, and a branch that is made longer."""
        room = max(1024, 4 * self.branch_tokens)
        return -(-(self.ref.shape.n_ctx + room) // 256) * 256

    async def close_engines(self) -> None:
        """End the engines that kldtui runs itself, and the connections to others."""
        closing = (slot.engine.close() for slot in self.slots.values())
        await asyncio.gather(*closing, return_exceptions=True)

    def slot_for(self, engine: str, quant: int) -> EngineSlot | None:
        """The engine that plays the `ref` or `quant` side."""
        name = self.quants[quant].name if self.quants else ""
        return self.slots.get("ref" if engine == "ref" else name)

    def arms(self, quant: int) -> tuple[Arm, ...]:
        """The arms that are made of a root by default, with the engines that are there."""
        ref, other = (self.slot_for(side, quant) is not None for side in ("ref", "quant"))
        return default_arms(ref, other)

    def place(self, position: Position, quant: int) -> Place:
        """Where branches start at a position of the stream, whether or not it is scored."""
        starts: dict[Start, int] = {}
        tokens = self.chunk_tokens(position.chunk)
        i = self.flat(position)
        if i is not None and self.quants:
            pair = self.index.pairs[quant]
            if pair["state"][i] == State.SCORED:
                starts["ref"] = int(self.index.ref["ref_id"][i])
                starts["quant"] = int(pair["quant_id"][i])
        if 0 < position.t < tokens.size:
            starts["stream"] = int(tokens[position.t])
        return Place(position, quant, starts)

    def prefix(self, position: Position, slot: EngineSlot) -> list[int]:
        """The ids before a position as a connected engine is sent them.

        Where verification found that the recording agrees with another BOS rule than the
        server's, that rule holds. Raises EngineError where the slot is not connected.
        """
        if slot.info is None:
            raise EngineError(f"{slot.role} server: not connected; {slot.words or 'press c'}")
        checked = slot.verified
        by_answers = checked is not None and checked.verdict == "bos"
        return prefix_of(
            self.ref,
            position,
            checked.add_bos if checked is not None and by_answers else slot.info.add_bos,
            slot.info.bos_id,
            own_rule=not by_answers,
        )

    def new_branch(self, place: Place, arm: Arm, slot: EngineSlot) -> Branch:
        """An empty branch of this arm, its prefix as the recording's own model saw it.

        Raises EngineError where the slot is not connected, KldtuiError where the place has no
        such token.
        """
        if not place.has(arm):
            raise KldtuiError(f"{place.position}: no {arm.start} token is known here")
        prefix = self.prefix(place.position, slot)
        start = place.starts[arm.start]
        verify = slot.verified.to_json() if slot.verified else None
        if verify is not None and slot.dictionary is not None:
            verify["dictionary"] = slot.dictionary
        return Branch(
            position=place.position,
            arm=arm,
            quant=self.quants[place.quant].name,
            start_id=start,
            start_data=self.vocab.piece(start) or b"",
            parent=place.parent,
            prefix_ids=[*prefix, *place.tail],
            engine=slot.info.to_json() if slot.info is not None else {},
            settings=dict(slot.engine.settings),
            verify=verify,
        )

    def hint(self, position: Position, quant: int) -> Hint | None:
        """The program's guess at what is wrong with the quant's own branch; never a label."""
        branch = self.recall(position, quant).get("Q·q")
        if branch is None or branch.stop is None:
            return None
        stands = (branch.id, len(branch.tokens), branch.stop, self.vocab)
        if self._hint[0] != stands:  # a long branch is read through once, not at each key
            found = guess(self.text_before(branch), branch.text, complete=branch.complete)
            self._hint = (stands, found)
        return self._hint[1]

    def text_before(self, branch: Branch) -> str:
        """The prefix and start token as text: a tool call may have opened there."""
        return self.vocab.text([*branch.prefix_ids, branch.start_id]) if self.vocab else ""

    def open_branches(self, path: Path) -> BranchLog:
        """Take in branches that were made ahead (`kldtui branch -o`). Raises KldtuiError."""
        log = BranchLog.open(path, self.ref, self.names)
        self.shelf.logs.append(log)
        return log

    def remember(self, branch: Branch) -> None:
        """Keep a branch with its root, so that coming back shows it without asking again."""
        self.shelf.put(branch)

    def keep_grown(self, branch: Branch) -> None:
        """A branch has come to stand: where a label was given on it meanwhile, keep it whole."""
        if self.labels is None:
            return
        if self.shelf.find(branch.position, branch.quant, branch.id) is not branch:
            return  # judged as it stood before
        record = self.labels.get(branch.position, branch.quant)
        if record is not None and any(each.get("id") == branch.id for each in record.branches):
            self.labels.keep_branch(branch.to_json())

    def recall(self, position: Position, quant: int) -> dict[str, Branch]:
        """The branches of a root by key (`Branch.key`): of this session, stored with its label,
        made ahead; where the stream is the reference's own rollout, R·r without any server, and Q·q
        where the quant's recording is rollouts of its own that part here. Of a recording that
        cannot be read any more there is none: labels are given without."""
        if not self.quants:
            return {}
        name, labels = self.quants[quant].name, self.labels

        def stored() -> list[dict[str, Any]]:
            return labels.branches_of(position, name) if labels is not None else []

        held = self.shelf.of(position, name, stored)
        starts = self.place(position, quant).starts
        fitting = {key: branch for key, branch in held.items() if _fits(branch, starts)}
        if self.rollout and RR.code not in fitting and starts.get("ref") == starts.get("stream"):
            with contextlib.suppress(RecordingError):
                branch = self._own_rollout(position, quant, starts)
                if branch is not None:
                    self.remember(branch)
                    fitting = {RR.code: branch, **fitting}
        if QQ.code not in fitting:
            with contextlib.suppress(RecordingError):
                own = own_branch(self.quants[quant].recording, position, name)
                if own is not None and _fits(own, starts):
                    self.remember(own)
                    fitting = {**fitting, QQ.code: own}
        return fitting

    def _own_rollout(
        self, position: Position, quant: int, starts: Mapping[Start, int]
    ) -> Branch | None:
        """R·r at a root of the reference's own rollout: the stream from there on."""
        if "ref" not in starts or not self.facts_of(position, quant).is_root:
            return None
        branch = Branch(
            position=position,
            arm=RR,
            quant=self.quants[quant].name,
            start_id=starts["ref"],
            start_data=self.vocab.piece(starts["ref"]) or b"",
            prefix_ids=prefix_of(self.ref, position, self.vocab.add_bos, self.vocab.bos_id),
            engine={**self.ref.engine, "kind": RECORDED, "model": self.ref.path.name},
            settings={"source": "the stream: the reference's own greedy rollout"},
        )
        self.lengthen(branch)
        return branch

    def lengthen(self, branch: Branch) -> int:
        """Continue a branch that is the stream itself; gives by how many tokens."""
        chunk = branch.position.chunk

        def logp(t: int) -> float | None:
            i = self.flat(Position(chunk, t))
            value = float(self.index.ref["ref_stream"][i]) if i is not None else math.nan
            return value if math.isfinite(value) else None

        return follow_stream(
            branch,
            self.chunk_tokens(chunk).tolist(),
            self.branch_tokens,
            piece=self.vocab.piece,
            logp=logp,
            eog_ids=self.vocab.eog_ids,
            before=self.text_before(branch),
        )

    def borrow(self, place: Place, arm: Arm) -> Branch | None:
        """The same branch of another quant's root, as this root's own; None if there is none."""
        branch = self.shelf.borrowed(place, arm, self.quants[place.quant].name)
        if branch is not None:
            self.remember(branch)
        return branch

    def keep_self_run(self, facts: RootFacts, runs: SelfRuns) -> None:
        """Keep what the reference said against itself; with the label too, where it is one's own.

        Raises LabelFileError as `set_label`.
        """
        self.self_runs[facts.position] = runs
        labels, record = self.labels, self.label(facts.position, facts.quant)
        if labels is None or record is None or record.class_id is None:
            return
        if record.reviewer == labels.reviewer:
            name, reached = self.quants[facts.quant].name, record.reached
            evidence = self.evidence(facts)
            labels.set(facts.position, name, record.class_id, evidence, reached=reached)

    def self_run(self, position: Position, quant: int) -> SelfRuns | None:
        """What the reference said against itself at a root: now, or as stored with its label."""
        found = self.self_runs.get(position)
        record = self.label(position, quant)
        if found is not None or record is None:
            return found
        return SelfRuns.from_json(record.evidence.get("self_runs"))


def _fits(branch: Branch, starts: Mapping[Start, int]) -> bool:
    """Whether a branch starts with the token that is here: a recording may have been made anew."""
    here = starts.get(branch.arm.start)
    return branch.parent is not None or here is None or here == branch.start_id


def _as_it_stood(branch: Branch) -> Branch:
    """The branch a label was given on: one that still grew was judged, and ends, as it stood."""
    if branch.stop is not None:
        return branch
    return dataclasses.replace(branch, tokens=list(branch.tokens), stop="cancelled")
