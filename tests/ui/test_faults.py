"""Servers that fail in every way: the app stays live, what came is kept, the next branch works."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from kldtui.branching import Branch
from kldtui.config import Config
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    EngineUnreachable,
    UnusableEngine,
)
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import desk
from tests.builders_served import QUANT, REF, ROOT, server, write_served
from tests.fake_server import EOG
from tests.ui.review import Driver, Script, add_engines, open_review, running

HERE = Position(0, 10)


def of(session: Session, code: str) -> Branch:
    return session.recall(HERE, 0)[code]


async def idle(driver: Driver) -> None:
    await driver.until(lambda: not driver.review.desk.busy)


async def still_works(driver: Driver, session: Session) -> None:
    """A label is given, and a branch is made."""
    await driver.press("7")
    await driver.until(lambda: session.label(HERE, 0))
    await driver.press(",", "b")
    await driver.until(lambda: of(session, "R·r").stop == "eog" and of(session, "Q·q").complete)


FAULTS = [
    EngineBroke("http://x: it closed the connection in mid-answer"),
    EngineBroke("http://x: it sent what is no JSON"),
    EngineRefused("http://x: it says 'slot unavailable'"),
    EngineUnreachable("http://x: nothing answers there"),
    EngineUnauthorized("http://x: it asks for an API key"),
    EngineLoading("http://x: it is loading the model"),
    ContextExceeded("http://x: request (900 tokens) exceeds the available context size"),
    UnusableEngine("http://x: a log-probability above 0"),
    EngineError("http://x: something else"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_fault_in_mid_answer_keeps_what_came_with_the_servers_words(
    tmp_path: Path, fault: EngineError
) -> None:
    session = open_review(tmp_path)
    broken = [True]

    def says(_: Any) -> list[int | float | EngineError]:
        return [0, 1, fault] if broken[0] else [0, 1, 2]

    add_engines(session, says, lambda p: [4])
    async with running(session) as driver:
        await driver.press("b")
        await idle(driver)
        branch = of(session, "R·r")
        assert (branch.ids, branch.stop, branch.complete) == ([0, 1], "error", False)
        assert branch.error == str(fault)
        assert str(fault) in driver.notices
        assert of(session, "Q·q").stop == "eog"
        broken[0] = False
        await still_works(driver, session)
        assert of(session, "R·r").ids == [0, 1, 2]


@pytest.mark.parametrize("what", ["connect", "next_top", "generate"])
async def test_a_server_that_never_answers_is_left_with_escape(tmp_path: Path, what: str) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1], lambda p: [4])
    ref.hangs = {what}
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: driver.review.desk.busy)
        await driver.press("right", "left", "?", "escape")
        assert driver.review.desk.busy
        await driver.press("escape")
        await idle(driver)
        assert driver.review.judging
        await driver.press("escape")
        assert not driver.review.judging
        ref.hangs = set()
        await driver.press("escape")
        await still_works(driver, session)


async def test_branches_that_were_stopped_before_they_began_are_marked(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1], lambda p: [4])
    ref.hangs = {"generate"}
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "R·q" in session.recall(HERE, 0))
        await driver.press("a")
        assert "waits for the other arm" in driver.text
        await driver.press("escape")
        await idle(driver)
        assert {of(session, code).stop for code in ("R·r", "R·q")} == {"cancelled"}


async def test_another_root_stops_what_runs_for_the_one_before(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    hung = [True]

    def says(_: Any) -> list[int | float | EngineError]:
        return [0, 3600.0] if hung[0] else [0, 1]

    add_engines(session, says, lambda p: [4])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: session.recall(HERE, 0) and of(session, "R·r").ids)
        hung[0] = False
        await driver.press(".", "b")
        await idle(driver)
        there = session.recall(Position(0, 13), 0)
        assert {branch.stop for branch in there.values()} == {"eog"}
        assert of(session, "R·r").stop == "cancelled"


async def test_thousands_of_tokens_a_second_leave_keys_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_review(tmp_path)
    floods: Script = lambda p: itertools.cycle([0, 1, 2, 4, 7, 8, 12, 13, 14])  # noqa: E731
    monkeypatch.setattr("kldtui.branching.running.loop_period", lambda ids: None)
    add_engines(session, floods, floods)
    async with running(session, config=Config(branch_tokens=1_000_000)) as driver:
        drawn = [0]
        show = driver.review.refresh_pair

        def counted() -> None:
            drawn[0] += 1
            show()

        monkeypatch.setattr(driver.review, "refresh_pair", counted)
        await driver.press("b")
        await driver.until(lambda: len(of(session, "R·r").ids) > 500)
        assert driver.review.desk.busy
        await driver.press("H")
        assert driver.review.heat == "margin"
        assert driver.review.desk.busy
        await driver.press("escape")
        await idle(driver)
        came = len(of(session, "R·r").ids)
        assert 500 < came < 1_000_000
        assert drawn[0] < came / 10
        assert of(session, "R·r").stop == "cancelled"


async def test_one_token_a_minute_is_waited_for_and_time_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "BEAT_SECONDS", 0.05)
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 60.0, 1], lambda p: [4])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "running… · 1 token · 1 s" in driver.text)
        assert of(session, "R·r").stop is None
        await driver.press("2")
        await driver.until(lambda: session.label(HERE, 0))


async def test_a_server_that_answers_no_more_questions_is_no_hindrance_to_leaving(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    ref, quant = add_engines(session, lambda p: [0], lambda p: [4])
    ref.hangs = quant.hangs = {"connect"}
    async with running(session) as driver:
        await driver.press("escape")
        assert "no longer waiting" in driver.notices
        await driver.until(lambda: session.slots["ref"].state == "waiting")
        ref.hangs.clear()
        await still_works(driver, session)
        await driver.press("b", "q")


# ── real sockets ─────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def served(folder: Path, **faults: Any) -> AsyncIterator[tuple[Driver, Session, Any]]:
    """A review of a pair with a fake llama-server each, the reference's with faults."""
    ref, quant = write_served(folder)
    session = Session.open(ref, [("q4", quant)])
    session.keep_labels(folder / "labels.json", "tester")
    async with server(REF, [*b"okay", EOG], **faults) as one, server(QUANT, [*b"no", EOG]) as two:
        session.add_server("ref", one.url)
        session.add_server("q4", two.url)
        async with running(session) as driver:
            await driver.press(":")
            await driver.type(ROOT)
            yield driver, session, one


