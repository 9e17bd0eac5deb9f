"""Engines and recordings in memory, for tests of branches and of verify."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Reason, Token, Top
from kldtui.errors import EngineError
from kldtui.position import Position
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.rows import FullRow, Invalid, Row, Rows


@dataclass
class ScriptedEngine:
    """Says `script` (ids, or bytes one token each), then `reason`; faults where told to.

    next: what `next_top` answers to a prefix.
    """

    script: Sequence[int | bytes] = ()
    reason: Reason = "eog"
    breaks_after: int | None = None
    pause_after: int | None = None
    next: Callable[[Sequence[int]], Top] | None = None
    info: EngineInfo | None = None
    asked: list[tuple[list[int], int]] = field(default_factory=list)
    url: str = "http://fake"
    arriving: bytes = b""
    capabilities: Capabilities | None = None

    def __post_init__(self) -> None:
        if self.info is None:
            self.info = info()

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": 0, "cache_prompt": False}

    async def connect(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        self.asked.append((list(prefix), n))
        for k, said in enumerate(self.script[:n]):
            if k == self.breaks_after:
                raise EngineError("http://fake: it died")
            if k == self.pause_after:
                await asyncio.sleep(3600)
            id, data = (1000 + k, said) if isinstance(said, bytes) else (said, b"w%d " % said)
            yield Token(id, data, -0.5, ((id, -0.5),)[:top_n])
        reason = self.reason if len(self.script) <= n else "limit"
        yield Finish(reason, len(prefix), 1.0, 20.0)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        assert self.next is not None
        self.asked.append((list(prefix), 1))
        return self.next(prefix)[:top_n]

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        return dict.fromkeys(ids, b"x")

    async def close(self) -> None: ...


def info(**more: Any) -> EngineInfo:
    known: dict[str, Any] = {
        "kind": "llama-server",
        "url": "http://fake",
        "model": "m.gguf",
        "build": "b1",
        "n_vocab": 100,
        "n_ctx": 512,
        "bos_id": 1,
        "add_bos": False,
    }
    return EngineInfo(**(known | more))


@dataclass
class MemoryRecording:
    """A full-vocabulary recording of `stream[chunk]`, scored from `first`; row(position) is
    `distribution(prefix)` floored at 16 nats below the best, as in a `.kld` file."""

    stream: Sequence[Sequence[int]]
    distribution: Callable[[Sequence[int]], NDArray[np.float64]]
    n_vocab: int = 100
    first: int = 9
    name: str = "ref.kld"
    bos: int | None = None
    format: str = "kld"
    version: int = 1
    full: bool = True
    problems: tuple[str, ...] = ()
    pieces: dict[int, bytes] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    made: Made = field(default_factory=Made)
    invalid: frozenset[Position] = frozenset()

    @property
    def path(self) -> Path:
        return Path("/data") / self.name

    @property
    def shape(self) -> StreamShape:
        return StreamShape(max(map(len, self.stream), default=0), self.n_vocab, len(self.stream))

    @property
    def records(self) -> int:
        return sum(self.scored(chunk).size for chunk in range(len(self.stream)))

    @property
    def records_expected(self) -> int:
        return self.records

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return {}

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        return np.array(self.stream[chunk], np.int32)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        return np.arange(self.first, len(self.stream[chunk]), dtype=np.int32)

    def row(self, position: Position) -> Row | None:
        if position.t < self.first:
            return None
        prefix = list(self.stream[position.chunk][: position.t])
        if self.bos is not None:
            prefix[0] = self.bos
        logp = self.distribution(prefix).astype(np.float32)
        floor = float(logp.max()) - 16
        bad = Invalid.NOT_A_NUMBER if position in self.invalid else Invalid.NO
        return FullRow(np.maximum(logp, np.float32(floor)), floor, bad)

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> Rows:
        raise NotImplementedError

    def close(self) -> None: ...


def model(seed: int, n_vocab: int = 100) -> Callable[[Sequence[int]], NDArray[np.float64]]:
    """A toy model: its distribution (nats) depends on seed, first and last token of a prefix."""

    def distribution(prefix: Sequence[int]) -> NDArray[np.float64]:
        base = np.random.default_rng([7, prefix[-1], len(prefix)]).normal(0, 3, n_vocab)
        own = np.random.default_rng([seed, prefix[0], prefix[-1], len(prefix)])
        logits = base + own.normal(0, 0.8, n_vocab)
        return np.asarray(logits - np.log(np.exp(logits).sum()), np.float64)

    return distribution


def served(
    distribution: Callable[[Sequence[int]], NDArray[np.float64]], noise: float = 0.0
) -> Callable[[Sequence[int]], Top]:
    """What a server of that model answers; `noise` (nats) is what a batch's shape does."""

    def answer(prefix: Sequence[int]) -> Top:
        logp = distribution(prefix)
        logp = logp + np.random.default_rng([3, *prefix]).normal(0, 1, logp.size) * noise
        order = np.argsort(-logp, kind="stable")
        return tuple((int(id), float(logp[id])) for id in order)

    return answer
