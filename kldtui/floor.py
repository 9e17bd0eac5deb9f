"""The reference against itself: how far one engine's greedy answers differ from run to run.

Knows: the Engine protocol, and how two runs of the same request are compared.
Must not know: recordings, labels, the screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kldtui.engines.base import Engine, Token


@dataclass(frozen=True, slots=True)
class SelfRuns:
    """Three greedy runs of one request: cache off, cache off again, cache on.

    tokens: the shortest run's length. parts_off, parts_on: the first token at which the second
    and the third run part from the first; None where they do not. logp_off, logp_on: the largest
    |Δ log p| (nats) of one token before that.
    """

    tokens: int
    parts_off: int | None
    parts_on: int | None
    logp_off: float
    logp_on: float

    @property
    def agrees(self) -> bool:
        return self.parts_off is None and self.parts_on is None

    @property
    def words(self) -> str:
        """One line for people."""
        if self.agrees:
            most = max(self.logp_off, self.logp_on)
            return (
                f"the reference agrees with itself over {self.tokens} tokens, cache off and on; "
                f"log p moves by at most {most:.2g} nat"
            )
        parts = [
            f"with the cache {name} it parts from itself at +{at}"
            for name, at in (("off", self.parts_off), ("on", self.parts_on))
            if at is not None
        ]
        return "the reference does not agree with itself: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def run_against_itself(engine: Engine, prefix: Sequence[int], n: int, top_n: int) -> SelfRuns:
    """Ask for the same `n` tokens three times. Raises EngineError."""
    runs = [
        [t async for t in engine.generate(prefix, n, top_n, cache=cache) if isinstance(t, Token)]
        for cache in (False, False, True)
    ]
    off, on = (_compare(runs[0], run) for run in runs[1:])
    return SelfRuns(min(len(run) for run in runs), off[0], on[0], off[1], on[1])


def _compare(a: Sequence[Token], b: Sequence[Token]) -> tuple[int | None, float]:
    most = 0.0
    for k, (one, other) in enumerate(zip(a, b, strict=False)):
        if one.id != other.id:
            return k, most
        if one.logp is not None and other.logp is not None:
            most = max(most, abs(one.logp - other.logp))
    return (None if len(a) == len(b) else min(len(a), len(b))), most
