"""A block of positions: what the first pass reads off the rows, and what the second adds.

Knows: the columns, and rows of the reference and of one quant at the same positions.
Must not know: files, formats, chunks, text, or which position a row belongs to.

The first pass is what a root list needs; it looks at every code once. Rows of which not both are
whole give all they can at once; a pair of whole rows gets its KLD, ranks and mass in the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis.columns import (
    KLD_COLUMNS,
    PAIR_DTYPE,
    REF_DTYPE,
    SMALLEST_LOGP,
    Bound,
    Columns,
    Kind,
    State,
    forget,
    forget_both,
)
from kldtui.analysis.kernels import Head, Kernels, Summed, brackets
from kldtui.analysis.kernels_numpy import NumpyKernels
from kldtui.analysis.reading import (
    MASS_TOLERANCE,
    Tops,
    heavy_of,
    look_up,
    mass_is_strange,
    ranks_of,
    top_set,
    tops_of,
)
from kldtui.partial import coarse_kld
from kldtui.rows import FullRows, Kept, Rows, TopRows

SAME_LOGP = 1e-5
"""Decoded by two programs, one entry of one row does not differ by more (nats); entries of two
rows usually differ by many steps of their encoding (2.4e-4)."""
_LEAST_LOGP = -87.0
"""Below, float32 has no normal number for the probability."""
_LEAST_SCALE = 1e-20
"""Below, the ratio of two scales may be no float32."""


@dataclass(frozen=True, slots=True)
class RefRows:
    """A block of reference rows, their stream tokens, and their columns as far as they stand."""

    rows: Rows
    stream: NDArray[np.int32]
    columns: Columns

    def part(self, start: int, stop: int) -> RefRows:
        """The rows `start:stop`, sharing their memory."""
        cut = slice(start, stop)
        return RefRows(self.rows.part(cut), self.stream[cut], self.columns[cut])


@dataclass(frozen=True, slots=True)
class RefBlock(RefRows):
    """With what the first pass needs of them for every quant."""

    tops: Tops

    def part(self, start: int, stop: int) -> RefBlock:
        """The rows `start:stop`, sharing their memory."""
        if (start, stop) == (0, len(self.rows)):
            return self
        cut = slice(start, stop)
        return RefBlock(
            self.rows.part(cut), self.stream[cut], self.columns[cut], self.tops.part(cut)
        )


# -- the first pass ------------------------------------------------------------------------------


def first_ref(rows: Rows, stream: NDArray[np.int32], kernels: Kernels | None = None) -> RefBlock:
    """Columns of a block of reference rows, as far as the first pass goes.

    stream: int32[r], the stream token of each row; an id outside the vocabulary is unknown.
    """
    with np.errstate(all="ignore"):
        tops = tops_of(rows, kernels or NumpyKernels())
        out = np.zeros(len(rows), REF_DTYPE)
        out["tie"] = tops.tie
        out["ref_id"] = tops.id
        out["margin"] = tops.best - tops.second
        out["ref_p_ref"] = tops.best
        out["ref_stream"], bound = look_up(rows, stream)
        out["bounds"] = np.where(bound, np.uint8(Bound.REF_STREAM), np.uint8(0))
        out["stream_rank"] = (out["ref_stream"] == out["ref_p_ref"]) & ~bound
    valid = rows.invalid == 0
    forget(out, ~valid)
    out["state"] = np.where(valid, State.SCORED, State.INVALID)
    out["rest"] = ~valid
    block = RefBlock(rows, stream, out, tops)
    if isinstance(rows, TopRows):
        out["stream_rank"] = 0
        second_ref(block)
    return block


def first_pair(ref: RefBlock, quant: Rows, kernels: Kernels | None = None) -> Columns:
    """PAIR_DTYPE[r] of a block of reference rows and the quant's rows of the same positions, as
    far as the first pass goes; whole where one of them holds only its best entries."""
    count = len(quant)
    kernels = kernels or NumpyKernels()
    with np.errstate(all="ignore"):
        tops = tops_of(quant, kernels)
        out = np.zeros(count, PAIR_DTYPE)
        out["quant_id"] = tops.id
        out["quant_tie"] = tops.tie
        out["quant_p_quant"] = tops.best
        ref_ids, quant_ids = ref.columns["ref_id"], out["quant_id"]
        if ref.rows.invalid.any():
            ref_ids = ref.tops.id.astype(np.int32)
        out["ref_p_quant"], ref_bound = look_up(ref.rows, quant_ids)
        out["quant_p_ref"], quant_bound = look_up(quant, ref_ids)
        out["quant_stream"], stream_bound = look_up(quant, ref.stream)
        out["kind"] = _kinds(ref, quant, tops)
        same = ref_ids == quant_ids
        out["ref_rank_quant"] = out["quant_rank_ref"] = same
        out["bounds"] = (
            Bound.REF_P_QUANT * ref_bound.view(np.uint8)
            + Bound.QUANT_P_REF * quant_bound.view(np.uint8)
            + Bound.QUANT_STREAM * stream_bound.view(np.uint8)
            + np.uint8(Bound.UNWEIGHED)
        )
    for name in KLD_COLUMNS:
        out[name] = np.nan
    valid = (ref.rows.invalid == 0) & (quant.invalid == 0)
    if not valid.all():
        forget(out, quant.invalid != 0)
        forget_both(out, ref.rows.invalid != 0)
    out["state"] = np.where(valid, State.SCORED, State.INVALID)
    out["rest"] = ~valid
    if isinstance(ref.rows, TopRows) or isinstance(quant, TopRows):
        second_pair(ref, quant, out, kernels)
        if isinstance(quant, TopRows) and quant.kept is not None:
            _take_kept(out, ref, quant.kept, kernels)
    return out


def _take_kept(out: Columns, ref: RefBlock, kept: Kept, kernels: Kernels) -> None:
    """Put what was kept of whole rows in place of what the best N of them say.

    A KLD counts only where it was measured against this reference: where that one's best is this
    one's best, to the last digits.
    """
    with np.errstate(invalid="ignore"):
        same = (out["state"] == State.SCORED) & ~np.isnan(kept.kld)
        same &= (kept.ref_id == ref.tops.id) & (abs(kept.ref_logp - ref.tops.best) < SAME_LOGP)
    for name, values in zip(KLD_COLUMNS, (kept.kld, kept.floored, kept.more), strict=True):
        out[name][same] = values[same]
    out["bounds"][same] &= np.uint8(0xFF & ~Bound.KLD)
    for i, whole in enumerate(kept.whole):
        if whole is not None and isinstance(ref.rows, FullRows):
            out[i] = analyse_pair(ref.part(i, i + 1), whole, kernels)[0]


def _kinds(ref: RefBlock, quant: Rows, tops: Tops) -> NDArray[np.uint8]:
    meet = ref.tops.id == tops.id
    several = ref.tops.tie | tops.tie
    if not several.any():
        return np.where(meet, np.uint8(Kind.AGREE), np.uint8(Kind.ROOT))
    for i in np.flatnonzero(several & ~meet):
        mine = top_set(ref.rows, int(i), ref.tops)
        theirs = top_set(quant, int(i), tops)
        meet[i] = np.intersect1d(mine, theirs).size > 0
    out = np.where(meet, Kind.AGREE, Kind.ROOT)
    out[meet & several] = Kind.TIE
    return out.astype(np.uint8)


# -- the second pass -----------------------------------------------------------------------------


def second_ref(
    ref: RefRows, mass: NDArray[np.float64] | None = None, kernels: Kernels | None = None
) -> None:
    """Complete the block's columns, in place.

    mass: the summed probability of each row, as `second_pair` gives it; rows where it is NaN stay
    as they are. None: all rows are summed here.
    """
    rows, out = ref.rows, ref.columns
    pending = out["rest"] == 0
    if mass is not None:
        pending &= ~np.isnan(mass)
    beyond = np.where(out["stream_rank"] == 1, out["ref_id"], ref.stream)
    ids = np.where(pending, beyond, out["ref_id"])
    ranks = ranks_of(rows, ids, out["ref_id"], kernels or NumpyKernels())
    out["stream_rank"] = np.where(pending, ranks, out["stream_rank"])
    if mass is not None:
        strange = pending & (abs(mass - 1) > MASS_TOLERANCE)
    else:
        strange = np.array([p and mass_is_strange(rows, i) for i, p in enumerate(pending)], bool)
    out["bounds"] |= np.where(strange, np.uint8(Bound.MASS), np.uint8(0))
    out["rest"] |= pending


def second_pair(
    ref: RefRows, quant: Rows, out: Columns, kernels: Kernels | None = None
) -> NDArray[np.float64]:
    """Complete a pair's columns, in place.

    Gives the summed probability of the reference rows that it looked at, float64[r], else NaN.
    """
    kernels = kernels or NumpyKernels()
    pending = (out["state"] == State.SCORED) & (out["rest"] == 0)
    mass = np.full(len(out), np.nan)
    ref_ids, quant_ids = ref.columns["ref_id"], out["quant_id"]
    apart = pending & (ref_ids != quant_ids)
    if apart.any():
        ranks = ranks_of(ref.rows, np.where(apart, quant_ids, ref_ids), ref_ids, kernels)
        out["ref_rank_quant"] = np.where(apart, ranks, out["ref_rank_quant"])
        ranks = ranks_of(quant, np.where(apart, ref_ids, quant_ids), quant_ids, kernels)
        out["quant_rank_ref"] = np.where(apart, ranks, out["quant_rank_ref"])
    slow = pending
    if isinstance(ref.rows, FullRows) and isinstance(quant, FullRows):
        quick = pending & _are_plain(ref.rows, quant)
        if quick.any():
            mass[quick] = _quick(ref.rows, quant, out, quick, kernels)
        slow = pending & ~quick
    for i in np.flatnonzero(slow).tolist():
        found = _kld(ref.rows, quant, i)
        mass[i] = found.mass
        out["kld"][i], out["kld_floored"][i] = found.kld, found.floored
        out["kld_more"][i] = found.more
        out["bounds"][i] |= Bound.KLD * found.bound | Bound.MASS * found.strange
    settle(out)
    return mass


def settle(pair: Columns) -> None:
    """Mark a pair's entries as whole."""
    pair["bounds"] &= np.uint8(0xFF & ~Bound.UNWEIGHED)
    pair["rest"] = 1


