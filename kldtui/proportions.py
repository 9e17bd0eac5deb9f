"""Shares with their uncertainty: confidence intervals and the exact paired test.

Knows: binomial counts.
Must not know: what was counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

Z95 = 1.959963984540054
"""The standard normal's 97.5th percentile: two-sided 95 %."""


class Share(NamedTuple):
    """`part` of `whole`, and its 95 % confidence interval; fractions of 1, NaN of nothing."""

    part: int
    whole: int
    value: float
    low: float
    high: float


class Interval(NamedTuple):
    """A value and its 95 % confidence interval; NaN where nothing was counted."""

    value: float
    low: float
    high: float


def share(count: int, total: int) -> Share:
    """A share with Wilson's score interval (Wilson 1927), which holds for small counts too."""
    if not total:
        return Share(count, total, math.nan, math.nan, math.nan)
    p, z2 = count / total, Z95 * Z95
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return Share(count, total, p, max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half)))


def paired_difference(won: int, lost: int, total: int) -> Interval:
    """(won - lost) / total of paired answers, with Agresti and Min's interval (2005): half an
    answer is added to each of the four cells, so that few flips do not look certain."""
    if not total:
        return Interval(math.nan, math.nan, math.nan)
    n, b, c = total + 2, won + 0.5, lost + 0.5
    middle = (b - c) / n
    half = Z95 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    return Interval((won - lost) / total, max(-1.0, middle - half), min(1.0, middle + half))


def mcnemar(won: int, lost: int) -> float:
    """McNemar's exact test, two sided: P of flips at least so uneven if both ways are as likely."""
    n, k = won + lost, min(won, lost)
    if not n:
        return 1.0
    tail = math.fsum(
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
        for i in range(k + 1)
    )
    return min(1.0, 2 * tail)
