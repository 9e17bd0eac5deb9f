"""A review as large as they come: 20 million tokens and a million roots, in files full of holes.

Knows: the layout of `.kld` files, the tables of an index, and real rows.
Must not know: what is measured with it.

Only the first records are there; each of the others is read as one of them.
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
_BLOCK = 1 << 16
_REAL = 300
"""Records that are there, twice, so that a read may begin at any of them."""


@dataclass(frozen=True, slots=True)
class Large:
    """Two files of one stream; the index in `cache` is of the first `scanned` positions."""

    ref: Path
    quant: Path
    cache: Path
    positions: int
    scanned: int


def large_review(where: Path, tokens: int, roots: int, scanned: float = 1.0) -> Large:
    """Files of so many tokens, and a saved index in which so many positions are roots.

    scanned: the share of the positions, from the first on, that the index has.
    """
    ref_rows, quant_rows, stream, n_vocab = real_rows()
    chunks = tokens // N_CTX
    n = chunks * (N_CTX - 1 - N_CTX // 2)
    ids = np.resize(stream, chunks * N_CTX).astype("<i4")
    head = b"_logits_" + struct.pack("<iii", N_CTX, n_vocab, chunks) + ids.tobytes()
    paths = []
    for name, rows in (("ref", ref_rows), ("quant", quant_rows)):
        paths.append(where / f"{name}.kld")
        real = np.resize(rows, (_REAL, rows.shape[1])).tobytes()
        with paths[-1].open("wb") as file:
            file.write(head + real + real)
            file.truncate(len(head) + n * rows[0].nbytes)
    opened = [open_recording(path) for path in paths]
    upto = int(n * scanned)
    at = np.sort(np.random.default_rng(0).choice(n, roots, replace=False))
    _fill(opened, where / "index", at, n_vocab, upto)
    for recording in opened:
        recording.close()
    return Large(paths[0], paths[1], where / "index", n, upto)


def without_holes(recording: Recording) -> None:
    """Read every record of the file as one of those that are there."""
    if not isinstance(recording, KldRecording):
        raise TypeError(f"{recording.path} is no .kld file")
    start, size = recording.header.data_offset, 2 * recording.header.record_words
    read = recording._read

    def read_real(view: memoryview, offset: int) -> None:
        if offset >= start:
            offset = start + (offset - start) % (_REAL * size)
        read(view, offset)

    recording._read = read_real  # type: ignore[method-assign]


def _fill(
    recordings: list[Recording], cache: Path, roots: np.ndarray, n_vocab: int, upto: int
) -> None:
    index = Index(recordings[0], recordings[1:], Keeper(cache))
    rng = np.random.default_rng(1)
    is_root = np.zeros(index.layout.n, bool)
    is_root[roots] = True
    for start in range(0, upto, _BLOCK):
        part = is_root[start : min(upto, start + _BLOCK)]
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
        for table, entries in ((index.ref, ref), (index.pairs[0], pair)):
            table.put(start, entries)
    index.close()
