"""The bytes of a `.kld` file: header, tokens, and one 16-bit distribution a record.

Knows: the byte layout of `_logits_` and `_logits2`, and which records are no distributions.
Must not know: files, what is done with the rows, text, or any other format.

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
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kldtui.rows import FullRows, Invalid

MAGICS = {b"_logits_": 1, b"_logits2": 2}
HEADER_BYTES = 20
_MAX_LOGP = 80.0
"""A record whose best log p could pass this cannot be exponentiated in float32."""
_MIN_USUAL, _MIN_SCALE, _MAX_SCALE = -80.0, 1e-12, 1e-3


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


def decode(raw: NDArray[np.uint16], n_vocab: int, version: int) -> FullRows:
    """Records, uint16[r, words], as rows that share their memory; formulas in the module's head.

    Codes of a record with scale 0, which mean nothing, are set to 0 in place.
    """
    scale, minimum = _heads(raw)
    codes = raw[:, 4 : 4 + n_vocab]
    if version == 1 and are_usual(scale, minimum).all():
        invalid = np.zeros(len(raw), np.uint8)
        return FullRows(codes, scale, minimum, minimum, invalid, raw=raw, skip=4)
    invalid = validity(raw, n_vocab, version)
    if version == 2:
        return _decode_v2(codes, scale, minimum, invalid)
    floor = minimum.copy()
    for i in np.flatnonzero(scale == 0):
        codes[i] = 0
        floor[i] = -np.inf  # equal logits: each entry is a value
    return FullRows(codes, scale, minimum, floor, invalid, raw=raw, skip=4)


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


def are_usual(scale: NDArray[np.float32], minimum: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which heads are such as every model gives, bool[r]: the record needs no closer look."""
    usual = (scale > _MIN_SCALE) & (scale < _MAX_SCALE)
    return np.asarray(usual & (minimum < 0) & (minimum > _MIN_USUAL))


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
