"""What an engine says of tokens that it is given, instead of choosing its own.

Knows: which engines can, what is asked of them, and how much at once.
Must not know: requests of any one server; recordings, files, the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kldtui.engines.base import Engine, Token, Top
from kldtui.errors import UnusableEngine

Seen = Callable[[int], None]
"""Told how many of the targets are done, while it goes on."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model says of one token of a given text, nats.

    logp: of the token itself; None where the server's number is none. top: the best (id, log p),
    best first. also: log p of the one other id that was asked for; None where none was.
    """

    id: int
    logp: float | None
    top: Top
    also: float | None = None


@runtime_checkable
class Scorer(Protocol):
    """An engine that scores a text in one forward pass."""

    async def score(
        self, prefix: Sequence[int], targets: Sequence[int], top_n: int
    ) -> Sequence[Token]:
        """What it says of each of `targets` after `prefix`. Raises EngineError."""


@runtime_checkable
class AlsoScorer(Protocol):
    """An engine that scores a text, and any other ids on the way.

    one_pass: it computes many tokens at once, not one by one.
    """

    one_pass: bool

    async def score_also(
        self,
        prefix: Sequence[int],
        targets: Sequence[int],
        also: Sequence[int | None],
        top_n: int,
        seen: Seen | None = None,
    ) -> Sequence[Scored]:
        """What it says of each of `targets` after `prefix`, and of one other id at each.

        Raises EngineError.
        """


AnyScorer = Scorer | AlsoScorer


def scorer(engine: Engine) -> AnyScorer:
    """The part of a connected engine that scores. Raises UnusableEngine where there is none."""
    inner = getattr(engine, "engine", engine)  # what a probed URL turned out to be
    if isinstance(inner, (AlsoScorer, Scorer)):
        return inner
    kind = engine.info.kind if engine.info else "this engine"
    raise UnusableEngine(
        f"{engine.url}: {kind} cannot score a given text; serve the model with llama-server, vLLM "
        "or SGLang, or give an MLX folder itself with --mlx-model"
    )


def most_at_once(by: AnyScorer, start: int) -> int:
    """How many targets one request may have that begins after `start` tokens.

    A request that is broken off is asked again whole, so that it is short where tokens are
    computed one by one, but never so short that reading its prefix outweighs it.
    """
    one_by_one = isinstance(by, AlsoScorer) and not by.one_pass
    return max(256, start // 4) if one_by_one else max(2048, start)


async def score(
    by: AnyScorer,
    prefix: Sequence[int],
    targets: Sequence[int],
    also: Sequence[int | None],
    top_n: int,
    seen: Seen | None = None,
) -> list[Scored]:
    """What an engine says of each of `targets` after `prefix`, and at each of one other id.

    also: as long as `targets`; None where no other id is wanted. Raises EngineError.
    """
    if isinstance(by, AlsoScorer):
        return list(await by.score_also(prefix, targets, also, top_n, seen))
    tokens = await by.score(prefix, targets, top_n)
    out = []
    for k, (token, other) in enumerate(zip(tokens, also, strict=True)):
        apart: float | None = None
        if other is not None:
            listed = dict(token.top) | {token.id: token.logp}
            if other in listed:
                apart = listed[other]
            else:
                alone = await by.score([*prefix, *targets[:k]], [other], top_n)
                apart = alone[0].logp
        out.append(Scored(token.id, token.logp, token.top, apart))
        if seen is not None:
            seen(k + 1)
    return out
