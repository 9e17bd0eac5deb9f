"""Processes that fill an index together: each maps the tables that the others map.

Knows: what such a process is told and what it answers.
Must not know: how a span is filled, where tables are kept, screens.

Threads share one interpreter, and numpy's short steps have to wait for it in turn; processes do
not. One line of JSON a message: first what to open, answered by the tables' files; then a stage,
a flat range and the quants' numbers, answered once they are filled, or by an error's name and
words.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from kldtui.errors import DamagedRecording, KldtuiError, RecordingChanged, RecordingError

_CHILD = [sys.executable, "-P", "-m", "kldtui.index._crew_child"]
_PROGRAM = str(Path(__file__).parents[2])
"""Where this kldtui was imported from, for the processes to be the same."""
_LEAVE_SECONDS = 5
_ERRORS: dict[str, type[KldtuiError]] = {
    kind.__name__: kind for kind in (DamagedRecording, RecordingChanged, RecordingError)
}


class _Ended(KldtuiError):
    """A process said nothing more."""


class Fills(Protocol):
    """What fills spans: a `Worker`, a `Sweep`, or a process that has one."""

    def first(self, first: int, last: int, numbers: Sequence[int]) -> None: ...

    def second(self, first: int, last: int, numbers: Sequence[int]) -> None: ...


class Crew:
    """Some processes, until `close`; each is started when it is asked for, and ready later."""

    def __init__(
        self,
        count: int,
        ref: Path,
        quants: Sequence[Path],
        tables: Sequence[Path],
        *,
        compiled: bool,
        after: float,
        way: int | None,
    ) -> None:
        """tables: the files of the index's tables. after: seconds before which none is started:
        what is done sooner needs none, and others may have to start themselves first. way: the
        descriptor of the index's `Way`."""
        at = time.monotonic() + after
        self.members = [
            Member(ref, quants, tables, compiled=compiled, start_at=at, way=way)
            for _ in range(count)
        ]

    def close(self) -> None:
        """End the processes; a span that one is filling stays pending where it is."""
        for member in self.members:
            member.close()
        self.members = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Member:
    """One process, which fills spans as a `Worker` does."""

    def __init__(
        self,
        ref: Path,
        quants: Sequence[Path],
        tables: Sequence[Path],
        *,
        compiled: bool,
        start_at: float,
        way: int | None,
    ) -> None:
        """start_at: when it may be started, by time.monotonic()."""
        self._recordings, self._tables = [ref, *quants], list(tables)
        self._compiled, self._start_at, self._way = compiled, start_at, way
        self.process: subprocess.Popen[str] | None = None
        self._ready = self._gone = False

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether it has opened everything, or has within so many seconds; never, if it ended.

        Starts it, if that is not done yet. Raises RecordingChanged where it found other
        recordings, or another KldtuiError.
        """
        if self._ready or self._gone or time.monotonic() < self._start_at:
            return self._ready
        if self.process is None:
            try:
                self.process = self._started()
            except OSError:
                self._gone = True
                return False
        pipe: IO[str] = self.process.stdout  # type: ignore[assignment]
        if select.select([pipe], [], [], seconds)[0]:
            try:
                found = _answer(self.process)["tables"]
            except _Ended:
                self._gone = True
                return False
            if found != [str(path) for path in self._tables]:
                raise RecordingChanged(
                    f"{self._recordings[0]}: has changed since it was opened, or a quant has; "
                    "open it again"
                )
            self._ready = True
        return self._ready

    def _started(self) -> subprocess.Popen[str]:
        paths = [_PROGRAM, *filter(None, [os.environ.get("PYTHONPATH")])]
        # A session of its own: Ctrl-C is for the program, which then closes the crew.
        process = subprocess.Popen(  # noqa: S603 - this program's own module
            [*_CHILD, *["compiled"] * self._compiled],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            pass_fds=[] if self._way is None else [self._way],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        _tell(
            process,
            {
                "recordings": [str(path.absolute()) for path in self._recordings],
                "folder": str(self._tables[0].parent.absolute()),
                "way": self._way,
            },
        )
        return process

    def first(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Fill the flat range `first:last` for these quants, as far as the first pass goes."""
        self._fill("roots", first, last, numbers)

    def second(self, first: int, last: int, numbers: Sequence[int]) -> None:
        """Complete the entries of `first:last` that the first pass has filled."""
        self._fill("rest", first, last, numbers)

    def _fill(self, stage: str, first: int, last: int, numbers: Sequence[int]) -> None:
        if self.process is not None:
            _tell(self.process, [stage, first, last, list(numbers)])
            _answer(self.process)

    def close(self) -> None:
        """End it, if it was started; at once, where it has not begun to fill anything."""
        if self.process is None:
            return
        if not self._ready:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Standby:
    """A member of a crew; a worker of this process until that is ready, and if it ends."""

    def __init__(self, member: Member, make_here: Callable[[], Fills]) -> None:
        self._member: Member | None = member
        self._make_here = make_here
        self._here: Fills | None = make_here()

    def first(self, first: int, last: int, numbers: Sequence[int]) -> None:
        self._do(lambda who: who.first(first, last, numbers))

    def second(self, first: int, last: int, numbers: Sequence[int]) -> None:
        self._do(lambda who: who.second(first, last, numbers))

    def _do(self, act: Callable[[Fills], None]) -> None:
        if self._member is not None and (self._here is None or self._member.is_ready()):
            self._here = None  # and with it its buffers
            try:
                act(self._member)
                return
            except _Ended:  # what it was at is still pending, or whole
                self._member = None
        if self._here is None:
            self._here = self._make_here()
        act(self._here)


def _tell(child: subprocess.Popen[str], message: Any) -> None:
    pipe: IO[str] = child.stdin  # type: ignore[assignment]
    with contextlib.suppress(BrokenPipeError):  # the answer says that it has ended
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    pipe: IO[str] = child.stdout  # type: ignore[assignment]
    line = pipe.readline()
    if not line:
        raise _Ended("a process of the scan ended by itself")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise _ERRORS.get(str(answer["error"]), KldtuiError)(str(answer["words"]))
    return answer
