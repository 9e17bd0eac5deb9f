"""Panes draw lines with border and colours at once: what is seen is what Textual would draw."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip

from kldtui.ui.base_style import Pane
from kldtui.ui.detail_view import DetailView
from tests.ui.review import Driver, add_engines, open_review, running

KEYS = (
    *("right", "down", ".", ",", ">", "<", "pagedown", "s", "h", "tab", "down", "end", "home"),
    *("tab", "down", "down", "tab", "right", "z", "down", "z", "1", "u", "shift+tab", "r"),
)


def cells(strip: Strip) -> list[tuple[str, object]]:
    """Each character with its style: where segments end does not matter."""
    return [(char, part.style) for part in Segment.simplify(strip) for char in part.text]


def check(driver: Driver, after: str) -> None:
    """Compare each visible pane's lines with those that Textual makes of it from the start."""
    for pane in driver.app.screen.query(Pane):
        if not pane.display or not pane.size.area or not pane.is_on_screen:
            continue
        whole = Region(0, 0, *pane.outer_size)
        mine = pane.render_lines(whole)
        assert pane._frame is not None, "the border is one that is drawn by Frame"
        pane._styles_cache.clear()
        theirs = super(Pane, pane).render_lines(whole)
        for y, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.cell_length == b.cell_length == whole.width
            assert cells(a) == cells(b), f"line {y} of {pane.id} after {after}"


@pytest.mark.parametrize("look", ["textual-dark", "textual-light", "ansi-dark", "NO_COLOR"])
async def test_every_line_is_as_textual_would_draw_it_now(
    tmp_path: Path, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if look == "NO_COLOR":
        monkeypatch.setenv(look, "1")
    async with running(open_review(tmp_path, ("q4", "q8"))) as driver:
        if look in driver.app.available_themes:
            driver.app.theme = look
            await driver.pilot.pause()
        check(driver, "the start")
        for key in KEYS:
            await driver.press(key)
            await driver.until(lambda: not driver.review.list_busy)
            check(driver, key)
        driver.app.theme = "nord"
        await driver.pilot.pause()
        check(driver, "another theme")
        await driver.pilot.resize_terminal(80, 24)
        await driver.pilot.pause()
        check(driver, "another size")


async def test_branches_that_grow_are_as_textual_would_draw_them(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 0.01, 2, 3] * 9, lambda p: [0, 4, 2, 0.02, 3, 2] * 9)
    async with running(session) as driver:
        await driver.press("b")
        while driver.review.desk.busy:
            await driver.pilot.pause(0.02)
            check(driver, "a token")
        for key in ("tab", "tab", "down", "right", "end", "home", "escape", "1", "u", "."):
            await driver.press(key)
            check(driver, key)


async def test_the_scrollbar_is_painted_again_where_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(open_review(tmp_path)) as driver:
        pane = driver.review.query_one(DetailView)
        height, painted = pane.size.height, list[int]()
        pane.extend(height)

        def refresh(*regions: Region, **_: bool) -> None:
            lines = [y for region in regions for y in region.line_range]
            painted.extend(lines or range(height))

        monkeypatch.setattr(pane, "refresh", refresh)
        pane.extend(2 * height)
        assert painted == list(range(height)), "each line is a cell shorter"
        painted.clear()
        long = pane.laid.bar
        pane.extend(3 * height)
        short = pane.laid.bar
        assert long is not None
        assert short is not None
        assert set(painted) == set(long) ^ set(short) != set()
