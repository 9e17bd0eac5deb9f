"""The reference against itself: what differs from run to run, and what many runs add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines.base import Finish, Reason, Token
from kldtui.floor import (
    Compared,
    Floor,
    Run,
    SelfRuns,
    compare_runs,
    floor_lines,
    live_line,
    run_floor,
    self_flips,
)
from kldtui.position import Position
from kldtui.sampling import sample
from tests.builders_engines import ScriptedEngine


def run(ids: Sequence[int], logp: float | None = -0.5, reason: Reason = "eog") -> Run:
    return Run([Token(id, b"x", logp, ()) for id in ids], reason)


class Runs(ScriptedEngine):
    """Says another thing each time, and remembers whether its cache was on."""

    def __init__(self, *runs: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.runs = list(runs)
        self.cached: list[bool] = []

    async def generate(self, prefix: Any, n: int, top_n: int, *, cache: bool = False) -> Any:
        self.cached.append(cache)
        self.asked.append((list(prefix), n))
        for id, logp in self.runs.pop(0)[:n]:
            yield Token(id, b"x", logp, ())
        yield Finish("limit", len(prefix), 1.0, None)


async def test_it_is_asked_with_the_cache_off_twice_and_on_once() -> None:
    engine = Runs([(1, -0.1), (2, -0.2)], [(1, -0.1), (2, -0.25)], [(1, -0.3), (9, -0.2)])
    found = await run_floor(engine, [5, 6], 8, 1, recorded=(1, -0.15))
    assert engine.cached == [False, False, True]
    assert engine.asked == [([5, 6], 8)] * 3
    runs = found.self_runs
    assert (runs.parts_off, runs.parts_on) == (None, 1)
    assert runs.logp_off == pytest.approx(0.05)
    assert runs.logp_on == pytest.approx(0.2)
    assert (runs.says, runs.says_logp) == (1, -0.1)
    assert not runs.agrees
    assert "with the cache on it parts from itself at +1" in runs.words


async def test_another_engine_is_asked_once_with_its_own_prefix() -> None:
    same = [(1, -0.1), (2, -0.2)]
    engine, other = Runs(same, same, same), Runs([(1, -0.4), (3, -0.2)])
    found = await run_floor(engine, [5], 8, 1, other=(other, [7, 5]))
    assert other.asked == [([7, 5], 8)]
    assert other.cached == [False]
    assert found.compared["other"] == Compared(2, 1, (pytest.approx(0.3),))  # type: ignore[arg-type]
    assert found.self_runs.agrees


def test_runs_are_compared_up_to_where_they_part() -> None:
    assert compare_runs(run([1, 2, 3]), run([1, 2, 3])) == Compared(3, None, (0.0, 0.0, 0.0))
    assert compare_runs(run([1, 2, 3]), run([1, 9, 3])) == Compared(2, 1, (0.0,))
    assert compare_runs(run([1], None), run([1])) == Compared(1, None, ())
    assert compare_runs(run([]), run([])) == Compared(0, None, ())


def test_a_run_that_ends_where_the_other_goes_on_parts_by_that_prediction() -> None:
    assert compare_runs(run([1, 2]), run([1, 2, 3])) == Compared(3, 2, (0.0, 0.0))
    assert compare_runs(run([1, 2, 3]), run([1, 2])) == Compared(3, 2, (0.0, 0.0))
    assert compare_runs(run([]), run([1])) == Compared(1, 0, ())


@pytest.mark.parametrize("reason", ["limit", "context", "error"])
def test_a_run_that_was_cut_is_no_flip(reason: Reason) -> None:
    cut = run([1, 2], reason=reason)
    assert compare_runs(cut, run([1, 2, 3])) == Compared(2, None, (0.0, 0.0))
    assert compare_runs(run([1, 2, 3]), cut) == Compared(2, None, (0.0, 0.0))
    assert compare_runs(cut, run([1, 9, 3])) == Compared(2, 1, (0.0,))
    assert compare_runs(run([], reason=reason), run([1])) == Compared(0, None, ())


async def test_one_that_says_nothing_but_that_it_has_ended_is_counted() -> None:
    engine = ScriptedEngine()  # ends at once
    other = ScriptedEngine([1, 2])
    found = await run_floor(engine, [5], 8, 1, other=(other, [5]))
    line = floor_lines([found])[-1]
    assert (line.against, line.flips.part, line.flips.whole) == ("other", 1, 1)
    assert floor_lines([found])[0].flips.whole == 0


RUNS = st.builds(
    run,
    st.lists(st.integers(0, 2), max_size=8),
    st.just(-0.5),
    st.sampled_from(["eog", "limit", "context"]),
)


@settings(deadline=None, max_examples=200)
@given(RUNS, RUNS)
def test_a_parting_is_the_first_difference(one: Run, other: Run) -> None:
    found = compare_runs(one, other)
    a, b = ([token.id for token in each.tokens] for each in (one, other))
    if found.parts_at is None:
        same = min(len(a), len(b))
        assert a[:same] == b[:same]
        assert found.positions == same
    else:
        assert a[: found.parts_at] == b[: found.parts_at]
        assert a[found.parts_at : found.parts_at + 1] != b[found.parts_at : found.parts_at + 1]
        assert found.positions == found.parts_at + 1
    assert found == compare_runs(other, one)
    floor = Floor({"off": found, "on": found}, 1, None, None)
    assert 0 <= self_flips([floor]).value <= 1 or not found.positions


def test_self_runs_survive_json_and_what_an_older_file_has() -> None:
    runs = SelfRuns(8, None, 3, 0.0, 0.1, 7, -0.2)
    assert SelfRuns.from_json(runs.to_json()) == runs
    older = {"tokens": 8, "parts_off": None, "parts_on": 3, "logp_off": 0.0, "logp_on": 0.1}
    read = SelfRuns.from_json(older)
    assert read is not None
    assert read.parts_on == 3
    assert read.says is None
    assert SelfRuns.from_json(None) is None
    assert SelfRuns.from_json({"tokens": 3}) is None


def floors(parted: int, of: int, tokens_each: int = 10) -> list[Floor]:
    return [
        Floor(
            {
                "off": Compared(tokens_each, None, (0.0,) * tokens_each),
                "on": Compared(3, 2, (0.1, 0.3))
                if k < parted
                else Compared(tokens_each, None, (0.1,) * tokens_each),
            },
            tokens_each,
            1,
            -0.5,
            (1 if k else 2, -0.4),
        )
        for k in range(of)
    ]


def test_many_runs_add_up_to_a_rate_with_wilsons_interval() -> None:
    off, on = floor_lines(floors(2, 20))
    assert (off.flips.part, off.flips.whole, off.flips.value) == (0, 200, 0.0)
    assert off.flips.low == 0.0
    assert off.flips.high == pytest.approx(0.0188, abs=1e-4)
    assert (on.flips.part, on.flips.whole) == (2, 18 * 10 + 2 * 3)
    assert (on.parted.part, on.parted.whole) == (2, 20)
    assert on.parted.low == pytest.approx(0.0279, abs=1e-4)
    assert on.parted.high == pytest.approx(0.3010, abs=1e-4)
    assert on.most == pytest.approx(0.3)
    assert on.mean == pytest.approx(0.1 + 0.2 * 2 / 184)


def test_the_self_flip_rate_counts_no_flip_of_another_engine() -> None:
    alone = floors(1, 4)
    beside = [
        Floor(
            {**each.compared, "other": Compared(1, 0, ())},
            each.tokens,
            each.says,
            each.says_logp,
            each.recorded,
        )
        for each in alone
    ]
    assert floor_lines(beside)[-1].flips.value == 1
    assert self_flips(beside) == self_flips(alone)
    assert self_flips(beside).part == 1


def test_live_against_recorded_counts_other_argmaxes_and_the_gap_of_equal_ones() -> None:
    live = live_line(floors(0, 10))
    assert (live.flips.part, live.flips.whole) == (1, 10)
    assert live.mean == pytest.approx(0.1)
    nothing = live_line([])
    assert math.isnan(nothing.flips.value)
    assert nothing.to_json()["flip_rate"]["value"] is None


def test_what_an_engine_does_not_say_is_not_made_up() -> None:
    silent = Floor(
        {"off": Compared(4, None, ()), "on": Compared(4, None, ())}, 4, 1, None, (1, 0.0)
    )
    line = floor_lines([silent])[0]
    assert (line.mean, line.p99, line.most) == (None, None, None)
    assert live_line([silent]).mean is None


# ── which positions ──────────────────────────────────────────────────────────────────────────


POSITIONS = st.lists(st.builds(Position, st.integers(0, 9), st.integers(0, 99)), max_size=60)


@settings(deadline=None, max_examples=60)
@given(POSITIONS, st.integers(1, 20), st.integers(0, 20), st.randoms())
def test_a_sample_is_the_same_each_time_and_lies_within_a_larger_one(
    positions: list[Position], n: int, more: int, random: Any
) -> None:
    found = sample(positions, n)
    assert found == sorted(set(found))
    assert len(found) == min(n, len(set(positions)))
    shuffled = positions[:]
    random.shuffle(shuffled)
    assert sample(shuffled, n) == found
    assert set(found) <= set(sample(positions, n + more)) <= set(positions)
