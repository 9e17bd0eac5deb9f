"""What is to be filled next, and by how many threads: spans, and what a person waits for.

Knows: flat indices, pending entries, threads.
Must not know: rows, recordings, screens.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
_WINDOW = 1 << 16
_AT_ONCE = 64
_SPAN_SECONDS = 0.03
_GROWTH = 16
_SHARES = 4


class Wanted:
    """What somebody waits for: positions on screen, and then the list that they are part of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._soon = np.zeros(0, np.int64)

    def ask(self, now: NDArray[np.int64], soon: NDArray[np.int64]) -> None:
        """Replace what was asked for before."""
        with self._lock:
            self._now, self._soon = now, soon

    def take_now(self) -> NDArray[np.int64]:
        """What is on screen; it is asked for once."""
        with self._lock:
            taken, self._now = self._now, self._now[:0]
        return taken

    def take_soon(self) -> NDArray[np.int64]:
        """The next few of the list."""
        with self._lock:
            taken, self._soon = self._soon[:_AT_ONCE], self._soon[_AT_ONCE:]
        return taken


def runs(flat: NDArray[np.int64], longest: int) -> list[Span]:
    """Flat indices, in any order, as ranges of at most `longest`."""
    ordered = np.unique(flat)
    if not ordered.size:
        return []
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    out = []
    for a, b in itertools.pairwise([0, *breaks.tolist(), int(ordered.size)]):
        first, last = int(ordered[a]), int(ordered[b - 1]) + 1
        out += [(i, min(i + longest, last)) for i in range(first, last, longest)]
    return out


class Spans:
    """The pending spans of a flat range, in order, each given out once.

    They begin short and grow while they are quick: what a span costs beside its rows counts less
    then, and whoever waits for something still gets it soon.
    """

    def __init__(
        self,
        pending: Callable[[int, int], NDArray[np.bool_]],
        first: int,
        last: int,
        longest: int,
        edge: Callable[[int], int],
    ) -> None:
        """pending: of a range, which entries are. edge: where a span that begins here must end."""
        self._pending, self._edge, self._longest = pending, edge, longest
        self._least, self._most = longest, longest * _GROWTH
        self._at, self._last = first, last
        self._lock = threading.Lock()
        self.shared_by = 1
        """How many fill them at a time."""

    def took(self, span: Span, seconds: float) -> None:
        """How long a span took to fill."""
        if seconds > _SPAN_SECONDS:
            self._longest = max(1, self._longest // 2)
        elif seconds < _SPAN_SECONDS / 2 and span[1] - span[0] == self._longest:
            self._longest = min(self._most, 2 * self._longest)

    def next(self) -> Span | None:
        with self._lock:
            while self._at < self._last:
                stop = min(self._last, self._at + _WINDOW)
                found = self._pending(self._at, stop)
                if not found.any():
                    self._at = stop
                    continue
                start = self._at + int(found.argmax())
                longest = self._longest
                if self.shared_by > 1:  # so that all end at about the same time
                    fair = (self._last - start) // (_SHARES * self.shared_by)
                    longest = min(longest, max(self._least, fair))
                stop = min(start + longest, self._edge(start), self._last)
                self._at = stop
                return start, stop
        return None

    @property
    def at(self) -> int:
        """What lies before has been given out."""
        return self._at


class Filler(Protocol):
    """What fills a span, in one thread; gives how many seconds the span itself took."""

    def __call__(self, first: int, last: int) -> float: ...


def fill(
    spans: Spans,
    fillers: Sequence[Filler],
    cancel: threading.Event | None,
    seconds: float,
) -> Iterator[tuple[int, int, int]]:
    """Fill all spans, one thread a filler, until none is left or `cancel` is set.

    Yields every `seconds` how many positions were filled in all, and the flat range in which the
    latest lie. Raises what a filler raises, once all threads have ended.
    """
    if len(fillers) == 1:
        yield from _alone(spans, fillers[0], cancel, seconds)
        return
    spans.shared_by = len(fillers)
    shared = _Shared()
    stop = threading.Event()

    def run(filler: Filler) -> None:
        try:
            while not stop.is_set() and (span := spans.next()) is not None:
                _fill_one(spans, span, filler)
                shared.add(span)
        except BaseException as error:
            shared.failed = error
            stop.set()

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in fillers]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            threads[0].join(min(seconds, 0.05)) if threads[0].is_alive() else time.sleep(0.01)
            if cancel is not None and cancel.is_set():
                stop.set()
            if shared.waited() >= seconds and (told := shared.take()) is not None:
                yield told
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if shared.failed is not None:
        raise shared.failed
    if (told := shared.take()) is not None:
        yield told


def _alone(
    spans: Spans, filler: Filler, cancel: threading.Event | None, seconds: float
) -> Iterator[tuple[int, int, int]]:
    shared = _Shared()
    while not (cancel is not None and cancel.is_set()) and (span := spans.next()) is not None:
        _fill_one(spans, span, filler)
        shared.add(span)
        if shared.waited() >= seconds and (told := shared.take()) is not None:
            yield told
    if (told := shared.take()) is not None:
        yield told


def _fill_one(spans: Spans, span: Span, filler: Filler) -> None:
    spans.took(span, filler(*span))


class _Shared:
    """What the threads have filled, and when it was told last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._range: Span | None = None
        self._told = -math.inf  # the first is told at once
        self.failed: BaseException | None = None

    def add(self, span: Span) -> None:
        with self._lock:
            self._done += span[1] - span[0]
            low, high = self._range or span
            self._range = min(low, span[0]), max(high, span[1])

    def waited(self) -> float:
        return time.monotonic() - self._told

    def take(self) -> tuple[int, int, int] | None:
        with self._lock:
            if self._range is None:
                return None
            (low, high), self._range = self._range, None
            self._told = time.monotonic()
            return self._done, low, high
