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
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kldtui.errors import DamagedRecording, KldtuiError, RecordingChanged, RecordingError
from kldtui.index.work import Filler

_CHILD = [sys.executable, "-P", "-m", "kldtui.index._crew_child"]
_PROGRAM = str(Path(__file__).parents[2])
"""Where this kldtui was imported from, for the processes to be the same."""
_LEAVE_SECONDS = 5
_ERRORS: dict[str, type[KldtuiError]] = {
    kind.__name__: kind for kind in (DamagedRecording, RecordingChanged, RecordingError)
}


class Crew:
    """Some processes, until `close`. Each fills one span at a time."""

    def __init__(
        self, count: int, ref: Path, quants: Sequence[Path], folder: Path, *, compiled: bool
    ) -> None:
        """Start them. folder: where the index's tables are kept. Raises KldtuiError, OSError."""
        self._children: list[subprocess.Popen[str]] = []
        opening = {
            "recordings": [str(path.absolute()) for path in (ref, *quants)],
            "folder": str(folder.absolute()),
            "compiled": compiled,
        }
        paths = [_PROGRAM, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            for _ in range(count):
                # A session of its own: Ctrl-C is for the program, which then closes the crew.
                child = subprocess.Popen(  # noqa: S603 - this program's own module
                    _CHILD,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
                self._children.append(child)
                _tell(child, opening)
            self.tables: list[list[str]] = [_answer(child)["tables"] for child in self._children]
            """The tables' files, as each process found them."""
        except BaseException:
            self.close()
            raise

    def fillers(self, stage: str, numbers: Sequence[int]) -> list[Filler]:
        """For each process what has it fill a span of a stage for these quants."""
        return [_filler(child, stage, list(numbers)) for child in self._children]

    def close(self) -> None:
        """End the processes; a span that one is filling stays pending where it is."""
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            try:
                child.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _filler(child: subprocess.Popen[str], stage: str, numbers: list[int]) -> Filler:
    def fill_span(first: int, last: int) -> None:
        _tell(child, [stage, first, last, numbers])
        _answer(child)

    return fill_span


def _tell(child: subprocess.Popen[str], message: Any) -> None:
    pipe: IO[str] = child.stdin  # type: ignore[assignment]
    with contextlib.suppress(BrokenPipeError):  # the answer says that it has ended
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    pipe: IO[str] = child.stdout  # type: ignore[assignment]
    line = pipe.readline()
    if not line:
        raise KldtuiError("a process of the scan ended by itself; scan again, it goes on there")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise _ERRORS.get(str(answer["error"]), KldtuiError)(str(answer["words"]))
    return answer
