"""How far a recording is, how fast it goes, and how long it will still take.

Knows: counts and a clock.
Must not know: what is counted, or how it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_EVERY = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """done of total, of which `before` were there when this began. per_second: of what was done
    since; 0 before anything was. seconds_left: None while unknown."""

    done: int
    total: int
    before: int
    per_second: float
    seconds_left: float | None


class Meter:
    """Tells of progress, at most five times a second."""

    def __init__(
        self, done: int, total: int, tell: Callable[[Progress], None] | None = None
    ) -> None:
        self.total = total
        self._before = self._done = done
        self._tell = tell
        self._began = time.monotonic()
        self._told = 0.0

    def at(self, done: int, *, now: bool = False) -> None:
        """So many are done; told at once with `now`."""
        self._done = done
        clock = time.monotonic()
        if self._tell is None or (clock - self._told < _EVERY and not now):
            return
        self._told = clock
        self._tell(self.progress)

    @property
    def progress(self) -> Progress:
        gone = time.monotonic() - self._began
        new = self._done - self._before
        rate = new / gone if new > 0 and gone > 0 else 0.0
        left = max(0, self.total - self._done) / rate if rate else None
        return Progress(self._done, self.total, self._before, rate, left)
