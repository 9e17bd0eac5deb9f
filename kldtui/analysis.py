"""What one position says of a pair: argmaxes, ties, KLD, margins, ranks, and what is a bound.

Knows: numpy, and rows of log-probabilities (nats), full or top-N.
Must not know: files, formats, chunks, text, or which position a row belongs to.

A *top set* is every id that shares the best log p of a row; the argmax is its lowest id, as in
llama.cpp. Two rows agree, tie or flip by their top sets: disjoint sets are a root, sets that meet
are a tie where one of them has several members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.partial import coarse_kld, known
from kldtui.rows import FullRows, Kept, Rows, TopRows

KLD_CUT = -16.0
"""llama.cpp sums the KLD over tokens whose reference log p is above this (`log_softmax`)."""
SMALLEST_LOGP = -149 * math.log(2)
"""The smallest probability above zero that float32 holds, 2^-149, as a log: -103.28 nats."""
SAME_LOGP = 1e-5
"""Decoded by two programs, one entry of one row does not differ by more (nats); entries of two
rows usually differ by many steps of their encoding (2.4e-4)."""
MASS_TOLERANCE = 0.05
"""A row whose known mass is further from 1 than this does not hold what its model said."""


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
    QUANT_P_QUANT = 4
    REF_STREAM = 8
    QUANT_STREAM = 16
    KLD = 32
    """The KLD is a lower bound: one of the recordings holds only the best N."""
    MASS = 64
    """The row (the reference's in REF_DTYPE, the quant's in PAIR_DTYPE) does not sum to 1."""


REF_DTYPE = np.dtype(
    [
        ("state", "u1"),
        ("tie", "u1"),
        ("ref_id", "i4"),
        ("margin", "f4"),
        ("ref_p_ref", "f4"),
        ("ref_stream", "f4"),
        ("stream_rank", "i4"),
        ("bounds", "u1"),
    ]
)
"""One reference row: log p in nats (NaN where unknown), rank 0 where unknown."""

PAIR_DTYPE = np.dtype(
    [
        ("state", "u1"),
        ("kind", "u1"),
        ("bounds", "u1"),
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
        ("quant_rank_stream", "i4"),
        ("quant_tie", "u1"),
    ]
)
"""One pair of rows: model first, token second (`ref_p_quant` is the reference's log p of the
quant token); log p and KLD in nats, NaN where unknown; rank 0 where unknown.

kld_floored: the reference's probability of the tokens that the KLD counts and whose entry in the
quant lies at the floor. Their true log q is lower by an unknown amount, and each nat of it adds
this much to the KLD. Nothing in the file bounds it: what the quant gives them together is known,
but it may give nearly all of that to some of them and next to nothing to others.
kld_more: what it would add if each of them had the smallest probability that float32 holds
(SMALLEST_LOGP): the most, for a quant without smaller ones. Both NaN where the KLD is a bound."""

_OF_BOTH = (
    *("kind", "bounds", "kld", "kld_floored", "kld_more", "ref_p_quant", "quant_p_ref"),
    *("ref_rank_quant", "quant_rank_ref"),
)
"""What of a pair means nothing without the reference's row."""

Columns = NDArray[Any]
"""A structured array of REF_DTYPE or PAIR_DTYPE."""


@dataclass(frozen=True, slots=True)
class _Tops:
    """Argmax int64[r], best and second log p float32[r], and whether the best is shared."""

    id: NDArray[np.int64]
    best: NDArray[np.float32]
    second: NDArray[np.float32]
    tie: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Heavy:
    """The tokens of one reference row that carry its KLD: ids, log p and p."""

    ids: NDArray[np.int64]
    logp: NDArray[np.float32]
    p: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RefBlock:
    """A block of reference rows with what every quant's comparison needs of them."""

    rows: Rows
    stream: NDArray[np.int32]
    columns: Columns
    tops: _Tops
    heavy: tuple[_Heavy | None, ...]

    def part(self, start: int, stop: int) -> RefBlock:
        """The rows `start:stop`, sharing their memory."""
        cut = slice(start, stop)
        tops = _Tops(*(getattr(self.tops, n)[cut] for n in ("id", "best", "second", "tie")))
        return RefBlock(
            _cut(self.rows, cut), self.stream[cut], self.columns[cut], tops, self.heavy[cut]
        )


