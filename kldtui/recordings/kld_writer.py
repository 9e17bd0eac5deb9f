"""Write a `.kld` file from float logits, as llama-perplexity would.

Knows: how a row of logits becomes a record of either version.
Must not know: where logits come from, or how records are read back.

Formulas: llama.cpp `log_softmax` in `tools/perplexity/perplexity.cpp` (version 1), beellama.cpp
`kld-logits.h` (version 2); float32 but for the sum. Codes are within 1 of what those write.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import RecordingError
from kldtui.recordings.kld import MAGICS
from kldtui.recordings.lock import lock
from kldtui.rows import FullRows

SPREAD = 16.0
"""Version 1 keeps this many nats below the best logit (ik_llama.cpp keeps 24)."""
_MAGIC = {version: magic for magic, version in MAGICS.items()}


def encode(
    logits: NDArray[np.float32], version: int = 1, spread: float = SPREAD
) -> NDArray[np.uint16]:
    """Records uint16[r, 2*((n_vocab+1)//2) + 4] of logits float32[r, n_vocab].

    NaN logits give a record that a reader finds invalid, as llama.cpp's would. Version 2 takes
    logits that are not finite for a probability of zero.
    """
    logits = np.asarray(logits, np.float32)
    count, n_vocab = logits.shape
    out = np.zeros((count, 2 * ((n_vocab + 1) // 2) + 4), "<u2")
    with np.errstate(all="ignore"):
        for row, record in zip(logits, out, strict=True):
            scale, minimum, codes = _encode_v1(row, spread) if version == 1 else _encode_v2(row)
            record[:4] = np.frombuffer(struct.pack("<ff", scale, minimum), "<u2")
            record[4 : 4 + n_vocab] = codes
    return out


def record_of(rows: FullRows, i: int) -> NDArray[np.uint16]:
    """The record, uint16[words], that row `i` was decoded from; of `_logits2` one that decodes to
    the same row (it was renormalised)."""
    codes = rows.codes[i]
    out = np.zeros(2 * ((codes.size + 1) // 2) + 4, "<u2")
    minimum = rows.base[i] + rows.scale[i] if rows.zeros else rows.base[i]
    out[:4] = np.frombuffer(struct.pack("<ff", rows.scale[i], minimum), "<u2")
    out[4 : 4 + codes.size] = codes
    return out


def _encode_v1(
    row: NDArray[np.float32], spread: float
) -> tuple[np.float32, np.float32, NDArray[np.uint16]]:
    best = row.max()
    low = max(row.min(), best - np.float32(spread))
    log_sum = np.float32(np.log(np.exp(row - best).sum(dtype=np.float64)))
    minimum = np.float32(low - best - log_sum)
    scale = np.float32((best - low) / np.float32(65535))
    return scale, minimum, _codes(row, low, scale, 0, row > low)


def _encode_v2(
    row: NDArray[np.float32],
) -> tuple[np.float32, np.float32, NDArray[np.uint16]]:
    finite = np.isfinite(row)
    if not finite.any():
        return np.float32(0), np.float32(-np.inf), np.zeros(row.shape, np.uint16)
    best, low = row[finite].max(), row[finite].min()
    log_sum = np.float32(np.log(np.exp((row[finite] - best).astype(np.float64)).sum()))
    minimum = np.float32(low - best - log_sum)
    scale = np.float32((best - low) / np.float32(65534))
    return scale, minimum, _codes(row, low, scale, 1, finite)


def _codes(
    row: NDArray[np.float32],
    low: np.float32,
    scale: np.float32,
    first: int,
    some: NDArray[np.bool_],
) -> NDArray[np.uint16]:
    """Codes from `first` up where `some`, 0 elsewhere."""
    steps = np.zeros(row.shape, np.float32)
    if scale > 0:
        steps = np.rint((row - low) * (np.float32(1) / scale))
    steps = np.clip(np.where(some, steps, 0), 0, 65535 - first)
    return np.where(some, steps + first, 0).astype(np.uint16)


def _open(path: Path, mode: str) -> BinaryIO:
    """The file, which nobody else writes. Raises RecordingError where somebody does, OSError."""
    file = cast(BinaryIO, path.open(mode))
    try:
        lock(file.fileno(), path)
    except RecordingError:
        file.close()
        raise
    return file


class KldWriter:
    """Writes header and tokens at once, then records in order. A context manager.

    A file that is left early holds whole records and is read as a cut one.
    """

    def __init__(
        self,
        path: Path,
        tokens: NDArray[np.int32],
        n_vocab: int,
        version: int = 1,
        *,
        spread: float = SPREAD,
    ) -> None:
        """tokens: int32[n_chunk, n_ctx], the stream. Raises RecordingError if it cannot write."""
        if version not in _MAGIC:
            raise ValueError(f"no .kld version {version}")
        tokens = np.asarray(tokens, "<i4")
        n_chunk, n_ctx = tokens.shape
        if n_ctx < 3 or n_vocab < 1:
            raise ValueError(f"n_ctx {n_ctx} and n_vocab {n_vocab} leave nothing to score")
        self.path = path
        self.version = version
        self.n_vocab = n_vocab
        self.records_left = n_chunk * (n_ctx - 1 - n_ctx // 2)
        self._spread = spread
        header = _MAGIC[version] + struct.pack("<iii", n_ctx, n_vocab, n_chunk)
        try:
            self._file: BinaryIO = _open(path, "ab")
            if self._file.tell():
                self._file.truncate(0)
            self._file.write(header + tokens.tobytes())
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None

    @classmethod
    def go_on(cls, path: Path, tokens: NDArray[np.int32], n_vocab: int) -> Self:
        """Append to a version 1 file that was left early; what is no whole chunk is taken off.

        Raises RecordingError for a file of another stream, or one that cannot be written.
        """
        tokens = np.asarray(tokens, "<i4")
        n_chunk, n_ctx = tokens.shape
        begin = _MAGIC[1] + struct.pack("<iii", n_ctx, n_vocab, n_chunk) + tokens.tobytes()
        per_chunk = n_ctx - 1 - n_ctx // 2
        chunk_bytes = per_chunk * 2 * (2 * ((n_vocab + 1) // 2) + 4)
        writer = cls.__new__(cls)
        try:
            file = _open(path, "r+b")
            if file.read(len(begin)) != begin:
                file.close()
                raise RecordingError(
                    f"{path}: exists and is no .kld file of this stream; choose another name (-o)"
                )
            held = min(n_chunk, (path.stat().st_size - len(begin)) // chunk_bytes)
            file.truncate(len(begin) + held * chunk_bytes)
            file.seek(0, os.SEEK_END)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None
        writer.path, writer.version, writer.n_vocab = path, 1, n_vocab
        writer.records_left = (n_chunk - held) * per_chunk
        writer._spread, writer._file = SPREAD, file
        return writer

    def write(self, logits: NDArray[np.float32]) -> None:
        """Append records of logits float32[r, n_vocab], in the order of the positions.

        Raises ValueError for more rows than the stream has, RecordingError if it cannot write.
        """
        count, n_vocab = logits.shape
        if n_vocab != self.n_vocab:
            raise ValueError(f"rows of {n_vocab} logits in a file of {self.n_vocab}")
        if count > self.records_left:
            raise ValueError(f"{count} rows where {self.records_left} are left")
        try:
            self._file.write(encode(logits, self.version, self._spread).tobytes())
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.records_left -= count

    def close(self) -> None:
        """Flush to the disk. Raises RecordingError if it cannot."""
        try:
            if not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> KldWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
