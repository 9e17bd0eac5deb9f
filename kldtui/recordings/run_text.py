"""The text of a run, plain or gzip, by positioned reads of whatever part is wanted.

Knows: files that may change while they are open, and gzip members.
Must not know: lines, JSON, or what the text says.
"""

from __future__ import annotations

import os
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kldtui.errors import DamagedRecording, NotARecording, RecordingChanged, RecordingError

GZIP_MAGIC = b"\x1f\x8b"

_BLOCK = 1 << 20
_INPUT = 1 << 14
_HEAD = 4096
_CACHED_BLOCKS = 4


class RawFile:
    """A file of which what stood there at open is expected to stay; growing is allowed."""

    def __init__(self, path: Path) -> None:
        """Raises RecordingError if it cannot be opened, NotARecording if it is no plain file."""
        self.path = path
        try:
            # A named pipe would wait for a writer; what is no regular file is refused below.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._opened = os.fstat(self._fd)
            self.size = self._opened.st_size
            if not stat.S_ISREG(self._opened.st_mode):
                raise NotARecording(f"{path}: is not a regular file")
            self._seen = self._stamp(self._opened)
            self._head = self._pread(0, min(_HEAD, self.size))
        except BaseException:
            self.close()
            raise

    @property
    def touched(self) -> bool:
        """Whether the file was written to since it was opened."""
        return self._seen != self._stamp(self._opened)

    def head(self, length: int) -> bytes:
        return self._head[:length]

    def read(self, offset: int, length: int) -> bytes:
        """The bytes there, fewer only at the end of what was there at open.

        Raises RecordingChanged if the file was cut, rewritten or replaced since then.
        """
        data = self._pread(offset, max(0, min(length, self.size - offset)))
        self._check()
        return data

    def _pread(self, offset: int, length: int) -> bytes:
        parts = []
        while length:
            try:
                part = os.pread(self._fd, length, offset)
            except OSError as error:
                raise RecordingChanged(
                    f"{self.path}: cannot be read any more ({error.strerror}); open it again"
                ) from None
            if not part:
                raise RecordingChanged(
                    f"{self.path}: was cut at byte {offset} while it was open; open it again"
                )
            parts.append(part)
            length -= len(part)
            offset += len(part)
        return b"".join(parts)

    def _check(self) -> None:
        try:
            now = os.fstat(self._fd)
        except OSError as error:
            raise RecordingChanged(f"{self.path}: is gone ({error.strerror})") from None
        if now.st_size < self.size:
            raise RecordingChanged(
                f"{self.path}: was cut from {self.size} to {now.st_size} bytes while it was "
                "open; open it again"
            )
        try:
            named = self.path.stat()
        except OSError:
            named = now  # moved or removed: what is open stays as it was
        if (named.st_dev, named.st_ino) != (now.st_dev, now.st_ino):
            raise RecordingChanged(f"{self.path}: was replaced while it was open; open it again")
        if self._stamp(now) != self._seen:
            if self._pread(0, len(self._head)) != self._head:
                raise RecordingChanged(
                    f"{self.path}: was written anew while it was open; open it again"
                )
            self._seen = self._stamp(now)

    @staticmethod
    def _stamp(status: os.stat_result) -> tuple[int, int]:
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:
        """Idempotent. Reading afterwards raises RecordingChanged."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Text(Protocol):
    """Text of a run as one row of bytes, whether it is compressed or not."""

    file: RawFile
    cut: bool
    """Whether the compressed data ends before its end mark; known after `blocks`."""

    def blocks(self) -> Iterator[bytes]:
        """All of it in order, once, right after opening. Raises DamagedRecording."""

    def read(self, offset: int, length: int) -> bytes:
        """Part of what `blocks` gave. Thread-safe. Raises RecordingChanged."""


def open_text(path: Path) -> Text:
    """Plain text or gzip, by the first bytes. Raises as RawFile."""
    file = RawFile(path)
    return GzipText(file) if file.head(2) == GZIP_MAGIC else PlainText(file)


class PlainText:
    """Text as it lies on disk."""

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.cut = False

    def blocks(self) -> Iterator[bytes]:
        for offset in range(0, self.file.size, _BLOCK):
            yield self.file.read(offset, _BLOCK)

    def read(self, offset: int, length: int) -> bytes:
        return self.file.read(offset, length)


class Member(NamedTuple):
    """Where a gzip member starts, in the file and in the text."""

    file_offset: int
    text_offset: int


class _Point(NamedTuple):
    """Where decompression can be taken up: the next input byte, and zlib's state there."""

    file_offset: int
    inflate: Any  # zlib has no public name for the type


class GzipText:
    """Text in gzip members. zlib's state is kept every MiB of text, to go on from there."""

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.cut = False
        self.members: list[Member] = []
        self.end = 0
        """Where the last whole member ends in the file."""
        self._points = [_Point(0, _inflate())]
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def blocks(self) -> Iterator[bytes]:
        self.members.append(Member(0, 0))
        while True:
            block, point = self._inflate_block(len(self._points) - 1, first_pass=True)
            if block:
                yield block
            if len(block) < _BLOCK:
                return
            self._points.append(point)

    def read(self, offset: int, length: int) -> bytes:
        first, last = offset // _BLOCK, (offset + max(length, 1) - 1) // _BLOCK
        text = b"".join(self._block(i) for i in range(first, last + 1))
        start = offset - first * _BLOCK
        part = text[start : start + length]
        if len(part) < length:
            raise RecordingChanged(f"{self.file.path}: changed while it was open; open it again")
        return part

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                try:
                    block = self._inflate_block(number)[0]
                except DamagedRecording:
                    raise RecordingChanged(
                        f"{self.file.path}: changed while it was open; open it again"
                    ) from None
                self._blocks[number] = block
                if len(self._blocks) > _CACHED_BLOCKS:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(number)
        return block

    def _inflate_block(self, number: int, *, first_pass: bool = False) -> tuple[bytes, _Point]:
        """A block of text (only the last is shorter), and the point where the next one starts."""
        at, inflate = self._points[number]
        inflate = inflate.copy()
        parts = []
        wanted = _BLOCK
        while wanted:
            data = self.file.read(at, _INPUT)
            if inflate.eof:
                padding = len(data) - len(data.lstrip(b"\0"))
                at += padding
                data = data[padding:]
                if not data:
                    if padding:
                        continue
                    break
                inflate = _inflate()
                if first_pass:
                    self.members.append(Member(at, (number + 1) * _BLOCK - wanted))
            try:
                part = inflate.decompress(data, wanted)
            except zlib.error as error:
                raise DamagedRecording(
                    f"{self.file.path}: the gzip data is damaged after byte {at} ({error}); "
                    "get the file again"
                ) from None
            at += len(data) - len(inflate.unused_data if inflate.eof else inflate.unconsumed_tail)
            parts.append(part)
            wanted -= len(part)
            if inflate.eof and first_pass:
                self.end = at
            if not data and not part and not inflate.eof:
                self.cut = self.cut or first_pass
                break
        return b"".join(parts), _Point(at, inflate)


def _inflate() -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)
