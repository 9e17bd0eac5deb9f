"""A review as large as they come: 20 million tokens and a million roots, in files full of holes.

Knows: the layout of `.kld` files, the tables of an index, and real rows to put where one looks.
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

N_CTX = 512
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Large:
    """Two files of one stream, and which flat positions are roots and have real rows."""

    ref: Path
    quant: Path
    cache: Path
    positions: int
    visited: list[int]


def large_review(
    where: Path, tokens: int, roots: int, visited: int = 64, cache: Path | None = None
) -> Large:
    """Files of so many tokens, and a saved index in which so many positions are roots.

    `visited` of the roots, evenly spread, have real rows in both files; all else are holes.
    """
    ref_rows, quant_rows, stream, n_vocab = real_rows()
    chunks = tokens // N_CTX
    per_chunk = N_CTX - 1 - N_CTX // 2
    n = chunks * per_chunk
    rng = np.random.default_rng(0)
    at = np.sort(rng.choice(n, roots, replace=False))
    shown = at[:: max(1, roots // visited)][:visited].tolist()
    ids = np.resize(stream, chunks * N_CTX).astype("<i4")
    head = b"_logits_" + struct.pack("<iii", N_CTX, n_vocab, chunks)
    size = ref_rows[0].nbytes
    offset = 20 + ids.nbytes
    paths = []
    for name, rows in (("ref", ref_rows), ("quant", quant_rows)):
        paths.append(where / f"{name}.kld")
        with paths[-1].open("wb") as file:
            file.write(head + ids.tobytes())
            for k, i in enumerate(shown):
                file.seek(offset + i * size)
                file.write(rows[k % len(rows)].tobytes())
            file.truncate(offset + n * size)
    opened = [open_recording(path) for path in paths]
    cache = cache or where / "cache"
    _fill(opened, cache, at, n_vocab)
    for recording in opened:
        recording.close()
    return Large(paths[0], paths[1], cache, n, shown)


def _fill(recordings: list[Recording], cache: Path, roots: np.ndarray, n_vocab: int) -> None:
    index = Index(recordings[0], recordings[1:], Keeper(cache))
    rng = np.random.default_rng(1)
    is_root = np.zeros(index.layout.n, bool)
    is_root[roots] = True
    for start in range(0, index.layout.n, _BLOCK):
        part = is_root[start : start + _BLOCK]
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
