"""A sample of positions that is the same each time, and lies within any larger one.

Knows: positions.
Must not know: what is done with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kldtui.position import Position


def sample(positions: Iterable[Position], n: int) -> list[Position]:
    """Up to `n` of the positions, in stream order.

    Which ones depends on the positions alone, by a hash of each: another run takes the same, and
    of the same positions a sample of 20 holds the sample of 10.
    """
    return sorted(sorted(set(positions), key=_rank)[:n])


def _rank(position: Position) -> bytes:
    return hashlib.sha256(str(position).encode()).digest()
