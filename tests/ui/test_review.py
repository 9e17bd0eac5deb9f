"""The review screen as a whole: moving, panes, sizes, help, statistics, and how it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kldtui.config import Config
from kldtui.review.session import Session
from kldtui.ui import words
from kldtui.ui.app import KldtuiApp
from tests.builders import cut
from tests.ui.review import (
    add_engines,
    at,
    open_review,
    running,
    stream,
    write_pair,
)

SIZES = [(80, 24), (120, 40), (200, 60)]


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


async def test_a_cut_recording_is_said_in_the_status_line(tmp_path: Path) -> None:
    _, quant, _ = write_pair(tmp_path)
    cut(quant, stream().data_offset + 9 * stream().record_bytes + 3)
    async with running(open_review(tmp_path), (200, 60)) as driver:
        assert "q4.kld: 9 of 21 records" in driver.lines[0]


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
