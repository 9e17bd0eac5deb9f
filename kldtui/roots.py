"""From the columns of an index to lists of positions.

Knows: what a root, a tie, a near tie and a moved position are in terms of the columns.
Must not know: recordings, text, screens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.index import Index, Kind, State

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
    near_ties: False leaves out roots that cost less than the threshold given to `select`.
    """

    sort: Sort = "position"
    quants: tuple[int, ...] | None = None
    chunk: int | None = None
    min_cost: float = 0.0
    near_ties: bool = True
    kind: ListKind = "roots"


def cost(index: Index, quant: int) -> NDArray[np.float32]:
    """Reference log p(ref token) - log p(quant token) of each position, nats, float32[n].

    NaN where it is not scored. Where `Bound.REF_P_QUANT` is set the true cost is at least this.
    """
    pair = index.pairs[quant]
    value: NDArray[np.float32] = index.ref["ref_p_ref"] - pair["ref_p_quant"]
    value[pair["state"] != State.SCORED] = np.nan
    return value


def is_root(index: Index, quant: int) -> NDArray[np.bool_]:
    """bool[n]: whether the quant flips there."""
    pair = index.pairs[quant]
    flips: NDArray[np.bool_] = (pair["state"] == State.SCORED) & (pair["kind"] == Kind.ROOT)
    return flips


def flips_at(index: Index, i: int) -> tuple[int, ...]:
    """The numbers of the quants that flip at a flat index."""
    return tuple(
        number
        for number, pair in enumerate(index.pairs)
        if pair["state"][i] == State.SCORED and pair["kind"][i] == Kind.ROOT
    )


def moved_threshold(index: Index, quant: int) -> float:
    """The median KLD (nats) of the quant's roots; NaN if it has none."""
    kld = index.pairs[quant]["kld"][is_root(index, quant)]
    kld = kld[~np.isnan(kld)]
    return float(np.median(kld)) if kld.size else float("nan")


def near_tie_from_floor(index: Index, floor_quant: int) -> float:
    """The 99th percentile of the costs (nats) of a null recording's roots; NaN if it has too few.

    The null recording is the reference's model recorded again (other micro-batch): what flips
    there flips by arithmetic alone.
    """
    costs = cost(index, floor_quant)[is_root(index, floor_quant)]
    costs = costs[~np.isnan(costs)]
    if costs.size < FLOOR_ROOTS:
        return float("nan")
    return float(np.percentile(costs.astype(np.float64), 99))


def select(
    index: Index, query: RootQuery, thresholds: Thresholds | None = None
) -> NDArray[np.int64]:
    """Flat indices of the positions that qualify for at least one quant, in the query's order.

    Sorted by position, or descending by the largest cost, KLD or margin over the quants that
    qualify; equals stay in the order of their positions, NaN comes last.
    """
    thresholds = thresholds or Thresholds()
    numbers = range(len(index.pairs)) if query.quants is None else query.quants
    chosen = np.zeros(index.layout.n, bool)
    key = np.full(index.layout.n, np.nan, np.float32)
    for quant in numbers:
        here = _qualifies(index, quant, query, thresholds)
        chosen |= here
        if query.sort != "position":
            values = _sort_value(index, quant, query.sort)
            key[here] = np.fmax(key[here], values[here])
    if query.kind == "invalid" and not index.pairs:
        chosen |= index.ref["state"] == State.INVALID
    if query.chunk is not None:
        chosen = _only_chunk(index, query.chunk, chosen)
    found = np.flatnonzero(chosen)
    if query.sort == "position":
        return found
    return found[np.argsort(-key[found], kind="stable")]


def _only_chunk(index: Index, chunk: int, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    out = np.zeros_like(chosen)
    if 0 <= chunk < index.layout.n_chunk:
        where = index.layout.chunk_slice(chunk)
        out[where] = chosen[where]
    return out


def _sort_value(index: Index, quant: int, sort: Sort) -> NDArray[np.float32]:
    if sort == "cost":
        return cost(index, quant)
    column: NDArray[np.float32] = (
        index.pairs[quant]["kld"] if sort == "kld" else index.ref["margin"]
    )
    return column


def _qualifies(
    index: Index, quant: int, query: RootQuery, thresholds: Thresholds
) -> NDArray[np.bool_]:
    pair = index.pairs[quant]
    scored: NDArray[np.bool_] = pair["state"] == State.SCORED
    if query.kind == "invalid":
        return np.asarray(pair["state"] == State.INVALID)
    if query.kind == "ties":
        return np.asarray(scored & (pair["kind"] == Kind.TIE))
    if query.kind == "moved":
        return np.asarray(
            scored & (pair["kind"] != Kind.ROOT) & (pair["kld"] >= moved_threshold(index, quant))
        )
    here = is_root(index, quant)
    least = query.min_cost if query.near_ties else max(query.min_cost, thresholds.near_tie)
    if least > 0:
        here &= cost(index, quant) >= least
    return here
