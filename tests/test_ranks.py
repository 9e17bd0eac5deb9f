"""Order statistics in little memory are those of sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kldtui.ranks import Ranks, medians

FLOATS = st.floats(width=32, allow_nan=False)
Part = tuple[NDArray[np.float32], NDArray[np.intp]]


def read(rows: list[tuple[float, int]], size: int = 3) -> Callable[[], Iterator[Part]]:
    def parts() -> Iterator[Part]:
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            values = np.array([value for value, _ in some], np.float32)
            yield values, np.array([group for _, group in some], np.intp)

    return parts


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(FLOATS, st.integers(0, 2)), max_size=40))
def test_every_rank_of_every_group_is_that_of_sorting(rows: list[tuple[float, int]]) -> None:
    ranks = Ranks(read(rows), 3)
    for group in range(3):
        ordered = sorted(value for value, its in rows if its == group)
        assert ranks.count(group) == len(ordered)
        wanted = [(group, rank) for rank in range(len(ordered))]
        assert ranks.at(wanted) == ordered
        middle = medians(ranks, 3)[group]
        if not ordered:
            assert math.isnan(middle)
        elif math.isfinite(ordered[0]) and math.isfinite(ordered[-1]):
            assert middle == pytest.approx(float(np.median(ordered)))


def test_percentiles_interpolate_linearly() -> None:
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    ranks = Ranks(read([(float(value), 0) for value in values], 100))
    percents = (0.0, 0.1, 37.3, 50.0, 99.9, 100.0)
    expected = np.percentile(values.astype(np.float64), percents)
    assert ranks.percentiles(percents) == pytest.approx(expected.tolist())


def test_a_rank_that_no_value_has_is_an_error() -> None:
    with pytest.raises(IndexError, match="rank 2 of 2"):
        Ranks(read([(1.0, 0), (2.0, 0)])).at([(0, 2)])
    with pytest.raises(IndexError, match="rank 0 of 0"):
        Ranks(read([])).at([(0, 0)])
