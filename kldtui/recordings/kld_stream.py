"""A `.kld` file read front to back as it comes: from a named pipe, or standard input.

Knows: that llama-perplexity writes header, tokens and records in their order, and never goes back.
Must not know: what is done with the rows, where the bytes come from.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DamagedRecording, NotARecording, RecordingError
from kldtui.position import Position
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.recordings.kld import HEADER_BYTES, decode, parse_header
from kldtui.rows import FullRow, FullRows

STDIN = "-"
_SKIP = 1 << 20


def is_stream(path: str) -> bool:
    """Whether it names standard input, or something that is no plain file, such as a pipe."""
    place = Path(path)
    return path == STDIN or (place.exists() and not place.is_file() and not place.is_dir())


class KldStream:
    """A `Recording` whose rows can be asked for once, in their order; holds no row."""

    format = "kld"
    full = True
    made = Made()
    problems: tuple[str, ...] = ()

    def __init__(self, path: str) -> None:
        """Wait for the writer, and read header and tokens.

        Raises NotARecording, DamagedRecording where it ends before them, RecordingError.
        """
        self.path = Path("standard input" if path == STDIN else path)
        self.engine: dict[str, Any] = {}
        self.pieces: dict[int, bytes] = {}
        try:
            # A pipe is opened when its writer is there, and stays open until `close`.
            fd = sys.stdin.fileno() if path == STDIN else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._file = io.FileIO(fd, closefd=path != STDIN)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
        head = self._take(HEADER_BYTES)
        header = parse_header(head)
        if header is None:
            raise NotARecording(
                f"{self.path}: what comes is no .kld file; nothing else can be read as it comes"
            )
        if not header.is_sane:
            raise DamagedRecording(f"{self.path}: {header.fault(len(head))}")
        self.header = header
        self.version = header.version
        self.shape = StreamShape(header.n_ctx or 0, header.n_vocab or 0, header.n_chunk or 0)
        self.records = self.records_expected = header.records_expected
        tokens = self._take(header.data_offset - HEADER_BYTES)
        fault = header.fault(HEADER_BYTES + len(tokens))
        if fault is not None:
            raise DamagedRecording(f"{self.path}: {fault}")
        self._tokens = np.frombuffer(tokens, "<i4").reshape(-1, self.shape.n_ctx)
        self._next = 0
        """The record that comes next."""
        self.ended = False
        """Whether it ended before the last record that it promised."""

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return {}

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[n_ctx]."""
        out: NDArray[np.int32] = self._tokens[chunk].astype(np.int32)
        return out

    def scored(self, chunk: int) -> NDArray[np.int32]:
        """The t of the records that the header promises."""
        first = self.shape.n_ctx // 2 + 1
        return np.arange(first, first + self.header.per_chunk, dtype=np.int32)

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> FullRows:
        """The rows of `scored(chunk)[start:stop]`, or as many as come before the end.

        What lies before them is passed over; what has been passed cannot be asked for again.
        """
        scratch = scratch or Scratch()
        words = self.header.record_words
        first = chunk * self.header.per_chunk + start
        if first < self._next:
            raise ValueError(f"record {first} has been passed: {self._next} comes next")
        self._pass(2 * words * (first - self._next))
        raw = scratch.array("raw", (stop - start, words), "<u2")
        view = raw.reshape(-1).data.cast("B")
        got = 0
        while got < len(view) and (part := self._read_into(view[got:])):
            got += part
        whole = got // (2 * words)
        self.ended |= whole < stop - start
        self._next = first + whole
        return decode(raw[:whole], self.shape.n_vocab, self.version)

    def row(self, position: Position) -> FullRow | None:
        raise NotImplementedError("rows of a stream are given once, in their order")

    def close(self) -> None:
        self._file.close()

    # -- bytes -----------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        """So many bytes, fewer only at the end."""
        out = bytearray(count)
        view, got = memoryview(out), 0
        while got < count and (part := self._read_into(view[got:])):
            got += part
        return bytes(out[:got])

    def _pass(self, count: int) -> None:
        waste = memoryview(bytearray(min(count, _SKIP)))
        while count:
            part = self._read_into(waste[: min(count, len(waste))])
            if not part:
                self.ended = True
                return
            count -= part

    def _read_into(self, view: memoryview) -> int:
        try:
            return self._file.readinto(view) or 0
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be read: {error.strerror}") from None
