"""From the columns of an index to lists of positions.

Knows: what a root, a tie, a near tie and a moved position are in terms of the columns.
Must not know: recordings, text, screens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.index import Bound, Index, Kind, State

FLOOR_ROOTS = 5
"""With fewer, the floor's percentile says nothing, and the default near tie stands."""

Sort = Literal["position", "cost", "kld", "margin"]
ListKind = Literal["roots", "ties", "moved", "invalid"]


@dataclass(frozen=True)
class Thresholds:
    """near_tie: a root whose cost is under this many nats is a near tie; and where it is from."""

    near_tie: float = 0.3
    near_tie_source: str = "default"


@dataclass(frozen=True)
class RootQuery:
    """Which positions, in what order.

    quants: numbers of the quants whose positions count, None for all.
    chunk: only this one. min_cost: roots that cost at least this (nats).
    """

    sort: Sort = "position"
    quants: tuple[int, ...] | None = None
    chunk: int | None = None
    min_cost: float = 0.0
    kind: ListKind = "roots"


Where = slice | NDArray[np.int64]
"""Which flat indices: a range, or one by one."""
EVERYWHERE = slice(None)
_AT_ONCE = 1 << 15
_PIECE = 1 << 16
_BLOCK = 1 << 19
"""Positions that are looked at at once: of a long stream only so much is in memory."""


def cost(index: Index, quant: int, where: Where = EVERYWHERE) -> NDArray[np.float32]:
    """Reference log p(ref token) - log p(quant token) of each position, nats, float32[k].

    NaN where it is not scored. Where `Bound.REF_P_QUANT` is set the true cost is at least this.
    """
    pair = index.pairs[quant]
    value: NDArray[np.float32] = index.ref["ref_p_ref"][where] - pair["ref_p_quant"][where]
    value[pair["state"][where] != State.SCORED] = np.nan
    return value


def is_root(index: Index, quant: int, where: Where = EVERYWHERE) -> NDArray[np.bool_]:
    """bool[k]: whether the quant flips there."""
    pair = index.pairs[quant]
    flips: NDArray[np.bool_] = pair["state"][where] == State.SCORED
    flips &= pair["kind"][where] == Kind.ROOT
    return flips


def roots_of(index: Index, quant: int) -> NDArray[np.int64]:
    """Flat indices at which the quant flips, ascending, int64[k]."""
    return _found(index, lambda where: is_root(index, quant, where))


def blocks(index: Index) -> Iterator[slice]:
    """The flat indices in ranges; between them, memory that mirrors the disk is given back."""
    return _slices(index, _BLOCK)


def pieces(index: Index) -> Iterator[slice]:
    """As `blocks`, but so short that many figures of each can be reckoned beside one another."""
    return _slices(index, _PIECE)


def _slices(index: Index, size: int) -> Iterator[slice]:
    for start in range(0, index.layout.n, size):
        yield slice(start, min(index.layout.n, start + size))
        if index.layout.n > size:
            index.release()
            index.give_way()


def parts(index: Index, found: NDArray[np.int64]) -> Iterator[slice]:
    """A list of flat indices in slices of it; otherwise as `blocks`."""
    for start in range(0, found.size, _AT_ONCE):
        yield slice(start, min(found.size, start + _AT_ONCE))
        if found.size > _AT_ONCE:
            index.release()
            index.give_way()


def costs_at(index: Index, quant: int, found: NDArray[np.int64]) -> NDArray[np.float32]:
    """The cost at each flat index of a list however long, nats, float32[k]."""
    out = np.empty(found.size, np.float32)
    for part in parts(index, found):
        out[part] = cost(index, quant, found[part])
    return out


def klds_at(index: Index, quant: int, found: NDArray[np.int64]) -> NDArray[np.float32]:
    """The KLD at each flat index of a list however long, nats, float32[k]."""
    out = np.empty(found.size, np.float32)
    for part in parts(index, found):
        out[part] = index.pairs[quant]["kld"][found[part]]
    return out


