"""The real program on a terminal of its own: what it shows and when, and how much memory it holds.

Knows: pseudo-terminals, the few control sequences that Textual writes, and /proc.
Must not know: what the program shows, or why.

Times run from just before the program's process is made to the moment at which the bytes came that
made the screen what was waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.cells import get_character_cell_size

COLUMNS, LINES = 120, 40
_CONTROL = re.compile(
    rb"\x1b(?:\[([0-9;?<=>]*)[ -/]*([@-~])|[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)"
    rb"|[()][A-Z0-9]|[^\[\]P_^X()])"
)
_SAMPLE_SECONDS = 0.02
_MEGABYTE = 1024
KINDS = ("RssAnon", "RssFile", "VmRSS", "VmHWM")
"""What the system tells of a process's memory: its own, of files, both, and the most of both."""
"""In the kB of /proc."""


class Screen:
    """What a terminal shows after some bytes, as lines of text without styles."""

    def __init__(self, columns: int = COLUMNS, lines: int = LINES) -> None:
        self._cells = [[" "] * columns for _ in range(lines)]
        self._x = self._y = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while (begin := data.find(b"\x1b", at)) >= 0:
            self._write(data[at:begin])
            found = _CONTROL.match(data, begin)
            if found is None:
                self._rest = data[begin:]
                return
            self._do(found[1] or b"", found[2])
            at = found.end()
        # A character may be cut between two reads, too.
        cut = len(data)
        while cut > at and len(data) - cut < 3 and data[cut - 1] & 0xC0 == 0x80:
            cut -= 1
        cut -= cut > at and data[cut - 1] >= 0xC0
        try:
            data[cut:].decode()
            cut = len(data)
        except UnicodeDecodeError:
            pass
        self._write(data[at:cut])
        self._rest = data[cut:]

    def _do(self, given: bytes, what: bytes | None) -> None:
        if what == b"H":
            numbers = [int(each or 1) for each in (given or b"1;1").split(b";")]
            self._y, self._x = numbers[0] - 1, numbers[-1] - 1 if len(numbers) > 1 else 0
        elif what == b"J":
            for line in self._cells:
                line[:] = [" "] * len(line)

    def _write(self, data: bytes) -> None:
        for letter in data.decode(errors="replace"):
            if letter < " ":
                continue
            width = get_character_cell_size(letter)
            if 0 <= self._y < len(self._cells) and self._x + width <= len(self._cells[self._y]):
                if width:
                    self._cells[self._y][self._x] = letter
                if width == 2:
                    self._cells[self._y][self._x + 1] = ""
            self._x += width

    @property
    def lines(self) -> list[str]:
        return ["".join(line) for line in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Program:
    """A running `kldtui`. peak: the most resident memory so far, its processes' together (MB)."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.screen = Screen()
        self.peak = dict.fromkeys(KINDS, 0.0)
        self._sampled = 0.0
        self._main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kldtui", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
        )
        os.close(other)

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def until(self, shown: Callable[[Screen], bool], seconds: float = 60) -> float:
        """Wait for a screen; the seconds from the start of the program to it.

        Raises RuntimeError with what is shown instead once `seconds` have passed, or at its end.
        """
        end, at = time.perf_counter() + seconds, 0.0
        while not shown(self.screen):
            got = self._read(end)
            if got is None:
                raise RuntimeError(f"not seen; the screen is\n{self.screen.text}")
            at = got
        return (at or time.perf_counter()) - self.began

    def go_on(self, seconds: float) -> None:
        """Let it run, and keep its screen up to date."""
        end = time.perf_counter() + seconds
        while self._read(end) is not None:
            pass

    def _read(self, end: float) -> float | None:
        """Take in what is written next, and say when it came; None if nothing comes until `end`."""
        while (now := time.perf_counter()) < end:
            if now - self._sampled > _SAMPLE_SECONDS:
                self._sampled = now
                self._sample()
            if not select.select([self._main], [], [], min(_SAMPLE_SECONDS, end - now))[0]:
                continue
            came = time.perf_counter()
            try:
                data = os.read(self._main, 1 << 16)
            except OSError:
                return None
            self.screen.feed(data)
            return came
        return None

    def _sample(self) -> None:
        now = _memory(self._process.pid)
        for child in _children(self._process.pid):
            for name, size in _memory(child).items():
                now[name] += size * (name != "VmHWM")
        for name, size in now.items():
            self.peak[name] = max(self.peak[name], size)

    def close(self) -> None:
        """End it at once; what it has saved of its index outlives that."""
        self._sample()
        self._process.kill()
        self._process.wait()
        os.close(self._main)


def _memory(pid: int) -> dict[str, float]:
    """What is resident of a process now, by kind, and in all (MB)."""
    out = dict.fromkeys(KINDS, 0.0)
    with contextlib.suppress(OSError):  # it may have ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in out:
                out[name] = int(value.split()[0]) / _MEGABYTE
    return out


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    out = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                out.append(int(path.parent.name))
    return out


@contextmanager
def program(
    files: Sequence[Path], folder: Path, cache: Path, options: Sequence[str] = (), **env: str
) -> Iterator[Program]:
    """The program over a reference and its quants, with a cache folder and a home of its own."""
    arguments = [str(files[0]), *options]
    for path in files[1:]:
        arguments += ["--quant", str(path)]
    home = {"KLDTUI_CACHE": str(cache), "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    running = Program(arguments, folder, {**home, **env})
    try:
        yield running
    finally:
        running.close()
