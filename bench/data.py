"""Recordings of any size to measure with: real rows over and over, and files that are mostly holes.

Knows: the packaged pair, whose rows are those of a real model, and the layout of `.kld` files.
Must not know: what is measured with them.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kldtui.demo.pair import demo_pair

ROOM = Path(tempfile.gettempdir()) / "kldtui-bench"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two `.kld` files of one stream. bytes: of the records of both."""

    ref: Path
    quant: Path
    positions: int
    record_bytes: int

    @property
    def bytes(self) -> int:
        return 2 * self.positions * self.record_bytes


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk that holds temporary files."""
    ROOM.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOM) as name:
        yield Path(name)


def real_rows() -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.int32], int]:
    """The packaged pair: the records of both, uint16[records, words], the stream token of each
    record, and n_vocab."""
    pair = demo_pair(ROOM / "demo")
    ref, stream, n_vocab = _records(pair.ref)
    quant, _, _ = _records(pair.quant)
    return ref, quant, stream, n_vocab


def _records(path: Path) -> tuple[NDArray[np.uint16], NDArray[np.int32], int]:
    data = path.read_bytes()
    n_ctx, n_vocab, n_chunk = struct.unpack_from("<iii", data, 8)
    words = 2 * ((n_vocab + 1) // 2) + 4
    tokens = np.frombuffer(data, "<i4", n_ctx * n_chunk, 20).reshape(n_chunk, n_ctx)
    records = np.frombuffer(data, "<u2", offset=20 + tokens.nbytes).reshape(-1, words)
    return records, tokens[:, n_ctx // 2 + 1 :].reshape(-1), n_vocab


def tiled(where: Path, megabytes: int, n_ctx: int = 512) -> Pair:
    """A pair of real rows over and over, `megabytes` each, in whole chunks."""
    ref, quant, stream, n_vocab = real_rows()
    per_chunk = n_ctx - 1 - n_ctx // 2
    chunks = max(1, round(megabytes * 1e6 / ref[0].nbytes / per_chunk))
    count = chunks * per_chunk
    tokens = np.zeros((chunks, n_ctx), "<i4")
    tokens[:, n_ctx // 2 + 1 :] = np.resize(stream, count).reshape(chunks, per_chunk)
    head = b"_logits_" + struct.pack("<iii", n_ctx, n_vocab, chunks) + tokens.tobytes()
    paths = []
    for name, rows in (("ref", ref), ("quant", quant)):
        paths.append(where / f"{name}.kld")
        with paths[-1].open("wb") as file:
            file.write(head)
            for start in range(0, count, len(rows)):
                file.write(rows[: count - start].tobytes())
    return Pair(paths[0], paths[1], count, ref[0].nbytes)
