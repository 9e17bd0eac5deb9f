"""Branches of many tokens: a key looks at those on screen, not at all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.branching import Arm, Branch
from kldtui.engines.base import Token
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import token_pane
from kldtui.ui.wrap import Wrapped
from tests.ui.review import N_VOCAB, WORDS, Driver, add_engines, open_review, running

ROOT = Position(0, 10)
LENGTH = 5_000
ON_SCREEN = 40
"""More tokens than a key has reason to look at: the one under the cursor, and the next."""


class Tokens(list[Token]):
    """Counts how many tokens are looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Token]:
        Tokens.looked += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Tokens.looked += len(found) if isinstance(at, slice) else 1
        return found


def token(id: int) -> Token:
    return Token(id, WORDS[id], -0.1, ((id, -0.1), ((id + 1) % N_VOCAB, -3.0)))


def put(session: Session, code: str, start: int, seed: int) -> Branch:
    ids = np.random.default_rng(seed).integers(0, N_VOCAB, LENGTH).tolist()
    tokens = Tokens(token(id) for id in ids)
    prefix = [int(t) for t in session.chunk_tokens(0)[:10]]
    branch = Branch(ROOT, Arm.parse(code), "q4", start, prefix, tokens=tokens, stop="limit")
    session.remember(branch)
    return branch


async def judged(driver: Driver) -> tuple[Branch, Branch]:
    """Two long branches side by side."""
    session = driver.app.session
    add_engines(session, lambda p: [0], lambda p: [4])
    facts = session.facts_of(ROOT, 0)
    pair = put(session, "R·r", facts.ref_id, 1), put(session, "Q·q", facts.quant_id, 2)
    await driver.press("b")
    await driver.until(lambda: not driver.review.desk.busy)
    driver.review.pane("left").focus()
    await driver.pilot.pause()
    return pair


async def test_keys_in_a_long_branch_look_at_what_is_on_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid: list[int] = []

    def wrap(*args: Any) -> Wrapped:
        wrapped = Wrapped(*args)
        laid.append(wrapped.n)
        return wrapped

    async with running(open_review(tmp_path)) as driver:
        await judged(driver)
        monkeypatch.setattr(token_pane, "Wrapped", wrap)
        for key in ("right", "down", "pagedown", "end", "home", "tab", "shift+tab", "left"):
            Tokens.looked = 0
            await driver.press(key)
            assert Tokens.looked < ON_SCREEN, key
        for key in ("v", "f4"):
            Tokens.looked = 0
            await driver.press(key)
            await driver.until(lambda: not driver.review.desk.busy)
            assert Tokens.looked < ON_SCREEN, key
        assert max(laid, default=0) < LENGTH, "nothing was laid out anew"


async def test_drawing_all_anew_looks_at_no_token_that_is_shown_already(tmp_path: Path) -> None:
    async with running(open_review(tmp_path)) as driver:
        await judged(driver)
        before = driver.text
        Tokens.looked = 0
        driver.review.refresh_all()
        await driver.pilot.pause()
        assert Tokens.looked < ON_SCREEN
        assert driver.text == before


async def test_what_changes_of_a_long_branch_is_shown(tmp_path: Path) -> None:
    async with running(open_review(tmp_path), size=(200, 60)) as driver:
        left, right = await judged(driver)
        pane = driver.review.pane("left")
        left.tokens.append(token(3))
        driver.review.refresh_pair()
        assert pane.wrapped.n == 10 + 1 + LENGTH + 1
        assert f"{LENGTH + 1} tokens" in str(pane.border_subtitle)
        left.end("eog")
        driver.review.refresh_pair()
        assert "end of turn" in str(pane.border_subtitle)
        meeting = str(driver.review.pane("right").border_subtitle)
        right.tokens[0] = token((left.tokens[0].id + 1) % N_VOCAB)
        right.tokens[1:] = list(left.tokens[1:])
        right.tokens.append(token(5))
        driver.review.refresh_pair()
        assert "≠ +0, meet +1/+1" in str(driver.review.pane("right").border_subtitle)
        assert str(driver.review.pane("right").border_subtitle) != meeting
