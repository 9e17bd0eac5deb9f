"""What one position says of a pair, against the formulas written out one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kldtui.analysis import Bound, Columns, Kind, State, analyse_pair, analyse_ref
from kldtui.recordings.kld import decode
from kldtui.recordings.kld_writer import encode
from kldtui.rows import FullRows, Invalid, Rows, TopRows
from tests.builders import equal_record, log_softmax, nan_record, record, record_of

STEP = 16 / 65535


def full(*records: NDArray[np.uint16], n_vocab: int) -> FullRows:
    return decode(np.stack(records), n_vocab, 1)


def from_logits(logits: NDArray[np.float32], version: int = 1) -> FullRows:
    return decode(encode(logits, version), logits.shape[1], version)


def top_rows(
    logp: NDArray[np.floating],
    k: int,
    stream: Sequence[int] | None = None,
    extra: Sequence[Sequence[int]] = (),
) -> TopRows:
    """The k best of full log-probabilities, ties by lowest id."""
    order = np.lexsort((np.broadcast_to(np.arange(logp.shape[1]), logp.shape), -logp), axis=1)
    ids = order[:, :k].astype(np.int32)
    at = np.arange(len(logp))
    streams = np.array(stream if stream is not None else [-1] * len(logp), np.int32)
    stream_logp = np.where(streams >= 0, logp[at, streams], np.nan).astype(np.float32)
    return TopRows(
        ids,
        np.take_along_axis(logp, ids, axis=1).astype(np.float32),
        streams,
        stream_logp,
        np.zeros(len(logp), np.uint8),
        tuple({t: float(logp[i, t]) for t in ids} for i, ids in enumerate(extra)),
    )


def compare(ref: Rows, quant: Rows, stream: Sequence[int] | None = None) -> tuple[Columns, Columns]:
    ids = np.array(stream if stream is not None else [0] * len(ref), np.int32)
    block = analyse_ref(ref, ids)
    return block.columns, analyse_pair(block, quant)


def llama_kld(ref: NDArray[np.float32], quant: NDArray[np.float32]) -> float:
    """`log_softmax` of llama.cpp's kl_divergence, token by token."""
    total = 0.0
    for p, q in zip(ref.tolist(), quant.tolist(), strict=True):
        if p > -16:
            total += math.exp(p) * (p - q)
    return total


coarse_floats = st.integers(-40_000, 40_000).map(lambda n: n / 1000)
pairs_of_logits = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[st.lists(coarse_floats, min_size=n, max_size=n) for _ in range(2)])
)


@given(pairs_of_logits)
@settings(deadline=None, max_examples=200)
def test_kld_is_llama_cpps_sum(pair: tuple[list[float], list[float]]) -> None:
    ref, quant = (from_logits(np.array([row], np.float32)) for row in pair)
    _, got = compare(ref, quant)
    expected = llama_kld(ref.logp[0], quant.logp[0])
    assert got["kld"][0] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert not got["bounds"][0] & Bound.KLD


@given(pairs_of_logits, st.integers(0, 29))
@settings(deadline=None, max_examples=200)
def test_argmax_margin_cost_and_ranks_are_those_of_the_rows(
    pair: tuple[list[float], list[float]], token: int
) -> None:
    ref, quant = (from_logits(np.array([row], np.float32)) for row in pair)
    stream = token % len(pair[0])
    mine, both = compare(ref, quant, [stream])
    a, b = ref.logp[0], quant.logp[0]
    order = np.sort(a)[::-1]
    assert mine["ref_id"][0] == np.flatnonzero(a == a.max())[0]
    assert both["quant_id"][0] == np.flatnonzero(b == b.max())[0]
    assert mine["margin"][0] == pytest.approx(order[0] - order[1])
    i, j = int(mine["ref_id"][0]), int(both["quant_id"][0])
    for name, value in (
        ("ref_p_quant", a[j]),
        ("quant_p_ref", b[i]),
        ("quant_p_quant", b[j]),
        ("quant_stream", b[stream]),
    ):
        assert both[name][0] == value, name
    assert (mine["ref_p_ref"][0], mine["ref_stream"][0]) == (a[i], a[stream])
    assert both["ref_rank_quant"][0] == 1 + (a > a[j]).sum()
    assert both["quant_rank_ref"][0] == 1 + (b > b[i]).sum()
    assert mine["stream_rank"][0] == 1 + (a > a[stream]).sum()


