"""Lists of positions: which qualify, in what order, and what a near tie and a move are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kldtui.index import Index, Kind, State
from kldtui.recordings import open_recording
from kldtui.roots import (
    RootQuery,
    cost,
    moved_threshold,
    near_tie_from_floor,
    select,
    stands_at,
)
from tests.builders import make_logits, make_stream, write_kld

NAN = float("nan")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Two chunks of six positions, two quants, columns set by hand."""
    stream = make_stream(2, 13, 4)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    recording = open_recording(path)
    index = Index(recording, [recording, recording])
    index.ref["state"] = State.SCORED
    index.ref["ref_p_ref"] = -1
    index.ref["margin"] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    for pair in index.pairs:
        pair["state"] = State.SCORED
        pair["ref_p_quant"] = -1
    one, two = index.pairs
    for pair, roots, costs, klds in (
        (one, [1, 4, 8], [0.1, 2.0, 0.5], [0.3, 0.2, 0.1]),
        (two, [4, 9], [2.5, 0.2], [0.05, NAN]),
    ):
        pair["kind"][roots] = Kind.ROOT
        pair["ref_p_quant"][roots] = -1 - np.array(costs)
        pair["kld"][roots] = klds
    return index


def test_roots_are_the_union_over_the_quants_in_order_of_position(index: Index) -> None:
    assert select(index, RootQuery()).tolist() == [1, 4, 8, 9]
    assert select(index, RootQuery(quants=(1,))).tolist() == [4, 9]
    assert stands_at(index, 4) == (True, True)
    assert stands_at(index, 8) == (True, False)
    assert stands_at(index, 0) == (False, False)


def test_orders_descend_by_the_largest_of_the_quants_that_flip(index: Index) -> None:
    assert select(index, RootQuery(sort="cost")).tolist() == [4, 8, 9, 1]
    assert select(index, RootQuery(sort="margin")).tolist() == [9, 8, 4, 1]
    index.pairs[1]["kld"][1] = 9  # no flip there: does not count
    assert select(index, RootQuery(sort="kld")).tolist() == [1, 4, 8, 9], "NaN comes last"


def test_equals_stay_in_order_of_position(index: Index) -> None:
    index.pairs[0]["kld"] = 1
    index.pairs[1]["kld"] = 1
    assert select(index, RootQuery(sort="kld")).tolist() == [1, 4, 8, 9]


def test_a_small_negative_sorts_below_zero(index: Index) -> None:
    index.pairs[0]["kld"][[1, 4, 8]] = [-2e-5, 0, 1e-5]
    assert select(index, RootQuery(sort="kld", quants=(0,))).tolist() == [8, 4, 1]


def test_filters_narrow_the_list(index: Index) -> None:
    assert select(index, RootQuery(chunk=0)).tolist() == [1, 4]
    assert select(index, RootQuery(chunk=7)).tolist() == []
    assert select(index, RootQuery(min_cost=0.5)).tolist() == [4, 8]
    assert select(index, RootQuery(min_cost=0.3)).tolist() == [4, 8]
    assert select(index, RootQuery(min_cost=0.15)).tolist() == [4, 8, 9]


def test_ties_invalid_and_missing_are_no_roots_and_have_their_own_lists(index: Index) -> None:
    one = index.pairs[0]
    one["kind"][2] = Kind.TIE
    one["state"][1] = State.INVALID
    one["state"][8] = State.MISSING
    one["state"][3] = State.PENDING
    one["kind"][3] = Kind.ROOT
    assert select(index, RootQuery(quants=(0,))).tolist() == [4]
    assert select(index, RootQuery(quants=(0,), kind="ties")).tolist() == [2]
    assert select(index, RootQuery(quants=(0,), kind="invalid")).tolist() == [1]
    assert np.isnan(cost(index, 0)[[1, 3, 8]]).all()


def test_moved_positions_have_a_roots_kld_and_no_flip(index: Index) -> None:
    assert moved_threshold(index, 0) == pytest.approx(0.2)
    index.pairs[0]["kld"][[0, 2, 3]] = [0.19, 0.21, 0.2]
    assert select(index, RootQuery(quants=(0,), kind="moved")).tolist() == [2, 3]
    index.pairs[0]["kind"][:] = Kind.AGREE
    assert np.isnan(moved_threshold(index, 0))
    assert select(index, RootQuery(quants=(0,), kind="moved")).tolist() == []


def test_the_floor_gives_the_99th_percentile_of_its_roots_costs(index: Index) -> None:
    costs = [0.1, 2.0, 0.5, 0.3, 0.2]
    pair = index.pairs[0]
    pair["kind"][[1, 4, 8, 9, 10]] = Kind.ROOT
    pair["ref_p_quant"][[1, 4, 8, 9, 10]] = -1 - np.array(costs)
    assert near_tie_from_floor(index, 0) == pytest.approx(np.percentile(costs, 99))


def test_a_floor_of_few_roots_sets_no_threshold(index: Index) -> None:
    assert np.isnan(near_tie_from_floor(index, 0))
    index.pairs[1]["kind"][:] = Kind.AGREE
    assert np.isnan(near_tie_from_floor(index, 1))
