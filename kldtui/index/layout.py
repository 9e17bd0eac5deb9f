"""Flat index and position, both ways.

Knows: which positions of a stream are scored, and in what order.
Must not know: recordings' rows, columns, or what is done with positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kldtui.position import Position
from kldtui.recordings.base import Recording, as_even


class Layout:
    """The scored positions of a recording, in order: flat index and position, both ways."""

    n: int
    n_chunk: int

    def __init__(self, ts: Sequence[NDArray[np.int32]]) -> None:
        """ts: for each chunk its scored t, ascending."""
        lengths = np.array([len(t) for t in ts], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._t = np.concatenate([*ts, np.empty(0, np.int32)]).astype(np.int32)
        self.n = int(self._starts[-1])
        self.n_chunk = len(ts)

    @staticmethod
    def of(recording: Recording) -> Layout:
        """By arithmetic where all chunks are alike, else by looking at each."""
        known = getattr(recording, "layout", None)
        if isinstance(known, Layout):
            return known
        even = as_even(recording)
        if even is not None:
            return EvenLayout(even.first_t, even.per_chunk, even.records, recording.shape.n_chunk)
        return Layout([recording.scored(chunk) for chunk in range(recording.shape.n_chunk)])

    def index(self, position: Position) -> int | None:
        """The flat index of a position, None where it is not scored."""
        if not 0 <= position.chunk < self.n_chunk:
            return None
        where = self.chunk_slice(position.chunk)
        i = where.start + int(np.searchsorted(self._t[where], position.t))
        return i if i < where.stop and self._t[i] == position.t else None

    def before(self, position: Position) -> int:
        """How many scored positions lie before one: the flat index it has or would have."""
        where = self.chunk_slice(position.chunk)
        return int(where.start) + int(np.searchsorted(self.t(where), position.t))

    def position(self, i: int) -> Position:
        """The position of a flat index. Raises IndexError outside 0 <= i < n."""
        if not 0 <= i < self.n:
            raise IndexError(f"{i} of {self.n} positions")
        chunk = int(np.searchsorted(self._starts, i, side="right")) - 1
        return Position(chunk, int(self._t[i]))

    def chunk_slice(self, chunk: int) -> slice:
        """The flat indices of a chunk."""
        return slice(int(self._starts[chunk]), int(self._starts[chunk + 1]))

    def chunks(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk of each flat index, int64[k]."""
        return np.searchsorted(self._starts, flat, side="right") - 1

    def t(self, where: slice) -> NDArray[np.int32]:
        """The t of a run of flat indices, int32; not to be written to."""
        return self._t[where]

    def ts(self, flat: NDArray[np.int64]) -> NDArray[np.int32]:
        """The t of each flat index, int32[k]."""
        return self._t[flat]


class EvenLayout(Layout):
    """A layout of chunks that are all alike, by arithmetic: nothing grows with the stream."""

    def __init__(self, first_t: int, per_chunk: int, n: int, n_chunk: int) -> None:
        """Position i is that of token `first_t + i % per_chunk` of chunk `i // per_chunk`."""
        self._first, self._per, self.n, self.n_chunk = first_t, per_chunk, n, n_chunk

    def index(self, position: Position) -> int | None:
        if not 0 <= position.chunk < self.n_chunk:
            return None
        if not self._first <= position.t < self._first + self._per:
            return None
        i = position.chunk * self._per + position.t - self._first
        return i if i < self.n else None

    def before(self, position: Position) -> int:
        within = min(max(position.t - self._first, 0), self._per)
        return min(self.n, position.chunk * self._per + within)

    def position(self, i: int) -> Position:
        if not 0 <= i < self.n:
            raise IndexError(f"{i} of {self.n} positions")
        chunk, k = divmod(i, self._per)
        return Position(chunk, self._first + k)

    def chunk_slice(self, chunk: int) -> slice:
        if not 0 <= chunk < self.n_chunk:
            raise IndexError(f"chunk {chunk} of {self.n_chunk}")
        start = min(self.n, chunk * self._per)
        return slice(start, min(self.n, start + self._per))

    def chunks(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(flat // max(1, self._per))

    def t(self, where: slice) -> NDArray[np.int32]:
        start, stop, _ = where.indices(self.n)
        flat = np.arange(start, stop, dtype=np.int64)
        return (self._first + flat % max(1, self._per)).astype(np.int32)

    def ts(self, flat: NDArray[np.int64]) -> NDArray[np.int32]:
        return (self._first + flat % max(1, self._per)).astype(np.int32)
