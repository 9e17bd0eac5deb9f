"""KLDs of rows of which only the best entries are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kldtui.partial import coarse_kld
from kldtui.rows import TopRows


def row(p: float) -> TopRows:
    """Of token 0 its probability is known, of the others nothing."""
    return TopRows(
        ids=np.array([[0]], np.int32),
        logp=np.array([[math.log(p)]], np.float32),
        stream_ids=np.array([-1], np.int32),
        stream_logp=np.array([np.nan], np.float32),
        invalid=np.zeros(1, np.uint8),
    )


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.5), (0.9, 0.999), (0.6, 0.9999), (0.5, 0.5)])
def test_a_kld_over_one_token_and_the_rest_is_that_of_two_outcomes(p: float, q: float) -> None:
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert coarse_kld(row(p), row(q), 0) == pytest.approx(exact, rel=1e-3, abs=1e-6)


def test_a_quant_that_leaves_nothing_to_the_rest_gives_a_finite_kld() -> None:
    assert coarse_kld(row(0.9), row(1.0), 0) == pytest.approx(
        0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 1e-6), rel=1e-3
    )
