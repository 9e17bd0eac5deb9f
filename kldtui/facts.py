"""What the index says of one position, and of a whole pair in numbers.

Knows: the columns of an index, thresholds.
Must not know: recordings, text, labels, screens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kldtui.index import Bound, Index, Kind, State
from kldtui.position import Position
from kldtui.roots import Thresholds, blocks, near_ties


@dataclass(frozen=True, slots=True)
class RootFacts:
    """What the index says of one position and one quant; log-probabilities in nats."""

    index: int
    position: Position
    quant: int
    kind: Kind
    state: State
    stream_id: int
    ref_id: int
    quant_id: int
    kld: float
    kld_floored: float
    kld_more: float
    margin: float
    cost: float
    ref_p_ref: float
    ref_p_quant: float
    quant_p_ref: float
    quant_p_quant: float
    ref_stream: float
    quant_stream: float
    ref_rank_quant: int
    quant_rank_ref: int
    stream_rank: int
    near_tie: bool
    bounds: Bound
    flips: tuple[int, ...]

    @property
    def is_root(self) -> bool:
        return self.state == State.SCORED and self.kind == Kind.ROOT


def facts_at(
    index: Index,
    i: int,
    quant: int,
    stream_id: int,
    thresholds: Thresholds,
    flips: tuple[int, ...],
) -> RootFacts:
    """The facts of flat position `i` for quant number `quant`."""
    ref, pair = index.ref[i], index.pairs[quant][i]
    cost = float(ref["ref_p_ref"]) - float(pair["ref_p_quant"])
    return RootFacts(
        index=i,
        position=index.layout.position(i),
        quant=quant,
        kind=Kind(int(pair["kind"])),
        state=State(int(pair["state"])),
        stream_id=stream_id,
        ref_id=int(ref["ref_id"]),
        quant_id=int(pair["quant_id"]),
        kld=float(pair["kld"]),
        kld_floored=float(pair["kld_floored"]),
        kld_more=float(pair["kld_more"]),
        margin=float(ref["margin"]),
        cost=cost,
        ref_p_ref=float(ref["ref_p_ref"]),
        ref_p_quant=float(pair["ref_p_quant"]),
        quant_p_ref=float(pair["quant_p_ref"]),
        quant_p_quant=float(pair["quant_p_quant"]),
        ref_stream=float(ref["ref_stream"]),
        quant_stream=float(pair["quant_stream"]),
        ref_rank_quant=int(pair["ref_rank_quant"]),
        quant_rank_ref=int(pair["quant_rank_ref"]),
        stream_rank=int(ref["stream_rank"]),
        near_tie=_is_near_tie(pair, cost, thresholds),
        bounds=Bound(int(pair["bounds"]) | int(ref["bounds"])),
        flips=flips,
    )


def _is_near_tie(pair: Any, cost: float, thresholds: Thresholds) -> bool:
    """`near_ties` of one position."""
    known = not int(pair["bounds"]) & Bound.REF_P_QUANT
    is_root = pair["state"] == State.SCORED and pair["kind"] == Kind.ROOT
    return bool(is_root and known and cost < thresholds.near_tie)


_BRIEF_REF = ("ref_id", "margin", "ref_p_ref", "bounds")
_BRIEF_PAIR = ("state", "kind", "quant_id", "kld", "ref_p_quant", "bounds")


@dataclass(frozen=True, slots=True)
class Brief:
    """Those of a position's facts that a row of a list shows; log-probabilities in nats."""

    state: State
    ref_id: int
    quant_id: int
    kld: float
    margin: float
    cost: float
    near_tie: bool
    bounds: Bound


def brief_at(index: Index, i: int, quant: int, thresholds: Thresholds) -> Brief:
    """As `facts_at`, from fewer columns: rows of a sorted list lie far apart, and each column of
    each of them is a page to be mapped."""
    ref = index.ref.entries(i, _BRIEF_REF)
    pair = index.pairs[quant].entries(i, _BRIEF_PAIR)
    cost = float(ref["ref_p_ref"]) - float(pair["ref_p_quant"])
    return Brief(
        state=State(int(pair["state"])),
        ref_id=int(ref["ref_id"]),
        quant_id=int(pair["quant_id"]),
        kld=float(pair["kld"]),
        margin=float(ref["margin"]),
        cost=cost,
        near_tie=_is_near_tie(pair, cost, thresholds),
        bounds=Bound(int(pair["bounds"]) | int(ref["bounds"])),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """How many positions of a pair are what, as far as it is scanned."""

    positions: int
    roots: int
    near_ties: int
    ties: int
    invalid: int
    missing: int


def count_pair(index: Index, quant: int, thresholds: Thresholds) -> Counts:
    """Count a pair's positions, in one pass over its columns."""
    pair = index.pairs[quant]
    total = np.zeros(6, np.int64)
    for where in blocks(index):
        state, kind = pair["state"][where], pair["kind"][where]
        scored = state == State.SCORED
        roots = np.flatnonzero(scored & (kind == Kind.ROOT))
        near = near_ties(index, quant, thresholds, roots + where.start)
        found = (
            np.count_nonzero(scored),
            roots.size,
            np.count_nonzero(near),
            np.count_nonzero(scored & (kind == Kind.TIE)),
            np.count_nonzero(state == State.INVALID),
            np.count_nonzero(state == State.MISSING),
        )
        total += np.array(found, np.int64)
    return Counts(*total.tolist())


def is_rollout(index: Index) -> bool | None:
    """Whether the stream is the reference's own greedy rollout; None while unknown.

    It is one where every scored stream token is among the reference's best, and that was no chance:
    a text that was drawn at a temperature is none.
    """
    if index.drawn:
        return False
    settled = bool(index.layout.n)
    any_scored = False
    for where in blocks(index):
        state, rank = index.ref["state"][where], index.ref["stream_rank"][where]
        scored = state == State.SCORED
        # Once all of an entry stands, no rank means that the token is not even in the list.
        ranked = scored & ((rank > 0) | (index.ref["rest"][where] != 0))
        if bool(np.any(rank[ranked] != 1)):
            return False
        any_scored |= bool(scored.any())
        settled &= bool((state != State.PENDING).all()) and np.array_equal(ranked, scored)
    return True if settled and any_scored else None
