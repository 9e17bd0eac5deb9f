"""FDT, SDT, survival and conditioning: worked by hand, and against a brute-force reckoning."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.divergence import (
    MARGIN_EDGES,
    P_EDGES,
    Runs,
    by_bins,
    divergent_share,
    first_divergences,
    survival,
)

# A run as a text: "." agrees, "x" flips, "?" cannot be judged.
RUNS = st.lists(st.text(".x?", max_size=9), max_size=8)


def flags(runs: list[str]) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    joined = "".join(runs)
    edges = [0, *itertools.accumulate(map(len, runs))]
    flips = np.array([c == "x" for c in joined], bool)
    return flips, np.array([c != "?" for c in joined], bool), list(itertools.pairwise(edges))


def looked(*runs: str) -> Runs:
    return first_divergences(*flags(list(runs)))


# -- by hand ---------------------------------------------------------------------------------------


def test_the_first_divergence_is_counted_in_tokens_that_agree() -> None:
    found = looked("..x.x", "x", "....", "", "..?x")
    assert found.agreed.tolist() == [2, 0, 4, 2]
    assert found.diverged.tolist() == [True, True, False, False]


def test_without_censoring_the_median_is_the_plain_one() -> None:
    assert survival(looked("x", "..x", "....x")).median == 2
    assert survival(looked("x", "..x", "....x", "......x")).median == 3
    assert survival(looked("..x", "..x", "..x")).median == 2


def test_the_survival_curve_by_hand() -> None:
    """Five runs: diverging at tokens 2, 3 and 3, ending after 2 and after 5 tokens."""
    curve = survival(looked(".x", "..x", "..x", "..", "....."))
    assert curve.tokens.tolist() == [2, 3]
    assert curve.at_risk.tolist() == [5, 3]  # the run of 2 tokens was not seen at token 3
    assert curve.events.tolist() == [1, 2]
    assert curve.value == pytest.approx([4 / 5, 4 / 5 * 1 / 3])
    assert curve.at(1).value == 1.0
    assert curve.at(2).value == pytest.approx(0.8)
    assert curve.at(5).value == pytest.approx(4 / 15)
    assert math.isnan(curve.at(6).value)
    assert curve.median == 2
    assert (curve.runs, curve.diverged, curve.seen) == (5, 3, 5)


def test_a_median_that_was_not_seen_is_unknown() -> None:
    curve = survival(looked("....", "....", "..x"))
    assert math.isnan(curve.median)
    assert curve.at(4).value == pytest.approx(2 / 3)


def test_greenwoods_interval_as_in_the_textbook() -> None:
    """Freireich 1963, 6-mercaptopurine: S(6) = 0.857, standard error 0.076; S(10) = 0.753."""
    weeks = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    censored = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    runs = Runs(np.array([w - 1 for w in weeks] + censored), np.array([True] * 9 + [False] * 12))
    curve = survival(runs)
    assert curve.at_risk.tolist() == [21, 17, 15, 12, 11, 7, 6]
    assert curve.value == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)
    # R: survfit(..., conf.type = "log-log")
    assert (curve.low[0], curve.high[0]) == pytest.approx((0.620, 0.952), abs=1e-3)
    assert (curve.low[2], curve.high[2]) == pytest.approx((0.503, 0.889), abs=1e-3)


def test_the_share_of_divergent_tokens_by_hand() -> None:
    found = divergent_share(*flags(["x...", "....", "xx??"]))
    assert found.value == pytest.approx(3 / 10)
    # ratio 0.3; residuals 1-1.2, 0-1.2, 2-0.6
    squares = 0.2**2 + 1.2**2 + 1.4**2
    half = 1.959964 * math.sqrt(squares * 3 / 2) / 10
    assert found.high == pytest.approx(0.3 + half)
    assert found.low == pytest.approx(max(0.0, 0.3 - half))
    assert math.isnan(divergent_share(*flags(["x."])).low)
    assert math.isnan(divergent_share(*flags(["??", ""])).value)


def test_bins_hold_every_position_once_and_the_upper_end_too() -> None:
    p = np.array([0.0, 0.1999, 0.2, 0.5, 0.9, 1.0])
    flips = np.array([1, 0, 1, 1, 0, 0], bool)
    kld = np.array([2.0, 4.0, 1.0, np.nan, 0.5, 0.25])
    bins = by_bins(lambda: [(p[:3], flips[:3], kld[:3]), (p[3:], flips[3:], kld[3:])], P_EDGES)
    assert [b.flips.whole for b in bins] == [2, 1, 1, 0, 0, 1, 0, 1]
    assert bins[0].flips.value == 0.5
    assert bins[0].mean_kld == 3.0
    assert math.isnan(bins[2].mean_kld)
    assert math.isnan(bins[3].flips.value)
    far = by_bins(lambda: [(np.array([50.0, np.inf, np.nan]), flips[:3], kld[:3])], MARGIN_EDGES)
    assert far[-1].flips.whole == 2


# -- by brute force --------------------------------------------------------------------------------


def survivors(runs: list[str], tokens: int) -> Fraction | None:
    """Kaplan-Meier token by token, from the texts."""
    share = Fraction(1)
    for n in range(1, tokens + 1):
        alive = [r for r in runs if "x" not in r[: n - 1] and "?" not in r[:n] and len(r) >= n]
        if not alive:
            return share if share == 0 else None
        share *= 1 - Fraction(sum(r[n - 1] == "x" for r in alive), len(alive))
    return share


@settings(deadline=None, max_examples=200)
@given(RUNS)
def test_survival_equals_the_token_by_token_reckoning(runs: list[str]) -> None:
    curve = survival(looked(*runs))
    for n in range(1, 11):
        expected = survivors(runs, n)
        found = curve.at(n)
        if expected is None:
            assert math.isnan(found.value)
        elif curve.runs:
            assert found.value == pytest.approx(float(expected), abs=1e-12)
            assert 0 <= found.low <= found.value + 1e-12
            assert found.value - 1e-12 <= found.high <= 1


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9))
def test_uncensored_medians_are_numpys(agreed: list[int]) -> None:
    runs = Runs(np.array(agreed), np.ones(len(agreed), bool))
    assert survival(runs).median == pytest.approx(float(np.median(agreed)))


@settings(deadline=None, max_examples=100)
@given(RUNS)
def test_the_divergent_share_is_that_of_all_that_can_be_judged(runs: list[str]) -> None:
    joined = "".join(runs)
    judged = len(joined) - joined.count("?")
    found = divergent_share(*flags(runs))
    if not judged:
        assert math.isnan(found.value)
    else:
        assert found.value == pytest.approx(joined.count("x") / judged)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0, 9)), max_size=30),
)
def test_bins_equal_a_loop(rows: list[tuple[float, bool, float]]) -> None:
    p, flips, kld = (np.array([row[i] for row in rows]) for i in range(3))
    bins = by_bins(lambda: [(p, flips.astype(bool), kld)], P_EDGES)
    assert sum(b.flips.whole for b in bins) == len(rows)
    for i, b in enumerate(bins):
        last = i == len(bins) - 1
        mine = [r for r in rows if b.low <= r[0] < b.high or (last and r[0] == b.high)]
        assert b.flips.whole == len(mine)
        assert b.flips.part == sum(r[1] for r in mine)
        if mine:
            assert b.mean_kld == pytest.approx(sum(r[2] for r in mine) / len(mine))
