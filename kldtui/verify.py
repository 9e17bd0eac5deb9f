"""Is this server the model that made this recording?

Knows: recordings, the index's columns (to choose positions), the Engine protocol.
Must not know: any server, branches, labels, or the screen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kldtui.engines.base import Engine
from kldtui.position import Position
from kldtui.recordings.base import Recording

if TYPE_CHECKING:
    from kldtui.index import Index

Verdict = Literal["ok", "swapped", "bos", "other_model", "vocabulary", "context", "unchecked"]
Which = Literal["ref", "quant"]

THRESHOLD = 0.3


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a comparison of a server with the recordings says.

    own, other: mean |Δ log p| (nats) over the top 20 against its own and the other recording.
    positions: how many were compared. detail: one line for people.
    """

    verdict: Verdict
    own: float | None
    other: float | None
    positions: int
    detail: str

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "own": self.own,
            "other": self.other,
            "positions": self.positions,
            "detail": self.detail,
        }


async def verify(
    engine: Engine,
    own: Recording,
    other: Recording | None,
    index: Index | None = None,
    root: Position | None = None,
    which: Which = "ref",
) -> VerifyResult:
    """Compare a connected server with the recording it should have made. Raises EngineError."""
    raise NotImplementedError
