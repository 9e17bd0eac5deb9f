"""A long stream: what a key costs does not grow with it. Times are measured in bench."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui import roots
from kldtui.config import Config
from kldtui.index import Index, Kind, Progress, State
from kldtui.position import Position
from kldtui.review import figures
from kldtui.review.listing import Filter
from kldtui.review.session import Session
from kldtui.ui import list_screen, review_view
from kldtui.ui.app import KldtuiApp
from kldtui.ui.detail_view import DetailView
from kldtui.ui.list_screen import Places
from kldtui.ui.messages import ScanAdvanced
from kldtui.ui.root_list import RootList
from kldtui.ui.stream import StreamView
from kldtui.vocab import from_pieces
from tests.builders import Stream, write_kld
from tests.ui.review import Driver, write_pair

N_VOCAB = 8


def write_long(folder: Path, n_chunk: int, n_ctx: int = 64) -> tuple[Path, Path]:
    """Two files of holes: every record unwritten."""
    ids = (np.arange(n_chunk * n_ctx, dtype=np.int32) * 5 % N_VOCAB).reshape(n_chunk, n_ctx)
    stream = Stream(ids, N_VOCAB)
    paths = []
    for name in ("ref", "quant"):
        paths.append(write_kld(folder / f"{name}.kld", stream))
        with paths[-1].open("r+b") as file:
            file.truncate(stream.size)
    return paths[0], paths[1]


def fill(index: Index, every: int) -> None:
    """Every so manieth position a root, each with a KLD and a cost of its own."""
    n = index.layout.n
    at = np.arange(n)
    for table in (index.ref, index.pairs[0]):
        table["state"], table["rest"] = State.SCORED, 1
    index.ref["ref_id"], index.ref["ref_p_ref"] = 1, -0.5
    index.ref["margin"] = (at * 7 % 1000) / 100
    index.ref["stream_rank"] = 2
    pair = index.pairs[0]
    pair["kind"] = np.where(at % every == 0, Kind.ROOT, Kind.AGREE)
    pair["quant_id"] = np.where(at % every == 0, 2, 1)
    pair["ref_p_quant"] = -0.5 - (at * 11 % 997) / 100
    pair["kld"] = (at * 13 % 1009) / 100


def long_session(folder: Path, n_chunk: int = 400, every: int = 5) -> Session:
    ref, quant = write_long(folder, n_chunk)
    session = Session.open(ref, [("quant", quant)])
    session.vocab = from_pieces({i: f" w{i}".encode() for i in range(N_VOCAB)}, "test")
    fill(session.index, every)
    return session


@asynccontextmanager
async def reviewing(session: Session) -> AsyncIterator[Driver]:
    app = KldtuiApp(session, Config())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        driver = Driver(app, pilot)
        await driver.until(lambda: app.review.scanned and not app.review.list_busy)
        await pilot.pause()
        yield driver
    session.close()


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of a few thousand positions count as long, and blocks are short."""
    monkeypatch.setattr(figures, "LONG", 1000)
    monkeypatch.setattr(roots, "_BLOCK", 700)
    monkeypatch.setattr(roots, "_AT_ONCE", 100)


KEYS = ("right", "down", "pagedown", ".", ",", ">", "<", "s")


