"""The `.kld` file of llama.cpp: header, tokens, and one 16-bit distribution a record.

Knows: the byte layout of `_logits_` and `_logits2`, and what a cut or odd file looks like.
Must not know: what is done with the rows, text, or any other format.

Layout, little-endian (llama.cpp `tools/perplexity`, `--kl-divergence-base FILE`): magic[8],
int32 n_ctx, int32 n_vocab, int32 n_chunk, int32 tokens[n_chunk * n_ctx]; then for each chunk
`n_ctx - 1 - n_ctx/2` records of `2*((n_vocab+1)/2) + 4` uint16: float32 scale, float32 minimum,
n_vocab codes, and a pad word where n_vocab is odd.

- `_logits_`: log p = scale * code + minimum; code 0 means "at or below the floor".
- `_logits2` (beellama.cpp): code 0 is exactly zero probability, log p = scale * (code - 1) +
  minimum for the others, and the row is renormalised.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DamagedRecording, RecordingChanged, RecordingError
from kldtui.position import Position
from kldtui.recordings.base import Scratch, StreamShape
from kldtui.rows import FullRow, FullRows, Invalid

MAGICS = {b"_logits_": 1, b"_logits2": 2}
HEADER_BYTES = 20
_MAX_LOGP = 80.0
"""A record whose best log p could pass this cannot be exponentiated in float32."""
_TOKENS_AT_ONCE = 1 << 18
_PROBES = 16
_PROBE_BYTES = 64


@dataclass(frozen=True, slots=True)
class KldHeader:
    """What the first bytes of a file say; None for what the file is too short to hold."""

    version: int
    n_ctx: int | None
    n_vocab: int | None
    n_chunk: int | None

    @property
    def per_chunk(self) -> int:
        """Records a chunk."""
        n_ctx = self.n_ctx or 0
        return max(0, n_ctx - 1 - n_ctx // 2)

    @property
    def record_words(self) -> int:
        """Length of a record in uint16."""
        return 2 * (((self.n_vocab or 0) + 1) // 2) + 4

    @property
    def data_offset(self) -> int:
        """Byte offset of the first record."""
        return HEADER_BYTES + 4 * (self.n_chunk or 0) * (self.n_ctx or 0)

    @property
    def records_expected(self) -> int:
        return (self.n_chunk or 0) * self.per_chunk

    @property
    def size_expected(self) -> int:
        """Bytes of a whole file."""
        return self.data_offset + 2 * self.record_words * self.records_expected

    @property
    def is_sane(self) -> bool:
        """Whether the numbers are all there and could be those of a recording."""
        if self.n_ctx is None or self.n_vocab is None or self.n_chunk is None:
            return False
        return self.n_ctx >= 3 and self.n_vocab >= 1 and self.n_chunk >= 0

    def fault(self, size: int) -> str | None:
        """Why a file of `size` bytes with this header cannot be read at all, or None."""
        if self.n_ctx is None or self.n_vocab is None or self.n_chunk is None:
            return (
                f"holds only {size} bytes of its header: the run that wrote it failed before the "
                "text was checked (it may be shorter than two chunks); record it again"
            )
        if not self.is_sane:
            return (
                f"has a damaged header: n_ctx {self.n_ctx}, n_vocab {self.n_vocab}, "
                f"n_chunk {self.n_chunk}"
            )
        if size < self.data_offset:
            return (
                f"ends within its tokens ({size:,} of {self.data_offset:,} bytes; n_ctx "
                f"{self.n_ctx}, n_vocab {self.n_vocab}, n_chunk {self.n_chunk}): nothing of it "
                "is scored; record it again"
            )
        return None


def parse_header(head: bytes) -> KldHeader | None:
    """The header in the first 20 bytes of a file; None if the magic is not one of ours."""
    version = MAGICS.get(head[:8])
    if version is None:
        return None
    numbers: list[int | None] = [None, None, None]
    for i in range(3):
        if len(head) >= 12 + 4 * i:
            numbers[i] = struct.unpack_from("<i", head, 8 + 4 * i)[0]
    return KldHeader(version, *numbers)


class KldRecording:
    """A `.kld` file, opened. Reads are positioned and thread-safe; nothing is mapped."""

    format = "kld"
    full = True

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
        self._first = self.shape.n_ctx // 2 + 1
        self.records_expected = header.records_expected
        whole = (self._size - header.data_offset) // (2 * header.record_words)
        self.records = min(whole, self.records_expected)
        self._probed = self._fingerprint()
        self.problems = self._find_problems()

    # -- what is there -------------------------------------------------------------------------

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[n_ctx]."""
        self._check_chunk(chunk)
        out = np.empty(self.shape.n_ctx, "<i4")
        self._read(out.data.cast("B"), HEADER_BYTES + 4 * chunk * self.shape.n_ctx)
        return out.astype(np.int32, copy=False)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        """The t of the chunk's whole records: the second half of the chunk, or what there is."""
        self._check_chunk(chunk)
        return np.arange(self._first, self._first + self._held(chunk), dtype=np.int32)

    def _held(self, chunk: int) -> int:
        per_chunk = self.header.per_chunk
        return max(0, min(per_chunk, self.records - chunk * per_chunk))

    def _check_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.shape.n_chunk:
            raise IndexError(f"chunk {chunk} of {self.shape.n_chunk}")

    # -- rows ----------------------------------------------------------------------------------

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> FullRows:
        """Rows of `scored(chunk)[start:stop]`; with `scratch`, valid until its next use."""
        self._check_chunk(chunk)
        if not 0 <= start <= stop <= self._held(chunk):
            raise IndexError(f"rows {start}:{stop} of {self._held(chunk)} in chunk {chunk}")
        self._check_unchanged()
        scratch = scratch or Scratch()
        words = self.header.record_words
        raw = scratch.array("raw", (stop - start, words), "<u2")
        record = chunk * self.header.per_chunk + start
        self._read(raw.reshape(-1).data.cast("B"), self.header.data_offset + 2 * words * record)
        return decode(raw, self.shape.n_vocab, self.version)

    def row(self, position: Position) -> FullRow | None:
        """One row, or None where nothing was recorded."""
        if not 0 <= position.chunk < self.shape.n_chunk:
            return None
        i = position.t - self._first
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
        strange = self._tokens_outside()
        if strange is not None:
            count, first = strange
            problems.append(f"{count:,} tokens lie outside the vocabulary, the first at {first}")
        unlike = self._unlike_records()
        if unlike:
            problems.append(f"{unlike} records of those probed are not laid out as the header says")
        if odd_size and (unlike or (strange is not None and size > expected)):
            raise DamagedRecording(f"{self.path}: contradicts its header: {'; '.join(problems)}")
        return tuple(problems)

    def _tokens_outside(self) -> tuple[int, Position] | None:
        """How many token ids are no ids of the vocabulary, and where the first is."""
        count, first = 0, None
        total = self.shape.n_chunk * self.shape.n_ctx
        block = np.empty(min(total, _TOKENS_AT_ONCE), "<i4")
        for start in range(0, total, _TOKENS_AT_ONCE):
            tokens = block[: total - start]
            self._read(tokens.data.cast("B"), HEADER_BYTES + 4 * start)
            bad = np.flatnonzero((tokens < 0) | (tokens >= self.shape.n_vocab))
            if bad.size:
                first = first or Position(*divmod(start + int(bad[0]), self.shape.n_ctx))
                count += bad.size
        return None if first is None else (count, first)

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


