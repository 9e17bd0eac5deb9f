"""One pass over a reference and its quants: compact columns, a row a scored position.

Knows: recordings, and the order in which their positions are read.
Must not know: how rows are decoded, text, screens, or what is done with the columns.

`scan` fills the columns block by block and may run in a thread while others read them; it takes
no lock. An entry's `state` is written last, so an entry that is not PENDING is whole.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import (
    PAIR_DTYPE,
    REF_DTYPE,
    Bound,
    Columns,
    Kind,
    RefBlock,
    State,
    analyse_pair,
    analyse_ref,
    missing_pair,
)
from kldtui.errors import StreamMismatch
from kldtui.position import Position
from kldtui.recordings.base import Recording, Scratch

__all__ = [
    "PAIR_DTYPE",
    "REF_DTYPE",
    "Bound",
    "Index",
    "Kind",
    "Layout",
    "Progress",
    "State",
    "check_streams",
]

_BLOCK_BYTES = 1 << 20
"""Bytes of one recording in a block: what stays in a core's cache."""
_YIELD_SECONDS = 0.15


class Layout:
    """The scored positions of a recording, in order: flat index and position, both ways."""

    def __init__(self, ts: Sequence[NDArray[np.int32]]) -> None:
        """ts: for each chunk its scored t, ascending."""
        lengths = np.array([len(t) for t in ts], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._t = np.concatenate([*ts, np.empty(0, np.int32)]).astype(np.int32)
        self.n = int(self._starts[-1])
        self.n_chunk = len(ts)

    @classmethod
    def of(cls, recording: Recording) -> Layout:
        return cls([recording.scored(chunk) for chunk in range(recording.shape.n_chunk)])

    def index(self, position: Position) -> int | None:
        """The flat index of a position, None where it is not scored."""
        if not 0 <= position.chunk < self.n_chunk:
            return None
        where = self.chunk_slice(position.chunk)
        i = where.start + int(np.searchsorted(self._t[where], position.t))
        return i if i < where.stop and self._t[i] == position.t else None

    def position(self, i: int) -> Position:
        """The position of a flat index. Raises IndexError outside 0 <= i < n."""
        if not 0 <= i < self.n:
            raise IndexError(f"{i} of {self.n} positions")
        chunk = int(np.searchsorted(self._starts, i, side="right")) - 1
        return Position(chunk, int(self._t[i]))

    def chunk_slice(self, chunk: int) -> slice:
        """The flat indices of a chunk."""
        return slice(int(self._starts[chunk]), int(self._starts[chunk + 1]))

    def t(self, where: slice) -> NDArray[np.int32]:
        """The t of a run of flat indices, int32; not to be written to."""
        return self._t[where]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scan is; `first:last` is the flat range that was filled since the one before.

    bytes_per_s counts records of full recordings; it is 0 where all are top-N runs.
    """

    done: int
    total: int
    bytes_per_s: float
    seconds_left: float | None
    first: int
    last: int


def check_streams(ref: Recording, quant: Recording) -> int:
    """How many chunks two recordings share.

    Raises StreamMismatch naming the first difference: a number of the header with both values, or
    the first chunk token that differs, with both ids.
    """
    names = f"{quant.path.name} is not of the stream of {ref.path.name}"
    for field in ("n_ctx", "n_vocab"):
        mine, theirs = getattr(ref.shape, field), getattr(quant.shape, field)
        if mine != theirs and 0 not in (mine, theirs):
            raise StreamMismatch(f"{names}: {field} is {theirs}, not {mine}")
    common = min(ref.shape.n_chunk, quant.shape.n_chunk)
    for chunk in range(common):
        mine, theirs = ref.tokens(chunk), quant.tokens(chunk)
        both = min(len(mine), len(theirs))
        different = np.flatnonzero(mine[:both] != theirs[:both])
        if different.size:
            t = int(different[0])
            raise StreamMismatch(
                f"{names}: token {t} of chunk {chunk} is {theirs[t]}, not {mine[t]}"
            )
        if len(mine) != len(theirs):
            raise StreamMismatch(
                f"{names}: chunk {chunk} has {len(theirs)} tokens, not {len(mine)}"
            )
    return common


class Index:
    """Columns over the scored positions of a reference, one set for it and one for each quant."""

    def __init__(self, ref: Recording, quants: Sequence[Recording]) -> None:
        """Allocate the columns, all PENDING. Raises StreamMismatch."""
        self._recording = ref
        self._quants = list(quants)
        self.common_chunks = [check_streams(ref, quant) for quant in quants]
        self.layout = Layout.of(ref)
        self.ref: Columns = np.zeros(self.layout.n, REF_DTYPE)
        self.pairs: list[Columns] = [np.zeros(self.layout.n, PAIR_DTYPE) for _ in quants]
        self.notes = [
            _notes(ref, quant, common)
            for quant, common in zip(quants, self.common_chunks, strict=True)
        ]

    @property
    def complete(self) -> bool:
        """Whether every position has been scanned."""
        return self._first_pending() is None

    def _first_pending(self) -> int | None:
        firsts = []
        for columns in (self.ref, *self.pairs):
            pending = columns["state"] == State.PENDING
            if pending.any():
                firsts.append(int(pending.argmax()))
        return min(firsts) if firsts else None

    def scan(self, cancel: threading.Event | None = None) -> Iterator[Progress]:
        """Fill what is pending, in order; stops after a block once `cancel` is set.

        Raises RecordingChanged if a file is cut meanwhile; what was filled stays.
        """
        start = self._first_pending()
        if start is None:
            return
        block = max(1, _BLOCK_BYTES // (2 * max(1, self._recording.shape.n_vocab)))
        scratches = [Scratch() for _ in range(1 + len(self._quants))]
        full = [recording.full for recording in (self._recording, *self._quants)]
        row_bytes = 2 * self._recording.shape.n_vocab * sum(full)
        began = told = time.monotonic()
        first = done = start
        while done < self.layout.n:
            if cancel is not None and cancel.is_set():
                break
            chunk = self.layout.position(done).chunk
            where = self.layout.chunk_slice(chunk)
            stop = min(where.stop, done + block)
            self._fill(chunk, done, stop, scratches)
            done = stop
            now = time.monotonic()
            if now - told >= _YIELD_SECONDS:
                told = now
                yield self._progress(start, first, done, now - began, row_bytes)
                first = done
        if done > first:
            yield self._progress(start, first, done, time.monotonic() - began, row_bytes)

    def _progress(
        self, start: int, first: int, done: int, seconds: float, row_bytes: int
    ) -> Progress:
        rate = (done - start) / seconds if seconds > 0 else 0.0
        left = (self.layout.n - done) / rate if rate else None
        return Progress(done, self.layout.n, rate * row_bytes, left, first, done)

    def scan_position(self, position: Position) -> None:
        """Fill one position now; nothing where it is not scored."""
        i = self.layout.index(position)
        if i is not None and self._pending(i):
            self._fill(position.chunk, i, i + 1, [Scratch() for _ in range(1 + len(self._quants))])

    def _pending(self, i: int) -> bool:
        return any(columns["state"][i] == State.PENDING for columns in (self.ref, *self.pairs))

    def _fill(self, chunk: int, first: int, last: int, scratches: Sequence[Scratch]) -> None:
        """Fill the flat range `first:last`, all of one chunk."""
        start = self.layout.chunk_slice(chunk).start
        ts = self.layout.t(slice(first, last))
        tokens = self._recording.tokens(chunk)
        rows = self._recording.rows(chunk, first - start, last - start, scratches[0])
        block = analyse_ref(rows, tokens[ts])
        _store(self.ref, first, block.columns)
        for number, quant in enumerate(self._quants):
            self._fill_pair(number, quant, chunk, first, block, ts, scratches[1 + number])

    def _fill_pair(
        self,
        number: int,
        quant: Recording,
        chunk: int,
        first: int,
        block: RefBlock,
        ts: NDArray[np.int32],
        scratch: Scratch,
    ) -> None:
        pair = self.pairs[number]
        held = quant.scored(chunk) if chunk < self.common_chunks[number] else ts[:0]
        _, mine, theirs = np.intersect1d(ts, held, assume_unique=True, return_indices=True)
        missing = np.ones(len(ts), bool)
        missing[mine] = False
        pair[first + np.flatnonzero(missing)] = missing_pair()
        for a, b in _runs(mine, theirs):
            rows = quant.rows(chunk, int(theirs[a]), int(theirs[b - 1]) + 1, scratch)
            at = int(mine[a])
            _store(pair, first + at, analyse_pair(block.part(at, at + b - a), rows))


def _store(columns: Columns, first: int, new: Columns) -> None:
    """Write entries, their state last."""
    where = columns[first : first + len(new)]
    state = new["state"].copy()
    pending = new.copy()
    pending["state"] = where["state"]
    where[:] = pending
    where["state"] = state


def _runs(mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges over which both index arrays go up by one."""
    if not mine.size:
        return []
    breaks = np.flatnonzero((np.diff(mine) != 1) | (np.diff(theirs) != 1)) + 1
    edges = [0, *breaks.tolist(), int(mine.size)]
    return list(itertools.pairwise(edges))


def _notes(ref: Recording, quant: Recording, common: int) -> list[str]:
    """What to know before reading a comparison, a sentence each."""
    notes = []
    if ref.shape.n_chunk != common:
        notes.append(f"compared over {common} of {ref.shape.n_chunk} chunks")
    elif quant.shape.n_chunk != common:
        notes.append(f"compared over {common} of the quant's {quant.shape.n_chunk} chunks")
    for name, recording in ((ref.path.name, ref), (quant.path.name, quant)):
        notes += [f"{name}: {problem}" for problem in recording.problems]
    return notes
