"""The columns that a position has, in one recording and in one pair.

Knows: names, types, units, and what stands where nothing is known.
Must not know: how a value comes about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST_LOGP = -149 * math.log(2)
"""The smallest probability above zero that float32 holds, 2^-149, as a log: -103.28 nats."""


class State(IntEnum):
    """Of a position, in one recording or in one pair."""

    PENDING = 0
    SCORED = 1
    INVALID = 2
    """The row (of either, in a pair) cannot be used."""
    MISSING = 3
    """The quant did not record the position."""


class Kind(IntEnum):
    """How a scored pair of rows compares."""

    AGREE = 0
    ROOT = 1
    TIE = 2


class Bound(IntFlag):
    """Which values of a column entry are bounds. The log p flags mean "at most this"."""

    REF_P_QUANT = 1
    QUANT_P_REF = 2
    REF_STREAM = 8
    QUANT_STREAM = 16
    KLD = 32
    """The KLD is a lower bound: one of the recordings holds only the best N."""
    MASS = 64
    """The row (the reference's in REF_DTYPE, the quant's in PAIR_DTYPE) does not sum to 1."""
    UNWEIGHED = 128
    """Of a pair that the second pass has still to complete: whether the quant's row sums to 1 was
    not looked at yet."""


REF_DTYPE = np.dtype(
    [
        ("state", "u1"),
        ("tie", "u1"),
        ("bounds", "u1"),
        ("rest", "u1"),
        ("ref_id", "i4"),
        ("margin", "f4"),
        ("ref_p_ref", "f4"),
        ("ref_stream", "f4"),
        ("stream_rank", "i4"),
    ]
)
"""One reference row: log p in nats (NaN where unknown), rank 0 where unknown.

The first pass fills all but what REF_REST names. `rest` is 1 where that stands too; before, the
rank is 0, unless the stream token is the reference's best, and `Bound.MASS` is never set."""

PAIR_DTYPE = np.dtype(
    [
        ("state", "u1"),
        ("kind", "u1"),
        ("bounds", "u1"),
        ("quant_tie", "u1"),
        ("rest", "u1"),
        ("quant_id", "i4"),
        ("kld", "f4"),
        ("kld_floored", "f4"),
        ("kld_more", "f4"),
        ("ref_p_quant", "f4"),
        ("quant_p_ref", "f4"),
        ("quant_p_quant", "f4"),
        ("quant_stream", "f4"),
        ("ref_rank_quant", "i4"),
        ("quant_rank_ref", "i4"),
    ]
)
"""One pair of rows: model first, token second (`ref_p_quant` is the reference's log p of the
quant token); log p and KLD in nats, NaN where unknown; rank 0 where unknown.

The first pass fills all but what PAIR_REST names. `rest` is 1 where that stands too; before, KLD
are NaN, ranks 0 unless both models' best is one token, and `Bound.UNWEIGHED` may be set.

kld_floored: the reference's probability of the tokens that the KLD counts and whose entry in the
quant lies at the floor. Their true log q is lower by an unknown amount, and each nat of it adds
this much to the KLD. Nothing in the file bounds it: what the quant gives them together is known,
but it may give nearly all of that to some of them and next to nothing to others.
kld_more: what it would add if each of them had the smallest probability that float32 holds
(SMALLEST_LOGP): the most, for a quant without smaller ones. Both NaN where the KLD is a bound."""

KLD_COLUMNS = ("kld", "kld_floored", "kld_more")
REF_REST = ("stream_rank", "bounds", "rest")
PAIR_REST = (*KLD_COLUMNS, "ref_rank_quant", "quant_rank_ref", "bounds", "rest")
"""What the second pass writes, the mark that it stands last."""

_OF_BOTH = (
    *("kind", "bounds", *KLD_COLUMNS, "ref_p_quant", "quant_p_ref"),
    *("ref_rank_quant", "quant_rank_ref"),
)
"""What of a pair means nothing without the reference's row."""

Columns = NDArray[Any]
"""A structured array of REF_DTYPE or PAIR_DTYPE."""


def missing_pair() -> Columns:
    """The PAIR_DTYPE entry of a position that the quant did not record."""
    out = np.zeros(1, PAIR_DTYPE)
    forget(out, np.ones(1, bool))
    out["state"] = State.MISSING
    out["rest"] = 1
    return out[0]  # type: ignore[no-any-return]


def forget(out: Columns, where: NDArray[np.bool_], names: Sequence[str] = ()) -> None:
    """Put NaN, id -1, rank 0 and no flags (in all columns or these) where a row gave nothing."""
    if not where.any():
        return
    for name in names or out.dtype.names or ():
        unknown: float = -1 if name.endswith("_id") else 0
        out[name][where] = np.nan if out[name].dtype.kind == "f" else unknown


def forget_both(out: Columns, where: NDArray[np.bool_]) -> None:
    """`forget`, for what means nothing without the reference's row."""
    forget(out, where, _OF_BOTH)
