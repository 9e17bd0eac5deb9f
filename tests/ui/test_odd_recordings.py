"""Recordings that hold what none should: the review shows them, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.position import Position
from kldtui.review import figures
from kldtui.review.session import Session
from kldtui.ui import words
from tests.builders import Stream, cut, write_kld
from tests.builders_run import CHUNK, HEADER, raw_run
from tests.ui.review import (
    N_VOCAB,
    logits_for,
    open_review,
    open_top3_review,
    running,
    stream,
    write_pair,
)


@pytest.mark.parametrize("odd", [N_VOCAB, N_VOCAB + 70_000, -3])
async def test_a_stream_token_outside_the_vocabulary_has_no_probability(
    tmp_path: Path, odd: int
) -> None:
    laid = stream()
    logits = logits_for(laid)
    ids = np.array(laid.tokens)
    ids[0, 10] = odd
    changed = Stream(ids, laid.n_vocab)
    for name in ("ref", "q4"):
        write_kld(tmp_path / f"{name}.kld", changed, logits)
    session = open_review(tmp_path)
    detail = session.detail(Position(0, 10), 0, 5)
    assert next(row for row in detail.rows if row.token == odd).ref is None
    async with running(session) as driver:
        driver.review.go(Position(0, 10))
        await driver.pilot.pause()
        await driver.press("right", "left")
        assert str(driver.review.cursor) == "c0:t10"
        assert driver.app.is_running


@pytest.mark.parametrize(
    "tags", [[["user", 0]], [[1, 0, 2]], [["user", "0", 2]], ["user"], {"user": 1}, 7]
)
async def test_tags_that_are_none_are_passed_over(tmp_path: Path, tags: Any) -> None:
    position = {"chunk": 0, "t": 3, "token": 10, "logp": -1.5, "top": [[4, -0.5], [10, -1.5]]}
    for name in ("ref", "q4"):
        raw_run(tmp_path / f"{name}.kld", [HEADER, {**CHUNK, "tags": tags}, position])
    session = Session.open(tmp_path / "ref.kld", [("q4", tmp_path / "q4.kld")])
    session.keep_labels(tmp_path / "labels.json", "tester")
    assert json.dumps(session.tag(Position(0, 3))) == '""'
    async with running(session) as driver:
        while driver.review.order != "queue":  # which looks for calls
            await driver.press("s")
        assert driver.app.is_running


async def test_after_a_list_that_failed_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "LONG", 1)
    session = open_review(tmp_path)
    async with running(session) as driver:
        review = driver.review
        await driver.until(lambda: review.scanned and review.rows.size and not review.list_busy)
        with monkeypatch.context() as failing:
            failing.setattr(session, "listed", lambda *_: 1 // 0)
            await driver.press("s")
            await driver.until(lambda: not review._busy)
        await driver.press("s")
        await driver.until(lambda: not review.list_busy)
        assert review.rows.size == 4


def test_the_help_says_once_what_is_wrong_with_each_file(tmp_path: Path) -> None:
    ref, *_ = write_pair(tmp_path)
    cut(ref, ref.stat().st_size - 100)
    session = open_review(tmp_path, ("q4", "q8"))
    lines = words.help_facts(session, 10)
    assert len([line for line in lines if line.startswith("ref.kld:")]) == 1
    assert len(lines) == len(set(lines))


def test_what_is_copied_of_a_root_says_which_figures_are_bounds(tmp_path: Path) -> None:
    session = open_top3_review(tmp_path)
    facts = session.facts_of(Position(0, 10), 0)
    text = words.copied(session, facts.position, 0, None)
    session.close()
    assert f"cost ≥{facts.cost:.2f} " in text
    assert f" KLD ≥{facts.kld:.2f}" in text
