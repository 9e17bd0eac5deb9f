"""The `.kld` file of llama.cpp, opened: a recording of whole rows (layout: kld_format.py).

Knows: positioned reads, and what a cut, odd, growing or replaced file looks like.
Must not know: what is done with the rows, text, or any other format.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DamagedRecording, RecordingChanged, RecordingError
from kldtui.position import Position
from kldtui.recordings.base import Floats, Made, Scratch, StreamShape
from kldtui.recordings.kld_format import (
    HEADER_BYTES,
    MAGICS,
    KldHeader,
    are_usual,
    decode,
    parse_header,
    validity,
)
from kldtui.rows import Codes, FullRow, FullRows, Invalid

__all__ = [
    "HEADER_BYTES",
    "MAGICS",
    "KldHeader",
    "KldRecording",
    "decode",
    "parse_header",
    "validity",
]

_TOKENS_AT_ONCE = 1 << 18
_TOKENS_AT_OPEN = 1 << 19
"""Opening looks at this many tokens at either end of the stream; `examine` at the others."""
_PAGE = 4096
_APART = 48
"""Between a byte's place in a page of the file and in one of the buffer. Processors take copies
for dependent whose ends lie just so far apart in a page, and are several times slower then."""
_PROBES = 16
_PROBE_BYTES = 64


class KldRecording:
    """A `.kld` file, opened. Reads are positioned and thread-safe; nothing is mapped."""

    format = "kld"
    full = True
    made = Made()

    def __init__(self, path: Path) -> None:
        """Open and check the size against the header.

        Raises DamagedRecording where nothing can be read, RecordingError if it cannot be opened.
        """
        self.path = path
        self.engine: dict[str, Any] = {}
        self.pieces: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._open()
        except BaseException:
            os.close(self._fd)
            raise

    def _open(self) -> None:
        stat = os.fstat(self._fd)
        self._size = stat.st_size
        self._stamp = (stat.st_size, stat.st_mtime_ns)
        head = bytearray(min(HEADER_BYTES, self._size))
        self._read(memoryview(head), 0)
        header = parse_header(bytes(head))
        if header is None:
            raise DamagedRecording(f"{self.path}: is not a .kld file")
        fault = header.fault(self._size)
        if fault is not None:
            raise DamagedRecording(f"{self.path}: {fault}")
        self.header = header
        self.version = header.version
        self.shape = StreamShape(header.n_ctx or 0, header.n_vocab or 0, header.n_chunk or 0)
        self.first_t = self.shape.n_ctx // 2 + 1
        self.per_chunk = header.per_chunk
        self.records_expected = header.records_expected
        self.records = self._whole_records()
        self._probed = self._fingerprint()
        total = self.shape.n_chunk * self.shape.n_ctx
        self._looked_at = [(0, min(total, _TOKENS_AT_OPEN))]
        if total > _TOKENS_AT_OPEN:
            self._looked_at.append((max(_TOKENS_AT_OPEN, total - _TOKENS_AT_OPEN), total))
        self._strange: tuple[int, Position] | None = None
        self._look_at_tokens(self._looked_at)
        self.problems = self._find_problems()

    def _whole_records(self) -> int:
        whole = (self._size - self.header.data_offset) // (2 * self.header.record_words)
        return min(whole, self.records_expected)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the file's contents from others' without reading them all, as JSON: size,
        time of the last change (ns), header, and SHA-256 over the samples that opening read."""
        size, mtime_ns = self._stamp
        return {
            "size": size,
            "mtime_ns": mtime_ns,
            "head": self._probed[:HEADER_BYTES].hex(),
            "samples": hashlib.sha256(self._probed).hexdigest(),
        }

    # -- what is there -------------------------------------------------------------------------

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return {}

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[n_ctx]."""
        self._check_chunk(chunk)
        return self.flat_tokens(chunk * self.shape.n_ctx, self.shape.n_ctx)

    def flat_tokens(self, start: int, count: int) -> NDArray[np.int32]:
        """Tokens of the whole stream, counted through all chunks, int32[count]."""
        out = np.empty(count, "<i4")
        self._read(out.data.cast("B"), HEADER_BYTES + 4 * start)
        return out.astype(np.int32, copy=False)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        """The t of the chunk's whole records: the second half of the chunk, or what there is."""
        self._check_chunk(chunk)
        return np.arange(self.first_t, self.first_t + self._held(chunk), dtype=np.int32)

    def _held(self, chunk: int) -> int:
        return max(0, min(self.per_chunk, self.records - chunk * self.per_chunk))

    def _check_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.shape.n_chunk:
            raise IndexError(f"chunk {chunk} of {self.shape.n_chunk}")

    # -- rows ----------------------------------------------------------------------------------

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> FullRows:
        """Rows of `scored(chunk)[start:stop]`; with `scratch`, valid until its next use."""
        self._check_chunk(chunk)
        if not 0 <= start <= stop <= self._held(chunk):
            raise IndexError(f"rows {start}:{stop} of {self._held(chunk)} in chunk {chunk}")
        record = min(chunk * self.per_chunk + start, self.records)
        return self.flat_rows(record, record + stop - start, scratch)

    def flat_rows(self, first: int, last: int, scratch: Scratch | None = None) -> FullRows:
        """The rows of records `first:last`, across chunks; otherwise as `rows`."""
        if not 0 <= first <= last <= self.records:
            raise IndexError(f"records {first}:{last} of {self.records}")
        self._check_unchanged()
        words = self.header.record_words
        offset = self.header.data_offset + 2 * words * first
        raw = (scratch or Scratch()).array("raw", (last - first, words), "<u2")
        self._read(raw.reshape(-1).data.cast("B"), offset)
        return decode(raw, self.shape.n_vocab, self.version)

    def reader(self, rows: int) -> KldReader | None:
        """A reader of so many rows at once; None for `_logits2`, which must be renormalised."""
        return KldReader(self, rows) if self.version == 1 else None

    def row(self, position: Position) -> FullRow | None:
        """One row, or None where nothing was recorded."""
        if not 0 <= position.chunk < self.shape.n_chunk:
            return None
        i = position.t - self.first_t
        if not 0 <= i < self._held(position.chunk):
            return None
        return self.rows(position.chunk, i, i + 1).row(0)

    def survey(self) -> Counter[Invalid]:
        """How many records are unusable, and why, from the first bytes of every record."""
        counts: Counter[Invalid] = Counter()
        size = 2 * self.header.record_words
        head, whole = np.empty((1, 4), "<u2"), np.empty((1, self.header.record_words), "<u2")
        for record in range(self.records):
            offset = self.header.data_offset + size * record
            self._read(head.data.cast("B"), offset)
            scale, minimum = (float(x) for x in head[0].view("<f4"))
            if 0 < scale < 1e-2 and -1e3 < minimum < 0:
                continue
            self._read(whole.reshape(-1).data.cast("B"), offset)
            counts[Invalid(int(validity(whole, self.shape.n_vocab, self.version)[0]))] += 1
        del counts[Invalid.NO]
        return counts

    def close(self) -> None:
        """Close the file, once reads that are under way in other threads have ended."""
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        # A number that is closed under a reader may be given to another file at once.
        if self._closed and not self._readers and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[int]:
        """The file's number, kept open meanwhile. Raises RecordingChanged after `close`."""
        with self._lock:
            if self._closed:
                raise RecordingChanged(f"{self.path}: has been closed; open it again")
            self._readers += 1
        try:
            yield self._fd
        except OSError as error:
            raise RecordingChanged(
                f"{self.path}: cannot be read any more: {error.strerror}; open it again"
            ) from None
        finally:
            with self._lock:
                self._readers -= 1
                self._close_if_unused()

    def _read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`. Raises RecordingChanged if the bytes are gone."""
        with self._reading() as fd:
            while view:
                try:
                    got = os.preadv(fd, [view], offset)
                except InterruptedError:
                    continue
                if got == 0:
                    raise RecordingChanged(
                        f"{self.path}: was cut while it was open (nothing at byte {offset:,}); "
                        "open it again"
                    )
                view = view[got:]
                offset += got

    def _check_unchanged(self) -> None:
        """A file that is being written grows, and may; what was there must stay."""
        with self._reading() as fd:
            stat = os.fstat(fd)
        if not stat.st_nlink:  # it could still be read, but nobody would see that it is another's
            raise RecordingChanged(
                f"{self.path}: was deleted or replaced while it was open; open it again"
            )
        stamp = (stat.st_size, stat.st_mtime_ns)
        if stamp == self._stamp:
            return
        if stat.st_size < self._size:
            raise RecordingChanged(
                f"{self.path}: was cut from {self._size:,} to {stat.st_size:,} bytes while it "
                "was open; open it again"
            )
        if self._fingerprint() != self._probed:
            raise RecordingChanged(
                f"{self.path}: was written anew while it was open; open it again"
            )
        self._stamp = stamp

    def refresh(self) -> bool:
        """Take in what has been written since; True if there are more records now.

        Raises RecordingChanged where what was there is there no more.
        """
        self._check_unchanged()
        if self._stamp[0] == self._size:
            return False
        before, self._size = self.records, self._stamp[0]
        self.records = self._whole_records()
        self._probed = self._fingerprint()
        self.problems = self._find_problems()
        return self.records > before

    def _fingerprint(self) -> bytes:
        """Header and the first bytes of records spread over the file."""
        length = min(_PROBE_BYTES, 2 * self.header.record_words)
        wanted = [(0, HEADER_BYTES)]
        for record in sorted({int(r) for r in np.linspace(0, self.records - 1, _PROBES)}):
            if 0 <= record < self.records:
                wanted.append(
                    (self.header.data_offset + 2 * self.header.record_words * record, length)
                )
        out = bytearray()
        for offset, count in wanted:
            part = bytearray(count)
            self._read(memoryview(part), offset)
            out += part
        return bytes(out)

    # -- problems ------------------------------------------------------------------------------

    def examine(self, cancel: threading.Event | None = None) -> None:
        """Look at all that opening left out because it takes long; `problems` may grow.

        Raises DamagedRecording where the file turns out to contradict its header.
        """
        total = self.shape.n_chunk * self.shape.n_ctx
        for start in range(0, total, _TOKENS_AT_ONCE):
            if cancel is not None and cancel.is_set():
                return
            block = (start, min(total, start + _TOKENS_AT_ONCE))
            if not any(a <= block[0] and block[1] <= b for a, b in self._looked_at):
                self._look_at_tokens([block])
                self._looked_at.append(block)
        self.problems = self._find_problems()

    def _look_at_tokens(self, ranges: list[tuple[int, int]]) -> None:
        """Count token ids that are no ids of the vocabulary, and where the first is."""
        count, first = self._strange or (0, None)
        for begin, end in ranges:
            for start in range(begin, end, _TOKENS_AT_ONCE):
                tokens = self.flat_tokens(start, min(end - start, _TOKENS_AT_ONCE))
                if not tokens.size or 0 <= tokens.min() <= tokens.max() < self.shape.n_vocab:
                    continue
                bad = np.flatnonzero((tokens < 0) | (tokens >= self.shape.n_vocab))
                where = Position(*divmod(start + int(bad[0]), self.shape.n_ctx))
                first = where if first is None else min(first, where)
                count += int(bad.size)
        self._strange = None if first is None else (count, first)

    def _find_problems(self) -> tuple[str, ...]:
        problems = []
        size, expected = self._size, self.header.size_expected
        odd_size = size != expected
        if self.records < self.records_expected:
            rest = (size - self.header.data_offset) % (2 * self.header.record_words)
            cut = f" and {rest:,} bytes of another" if rest else ""
            problems.append(
                f"holds {self.records:,} of {self.records_expected:,} records{cut} "
                f"({size:,} of {expected:,} bytes)"
            )
        elif odd_size:
            problems.append(f"{size - expected:,} bytes follow the last record that it promises")
        if not self.shape.n_chunk:
            problems.append("holds no chunks")
        if self._strange is not None:
            count, first = self._strange
            problems.append(f"{count:,} tokens lie outside the vocabulary, the first at {first}")
        unlike = self._unlike_records()
        if unlike:
            problems.append(f"{unlike} records of those probed are not laid out as the header says")
        if odd_size and (unlike or (self._strange is not None and size > expected)):
            raise DamagedRecording(f"{self.path}: contradicts its header: {'; '.join(problems)}")
        return tuple(problems)

    def _unlike_records(self) -> int:
        """Of the probed records, those that are none, if they are more than those that are.

        A header with a wrong number shifts all records, and codes are read as scale and minimum.
        """
        probes = self._probed[HEADER_BYTES:]
        length = min(_PROBE_BYTES, 2 * self.header.record_words)
        like = unlike = 0
        for at in range(0, len(probes), length):
            scale, minimum = struct.unpack_from("<ff", probes, at)
            if not (math.isfinite(scale) and math.isfinite(minimum)) or scale == minimum == 0:
                continue
            spread = 1e-12 < scale < 0.1 and -1e4 < minimum < 0.001
            equal = scale == 0 and minimum < 0
            if spread or equal:
                like += 1
            else:
                unlike += 1
        return unlike if unlike > like else 0


class KldReader:
    """Reads records of a `_logits_` file into one buffer, again and again (see CodeReader)."""

    def __init__(self, recording: KldRecording, rows: int) -> None:
        header = recording.header
        self._recording = recording
        self._words, self._n_vocab = header.record_words, recording.shape.n_vocab
        self._offset = header.data_offset
        room = np.empty(2 * self._words * rows + 2 * _PAGE, "u1")
        self._room = room[-room.ctypes.data % _PAGE :]
        # A number of its own, which nobody closes under it: a read needs no lock.
        with recording._reading() as fd:
            self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)

    def check(self) -> None:
        """Raises RecordingChanged if the file no longer holds what it held at open."""
        self._recording._check_unchanged()

    def read(self, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        """Codes, scale and minimum of flat records. Raises RecordingChanged where they are gone."""
        size = 2 * self._words * count
        offset = self._offset + 2 * self._words * first
        start = (offset + _APART) % _PAGE
        room = self._room[start : start + size]
        try:
            whole = os.preadv(self._fd, [room.data], offset) == size
        except OSError:
            whole = False
        if not whole:
            self._recording._read(room.data, offset)  # says what is wrong
        raw = room.view("<u2").reshape(count, self._words)
        head = raw[:, :4].copy().view("<f4")
        return Codes(raw, 4, self._n_vocab), head[:, 0], head[:, 1]

    def usual(self, scale: Floats, base: Floats) -> NDArray[np.bool_]:
        """For which rows the codes can be taken so; all others take `flat_rows`."""
        return are_usual(scale, base)
