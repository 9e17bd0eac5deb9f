"""A small review to drive: a reference and quants of a few bytes, and engines made of Python.

Knows: how to write a pair whose roots are known, and how to run the app over it.
Must not know: how panes draw.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from textual.pilot import Pilot

from kldtui.config import Config
from kldtui.engines.base import Capabilities, EngineInfo, Finish, Token, Top
from kldtui.errors import EngineError
from kldtui.recordings import open_recording
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.ui.app import KldtuiApp
from kldtui.ui.bars import KeyBar
from kldtui.ui.review import ReviewScreen
from kldtui.vocab import from_pieces
from tests.builders import Stream, write_kld
from tests.builders_run import run_of

WORDS = (
    b" alpha",
    b" beta",
    b" gamma",
    b"\n",
    b" delta",
    b"[/red]",
    b"\x1b[2J",
    b" foo",
    b"foo",
    "漢".encode(),
    b" {",
    b"}",
    b" eps",
    b" zeta",
    b" eta",
    b"<|im_end|>",
)
N_VOCAB = len(WORDS)


def stream(n_chunk: int = 3, n_ctx: int = 16) -> Stream:
    """Tokens in a fixed order, the same in every run."""
    ids = (np.arange(n_chunk * n_ctx) * 5 + np.arange(n_chunk * n_ctx) // 7) % N_VOCAB
    return Stream(ids.reshape(n_chunk, n_ctx).astype(np.int32), N_VOCAB)


def logits_for(
    laid: Stream, best: dict[int, tuple[int, float]] | None = None
) -> NDArray[np.float32]:
    """Each record's best token is the stream token; `best` gives others by record number.

    best: record -> (token, by how many nats it leads the stream token).
    """
    first = laid.n_ctx // 2 + 1
    out = np.zeros((laid.records, laid.n_vocab), np.float32)
    out[:] = -0.1 * np.arange(laid.n_vocab)
    for record in range(laid.records):
        chunk, k = divmod(record, laid.per_chunk)
        token = int(laid.tokens[chunk, first + k])
        out[record, token] = 4.0
        if best and record in best:
            other, lead = best[record]
            out[record, other] = 4.0 + lead
    return out


# Records at which the quants flip, and to which token: 7 records a chunk, first t is 9.
Q4 = {1: (2, 1.0), 4: (5, 0.1), 9: (6, 2.0), 20: (9, 0.5)}
Q8 = {4: (5, 0.05)}


# Where all models say another token than the stream's: it is a text, and no rollout.
TEXT = {17: (3, 1.0)}


def write_pair(folder: Path, *, rollout: bool = False) -> tuple[Path, Path, Path]:
    """ref.kld, q4.kld with roots at c0:t10, c0:t13, c1:t11, c2:t15, and q8.kld with one.

    With `rollout` the stream is the reference's own."""
    laid = stream()
    text = {} if rollout else TEXT
    return (
        write_kld(folder / "ref.kld", laid, logits_for(laid, text)),
        write_kld(folder / "q4.kld", laid, logits_for(laid, Q4 | text)),
        write_kld(folder / "q8.kld", laid, logits_for(laid, Q8 | text)),
    )


def open_review(
    folder: Path, quants: Sequence[str] = ("q4",), *, rollout: bool = False, **options: Any
) -> Session:
    """A session over the small pair, its labels in `folder`."""
    if not (folder / "ref.kld").exists():
        write_pair(folder, rollout=rollout)
    session = Session.open(
        folder / "ref.kld", [(name, folder / f"{name}.kld") for name in quants], **options
    )
    session.vocab = from_pieces(dict(enumerate(WORDS)), "test")
    session.keep_labels(folder / "labels.json", "tester")
    return session


def open_top3_review(folder: Path) -> Session:
    """The same, scanned, with a reference of which only the best three tokens are known: what the
    quant picks lies outside them at every root."""
    ref, _, _ = write_pair(folder)
    with contextlib.closing(open_recording(ref)) as whole:
        run_of(whole, folder / "top3.run", top_n=3)
    (folder / "top3.run").replace(ref)
    session = open_review(folder)
    for _ in session.index.scan():
        pass
    session.count_anew()
    return session


Script = Callable[[Sequence[int]], Iterable[int | float | EngineError]]


