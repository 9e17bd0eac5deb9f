"""From a few codes of each row to columns: what most rows need, a block at a time.

Knows: numpy, and codes read off rows whose heads are as most are (`log p = scale * code + base`,
code 0 is the floor). Columns are the same, to the last bit, as `blocks` gives for such rows.
Must not know: whole rows, files, or which position a row belongs to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis.columns import (
    KLD_COLUMNS,
    PAIR_DTYPE,
    REF_DTYPE,
    Bound,
    Columns,
    Kind,
    State,
)

Floats = NDArray[np.float32]
Picked = NDArray[np.uint16]


class Best:
    """The best of `count` rows, and how their codes are decoded; filled piece by piece."""

    __slots__ = ("base", "id", "mass", "scale", "second", "stream", "top")

    def __init__(self, count: int) -> None:
        self.scale = np.zeros(count, np.float32)
        self.base = np.zeros(count, np.float32)
        self.id = np.zeros(count, np.int64)
        self.top = np.zeros(count, np.uint16)
        self.second = np.zeros(count, np.uint16)
        self.stream = np.zeros(count, np.uint16)
        """The code of the stream token."""
        self.mass = np.full(count, np.nan)
        """The row's sum by `straight`; NaN where it comes later."""

    def at(self, codes: Picked) -> Floats:
        """log p of one code a row, nats."""
        with np.errstate(all="ignore"):  # rows that are not as most are, and are left to others
            out: Floats = self.scale * codes + self.base
        return out

    def part(self, stop: int) -> Best:
        """The first rows, sharing their memory."""
        out = Best(0)
        for name in self.__slots__:
            setattr(out, name, getattr(self, name)[:stop])
        return out


def quick_ref(best: Best, known: NDArray[np.bool_]) -> Columns:
    """REF_DTYPE[r], as far as the first pass goes. known: where the stream token is an id."""
    out = np.zeros(best.id.size, REF_DTYPE)
    out["state"] = State.SCORED
    out["tie"] = best.top == best.second
    out["ref_id"] = best.id
    out["ref_p_ref"] = top = best.at(best.top)
    out["margin"] = top - best.at(best.second)
    stream = best.at(best.stream)
    floored = best.stream == 0
    if not known.all():
        stream[~known] = np.nan
        floored &= known
    out["ref_stream"] = stream
    out["bounds"] = floored * np.uint8(Bound.REF_STREAM)
    out["stream_rank"] = (stream == top) & ~floored
    return out


def quick_pair(
    ref: Best,
    quant: Best,
    ref_at_quant: Picked,
    quant_at_ref: Picked,
    known: NDArray[np.bool_],
) -> tuple[Columns, NDArray[np.bool_]]:
    """PAIR_DTYPE[r], as far as the first pass goes, and for which rows it takes whole top sets.

    ref_at_quant: the reference's code of the quant's best; quant_at_ref: the other way round.
    """
    out = np.zeros(quant.id.size, PAIR_DTYPE)
    out["state"] = State.SCORED
    out["quant_id"] = quant.id
    tie = quant.top == quant.second
    out["quant_tie"] = tie
    out["quant_p_quant"] = quant.at(quant.top)
    out["ref_p_quant"] = ref.at(ref_at_quant)
    out["quant_p_ref"] = quant.at(quant_at_ref)
    stream = quant.at(quant.stream)
    floored = quant.stream == 0
    if not known.all():
        stream[~known] = np.nan
        floored &= known
    out["quant_stream"] = stream
    out["bounds"] = (
        (ref_at_quant == 0) * np.uint8(Bound.REF_P_QUANT)
        + (quant_at_ref == 0) * np.uint8(Bound.QUANT_P_REF)
        + floored * np.uint8(Bound.QUANT_STREAM)
        + np.isnan(quant.mass) * np.uint8(Bound.UNWEIGHED)
    )
    same = ref.id == quant.id
    several = tie | (ref.top == ref.second)
    out["kind"] = np.where(same, np.uint8(Kind.AGREE), np.uint8(Kind.ROOT))
    out["kind"][several & same] = Kind.TIE
    out["ref_rank_quant"] = out["quant_rank_ref"] = same
    for name in KLD_COLUMNS:
        out[name] = np.nan
    return out, np.asarray(several & ~same)
