"""The two passes over recordings whose rows are all laid out alike: as quick as reading allows.

Knows: pieces that stay in a core's cache between reading and looking, and what is kept of them.
Must not know: how records are laid out, threads' order, screens.

Of each piece only a few codes a row are kept; columns are made of them a block at a time. Rows that
need more (NaN, equal logits, ties with other ids) are left to the slow way of `passes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import (
    MASS_TOLERANCE,
    PAIR_REST,
    REF_REST,
    Best,
    Bound,
    Columns,
    Head,
    Kernels,
    State,
    Summed,
    doubtful,
    is_clear,
    mass_is_strange,
    put_sums,
    quick_pair,
    quick_ref,
    settle,
)
from kldtui.index.passes import (
    PAIR_GIVEN,
    REF_GIVEN,
    Filled,
    Worker,
    half_done_of,
    put_missing,
    put_pending,
)
from kldtui.index.work import runs
from kldtui.recordings.base import CodeReader, EvenRecording, Recording, as_even
from kldtui.rows import Codes

_PIECES_BYTES = 4 << 20
"""Bytes of all recordings that are read at once: as a core's caches hold."""
_SLOW_ROWS = 16

Bools = NDArray[np.bool_]


class _Stream:
    """The stream tokens of a flat range. known: where they are ids; token: 0 where not."""

    def __init__(
        self, even: EvenRecording, n_ctx: int, n_vocab: int, first: int, last: int
    ) -> None:
        per = even.per_chunk
        low, high = first // per, (last - 1) // per + 1
        tokens = even.flat_tokens(low * n_ctx, (high - low) * n_ctx).reshape(-1, n_ctx)
        scored = tokens[:, even.first_t : even.first_t + per].reshape(-1)
        self.token = scored[first - low * per : last - low * per]
        self.known = (self.token >= 0) & (self.token < n_vocab)
        if not self.known.all():
            self.token = np.where(self.known, self.token, 0)


