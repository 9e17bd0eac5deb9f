"""What an engine is: something that continues a list of token ids, greedily, token by token.

Knows: the protocol, what comes out of it, and how to wait for a server that loads its model.
Must not know: any server, recordings, branches, or the screen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kldtui.errors import EngineLoading

Reason = Literal["eog", "limit", "context", "cancelled", "error"]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Who answers. `None` means that the server does not say.

    url: without user, password or query. n_ctx: tokens that one request may use.
    add_bos: whether this model's tokenizer puts `bos_id` before a text.
    details: whatever else identifies the model (path, parameters, size); JSON-able, no secrets.
    warnings: what may spoil a judged branch, a line each.
    """

    kind: str
    url: str
    model: str
    build: str
    n_vocab: int | None
    n_ctx: int | None
    bos_id: int | None
    add_bos: bool | None
    details: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same, as it is stored with a branch."""
        return {
            "kind": self.kind,
            "url": self.url,
            "model": self.model,
            "build": self.build,
            "n_vocab": self.n_vocab,
            "n_ctx": self.n_ctx,
            "bos_id": self.bos_id,
            "add_bos": self.add_bos,
            "details": self.details,
        }


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server can do, and in `notes` what it cannot and why, a line each.

    takes_ids: a prefix goes to it as ids, never as text. returns_ids: it says which ids it
    generated. top_n_limit: the most candidates it gives for a position, None for any number.
    streams_probabilities: tokens arrive with theirs one by one, not in steps or at the end.
    cache_switch: one request can forbid the reuse of what was computed before. exact: a prefix
    arrives as its ids, or as a text that provably gives them; else none is judged on it.
    """

    takes_ids: bool
    returns_ids: bool
    top_n_limit: int | None
    streams_probabilities: bool
    cache_switch: bool
    notes: tuple[str, ...] = ()
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    data: its exact bytes, perhaps part of a UTF-8 character; special tokens have theirs too.
    logp: log p over the whole vocabulary, nats; None where the server did not say.
    top: (id, log p) best first, nats; -inf is a probability of zero.
    """

    id: int
    data: bytes
    logp: float | None
    top: Top


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended; always the last item of one.

    n_prompt: tokens of the prompt as the server counted them. detail: the server's own words.
    """

    reason: Reason
    n_prompt: int | None
    seconds: float
    tokens_per_second: float | None
    detail: str = ""


class Engine(Protocol):
    """A model behind a server. Not for use from several event loops."""

    @property
    def url(self) -> str:
        """For people: without user, password or query."""

    @property
    def info(self) -> EngineInfo | None:
        """What `connect` learned; None before."""

    @property
    def capabilities(self) -> Capabilities | None:
        """What this server can do; None while it is not known what server it is."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that `generate` sends besides ids and length; stored with a branch."""

    @property
    def arriving(self) -> bytes:
        """Text of the answer under way that came before its ids are known; for display only."""

    async def connect(self) -> EngineInfo:
        """Ask who is there. Raises EngineUnreachable, EngineLoading, EngineUnauthorized,
        EngineRefused or UnusableEngine."""

    def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """Continue `prefix` greedily by up to `n` tokens, each with its `top_n` best.

        The last item is a Finish. A fault raises an EngineError after the tokens that arrived.
        Closing it (`contextlib.aclosing`) cancels the answer. `cache` lets the server reuse
        what it computed before, which changes last digits.
        """

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """The `top_n` best continuations of `prefix`, best first, nats. Raises EngineError."""

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The exact bytes of tokens; ids without any are left out. Raises EngineError."""

    async def close(self) -> None: ...


async def wait_ready(
    engine: Engine,
    on_wait: Callable[[float], None] | None = None,
    *,
    timeout: float = 600.0,  # noqa: ASYNC109 - a model may load for minutes, and people are told
    interval: float = 0.5,
) -> EngineInfo:
    """`connect`, again and again while the server loads its model.

    `on_wait` gets the seconds waited so far, each time. Raises EngineLoading after `timeout`
    seconds, any other EngineError at once.
    """
    started = time.monotonic()
    while True:
        try:
            return await engine.connect()
        except EngineLoading:
            waited = time.monotonic() - started
            if waited >= timeout:
                raise
            if on_wait is not None:
                on_wait(waited)
        await asyncio.sleep(interval)
