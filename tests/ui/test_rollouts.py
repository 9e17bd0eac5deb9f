"""Rollouts in the review: the prompt is context, and two models' own open as a pair."""

from __future__ import annotations

from pathlib import Path

from kldtui.branching import QQ, RR
from kldtui.position import Position
from kldtui.review.session import Session
from tests.builders_recorder import own_pair, rolling_server, score_run, teller
from tests.ui.review import running


async def test_a_quant_scored_on_rollouts_is_reviewed_with_the_prompts_as_context(
    tmp_path: Path,
) -> None:
    ref, _ = await own_pair(tmp_path)
    async with rolling_server(next_top=teller({ord("W"): 10})) as fake:
        await score_run(fake, ref, tmp_path / "q4.run")
    session = Session.open(ref, [("q4", tmp_path / "q4.run")])
    async with running(session) as driver:
        await driver.press("g", ".")
        assert driver.review.cursor == Position(0, 10)
        assert "What is" in driver.text, "the prompt stands before what was said"
        assert "greedy rollout" in driver.text
        assert RR.code in session.recall(Position(0, 10), 0), "no server is needed for it"


async def test_two_models_own_rollouts_open_as_branches_where_they_part(tmp_path: Path) -> None:
    ref, quant = await own_pair(tmp_path)
    session = Session.open(ref, [("q4", quant)])
    async with running(session) as driver:
        await driver.press("g", ".")
        assert driver.review.cursor == Position(0, 10)
        pair = session.recall(Position(0, 10), 0)
        assert {RR.code, QQ.code} <= pair.keys()
        mine, theirs = pair[RR.code], pair[QQ.code]
        assert mine.start_id != theirs.start_id
        assert mine.prefix_ids == theirs.prefix_ids
        assert "Q·q q4" in driver.text
        assert "no quant server" not in driver.text
        await driver.press(".")
        assert driver.review.cursor == Position(2, 4)
