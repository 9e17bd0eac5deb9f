"""Tokens laid into lines."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kldtui.ui.wrap import Wrapped

WIDTHS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=80)


def wrapped(tokens: list[tuple[int, bool]], width: int) -> Wrapped:
    widths = np.array([w for w, _ in tokens], np.int64)
    breaks = np.array([b for _, b in tokens], bool)
    return Wrapped(widths, breaks, width)


@given(WIDTHS, st.integers(1, 30))
def test_every_token_is_on_one_line_and_in_order(
    tokens: list[tuple[int, bool]], width: int
) -> None:
    laid = wrapped(tokens, width)
    seen = [t for line in range(laid.lines) for t in range(*laid.span(line))]
    assert seen == list(range(len(tokens)))
    assert all(
        laid.line_of(t) == line for line in range(laid.lines) for t in range(*laid.span(line))
    )


@given(WIDTHS, st.integers(1, 30))
def test_a_line_fits_and_ends_only_where_it_must(
    tokens: list[tuple[int, bool]], width: int
) -> None:
    laid = wrapped(tokens, width)
    for line in range(laid.lines):
        first, stop = laid.span(line)
        used = sum(tokens[t][0] for t in range(first, stop))
        assert used <= width or stop == first + 1
        assert not any(tokens[t][1] for t in range(first, stop - 1))
        if line + 1 < laid.lines:
            assert tokens[stop - 1][1] or used + tokens[stop][0] > width


@given(WIDTHS, st.integers(12, 30))
def test_a_click_finds_the_token_whose_cells_it_hits(
    tokens: list[tuple[int, bool]], width: int
) -> None:
    laid = wrapped(tokens, width)
    for t in range(len(tokens)):
        line, column = laid.line_of(t), laid.column_of(t)
        assert laid.token_at(line, column) == t
        assert laid.token_at(line, column + tokens[t][0] - 1) == t
    assert laid.token_at(laid.lines, 0) is None


def test_words_stay_whole_where_they_fit() -> None:
    widths = np.array([4, 3, 3, 5, 9, 9], np.int64)
    openers = np.array([True, True, False, True, True, False])
    laid = Wrapped(widths, np.zeros(6, bool), 10, openers)
    assert [laid.span(line) for line in range(laid.lines)] == [(0, 3), (3, 4), (4, 5), (5, 6)]


@given(WIDTHS, st.integers(1, 30), st.integers(0, 2**32))
def test_words_or_not_every_token_is_laid_once_and_lines_fit(
    tokens: list[tuple[int, bool]], width: int, seed: int
) -> None:
    openers = np.random.default_rng(seed).random(len(tokens)) < 0.4
    widths = np.array([w for w, _ in tokens], np.int64)
    breaks = np.array([b for _, b in tokens], bool)
    laid = Wrapped(widths, breaks, width, openers)
    spans = [laid.span(line) for line in range(laid.lines)]
    assert [t for span in spans for t in range(*span)] == list(range(len(tokens)))
    assert all(stop == first + 1 or widths[first:stop].sum() <= width for first, stop in spans)


def test_what_follows_a_line_feed_begins_the_next_line() -> None:
    widths = np.array([3, 4, 2, 5], np.int64)
    breaks = np.array([False, True, False, True])
    laid = Wrapped(widths, breaks, 10, None, np.array([0, 3, 0, 4]))
    assert [laid.span(line) for line in range(laid.lines)] == [(0, 2), (2, 4), (4, 4)]
    assert [laid.indent(line) for line in range(laid.lines)] == [0, 3, 4]
    assert laid.column_of(2) == 3
    assert [laid.token_at(1, x) for x in (0, 2, 3, 5)] == [1, 1, 2, 3]
    assert laid.token_at(2, 0) == 3


def test_no_tokens_is_no_line() -> None:
    laid = wrapped([], 10)
    assert laid.lines == 0
    assert laid.token_at(0, 0) is None
