"""Few pictures of the whole screen; everything finer is asserted as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ui.review import Driver, add_engines, open_review, running


@pytest.mark.parametrize(
    "size", [(80, 24), (120, 40), (200, 60)], ids=["80x24", "120x40", "200x60"]
)
async def test_review(
    tmp_path: Path, size: tuple[int, int], snapshot: Callable[[Driver], None]
) -> None:
    async with running(open_review(tmp_path, ("q4", "q8")), size) as driver:
        await driver.press(".")
        snapshot(driver)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
async def test_judging(
    tmp_path: Path, size: tuple[int, int], snapshot: Callable[[Driver], None]
) -> None:
    session = open_review(tmp_path)
    ref = [7, 1, 2, 4, 12, 13, 14, 1, 2, 4, 0, 11]
    add_engines(session, lambda p: ref, lambda p: [7, 9, 8, *ref[3:]])
    async with running(session, size) as driver:
        await driver.press("b")
        await driver.until(lambda: "end of turn" in driver.text and not driver.review.desk.busy)
        for branch in session.recall(driver.review.cursor, 0).values():
            branch.seconds = 1.0
        driver.review.refresh_all()
        await driver.pilot.pause()
        snapshot(driver)
