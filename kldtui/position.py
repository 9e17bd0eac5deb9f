"""Where in a stream: `c3:t97` is the prediction of token 97 of chunk 3.

Knows: the pair of numbers and its spelling.
Must not know: recordings, or what is at the position.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kldtui.errors import KldtuiError

_SPELLING = re.compile(r"\s*c?(\d+)\s*[:\s]\s*t?(\d+)\s*", re.IGNORECASE)


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """The prediction of chunk token `t` of chunk `chunk`, both counted from 0."""

    chunk: int
    t: int

    def __str__(self) -> str:
        return f"c{self.chunk}:t{self.t}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read `c3:t97` (also `3:97`, `c3 t97`). Raises KldtuiError on anything else."""
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise KldtuiError(f"not a position: {text!r}; write it as c3:t97 (chunk 3, token 97)")
        return cls(int(match[1]), int(match[2]))
