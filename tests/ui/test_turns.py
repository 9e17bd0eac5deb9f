"""Keys that come at once, as over a slow line, do what they do one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual import events
from textual.keys import _character_to_key

from kldtui.position import Position
from kldtui.ui.dialogs import Dialog
from tests.ui.review import Driver, open_review, running


def burst(driver: Driver, *keys: str) -> None:
    """All of them are there before the first is looked at."""
    for key in keys:
        single = len(key) == 1
        name = _character_to_key(key) if single else key
        driver.app.post_message(events.Key(name, key if single else None))


async def test_what_is_typed_behind_a_key_that_opens_a_dialog_goes_into_it(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        burst(driver, "m", *"2 much q", "enter", ".", "m", *"b5", "enter", ".", "5")
        await driver.until(lambda: session.labelled()[0] == 1)
        assert session.labels is not None
        found = {str(r.position): (r.note, r.key) for r in session.labels.records()}
        assert found == {"c0:t10": ("2 much q", None), "c0:t13": ("b5", None), "c1:t11": ("", "5")}


@pytest.mark.parametrize("keys", ["mx", "/foo", "f", "c", "S", "?", ":0:12", "3"])
@pytest.mark.parametrize("ends", [("enter", "escape", "escape"), ("escape",) * 3])
async def test_a_dialog_is_closed_once(tmp_path: Path, keys: str, ends: tuple[str, ...]) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        burst(driver, *keys, *ends)
        await asyncio.sleep(0.4)
        await driver.until(lambda: driver.app.screen is driver.review)
        await driver.press("g", ".", "5")
        await driver.until(lambda: session.label(Position(0, 10), 0) is not None)


async def test_a_dialog_that_is_closed_leaves_alone_what_lies_under_it(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await driver.press("?")
        dialog = driver.app.screen
        assert isinstance(dialog, Dialog)
        dialog.dismiss()
        dialog.dismiss()
        await driver.pilot.pause()
        assert driver.app.screen is driver.review


async def test_a_burst_in_a_dialog_goes_on_under_it(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        burst(driver, "f", *"kld>1", "enter", ":", *"c1:t11", "enter", "1")
        await driver.until(lambda: session.label(Position(1, 11), 0) is not None)
        assert driver.review.filter.min_kld == 1


async def test_keys_behind_the_one_that_leaves_are_dropped(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        burst(driver, "q", "1", "b", "m", "x", "enter")
        await driver.until(lambda: not driver.app.is_running)
        assert session.labelled()[0] == 0


async def test_tab_on_a_terminal_of_a_few_cells_does_nothing(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (10, 3)) as driver:
        burst(driver, "b", "tab", "tab", "z", "tab", "escape")
        await asyncio.sleep(0.3)
        assert driver.app.is_running
