"""The statistics of a pair, as llama-perplexity computes them, and counts of what it leaves out.

Knows: the columns of an index, and llama.cpp's formulas for totals over them.
Must not know: how numbers are laid out, recordings, label files.

Formulas: llama.cpp `tools/perplexity/perplexity.cpp`, `kl_divergence`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.index import Bound, Index, Kind, State
from kldtui.report.diverging import Divergence, Runs, divergence_of
from kldtui.roots import Thresholds, cost, is_root, moved_threshold

COST_STEPS = (0.0, 0.1, 0.3, 1.0)
"""Roots are counted at a cost of at least each of these (nats)."""
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DP_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)
_ENOUGH = 10
"""llama.cpp states no uncertainty for this many values or fewer."""

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
    def of(cls, values: Floats, percentiles: tuple[float, ...]) -> Sample:
        if not values.size:
            nothing = dict.fromkeys(percentiles, math.nan)
            return cls(mean_of(values), math.nan, math.nan, math.nan, nothing)
        ordered = np.sort(values)
        found = {p: _percentile(ordered, p) for p in percentiles}
        return cls(
            mean_of(values),
            float(ordered[0]),
            float(ordered[-1]),
            _percentile(ordered, 50.0),
            found,
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


@dataclass(frozen=True, slots=True)
class Clamp:
    """What the quant's floor may have kept from its KLDs, nats; NaN where they are bounds anyway.

    positions: where there is anything. floored: mean of `kld_floored`: what each nat adds to the
    mean KLD by which floored tokens truly lie below the floor. mean, most, total: of `kld_more`.
    """

    positions: int
    floored: float
    mean: float
    most: float
    total: float


@dataclass(frozen=True, slots=True)
class PairStats:
    """Everything `kldtui stats` says of one quant.

    `positions` are those scored in both recordings; all totals are over them alone, perplexities
    and Δp over those of them whose stream token's log p is known (`stream_positions`). Nats, and
    fractions of 1.
    """

    positions: int
    positions_ref: int
    chunks: int
    chunks_ref: int
    complete: bool
    invalid: int
    missing: int
    roots: int
    roots_by_cost: dict[float, int]
    near_ties: int
    near_tie: float
    near_tie_source: str
    ties: int
    moved: int
    moved_kld: float
    floored: int
    floored_ref: int
    floored_quant: int
    not_summing_ref: int
    not_summing_quant: int
    stream_positions: int
    kld: Sample
    kld_is_bound: bool
    kld_infinite: int
    clamp: Clamp
    divergence: Divergence
    dp: Sample
    totals: Totals
    by_chunk: tuple[tuple[int, Totals], ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable names (docs/json.md); None where a value is unknown or not a finite number."""
        totals = self.totals
        out: dict[str, Any] = {
            "positions": self.positions,
            "positions_ref": self.positions_ref,
            "chunks": self.chunks,
            "chunks_ref": self.chunks_ref,
            "complete": self.complete,
            "invalid": self.invalid,
            "missing": self.missing,
            "roots": self.roots,
            "roots_by_cost": {f"{step:g}": n for step, n in self.roots_by_cost.items()},
            "near_ties": self.near_ties,
            "near_tie": self.near_tie,
            "near_tie_source": self.near_tie_source,
            "ties": self.ties,
            "moved": self.moved,
            "moved_kld": self.moved_kld,
            "floored": self.floored,
            "floored_ref": self.floored_ref,
            "floored_quant": self.floored_quant,
            "not_summing_ref": self.not_summing_ref,
            "not_summing_quant": self.not_summing_quant,
            "stream_positions": self.stream_positions,
            **self._kld_json(),
            "same_top": totals.same_top.value,
            "same_top_error": totals.same_top.error,
            "ppl_ref": totals.ppl_ref.value,
            "ppl_ref_error": totals.ppl_ref.error,
            "ppl_ref_is_bound": bool(self.floored_ref),
            "ppl_quant": totals.ppl_quant.value,
            "ppl_quant_error": totals.ppl_quant.error,
            "ppl_quant_is_bound": bool(self.floored_quant),
            "ln_ppl_ratio": totals.ln_ppl_ratio.value,
            "ln_ppl_ratio_error": totals.ln_ppl_ratio.error,
            "ppl_ratio": totals.ppl_ratio.value,
            "ppl_ratio_error": totals.ppl_ratio.error,
            "ppl_difference": totals.ppl_difference.value,
            "ppl_difference_error": totals.ppl_difference.error,
            "ln_ppl_correlation": totals.ln_ppl_correlation,
            "mean_dp": self.dp.mean.value,
            "mean_dp_error": self.dp.mean.error,
            "median_dp": self.dp.median,
            "max_dp": self.dp.maximum,
            "min_dp": self.dp.minimum,
            "dp_percentiles": {f"{p:g}": v for p, v in self.dp.percentiles.items()},
            "rms_dp": totals.rms_dp.value,
            "rms_dp_error": totals.rms_dp.error,
            "notes": list(self.notes),
            "kld_floored_positions": self.clamp.positions,
            "mean_kld_floored": self.clamp.floored,
            "mean_kld_more": self.clamp.mean,
            "max_kld_more": self.clamp.most,
            "total_kld_more": self.clamp.total,
            **self.divergence.to_json(),
        }
        return {name: finite(value) for name, value in out.items()}

    def _kld_json(self) -> dict[str, Any]:
        """The exact names and their `_lower_bound` twins; one of each two is None."""
        known: dict[str, Any] = {
            "mean_kld": self.kld.mean.value,
            "mean_kld_error": self.kld.mean.error,
            "median_kld": self.kld.median,
            "max_kld": self.kld.maximum,
            "min_kld": self.kld.minimum,
            "kld_percentiles": {f"{p:g}": v for p, v in self.kld.percentiles.items()},
        }
        out: dict[str, Any] = {}
        for name, value in known.items():
            stem, error, _ = name.partition("_error")
            out[name] = None if self.kld_is_bound else value
            out[f"{stem}_lower_bound{error}"] = value if self.kld_is_bound else None
        return out | {"kld_infinite": self.kld_infinite}


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return value


