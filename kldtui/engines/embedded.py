"""A GGUF file run by llama.cpp inside the installation: an engine with no server to start.

Knows: how one is started and ended (`supervise`), and what is asked of it (`llama_server`).
Must not know: recordings, branches, the screen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from kldtui.engines.base import Capabilities, Engine, EngineInfo, Finish, Token, Top
from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.supervise import (
    MISSING,
    Program,
    ServedModel,
    can_serve,
    default_threads,
)
from kldtui.errors import EngineError, EngineLoading
from kldtui.vocab import safe

_LOADS_SECONDS = 3600.0


class EmbeddedLlama:
    """An engine over one GGUF file. One answer at a time.

    `connect` starts llama.cpp on a free loopback port and raises EngineLoading while it loads; it
    starts another where the last has died. `close` ends it; it ends with this process too, however
    that ends.
    """

    def __init__(
        self,
        model: Path,
        *,
        n_ctx: int,
        threads: int | None = None,
        gpu_layers: int | None = None,
        program: Program | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """n_ctx: tokens of the longest prefix with its branch. program: what to run instead of
        what is installed. Raises EngineError for what is no GGUF file, or where nothing is
        installed that could run it."""
        self._name = safe(str(model))
        try:
            with model.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise EngineError(f"{self._name}: cannot be read: {error.strerror}") from None
        if magic != b"GGUF":
            raise EngineError(f"{self._name}: no GGUF file; give one, or an MLX folder")
        if program is None and not can_serve():
            raise EngineError(f"{self._name}: {MISSING}")
        self._served = ServedModel(
            model,
            n_ctx=n_ctx,
            threads=threads,
            gpu_layers=gpu_layers,
            timeout=_LOADS_SECONDS,
            program=program,
            log_dir=log_dir,
        )
        self._server: LlamaServer | None = None

    @property
    def url(self) -> str:
        """`gguf:` and the file: its address is this process's own affair."""
        return f"gguf:{self._name}"

    @property
    def info(self) -> EngineInfo | None:
        return self._server.info if self._server else None

    @property
    def capabilities(self) -> Capabilities | None:
        return self._server.capabilities if self._server else None

    @property
    def settings(self) -> dict[str, Any]:
        return self._server.settings if self._server else {}

    @property
    def arriving(self) -> bytes:
        return self._server.arriving if self._server else b""

    @property
    def served(self) -> ServedModel:
        """The process, its log and its state."""
        return self._served

    async def connect(self) -> EngineInfo:
        """Start it, or ask what it is where it runs.

        Raises EngineLoading while it loads, EngineError with its own last words where it cannot.
        """
        served = self._served
        if served.state == "failed" and self._server is None:
            words = served.error
            await served.stop_async()
            raise EngineError(words)
        if served.state not in ("starting", "ready"):
            await self._forget()
            await asyncio.to_thread(served.launch)
        await asyncio.to_thread(served.settled, 0.1)
        if served.state == "starting":
            raise EngineLoading(f"{self.url}: {served.program} loads it; wait for it")
        url = served.url
        if self._server is None:
            self._server = LlamaServer(url, build=served.program)
        return await self._server.connect()

    async def _forget(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """As llama-server does it. Raises EngineError if it was not started yet."""
        answer = self._running().generate(prefix, n, top_n, cache=cache)
        async with contextlib.aclosing(answer) as items:
            async for item in items:
                yield item

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """As llama-server does it. Raises EngineError if it was not started yet."""
        return await self._running().next_top(prefix, top_n, cache=cache)

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """As llama-server does it. Raises EngineError if it was not started yet."""
        return await self._running().pieces(ids)

    async def close(self) -> None:
        """End it, and wait until it is gone."""
        try:
            await self._forget()
        finally:
            await self._served.stop_async()

    def _running(self) -> LlamaServer:
        if self._server is None:
            raise EngineError(self._served.error or f"{self.url}: not started yet")
        return self._server


def open_model(path: Path, n_ctx: int, *, alone: bool = False) -> Engine:
    """An engine over a model on this machine: a GGUF file, or an MLX folder; not started yet.

    n_ctx: tokens of the longest prefix with its branch. alone: whether no other model is run
    beside it. Raises EngineError for what is neither, or where nothing is installed that runs it.
    """
    if not path.is_dir():
        return EmbeddedLlama(path, n_ctx=n_ctx, threads=default_threads(alone))
    from kldtui.engines.mlx_child import MlxChild

    return MlxChild(path)
