"""How far a scan is, on a terminal or in a log, and how it is stopped.

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
from types import FrameType

import click

from kldtui.index import Index, Progress

STAGES = {"roots": "roots", "rest": "KLD", "waiting": "waiting"}
_TELL_SECONDS = 10.0


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
    terminal = sys.stderr.isatty()
    told = time.monotonic()
    with _stoppable() as cancel:
        try:
            for progress in scan(cancel):
                if terminal:
                    click.echo(f"\r{progress_words(progress)}\x1b[K", err=True, nl=False)
                elif log and time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    click.echo(progress_words(progress), err=True)
        finally:
            if terminal:
                click.echo("\r\x1b[K", err=True, nl=False)
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