def mean_of(values: Floats) -> Estimate:
    """Mean and its standard error, as llama.cpp's `mean_and_uncertainty`."""
    return _mean(float(values.sum()), float((values**2).sum()), values.size)


def _mean(total: float, squares: float, count: int) -> Estimate:
    if not count:
        return Estimate(math.nan, math.nan)
    mean = total / count
    variance = squares / count - mean * mean
    enough = count > _ENOUGH and variance > 0
    return Estimate(mean, math.sqrt(variance / (count - 1)) if enough else 0.0)


def _percentile(ordered: Floats, percent: float) -> float:
    at = percent / 100 * (ordered.size - 1)
    low = int(at)
    part = at - low
    if not part:
        return float(ordered[low])
    return float((1 - part) * ordered[low] + part * ordered[low + 1])


def _root(value: float) -> float:
    """A square root, 0 where rounding has made its argument negative."""
    return math.sqrt(max(0.0, value)) if not math.isnan(value) else math.nan


def _exp(value: float) -> float:
    """e to the value, infinite instead of an error."""
    return math.exp(value) if value < 709 else math.inf


class _Sums:
    """Running sums over positions, so that the totals up to each chunk cost nothing more."""

    def __init__(
        self, log_ref: Floats, log_quant: Floats, kld: Floats, same: Floats, scored: Floats
    ) -> None:
        """All float64[n]; NaN in `log_*`, and 0 in `scored`, for what is not to be counted."""
        known = ~np.isnan(log_ref) & ~np.isnan(log_quant)
        ref, quant = np.where(known, -log_ref, 0), np.where(known, -log_quant, 0)
        squares = np.where(known, (np.exp(log_quant) - np.exp(log_ref)) ** 2, 0)
        kld = np.where(scored > 0, kld, 0)
        streams = [known, ref, ref**2, quant, quant**2, ref * quant, squares, squares**2]
        pairs = [scored, kld, kld**2, same * scored]
        self._sums = [
            np.concatenate([[0.0], np.cumsum(each, dtype=np.float64)]) for each in streams + pairs
        ]

    def count(self, stop: int) -> int:
        return int(self._sums[8][stop])

    def totals(self, stop: int) -> Totals:
        """Over the first `stop` positions."""
        n, ref, ref2, quant, quant2, cross, dp2, dp4, count, kld, kld2, same = (
            float(x[stop]) for x in self._sums
        )
        nll_ref, nll_quant = _mean(ref, ref2, int(n)), _mean(quant, quant2, int(n))
        covariance = 0.0
        if n >= _ENOUGH:
            covariance = (cross / n - nll_ref.value * nll_quant.value) / (n - 1)
        ppl_ref, ppl_quant = _exp(nll_ref.value), _exp(nll_quant.value)
        ref_error, quant_error = ppl_ref * nll_ref.error, ppl_quant * nll_quant.error
        ratio = nll_quant.value - nll_ref.value
        ratio_error = _root(nll_quant.error**2 + nll_ref.error**2 - 2 * covariance)
        difference_error = _root(
            quant_error**2 + ref_error**2 - 2 * ppl_quant * ppl_ref * covariance
        )
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
            kld=_mean(kld, kld2, int(count)),
            rms_dp=Estimate(rms, 0.5 / rms * mse.error if rms else rms),
            same_top=Estimate(share, _root(share * (1 - share) / max(1.0, count - 1))),
        )


