"""What rows tell of each other when one of them holds only its best entries.

Knows: numpy, and rows of log-probabilities (nats), full or top-N.
Must not know: files, formats, columns, or which position a row belongs to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kldtui.rows import FullRows, Rows, TopRows


def known(rows: TopRows, i: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Every id of a top-N row whose log p is recorded, each once, and those log p."""
    entries = {int(t): float(v) for t, v in zip(rows.ids[i], rows.logp[i], strict=True) if t >= 0}
    if rows.stream_ids[i] >= 0 and not np.isnan(rows.stream_logp[i]):
        entries.setdefault(int(rows.stream_ids[i]), float(rows.stream_logp[i]))
    if rows.extra:
        for token, value in rows.extra[i].items():
            entries.setdefault(token, value)
    return np.array(list(entries), np.int64), np.array(list(entries.values()), np.float64)


def certain(rows: TopRows, i: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As `known`, without those whose log p is only a bound."""
    ids, logp = known(rows, i)
    if rows.floor is None:
        return ids, logp
    keep = logp > rows.floor[i]
    return ids[keep], logp[keep]


def coarse_kld(ref: Rows, quant: Rows, i: int) -> float:
    """A lower bound of the KLD: ids known to both, and one bucket for all others.

    Merging outcomes never raises a KLD (the log-sum inequality), so what is computed over the
    partition {known ids, the rest} is at most the KLD over the vocabulary.
    """
    p, q = _common(ref, quant, i)
    rest_p = max(0.0, 1.0 - float(p.sum()))
    rest_q = max(1e-6, 1.0 - float(q.sum()))
    kld = float((p * (np.log(p) - np.log(q))).sum())
    if rest_p > 0:
        kld += rest_p * float(np.log(rest_p / rest_q))
    return max(0.0, kld)


def _common(ref: Rows, quant: Rows, i: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """p and q of the ids whose value, not a bound, is known in both rows."""
    if isinstance(ref, TopRows):
        ids, logp = certain(ref, i)
        ids, logp, logq = _values(quant, i, ids, logp)
    else:
        if not isinstance(quant, TopRows):
            raise TypeError("two full rows have an exact KLD")
        ids, logq = certain(quant, i)
        ids, logq, logp = _values(ref, i, ids, logq)
    p, q = np.exp(logp), np.exp(logq)
    some = (p > 0) & (q > 0)
    return p[some], q[some]


def _values(
    rows: Rows, i: int, ids: NDArray[np.int64], other: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Those of `ids` that this row knows the value of, with `other` and this row's log p."""
    if isinstance(rows, FullRows):
        keep = (ids >= 0) & (ids < rows.n_vocab)
        ids, other = ids[keep], other[keep]
        here = rows.pick(i, ids).astype(np.float64)
        keep = (here > rows.floor[i]) | ~np.isfinite(rows.floor[i])
        return ids[keep], other[keep], here[keep]
    mine_ids, logp = certain(rows, i)
    _, mine, theirs = np.intersect1d(mine_ids, ids, assume_unique=True, return_indices=True)
    return ids[theirs], other[theirs], logp[mine]