def _are_plain(ref: FullRows, quant: FullRows) -> NDArray[np.bool_]:
    """Which pairs of rows are as most are: codes above a floor, in both."""
    if ref.zeros or quant.zeros:
        return np.zeros(len(ref), bool)
    plain = np.ones(len(ref), bool)
    for rows in (ref, quant):
        plain &= (rows.scale > _LEAST_SCALE) & (rows.floor > -np.inf) & (rows.base > _LEAST_LOGP)
    return plain


def _quick(
    ref: FullRows, quant: FullRows, out: Columns, where: NDArray[np.bool_], kernels: Kernels
) -> NDArray[np.float64]:
    """KLD and mass by a kernel; gives the reference's mass of the rows `where`, float64[k]."""
    sums = np.zeros((len(ref), 4))
    head, other = Head(ref.scale, ref.base), Head(quant.scale, quant.base)
    kernels.sums(ref.run(), head, [Summed(quant.run(), other, np.flatnonzero(where), sums)])
    put_sums(sums, quant.base, out, where)
    for i in np.flatnonzero(doubtful(sums, out) & where).tolist():
        if mass_is_strange(quant, i):
            out["bounds"][i] |= Bound.MASS
    return np.asarray(sums[where, 2])


def put_sums(
    sums: NDArray[np.float64], base: NDArray[np.float32], out: Columns, where: NDArray[np.bool_]
) -> None:
    """A kernel's sums as columns of a pair. base: the quant's floor, nats, float32[r]."""
    out["kld"][where] = sums[where, 0]
    out["kld_floored"][where] = sums[where, 1]
    more = np.maximum(0.0, base[where].astype(np.float64) - SMALLEST_LOGP)
    out["kld_more"][where] = sums[where, 1] * more


