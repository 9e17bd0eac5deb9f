"""What measures the real program reads its screen right, and says its figures as promised."""

from __future__ import annotations

import pytest

from bench.measure import Result
from bench.terminal import Screen

WRITTEN = (
    "\x1b[?1049h\x1b[2J\x1b[2;3H\x1b[1;38;2;1;2;3mroots ─ 生x\x1b[0m\x1b]0;title\x07"
    "\x1b[1;1H│▸\x1b[3;5Hlast"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_screen_shows_what_was_written_however_it_came_in(size: int) -> None:
    screen, data = Screen(16, 3), WRITTEN.encode()
    for start in range(0, len(data), size):
        screen.feed(data[start : start + size])
    assert [line.rstrip() for line in screen.lines] == ["│▸", "  roots ─ 生x", "    last"]


@pytest.mark.parametrize(("at_least", "met"), [(True, True), (False, False)])
def test_a_figure_is_held_against_its_goal(at_least: bool, met: bool) -> None:
    result = Result("open", "opening", 3.0, "a small pair", 2.0, "s", 1.2, at_least)
    assert result.to_json() == {
        "name": "open",
        "ours": 3.0,
        "theirs": 2.0,
        "ratio": 1.5,
        "goal": "≥ 1.2" if at_least else "≤ 1.2",
        "met": met,
    }