def _found(index: Index, qualifies: Callable[[slice], NDArray[np.bool_]]) -> NDArray[np.int64]:
    parts = [np.flatnonzero(qualifies(where)) + where.start for where in blocks(index)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def stands_at(index: Index, i: int) -> tuple[bool | None, ...]:
    """Of each pair, by its number, whether it flips at a flat index; None where that is not known:
    not recorded, invalid, or not scanned yet."""
    return tuple(
        pair.mark("kind", i) == Kind.ROOT if pair.mark("state", i) == State.SCORED else None
        for pair in index.pairs
    )


def near_ties(
    index: Index, quant: int, thresholds: Thresholds, where: Where = EVERYWHERE
) -> NDArray[np.bool_]:
    """bool[k]: whether it is a root that certainly costs less than the threshold: a cost that is
    only known to be at least so much may be any."""
    known = (index.pairs[quant]["bounds"][where] & np.uint8(Bound.REF_P_QUANT)) == 0
    cheap = cost(index, quant, where) < thresholds.near_tie
    return np.asarray(is_root(index, quant, where) & known & cheap)


def moved_threshold(index: Index, quant: int) -> float:
    """The median KLD (nats) of the quant's roots; NaN if it has none."""
    kld = klds_at(index, quant, roots_of(index, quant))
    kld = kld[~np.isnan(kld)]
    return float(np.median(kld)) if kld.size else float("nan")


def near_tie_from_floor(index: Index, floor_quant: int) -> float:
    """The 99th percentile of the costs (nats) of a null recording's roots; NaN if it has too few.

    The null recording is the reference's model recorded again (other micro-batch): what flips
    there flips by arithmetic alone.
    """
    costs = costs_at(index, floor_quant, roots_of(index, floor_quant))
    costs = costs[~np.isnan(costs)]
    if costs.size < FLOOR_ROOTS:
        return float("nan")
    return float(np.percentile(costs.astype(np.float64), 99))


def select(index: Index, query: RootQuery) -> NDArray[np.int64]:
    """Flat indices of the positions that qualify for at least one quant, in the query's order.

    Sorted by position, or descending by the largest cost, KLD or margin over the quants that
    qualify; equals stay in the order of their positions, NaN comes last.
    """
    numbers = range(len(index.pairs)) if query.quants is None else query.quants
    moved = {k: moved_threshold(index, k) for k in numbers} if query.kind == "moved" else {}
    only = _only_chunk(index, query.chunk)

    def qualifies(where: Where, quant: int) -> NDArray[np.bool_]:
        return _qualifies(index, quant, query, moved.get(quant, np.nan), where)

    def chosen(where: slice) -> NDArray[np.bool_]:
        out = np.zeros(where.stop - where.start, bool)
        if only is not None and (where.stop <= only.start or only.stop <= where.start):
            return out
        for quant in numbers:
            out |= qualifies(where, quant)
        if query.kind == "invalid" and not index.pairs:
            out |= index.ref["state"][where] == State.INVALID
        if only is not None:
            out[: max(0, only.start - where.start)] = False
            out[max(0, only.stop - where.start) :] = False
        return out

    found = _found(index, chosen)
    if query.sort == "position":
        return found
    key = np.full(found.size, np.nan, np.float32)
    for part in parts(index, found):
        at, values = found[part], key[part]
        for quant in numbers:
            here = qualifies(at, quant)
            value = _sort_value(index, quant, query.sort, at[here])
            values[here] = np.fmax(values[here], value)
    np.negative(key, out=key)
    return found[np.argsort(key, kind="stable")]


def _only_chunk(index: Index, chunk: int | None) -> slice | None:
    """The flat indices of the one chunk that is asked for; None for all."""
    if chunk is None:
        return None
    if 0 <= chunk < index.layout.n_chunk:
        return index.layout.chunk_slice(chunk)
    return slice(0, 0)


def _sort_value(index: Index, quant: int, sort: Sort, at: NDArray[np.int64]) -> NDArray[np.float32]:
    if sort == "cost":
        return cost(index, quant, at)
    column = index.pairs[quant]["kld"] if sort == "kld" else index.ref["margin"]
    return np.asarray(column[at])


def _qualifies(
    index: Index,
    quant: int,
    query: RootQuery,
    moved: float,
    where: Where,
) -> NDArray[np.bool_]:
    pair = index.pairs[quant]
    state = pair["state"][where]
    if query.kind == "invalid":
        return np.asarray(state == State.INVALID)
    scored = state == State.SCORED
    if query.kind == "ties":
        return np.asarray(scored & (pair["kind"][where] == Kind.TIE))
    if query.kind == "moved":
        large = pair["kld"][where] >= moved
        return np.asarray(scored & (pair["kind"][where] != Kind.ROOT) & large)
    here = is_root(index, quant, where)
    if query.min_cost > 0 and here.any():
        here &= cost(index, quant, where) >= query.min_cost
    return here
