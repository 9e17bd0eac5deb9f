"""What a batch of branches still has to make, given a file of some that were made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kldtui.branching import QQ, RR, Branch
from kldtui.engines.base import Token
from kldtui.position import Position
from kldtui.review.batch import make_plan
from kldtui.review.branch_log import BranchLog
from kldtui.review.session import Session
from tests.builders_index import scan_all
from tests.ui.review import add_engines, open_review

HERE = Position(0, 10)
LENGTH = 6


@pytest.fixture
def session(tmp_path: Path) -> Session:
    session = open_review(tmp_path)
    scan_all(session.index)
    session.count_anew()
    add_engines(session, lambda _: [], lambda _: [])
    return session


def made(session: Session, n: int, **more: Any) -> Branch:
    fields: dict[str, Any] = {
        "position": HERE,
        "arm": RR,
        "quant": "q4",
        "start_id": session.place(HERE, 0).starts["ref"],
        "prefix_ids": [int(token) for token in session.chunk_tokens(0)[: HERE.t]],
        "tokens": [Token(1, b"x", -0.5, ()) for _ in range(n)],
        "stop": "limit",
    }
    return Branch(**(fields | more))


def missing(session: Session, path: Path, *branches: Branch) -> list[str]:
    log = BranchLog.open(path, session.ref, session.names, missing_ok=True)
    for branch in branches:
        log.add(branch)
    plan = make_plan(session, [HERE], [RR, QQ], log, LENGTH)
    assert plan.held + len(plan.jobs) == 2
    return [job.arm.code for _, job in plan.jobs]


def test_a_branch_of_the_wanted_length_is_not_made_again(session: Session, tmp_path: Path) -> None:
    assert missing(session, tmp_path / "b", made(session, LENGTH)) == ["Q·q"]


def test_one_that_was_cut_by_a_smaller_length_is(session: Session, tmp_path: Path) -> None:
    assert missing(session, tmp_path / "b", made(session, LENGTH - 1)) == ["R·r", "Q·q"]


@pytest.mark.parametrize("more", [{"stop": "eog", "complete": True}, {"stop": "context"}])
def test_one_that_ended_by_itself_is_not_however_short(
    session: Session, tmp_path: Path, more: dict[str, Any]
) -> None:
    assert missing(session, tmp_path / "b", made(session, 1, **more)) == ["Q·q"]


@pytest.mark.parametrize("stop", ["error", "cancelled"])
def test_one_that_broke_off_is(session: Session, tmp_path: Path, stop: str) -> None:
    broken = made(session, LENGTH, stop=stop)
    assert missing(session, tmp_path / "b", broken) == ["R·r", "Q·q"]


def test_one_that_begins_with_another_token_is(session: Session, tmp_path: Path) -> None:
    start = session.place(HERE, 0).starts["ref"]
    other = made(session, LENGTH, start_id=start + 1)
    assert missing(session, tmp_path / "b", other) == ["R·r", "Q·q"]
