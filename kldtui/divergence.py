"""Where rollouts diverge: first divergent token, share of divergent tokens, survival, and flips by
how sure the reference was.

Knows: numpy, and flags along runs of positions.
Must not know: files, tokens, models, or where a run begins and ends in a stream.

FDT and SDT: "Divergent Token Metrics" (Deiseroth et al. 2023). The FDT of a run is counted here as
the tokens that agree before the first that does not. A run that never diverges, or is cut by a
position that cannot be judged, is censored: it agreed for as long as it was seen, and nothing is
known of what came after. So the median and the shares are those of the Kaplan-Meier estimate,
which, where nothing is censored, are the plain ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.proportions import Z95, Interval, Share, share
from kldtui.ranks import Ranks, medians

WITHIN = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Runs without a divergence are counted within these many tokens."""
P_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Bins of the reference's p(top-1); the last one has its upper edge in it."""
MARGIN_EDGES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, math.inf)
"""Bins of the reference's margin, nats."""

Flags = NDArray[np.bool_]
Stretch = tuple[int, int]
"""Positions from the first up to, not including, the last."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What was seen of each run.

    agreed: int64[n], tokens that agree before the first that does not, or before the run ends.
    diverged: bool[n]; False: censored, at least `agreed` tokens agree.
    """

    agreed: NDArray[np.int64]
    diverged: Flags

    def __len__(self) -> int:
        return int(self.agreed.size)