def decode(raw: NDArray[np.uint16], n_vocab: int, version: int) -> FullRows:
    """Records, uint16[r, words], as rows that share their memory; formulas in the module's head.

    Codes of a record with scale 0, which mean nothing, are set to 0 in place.
    """
    scale, minimum = _heads(raw)
    codes = raw[:, 4 : 4 + n_vocab]
    invalid = validity(raw, n_vocab, version)
    if version == 2:
        return _decode_v2(codes, scale, minimum, invalid)
    floor = minimum.copy()
    for i in np.flatnonzero(scale == 0):
        codes[i] = 0
        floor[i] = -np.inf  # equal logits: each entry is a value
    return FullRows(codes, scale, minimum, floor, invalid)


def _decode_v2(
    codes: NDArray[np.uint16],
    scale: NDArray[np.float32],
    minimum: NDArray[np.float32],
    invalid: NDArray[np.uint8],
) -> FullRows:
    floor = np.full(scale.shape, -np.inf, np.float32)
    with np.errstate(all="ignore"):
        base = minimum - scale
    rows = FullRows(codes, scale, base, floor, invalid, zeros=True)
    logp = rows.logp
    for i in np.flatnonzero(invalid == Invalid.NO):
        best = logp[i].max()
        if not np.isfinite(best):
            invalid[i] = Invalid.INFINITE
            continue
        total = np.exp(logp[i] - best).sum(dtype=np.float64)
        base[i] -= np.float32(best + np.log(total))
    return rows


def _heads(raw: NDArray[np.uint16]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    head = np.ascontiguousarray(raw[:, :4]).view("<f4").astype(np.float32)
    return head[:, 0], head[:, 1]


def validity(raw: NDArray[np.uint16], n_vocab: int, version: int) -> NDArray[np.uint8]:
    """An `Invalid` for each record, uint8[r]; codes are looked at only where the scale is 0."""
    scale, minimum = _heads(raw)
    out = np.zeros(scale.shape[0], np.uint8)
    with np.errstate(all="ignore"):
        top = scale * np.float32(65535) + minimum
    out[(scale < 0) | (top > _MAX_LOGP)] = Invalid.CONTRADICTORY
    for i in np.flatnonzero(scale == 0):
        if minimum[i] == 0 and not raw[i, 4 : 4 + n_vocab].any():
            out[i] = Invalid.UNWRITTEN
        elif version == 1 and abs(minimum[i] + math.log(n_vocab)) > 1e-3:
            out[i] = Invalid.CONTRADICTORY
    out[np.isinf(scale) | np.isinf(minimum) | np.isinf(top)] = Invalid.INFINITE
    out[np.isnan(scale) | np.isnan(minimum)] = Invalid.NOT_A_NUMBER
    return out
