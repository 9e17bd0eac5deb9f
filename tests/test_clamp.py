"""What the floor keeps from a KLD: the part that can be said, named as what it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.analysis import SMALLEST_LOGP, analyse_pair, analyse_ref
from kldtui.index import Index
from kldtui.recordings import open_recording
from kldtui.recordings.kld import decode
from kldtui.recordings.kld_writer import encode
from tests.builders import log_softmax


def columns(ref: np.ndarray, quant: np.ndarray, version: int = 1) -> Any:
    """The pair's columns of one row of logits each."""
    rows = [
        decode(encode(x[None].astype(np.float32), version), x.size, version) for x in (ref, quant)
    ]
    return analyse_pair(analyse_ref(rows[0], np.zeros(1, np.int32)), rows[1])[0]


def test_the_references_probability_at_the_quants_floor_is_what_each_nat_would_add() -> None:
    ref = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    quant = np.array([0.0, -1.0, -16.0, -40.0])
    found = columns(ref, quant)
    assert found["kld_floored"] == pytest.approx(0.2, abs=1e-4)  # ids 2 and 3
    floor = -16 - math.log(1 + math.exp(-1))
    assert found["kld_more"] == pytest.approx(0.2 * (floor - SMALLEST_LOGP), rel=1e-3)
    exact = log_softmax(quant[None].astype(np.float32))[0]
    true = float((np.exp(ref) * (ref - exact)).sum())
    assert found["kld"] < true <= found["kld"] + found["kld_more"]
    assert true - found["kld"] == pytest.approx(0.05 * 24, abs=1e-2)


def test_without_a_floor_nothing_is_kept_from_it() -> None:
    """_logits2 has none: code 0 is a probability of zero, and the KLD says so itself."""
    ref = np.array([0.0, -1.0, -2.0])
    zero = columns(ref, np.array([0.0, -2.0, -np.inf]), version=2)
    assert np.isinf(zero["kld"])
    assert zero["kld_more"] == 0


def test_tokens_that_the_kld_does_not_count_add_nothing() -> None:
    """llama.cpp sums over log p > -16; a token below that in the reference is not in the sum."""
    ref, quant = np.array([0.0, -1.0, -20.0]), np.array([0.0, -1.0, -30.0])
    assert columns(ref, quant)["kld_floored"] == 0


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.floats(-14, 0), st.floats(-80, 0)), min_size=2, max_size=12))
def test_the_true_kld_lies_between_what_is_said_and_what_could_be_more(
    logits: list[tuple[float, float]],
) -> None:
    ref, quant = (np.array([pair[i] for pair in logits]) for i in range(2))
    found = columns(ref, quant)
    logp, logq = (log_softmax(x[None].astype(np.float32))[0] for x in (ref, quant))
    counted = logp > -16
    true = float((np.exp(logp) * (logp - logq))[counted].sum())
    assert found["kld"] - 2e-3 <= true <= found["kld"] + found["kld_more"] + 2e-3


def test_real_pairs_hold_little_at_the_floor(smollm2: Path) -> None:
    ref = open_recording(smollm2 / "ref.kld")
    index = Index(ref, [open_recording(smollm2 / f"{n}.kld") for n in ("q5_0", "q8_0")])
    for _ in index.scan():
        pass
    five, eight = index.pairs
    assert five["kld_floored"].mean() == pytest.approx(6.5e-5, rel=0.02)
    assert eight["kld_floored"].mean() == pytest.approx(3.6e-6, rel=0.02)
    assert (five["kld_more"] < 0.5).all()
