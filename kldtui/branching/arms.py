"""Arms: which engine continues which start token at a place.

Knows: their names, on screen, in files and on the command line.
Must not know: engines, recordings, how a branch is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kldtui.errors import KldtuiError

Side = Literal["ref", "quant"]
Start = Literal["ref", "quant", "stream", "picked"]
"""Whose token a branch starts with. stream: the token that is there, in the stream or in the
branch that this one begins inside. picked: any token that a person chose."""

_SIDES: dict[str, Side] = {"R": "ref", "Q": "quant"}
_STARTS: dict[str, Start] = {"r": "ref", "q": "quant", "s": "stream", "p": "picked"}
_SIDE_LETTERS = {side: letter for letter, side in _SIDES.items()}
_START_LETTERS = {start: letter for letter, start in _STARTS.items()}


@dataclass(frozen=True, slots=True)
class Arm:
    """Which engine continues which start token: R·r, Q·q, R·q, Q·r; R·s, Q·s; R·p, Q·p."""

    engine: Side
    start: Start

    @property
    def code(self) -> str:
        return f"{_SIDE_LETTERS[self.engine]}·{_START_LETTERS[self.start]}"

    def __str__(self) -> str:
        return self.code

    @classmethod
    def parse(cls, code: str) -> Arm:
        """Read `R·q` (also `R.q`, `Rq`). Raises KldtuiError on anything else."""
        letters = code.strip().replace("·", "").replace(".", "")
        side, start = _SIDES.get(letters[:1].upper()), _STARTS.get(letters[1:].lower())
        if side is None or start is None:
            raise KldtuiError(
                f"not an arm: {code!r}; write R.r, Q.q, R.q or Q.r (engine, then whose token)"
            )
        return cls(side, start)


RR, QQ, RQ, QR = Arm("ref", "ref"), Arm("quant", "quant"), Arm("ref", "quant"), Arm("quant", "ref")
"""The arms of a root, the three that are made by default first."""


def default_arms(ref: bool, quant: bool) -> tuple[Arm, ...]:
    """What is made of a root where these engines are there.

    With both also R·q, without which later flips of Q·q are blamed on this root; with one engine
    both tokens, continued by it.
    """
    if ref and quant:
        return (RR, QQ, RQ)
    return (RR, RQ) if ref else (QR, QQ) if quant else (RR, QQ)


def both(start: Start) -> tuple[Arm, Arm]:
    """The arms of both engines from one start."""
    return Arm("ref", start), Arm("quant", start)
