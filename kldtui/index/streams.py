"""Whether two recordings are of one token stream.

Knows: headers' numbers and tokens, how a difference is named, and what a comparison leaves out.
Must not know: rows, columns.

Streams of millions of tokens are not read whole before anything is shown: what is not looked at
when two recordings are opened is compared before a position of its chunk is filled.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import StreamMismatch
from kldtui.index.absent import NOT_HERE
from kldtui.recordings.base import Recording, as_even

_AT_OPEN = 1 << 19
_AT_ONCE = 1 << 18


def check_streams(ref: Recording, quant: Recording) -> int:
    """How many chunks two recordings share; all their tokens are compared.

    Raises StreamMismatch naming the first difference: a number of the header with both values, or
    the first chunk token that differs, with both ids.
    """
    check = StreamCheck(ref, quant)
    check.finish()
    return check.common


class StreamCheck:
    """The comparison of two recordings' streams, begun at open and finished later."""

    def __init__(self, ref: Recording, quant: Recording) -> None:
        """Compare headers, the first half million tokens, and the last chunk.

        Raises StreamMismatch as `check_streams`.
        """
        self._ref, self._quant = ref, quant
        self._names = f"{quant.path.name} is not of the stream of {ref.path.name}"
        for field in ("n_ctx", "n_vocab"):
            mine, theirs = getattr(ref.shape, field), getattr(quant.shape, field)
            if mine != theirs and 0 not in (mine, theirs):
                raise StreamMismatch(f"{self._names}: {field} is {theirs}, not {mine}")
        self.common = min(ref.shape.n_chunk, quant.shape.n_chunk)
        self._upto = 0
        self._lock = threading.Lock()
        if getattr(quant, "absent", False):
            self._upto = self.common  # they were compared where they were scanned
        self._finish(_AT_OPEN, None)
        if self._upto < self.common:
            self._chunk(self.common - 1)

    def chunk(self, chunk: int) -> None:
        """Compare one chunk, if it was not yet. Raises StreamMismatch."""
        if self._upto <= chunk < self.common:
            self._chunk(chunk)

    def finish(self, cancel: threading.Event | None = None) -> bool:
        """Compare all that is left; False if it was cancelled. Raises StreamMismatch."""
        with self._lock:
            self._finish(None, cancel)
            return self._upto >= self.common

    def notes(self) -> list[str]:
        """What to know before reading the comparison, a sentence each."""
        ref, quant, common = self._ref, self._quant, self.common
        notes = [NOT_HERE] if getattr(ref, "absent", False) else []
        if ref.shape.n_chunk != common:
            notes.append(f"compared over {common} of {ref.shape.n_chunk} chunks")
        elif quant.shape.n_chunk != common:
            notes.append(f"compared over {common} of the quant's {quant.shape.n_chunk} chunks")
        for recording in (ref, quant):
            notes += [f"{recording.path.name}: {problem}" for problem in recording.problems]
        return notes

    def _finish(self, limit: int | None, cancel: threading.Event | None) -> None:
        ref, quant = as_even(self._ref), as_even(self._quant)
        n_ctx, done = max(1, self._ref.shape.n_ctx), 0
        while self._upto < self.common and (limit is None or done < limit):
            if cancel is not None and cancel.is_set():
                return
            if ref is None or quant is None:
                self._chunk(self._upto)
                self._upto += 1
                done += n_ctx
                continue
            chunks = min(self.common - self._upto, max(1, _AT_ONCE // n_ctx))
            start, count = self._upto * n_ctx, chunks * n_ctx
            mine, theirs = ref.flat_tokens(start, count), quant.flat_tokens(start, count)
            if not np.array_equal(mine, theirs):
                at = int(np.flatnonzero(mine != theirs)[0]) // n_ctx
                part = slice(at * n_ctx, (at + 1) * n_ctx)
                self._compare(self._upto + at, mine[part], theirs[part])
            self._upto += chunks
            done += count

    def _chunk(self, chunk: int) -> None:
        self._compare(chunk, self._ref.tokens(chunk), self._quant.tokens(chunk))

    def _compare(self, chunk: int, mine: NDArray[np.int32], theirs: NDArray[np.int32]) -> None:
        both = min(len(mine), len(theirs))
        different = np.flatnonzero(mine[:both] != theirs[:both])
        if different.size:
            t = int(different[0])
            raise StreamMismatch(
                f"{self._names}: token {t} of chunk {chunk} is {theirs[t]}, not {mine[t]}"
            )
        if len(mine) != len(theirs):
            raise StreamMismatch(
                f"{self._names}: chunk {chunk} has {len(theirs)} tokens, not {len(mine)}"
            )
