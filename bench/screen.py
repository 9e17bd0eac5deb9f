"""How long the screen takes from a key to the painted frame, against an app with nothing on it.

Knows: the running app, keys, and when Textual has painted.
Must not know: how panes draw.

A frame is timed from the key, or from the arrival of a list that was made in the background, until
its update is written. The empty app is one blank widget that repaints the whole screen at each key.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from textual import events
from textual.app import App, ComposeResult
from textual.keys import _character_to_key
from textual.strip import Strip
from textual.widget import Widget

from bench.data import folder, tiled
from bench.large import Large, large_review
from bench.measure import Result, percentile
from kldtui.config import Config
from kldtui.index import Index
from kldtui.recordings import open_recording
from kldtui.session import Session
from kldtui.ui.app import KldtuiApp
from kldtui.vocab import from_pieces

SIZE = (120, 40)
ROUNDS = 12
MOVES = ["right", "down", "right", "up", "left"]
PAGES = ["pagedown", ">", "pageup", "<", "pagedown"]
JUMPS = [".", ".", ",", ".", "."]
LISTS = ["s"]


class Blank(Widget):
    def render_line(self, y: int) -> Strip:
        return Strip.blank(self.size.width)


class Empty(App[None]):
    """Nothing, painted anew at each key."""

    CSS = "Blank { width: 100%; height: 100%; }"

    def compose(self) -> ComposeResult:
        yield Blank()

    def on_key(self) -> None:
        self.query_one(Blank).refresh()


class Clock:
    """Times from a cause to the frames that it leads to."""

    def __init__(self, app: App[Any]) -> None:
        self.began: float | None = None
        self.frames: list[float] = []
        self.painted = asyncio.Event()
        display = app._display

        def timed(screen: Any, renderable: Any) -> None:
            display(screen, renderable)
            if self.began is not None and renderable is not None:
                self.frames.append(time.perf_counter() - self.began)
                self.began = None
                self.painted.set()

        app._display = timed  # type: ignore[method-assign]

    async def key(self, app: App[Any], key: str) -> float:
        self.painted.clear()
        self.began = time.perf_counter()
        name = _character_to_key(key) if len(key) == 1 else key
        app.post_message(events.Key(name, key if len(key) == 1 else None))
        await asyncio.wait_for(self.painted.wait(), 20)
        await asyncio.sleep(0.03)  # what else the key leads to is no part of the next frame
        return self.frames[-1]


async def _frames(app: App[Any], keys: Sequence[str]) -> list[float]:
    async with app.run_test(size=SIZE) as pilot:
        await _ready(app)
        await pilot.pause()
        clock = Clock(app)
        for key in keys[:3]:
            await clock.key(app, key)
        return [await clock.key(app, key) for _ in range(ROUNDS) for key in keys]


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for happens in a thread
        await asyncio.sleep(0.005)


async def _ready(app: App[Any]) -> None:
    """Scanned, listed, and at a place in the middle of the stream."""
    if isinstance(app, KldtuiApp):
        review = app.review
        await _until(lambda: review.scanned and not review.list_busy)
        review.go(app.session.position(app.session.index.layout.n // 2))


async def _list_frames(app: KldtuiApp, keys: Sequence[str]) -> list[float]:
    """Frames of keys that make another list: the one at once, and the one with the list."""
    async with app.run_test(size=SIZE) as pilot:
        await _ready(app)
        await pilot.pause()
        clock = Clock(app)
        review = app.review
        take = review._take

        def timed(*args: Any) -> None:
            clock.painted.clear()
            clock.began = time.perf_counter()
            take(*args)

        review._take = timed  # type: ignore[method-assign,assignment]
        out = []
        for _ in range(ROUNDS // 2):
            for key in keys:
                out.append(await clock.key(app, key))
                await _until(lambda: not review.list_busy)
                await asyncio.sleep(0.05)
                out.append(clock.frames[-1])
        return out


class Review:
    """A session over a large review, opened anew for each run of the app."""

    def __init__(self, large: Large) -> None:
        self._large = large

    def app(self) -> KldtuiApp:
        session = Session.open(self._large.ref, [("quant", self._large.quant)])
        pieces = {i: f" w{i}".encode() for i in range(session.ref.shape.n_vocab)}
        session.vocab = from_pieces(pieces, "bench")
        app = KldtuiApp(session, Config())
        app.review.moved_by_hand = True
        return app


def _run(review: Review, keys: Sequence[str], lists: bool = False) -> list[float]:
    app = review.app()
    try:
        return asyncio.run(_list_frames(app, keys) if lists else _frames(app, keys))
    finally:
        app.session.close()


def _scanning(where: Path, stop: threading.Event) -> threading.Thread:
    """A scan that goes on for as long as it is wanted."""
    pair = tiled(where, 60)

    def scan() -> None:
        ref, quant = open_recording(pair.ref), open_recording(pair.quant)
        while not stop.is_set():
            for _ in Index(ref, [quant]).scan(stop):
                pass

    thread = threading.Thread(target=scan, daemon=True)
    thread.start()
    return thread


def results() -> Iterator[Result]:
    held = os.environ.get("KLDTUI_CACHE")
    with folder() as where:
        for name, tokens, roots in (("small", 20_480, 1_000), ("large", 20_000_000, 1_000_000)):
            (where / name).mkdir()
            os.environ["KLDTUI_CACHE"] = str(where / name)
            made = large_review(where / name, tokens, roots, cache=where / name / "index")
            if name == "small":
                small = Review(made)
                before = [percentile(_run(small, keys), 0.5) for keys in (MOVES, PAGES, JUMPS)]
        large = Review(made)
        empty = percentile(asyncio.run(_frames(Empty(), ["x"] * 5)), 0.95) * 1000
        after = []
        for name, keys, what in (
            ("frame-move", MOVES, "moving the cursor"),
            ("frame-page", PAGES, "paging, other chunks"),
            ("frame-jump", JUMPS, "jumping to a root"),
        ):
            frames = _run(large, keys)
            after.append(percentile(frames, 0.5))
            ours = percentile(frames, 0.95) * 1000
            yield Result(name, f"{what}, 95 %", ours, "an empty app", empty, "ms", 3, False)
        ours = percentile(_run(large, LISTS, lists=True), 0.95) * 1000
        what = "sorting a million roots, 95 %"
        yield Result("frame-sort", what, ours, "an empty app", empty, "ms", 3, False)
        a, b = (1000 * sum(x) / len(x) for x in (after, before))
        yield Result(
            "frame-flat", "a frame, 20 million tokens", a, "of 20 thousand", b, "ms", 1.2, False
        )
        stop = threading.Event()
        thread = _scanning(where, stop)
        try:
            ours = percentile(_run(large, [*MOVES, *JUMPS]), 0.95) * 1000
        finally:
            stop.set()
            thread.join()
        yield Result(
            "frame-scan", "during a scan, 95 %", ours, "an empty app", empty, "ms", 3, False
        )
    if held is None:
        del os.environ["KLDTUI_CACHE"]
    else:
        os.environ["KLDTUI_CACHE"] = held
