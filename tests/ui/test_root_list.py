"""The root list and the search by keys: what is listed, in what order, and what is gone to."""

from __future__ import annotations

from pathlib import Path

import pytest

from kldtui.position import Position
from tests.builders import nan_record, write_kld
from tests.ui.review import (
    at,
    logits_for,
    open_review,
    running,
    stream,
    write_pair,
)


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


async def test_nothing_to_compare_is_no_all_clear(tmp_path: Path) -> None:
    laid = stream()
    write_kld(tmp_path / "ref.kld", laid, logits_for(laid))
    nan = [nan_record(laid.n_vocab)] * laid.records
    write_kld(tmp_path / "q4.kld", laid, records=nan)
    async with running(open_review(tmp_path), (200, 60)) as driver:
        assert "nothing to compare" in driver.text
        assert "21 invalid" in driver.text


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
