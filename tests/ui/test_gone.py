"""Recordings that go while a review is open: it says so and goes on, and labels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kldtui.position import Position
from kldtui.review import figures
from kldtui.review.session import Session
from kldtui.ui.messages import RootChosen, ScanAdvanced
from tests.builders import write_kld
from tests.builders_recorder import own_pair
from tests.ui.review import logits_for, open_review, running, stream, write_pair


@pytest.mark.parametrize("long", [False, True])
async def test_a_list_that_cannot_be_made_any_more_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    if long:
        monkeypatch.setattr(figures, "LONG", 1)
    ref, *_ = write_pair(tmp_path)
    session = open_review(tmp_path)
    async with running(session) as driver:
        review = driver.review
        await driver.until(lambda: review.rows.size and not review.list_busy)
        before = review.rows.tolist()
        os.truncate(ref, 0)
        while review.order != "queue":  # which looks into every chunk for calls
            await driver.press("s")
        await driver.until(lambda: "was cut" in driver.notices)
        await driver.until(lambda: not review.list_busy)
        assert sorted(review.rows.tolist()) == sorted(before)
        await driver.press("1")
        await driver.until(lambda: session.labelled()[0] == 1)
        await driver.press("m")
        await driver.type("kept")
        await driver.until(lambda: session.label(Position(0, 10), 0) is not None)
        await driver.press("s")
        await driver.until(lambda: not review.list_busy)
        assert driver.app.is_running
    assert '"note":"kept"' in (tmp_path / "labels.json").read_text("utf-8")


async def test_the_chunk_on_screen_stays_held_when_a_list_has_looked_at_many(
    tmp_path: Path,
) -> None:
    laid = stream(100)
    write_kld(tmp_path / "ref.kld", laid, logits_for(laid))
    flips = {7 * chunk: (chunk % 16, 1.0) for chunk in range(100)}
    write_kld(tmp_path / "q4.kld", laid, logits_for(laid, flips))
    session = open_review(tmp_path)
    async with running(session) as driver:
        here = driver.review.cursor
        while driver.review.order != "queue":
            await driver.press("s")
        os.truncate(tmp_path / "ref.kld", 0)
        await driver.press("H", "S", "escape", "left", "right")
        driver.review.post_message(ScanAdvanced(None, done=True))
        await driver.press("right")
        assert driver.app.is_running
        assert driver.review.cursor.chunk == here.chunk
        assert "nothing at byte" not in driver.notices, "its tokens were not asked for again"


async def test_a_click_on_a_root_of_a_rollout_that_has_gone_can_be_labelled(
    tmp_path: Path,
) -> None:
    ref, *_ = write_pair(tmp_path, rollout=True)
    session = open_review(tmp_path)
    async with running(session) as driver:
        await driver.press("home")
        os.truncate(ref, 0)
        driver.review.post_message(RootChosen(driver.review.places.find(4) or 0))
        await driver.until(lambda: driver.review.cursor == Position(0, 13))
        await driver.press("5")
        assert driver.app.is_running
        assert session.class_of(Position(0, 13), 0) == "same_meaning"


async def test_a_root_is_labelled_though_the_quants_own_rollout_has_gone(tmp_path: Path) -> None:
    ref, quant = await own_pair(tmp_path)
    session = Session.open(ref, [("q4", quant)])
    session.keep_labels(tmp_path / "labels.json", "tester")
    async with running(session) as driver:
        await driver.press("g", ".")
        os.truncate(quant, 0)
        await driver.press(".")
        assert driver.review.cursor == Position(2, 4)
        await driver.press("1")
        await driver.until(lambda: session.labelled()[0] == 1)
        assert driver.app.is_running


async def test_what_a_message_meets_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, *_ = write_pair(tmp_path)
    session = open_review(tmp_path)
    async with running(session) as driver:
        session._tokens.clear()
        os.truncate(ref, 0)
        driver.review.post_message(ScanAdvanced(None, done=True))
        await driver.until(lambda: "was cut" in driver.notices)
        assert driver.app.is_running


async def test_the_same_trouble_is_not_said_again_while_it_stands_there(tmp_path: Path) -> None:
    ref, *_ = write_pair(tmp_path)
    async with running(open_review(tmp_path)) as driver:
        os.truncate(ref, 0)
        await driver.press(">", ">", ">", ">")
        told = driver.notices.splitlines()
        assert sum("nothing at byte" in line for line in told) == 1