def pair_stats(
    index: Index, quant: int, thresholds: Thresholds | None = None, runs: Runs | None = None
) -> PairStats:
    """Statistics of one quant over what has been scanned; invalid rows reach no total.

    runs: the stretches that first flips are counted in, by default the chunks.

    A KLD that is infinite (an exact zero in a `_logits2` file) makes the mean infinite, as it is.
    """
    thresholds = thresholds or Thresholds()
    ref, pair = index.ref, index.pairs[quant]
    scored = pair["state"] == State.SCORED
    known = scored & ~np.isnan(ref["ref_stream"]) & ~np.isnan(pair["quant_stream"])
    log_ref = ref["ref_stream"].astype(np.float64)
    log_quant = pair["quant_stream"].astype(np.float64)
    kld = pair["kld"].astype(np.float64)
    same = ref["ref_id"] == pair["quant_id"]
    roots = is_root(index, quant)
    costs = cost(index, quant)[roots]
    floor_ref = known & _has(ref, Bound.REF_STREAM)
    floor_quant = known & _has(pair, Bound.QUANT_STREAM)
    moved_kld = moved_threshold(index, quant)
    log_ref[~known] = log_quant[~known] = np.nan
    dp = np.exp(log_quant[known]) - np.exp(log_ref[known])
    with np.errstate(invalid="ignore"):
        sums = _Sums(log_ref, log_quant, kld, same.astype(float), scored.astype(float))
    ends = [index.layout.chunk_slice(chunk) for chunk in range(index.layout.n_chunk)]
    by_chunk = [
        (number, sums.totals(where.stop))
        for number, where in enumerate(ends, 1)
        if sums.count(where.stop) > sums.count(where.start)
    ]
    return PairStats(
        positions=int(scored.sum()),
        positions_ref=index.layout.n,
        chunks=_compared_chunks(index, quant),
        chunks_ref=index.layout.n_chunk,
        complete=not (pair["state"] == State.PENDING).any(),
        invalid=int((pair["state"] == State.INVALID).sum()),
        missing=int((pair["state"] == State.MISSING).sum()),
        roots=int(roots.sum()),
        roots_by_cost={step: int((costs >= step).sum()) for step in COST_STEPS},
        near_ties=int((costs < thresholds.near_tie).sum()),
        near_tie=thresholds.near_tie,
        near_tie_source=thresholds.near_tie_source,
        ties=int((scored & (pair["kind"] == Kind.TIE)).sum()),
        moved=int((scored & ~roots & (pair["kld"] >= moved_kld)).sum()),
        moved_kld=moved_kld,
        floored=int((floor_ref | floor_quant).sum()),
        floored_ref=int(floor_ref.sum()),
        floored_quant=int(floor_quant.sum()),
        not_summing_ref=int((scored & _has(ref, Bound.MASS)).sum()),
        not_summing_quant=int((scored & _has(pair, Bound.MASS)).sum()),
        stream_positions=int(known.sum()),
        kld=Sample.of(kld[scored], KLD_PERCENTILES),
        kld_is_bound=bool((scored & _has(pair, Bound.KLD)).any()),
        kld_infinite=int(np.isinf(kld[scored]).sum()),
        clamp=_clamp(pair[scored]),
        divergence=divergence_of(index, quant, runs),
        dp=Sample.of(dp, DP_PERCENTILES),
        totals=sums.totals(index.layout.n),
        by_chunk=tuple(by_chunk),
        notes=tuple(index.notes[quant]),
    )


def _clamp(pair: NDArray[Any]) -> Clamp:
    floored = pair["kld_floored"].astype(np.float64)
    more = pair["kld_more"].astype(np.float64)
    known = ~np.isnan(floored)
    if not known.any() or not known.all():
        return Clamp(int((floored[known] > 0).sum()), *([math.nan] * 4))
    return Clamp(
        int((floored > 0).sum()),
        float(floored.mean()),
        float(more.mean()),
        float(more.max()),
        float(more.sum()),
    )


def _compared_chunks(index: Index, quant: int) -> int:
    """How many chunks have a position that was compared."""
    scored = index.pairs[quant]["state"] == State.SCORED
    slices = (index.layout.chunk_slice(chunk) for chunk in range(index.layout.n_chunk))
    return sum(bool(scored[where].any()) for where in slices)


def _has(columns: Any, flag: Bound) -> NDArray[np.bool_]:
    return np.asarray((columns["bounds"] & np.uint8(flag)) != 0)