def doubtful(sums: NDArray[np.float64], pair: Columns) -> NDArray[np.bool_]:
    """Whether it is open, after a kernel's sums, if the quant's row sums to 1, bool[r]."""
    unweighed = (pair["bounds"] & np.uint8(Bound.UNWEIGHED)) != 0
    return np.asarray(unweighed & ~(abs(sums[:, 3] - 1) < MASS_TOLERANCE))


def is_clear(lined: NDArray[np.float64], best: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether a mass by `straight` leaves no doubt that the row sums to 1, bool[r]; best: nats."""
    with np.errstate(all="ignore"):  # there may be rows that are no distributions
        low, high = brackets(lined, best)
    return np.asarray((low > 1 - MASS_TOLERANCE) & (high < 1 + MASS_TOLERANCE))


class _Kld(NamedTuple):
    """One pair of valid rows: the KLD (nats), what the floor may have kept from it, whether it is
    a lower bound, whether the quant's row does not sum to 1, and the reference's sum."""

    kld: float
    floored: float
    more: float
    bound: bool
    strange: bool
    mass: float


def _kld(ref: Rows, quant: Rows, i: int) -> _Kld:
    heavy = heavy_of(ref, i)
    if heavy is not None and isinstance(quant, FullRows):
        logq = quant.pick(i, heavy.ids)
        kld = (heavy.p * (heavy.logp - logq)).sum(dtype=np.float64)
        floor, floored = float(quant.floor[i]), 0.0
        if floor > -np.inf:
            floored = float(heavy.p[logq <= quant.floor[i]].sum(dtype=np.float64))
        more = floored * max(0.0, floor - SMALLEST_LOGP) if floored else 0.0
        # Where the reference has its mass the quant has nearly all of its own; only if not is
        # the whole row summed.
        strange = bool(abs(np.exp(logq).sum(dtype=np.float64) - 1) > MASS_TOLERANCE)
        strange = strange and mass_is_strange(quant, i)
        mass = float(heavy.p.sum(dtype=np.float64))
        return _Kld(float(kld), floored, more, False, strange, mass)
    nan = math.nan
    return _Kld(coarse_kld(ref, quant, i), nan, nan, True, mass_is_strange(quant, i), nan)


# -- both at once --------------------------------------------------------------------------------


def analyse_ref(rows: Rows, stream: NDArray[np.int32], kernels: Kernels | None = None) -> RefBlock:
    """Both passes over a block of reference rows; `stream` as in `first_ref`."""
    block = first_ref(rows, stream, kernels)
    with np.errstate(all="ignore"):
        second_ref(block, kernels=kernels)
    return block


def analyse_pair(ref: RefBlock, quant: Rows, kernels: Kernels | None = None) -> Columns:
    """Both passes over a pair: PAIR_DTYPE[r]."""
    out = first_pair(ref, quant, kernels)
    with np.errstate(all="ignore"):
        second_pair(ref, quant, out, kernels)
    return out