def analyse_ref(rows: Rows, stream: NDArray[np.int32]) -> RefBlock:
    """Columns of a block of reference rows.

    stream: int32[r], the stream token of each row; an id outside the vocabulary is unknown.
    """
    with np.errstate(all="ignore"):
        tops = _tops(rows)
        out = np.zeros(len(rows), REF_DTYPE)
        out["tie"] = tops.tie
        out["ref_id"] = tops.id
        out["margin"] = tops.best - tops.second
        out["ref_p_ref"] = tops.best
        out["ref_stream"], bound = _lookup(rows, stream)
        out["stream_rank"] = _ranks(rows, stream, tops)
        heavy = tuple(_heavy(rows, i) for i in range(len(rows)))
        strange = np.fromiter(
            (_mass_is_strange(rows, i, heavy[i]) for i in range(len(rows))), bool, len(rows)
        )
        out["bounds"] = Bound.REF_STREAM * bound + Bound.MASS * strange
    _forget(out, rows.invalid != 0, REF_DTYPE.names or ())
    out["state"] = np.where(rows.invalid == 0, State.SCORED, State.INVALID)
    return RefBlock(rows, stream, out, tops, heavy)


def analyse_pair(ref: RefBlock, quant: Rows) -> Columns:
    """PAIR_DTYPE[r] of a block of reference rows and the quant's rows of the same positions."""
    count = len(quant)
    with np.errstate(all="ignore"):
        tops = _tops(quant)
        out = np.zeros(count, PAIR_DTYPE)
        out["quant_id"] = tops.id
        out["quant_tie"] = tops.tie
        out["quant_p_quant"] = tops.best
        ref_ids, quant_ids = ref.tops.id.astype(np.int32), tops.id.astype(np.int32)
        out["ref_p_quant"], ref_bound = _lookup(ref.rows, quant_ids)
        out["quant_p_ref"], quant_bound = _lookup(quant, ref_ids)
        out["quant_stream"], stream_bound = _lookup(quant, ref.stream)
        out["ref_rank_quant"] = _ranks(ref.rows, quant_ids, ref.tops)
        out["quant_rank_ref"] = _ranks(quant, ref_ids, tops)
        out["quant_rank_stream"] = _ranks(quant, ref.stream, tops)
        valid = (ref.rows.invalid == 0) & (quant.invalid == 0)
        strange, partial = np.zeros(count, bool), np.ones(count, bool)
        for name in ("kld", "kld_floored", "kld_more"):
            out[name] = np.nan
        for i in np.flatnonzero(valid):
            found = _kld(ref, quant, int(i))
            strange[i], partial[i] = found.strange, found.bound
            out["kld"][i], out["kld_floored"][i] = found.kld, found.floored
            out["kld_more"][i] = found.more
        out["kind"] = _kinds(ref, quant, tops)
        out["bounds"] = (
            Bound.REF_P_QUANT * ref_bound
            + Bound.QUANT_P_REF * quant_bound
            + Bound.QUANT_STREAM * stream_bound
            + Bound.KLD * partial
            + Bound.MASS * strange
        )
    _forget(out, quant.invalid != 0, PAIR_DTYPE.names or ())
    _forget(out, ref.rows.invalid != 0, _OF_BOTH)
    out["state"] = np.where(valid, State.SCORED, State.INVALID)
    if isinstance(quant, TopRows) and quant.kept is not None:
        _take_kept(out, ref, quant.kept)
    return out