def first_divergences(flips: Flags, known: Flags, runs: Iterable[Stretch]) -> Runs:
    """Look along each run.

    flips, known: bool[n], of each position, whether the argmaxes differ and whether that can be
    said at all. runs: where each lies; empty ones are passed over.
    """
    agreed, diverged = [], []
    for first, last in runs:
        if first >= last:
            continue
        ends = np.flatnonzero(flips[first:last] | ~known[first:last])
        at = int(ends[0]) if ends.size else last - first
        agreed.append(at)
        diverged.append(bool(ends.size and known[first + at]))
    return Runs(np.array(agreed, np.int64), np.array(diverged, bool))


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of runs whose first `tokens` tokens all agree (Kaplan-Meier), a step a row.

    tokens: int64[k], ascending: the token numbers (from 1) at which some run diverges.
    at_risk, events: int64[k]: runs that were seen that far and had not diverged; those that
    diverge there. value, low, high: float64[k], the share from there on, and its 95 % interval.
    seen: the longest that any run was seen; beyond it nothing is known.
    """

    tokens: NDArray[np.int64]
    at_risk: NDArray[np.int64]
    events: NDArray[np.int64]
    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seen: int
    runs: int
    diverged: int

    def at(self, tokens: int) -> Interval:
        """The share of runs without a divergence within so many tokens; NaN beyond `seen`,
        but for 0, which nothing comes after."""
        if not self.runs:
            return Interval(math.nan, math.nan, math.nan)
        step = int(np.searchsorted(self.tokens, tokens, side="right")) - 1
        if tokens > self.seen and not (self.value.size and self.value[-1] == 0):
            return Interval(math.nan, math.nan, math.nan)
        if step < 0:
            return Interval(1.0, 1.0, 1.0)
        return Interval(float(self.value[step]), float(self.low[step]), float(self.high[step]))

    @property
    def median(self) -> float:
        """The median FDT, in tokens that agree; NaN where over half of the runs outlast what was
        seen of them (then it is at least `seen`).

        Between two steps where the share is exactly a half it is the mean of both, as the median
        of an even number of values is.
        """
        under = np.flatnonzero(self.value <= 0.5 + 1e-12)
        if not under.size:
            return math.nan
        first = int(under[0])
        here = float(self.tokens[first] - 1)
        if abs(self.value[first] - 0.5) < 1e-12 and first + 1 < self.tokens.size:
            return (here + float(self.tokens[first + 1] - 1)) / 2
        return here


def survival(runs: Runs) -> Survival:
    """Kaplan and Meier's estimate (1958) with Greenwood's variance, its interval on the log-log
    scale (Kalbfleisch and Prentice), which stays within 0 and 1."""
    tokens, events = np.unique(runs.agreed[runs.diverged] + 1, return_counts=True)
    # A run that agreed for n tokens was seen at tokens 1 … n, and at n + 1 if it diverged there.
    last_seen = np.sort(runs.agreed + runs.diverged)
    at_risk = len(runs) - np.searchsorted(last_seen, tokens, side="left")
    value = np.cumprod(1 - events / np.maximum(at_risk, 1), dtype=np.float64)
    low, high = _log_log(value, at_risk, events)
    return Survival(
        tokens.astype(np.int64),
        at_risk.astype(np.int64),
        events.astype(np.int64),
        value.astype(np.float64),
        low,
        high,
        int(last_seen[-1]) if len(runs) else 0,
        len(runs),
        int(np.count_nonzero(runs.diverged)),
    )


def _log_log(
    value: NDArray[np.float64], at_risk: NDArray[np.int64], events: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    with np.errstate(all="ignore"):
        greenwood = np.cumsum(events / (at_risk * (at_risk - events)))
        spread = Z95 * np.sqrt(greenwood) / np.abs(np.log(value))
        low, high = value ** np.exp(spread), value ** np.exp(-spread)
    out = (value <= 0) | ~np.isfinite(spread)
    return np.where(out, value, low), np.where(out, value, high)


def divergent_share(flips: Flags, known: Flags, runs: Iterable[Stretch]) -> Interval:
    """SDT: the share of positions whose argmaxes differ, over all runs, and its 95 % interval.

    The interval is that of a ratio over runs: positions of one run go together. With a single run
    it is unknown.
    """
    counted = [
        (int(np.count_nonzero(flips[a:b] & known[a:b])), int(np.count_nonzero(known[a:b])))
        for a, b in runs
    ]
    parts = np.array([pair for pair in counted if pair[1]], np.float64).reshape(-1, 2)
    whole = parts[:, 1].sum()
    if not whole:
        return Interval(math.nan, math.nan, math.nan)
    ratio = float(parts[:, 0].sum() / whole)
    count = len(parts)
    if count < 2:
        return Interval(ratio, math.nan, math.nan)
    squares = float(((parts[:, 0] - ratio * parts[:, 1]) ** 2).sum())
    half = Z95 * math.sqrt(squares * count / (count - 1)) / whole
    return Interval(ratio, max(0.0, ratio - half), min(1.0, ratio + half))


class Bin(NamedTuple):
    """Positions whose value lies from `low` to below `high` (the last bin: up to `high`)."""

    low: float
    high: float
    flips: Share
    mean_kld: float
    median_kld: float


Judged = tuple[NDArray[np.floating[Any]], Flags, NDArray[np.floating[Any]]]


def by_bins(read: Callable[[], Iterable[Judged]], edges: Sequence[float]) -> tuple[Bin, ...]:
    """Flip rate and KLD (nats; NaN of nothing) of the positions in each bin of a value.

    read: gives all positions, part by part, as often as it is called: values, flips and KLD, all
    of one length; positions that cannot be judged are to be left out. Values outside the edges,
    and NaN, are in no bin.
    """
    n, limits = len(edges) - 1, np.array(edges, np.float64)

    def bins_of(values: NDArray[np.floating[Any]]) -> NDArray[np.intp]:
        found = limits.searchsorted(values, side="right") - 1
        found[values == limits[-1]] = n - 1
        found[(found >= n) | np.isnan(values)] = -1
        return found

    def known() -> Iterator[tuple[NDArray[np.float32], NDArray[np.intp]]]:
        for values, _, kld in read():
            bins = bins_of(values)
            here = (bins >= 0) & ~np.isnan(kld)
            yield kld[here].astype(np.float32), bins[here]

    whole, part, total = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    for values, flips, kld in read():
        bins = bins_of(values)
        inside = bins >= 0
        whole += np.bincount(bins[inside], minlength=n)
        part += np.bincount(bins[inside & flips], minlength=n)
        inside &= ~np.isnan(kld)
        total += np.bincount(bins[inside], kld[inside], n)
    ranks = Ranks(known, n)
    middle = medians(ranks, n)
    return tuple(
        Bin(
            low,
            high,
            share(int(part[k]), int(whole[k])),
            float(total[k]) / ranks.count(k) if ranks.count(k) else math.nan,
            middle[k],
        )
        for k, (low, high) in enumerate(itertools.pairwise(edges))
    )
