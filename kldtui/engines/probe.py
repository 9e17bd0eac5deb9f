"""An engine at a URL of which nobody said what server answers there.

Knows: which engine belongs to which kind of server (`who`).
Must not know: what any server is asked; recordings, branches, the screen.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kldtui.engines.base import Capabilities, Engine, EngineInfo, Finish, Token, Top
from kldtui.engines.http import ANSWER_SECONDS, PROBE_SECONDS, Address, Http
from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.sglang import SglangServer
from kldtui.engines.vllm import VllmServer
from kldtui.engines.who import Kind, recognise
from kldtui.errors import EngineError, UnusableEngine, VocabularyError


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a server: all that an engine is made from.

    url: as the user gave it, secrets included. build: for servers that do not know theirs.
    tokenizer: the model's own, for servers that take text: a tokenizer.json or its folder.
    """

    url: str
    api_key: str | None = None
    key_hint: str = "KLDTUI_API_KEY"
    build: str = ""
    tokenizer: Path | None = None
    transport: httpx.AsyncBaseTransport | None = None
    answer_seconds: float = ANSWER_SECONDS
    probe_seconds: float = PROBE_SECONDS

    def __repr__(self) -> str:
        return f"Access({Address.parse(self.url).public!r})"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that every engine takes."""
        return {
            "api_key": self.api_key,
            "key_hint": self.key_hint,
            "transport": self.transport,
            "answer_seconds": self.answer_seconds,
        }


def _mlx(to: Access) -> Engine:
    """Imported here, since it takes as long as all else that starts kldtui."""
    from kldtui.engines.mlx_server import MlxServer

    return MlxServer(to.url, tokenizer=_encodes(to.tokenizer), **to.options)


def _encodes(tokenizer: Path | None) -> Path | None:
    """The same, if it may encode text: a GGUF file only says what tokens are spelled."""
    if tokenizer is None or tokenizer.is_dir():
        whole = tokenizer is None or (tokenizer / "tokenizer.json").exists()
        return tokenizer if whole else None
    try:
        with tokenizer.open("rb") as file:
            return None if file.read(4) == b"GGUF" else tokenizer
    except OSError:
        return tokenizer


MAKERS: dict[Kind, Callable[[Access], Engine]] = {
    "llama-server": lambda to: LlamaServer(to.url, build=to.build, **to.options),
    "vllm": lambda to: VllmServer(to.url, **to.options),
    "sglang": lambda to: SglangServer(to.url, **to.options),
    "mlx_lm.server": _mlx,
}


class Probed:
    """The engine of whatever server answers, found out by `connect`, each time anew."""

    def __init__(self, access: Access) -> None:
        """Raises EngineError for what is no URL."""
        self._access = access
        self._http = Http(
            Address.parse(access.url),
            api_key=access.api_key,
            key_hint=access.key_hint,
            transport=access.transport,
            probe_seconds=access.probe_seconds,
        )
        self._kind: Kind | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine that answers; None before `connect`."""
        return self._engine

    @property
    def url(self) -> str:
        return self._http.address.public

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info if self._engine else None

    @property
    def capabilities(self) -> Capabilities | None:
        return self._engine.capabilities if self._engine else None

    @property
    def settings(self) -> dict[str, Any]:
        return self._engine.settings if self._engine else {}

    @property
    def arriving(self) -> bytes:
        return self._engine.arriving if self._engine else b""

    async def connect(self) -> EngineInfo:
        """Find out what answers, and connect to it.

        Raises UnusableEngine for a server that is refused by name or unknown, with what to run
        instead; else what the engine's own `connect` raises.
        """
        seen = await recognise(self._http)
        make = None if seen.kind is None else MAKERS.get(seen.kind)
        if seen.kind is None:
            raise self._http.error(UnusableEngine, seen.refusal)
        if make is None:
            words = f"this is {seen.name}, from which this kldtui cannot branch"
            raise self._http.error(UnusableEngine, words)
        if self._engine is None or seen.kind != self._kind:
            replaced, self._engine, self._kind = self._engine, make(self._access), seen.kind
            if replaced is not None:
                await replaced.close()
        try:
            return await self._engine.connect()
        except VocabularyError as error:  # of a tokenizer, where the server takes text
            raise self._http.error(UnusableEngine, str(error)) from None

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """As the engine that answers does it. Raises EngineError if none was found yet."""
        answer = self._found().generate(prefix, n, top_n, cache=cache)
        async with contextlib.aclosing(answer) as items:
            async for item in items:
                yield item

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """As the engine that answers does it. Raises EngineError if none was found yet."""
        return await self._found().next_top(prefix, top_n, cache=cache)

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """As the engine that answers does it. Raises EngineError if none was found yet."""
        return await self._found().pieces(ids)

    async def close(self) -> None:
        await self._http.close()
        if self._engine is not None:
            await self._engine.close()

    def _found(self) -> Engine:
        if self._engine is None:
            raise self._http.error(EngineError, "not connected yet")
        return self._engine
