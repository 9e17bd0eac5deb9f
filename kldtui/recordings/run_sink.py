"""How the lines of a run reach the disk, plain or in gzip members.

Knows: append-only files, a full disk, what a stopped writer leaves at the end of a file.
Must not know: what the lines say.
"""

from __future__ import annotations

import gzip
import os
from contextlib import suppress
from pathlib import Path

from kldtui.errors import RecordingError
from kldtui.recordings.lock import lock
from kldtui.recordings.run_scan import Found, scan
from kldtui.recordings.run_text import GzipText, Text, open_text

MEMBER_BYTES = 1 << 18
"""Bytes of text that a gzip member holds before it is closed and written."""


class Sink:
    """The end of a file that one program at a time adds lines to.

    Plain lines go to the system at once, gzip lines by members. What cannot be written whole is
    taken back, so that the file stays readable; the lines of a gzip member are kept for a retry.
    """

    def __init__(self, path: Path, fd: int, compress: bool) -> None:
        self.path = path
        self._fd = fd
        self._compress = compress
        self._pending = bytearray()

    @classmethod
    def create(cls, path: Path, compress: bool) -> Sink:
        """A new file. Raises RecordingError, also where there is one."""
        return cls(path, _open(path, os.O_CREAT | os.O_EXCL), compress)

    @classmethod
    def append(cls, path: Path) -> tuple[Sink, Found]:
        """The end of a run that is there, after a cut last line was taken off, and what it holds.

        Raises what opening a run raises, and RecordingError where it cannot be written to.
        """
        fd = _open(path)
        try:
            text = open_text(path)
            try:
                found = scan(text)
                sink = cls(path, fd, isinstance(text, GzipText))
                sink._mend(text, found)
            finally:
                text.file.close()
        except BaseException:
            os.close(fd)
            raise
        return sink, found

    def write(self, line: bytes) -> None:
        """Add a line (its newline included). Raises RecordingError."""
        if not self._compress:
            self._append(line)
            return
        self._pending += line
        if len(self._pending) >= MEMBER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits for its gzip member. Raises RecordingError."""
        if self._pending:
            self._append(gzip.compress(bytes(self._pending), mtime=0))
            self._pending.clear()

    def close(self) -> None:
        """Write what waits, and see it to the disk. Raises RecordingError."""
        if self._fd < 0:
            return
        try:
            self.flush()
            with suppress(OSError):  # some file systems have no fsync
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            raise RecordingError(f"{self.path}: the recording is closed")
        end = os.fstat(self._fd).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise RecordingError(
                f"{self.path}: cannot be written to: {error.strerror}; what was recorded before "
                "is whole, and the recording can go on from there"
            ) from None

    def _mend(self, text: Text, found: Found) -> None:
        """Leave the file with whole lines alone, and the end where the next one goes."""
        newline = b"" if found.terminated else b"\n"
        if not isinstance(text, GzipText):
            self._truncate(found.kept)
            if newline:
                self._append(newline)
            return
        if not (text.cut or found.cut or newline):
            self._truncate(text.end)
            return
        # zlib cannot go on with a member: its whole lines are written again as a new one.
        member = [m for m in text.members if m.text_offset <= found.kept][-1]
        whole = text.read(member.text_offset, found.kept - member.text_offset) + newline
        self._truncate(member.file_offset)
        if whole:
            self._append(gzip.compress(whole, mtime=0))

    def _truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be written to: {error.strerror}") from None


def _open(path: Path, flags: int = 0) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
    except FileExistsError:
        raise RecordingError(
            f"{path}: exists already; append to it, or record to another path"
        ) from None
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written to: {error.strerror}") from None
    try:
        lock(fd, path)
    except RecordingError:
        os.close(fd)
        raise
    return fd
