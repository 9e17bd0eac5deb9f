"""The two passes over the rows of a reference and its quants, a span of positions at a time.

Knows: recordings, which rows belong together, and which entries are pending.
Must not know: how rows are decoded, where tables are kept, threads' order, screens.

An entry is written only where it is pending, its mark last; two threads (or programs) that fill
the same entry write the same values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import (
    PAIR_REST,
    REF_REST,
    Columns,
    Kernels,
    RefRows,
    State,
    first_pair,
    first_ref,
    missing_pair,
    second_pair,
    second_ref,
)
from kldtui.index.layout import Layout
from kldtui.index.table import Table
from kldtui.recordings.base import Recording, Scratch, as_even
from kldtui.rows import Rows

REF_GIVEN = ("state", "ref_id", *REF_REST)
PAIR_GIVEN = ("state", "quant_id", "quant_p_quant", *PAIR_REST)


class Filled(Protocol):
    """What a pass fills: the tables, and what they are of."""

    layout: Layout
    ref: Table
    pairs: list[Table]
    common_chunks: list[int]

    def give_way(self) -> None:
        """Called between short steps: a screen may need the interpreter."""


class Worker:
    """One thread's way of filling tables: it has buffers and kernels of its own."""

    def __init__(
        self, index: Filled, ref: Recording, quants: Sequence[Recording], kernels: Kernels
    ) -> None:
        self._index, self._ref, self._quants = index, ref, quants
        self._even = as_even(ref)
        self._scratches = [Scratch() for _ in range(1 + len(quants))]
        self._kernels = kernels

    def first(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Fill the flat range `first:last` for these quants, as far as the first pass goes.

        The range lies in one chunk, unless all recordings are even.
        """
        index = self._index
        index.give_way()
        rows, stream = self._ref_rows(first, last)
        block = first_ref(rows, stream, self._kernels)
        put_pending(index.ref, first, block.columns)
        for number in numbers:
            at = 0
            for a, b, theirs in self._quant_rows(number, first, last):
                put_missing(index.pairs[number], first + at, first + a)
                entries = first_pair(block.part(a, b), theirs, self._kernels)
                put_pending(index.pairs[number], first + a, entries)
                at = b
            put_missing(index.pairs[number], first + at, last)

    def second(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Complete the entries of `first:last` that the first pass has filled."""
        index = self._index
        todo, wanted = half_done_of(index, numbers, first, last)
        if not wanted.size:
            return
        skipped, stop = int(wanted[0]), int(wanted[-1]) + 1
        lo, hi = first + skipped, first + stop
        index.give_way()
        rows, stream = self._ref_rows(lo, hi)
        given = RefRows(rows, stream, index.ref.entries(slice(lo, hi), REF_GIVEN))
        mass = np.full(hi - lo, np.nan)
        with np.errstate(all="ignore"):
            for number in numbers:
                mine = todo[number][skipped:stop]
                if not mine.any():
                    continue
                pair = index.pairs[number]
                for a, b, theirs in self._quant_rows(number, lo, hi):
                    entries = pair.entries(slice(lo + a, lo + b), PAIR_GIVEN)
                    found = second_pair(given.part(a, b), theirs, entries, self._kernels)
                    mass[a:b] = np.where(np.isnan(found), mass[a:b], found)
                    pair.put(lo + a, entries, PAIR_REST, mine[a:b])
            pending = (given.columns["rest"] == 0) & ~np.isnan(mass)
            if pending.any():
                second_ref(given, mass, self._kernels)
                index.ref.put(lo, given.columns, REF_REST, pending)

    # -- rows ----------------------------------------------------------------------------------

    def _ref_rows(self, first: int, last: int) -> tuple[Rows, NDArray[np.int32]]:
        """The reference's rows of a flat range, and their stream tokens."""
        even = self._even
        if even is None:
            chunk, start = self._place(first)
            rows = self._ref.rows(chunk, first - start, last - start, self._scratches[0])
            return rows, self._ref.tokens(chunk)[self._index.layout.t(slice(first, last))]
        n_ctx, per = self._ref.shape.n_ctx, even.per_chunk
        low, high = first // per, (last - 1) // per + 1
        tokens = even.flat_tokens(low * n_ctx, (high - low) * n_ctx).reshape(-1, n_ctx)
        scored = tokens[:, even.first_t : even.first_t + per].reshape(-1)
        stream = scored[first - low * per : last - low * per]
        return even.flat_rows(first, last, self._scratches[0]), stream

    def _place(self, i: int) -> tuple[int, int]:
        """The chunk of a flat index, and the flat index at which it begins."""
        chunk = self._index.layout.position(i).chunk
        return chunk, self._index.layout.chunk_slice(chunk).start

    def _quant_rows(self, number: int, first: int, last: int) -> Iterator[tuple[int, int, Rows]]:
        """The quant's rows of a flat range where it has some: from, to (counted from `first`)."""
        quant, scratch = self._quants[number], self._scratches[1 + number]
        common = self._index.common_chunks[number]
        even = as_even(quant)
        if even is not None and self._even is not None:
            held = min(last, even.records, common * even.per_chunk)
            if held > first:
                yield 0, held - first, even.flat_rows(first, held, scratch)
            return
        chunk, _ = self._place(first)
        if chunk >= common:
            return
        ts = self._index.layout.t(slice(first, last))
        _, mine, theirs = np.intersect1d(
            ts, quant.scored(chunk), assume_unique=True, return_indices=True
        )
        for a, b in _runs(mine, theirs):
            rows = quant.rows(chunk, int(theirs[a]), int(theirs[b - 1]) + 1, scratch)
            yield int(mine[a]), int(mine[a]) + b - a, rows


def _runs(mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges over which both index arrays go up by one."""
    if not mine.size:
        return []
    breaks = np.flatnonzero((np.diff(mine) != 1) | (np.diff(theirs) != 1)) + 1
    edges = [0, *breaks.tolist(), int(mine.size)]
    return list(itertools.pairwise(edges))


# -- what is pending ------------------------------------------------------------------------------


def put_pending(
    table: Table, first: int, entries: Columns, where: NDArray[np.bool_] | None = None
) -> None:
    """Write entries (those `where`) that are pending; the others stand already."""
    pending = table["state"][first : first + len(entries)] == State.PENDING
    if where is not None:
        pending &= where
    if pending.all():
        table.put(first, entries)
    elif pending.any():
        table.put(first, entries, where=pending)


def put_missing(pair: Table, first: int, last: int) -> None:
    """Mark pending entries as not recorded by the quant."""
    if last > first:
        put_pending(pair, first, np.repeat(missing_pair(), last - first))


def half_done(pair: Table, first: int, last: int) -> NDArray[np.bool_]:
    """Which entries of a pair have been through the first pass alone."""
    part = slice(first, last)
    return np.asarray((pair["state"][part] == State.SCORED) & (pair["rest"][part] == 0))


def half_done_of(
    index: Filled, numbers: Sequence[int], first: int, last: int
) -> tuple[dict[int, NDArray[np.bool_]], NDArray[np.int64]]:
    """`half_done` of each of these quants, and where any of them is, counted from `first`."""
    todo = {k: half_done(index.pairs[k], first, last) for k in numbers}
    return todo, np.flatnonzero(half_read(index, numbers, first, last))


def unread(index: Filled, numbers: Sequence[int], first: int, last: int) -> NDArray[np.bool_]:
    """Which positions of a flat range the first pass has still to fill."""
    out = index.ref["state"][first:last] == State.PENDING
    for number in numbers:
        out |= index.pairs[number]["state"][first:last] == State.PENDING
    return np.asarray(out)


def half_read(index: Filled, numbers: Sequence[int], first: int, last: int) -> NDArray[np.bool_]:
    """Which positions of a flat range the second pass has still to complete."""
    out = np.zeros(last - first, bool)
    for number in numbers:
        out |= half_done(index.pairs[number], first, last)
    return out
