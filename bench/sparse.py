"""Reviews of many gigabytes on little disk: files of holes with real rows at their beginning.

Knows: the layout of `.kld` files, the tables of an index, and real rows.
Must not know: what is measured with it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.data import real_rows
from kldtui.index import Index, Keeper, Kind, State
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.kld import KldRecording

N_CTX = 512
REAL = 300
"""A read of so many records may begin at any of as many, where twice as many are there."""
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Sparse:
    """A reference and its quants, and the folder of the index over them."""

    ref: Path
    quants: tuple[Path, ...]
    index: Path

    @property
    def files(self) -> list[Path]:
        return [self.ref, *self.quants]


def sparse_review(
    where: Path,
    index: Path,
    tokens: int,
    roots: int,
    rows: int,
    quants: int = 1,
    ahead: int = 0,
    scanned: float = 1.0,
) -> Sparse:
    """Files of so many tokens, `rows` of them real, and a saved index with so many roots in it.

    The index does not hold the first `ahead` positions yet, nor those behind a share `scanned`.
    """
    paths = sparse_files(where, tokens, rows, quants)
    opened = [open_recording(path) for path in paths]
    n = positions_of(tokens)
    at = ahead + np.random.default_rng(0).choice(n - ahead, roots, replace=False)
    _fill(opened, index, at, range(ahead, int(n * scanned)))
    for recording in opened:
        recording.close()
    return Sparse(paths[0], tuple(paths[1:]), index)


def positions_of(tokens: int) -> int:
    """How many positions of so many tokens are scored."""
    return tokens // N_CTX * (N_CTX - 1 - N_CTX // 2)


def sparse_files(where: Path, tokens: int, count: int, quants: int = 1) -> list[Path]:
    """A reference and quants of so many tokens, whose first `count` rows are real."""
    ref_rows, quant_rows, stream, n_vocab = real_rows()
    chunks = tokens // N_CTX
    ids = np.resize(stream, chunks * N_CTX).astype("<i4")
    head = b"_logits_" + struct.pack("<iii", N_CTX, n_vocab, chunks)
    size = ref_rows[0].nbytes
    offset = 20 + ids.nbytes
    paths = []
    names = ["ref", "quant", *(f"quant{k}" for k in range(2, quants + 1))]
    for name in names[: 1 + quants]:
        rows = ref_rows if name == "ref" else quant_rows
        paths.append(where / f"{name}.kld")
        with paths[-1].open("wb") as file:
            file.write(head + ids.tobytes())
            for start in range(0, count, len(rows)):
                file.write(rows[: count - start].tobytes())
            file.truncate(offset + positions_of(tokens) * size)
    return paths


def without_holes(recording: Recording) -> None:
    """Read every record of a file as one of its first, which are there (`REAL` of them, twice)."""
    if not isinstance(recording, KldRecording):
        raise TypeError(f"{recording.path} is no .kld file")
    start, size = recording.header.data_offset, 2 * recording.header.record_words
    read = recording._read

    def read_real(view: memoryview, offset: int) -> None:
        if offset >= start:
            offset = start + (offset - start) % (REAL * size)
        read(view, offset)

    recording._read = read_real  # type: ignore[method-assign]


def _fill(recordings: list[Recording], cache: Path, roots: np.ndarray, which: range) -> None:
    index = Index(recordings[0], recordings[1:], Keeper(cache))
    n_vocab = recordings[0].shape.n_vocab
    rng = np.random.default_rng(1)
    is_root = np.zeros(index.layout.n, bool)
    is_root[roots] = True
    for start in range(which.start, which.stop, _BLOCK):
        part = is_root[start : min(start + _BLOCK, which.stop)]
        count = part.size
        ref, pair = (np.zeros(count, table.dtype) for table in (index.ref, index.pairs[0]))
        for entries in (ref, pair):
            entries["state"], entries["rest"] = State.SCORED, 1
        ref["ref_id"] = rng.integers(0, n_vocab, count)
        ref["ref_p_ref"] = -rng.random(count)
        ref["margin"] = rng.exponential(1.5, count)
        ref["ref_stream"] = ref["ref_p_ref"] - 0.5
        ref["stream_rank"] = 2
        pair["kind"] = np.where(part, Kind.ROOT, Kind.AGREE)
        pair["quant_id"] = np.where(part, (ref["ref_id"] + 1) % n_vocab, ref["ref_id"])
        pair["ref_p_quant"] = ref["ref_p_ref"] - part * rng.exponential(0.7, count)
        pair["kld"] = rng.exponential(0.05, count) + part * rng.exponential(0.5, count)
        for name in ("quant_p_ref", "quant_p_quant", "quant_stream"):
            pair[name] = -1
        index.ref.put(start, ref)
        for table in index.pairs:
            table.put(start, pair)
    index.close()
