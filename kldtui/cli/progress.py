"""How far something is, on a terminal or in a log, and how a scan is stopped.

Knows: the progress of a scan, signals, standard error.
Must not know: how a scan is done.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Self

import click

from kldtui.index import Index, Progress

STAGES = {"roots": "roots", "rest": "KLD", "waiting": "waiting"}
_TOLD_SECONDS = 15.0


class ProgressLine:
    """How far something is: on a terminal one line, written over, else a new one now and then.

    To be used in a `with`, which takes the line away at its end. With `log=False` nothing is said
    where standard error is no terminal.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = 0.0 if self._terminal else _TOLD_SECONDS if log else math.inf
        self._next = time.monotonic() + self._pause

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, words: Callable[[], str]) -> None:
        """Say it, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._pause
        if self._terminal:
            click.echo(f"\r{words()}\x1b[K", err=True, nl=False)
        else:
            click.echo(f"kldtui: {words()}", err=True)

    def end(self) -> None:
        """Take the line away."""
        if self._terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


def progress_words(progress: Progress) -> str:
    """`scanning roots: 43 % at 2,100 MB/s, 12 s left`"""
    share = 100 * progress.done / max(1, progress.total)
    left = progress.seconds_left
    rate = f" at {progress.bytes_per_s / 1e6:,.0f} MB/s" if progress.bytes_per_s else ""
    remaining = "" if left is None else f", {duration(left)} left"
    return f"scanning {STAGES[progress.stage]}: {share:.0f} %{rate}{remaining}"


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def scan_here(index: Index) -> None:
    """Scan an index to the end, with progress on a terminal."""
    show(lambda cancel: index.scan(cancel))


def show(scan: Callable[[threading.Event], Iterator[Progress]], log: bool = False) -> None:
    """Run a scan and say how far it is: on a terminal all the time, with `log` else now and then.

    Ctrl-C or a termination signal ends it soon; what was filled stays. Raises KeyboardInterrupt.
    """
    with _stoppable() as cancel:
        with ProgressLine(log=log) as line:
            for progress in scan(cancel):
                line(partial(progress_words, progress))
        if cancel.is_set():
            if log:
                click.echo("kldtui: stopped; the same command goes on from here", err=True)
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stoppable() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, and a termination; a second one ends at once."""
    cancel = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    held = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancel
    finally:
        for each, handler in held.items():
            signal.signal(each, handler)
