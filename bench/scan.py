"""How fast a pair is scanned, against the speed of memory and against a plain reader.

Knows: the scan of an index, and how a program of a few lines would do the same.
Must not know: how the scan does it.

The yardstick is the rate at which numpy sums the same bytes, as uint64, in one thread, in memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.data import Pair, folder, tiled
from bench.measure import Result, in_turn
from kldtui.index import Index, Stage
from kldtui.recordings import open_recording

MEGABYTES = 150
REPEATS = 5


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


class Passes:
    """An index over a pair, and each of its passes as something to time."""

    def __init__(self, pair: Pair, *, compiled: bool = False, workers: int = 1) -> None:
        self._ref, self._quant = open_recording(pair.ref), open_recording(pair.quant)
        self._options: dict[str, Any] = {"compiled": compiled, "workers": workers}
        self.index = Index(self._ref, [self._quant])

    def roots(self) -> None:
        for table in (self.index.ref, self.index.pairs[0]):
            table["state"] = 0
        self._run("roots")

    def rest(self) -> None:
        self.index.pairs[0]["rest"] = self.index.ref["rest"] = 0
        self._run("rest")

    def _run(self, stage: Stage) -> None:
        for _ in self.index.scan(stages=[stage], **self._options):
            pass


def results() -> Iterator[Result]:
    with folder() as where:
        pair = tiled(where, MEGABYTES)
        os.sync()
        words = yardstick(pair)
        some = pair.positions // 4
        plain_numpy, compiled = Passes(pair), Passes(pair, compiled=True)
        both = Passes(pair, workers=2), Passes(pair, compiled=True, workers=2)
        times = in_turn(
            words.sum,
            plain_numpy.roots,
            plain_numpy.rest,
            lambda: plain(pair, some),
            compiled.roots,
            compiled.rest,
            *(act for passes in both for act in (passes.roots, passes.rest)),
            repeats=REPEATS,
        )
        speed = words.nbytes / times[0] / 1e9
        slow = 2 * some * pair.record_bytes / times[3] / 1e9
        rate = {
            name: pair.bytes / times[i] / 1e9
            for name, i in (
                ("roots", 1), ("kld", 2), ("roots-fast", 4), ("kld-fast", 5),
                ("roots-2", 6), ("kld-2", 7), ("roots-fast-2", 8), ("kld-fast-2", 9),
            )
        }  # fmt: skip
        sums, naive = "numpy sums the same bytes in memory", "the plain reader"
        yield Result("roots", "root pass, numpy", rate["roots"], sums, speed, "GB/s", 0.3)
        yield Result("kld", "KLD pass, numpy", rate["kld"], sums, speed, "GB/s", 0.1)
        yield Result("kld-plain", "KLD pass, numpy", rate["kld"], naive, slow, "GB/s", 2.5)
        yield Result("roots-fast", "root pass, numba", rate["roots-fast"], sums, speed, "GB/s", 0.3)
        yield Result("kld-fast", "KLD pass, numba", rate["kld-fast"], sums, speed, "GB/s", 0.3)
        for name in ("roots", "kld", "roots-fast", "kld-fast"):
            what = f"{name}, two workers"
            one, two = rate[name], rate[f"{name}-2"]
            yield Result(f"{name}-2", what, two, "one worker", one, "GB/s", 1.6)
