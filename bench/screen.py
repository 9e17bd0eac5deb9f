"""How long the screen takes from a key to the painted frame, against an app with nothing on it.

Knows: the running app, keys, and when Textual has painted.
Must not know: how panes draw.

A frame is timed from the key, or from the arrival of a list that was made in the background, until
the last of what it changes is written as a terminal would get it. The empty app is one blank widget
that repaints the whole screen at each key.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from textual import events
from textual.app import App, ComposeResult
from textual.keys import _character_to_key
from textual.strip import Strip
from textual.widget import Widget

from bench.data import folder
from bench.measure import Result, percentile
from bench.sparse import REAL, Sparse, sparse_review, without_holes
from kldtui.config import Config
from kldtui.review.session import Session
from kldtui.ui.app import KldtuiApp
from kldtui.ui.review import ReviewScreen
from kldtui.ui.stream import StreamView
from kldtui.vocab import from_pieces

SIZE = (120, 40)
ROUNDS = 30
STILL_SECONDS = 0.03
GAP_SECONDS = 0.05
"""Textual leaves up to two of its ticks between frames, whoever has them drawn."""
MOVES = ["right", "down", "right", "up", "left"]
PAGES = ["pagedown", ">", "pageup", "<", "pagedown"]
JUMPS = [".", ".", ",", ".", "."]
FILTERS = ("kld>0.2", "cost>0.5", "near")


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
        self._app = app
        self._began = 0.0
        self._last = self._any = 0.0
        self._painted = asyncio.Event()
        self.counts: Callable[[], bool] = lambda: True
        """Whether a frame is the one that is waited for."""
        display = app._display

        self._then: list[Callable[[float], None]] = []

        def timed(screen: Any, update: Any) -> None:
            display(screen, update)
            if update is not None:
                update.render_segments(app.console)  # what the terminal of a test leaves out
                self._any = time.perf_counter()
                if self.counts():
                    self._last = self._any
                    self._painted.set()
                while self._then:
                    self._then.pop()(self._any)

        app._display = timed  # type: ignore[assignment, method-assign]

    def start(self) -> None:
        """Now is the cause."""
        self._painted.clear()
        self._began = time.perf_counter()

    def since(self) -> float:
        """Seconds since the last frame."""
        return time.perf_counter() - self._any

    def then(self, call: Callable[[float], None]) -> None:
        """Call with the time of the next frame."""
        self._then.append(call)

    async def painted(self) -> float:
        """Seconds from the cause to the first frame that counts."""
        await asyncio.wait_for(self._painted.wait(), 20)
        return self._last - self._began

    async def still(self) -> float:
        """Seconds from the cause, or a later one, to the last frame, once no other follows."""
        while True:
            seconds = await self.painted()
            rest = self._last + STILL_SECONDS - time.perf_counter()
            if rest <= 0:
                return seconds
            await asyncio.sleep(rest)

    def press(self, key: str) -> None:
        self.start()
        character = key if len(key) == 1 else None
        self._app.post_message(events.Key(_character_to_key(key) if character else key, character))

    async def key(self, key: str) -> float:
        self.press(key)
        return await self.still()


Timing = Callable[[App[Any], Clock], Awaitable[list[float]]]


def keys_of(keys: Sequence[str]) -> Timing:
    """Keys over and over, each from a screen that is still."""

    async def timing(app: App[Any], clock: Clock) -> list[float]:
        for key in keys[:3]:
            await clock.key(key)
        return [await clock.key(key) for _ in range(ROUNDS) for key in keys]

    return timing


async def sorting(app: App[Any], clock: Clock) -> list[float]:
    """Other orders: the key, a move of the cursor meanwhile, and the list when it comes."""
    review = _review(app)
    stream = review.query_one(StreamView)
    out = _list_frames(app, clock)
    for _ in range(ROUNDS):
        clock.press("s")
        out.append(await clock.painted())
        await asyncio.sleep(GAP_SECONDS)
        if review.list_busy:
            before = stream.rendered
            clock.counts = lambda before=before: stream.rendered > before  # type: ignore[misc]
            clock.press("right")
            out.append(await clock.painted())
            clock.counts = lambda: True
        await _until(lambda: not review.list_busy)
        await asyncio.sleep(GAP_SECONDS)
    return out


async def filtering(app: App[Any], clock: Clock) -> list[float]:
    """Other filters: each letter, and the list when it comes; but not the prompt as it opens,
    which is a screen of widgets that are made for it."""
    review = _review(app)
    out = _list_frames(app, clock)
    for n in range(ROUNDS):
        for key in ("f", "ctrl+u")[: 1 + bool(n)]:  # the first time there is nothing to erase
            await clock.key(key)
        out += [await clock.key(key) for key in FILTERS[n % len(FILTERS)]]
        clock.press("enter")
        out.append(await clock.painted())
        await _until(lambda: not review.list_busy)
        await asyncio.sleep(GAP_SECONDS)
    return out


async def scanning(app: App[Any], clock: Clock) -> list[float]:
    """Moves and jumps while the app scans: until a frame in which the stream was drawn."""
    review = _review(app)
    stream = review.query_one(StreamView)
    out = []
    for key in [*MOVES, *JUMPS] * ROUNDS:
        before = stream.rendered
        clock.counts = lambda before=before: stream.rendered > before  # type: ignore[misc]
        clock.press(key)
        out.append(await clock.painted())
        await asyncio.sleep(STILL_SECONDS)
    if review.scanned:
        raise RuntimeError("the scan was done before the keys were")
    return out


def _review(app: App[Any]) -> ReviewScreen:
    if not isinstance(app, KldtuiApp):
        raise TypeError("this is timed in a review")
    return app.review


def _list_frames(app: App[Any], clock: Clock) -> list[float]:
    """A list that grows by the frame of each list that comes when the screen was still."""
    review = _review(app)
    take, out = review._take, list[float]()

    def timed(*args: Any) -> None:
        still = clock.since() > GAP_SECONDS
        began = time.perf_counter()
        take(*args)
        if still:
            clock.then(lambda at: out.append(at - began))

    review._take = timed  # type: ignore[method-assign,assignment]
    return out


async def _until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for happens in a thread
        await asyncio.sleep(0.005)


async def _run(app: App[Any], timing: Timing) -> list[float]:
    async with app.run_test(size=SIZE) as pilot:
        if isinstance(app, KldtuiApp):  # at a place in the middle of what is scanned
            review, index = app.review, app.session.index
            whole = index.complete
            await _until(lambda: (review.scanned or not whole) and not review.list_busy)
            review.go(app.session.position(index.layout.n // 4))
        await pilot.pause()
        return await timing(app, Clock(app))


def empty_frames() -> list[float]:
    return asyncio.run(_run(Empty(), keys_of(["x"] * 5)))


class Review:
    """A large review, opened anew for each run of the app."""

    def __init__(self, large: Sparse) -> None:
        self._large = large

    def frames(self, timing: Timing) -> list[float]:
        """Seconds of each frame."""
        os.environ["KLDTUI_CACHE"] = str(self._large.index.parent)
        session = Session.open(self._large.ref, [("quant", self._large.quants[0])])
        for recording in (session.ref, session.quants[0].recording):
            without_holes(recording)
        pieces = {i: f" w{i}".encode() for i in range(session.ref.shape.n_vocab)}
        session.vocab = from_pieces(pieces, "bench")
        app = KldtuiApp(session, Config())
        app.review.moved_by_hand = True
        try:
            return asyncio.run(_run(app, timing))
        finally:
            session.close()


def made(where: Path, name: str, tokens: int, roots: int, scanned: float = 1.0) -> Review:
    (where / name).mkdir()
    index = where / name / "index"
    return Review(sparse_review(where / name, index, tokens, roots, 2 * REAL, scanned=scanned))


def results() -> Iterator[Result]:
    held = os.environ.get("KLDTUI_CACHE")
    with folder() as where:
        small = made(where, "small", 20_480, 1_000)
        large = made(where, "large", 20_000_000, 1_000_000)
        half = made(where, "half", 20_000_000, 1_000_000, 0.5)
        flat = []
        for name, what, review, timing in (
            ("frame-move", "moving the cursor", large, keys_of(MOVES)),
            ("frame-page", "paging, other chunks", large, keys_of(PAGES)),
            ("frame-jump", "jumping to a root", large, keys_of(JUMPS)),
            ("frame-sort", "sorting a million roots", large, sorting),
            ("frame-filter", "filtering them", large, filtering),
            ("frame-scan", "during a scan", half, scanning),
        ):
            # The empty app before and after: the machine may be busy with other things by turns.
            empty = empty_frames()
            frames = review.frames(timing)
            empty += empty_frames()
            ours, theirs = (1000 * percentile(each, 0.95) for each in (frames, empty))
            what += ", 95 %"
            yield Result(name, what, ours, "an empty app", theirs, "ms", 3, False)
            if name in ("frame-move", "frame-page", "frame-jump"):
                flat.append((percentile(frames, 0.5), percentile(small.frames(timing), 0.5)))
        a, b = (1000 * sum(each) / len(each) for each in zip(*flat, strict=True))
        yield Result(
            "frame-flat", "a frame, 20 million tokens", a, "of 20 thousand", b, "ms", 1.2, False
        )
    if held is None:
        del os.environ["KLDTUI_CACHE"]
    else:
        os.environ["KLDTUI_CACHE"] = held
