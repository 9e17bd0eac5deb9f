"""What is averaged and ranked over the positions of a pair, however many, a piece at a time.

Knows: llama.cpp's formulas for totals over log-probabilities and KLD.
Must not know: columns, indexes, how numbers are laid out.

Formulas: llama.cpp `tools/perplexity/perplexity.cpp`, `kl_divergence`. Sums are running ones, kept
value by value, so that the totals up to each chunk cost nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kldtui.ranks import Ranks, Read

_ENOUGH = 10
"""llama.cpp states no uncertainty for this many values or fewer."""
_COUNTED = 8
"""Which of the sums is the number of positions."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error; NaN where nothing was counted."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Values over positions; NaN where there are none. Percentiles interpolate linearly."""

    mean: Estimate
    minimum: float
    maximum: float
    median: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, read: Read, percentiles: tuple[float, ...]) -> Sample:
        """Of all values that `read` gives, in one group (see `Ranks`)."""
        ranks, total, squares = Ranks(read), 0.0, 0.0
        if not ranks.count():
            nothing = dict.fromkeys(percentiles, math.nan)
            return cls(_mean(0, 0, 0), math.nan, math.nan, math.nan, nothing)
        for values, _ in read():
            exact = values.astype(np.float64)
            total += float(exact.sum())
            squares += float((exact**2).sum())
        lowest, highest, middle, *found = ranks.percentiles((0.0, 100.0, 50.0, *percentiles))
        return cls(
            _mean(total, squares, ranks.count()),
            lowest,
            highest,
            middle,
            dict(zip(percentiles, found, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """What is averaged over a set of positions; a line of llama-perplexity's table a chunk.

    KLD and log-ratios in nats, shares and Δp as fractions of 1.
    """

    ppl_ref: Estimate
    ppl_quant: Estimate
    ln_ppl_ratio: Estimate
    ppl_ratio: Estimate
    ppl_difference: Estimate
    ln_ppl_correlation: float
    kld: Estimate
    rms_dp: Estimate
    same_top: Estimate


def _mean(total: float, squares: float, count: int) -> Estimate:
    if not count:
        return Estimate(math.nan, math.nan)
    mean = total / count
    variance = squares / count - mean * mean
    enough = count > _ENOUGH and variance > 0
    return Estimate(mean, math.sqrt(variance / (count - 1)) if enough else 0.0)


def _root(value: float) -> float:
    """A square root, 0 where rounding has made its argument negative."""
    return math.sqrt(max(0.0, value)) if not math.isnan(value) else math.nan


def _exp(value: float) -> float:
    """e to the value, infinite instead of an error."""
    return math.exp(value) if value < 709 else math.inf


class Sums:
    """Running sums over positions, and what they were at the end of each chunk."""

    def __init__(self, ends: NDArray[np.int64]) -> None:
        """ends: the flat index behind each chunk, ascending."""
        self._ends, self._at = ends, 0
        self._now: Floats = np.zeros(13)
        self._then: Floats = np.zeros((ends.size, 13))

    def add(
        self, log_ref: Floats, log_quant: Floats, kld: Floats, same: Floats, scored: Floats
    ) -> None:
        """The next positions, all float64[n]; NaN in `log_*` and `kld`, and 0 in `scored`, for what
        is not to be counted."""
        known = ~np.isnan(log_ref) & ~np.isnan(log_quant)
        has_kld = (scored > 0) & ~np.isnan(kld)
        ref, quant = np.where(known, -log_ref, 0), np.where(known, -log_quant, 0)
        squares = np.where(known, (np.exp(log_quant) - np.exp(log_ref)) ** 2, 0)
        kld = np.where(has_kld, kld, 0)
        streams = [known, ref, ref**2, quant, quant**2, ref * quant, squares, squares**2]
        streams += [scored, kld, kld**2, same * scored, has_kld]
        running = np.empty((len(streams), scored.size + 1))
        running[:, 0] = self._now
        for row, stream in zip(running, streams, strict=True):
            row[1:] = stream
            row.cumsum(out=row)
        stop = self._at + scored.size
        low, high = self._ends.searchsorted((self._at, stop), side="right")
        self._then[low:high] = running[:, self._ends[low:high] - self._at].T
        self._now, self._at = running[:, -1].copy(), stop

    def totals(self) -> Totals:
        """Over all positions so far."""
        return _totals(self._now)

    def by_chunk(self) -> ByChunk:
        """Up to and with each chunk that has something counted, all positions being there."""
        count = self._then[:, _COUNTED]
        return ByChunk(self._then, np.flatnonzero(np.diff(count, prepend=0.0) > 0))


class ByChunk(Sequence[tuple[int, Totals]]):
    """Chunk numbers from 1, and the totals up to and with each; made as they are asked for."""

    def __init__(self, sums: Floats, chunks: NDArray[np.intp]) -> None:
        self._sums, self._chunks = sums, chunks

    def __len__(self) -> int:
        return int(self._chunks.size)

    @overload
    def __getitem__(self, key: int) -> tuple[int, Totals]: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[tuple[int, Totals]]: ...
    def __getitem__(self, key: int | slice) -> tuple[int, Totals] | Sequence[tuple[int, Totals]]:
        if isinstance(key, slice):
            return ByChunk(self._sums, self._chunks[key])
        chunk = int(self._chunks[key])
        return chunk + 1, _totals(self._sums[chunk])


def _totals(sums: Floats) -> Totals:
    n, ref, ref2, quant, quant2, cross, dp2, dp4, count, kld, kld2, same, klds = sums.tolist()
    nll_ref, nll_quant = _mean(ref, ref2, int(n)), _mean(quant, quant2, int(n))
    covariance = 0.0
    if n >= _ENOUGH:
        covariance = (cross / n - nll_ref.value * nll_quant.value) / (n - 1)
    ppl_ref, ppl_quant = _exp(nll_ref.value), _exp(nll_quant.value)
    ref_error, quant_error = ppl_ref * nll_ref.error, ppl_quant * nll_quant.error
    ratio = nll_quant.value - nll_ref.value
    ratio_error = _root(nll_quant.error**2 + nll_ref.error**2 - 2 * covariance)
    difference_error = _root(quant_error**2 + ref_error**2 - 2 * ppl_quant * ppl_ref * covariance)
    errors = nll_ref.error * nll_quant.error
    mse = _mean(dp2, dp4, int(n))
    rms = _root(mse.value)
    share = same / count if count else math.nan
    return Totals(
        ppl_ref=Estimate(ppl_ref, ref_error),
        ppl_quant=Estimate(ppl_quant, quant_error),
        ln_ppl_ratio=Estimate(ratio, ratio_error),
        ppl_ratio=Estimate(_exp(ratio), _exp(ratio) * ratio_error),
        ppl_difference=Estimate(ppl_quant - ppl_ref, difference_error),
        ln_ppl_correlation=covariance / errors if errors > 0 else math.nan,
        kld=_mean(kld, kld2, int(klds)),
        rms_dp=Estimate(rms, 0.5 / rms * mse.error if rms else rms),
        same_top=Estimate(share, _root(share * (1 - share) / max(1.0, count - 1))),
    )
