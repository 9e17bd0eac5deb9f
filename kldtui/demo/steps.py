"""What the demo is doing, in steps that a screen can show.

Knows: a step's progress, its rate and what remains.
Must not know: how any step is done, or how it is shown.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kldtui.errors import DemoError

T = TypeVar("T")

_BLOCK = 1 << 20
_WINDOW_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Step:
    """How far one step of the demo is.

    step: its stable name. text: what it does, for people, one line, without the numbers.
    done, total: bytes; total 0 where it is not known. rate: bytes per second over the last
    seconds, None at first. remaining: seconds, None where it cannot be told.
    """

    step: str
    text: str
    done: int = 0
    total: int = 0
    rate: float | None = None
    remaining: float | None = None


Steps = Generator[Step, None, T]
"""Yields steps about every quarter second and returns what it made; close it to give up."""


class Meter:
    """Makes the steps of one piece of work, with their rate."""

    def __init__(self, step: str, text: str, total: int = 0) -> None:
        self._step, self._text, self._total = step, text, total
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> Step:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()
        first, begun = self._seen[0]
        rate = (done - begun) / (now - first) if done > begun and now > first else None
        left = (self._total - done) / rate if rate and self._total >= done else None
        return Step(self._step, self._text, done, self._total, rate, left)


def finish(steps: Steps[T]) -> T:
    """Run all steps and give their result; for those who show nothing."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


def check_cancel(cancel: threading.Event | None) -> None:
    """Raises DemoError once `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise DemoError("the demo's preparation was cancelled")


def file_sha256(path: Path, meter: Meter, cancel: threading.Event | None) -> Steps[str]:
    """The SHA-256 of a file in hex. Raises OSError."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            check_cancel(cancel)
            digest.update(block)
            done += len(block)
            if done % (16 * _BLOCK) == 0:
                yield meter.at(done)
    return digest.hexdigest()