async def lines_drawn(session: Session) -> dict[str, tuple[int, int]]:
    """How many lines of the root list and the stream each key has drawn."""
    out = {}
    async with reviewing(session) as driver:
        shown = driver.app.screen.query_one(RootList)
        stream = driver.app.screen.query_one(StreamView)
        driver.review.go(Position(session.ref.shape.n_chunk // 2, 40))
        await driver.press("right")
        for key in KEYS:
            before = shown.rendered, stream.rendered
            await driver.press(key)
            await driver.until(lambda: not driver.review.list_busy)
            out[key] = shown.rendered - before[0], stream.rendered - before[1]
    return out


@pytest.mark.usefixtures("long")
async def test_a_key_draws_as_many_lines_of_a_stream_twenty_times_as_long(tmp_path: Path) -> None:
    drawn = []
    for n_chunk in (100, 2000):
        folder = tmp_path / str(n_chunk)
        folder.mkdir()
        drawn.append(await lines_drawn(long_session(folder, n_chunk)))
    assert drawn[0] == drawn[1]
    height = 40
    for key, (listed, streamed) in drawn[1].items():
        assert listed <= 3 * height, key
        assert streamed <= 2 * height, key
    assert drawn[1]["right"] == (0, 1), "moving within a line draws that line"


@pytest.mark.usefixtures("long")
async def test_a_key_is_one_frame_and_lays_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reviewing(long_session(tmp_path)) as driver:
        frames: list[object] = []
        layouts: list[object] = []
        display, layout = driver.app._display, driver.review._refresh_layout

        def shown(screen: Any, update: Any) -> None:
            display(screen, update)
            if update is not None:
                frames.append(update)

        def laid(*args: Any, **kwargs: Any) -> None:
            layouts.append(args)
            layout(*args, **kwargs)

        driver.review.go(Position(200, 40))
        await driver.pilot.pause(0.1)
        monkeypatch.setattr(driver.app, "_display", shown)
        monkeypatch.setattr(driver.review, "_refresh_layout", laid)
        for key in ("right", "down", "pagedown", ".", ",", ">", "<"):
            frames.clear()
            await driver.press(key)
            await driver.pilot.pause(0.1)
            assert len(frames) == 1, key
        assert not layouts


@pytest.mark.usefixtures("long")
async def test_long_lists_are_made_in_the_background_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = long_session(tmp_path)
    threads: list[str] = []
    listed = session.listed

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return listed(*args)

    monkeypatch.setattr(session, "listed", noted)
    async with reviewing(session) as driver:
        for order in ("position", "cost", "kld", "margin", "queue"):
            assert driver.review.order == order
            assert driver.review.rows.tolist() == listed(Filter(), order).tolist()
            await driver.press("s")
            await driver.until(lambda: not driver.review.list_busy)
        await driver.press("f")
        await driver.type("kld>5 cost>2")
        await driver.until(lambda: not driver.review.list_busy)
        assert 0 < driver.review.rows.size < session.counts[0].roots
        facts = [session.facts(int(i), 0) for i in driver.review.rows]
        assert all(each.kld >= 5 and each.cost >= 2 for each in facts)
        assert driver.review.row_of_cursor() is not None, "the cursor goes into the list"
    assert threads
    assert all(name != threading.main_thread().name for name in threads)


@pytest.mark.usefixtures("long")
async def test_keys_during_a_long_sort_are_answered_and_the_last_order_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = long_session(tmp_path)
    hold, listed = threading.Event(), session.listed

    def slow(*args: Any) -> Any:
        hold.wait(10)
        return listed(*args)

    async with reviewing(session) as driver:
        monkeypatch.setattr(session, "listed", slow)
        before = driver.review.rows
        await driver.press("s", "s")
        assert driver.review.rows is before
        assert "… " in driver.text
        here = driver.review.cursor
        await driver.press("right")
        assert driver.review.cursor == Position(here.chunk, here.t + 1)
        hold.set()
        await driver.until(lambda: not driver.review.list_busy)
        assert driver.review.rows.tolist() == listed(Filter(), "kld").tolist()
        assert "… " not in driver.text


@pytest.mark.usefixtures("long")
async def test_a_long_review_resumes_behind_the_last_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.ui.review_view.RESUMED", 10)
    session = long_session(tmp_path)
    session.keep_labels(tmp_path / "l.json", "me")
    at = [int(i) for i in session.listed(Filter(), "position")[100:103]]
    for i in at[:2]:
        session.set_label(session.facts(i, 0), "1", "hand")
    session.close()
    session = Session.open(tmp_path / "ref.kld", [("quant", tmp_path / "quant.kld")])
    session.keep_labels(tmp_path / "l.json", "me")
    async with reviewing(session) as driver:
        assert driver.review.cursor == session.position(at[2])


@pytest.mark.usefixtures("long")
async def test_what_takes_long_stands_back_for_a_key(tmp_path: Path) -> None:
    session = long_session(tmp_path)
    async with reviewing(session) as driver:
        asked: list[float] = []
        session.index.stand_back = asked.append  # type: ignore[method-assign, assignment]
        await driver.press("right")
        assert asked
        assert 0 < asked[0] < 0.1, "a scan has to go on while a key is held down"
        given = 0

        def give_way() -> None:
            nonlocal given
            given += 1

        session.index.give_way = give_way  # type: ignore[method-assign]
        await driver.press("s")
        await driver.until(lambda: not driver.review.list_busy)
        assert given > 1, "so does a list"


@pytest.mark.usefixtures("long")
async def test_the_scan_takes_first_what_is_on_screen(tmp_path: Path) -> None:
    session = long_session(tmp_path)
    async with reviewing(session) as driver:
        asked: list[tuple[list[int], int]] = []
        session.index.prefer = lambda now, soon=None: asked.append(  # type: ignore[method-assign]
            (now.tolist(), 0 if soon is None else len(soon))
        )
        await driver.press("s")
        await driver.until(lambda: not driver.review.list_busy)
        shown = driver.app.screen.query_one(RootList).shown.tolist()
        assert set(shown) <= set(asked[-1][0])
        chunk = session.index.layout.chunk_slice(driver.review.cursor.chunk)
        assert set(range(chunk.start, chunk.stop)) <= set(asked[-1][0])
        assert asked[-1][1] == min(list_screen.SOON, driver.review.rows.size)


def test_a_row_is_found_in_any_order() -> None:
    rows = np.random.default_rng(0).permutation(np.arange(0, 300, 3))
    for each in (rows, np.sort(rows), rows[:1], rows[:0]):
        places = Places(each)
        for i in range(-2, 303):
            found = np.flatnonzero(each == i)
            assert places.find(i) == (int(found[0]) if found.size else None)
            later, earlier = each[each >= i], each[each < i]
            for step, expected in ((1, later.min(initial=999)), (-1, earlier.max(initial=-1))):
                row = places.next_to(i, step)
                assert (int(each[row]) if row is not None else None) == (
                    int(expected) if 0 <= expected < 999 else None
                )


# -- recordings that are being written -------------------------------------------------------------


async def test_a_recording_that_is_being_written_grows_on_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.index.index._POLL_SECONDS", 0.02)
    ref, quant, _ = write_pair(tmp_path)
    whole = {path: path.read_bytes() for path in (ref, quant)}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])
    session = Session.open(ref, [("q4", quant)])
    async with reviewing(session) as driver:
        some = session.index.layout.n
        assert 0 < some < 21
        roots = driver.review.rows.size
        for path, data in whole.items():
            with path.open("ab") as file:
                file.write(data[len(data) // 2 :])
        await driver.until(lambda: session.counts[0].positions == 21)
        await driver.until(lambda: driver.review.rows.size == 4)
        assert roots < 4
        assert "of 21" in driver.text


@pytest.mark.parametrize("how", ["cut", "deleted", "replaced", "written anew"])
async def test_a_recording_that_vanishes_is_an_error_on_a_screen_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("kldtui.index.index._POLL_SECONDS", 0.02)
    ref, quant, _ = write_pair(tmp_path)
    data = quant.read_bytes()
    quant.write_bytes(data[:-200])
    session = Session.open(ref, [("q4", quant)])
    async with reviewing(session) as driver:
        if how == "cut":
            os.truncate(quant, len(data) // 2)
        elif how == "written anew":
            quant.write_bytes(ref.read_bytes())
        else:
            quant.unlink()
            if how == "replaced":
                quant.write_bytes(data)
        said = {"cut": "was cut from", "written anew": "was written anew"}
        words = said.get(how, "was deleted or replaced")
        await driver.until(lambda: words in driver.notices)
        await driver.press("right")
        assert driver.app.is_running
        shown = driver.app.screen.query_one(DetailView)
        assert "margin" not in driver.text, "the table is not that of another position"
        assert shown.token is None
        told = driver.notices.count(words)
        await driver.press("right", "right", "right")
        assert driver.notices.count(words) == told, "once is enough"


async def test_a_chunk_that_cannot_be_read_any_more_is_not_gone_to(tmp_path: Path) -> None:
    ref, quant, _ = write_pair(tmp_path)
    session = Session.open(ref, [("q4", quant)])
    async with reviewing(session) as driver:
        here = driver.review.cursor
        assert here.chunk == 0
        os.truncate(ref, 0)
        driver.review.start_search("alpha")
        await driver.until(lambda: "search ended early" in driver.notices)
        assert not driver.review.searching
        for key in (">", "end", "pagedown", "down", "down", "down", "down", "down"):
            await driver.press(key)
        assert driver.review.cursor.chunk == 0
        driver.review.go(Position(2, 3))
        await driver.press("left")
        assert driver.app.is_running
        assert driver.review.cursor.chunk == 0
        assert "was cut" in driver.notices


# -- what else grows with the stream ---------------------------------------------------------------


@pytest.mark.usefixtures("long")
async def test_a_search_says_how_far_it_is_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = long_session(tmp_path)
    go, search = threading.Semaphore(0), session.search

    def slow(needle: str, start: int = 0) -> Any:
        for chunk, hits in search(needle, start):
            if chunk == 200:
                go.acquire(timeout=10)
            yield chunk, hits

    monkeypatch.setattr(session, "search", slow)
    monkeypatch.setattr("kldtui.ui.search_screen.TOLD_SECONDS", 0.0)
    async with reviewing(session) as driver:
        await driver.press("slash")
        await driver.type("w3")
        await driver.until(lambda: "searching 50%" in driver.text)
        found = len(driver.review.hits)
        assert found
        assert driver.review.hits == sorted(driver.review.hits)
        await driver.press("escape")
        go.release()
        assert "searching" not in driver.text
        await driver.pilot.pause(0.1)
        assert len(driver.review.hits) == found
        here = driver.review.cursor
        await driver.press("n")
        assert here < driver.review.cursor == next(h for h in driver.review.hits if h > here)
        await driver.press("N", "N")
        assert driver.review.cursor < here or driver.review.cursor == driver.review.hits[-1]


@pytest.mark.usefixtures("long")
def test_texts_and_labels_are_looked_up_once_a_token_and_once_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = long_session(tmp_path)
    session.keep_labels(tmp_path / "l.json", "me")
    roots = session.listed(Filter(), "position")
    for n, i in enumerate(roots[:6].tolist()):
        session.set_label(session.facts(i, 0), str(1 + n % 2), "hand")
    asked: list[int] = []
    text = session._token_text

    def noted(token: int) -> str:
        asked.append(token)
        return text(token)

    monkeypatch.setattr(session, "_token_text", noted)
    assert session.listed(Filter(text="W2"), "position").tolist() == roots.tolist()
    assert session.listed(Filter(text="w3"), "position").size == 0
    assert len(asked) == 4, "the two tokens of all roots, for each of the two texts"
    assert session.listed(Filter(label="labelled"), "position").tolist() == roots[:6].tolist()
    assert session.listed(Filter(label="2"), "position").tolist() == roots[1:6:2].tolist()
    assert session.listed(Filter(label="unlabelled"), "position").tolist() == roots[6:].tolist()
    both = Filter(label="unlabelled", text="w2", min_kld=5)
    expected = [i for i in roots[6:].tolist() if session.facts(i, 0).kld >= 5]
    assert session.listed(both, "position").tolist() == expected
    session.close()


@pytest.mark.usefixtures("long")
async def test_a_long_list_has_a_scrollbar_and_a_click_on_it_scrolls(tmp_path: Path) -> None:
    async with reviewing(long_session(tmp_path)) as driver:
        shown = driver.app.screen.query_one(RootList)
        assert shown.laid.thumb(0)
        assert not shown.laid.thumb(shown.size.height - 1)
        bar = (shown.size.width, shown.size.height)  # within the border
        await driver.pilot.click(RootList, offset=bar)
        assert shown.scroll_offset.y == shown.max_scroll_y
        assert shown.laid.thumb(shown.size.height - 1)


@pytest.mark.usefixtures("long")
async def test_the_list_of_a_long_scan_is_not_made_anew_while_keys_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(review_view, "LONG_COUNT_SECONDS", 0.0)
    monkeypatch.setattr(review_view, "REST", 0.0)
    async with reviewing(long_session(tmp_path)) as driver:
        review, made = driver.review, list[bool]()
        monkeypatch.setattr(review, "refresh_list", lambda **_: made.append(True))
        event = ScanAdvanced(Progress(1, 2, 1.0, 1.0, 0, 1))
        await driver.press("right")
        review.on_scan_advanced(event)
        assert not made
        review.touched -= review_view.HANDS_OFF_SECONDS
        review.on_scan_advanced(event)
        assert len(made) == 1, "the hands are off the keys"
        monkeypatch.setattr(review_view, "BUSY_COUNT_SECONDS", 0.0)
        await driver.press("right")
        review.on_scan_advanced(event)
        assert len(made) == 2, "it has not been for long"
        await driver.press("right")
        review.on_scan_advanced(ScanAdvanced(None, done=True))
        assert len(made) == 3, "this is the last one"
