"""Single quantities read off rows, full or top-N: best tokens, one token's log p, ranks, mass.

Knows: numpy, and rows of log-probabilities (nats).
Must not know: columns, files, formats, or which position a row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis.kernels import KLD_CUT, Kernels
from kldtui.partial import known
from kldtui.rows import FullRows, Rows, TopRows

MASS_TOLERANCE = 0.05
"""A row whose known mass is further from 1 than this does not hold what its model said."""


@dataclass(frozen=True, slots=True)
class Tops:
    """Argmax int64[r], best and second log p float32[r], and whether the best is shared."""

    id: NDArray[np.int64]
    best: NDArray[np.float32]
    second: NDArray[np.float32]
    tie: NDArray[np.bool_]

    def part(self, cut: slice) -> Tops:
        return Tops(self.id[cut], self.best[cut], self.second[cut], self.tie[cut])


def tops_of(rows: Rows, kernels: Kernels) -> Tops:
    """The best of each row; of a top-N row without entries, id -1 and NaN."""
    if isinstance(rows, FullRows):
        ids, top, second, _ = kernels.tops(rows.run())
        tie = (top == second) & (rows.n_vocab > 1)
        return Tops(ids, rows.at(top), rows.at(second), tie)
    count = len(rows)
    if not rows.ids.shape[1]:
        nothing = np.full(count, np.nan, np.float32)
        return Tops(np.full(count, -1), nothing, nothing, np.zeros(count, bool))
    best = rows.logp[:, 0]
    second_logp = rows.logp[:, 1] if rows.ids.shape[1] > 1 else np.full(count, np.nan, np.float32)
    return Tops(rows.ids[:, 0].astype(np.int64), best, second_logp, second_logp == best)


def top_set(rows: Rows, i: int, tops: Tops) -> NDArray[np.integer[Any]]:
    """Every id that shares the best log p of row `i`."""
    if isinstance(rows, FullRows):
        return np.flatnonzero(rows.codes[i] == rows.codes[i, tops.id[i]])
    return np.asarray(rows.ids[i][rows.logp[i] == tops.best[i]])


def look_up(rows: Rows, ids: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """log p of one id a row (NaN where unknown), and whether it is only an upper bound."""
    if isinstance(rows, FullRows):
        inside = (ids >= 0) & (ids < rows.n_vocab)
        if not inside.all():
            ids = np.where(inside, ids, 0)
        codes = rows.codes[np.arange(len(rows)), ids]
        value = rows.at(codes)
        if not inside.all():
            value[~inside] = np.nan
        return value, inside & (codes == 0) & (rows.floor > -np.inf)
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


def ranks_of(
    rows: Rows, ids: NDArray[np.int32], best: NDArray[np.integer[Any]], kernels: Kernels
) -> NDArray[np.int32]:
    """1 for the best, equal for equals; 0 where unknown. best: the id of each row's best."""
    valid = rows.invalid == 0
    out = np.where((ids == best) & valid, np.int32(1), np.int32(0))
    apart = np.flatnonzero((ids != best) & (ids >= 0) & valid)
    if isinstance(rows, FullRows):
        apart = apart[ids[apart] < rows.n_vocab]
        if apart.size:
            out[apart] = 1 + kernels.above(rows.run(), apart, ids[apart])
        return out
    for i in apart.tolist():
        hit = np.flatnonzero(rows.ids[i] == ids[i])
        if hit.size:
            out[i] = 1 + np.count_nonzero(rows.logp[i] > rows.logp[i, hit[0]])
    return out


@dataclass(frozen=True, slots=True)
class Heavy:
    """The tokens of one reference row that carry its KLD: ids, log p and p."""

    ids: NDArray[np.int64]
    logp: NDArray[np.float32]
    p: NDArray[np.float32]


def heavy_of(rows: Rows, i: int) -> Heavy | None:
    """The tokens that llama.cpp sums over; every one with a probability where all are values."""
    if not isinstance(rows, FullRows) or rows.invalid[i]:
        return None
    cut = KLD_CUT if np.isfinite(rows.floor[i]) else -np.inf
    ids = rows.above(i, cut)
    logp = rows.pick(i, ids)
    return Heavy(ids, logp, np.exp(logp))


def mass_is_strange(rows: Rows, i: int) -> bool:
    """Whether what is known of a row's mass says that the row is not what a model gave."""
    if rows.invalid[i]:
        return False
    heavy = heavy_of(rows, i)
    if heavy is not None:
        return bool(abs(heavy.p.sum(dtype=np.float64) - 1) > MASS_TOLERANCE)
    if isinstance(rows, TopRows):
        return bool(np.nansum(np.exp(rows.logp[i].astype(np.float64))) > 1 + MASS_TOLERANCE)
    return False
