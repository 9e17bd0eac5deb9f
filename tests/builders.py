"""Tiny `.kld` files for tests: whole, odd and broken ones, from logits or from codes.

Knows: how to put bytes where llama-perplexity would.
Must not know: how kldtui reads them; records from codes are laid out here by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kldtui.recordings.kld_writer import encode

MAGIC = {1: b"_logits_", 2: b"_logits2"}


@dataclass(frozen=True)
class Stream:
    """tokens int32[n_chunk, n_ctx] over a vocabulary of n_vocab ids."""

    tokens: NDArray[np.int32]
    n_vocab: int

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def n_chunk(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def per_chunk(self) -> int:
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def first_t(self) -> int:
        """The first scored t of a chunk."""
        return self.n_ctx // 2 + 1

    @property
    def records(self) -> int:
        return self.n_chunk * self.per_chunk

    @property
    def record_bytes(self) -> int:
        return 2 * (2 * ((self.n_vocab + 1) // 2) + 4)

    @property
    def data_offset(self) -> int:
        return 20 + 4 * self.tokens.size

    @property
    def size(self) -> int:
        return self.data_offset + self.records * self.record_bytes


def make_stream(n_chunk: int = 2, n_ctx: int = 8, n_vocab: int = 16, seed: int = 0) -> Stream:
    """A random stream."""
    rng = np.random.default_rng(seed)
    return Stream(rng.integers(0, n_vocab, (n_chunk, n_ctx)).astype(np.int32), n_vocab)


def make_logits(stream: Stream, seed: int = 1, spread: float = 3.0) -> NDArray[np.float32]:
    """Random logits for every record, float32[records, n_vocab]."""
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((stream.records, stream.n_vocab))).astype(np.float32)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Exact log p of logits, float64 of the same shape."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    out: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return out


def record(
    codes: Sequence[int] | NDArray[np.integer], scale: float, minimum: float
) -> NDArray[np.uint16]:
    """One record from its codes, uint16[words]; an odd vocabulary gets its pad word."""
    padded = [*map(int, codes)] + [0] * (len(codes) % 2)
    head = np.frombuffer(struct.pack("<ff", scale, minimum), "<u2")
    return np.concatenate([head, np.array(padded, "<u2")])


def record_of(codes: Sequence[int], scale: float = 16 / 65535) -> NDArray[np.uint16]:
    """One record from its codes, with the minimum that makes it sum to 1."""
    logp = np.array(codes, np.float64) * scale
    minimum = -logp.max() - np.log(np.exp(logp - logp.max()).sum())
    return record(codes, scale, float(minimum))


NAN = float("nan")


def nan_record(n_vocab: int) -> NDArray[np.uint16]:
    """What NaN logits leave."""
    return record([0] * n_vocab, NAN, NAN)


def unwritten_record(n_vocab: int) -> NDArray[np.uint16]:
    """All zero."""
    return record([0] * n_vocab, 0.0, 0.0)


def equal_record(n_vocab: int) -> NDArray[np.uint16]:
    """All logits equal: scale 0, minimum -ln(n_vocab)."""
    return record([0] * n_vocab, 0.0, -float(np.log(n_vocab)))


def header(stream: Stream, version: int = 1) -> bytes:
    return MAGIC[version] + struct.pack("<iii", stream.n_ctx, stream.n_vocab, stream.n_chunk)


def write_kld(
    path: Path,
    stream: Stream,
    logits: NDArray[np.float32] | None = None,
    *,
    records: Sequence[NDArray[np.uint16]] | None = None,
    version: int = 1,
    spread: float = 16.0,
) -> Path:
    """A file with records from `logits`, or from `records` as they are, or with none."""
    data = b""
    if records is not None:
        data = b"".join(each.tobytes() for each in records)
    elif logits is not None:
        data = encode(logits, version, spread).tobytes()
    path.write_bytes(header(stream, version) + stream.tokens.astype("<i4").tobytes() + data)
    return path


def write_sparse(path: Path, stream: Stream, at: int, data: NDArray[np.uint16]) -> Path:
    """A file of full size, all holes but for record number `at`."""
    with path.open("wb") as file:
        file.write(header(stream) + stream.tokens.astype("<i4").tobytes())
        file.seek(stream.data_offset + at * stream.record_bytes)
        file.write(data.tobytes())
        file.truncate(stream.size)
    return path


def cut(path: Path, size: int) -> Path:
    """Truncate a file to `size` bytes."""
    with path.open("r+b") as file:
        file.truncate(size)
    return path
