"""What the index says of one position, and of a whole pair in numbers.

Knows: the columns of an index, thresholds.
Must not know: recordings, text, labels, screens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kldtui.index import Bound, Index, Kind, State
from kldtui.position import Position
from kldtui.roots import Thresholds, cost, is_root


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
        near_tie=cost < thresholds.near_tie,
        bounds=Bound(int(pair["bounds"]) | int(ref["bounds"])),
        flips=flips,
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
    scored = pair["state"] == State.SCORED
    roots = is_root(index, quant)
    return Counts(
        positions=int(np.count_nonzero(scored)),
        roots=int(np.count_nonzero(roots)),
        near_ties=int(np.count_nonzero(cost(index, quant)[roots] < thresholds.near_tie)),
        ties=int(np.count_nonzero(scored & (pair["kind"] == Kind.TIE))),
        invalid=int(np.count_nonzero(pair["state"] == State.INVALID)),
        missing=int(np.count_nonzero(pair["state"] == State.MISSING)),
    )


def is_rollout(index: Index) -> bool | None:
    """Whether the stream is the reference's own greedy rollout; None while unknown.

    It is one where every scored stream token is among the reference's best, and that was no chance:
    a text that was drawn at a temperature is none.
    """
    if index.drawn:
        return False
    state, rank = index.ref["state"], index.ref["stream_rank"]
    scored = state == State.SCORED
    # Once all of an entry stands, no rank means that the token is not even in the list.
    ranked = scored & ((rank > 0) | (index.ref["rest"] != 0))
    if bool(np.any(rank[ranked] != 1)):
        return False
    settled = scored.any() and not np.any(state == State.PENDING)
    return True if settled and np.array_equal(ranked, scored) else None