def the(session: Session, code: str) -> Branch:
    return session.recall(Position.parse(ROOT), 0)[code]


@pytest.mark.parametrize(
    ("fault", "well", "words"),
    [
        ({"dies_after": 2}, {"dies_after": None}, "closed the connection"),
        ({"fails_after": 2}, {"fails_after": None}, "slot unavailable"),
        ({"no_end": True}, {"no_end": False}, "end"),
    ],
    ids=["dies", "error event", "no end"],
)
async def test_a_real_server_that_breaks_off(
    tmp_path: Path, fault: dict[str, Any], well: dict[str, Any], words: str
) -> None:
    async with served(tmp_path, **fault) as (driver, session, fake):
        await driver.press("b")
        await idle(driver)
        branch = the(session, "R·r")
        assert branch.data.startswith(b"ok")
        assert (branch.stop, branch.complete) == ("error", False)
        assert words in (branch.error or "")
        assert the(session, "Q·q").stop == "eog"
        for name, value in well.items():
            setattr(fake, name, value)
        await driver.press("b")
        await idle(driver)
        assert the(session, "R·r").stop == "eog"
        assert the(session, "R·r").text == "okay</s>"
        assert fake.most_running == 1


async def test_a_real_server_that_falls_silent_is_left_and_asked_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (driver, session, fake):
        await driver.press("b")
        await idle(driver)
        fake.pause = 3600.0
        await driver.press("B")
        await driver.until(lambda: the(session, "R·r").ids == [ord("o")])
        await driver.press("escape")
        await idle(driver)
        assert the(session, "R·r").stop == "cancelled"
        fake.pause = 0.0
        await driver.press("b")
        await idle(driver)
        assert the(session, "R·r").text == "okay</s>"


async def connect(driver: Driver, where: str) -> None:
    await driver.press("c")
    driver.app.screen.query_one(Input).value = where
    await driver.press("enter")


async def test_a_server_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    mute = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    async with served(tmp_path) as (driver, session, fake):
        await driver.press("b")
        await idle(driver)
        await connect(driver, f"ref=http://127.0.0.1:{port}")
        await driver.until(lambda: session.slots["ref"].state == "connecting")
        await driver.press("B")
        await driver.until(lambda: driver.review.desk.busy)
        await driver.press("escape", "escape", "escape")
        await driver.until(lambda: session.slots["ref"].state == "waiting")
        await connect(driver, f"ref={fake.url}")
        await driver.until(lambda: session.slots["ref"].state == "ready")
        await driver.press("B")
        await idle(driver)
        assert the(session, "R·r").text == "okay</s>"
    mute.close()


async def test_a_model_that_loads_is_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path, loading=2) as (driver, session, _):
        await driver.press("b")
        await driver.until(lambda: session.slots["ref"].state == "ready", 20)
        await idle(driver)
        assert the(session, "R·r").stop == "eog"