class ScriptedEngine:
    """An engine that says what it is told to, and knows a recording's rows by their prefix.

    script: what to generate for a prefix; an EngineError in it is raised there, a float is slept.
    """

    def __init__(
        self,
        session: Session,
        recording: Any,
        script: Script,
        url: str = "http://127.0.0.1:1",
    ) -> None:
        self.url = url
        self.info: EngineInfo | None = None
        self.capabilities: Capabilities | None = None
        self.settings: dict[str, Any] = {"temperature": 0}
        self.capabilities = Capabilities(True, True, None, True, True)
        self.arriving = b""
        self.asked: list[list[int]] = []
        self.top_ns: list[int] = []
        self.fails: EngineError | None = None
        self.hangs: set[str] = set()
        self.kind = "scripted"
        self.words = dict(enumerate(WORDS))
        self.running = self.most_running = 0
        self._rows: dict[tuple[int, ...], Top] = {}
        self._script = script
        for chunk in range(recording.shape.n_chunk):
            tokens = [int(t) for t in recording.tokens(chunk)]
            rows = recording.rows(chunk, 0, len(recording.scored(chunk)))
            for k, t in enumerate(recording.scored(chunk)):
                self._rows[tuple(tokens[: int(t)])] = tuple(rows.row(k).top(N_VOCAB))

    async def connect(self) -> EngineInfo:
        await self._hang("connect")
        if self.fails is not None:
            raise self.fails
        self.info = EngineInfo(self.kind, self.url, "model.gguf", "b1", N_VOCAB, 4096, None, False)
        return self.info

    async def _hang(self, what: str) -> None:
        if what in self.hangs:
            await asyncio.sleep(3600)

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        self.asked.append(list(prefix))
        self.top_ns.append(top_n)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._hang("generate")
            async for said in self._say(prefix, n):
                yield said
        finally:
            self.running -= 1

    async def _say(self, prefix: Sequence[int], n: int) -> AsyncGenerator[Token | Finish, None]:
        count = 0
        for item in self._script(prefix):
            if isinstance(item, EngineError):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
                continue
            if count == n:
                yield Finish("limit", len(prefix), 1.0, 40.0)
                return
            count += 1
            top = ((item, -0.1), ((item + 1) % N_VOCAB, -3.0))
            yield Token(item, WORDS[item], -0.1, top)
        yield Finish("eog", len(prefix), 1.0, 40.0)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        await self._hang("next_top")
        return self._rows.get(tuple(prefix), ((0, -0.1),))[:top_n]

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        return {id: self.words[id] for id in ids if id in self.words}

    async def close(self) -> None:
        return None


def add_engines(
    session: Session,
    ref: Script,
    quant: Script,
) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Both engines of a review with one quant."""
    engines = (
        ScriptedEngine(session, session.ref, ref),
        ScriptedEngine(session, session.quants[0].recording, quant, "http://127.0.0.1:2"),
    )
    for role, engine in zip(("ref", session.names[0]), engines, strict=True):
        session.slots[role] = EngineSlot(role, engine)
    return engines


class Driver:
    """The running app, as a person has it: keys in, text out."""

    def __init__(self, app: KldtuiApp, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    @property
    def review(self) -> ReviewScreen:
        return self.app.review

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def type(self, text: str) -> None:
        await self.press(*(_KEYS.get(char, char) for char in text), "enter")

    async def until(self, true: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait for something to become true; fails with the screen's text if it does not."""
        for _ in range(int(seconds / 0.02)):
            if true():
                await self.pilot.pause()
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"did not come true:\n{self.text}")

    @property
    def lines(self) -> list[str]:
        """The screen, a line each."""
        screen = self.app.screen
        width, height = self.app.size
        rows = screen._compositor.render_strips()
        return ["".join(s.text for s in rows[y]).ljust(width) for y in range(height)]

    def inside(self, pane: str) -> str:
        """The text of one pane, its lines joined by spaces."""
        return " ".join(" ".join(self.inside_lines(pane)).split())

    def inside_lines(self, pane: str) -> list[str]:
        """The lines of one pane."""
        widget = self.review.query_one(f"#{pane}")
        height = widget.content_region.height
        return ["".join(s.text for s in widget.render_line(y)) for y in range(height)]

    @property
    def notices(self) -> str:
        """All that is said at the edges now."""
        passing = self.review.query_one(KeyBar)._told
        return "\n".join([*(str(said.message) for said in self.app._notifications), passing])

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


_KEYS = {
    " ": "space",
    ":": "colon",
    ">": "greater_than_sign",
    "<": "less_than_sign",
    ".": "full_stop",
}


def at(driver: Driver) -> str:
    """Where the cursor is, as a person reads it."""
    return str(driver.review.cursor)


@asynccontextmanager
async def running(
    session: Session, size: tuple[int, int] = (120, 40), config: Config | None = None
) -> AsyncIterator[Driver]:
    """The app over a session, its background pass done."""
    app = KldtuiApp(session, config or Config())
    async with app.run_test(size=size, notifications=True) as pilot:
        driver = Driver(app, pilot)
        await driver.until(lambda: app.review.scanned)
        await pilot.pause()
        yield driver
    session.close()