def _take_kept(out: Columns, ref: RefBlock, kept: Kept) -> None:
    """Put what was kept of whole rows in place of what the best N of them say.

    A KLD counts only where it was measured against this reference: where that one's best is this
    one's best, to the last digits.
    """
    with np.errstate(invalid="ignore"):
        same = (out["state"] == State.SCORED) & ~np.isnan(kept.kld)
        same &= (kept.ref_id == ref.tops.id) & (abs(kept.ref_logp - ref.tops.best) < SAME_LOGP)
    for name, values in (
        ("kld", kept.kld),
        ("kld_floored", kept.floored),
        ("kld_more", kept.more),
    ):
        out[name][same] = values[same]
    out["bounds"][same] &= np.uint8(0xFF & ~Bound.KLD)
    for i, whole in enumerate(kept.whole):
        if whole is not None and isinstance(ref.rows, FullRows):
            out[i] = analyse_pair(ref.part(i, i + 1), whole)[0]


def missing_pair() -> Columns:
    """The PAIR_DTYPE entry of a position that the quant did not record."""
    out = np.zeros(1, PAIR_DTYPE)
    _forget(out, np.ones(1, bool), PAIR_DTYPE.names or ())
    out["state"] = State.MISSING
    return out[0]  # type: ignore[no-any-return]


def _forget(out: Columns, where: NDArray[np.bool_], names: Sequence[str]) -> None:
    """Put NaN, id -1, rank 0 and no flags where a row gave nothing."""
    for name in names:
        unknown: float = -1 if name.endswith("_id") else 0
        out[name][where] = np.nan if out[name].dtype.kind == "f" else unknown


# -- single quantities, for full and top-N rows --------------------------------------------------


def _cut(rows: Rows, cut: slice) -> Rows:
    if isinstance(rows, FullRows):
        return FullRows(
            rows.codes[cut],
            rows.scale[cut],
            rows.base[cut],
            rows.floor[cut],
            rows.invalid[cut],
            rows.zeros,
        )
    return TopRows(
        rows.ids[cut],
        rows.logp[cut],
        rows.stream_ids[cut],
        rows.stream_logp[cut],
        rows.invalid[cut],
        rows.extra[cut],
        None if rows.floor is None else rows.floor[cut],
        None if rows.kept is None else rows.kept.part(cut),
    )


def _tops(rows: Rows) -> _Tops:
    count = len(rows)
    at = np.arange(count)
    if isinstance(rows, FullRows):
        ids = rows.codes.argmax(axis=1)
        top_codes = rows.codes[at, ids]
        next_codes = np.zeros(count, np.uint16)
        for i, top in enumerate(ids.tolist()):
            row = rows.codes[i]
            before = row[:top].max() if top else 0
            next_codes[i] = max(before, row[top + 1 :].max() if top + 1 < row.size else 0)
        tie = (next_codes == top_codes) & (rows.n_vocab > 1)
        return _Tops(ids, rows.at(top_codes), rows.at(next_codes), tie)
    if not rows.ids.shape[1]:
        nothing = np.full(count, np.nan, np.float32)
        return _Tops(np.full(count, -1), nothing, nothing, np.zeros(count, bool))
    best = rows.logp[:, 0]
    second = rows.logp[:, 1] if rows.ids.shape[1] > 1 else np.full(count, np.nan, np.float32)
    return _Tops(rows.ids[:, 0].astype(np.int64), best, second, second == best)


