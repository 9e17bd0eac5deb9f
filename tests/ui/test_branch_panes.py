"""A pair of branches on the screen: made, stopped, gone on with, kept, or without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kldtui.config import Config
from kldtui.errors import EngineBroke, EngineError, EngineUnreachable
from kldtui.position import Position
from kldtui.ui.messages import Preparing
from tests.ui.review import (
    add_engines,
    open_review,
    running,
)

SIZES = [(80, 24), (120, 40), (200, 60)]


async def test_branching_fills_both_panes_and_shows_where_they_part(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = add_engines(session, lambda p: [0, 1, 2, 0, 1, 2], lambda p: [0, 4, 2, 0, 1, 2])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "≠ +1" in driver.text)
        text = driver.text
        assert "R·r reference" in text
        assert "Q·q q4" in text
        assert "end of turn" in text
        assert "your judgement" in text
        facts = session.facts(session.flat(Position(0, 10)) or 0, 0)
        prefix = [int(t) for t in session.chunk_tokens(0)[:10]]
        await driver.until(lambda: not driver.review.desk.busy)
        assert ref.asked == [[*prefix, facts.ref_id], [*prefix, facts.quant_id]]
        assert quant.asked == [[*prefix, facts.quant_id]]


async def test_coming_back_to_a_root_shows_its_branches_without_asking_again(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1], lambda p: [0, 2])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        await driver.press(".", ",", "b")
        await driver.until(lambda: "end of turn" in driver.text)
        assert len(ref.asked) == 2


async def test_a_label_holds_both_branches_and_a_later_session_shows_them(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 12], lambda p: [0, 4, 13])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        await driver.press("1")
        await driver.until(lambda: session.label(Position(0, 10), 0))
    record = session.label(Position(0, 10), 0)
    assert record is not None
    assert {branch["arm"] for branch in record.branches} == {"R·r", "Q·q", "R·q"}
    async with running(open_review(tmp_path)) as driver:
        await driver.press(":")
        await driver.type("c0:t10")
        assert " eps" in driver.text
        assert " zeta" in driver.text


async def test_escape_stops_a_branch_and_keeps_what_came(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 60.0, 2], lambda p: [0, 60.0, 2])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "2 tokens" in driver.text)
        await driver.press("escape")
        await driver.until(lambda: "stopped" in driver.text)
        assert "stopped, + goes on" in driver.text
        branch = session.recall(Position(0, 10), 0)["R·r"]
        assert branch.ids == [0, 1]
        assert not branch.complete


async def test_a_server_that_dies_leaves_the_partial_branch_and_a_second_try_succeeds(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    answers: list[list[int | float | EngineError]] = [
        [0, 1, EngineBroke("the server closed the connection")],
        [4],
        [0, 1, 2],
        [4],
    ]
    add_engines(session, lambda p: answers.pop(0), lambda p: [0])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "the server closed" in driver.text)
        branch = session.recall(Position(0, 10), 0)["R·r"]
        assert branch.ids == [0, 1]
        assert not branch.complete
        await driver.press("1")
        await driver.until(lambda: session.label(Position(0, 10), 0))
        await driver.press(",", "B")
        await driver.until(lambda: session.recall(Position(0, 10), 0)["R·r"].ids == [0, 1, 2])


async def test_an_unreachable_server_is_said_and_the_review_goes_on(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0], lambda p: [0])
    ref.fails = EngineUnreachable("http://127.0.0.1:1: nothing answers")
    async with running(session) as driver:
        await driver.until(lambda: "nothing answers" in driver.text)
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        await driver.press("7")
        await driver.until(lambda: session.label(Position(0, 10), 0))


async def test_plus_continues_a_branch_that_was_cut_by_its_length(tmp_path: Path) -> None:

    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1, 2, 4, 7, 8], lambda p: [0, 2])
    async with running(session, config=Config(branch_tokens=2)) as driver:
        await driver.press("b")
        await driver.until(lambda: "limit, + goes on" in driver.text)
        assert session.recall(Position(0, 10), 0)["R·r"].ids == [0, 1]
        await driver.press("+")
        await driver.until(lambda: len(session.recall(Position(0, 10), 0)["R·r"].ids) == 4)
        assert ref.asked[-1][-2:] == [0, 1]


@pytest.mark.parametrize("size", SIZES)
async def test_a_generated_token_shows_its_own_top_n(tmp_path: Path, size: tuple[int, int]) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2], lambda p: [0, 4, 2])
    async with running(session, size) as driver:
        await driver.press("b")
        await driver.until(lambda: "end of turn" in driver.text)
        driver.review.query_one("#left").focus()
        await driver.press("right", "right")
        assert "branch +1" in driver.text
        assert "90.5" in driver.text


async def test_a_branch_asked_for_before_its_engine_is_there_follows_when_it_is(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1], lambda p: [0, 2])
    late = session.slots.pop("q4")
    async with running(session) as driver:
        driver.review.post_message(Preparing("making the quant 40%"))
        await driver.press("b")
        await driver.until(lambda: "R·r" in session.recall(Position(0, 10), 0))
        await driver.until(lambda: not driver.review.desk.busy)
        assert "making the quant 40%" in driver.lines[0]
        assert "no server" not in driver.text
        session.slots["q4"] = late
        driver.review.desk.connect_all()
        await driver.until(lambda: "Q·q" in session.recall(Position(0, 10), 0))


async def test_without_a_server_it_is_said_once_and_covers_nothing(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("b")
        await driver.until(lambda: "no server: press c" in driver.lines[-1])
        assert not driver.app._notifications
        assert "no q4 server: c connects one" in driver.text
        await driver.press("escape", "b")
        driver.review.post_message(Preparing("fetching the model"))
        await driver.press("b")
        await driver.until(lambda: "the branches follow when it is there" in driver.lines[-1])
        assert "␣gamma … follows when the q4 server is there" in driver.text


async def test_the_key_line_offers_what_a_root_has_branches_for(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session, (200, 60)) as driver:
        await driver.press("b")
        driver.review.query_one("#keys").tell("")  # type: ignore[attr-defined]
        await driver.pilot.pause()
        assert "b branch" in driver.lines[-1]
        assert "other pair" not in driver.lines[-1]
        add_engines(session, lambda p: [0, 1], lambda p: [0, 2])
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy and driver.review.has_branches)
        driver.review.query_one("#keys").tell("")  # type: ignore[attr-defined]
        await driver.pilot.pause()
        assert "a other pair" in driver.lines[-1]
        assert "b branch" not in driver.lines[-1]