class Sweep:
    """A `Worker` for what most recordings are; made by `sweep_or_worker`."""

    def __init__(
        self,
        index: Filled,
        evens: Sequence[EvenRecording],
        readers: Sequence[CodeReader],
        rows: int,
        slow: Worker,
        kernels: Kernels,
    ) -> None:
        """evens, readers: the reference's, then the quants'. rows: how many a reader reads."""
        self._index, self._slow, self._kernels, self._rows = index, slow, kernels, rows
        self._evens, self._readers = evens, readers
        self._shape = evens[0].shape
        self._at = np.arange(rows)

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        for start in range(0, count, self._rows):
            self._index.give_way()
            yield start, min(count, start + self._rows)

    def _held(self, number: int, first: int, last: int) -> int:
        """How many of a flat range's rows a quant has."""
        even = self._evens[1 + number]
        stop = min(last, even.records, self._index.common_chunks[number] * even.per_chunk)
        return max(0, stop - first)

    def _check(self, numbers: Sequence[int]) -> None:
        for k in (-1, *numbers):
            self._readers[1 + k].check()

    def _stream(self, first: int, last: int) -> _Stream:
        return _Stream(self._evens[0], self._shape.n_ctx, self._shape.n_vocab, first, last)

    # -- roots ---------------------------------------------------------------------------------

    def first(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Fill the flat range `first:last` for these quants, as far as the first pass goes."""
        self._check(numbers)
        count = last - first
        stream = self._stream(first, last)
        held = {k: self._held(k, first, last) for k in numbers}
        ref = Best(count)
        quants = {k: Best(count) for k in numbers}
        mine_at = {k: np.zeros(count, np.uint16) for k in numbers}
        theirs_at = {k: np.zeros(count, np.uint16) for k in numbers}
        for a, b in self._pieces(count):
            rows = self._look(0, first, a, b, ref, stream)
            for k in numbers:
                stop = min(b, held[k])
                if stop <= a:
                    continue
                part, at = slice(a, stop), self._at[: stop - a]
                theirs = self._look(1 + k, first, a, stop, quants[k], stream)
                mine_at[k][part] = rows[at, quants[k].id[part]]
                theirs_at[k][part] = theirs[at, ref.id[part]]
        fine = self._readers[0].usual(ref.scale, ref.base)
        put_pending(self._index.ref, first, quick_ref(ref, stream.known), fine)
        left = ~fine
        for k in numbers:
            n = held[k]
            put_missing(self._index.pairs[k], first + n, last)
            quant, known = quants[k].part(n), stream.known[:n]
            entries, hard = quick_pair(ref.part(n), quant, mine_at[k][:n], theirs_at[k][:n], known)
            good = fine[:n] & ~hard & self._readers[1 + k].usual(quant.scale, quant.base)
            weighed = good & ~np.isnan(quant.mass)
            self._weigh(
                k, first, entries, weighed & ~is_clear(quant.mass, entries["quant_p_quant"])
            )
            put_pending(self._index.pairs[k], first, entries, good)
            left[:n] |= ~good
        for a, b in runs(first + np.flatnonzero(left), _SLOW_ROWS):
            self._slow.first(a, b, numbers)

    def _look(
        self, which: int, first: int, a: int, b: int, best: Best, stream: _Stream
    ) -> NDArray[np.uint16]:
        """Read rows `a:b` of a block, note their best and the stream token; gives the codes."""
        codes, scale, base = self._readers[which].read(first + a, b - a)
        best.scale[a:b], best.base[a:b] = scale, base
        best.id[a:b], best.top[a:b], best.second[a:b], mass = self._kernels.tops(
            codes, Head(scale, base) if which else None
        )
        if mass is not None:
            best.mass[a:b] = mass
        best.stream[a:b] = codes.grid[self._at[: b - a], stream.token[a:b]]
        return codes.grid

    # -- the rest ------------------------------------------------------------------------------

    def second(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Complete the entries of `first:last` that the first pass has filled."""
        index = self._index
        todo, wanted = half_done_of(index, numbers, first, last)
        if not wanted.size:
            return
        self._check(numbers)
        skipped, stop = int(wanted[0]), int(wanted[-1]) + 1
        lo, hi = first + skipped, first + stop
        pairs = [
            _Pair(k, index.pairs[k].entries(slice(lo, hi), PAIR_GIVEN), todo[k][skipped:stop])
            for k in numbers
            if todo[k][skipped:stop].any()
        ]
        ref = index.ref.entries(slice(lo, hi), REF_GIVEN)
        stream = self._stream(lo, hi)
        for pair in pairs:
            pair.find_apart(ref, self._rows)
        unranked = (ref["rest"] == 0) & (ref["stream_rank"] != 1) & stream.known
        unranked &= ref["state"] == State.SCORED
        of_stream = _Ranks(unranked, stream.token, self._rows)
        ref_scale, ref_base = np.zeros(hi - lo, np.float32), np.zeros(hi - lo, np.float32)
        for piece, (a, b) in enumerate(self._pieces(hi - lo)):
            codes, scale, base = self._readers[0].read(lo + a, b - a)
            ref_scale[a:b], ref_base[a:b] = scale, base
            of_stream.count(piece, codes, self._kernels)
            summed: list[Summed] = []
            for pair in pairs:
                n = min(b, self._held(pair.number, lo, hi)) - a
                if n <= 0:
                    continue
                others, scale_2, base_2 = self._readers[1 + pair.number].read(lo + a, n)
                pair.scale[a : a + n], pair.base[a : a + n] = scale_2, base_2
                which = np.flatnonzero(pair.todo[a : a + n])
                head = Head(scale_2, base_2)
                summed.append(Summed(others, head, which, pair.sums[a : a + n]))
                pair.of_quant.count(piece, codes, self._kernels)
                pair.of_ref.count(piece, others, self._kernels)
            self._kernels.sums(codes, Head(scale, base), summed)
        ref["stream_rank"][unranked] = of_stream.rank
        fine = self._readers[0].usual(ref_scale, ref_base)
        self._finish(lo, ref, fine, pairs)

    def _finish(self, lo: int, ref: Columns, fine: Bools, pairs: Sequence[_Pair]) -> None:
        mass = np.full(len(ref), np.nan)
        left = np.zeros(len(ref), bool)
        for pair in pairs:
            good = pair.todo & fine & self._readers[1 + pair.number].usual(pair.scale, pair.base)
            entries = pair.entries
            put_sums(pair.sums, pair.base, entries, good)
            entries["ref_rank_quant"][pair.apart] = pair.of_quant.rank
            entries["quant_rank_ref"][pair.apart] = pair.of_ref.rank
            self._weigh(pair.number, lo, entries, good & doubtful(pair.sums, entries))
            settle(entries)
            self._index.pairs[pair.number].put(lo, entries, PAIR_REST, good)
            mass[good] = pair.sums[good, 2]
            left |= pair.todo & ~good
        pending = (ref["rest"] == 0) & ~np.isnan(mass)
        strange = pending & (abs(mass - 1) > MASS_TOLERANCE)
        ref["bounds"] |= strange * np.uint8(Bound.MASS)
        ref["rest"] = 1
        self._index.ref.put(lo, ref, REF_REST, pending)
        numbers = [pair.number for pair in pairs]
        for a, b in runs(lo + np.flatnonzero(left), _SLOW_ROWS):
            self._slow.second(a, b, numbers)

    def _weigh(self, number: int, first: int, entries: Columns, where: Bools) -> None:
        """Mark the rows, of those `where`, that do not sum to 1; there are few to look at."""
        even = self._evens[1 + number]
        for i in np.flatnonzero(where).tolist():
            if mass_is_strange(even.flat_rows(first + i, first + i + 1), 0):
                entries["bounds"][i] |= Bound.MASS


class _Pair:
    """What the second pass gathers of one quant over a block."""

    def __init__(self, number: int, entries: Columns, todo: Bools) -> None:
        self.number, self.entries, self.todo = number, entries, todo
        self.sums = np.zeros((len(entries), 4))
        self.scale = np.zeros(len(entries), np.float32)
        self.base = np.zeros(len(entries), np.float32)

    def find_apart(self, ref: Columns, rows: int) -> None:
        """Find where the two models' best differ, and each has a rank in the other's row."""
        self.apart = self.todo & (ref["ref_id"] != self.entries["quant_id"])
        self.of_quant = _Ranks(self.apart, self.entries["quant_id"], rows)
        self.of_ref = _Ranks(self.apart, ref["ref_id"], rows)


class _Ranks:
    """The ranks of one token in each of some rows of a block, counted piece by piece."""

    def __init__(self, where: Bools, ids: NDArray[np.int32], rows: int) -> None:
        """where: which rows; ids: of every row; rows: how many make a piece."""
        at = np.flatnonzero(where)
        self._row, self._ids = at % rows, ids[at]
        self._ends = at.searchsorted(np.arange(0, where.size + rows, rows)).tolist()
        self.rank = np.zeros(at.size, np.int32)
        """1 for the best; 0 until it is counted."""

    def count(self, piece: int, codes: Codes, kernels: Kernels) -> None:
        a, b = self._ends[piece], self._ends[piece + 1]
        if a < b:
            self.rank[a:b] = 1 + kernels.above(codes, self._row[a:b], self._ids[a:b])


def sweep_or_worker(
    index: Filled, ref: Recording, quants: Sequence[Recording], kernels: Kernels
) -> Sweep | Worker:
    """The quickest way that these recordings allow."""
    worker = Worker(index, ref, quants, kernels)
    evens, readers = [], []
    row_bytes = 2 * ref.shape.n_vocab + 8
    rows = max(1, _PIECES_BYTES // (row_bytes * (1 + len(quants))))
    for recording in (ref, *quants):
        even = as_even(recording)
        reader = even.reader(rows) if even is not None else None
        if even is None or reader is None:
            return worker
        evens.append(even)
        readers.append(reader)
    return Sweep(index, evens, readers, rows, worker, kernels)