def _lookup(rows: Rows, ids: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """log p of one id a row (NaN where unknown), and whether it is only an upper bound."""
    at = np.arange(len(rows))
    if isinstance(rows, FullRows):
        inside = (ids >= 0) & (ids < rows.n_vocab)
        codes = rows.codes[at, np.where(inside, ids, 0)]
        value = np.where(inside, rows.at(codes), np.float32(np.nan))
        return value, inside & (codes == 0) & np.isfinite(rows.floor)
    value = np.full(len(rows), np.nan, np.float32)
    bound = np.zeros(len(rows), bool)
    for i, token in enumerate(ids.tolist()):
        if token < 0:
            continue
        ids_known, logp_known = known(rows, i)
        hit = np.flatnonzero(ids_known == token)
        if hit.size:
            value[i] = logp_known[hit[0]]
            bound[i] = rows.floor is not None and -np.inf < value[i] <= rows.floor[i]
        elif ids_known.size:
            value[i] = np.nanmin(rows.logp[i])
            bound[i] = True
    return value, bound


def _ranks(rows: Rows, ids: NDArray[np.int32], tops: _Tops) -> NDArray[np.int32]:
    """1 for the best, equal for equals; 0 where unknown."""
    out = np.zeros(len(rows), np.int32)
    for i, token in enumerate(ids.tolist()):
        if rows.invalid[i]:
            continue
        if token == tops.id[i]:
            out[i] = 1
        elif isinstance(rows, FullRows):
            if 0 <= token < rows.n_vocab:
                row = rows.codes[i]
                out[i] = 1 + np.count_nonzero(row > row[token])
        else:
            hit = np.flatnonzero(rows.ids[i] == token)
            if token >= 0 and hit.size:
                out[i] = 1 + np.count_nonzero(rows.logp[i] > rows.logp[i, hit[0]])
    return out


def _heavy(rows: Rows, i: int) -> _Heavy | None:
    """The tokens that llama.cpp sums over; every one with a probability where all are values."""
    if not isinstance(rows, FullRows) or rows.invalid[i]:
        return None
    cut = KLD_CUT if np.isfinite(rows.floor[i]) else -np.inf
    ids = rows.above(i, cut)
    logp = rows.pick(i, ids)
    return _Heavy(ids, logp, np.exp(logp))


def _mass_is_strange(rows: Rows, i: int, heavy: _Heavy | None) -> bool:
    if rows.invalid[i]:
        return False
    if heavy is not None:
        return bool(abs(heavy.p.sum(dtype=np.float64) - 1) > MASS_TOLERANCE)
    if isinstance(rows, FullRows):
        return False
    return bool(np.nansum(np.exp(rows.logp[i].astype(np.float64))) > 1 + MASS_TOLERANCE)


def _full_mass_is_strange(rows: FullRows, i: int) -> bool:
    return _mass_is_strange(rows, i, _heavy(rows, i))


class _Kld(NamedTuple):
    """One pair of valid rows: the KLD (nats), what the floor may have kept from it, whether it is
    a lower bound, and whether the quant's row does not sum to 1."""

    kld: float
    floored: float
    more: float
    bound: bool
    strange: bool


def _kld(ref: RefBlock, quant: Rows, i: int) -> _Kld:
    heavy = ref.heavy[i]
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
        strange = strange and _full_mass_is_strange(quant, i)
        return _Kld(float(kld), floored, more, False, strange)
    strange = _mass_is_strange(quant, i, _heavy(quant, i))
    return _Kld(coarse_kld(ref.rows, quant, i), math.nan, math.nan, True, strange)


def _kinds(ref: RefBlock, quant: Rows, tops: _Tops) -> NDArray[np.uint8]:
    meet = ref.tops.id == tops.id
    several = ref.tops.tie | tops.tie
    for i in np.flatnonzero(several & ~meet):
        mine = _top_set(ref.rows, int(i), ref.tops)
        theirs = _top_set(quant, int(i), tops)
        meet[i] = np.intersect1d(mine, theirs).size > 0
    out = np.where(meet, Kind.AGREE, Kind.ROOT)
    out[meet & several] = Kind.TIE
    return out.astype(np.uint8)


def _top_set(rows: Rows, i: int, tops: _Tops) -> NDArray[np.integer[Any]]:
    if isinstance(rows, FullRows):
        return np.flatnonzero(rows.codes[i] == rows.codes[i, tops.id[i]])
    return np.asarray(rows.ids[i][rows.logp[i] == tops.best[i]])
