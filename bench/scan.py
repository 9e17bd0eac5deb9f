"""How fast a pair is scanned, against the speed of memory and against a plain reader.

Knows: the scan of an index, and how a program of a few lines would do the same.
Must not know: how the scan does it.

The yardstick is the rate at which numpy sums the same bytes, as uint64, in one thread, in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np

from bench.data import Pair, folder, tiled
from bench.measure import Result, in_turn
from kldtui.index import Index
from kldtui.recordings import open_recording

MEGABYTES = 200


def yardstick(pair: Pair) -> np.ndarray:
    """The bytes of both recordings as uint64."""
    return np.concatenate(
        [
            np.fromfile(path, "u1")[: pair.bytes // 16 * 8].view("u8")
            for path in (pair.ref, pair.quant)
        ]
    )


def plain(pair: Pair, rows: int) -> float:
    """What anybody would write: each row read, decoded whole, masked, exponentiated and summed."""
    total, flips = 0.0, 0
    with pair.ref.open("rb") as ref, pair.quant.open("rb") as quant:
        n_ctx, n_vocab, n_chunk = struct.unpack("<iii", ref.read(20)[8:])
        for file in (ref, quant):
            file.seek(20 + 4 * n_ctx * n_chunk)
        for _ in range(rows):
            logs = []
            for file in (ref, quant):
                record = np.frombuffer(file.read(pair.record_bytes), "<u2")
                scale, minimum = record[:4].view("<f4")
                logs.append(record[4 : 4 + n_vocab].astype(np.float32) * scale + minimum)
            p, q = logs
            counted = p > -16
            total += float((np.exp(p[counted]) * (p[counted] - q[counted])).sum())
            flips += int(p.argmax() != q.argmax())
    return total


def scan(pair: Pair) -> None:
    ref, quant = open_recording(pair.ref), open_recording(pair.quant)
    for _ in Index(ref, [quant]).scan():
        pass


def results() -> Iterator[Result]:
    with folder() as where:
        pair = tiled(where, MEGABYTES)
        os.sync()
        words = yardstick(pair)
        some = pair.positions // 4
        summed, ours, theirs = in_turn(words.sum, lambda: scan(pair), lambda: plain(pair, some))
        speed = words.nbytes / summed / 1e9
        rate = pair.bytes / ours / 1e9
        slow = 2 * some * pair.record_bytes / theirs / 1e9
        yield Result(
            "scan", "both passes, numpy", rate, "numpy sums the bytes in memory", speed, "GB/s", 0.1
        )
        yield Result("plain", "the same", rate, "the plain reader", slow, "GB/s", 2.5)