@given(
    st.lists(st.integers(0, 65535), min_size=1, max_size=30),
    st.floats(1e-5, 1e-3),
    st.floats(-40, 0),
    st.floats(-40, 0),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_tokens_above_a_cut_are_those_whose_decoded_log_p_is(
    codes: list[int], scale: float, base: float, cut: float, zeros: bool
) -> None:
    rows = FullRows(
        np.array([codes], np.uint16),
        np.array([scale], np.float32),
        np.array([base], np.float32),
        np.array([base], np.float32),
        np.zeros(1, np.uint8),
        zeros,
    )
    for where in (cut, -np.inf, float(rows.logp[0, 0])):
        expected = np.flatnonzero(rows.logp[0] > np.float32(where))
        assert rows.above(0, where).tolist() == expected.tolist()
    ids = np.arange(len(codes))
    assert np.array_equal(rows.pick(0, ids), rows.logp[0])


def test_equal_rows_agree_and_another_best_is_a_root() -> None:
    a = record_of([65535, 60000, 0])
    b = record_of([60000, 65535, 0])
    _, got = compare(full(a, a, n_vocab=3), full(a, b, n_vocab=3))
    assert got["kind"].tolist() == [Kind.AGREE, Kind.ROOT]
    assert got["kld"][0] == 0
    assert got["state"].tolist() == [State.SCORED, State.SCORED]


@pytest.mark.parametrize(
    ("ref", "quant", "kind"),
    [
        ([9, 9, 1, 0], [9, 8, 1, 0], Kind.TIE),  # the quant picks one of two
        ([9, 9, 1, 0], [8, 9, 1, 0], Kind.TIE),  # the other one: no root either
        ([8, 9, 1, 0], [9, 9, 1, 0], Kind.TIE),
        ([9, 9, 1, 0], [9, 9, 1, 0], Kind.TIE),
        ([9, 9, 1, 0], [1, 0, 9, 9], Kind.ROOT),  # disjoint sets
        ([9, 9, 1, 0], [1, 0, 9, 2], Kind.ROOT),
        ([1, 9, 9, 0], [9, 1, 9, 0], Kind.TIE),  # different argmax, but 2 is in both
        ([9, 1, 1, 1], [9, 1, 1, 1], Kind.AGREE),  # equals below the best are no tie
    ],
)
def test_ties_are_told_by_their_top_sets(ref: list[int], quant: list[int], kind: Kind) -> None:
    one, two = (record_of([7281 * code for code in codes]) for codes in (ref, quant))
    mine, got = compare(full(one, n_vocab=4), full(two, n_vocab=4))
    assert got["kind"][0] == kind
    assert mine["ref_id"][0] == ref.index(9), "llama.cpp takes the lowest id"
    assert bool(mine["tie"][0]) == (ref.count(9) > 1)
    assert bool(got["quant_tie"][0]) == (quant.count(9) > 1)
    assert bool(mine["margin"][0] == 0) == (ref.count(9) > 1)


def test_equal_logits_tie_with_everything() -> None:
    mine, got = compare(
        full(equal_record(4), n_vocab=4), full(record_of([0, 0, 65535, 0]), n_vocab=4)
    )
    assert got["kind"][0] == Kind.TIE
    assert mine["ref_stream"][0] == pytest.approx(-math.log(4))
    assert not mine["bounds"][0] & Bound.REF_STREAM


def test_rows_one_code_apart_keep_their_small_negative_kld() -> None:
    # The quant's minimum is rounded up a little, so that its row sums to more than 1.
    codes = [65535, 65535 - 4000, 30000]
    ref = record_of(codes)
    quant = record_of([65535, 65535 - 4001, 30000])
    scale, minimum = np.frombuffer(quant[:4].tobytes(), "<f4")
    quant = record([65535, 65535 - 4001, 30000], float(scale), float(minimum) + 1.5e-4)
    _, got = compare(full(ref, n_vocab=3), full(quant, n_vocab=3))
    assert -3e-4 < got["kld"][0] < 0
    assert got["kld"][0] == pytest.approx(
        llama_kld(full(ref, n_vocab=3).logp[0], full(quant, n_vocab=3).logp[0]), abs=1e-7
    )


def test_invalid_rows_are_no_flip_and_have_no_kld() -> None:
    good, bad = record_of([65535, 0, 0]), nan_record(3)
    mine, got = compare(full(good, bad, bad, n_vocab=3), full(bad, good, bad, n_vocab=3))
    assert got["state"].tolist() == [State.INVALID] * 3
    assert mine["state"].tolist() == [State.SCORED, State.INVALID, State.INVALID]
    assert np.isnan(got["kld"]).all()


def test_tokens_at_the_floor_are_bounds() -> None:
    a, b = record_of([65535, 0, 0, 50000]), record_of([0, 65535, 0, 50000])
    mine, got = compare(full(a, a, n_vocab=4), full(b, b, n_vocab=4), [2, 3])
    floor = float(full(a, n_vocab=4).floor[0])
    assert mine["ref_stream"][0] == pytest.approx(floor)
    assert (mine["bounds"] & Bound.REF_STREAM).tolist() == [Bound.REF_STREAM, 0]
    assert (got["bounds"] & Bound.QUANT_STREAM).tolist() == [Bound.QUANT_STREAM, 0]
    assert got["bounds"][0] & Bound.REF_P_QUANT
    assert got["bounds"][0] & Bound.QUANT_P_REF


def test_a_stream_token_outside_the_vocabulary_is_unknown() -> None:
    a = record_of([65535, 0, 0])
    mine, got = compare(full(a, a, n_vocab=3), full(a, a, n_vocab=3), [3, -1])
    assert np.isnan(mine["ref_stream"]).all()
    assert np.isnan(got["quant_stream"]).all()
    assert mine["stream_rank"].tolist() == [0, 0]
    assert got["state"].tolist() == [State.SCORED] * 2


def test_rows_that_do_not_sum_to_one_are_marked() -> None:
    good = record_of([65535, 60000, 50000])
    scale, minimum = (float(x) for x in np.frombuffer(good[:4].tobytes(), "<f4"))
    heavy, light = (record([65535, 60000, 50000], scale, minimum + by) for by in (0.2, -0.2))
    mine, got = compare(full(good, heavy, good, n_vocab=3), full(light, good, good, n_vocab=3))
    assert (mine["bounds"] & Bound.MASS > 0).tolist() == [False, True, False]
    assert (got["bounds"] & Bound.MASS > 0).tolist() == [True, False, False]
    assert got["state"].tolist() == [State.SCORED] * 3, "reported, not thrown away"


def test_a_quant_with_its_mass_elsewhere_is_not_marked() -> None:
    a, b = record_of([65535, 0, 0]), record_of([0, 0, 65535])
    _, got = compare(full(a, n_vocab=3), full(b, n_vocab=3))
    assert not got["bounds"][0] & Bound.MASS


def test_exact_zeros_make_an_infinite_kld() -> None:
    logits = np.zeros((2, 3), np.float32)
    masked = logits.copy()
    masked[0, 2] = -np.inf
    _, got = compare(from_logits(logits, 2), from_logits(masked, 2))
    assert got["kld"].tolist() == [np.inf, 0]
    _, back = compare(from_logits(masked, 2), from_logits(logits, 2))
    assert back["kld"][0] == pytest.approx(math.log(3 / 2), abs=1e-5)


def test_v2_counts_tokens_below_minus_16() -> None:
    logits = np.array([[0] + [-18] * 5000], np.float32)
    other = np.array([[0] + [-30] * 5000], np.float32)
    ref, quant = from_logits(logits, 2), from_logits(other, 2)
    _, got = compare(ref, quant)
    wide = log_softmax(logits)[0], log_softmax(other)[0]
    exact = float((np.exp(wide[0]) * (wide[0] - wide[1])).sum())
    assert got["kld"][0] == pytest.approx(exact, rel=0.02)


# -- top-N ---------------------------------------------------------------------------------------


@given(pairs_of_logits, st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_top_n_kld_is_never_above_the_true_one(
    pair: tuple[list[float], list[float]], k: int, m: int, ref_full: bool, quant_full: bool
) -> None:
    if ref_full and quant_full:
        return
    logits = [np.array([row], np.float32) for row in pair]
    exact = [log_softmax(each) for each in logits]
    rows: list[Rows] = [
        from_logits(each, 2) if whole else top_rows(logp, n)
        for each, logp, n, whole in zip(logits, exact, (k, m), (ref_full, quant_full), strict=True)
    ]
    _, got = compare(rows[0], rows[1])
    true = float((np.exp(exact[0]) * (exact[0] - exact[1])).sum())
    assert got["bounds"][0] & Bound.KLD
    assert 0 <= got["kld"][0] <= true + 2e-3 * (1 + true)


def test_top_n_with_all_tokens_known_is_the_exact_kld() -> None:
    rng = np.random.default_rng(3)
    logp = log_softmax(rng.standard_normal((4, 5)).astype(np.float32))
    other = log_softmax(rng.standard_normal((4, 5)).astype(np.float32))
    _, got = compare(top_rows(logp, 5), top_rows(other, 5))
    true = (np.exp(logp) * (logp - other)).sum(axis=1)
    assert np.allclose(got["kld"], true, atol=1e-5)


def test_top_n_rows_flip_tie_and_agree_like_full_ones() -> None:
    rng = np.random.default_rng(4)
    logits = rng.integers(0, 3, (60, 6)).astype(np.float32)
    other = rng.integers(0, 3, (60, 6)).astype(np.float32)
    a, b = from_logits(logits), from_logits(other)
    _, exact = compare(a, b)
    for ref, quant in (
        (top_rows(a.logp, 6), top_rows(b.logp, 6)),
        (a, top_rows(b.logp, 6)),
        (top_rows(a.logp, 6), b),
    ):
        mine, got = compare(ref, quant)
        assert (got["kind"] == exact["kind"]).all()
        assert (got["quant_id"] == exact["quant_id"]).all()
        assert np.allclose(got["ref_p_quant"], exact["ref_p_quant"], atol=1e-5)
        assert (got["ref_rank_quant"] == exact["ref_rank_quant"]).all()
        assert (mine["ref_id"] == compare(a, b)[0]["ref_id"]).all()


def test_what_lies_outside_the_top_n_is_a_bound_of_unknown_rank() -> None:
    logp = log_softmax(np.array([[5, 4, 3, 2, 1]], np.float32))
    other = log_softmax(np.array([[1, 2, 3, 4, 5]], np.float32))
    mine, got = compare(top_rows(logp, 2), top_rows(other, 2), [3])
    assert got["ref_p_quant"][0] == pytest.approx(logp[0, 1])
    assert got["bounds"][0] & Bound.REF_P_QUANT
    assert got["ref_rank_quant"][0] == 0
    assert mine["bounds"][0] & Bound.REF_STREAM
    assert not got["bounds"][0] & Bound.QUANT_STREAM


def test_tokens_recorded_apart_are_values() -> None:
    logp = log_softmax(np.array([[5, 4, 3, 2, 1]], np.float32))
    other = log_softmax(np.array([[1, 2, 3, 4, 5]], np.float32))
    quant = top_rows(other, 2, stream=[1], extra=[[0]])
    _, got = compare(top_rows(logp, 2, stream=[1]), quant, [1])
    assert got["quant_p_ref"][0] == pytest.approx(other[0, 0], abs=1e-6)
    assert got["quant_stream"][0] == pytest.approx(other[0, 1], abs=1e-6)
    assert not got["bounds"][0] & (Bound.QUANT_P_REF | Bound.QUANT_STREAM)


def test_padded_and_empty_top_rows_do_not_crash() -> None:
    logp = log_softmax(np.array([[5, 4, 3]], np.float32))
    padded = TopRows(
        np.array([[0, -1]], np.int32),
        np.array([[-0.5, np.nan]], np.float32),
        np.array([-1], np.int32),
        np.array([np.nan], np.float32),
        np.zeros(1, np.uint8),
    )
    empty = TopRows(
        np.zeros((1, 0), np.int32),
        np.zeros((1, 0), np.float32),
        np.array([0], np.int32),
        np.array([np.nan], np.float32),
        np.array([Invalid.NOT_A_NUMBER], np.uint8),
    )
    full_rows = from_logits(logp.astype(np.float32))
    for rows in (padded, empty):
        for pair in ((rows, full_rows), (full_rows, rows), (rows, rows)):
            _, got = compare(*pair)
            expected = State.INVALID if rows is empty else State.SCORED
            assert got["state"][0] == expected
    mine, _ = compare(padded, padded)
    assert np.isnan(mine["margin"][0])
