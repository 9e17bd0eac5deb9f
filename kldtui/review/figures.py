"""The recordings of a review, and every figure of them.

Knows: recordings, their index, the vocabulary, thresholds.
Must not know: labels, engines, branches; Textual, screens, keys; formats or files by name.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kldtui.detail import Detail, align
from kldtui.errors import KldtuiError, RecordingError
from kldtui.facts import Brief, Counts, RootFacts, brief_at, count_pair, facts_at, is_rollout
from kldtui.index import Index, keeper
from kldtui.index.absent import NOT_HERE
from kldtui.index.layout import EvenLayout
from kldtui.index.scanfile import ScanFile, is_scan_file
from kldtui.position import Position
from kldtui.recordings import Recording, open_quant, open_recording
from kldtui.recordings.base import chunk_tags
from kldtui.report import Runs, runs_of
from kldtui.roots import Thresholds, is_root, near_tie_from_floor, stands_at
from kldtui.search import find_text
from kldtui.spans import CallFinder
from kldtui.vocab import Vocabulary, find_vocabulary

_TOKENS_KEPT = 64
_CALLS_AT_ONCE = 1 << 16
LONG = 200_000
"""Positions beyond which counting or listing them takes longer than a frame of the screen."""


@dataclass(frozen=True, slots=True)
class Quant:
    """A quant of this review: its name on screen and in labels, and its recording."""

    name: str
    recording: Recording


@dataclass
class Figures:
    """Recordings opened together, and what is counted of them. Build it with `open`."""

    ref: Recording
    quants: tuple[Quant, ...]
    floor: Recording | None
    vocab: Vocabulary
    index: Index
    thresholds: Thresholds
    counts: list[Counts] = field(default_factory=list)
    """Of each pair, the floor's last; as `count_anew` left them."""
    rollout: bool | None = None
    """Whether the stream is the reference's own greedy rollout; None while unknown."""
    tokenizer: Path | None = None
    """What the user named to read text with, or the tokenizer.json beside the reference; a server
    that takes text needs it too."""
    _tokens: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _calls: dict[int, NDArray[np.uint8] | None] = field(default_factory=dict)
    """By chunk, a bit a token; a long stream has many."""
    _calls_text: Vocabulary | None = None
    _finder: tuple[Vocabulary, CallFinder] | None = None
    _runs: Runs | None = None
    _counted_n: int = 0

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
    ) -> Self:
        """Open recordings, or an index file in their place, and find a vocabulary.

        Raises RecordingError or VocabularyError.
        """
        if ref.is_file() and is_scan_file(ref):
            if quants or floor is not None:
                raise KldtuiError(
                    f"{ref}: is an index file, with quants of its own; name no others"
                )
            index, reference, opened, null = _absent(ref)
        else:
            index, reference, opened, null = _here(ref, quants, floor, tokenizer)
        compared = [quant.recording for quant in opened] + ([null] if null else [])
        with ExitStack() as unwanted:
            unwanted.callback(index.close)
            for recording in (reference, *compared):
                unwanted.callback(recording.close)
            vocab = find_vocabulary([reference, *compared], tokenizer)
            unwanted.pop_all()
        if near_tie is not None:
            thresholds = Thresholds(near_tie, "given")
        else:
            thresholds = Thresholds(default_near_tie, "default")
        session = cls(reference, opened, null, vocab, index, thresholds)
        beside = ref.parent / "tokenizer.json"
        session.tokenizer = tokenizer or (beside if beside.is_file() else None)
        if session.is_long:
            session.counts = [Counts(0, 0, 0, 0, 0, 0) for _ in session.index.pairs]
        else:
            session.count_anew()
        return session

    def close(self) -> None:
        """Save the index, and close the files."""
        self.index.close()
        for recording in (self.ref, *(quant.recording for quant in self.quants)):
            recording.close()
        if self.floor is not None:
            self.floor.close()

    @property
    def is_long(self) -> bool:
        """Whether the stream is so long that counting and listing are work for the background."""
        return self.index.layout.n > LONG

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(quant.name for quant in self.quants)

    @property
    def floor_number(self) -> int | None:
        """The number of the null recording among `index.pairs`."""
        return len(self.quants) if self.floor is not None else None

    def settle_thresholds(self) -> None:
        """After the scan's first pass: take the near-tie threshold from the floor, where one was
        recorded; `count_anew` is due then."""
        if self.floor_number is None or self.thresholds.near_tie_source != "default":
            return
        measured = near_tie_from_floor(self.index, self.floor_number)
        if math.isfinite(measured):
            self.thresholds = Thresholds(measured, "floor")

    @property
    def runs(self) -> Runs:
        """The stretches in which a first flip counts: the reference's turns, else its chunks."""
        if self._runs is None:
            self._runs = runs_of(self.index, self.ref)
        return self._runs

    @property
    def has_turns(self) -> bool:
        """Whether the reference says its turns. Long streams have chunks that are all alike, and
        say none: not every chunk has to be looked at."""
        return not isinstance(self.index.layout, EvenLayout) and self.runs.unit == "turn"

    def run_of(self, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the run that each flat index lies in, or that ended before it."""
        if not self.has_turns:
            return self.index.layout.chunks(found)
        starts = np.array([start for start, _ in self.runs.stretches], np.int64)
        return np.searchsorted(starts, found, side="right")

    def first_flips(self, chunk: int, quant: int) -> set[int]:
        """Flat indices in a chunk where a run has its first root of a quant.

        Only where that means something: on turns, and on the reference's own rollout.
        """
        if self.rollout is not True and not self.has_turns:
            return set()
        where = self.index.layout.chunk_slice(chunk)
        roots = np.flatnonzero(is_root(self.index, quant, where)) + where.start
        _, first = np.unique(self.run_of(roots), return_index=True)
        return {int(roots[k]) for k in first}

    def tag(self, position: Position) -> str:
        """What a run says the token is part of (user, assistant, call, …); empty if nothing."""
        return next(
            (
                name
                for name, start, stop in chunk_tags(self.ref, position.chunk)
                if start <= position.t < stop
            ),
            "",
        )

    def chunk_tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[length]; not to be written to.

        Raises RecordingChanged, but not for chunks that were lately asked for.
        """
        with self._changing:
            held = self._tokens.pop(chunk, None)
            if held is not None:
                self._tokens[chunk] = held  # now the last to go
                return held
        held = self.ref.tokens(chunk)
        with self._changing:
            while len(self._tokens) >= _TOKENS_KEPT:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[chunk] = held
        return held

    def flat(self, position: Position) -> int | None:
        return self.index.layout.index(position)

    def scored_before(self, position: Position) -> int:
        """How many scored positions lie before one: the flat index it has or would have."""
        return self.index.layout.before(position)

    def position(self, i: int) -> Position:
        return self.index.layout.position(i)

    def flips(self, i: int) -> tuple[int, ...]:
        """The quants (never the floor) that flip at flat index `i`."""
        return tuple(k for k, flips in enumerate(self.stands(i)) if flips)

    def stands(self, i: int) -> tuple[bool | None, ...]:
        """Of each quant, whether it flips at a flat index; None where that is not known."""
        return stands_at(self.index, i)[: len(self.quants)]

    def floor_flips(self, i: int) -> bool:
        """Whether the reference's own null recording flips here too."""
        return self.floor_number is not None and bool(stands_at(self.index, i)[self.floor_number])

    def facts(self, i: int, quant: int) -> RootFacts:
        """All the index holds of flat position `i` for quant number `quant`."""
        position = self.position(i)
        stream = int(self.chunk_tokens(position.chunk)[position.t])
        return facts_at(self.index, i, quant, stream, self.thresholds, self.flips(i))

    def brief(self, i: int, quant: int) -> Brief:
        """What a row of a list shows of flat position `i` for quant number `quant`."""
        return brief_at(self.index, i, quant, self.thresholds)

    def facts_of(self, position: Position, quant: int) -> RootFacts:
        """The same by position. Raises KldtuiError where it is not scored."""
        i = self.flat(position)
        if i is None:
            raise KldtuiError(f"{position} is not recorded")
        return self.facts(i, quant)

    def detail(self, position: Position, quant: int, n: int) -> Detail:
        """Both rows of a position, aligned; without rows where only the index is here.

        Raises RecordingChanged.
        """
        tokens = self.chunk_tokens(position.chunk)
        stream = int(tokens[position.t]) if position.t < tokens.size else None
        other = self.quants[quant].recording.row(position) if self.quants else None
        found = align(self.ref.row(position), other, stream, n)
        if self.index.absent:
            return dataclasses.replace(found, ref_words=NOT_HERE, quant_words="")
        return found

    def _calls_in(self, chunk: int) -> NDArray[np.bool_] | None:
        """bool[length]: what a run tags as calls, else what looks like one in the text.

        None where nothing does.
        """
        tokens = self.ref.tokens(chunk)  # of every chunk: what is on screen is to stay held
        tags = chunk_tags(self.ref, chunk)
        if not tags:
            if self._finder is None or self._finder[0] is not self.vocab:
                self._finder = (self.vocab, CallFinder(self.vocab))
            return self._finder[1].inside(tokens)
        inside = np.zeros(len(tokens), bool)
        for name, start, stop in tags:
            inside[start:stop] |= name == "call"
        return inside

    def _in_call(self, found: NDArray[np.int64]) -> NDArray[np.bool_]:
        out = np.zeros(found.size, bool)
        layout = self.index.layout
        if self._calls_text is not self.vocab:  # what looks like a call without text may be none
            self._calls_text, self._calls = self.vocab, {}
        for begin in range(0, found.size, _CALLS_AT_ONCE):
            part = found[begin : begin + _CALLS_AT_ONCE]
            chunks, ts = layout.chunks(part), layout.ts(part)
            order = np.argsort(chunks, kind="stable")
            numbers, starts = np.unique(chunks[order], return_index=True)
            for chunk, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
                if chunk not in self._calls:
                    inside = self._calls_in(chunk)
                    self._calls[chunk] = None if inside is None else np.packbits(inside)
                held = self._calls[chunk]
                if held is not None:
                    at = ts[rows]
                    out[begin + rows] = held[at >> 3] >> (7 - (at & 7)) & 1
        return out

    def _token_text(self, token: int) -> str:
        return self.vocab.text([token])

    def count_anew(self) -> None:
        """Count what the index holds by now: after a step of the scan, or another threshold."""
        if self._runs is not None and self._counted_n != self.index.layout.n:
            self._runs = None  # the recording has grown
        self._counted_n = self.index.layout.n
        self.counts = [
            count_pair(self.index, k, self.thresholds) for k in range(len(self.index.pairs))
        ]
        self.rollout = is_rollout(self.index)

    def search(self, needle: str, start: int = 0) -> Iterator[tuple[int, list[Position]]]:
        """Find text in the stream, as `find_text` does."""
        return find_text(self.ref, self.vocab, needle, start)


Opened = tuple[Index, Recording, tuple[Quant, ...], Recording | None]


def _here(
    ref: Path, quants: Sequence[tuple[str, Path]], floor: Path | None, tokenizer: Path | None
) -> Opened:
    """Recordings, and what is saved of the index over them; none stays open if one cannot be."""
    with ExitStack() as unwanted:
        reference = open_recording(ref)
        unwanted.callback(reference.close)
        if not reference.shape.n_chunk:
            raise RecordingError(f"{ref}: holds no chunks, so there is nothing to review yet")

        def opened(path: Path) -> Recording:
            found = open_quant(path, reference, lambda: find_vocabulary([reference], tokenizer))
            unwanted.callback(found.close)
            return found

        named = tuple(Quant(name, opened(path)) for name, path in quants)
        null = opened(floor) if floor is not None else None
        compared = [quant.recording for quant in named] + ([null] if null else [])
        index = Index(reference, compared, keeper())
        unwanted.pop_all()
    return index, reference, named, null


def _absent(path: Path) -> Opened:
    """An index file: the recordings are elsewhere."""
    file = ScanFile.open(path)
    index, (reference, *others) = file.index(keeper())
    named = list(zip(file.names, others, strict=True))
    null = named.pop()[1] if file.floor else None
    return index, reference, tuple(Quant(name, other) for name, other in named), null
