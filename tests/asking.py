"""How tests ask an engine for a continuation, and take all that comes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kldtui.engines import Engine, Finish, Token
from kldtui.errors import EngineError


@dataclass
class Said:
    """The tokens, and the Finish or the error that came after them."""

    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    error: EngineError | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def data(self) -> bytes:
        return b"".join(token.data for token in self.tokens)


async def ask(
    engine: Engine, prefix: Sequence[int], n: int = 6, top_n: int = 3, *, cache: bool = False
) -> Said:
    said = Said()
    try:
        async for item in engine.generate(prefix, n, top_n, cache=cache):
            if isinstance(item, Finish):
                said.finish = item
            else:
                assert said.finish is None
                said.tokens.append(item)
    except EngineError as error:
        said.error = error
    return said


def same_top(got: Sequence[tuple[int, float]], want: Sequence[tuple[int, float]]) -> bool:
    """Whether the same ids come in the same order, with the same log p but for rounding."""
    return [id for id, _ in got] == [id for id, _ in want] and all(
        math.isclose(a, b, rel_tol=1e-9) for (_, a), (_, b) in zip(got, want, strict=True)
    )
