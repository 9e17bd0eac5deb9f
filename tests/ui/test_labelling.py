"""Labels and notes by keys: on disk at once, undone, resumed at, of the quant that is meant."""

from __future__ import annotations

import shutil
from pathlib import Path

from kldtui.config import Config
from kldtui.labels import read_labels
from kldtui.position import Position
from tests.ui.review import (
    add_engines,
    at,
    open_review,
    running,
)


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
