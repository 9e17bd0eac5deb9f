"""While a root is judged: nothing that was generated is lost, and what decides is on screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from textual.widgets import Input

from kldtui.config import Config
from kldtui.index import State
from kldtui.position import Position
from kldtui.ui import bars, branch_words
from tests.ui.review import add_engines, open_review, running

HERE = Position(0, 10)


class Slow:
    """A script that goes on where its prefix ends: the first part quickly, the rest slowly."""

    def __init__(self, root: int, quick: int) -> None:
        self.root, self.quick = root, quick
        self.asked: list[int] = []

    def __call__(self, prefix: Sequence[int]) -> Iterator[int | float]:
        done = len(prefix) - self.root - 1
        self.asked.append(done)
        for k in range(done, 40):
            if k >= self.quick:
                yield 0.2
            yield (k * 5 + k // 7) % 14


@pytest.mark.parametrize("key", ["w", "b"])
async def test_what_is_asked_for_while_a_branch_grows_follows_it(tmp_path: Path, key: str) -> None:
    session = open_review(tmp_path)
    ref, quant = Slow(HERE.t, 8), Slow(HERE.t, 8)
    add_engines(session, ref, quant)
    async with running(session, (120, 40), Config(branch_tokens=8)) as driver:
        await driver.press("b", "w")
        await driver.until(lambda: not driver.review.desk.busy)
        before = {code: b.ids for code, b in session.recall(HERE, 0).items()}
        assert {code: len(ids) for code, ids in before.items()} == dict.fromkeys(before, 8)
        ref.asked.clear()
        quant.asked.clear()
        await driver.press("+")
        await driver.until(lambda: len(session.recall(HERE, 0)["R·r"].ids) > 8)
        await driver.press(key)
        await driver.until(lambda: not driver.review.desk.busy, 20)
        now = {code: b.ids for code, b in session.recall(HERE, 0).items()}
        assert len(now["R·r"]) == len(now["Q·r"]) == 16
        assert all(now[code][:8] == ids for code, ids in before.items())
        assert (ref.asked, quant.asked) == ([8], [8])


async def test_b_goes_on_with_what_was_stopped_and_only_B_begins_anew(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref = Slow(HERE.t, 3)
    add_engines(session, ref, lambda p: [4])
    async with running(session, (120, 40), Config(branch_tokens=6)) as driver:
        await driver.press("b")
        await driver.until(lambda: "R·r" in session.recall(HERE, 0))
        await driver.until(lambda: len(session.recall(HERE, 0)["R·r"].ids) == 4)
        await driver.press("escape")
        await driver.until(lambda: not driver.review.desk.busy)
        held = session.recall(HERE, 0)["R·r"].ids
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        branch = session.recall(HERE, 0)["R·r"]
        assert len(branch.ids) == 6
        assert branch.ids[: len(held)] == held
        assert branch.continued_at == [len(held)]
        await driver.press("B")
        await driver.until(lambda: not driver.review.desk.busy)
        assert session.recall(HERE, 0)["R·r"].id != branch.id


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_what_decides_is_on_screen_while_a_root_is_judged(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    session = open_review(tmp_path, near_tie=4.25)
    add_engines(session, lambda p: [0, 1], lambda p: [4])
    async with running(session, size) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        for words in ("c0:t10  near tie  cost 4.20  margin 4.00", "labelled 0/4"):
            assert words in driver.lines[0]
        await driver.press("m")
        await driver.type("look again")
        assert "✎ look again" in driver.lines[0]
        await driver.press(".")
        assert "c0:t13  root  cost 4.50" in driver.lines[0]
        await driver.press("escape", "escape")
        assert "4 roots" in driver.lines[0]


async def test_on_a_small_screen_keys_go_to_what_is_seen(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2, 3], lambda p: [4])
    async with running(session, (80, 24)) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        await driver.press("right", "right")
        assert driver.review.cursor == HERE
        assert driver.review.focused is driver.review.query_one("#left")
        await driver.press("escape", "b", "z")
        assert " alpha" in driver.text
        assert driver.review.query_one("#left").region.height > 15


async def test_a_note_of_a_label_file_steers_no_terminal_and_stays_as_it_is(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    nasty = "\x1b]52;c;AAAA\x07 \u202e see \x9b2J"
    async with running(session) as driver:
        session.set_note(session.facts_of(HERE, 0), nasty, "hand")
        await driver.press("m")
        value = driver.app.screen.query_one(Input).value
        assert value.isprintable()
        assert "see" in value
        assert driver.text.replace("\n", "").isprintable()
        await driver.press("enter")
        record = session.label(HERE, 0)
        assert record is not None
        assert record.note == nasty
        assert driver.text.replace("\n", "").isprintable()
        await driver.press("0")
        assert "no label here" in driver.text


@pytest.mark.parametrize("text", ["ref=", "q4= ", "="])
async def test_a_server_without_a_url_is_not_looked_for(tmp_path: Path, text: str) -> None:
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("c")
        driver.app.screen.query_one(Input).value = text
        await driver.press("enter")
        assert "write a URL" in driver.text
        assert not session.slots


async def test_the_statistics_scroll_both_ways_on_a_small_screen(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), (60, 24)) as driver:
        await driver.press("S")
        await driver.until(lambda: "Mean" in driver.text)
        page = driver.app.screen.query_one("#page")
        await driver.press("l")
        assert page.scroll_x > 0
        await driver.press("h")
        assert page.scroll_x == 0


async def test_a_branch_that_stands_still_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_words, "SILENCE_SECONDS", 0.1)
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 60.0, 2], lambda p: [4])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "no token for" in driver.text)
        await driver.press("escape")
        await driver.until(lambda: "no token for" not in driver.text)


async def test_what_the_reference_says_of_itself_stays_on_screen_while_one_judges(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1], lambda p: [4])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        await driver.press("V")
        await driver.until(lambda: not driver.review.desk.busy)
        assert "live the reference says ␣alpha" in driver.lines[0]
        await driver.press(".", ",")
        assert "live the reference says ␣alpha" in driver.lines[0]


async def test_the_result_of_verifying_can_be_read_whole(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1], lambda p: [4])
    async with running(session, (100, 30)) as driver:
        await driver.press("v")
        await driver.until(lambda: "verified against" in driver.text)
        assert "mean |Δ log p| ref 0.00, q4 0.00 nat; ? says more" in driver.text


async def test_a_branch_that_was_asked_for_says_what_it_waits_for(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    _, quant = add_engines(session, lambda p: [0, 1], lambda p: [4, 7])
    quant.hangs = {"next_top"}
    async with running(session) as driver:
        assert "b branches here: ␣gamma" in driver.text
        await driver.press("b")
        await driver.until(lambda: "verifying the q4 server" in driver.lines[0])
        panes = "\n".join(driver.lines[5:])
        assert panes.count("begins soon: verifying the q4 server") == 2
        assert "b branches here" not in panes
        await driver.press("escape")
        await driver.until(lambda: not driver.review.desk.busy)
        assert "b branches here: ␣gamma" in driver.text
        assert "begins soon" not in driver.text


async def test_a_branch_that_follows_others_says_so_meanwhile(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    _, quant = add_engines(session, lambda p: [0, 1], lambda p: [4, 7])
    quant.hangs = {"generate"}
    async with running(session, (120, 40)) as driver:
        await driver.press("b")
        await driver.until(lambda: "Q·q" in session.recall(HERE, 0))
        await driver.press("w")
        assert "begins soon: others come first" in driver.text
        assert "b branches here" not in driver.text


async def test_the_table_sets_branches_side_by_side_only_where_their_text_is_the_same(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 7, 11], lambda p: [0, 1, 9, 11])
    async with running(session, (120, 40)) as driver:
        await driver.press("b", "w")
        await driver.until(lambda: "Q·r" in session.recall(HERE, 0) and not driver.review.desk.busy)
        driver.review.query_one("#right").focus()  # Q·r beside R·r: they part at their third token
        await driver.press("right", "right", "right")
        assert "branch +2" in driver.text
        assert "R·r % Q·r %" in driver.inside("detail")
        await driver.press("right")
        assert "branch +3" in driver.text
        assert "R·r has another text before this token" in driver.inside("detail")
        assert driver.inside("detail").startswith("– % Q·r %")


async def test_what_was_said_below_ends_with_the_next_key_once_it_could_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "READ_SECONDS", 0.0)
    async with running(open_review(tmp_path), (120, 40)) as driver:
        await driver.press("1", "u")
        assert driver.lines[-1].startswith(" undo: label")
        await driver.press("right")
        assert "undo: label" not in driver.lines[-1]
        assert "next root" in driver.lines[-1]


async def test_of_several_quants_the_one_that_is_judged_is_always_named(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    async with running(session, (80, 24)) as driver:
        await driver.until(lambda: driver.review.scanned)
        await driver.press(":", *"c0:t13", "enter", "b", "m", *"a note of some length", "enter")
        assert driver.lines[0].startswith(" c0:t13 of q4 ")
        assert "✎ a note of som…" in driver.lines[0]
        await driver.press("2")
        assert driver.review.cursor == Position(0, 13)
        assert driver.lines[0].startswith(" c0:t13 of q8 ")
        assert "changes meaning: q4. Now q8, which flips here too" in driver.lines[-1]
        await driver.pilot.resize_terminal(120, 40)
        await driver.pilot.pause()
        assert "your judgement of q8" in driver.text


async def test_hint_and_note_are_read_whole_where_there_is_room(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [10, 0], lambda p: [10, 0])
    async with running(session, (120, 40)) as driver:
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy)
        note = "it goes on about the right to life and never comes back to the point"
        await driver.press("m", *note, "enter")
        assert f"note: {note}" in driver.inside("classes")
        assert "Its call does not parse or fit its schema." in driver.inside("classes")


async def test_a_quant_that_was_not_recorded_here_is_not_said_to_agree(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    async with running(session, (120, 40)) as driver:
        await driver.until(lambda: driver.review.scanned)
        i = session.flat(HERE)
        assert i is not None
        assert session.stands(i) == (True, False)
        session.index.pairs[1]["state"][i] = State.MISSING
        driver.review.refresh_list()
        driver.review.refresh_all()
        await driver.pilot.pause()
        assert session.stands(i) == (True, None)
        assert "● q4 - q8" in driver.inside("detail")
        assert "●-" in driver.inside("roots")


async def test_a_listed_root_of_another_quant_is_no_root_of_this_one(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    async with running(session, (120, 40)) as driver:
        await driver.until(lambda: driver.review.scanned)
        await driver.press("Q", "1")
        assert "q8 does not flip here: Q goes to a quant that does" in driver.lines[-1]
        assert session.labelled() == (0, 5)
