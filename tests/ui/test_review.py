"""The review screen, driven by keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kldtui.config import Config
from kldtui.errors import EngineBroke, EngineError, EngineUnreachable
from kldtui.labels import read_labels
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import words
from kldtui.ui.app import KldtuiApp
from kldtui.ui.messages import Preparing
from tests.builders import cut, nan_record, write_kld
from tests.ui.review import (
    Driver,
    add_engines,
    logits_for,
    open_review,
    running,
    stream,
    write_pair,
)

SIZES = [(80, 24), (120, 40), (200, 60)]


def at(driver: Driver) -> str:
    return str(driver.review.cursor)


@pytest.mark.parametrize("size", SIZES)
async def test_opens_at_the_first_root_with_both_models_beside_the_stream(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with running(open_review(tmp_path), size) as driver:
        assert at(driver) == "c0:t10"
        text = driver.text
        assert "4 roots" in text
        assert "labelled 0/4" in text
        assert "c0:t10 after" in text
        assert "▚" in text
        assert all(len(line) == size[0] for line in driver.lines)


async def test_the_root_list_names_every_root_with_both_tokens(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        for place in ("c0:t10", "c0:t13", "c1:t11", "c2:t15"):
            assert place in driver.text
        assert "→␣gamma" in driver.text


async def test_next_and_previous_root_follow_the_list(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press(".")
        assert at(driver) == "c0:t13"
        await driver.press(".", ".")
        assert at(driver) == "c2:t15"
        await driver.press(".")
        assert at(driver) == "c2:t15"
        await driver.press(",")
        assert at(driver) == "c1:t11"


async def test_from_between_roots_the_nearest_one_ahead_is_next(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("l", ".")
        assert at(driver) == "c0:t13"
        await driver.press("h", ",")
        assert at(driver) == "c0:t10"


async def test_arrows_move_over_whole_tokens_and_across_chunks(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("right")
        assert at(driver) == "c0:t11"
        await driver.press("G", "right")
        assert at(driver) == "c1:t0"
        await driver.press("left")
        assert at(driver) == "c0:t15"
        await driver.press("g")
        assert at(driver) == "c0:t0"
        assert "context only" in driver.text


async def test_arrows_move_the_cursor_where_there_is_more_than_fits(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (80, 12)) as driver:
        await driver.press("g", "z")
        before = driver.review.cursor
        await driver.press("down", "right")
        assert driver.review.cursor > before
        await driver.press("end")
        assert at(driver) == "c0:t15"
        await driver.press("home")
        assert at(driver) == "c0:t0"


async def test_chunk_keys_go_to_the_first_scored_position(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press(">")
        assert at(driver) == "c1:t9"
        await driver.press("<")
        assert at(driver) == "c0:t9"
        await driver.press("<")
        assert "this is the first chunk" in driver.text


async def test_go_to_takes_a_position_and_explains_a_wrong_one(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press(":")
        await driver.type("c9:t1")
        assert "there is no chunk 9" in driver.text
        await driver.press("escape", ":")
        await driver.type("1:3")
        assert at(driver) == "c1:t3"


async def test_search_finds_text_across_tokens_and_n_goes_on(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("g", "/")
        await driver.type("beta")
        await driver.until(lambda: driver.review.hits)
        first = at(driver)
        vocab, session = driver.app.session.vocab, driver.app.session
        token = session.chunk_tokens(driver.review.cursor.chunk)[driver.review.cursor.t]
        assert vocab.piece(int(token)) == b" beta"
        await driver.press("n")
        assert at(driver) != first
        await driver.press("N")
        assert at(driver) == first


async def test_filter_narrows_the_list_and_says_what_it_cannot_read(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("f")
        await driver.type("cost>nonsense")
        assert "is not a number of nats" in driver.text
        await driver.press("escape", "f")
        for _ in range(20):
            await driver.press("backspace")
        await driver.type("far chunk:1")
        assert [str(driver.app.session.position(int(i))) for i in driver.review.rows] == ["c1:t11"]
        assert "1 root: chunk:1 far ─ by" in driver.text


async def test_sort_orders_by_cost_and_the_list_says_so(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("s")
        assert "by cost" in driver.text
        costs = [driver.app.session.facts(int(i), 0).cost for i in driver.review.rows]
        assert costs == sorted(costs, reverse=True)


async def test_near_ties_are_counted_apart_from_other_roots(tmp_path: Path) -> None:
    session = open_review(tmp_path, near_tie=4.55)
    async with running(session) as driver:
        near = session.counts[0].near_ties
        assert 0 < near < 4
        assert f"{near} near ties" in driver.text


async def test_with_two_quants_a_strip_shows_which_flip_and_labels_are_of_one(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    async with running(session) as driver:
        await driver.press(".")
        assert at(driver) == "c0:t13"
        assert "● q4" in driver.text
        assert "● q8" in driver.text
        assert "labelled 0/5" in driver.text
        await driver.press("1")
        await driver.until(lambda: session.label(Position(0, 13), 0))
        assert session.label(Position(0, 13), 1) is None
        assert at(driver) == "c0:t13"
        assert driver.review.quant == 1


async def test_a_label_is_on_disk_at_once_and_the_cursor_moves_on(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("2")
        await driver.until(lambda: session.label(Position(0, 10), 0))
        assert "changes_meaning" in (tmp_path / "labels.json").read_text()
        assert at(driver) == "c0:t13"
        assert "labelled 1/4" in driver.text
        assert "②" in driver.text


async def test_keys_typed_in_one_burst_each_act_on_what_the_one_before_left(
    tmp_path: Path,
) -> None:
    """A terminal over SSH delivers what was typed ahead at once."""
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.pilot.press("1", "2", ".", "5")
        await driver.until(lambda: session.labels is not None and session.labels.count() == 3)
        places = [Position(0, 10), Position(0, 13), Position(1, 11), Position(2, 15)]
        records = [session.label(place, 0) for place in places]
        assert [r.key if r else None for r in records] == ["1", "2", None, "5"]


async def test_moving_and_labelling_in_one_burst_labels_where_the_move_led(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        driver.review.query_one("#roots").focus()
        await driver.pilot.press("down", "4")
        await driver.until(lambda: session.label(Position(0, 13), 0))
        assert session.label(Position(0, 10), 0) is None


async def test_a_filter_on_one_quant_labels_that_quant(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    async with running(session) as driver:
        await driver.press("f")
        await driver.type("quant:q8")
        assert at(driver) == "c0:t13"
        assert "ref → q8 [2/2]" in driver.text
        await driver.press("2")
        await driver.until(lambda: session.label(Position(0, 13), 1))
        assert session.label(Position(0, 13), 0) is None


async def test_how_a_root_was_reached_is_stored(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("1", ":")
        await driver.type("c1:t11")
        await driver.press("2")
        await driver.press("f")
        await driver.type("chunk:0")
        await driver.press(".", "5")
        places = (Position(0, 10), Position(1, 11), Position(0, 13))
        records = [session.label(place, 0) for place in places]
        reached = [record.reached if record else None for record in records]
        assert reached == ["order:position", "hand", "filter:chunk:0"]


async def test_a_label_that_cannot_be_saved_is_shown_and_said_not_to_be_saved(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        away = tmp_path.with_name("moved")
        shutil.move(tmp_path, away)
        await driver.press("1")
        await driver.until(lambda: session.label(Position(0, 10), 0))
        assert "NOT SAVED" in driver.text
        assert "labelled 1/4" in driver.text
        assert at(driver) == "c0:t13"
        shutil.move(away, tmp_path)
        await driver.press("2")
        assert "NOT SAVED" not in driver.text
    labels = read_labels(tmp_path / "labels.json")
    assert len(labels) == 2


async def test_what_writes_no_label_does_not_say_that_labels_are_saved(tmp_path: Path) -> None:
    folder = tmp_path / "labels"
    folder.mkdir()
    session = open_review(tmp_path)
    session.keep_labels(folder / "labels.json", "tester")
    async with running(session) as driver:
        await driver.press("e")
        assert (folder / "labels.md").exists()
        shutil.rmtree(folder)
        await driver.press("e")
        assert "cannot be written" in driver.notices
        assert not driver.review.unsaved, "there was no label yet"
        await driver.press("1", "ctrl+r")
        assert "nothing to redo" in driver.notices
        assert driver.review.unsaved
        folder.mkdir()
        await driver.press("e")
        assert driver.review.unsaved
        await driver.press("2")
        assert not driver.review.unsaved


async def test_next_unlabelled_leaves_an_unlabelled_root(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("U")
        assert at(driver) == "c0:t13"


async def test_after_a_filter_the_cursor_is_on_the_list(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("f")
        await driver.type("chunk:1")
        assert at(driver) == "c1:t11"


@pytest.mark.parametrize("words", ["label:9", "chunk:99", "kld<0.1", "cost>nan", "quant:none"])
async def test_a_filter_that_cannot_be_is_said(tmp_path: Path, words: str) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("f")
        await driver.type(words)
        assert "filter: " in driver.text
        assert len(driver.review.rows) == 4


async def test_names_of_quants_cannot_drive_the_terminal(tmp_path: Path) -> None:
    write_pair(tmp_path)
    session = Session.open(tmp_path / "ref.kld", [("a\x1b[31m\u202e", tmp_path / "q4.kld")])
    async with running(session) as driver:
        assert "\x1b" not in driver.text
        assert "\u202e" not in driver.text
        assert "␛[31m" in driver.text


async def test_tab_and_zoom_while_judging_show_something(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2], lambda p: [0, 4, 2])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "end of turn" in driver.text)
        for _ in range(4):
            await driver.press("tab", "z")
            focused = driver.app.focused
            assert focused is not None
            assert focused.region.area > 0
            assert focused.region.height > 30
            await driver.press("z")


@pytest.mark.parametrize("size", [(40, 10), (50, 15), (64, 30)])
async def test_small_terminals_show_less_but_nothing_broken(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2], lambda p: [0, 4, 2])
    async with running(session, size) as driver:
        assert driver.review.query_one("#stream").size.width >= size[0] - 4
        await driver.press("tab")
        focused = driver.app.focused
        assert focused is not None
        assert focused.region.width >= size[0] - 2
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        assert all(str(key) in driver.text for key in range(1, 8))


async def test_nothing_to_compare_is_no_all_clear(tmp_path: Path) -> None:
    laid = stream()
    write_kld(tmp_path / "ref.kld", laid, logits_for(laid))
    nan = [nan_record(laid.n_vocab)] * laid.records
    write_kld(tmp_path / "q4.kld", laid, records=nan)
    async with running(open_review(tmp_path), (200, 60)) as driver:
        assert "nothing to compare" in driver.text
        assert "21 invalid" in driver.text


async def test_a_cut_recording_is_said_in_the_status_line(tmp_path: Path) -> None:
    _, quant, _ = write_pair(tmp_path)
    cut(quant, stream().data_offset + 9 * stream().record_bytes + 3)
    async with running(open_review(tmp_path), (200, 60)) as driver:
        assert "q4.kld: 9 of 21 records" in driver.lines[0]


async def test_a_label_on_a_growing_branch_ends_it_as_it_was_judged(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 60.0, 2], lambda p: [0, 60.0, 2])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "2 tokens" in driver.text)
        await driver.press("7")
        await driver.until(lambda: not driver.review.desk.busy)
        record = session.label(Position(0, 10), 0)
        assert record is not None
        stored = {branch["arm"]: branch for branch in record.branches}
        assert [stored[arm]["ids"] for arm in ("R·r", "Q·q")] == [[0, 1], [0]]
        assert all(b["stop"] == "cancelled" and not b["complete"] for b in stored.values())
        shown = session.recall(Position(0, 10), 0)
        assert [shown[arm].ids for arm in ("R·r", "Q·q")] == [[0, 1], [0]]


async def test_undo_and_redo_go_back_to_the_root_they_change(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("1")
        await driver.until(lambda: at(driver) == "c0:t13")
        await driver.press("u")
        assert at(driver) == "c0:t10"
        assert session.label(Position(0, 10), 0) is None
        await driver.press("ctrl+r")
        record = session.label(Position(0, 10), 0)
        assert record is not None
        assert record.class_id == "recovers"


async def test_a_note_is_kept_and_shown(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("m")
        await driver.type("[red]odd")
        await driver.until(lambda: session.label(Position(0, 10), 0))
        record = session.label(Position(0, 10), 0)
        assert record is not None
        assert record.note == "[red]odd"
        assert "note: [red]odd" in driver.text
        assert "labelled 0/4" in driver.text


async def test_reopening_resumes_at_the_first_unlabelled_root_after_the_last(
    tmp_path: Path,
) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press(".", "1")
        await driver.until(lambda: at(driver) == "c1:t11")
    async with running(open_review(tmp_path)) as driver:
        await driver.until(lambda: at(driver) == "c1:t11")
        assert "labelled 1/4" in driver.text


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


async def test_malformed_on_an_unfinished_branch_asks_first(tmp_path: Path) -> None:

    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2], lambda p: [0, 1, 2])
    async with running(session, config=Config(branch_tokens=2)) as driver:
        await driver.press("b")
        await driver.until(lambda: "limit, + goes on" in driver.text)
        await driver.press("3")
        assert "unfinished" in driver.text
        await driver.press("n")
        assert session.label(Position(0, 10), 0) is None
        await driver.press("3", "y")
        await driver.until(lambda: session.label(Position(0, 10), 0))


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


async def test_help_and_palette_offer_every_action(tmp_path: Path) -> None:
    from kldtui.ui.actions import ACTIONS

    async with running(open_review(tmp_path), (120, 100)) as driver:
        await driver.press("?")
        for action in ACTIONS:
            if action.help:
                assert action.help in driver.text
        await driver.press("escape", "ctrl+p")
        await driver.until(lambda: "Other quant" in driver.text or "Branch" in driver.text)
        await driver.press(*"unlabelled", "enter")


async def test_the_palette_stays_closed_where_it_has_no_room(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (40, 4)) as driver:
        await driver.press("ctrl+p")
        await driver.press("f", "up", "pageup")
        assert driver.app.is_running


async def test_every_action_of_the_table_exists() -> None:
    from kldtui.ui.actions import ACTIONS
    from kldtui.ui.review import ReviewScreen

    for action in ACTIONS:
        name = action.call.split("(")[0]
        if not name.startswith("app."):
            assert hasattr(ReviewScreen, f"action_{name}"), action.id


async def test_keys_can_be_changed_in_the_config(tmp_path: Path) -> None:

    async with running(open_review(tmp_path), config=Config(keys={"next-root": "x"})) as driver:
        await driver.press(".")
        assert at(driver) == "c0:t10"
        await driver.press("x")
        assert at(driver) == "c0:t13"


async def test_text_of_models_is_literal_and_never_a_control(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        text = driver.text
        assert "[/red]" in text
        assert "␛[2J" in text
        assert "\x1b" not in text


async def test_zoom_gives_a_pane_the_screen_and_takes_it_back(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        before = driver.text
        await driver.press("z")
        assert driver.review.query_one("#stream").size.width > 100
        await driver.press("z")
        assert driver.text == before


async def test_tab_reaches_every_pane_on_a_narrow_screen(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (80, 24)) as driver:
        seen = set()
        for _ in range(4):
            await driver.press("tab")
            focused = driver.app.focused
            assert focused is not None
            assert focused.region.area > 0
            seen.add(focused.id)
        assert {"roots", "stream", "detail"} <= seen


async def test_without_a_quant_the_text_can_be_read(tmp_path: Path) -> None:
    async with running(open_review(tmp_path, ())) as driver:
        assert "no quant" in driver.text
        await driver.press(".", "b", "1", "v", "s", "f", "escape", ">")
        assert at(driver) == "c1:t9"


async def test_only_visible_lines_are_drawn(tmp_path: Path) -> None:
    from kldtui.ui.stream import StreamView

    async with running(open_review(tmp_path)) as driver:
        stream = driver.review.query_one(StreamView)
        stream.rendered = 0
        await driver.press("l")
        assert stream.rendered <= 2 * stream.size.height


async def test_the_statistics_of_the_quant_can_be_read_on_the_screen(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (140, 60)) as driver:
        await driver.press("S")
        await driver.until(lambda: "Same top p" in driver.text)
        assert "q4 against ref.kld" in driver.text
        assert "Mean    KLD" in driver.text
        await driver.press("escape")
        assert "Same top p" not in driver.text


async def test_on_a_narrow_screen_the_floors_figures_stand_whole_below(tmp_path: Path) -> None:
    floor = write_pair(tmp_path)[2]
    for size, line in (((80, 60), " floor:"), ((140, 60), "floor ")):
        session = open_review(tmp_path, floor=floor)
        async with running(session, size) as driver:
            await driver.press("S")
            await driver.until(lambda: "Mean PPL(base)" in driver.text)
            shown = [each for each in driver.lines if line in each and "±" in each]
            assert len(shown) >= 6, driver.text
            assert all(each.partition(line)[2].count("±") == 1 for each in shown)


async def test_statistics_say_how_far_they_are_and_escape_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(
        session: Session, quant: int, told: Callable[[float], None], width: int
    ) -> tuple[str, str]:
        told(0.25)
        go_on.wait(10)
        told(0.5)
        return "title", "added up"

    monkeypatch.setattr(words, "statistics", slow)
    async with running(open_review(tmp_path)) as driver:
        await driver.press("S")
        await driver.until(lambda: "adding up… 25%" in driver.text)
        await driver.press("escape")
        go_on.set()
        await driver.until(lambda: "not wanted" in driver.text)
        await driver.pilot.pause(0.2)
        assert "added up" not in driver.text
        assert "50%" not in driver.text


async def test_the_first_root_of_each_run_is_marked_on_a_rollout(tmp_path: Path) -> None:
    async with running(open_review(tmp_path, rollout=True)) as driver:
        stream = driver.review.query_one("#stream")
        assert driver.app.session.rollout is True
        first, later = (driver.app.session.position(i).t for i in (1, 4))
        assert stream.cells.marks[first][0] == "◆"  # type: ignore[attr-defined]
        assert stream.cells.marks[later][0] == "▚"  # type: ignore[attr-defined]


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


async def test_a_changed_key_is_shown_as_it_is_typed(tmp_path: Path) -> None:
    keys = {"next-root": "full_stop,space"}
    async with running(open_review(tmp_path), config=Config(keys=keys)) as driver:
        assert ". space next root" in driver.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_end_is_taken_as_leaving_is(
    tmp_path: Path, number: signal.Signals
) -> None:
    session = open_review(tmp_path)
    app = KldtuiApp(session, Config())
    async with app.run_test() as pilot:
        await pilot.press("1")
        os.kill(os.getpid(), number)
        for _ in range(500):
            if app.return_code is None:
                await asyncio.sleep(0.01)
    assert app.return_code == 128 + number
    session.close()


async def test_the_list_marks_and_the_filter_parts_what_the_floor_flips_too(tmp_path: Path) -> None:
    floor = write_pair(tmp_path)[2]  # it flips at c0:t13 alone
    async with running(open_review(tmp_path, floor=floor)) as driver:
        marked = [line for line in driver.inside_lines("roots") if "~" in line]
        assert [line[1:].split()[0] for line in marked] == ["c0:t13"]
        await driver.press("f", *"nofloor", "enter")
        assert "3 roots: nofloor" in driver.text
        assert "c0:t13" not in driver.inside("roots")
    async with running(open_review(tmp_path)) as driver:
        await driver.press("f", *"nofloor", "enter")
        assert "no floor was measured; start with --floor FILE" in driver.text


async def test_a_word_that_was_taken_for_text_is_seen_to_be(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("f", *"nera cost>1", "enter")
        assert '0 roots: cost>1 "nera"' in driver.text


async def test_where_nothing_flips_the_list_has_the_token_once(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        session.index.pairs[0]["kld"][0] = 9.0
        await driver.press("f", *"moved", "enter")
        assert "1 moved" in driver.text
        assert "→" not in driver.inside("roots")


async def test_each_hit_says_which_of_how_many_it_is(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("/", *"foo", "enter")
        await driver.until(lambda: "hits for 'foo'" in driver.lines[-1])
        n = len(driver.review.hits)
        await driver.press("n")
        assert f"hit 2 of {n}" in driver.lines[-1]
        await driver.press("N", "N")
        assert f"hit {n} of {n}, from the other end again" in driver.lines[-1]
        await driver.press("/", *"漢", "enter")
        await driver.until(lambda: "hits for '漢'" in driver.lines[-1])


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
