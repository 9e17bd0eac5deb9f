"""What an engine can do besides going on from ids: read texts, render conversations, draw.

Knows: the protocols of it, and which engines have them.
Must not know: requests of any one server; files, recordings, the screen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from kldtui.engines.base import Engine, Finish, Token
from kldtui.errors import UnusableEngine


@runtime_checkable
class Encoder(Protocol):
    """An engine that says which ids a text has."""

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special`: with what the tokenizer adds. Raises EngineError."""


@runtime_checkable
class Renderer(Encoder, Protocol):
    """An engine that has the model's chat template."""

    async def render(self, conversation: Mapping[str, Any]) -> str:
        """The text of a conversation (`messages`, `tools` …). Raises EngineError."""

    async def end_ids(self) -> frozenset[int] | None:
        """The ids that end an answer; None where the server does not say. Raises EngineError."""


async def leaves_out_tools(by: Renderer, conversation: Mapping[str, Any]) -> bool:
    """Whether the template shows nothing of the tools that a conversation has.

    Then the model never sees them, whatever its header says. Raises EngineError.
    """
    if not conversation.get("tools"):
        return False
    without = {name: value for name, value in conversation.items() if name != "tools"}
    return await by.render(conversation) == await by.render(without)


@runtime_checkable
class Sampler(Protocol):
    """An engine that draws tokens at a temperature."""

    def sample(
        self, prefix: Sequence[int], n: int, top_n: int, *, temperature: float, seed: int
    ) -> AsyncGenerator[Token | Finish, None]:
        """As `Engine.generate`, but drawn; log p at temperature 1."""


def encoder(engine: Engine) -> Encoder:
    """The part of a connected engine that reads texts. Raises UnusableEngine."""
    inner = getattr(engine, "engine", engine)
    if not isinstance(inner, Encoder):
        raise _lacking(engine, "say which ids a text has; give `tokens`")
    return inner


def renderer(engine: Engine) -> Renderer:
    """The part of a connected engine that renders conversations. Raises UnusableEngine."""
    inner = getattr(engine, "engine", engine)
    if not isinstance(inner, Renderer):
        raise _lacking(engine, "render messages; llama-server can, or give `tokens`")
    return inner


def sampler(engine: Engine) -> Sampler:
    """The part of a connected engine that draws. Raises UnusableEngine."""
    inner = getattr(engine, "engine", engine)
    if not isinstance(inner, Sampler):
        raise _lacking(engine, "be asked to draw at a temperature; llama-server and vLLM can")
    return inner


def _lacking(engine: Engine, what: str) -> UnusableEngine:
    kind = engine.info.kind if engine.info else "this engine"
    return UnusableEngine(f"{engine.url}: {kind} cannot {what}")
