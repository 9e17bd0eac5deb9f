"""Servers that fail in every way: the app stays live, what came is kept, the next branch works."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
from kldtui.index import Progress
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import bars, desk
from kldtui.ui.app import KldtuiApp
from kldtui.verify import VerifyResult
from tests.builders_index import scan_all
from tests.builders_served import QUANT, REF, ROOT, server, write_served
from tests.fake_server import EOG
from tests.ui.review import Driver, Script, add_engines, open_review, running, write_pair

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


# ── what is said, and who is asked ───────────────────────────────────────────────────────────────


async def test_words_of_files_and_servers_reach_the_screen_harmless(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1], lambda p: [4])
    evil = "bad\x1b]0;owned\x07\x9bname"
    ref.fails = EngineError(f"{evil}: refused")
    async with running(session, (120, 40)) as driver:
        driver.review.say(f"in passing {evil}")
        await driver.pilot.pause()
        shown = painted(driver)
        assert "in passing bad" in shown
        driver.review.say(f"a warning {evil}", "warning")
        await driver.press("b")
        await driver.until(lambda: "refused" in driver.text)
        session.slots["q4"].verified = VerifyResult("other_model", None, None, 0, evil)
        await driver.press("?")
        await driver.pilot.pause()
        shown += painted(driver)
    assert "a warning bad" in shown
    assert not set("\x1b\x07\x9b") & set(shown)


def painted(driver: Driver) -> str:
    """The text of what is on the terminal, as it is written there."""
    update = driver.app.screen._compositor.render_strips()
    return "\n".join(segment.text for strip in update for segment in strip)


async def test_a_server_that_fails_to_be_verified_again_is_not_called_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "READ_SECONDS", 0.0)
    session = open_review(tmp_path)
    ref, quant = add_engines(session, lambda p: [0, 1], lambda p: [4])
    async with running(session, (120, 40)) as driver:
        await driver.press("v")
        await driver.until(lambda: "verified against their recordings" in driver.text)
        await idle(driver)

        async def refuse(*_: object, **more: object) -> Any:
            raise EngineError("nothing answers there")

        ref.next_top = quant.next_top = refuse  # type: ignore[method-assign]
        await driver.press("right", "v")
        await idle(driver)
        await driver.until(lambda: "nothing answers there" in driver.text)
        assert "verified" not in driver.lines[-1]


async def test_a_fault_that_nobody_foresaw_ends_what_runs_beside_it(tmp_path: Path) -> None:
    session = open_review(tmp_path)

    def broken(prefix: Sequence[int]) -> Iterator[int | float]:
        yield 0.05
        raise RuntimeError("unforeseen")

    add_engines(session, lambda p: [0, 0.3, 1, 0.3, 2, 0.3, 3], broken)
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "unforeseen" in driver.text)
        await idle(driver)
        stands = {code: b.ids for code, b in session.recall(HERE, 0).items()}
        await driver.pilot.pause(0.8)
        assert {code: b.ids for code, b in session.recall(HERE, 0).items()} == stands
        assert {b.stop for b in session.recall(HERE, 0).values()} <= {"cancelled", "error"}


async def test_branches_that_another_quant_has_are_no_lack_of_a_server(tmp_path: Path) -> None:
    write_pair(tmp_path)
    (tmp_path / "q8.kld").write_bytes((tmp_path / "q4.kld").read_bytes())
    session = open_review(tmp_path, ("q4", "q8"))
    add_engines(session, lambda p: [0, 1], lambda p: [4])
    del session.slots["q4"]
    async with running(session) as driver:
        await driver.press("b")
        await idle(driver)
        await driver.press("Q", "b")
        await idle(driver)
        assert set(session.recall(HERE, 1)) == {"R·r", "R·q"}
        assert "no server: press c" not in driver.text


async def test_the_list_may_be_of_something_else_when_the_scan_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_review(tmp_path)
    scan_all(session.index)
    session.set_label(session.facts_of(HERE, 0), "1", "hand")
    session.close()
    again = open_review(tmp_path)
    go_on = threading.Event()
    scan = again.index.scan

    def gated(*args: Any, **more: Any) -> Iterator[Progress]:
        go_on.wait(10)
        yield from scan(*args, **more)

    monkeypatch.setattr(again.index, "scan", gated)
    app = KldtuiApp(again, Config())
    async with app.run_test(size=(120, 40)) as pilot:
        driver = Driver(app, pilot)
        await driver.press("f", *"moved", "enter")
        again.listed = lambda *_: np.arange(3)  # type: ignore[method-assign]
        again.flips = lambda i: ()  # type: ignore[method-assign]
        go_on.set()
        await driver.until(lambda: driver.review.scanned)
        assert driver.review.cursor == again.position(0)
    again.close()


async def test_an_engine_that_is_replaced_is_closed(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1], lambda p: [4])
    closed: list[str] = []

    async def close() -> None:
        closed.append(ref.url)

    ref.close = close  # type: ignore[method-assign]
    async with running(session) as driver:
        driver.review.desk.replace("ref", "http://127.0.0.1:9")
        await driver.until(lambda: closed == [ref.url])


async def test_escape_drops_what_was_still_to_follow(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    _, quant = add_engines(session, lambda p: [0, 0.1, 1], lambda p: [4, 0.2, 7, 0.2, 8])
    async with running(session) as driver:
        await driver.press("b")
        await driver.until(lambda: "Q·q" in session.recall(HERE, 0))
        await driver.press("w", "escape")
        await idle(driver)
        await driver.pilot.pause(0.3)
        assert "Q·r" not in session.recall(HERE, 0)
        assert len(quant.asked) == 1


async def test_b_leaves_a_branch_that_was_stopped_beyond_its_length(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 1, 2, 0.3, 3], lambda p: [4])
    async with running(session, config=Config(branch_tokens=2)) as driver:
        await driver.press("b")
        await idle(driver)
        of(session, "R·r").stop = "cancelled"
        asked = len(ref.asked)
        await driver.press("b")
        await idle(driver)
        assert len(ref.asked) == asked
        assert len(of(session, "R·r").ids) == 2


async def test_b_goes_on_with_a_branch_that_broke_off_and_keeps_what_begins_inside_it(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    broken = [True]

    def ref(prefix: Sequence[int]) -> Iterator[int | EngineError]:
        done = len(prefix) - HERE.t - 1
        for k in range(done, 6):
            if k == 3 and broken[0]:
                yield EngineBroke("http://x: it broke off")
            yield k

    add_engines(session, ref, lambda p: [4])
    async with running(session, config=Config(branch_tokens=4)) as driver:
        await driver.press("b")
        await idle(driver)
        assert (of(session, "R·r").stop, of(session, "R·r").ids) == ("error", [0, 1, 2])
        broken[0] = False
        driver.review.query_one("#left").focus()
        await driver.press("right", "right", "b")
        await idle(driver)
        inside = {key for key, b in session.recall(HERE, 0).items() if b.parent is not None}
        assert inside
        await driver.press("escape", "escape", "escape", "b")
        await idle(driver)
        assert of(session, "R·r").ids == [0, 1, 2, 3]
        assert of(session, "R·r").continued_at == [3]
        assert inside <= set(session.recall(HERE, 0))


async def test_a_verified_branch_is_not_continued_by_another_model(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: range(8), lambda p: [4])
    async with running(session, (120, 40), Config(branch_tokens=2)) as driver:
        await driver.press("b")
        await idle(driver)
        before = of(session, "R·r").to_json()
        slot = session.slots["ref"]
        slot.verified = VerifyResult("other_model", 3.0, 3.0, 20, "it is another model")
        await driver.press("+")
        await idle(driver)
        assert of(session, "R·r").to_json() == before
        await driver.until(lambda: "R·r was verified, and the ref server is not" in driver.notices)
        slot.verified = VerifyResult("ok", 0.0, 1.0, 20, "it is the one")
        await driver.press("+")
        await idle(driver)
        assert len(of(session, "R·r").ids) == 4
