"""How fast a pair is scanned, against the speed of memory and against a plain reader.

Knows: the scan of an index, and how a program of a few lines would do the same.
Must not know: how the scan does it.

The yardstick is the rate at which numpy sums the same bytes, as uint64, in one thread, in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.data import Pair, folder, tiled
from bench.measure import Result, in_turn
from kldtui.index import Index, Keeper, Stage
from kldtui.index.sweep import _PIECES_BYTES
from kldtui.recordings import open_recording
from kldtui.recordings.base import as_even

MEGABYTES = 600
SHARED_MEGABYTES = 1500
"""Of each recording that two share: what they do besides reading must not count."""
REPEATS = 8


def yardstick(pair: Pair) -> np.ndarray:
    """The bytes of both recordings as uint64."""
    return np.concatenate(
        [
            np.fromfile(path, "u1")[: pair.bytes // 16 * 8].view("u8")
            for path in (pair.ref, pair.quant)
        ]
    )


def plain(pair: Pair, rows: int) -> tuple[float, int]:
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
    return total, flips


class Passes:
    """An index over a pair, and each of its passes as something to time."""

    def __init__(self, pair: Pair, *, compiled: bool = False, quants: int = 1) -> None:
        """quants: how many, all of them the pair's."""
        self._ref = open_recording(pair.ref)
        self._quants = [open_recording(pair.quant) for _ in range(quants)]
        self._keeper: Keeper | None = None
        self._options: dict[str, Any] = {"compiled": compiled}
        self._open()

    def _open(self) -> None:
        self.index = Index(self._ref, self._quants, self._keeper)

    def roots(self) -> float:
        for table in (self.index.ref, *self.index.pairs):
            table["state"] = 0
        return self._run("roots")

    def rest(self) -> float:
        for table in (self.index.ref, *self.index.pairs):
            table["rest"] = 0
        return self._run("rest")

    def _run(self, stage: Stage) -> float:
        """Seconds until the last row is filled; that it is saved then takes the disk's time."""
        began = done = time.perf_counter()
        for _ in self.index.scan(stages=[stage], **self._options):
            done = time.perf_counter()
        return done - began


class KeptPasses(Passes):
    """The same over tables in files, by this process or by a crew of two that waits for work."""

    def __init__(self, pair: Pair, where: Path, *, compiled: bool, crew: bool) -> None:
        super().__init__(pair, compiled=compiled)
        self._keeper = Keeper(where / f"kept-{compiled}-{crew}")
        self._open()
        if crew:
            self._options["crew"] = hired = self.index.crew(2, compiled=compiled, after=0)
            assert hired is not None
            assert all(member.is_ready(60) for member in hired.members)

    def close(self) -> None:
        if "crew" in self._options:
            self._options["crew"].close()
        self.index.close()


def read(ref: Path, quant: Path, share: float, shares: int) -> None:
    """Read a share of both recordings as a scan does, and do nothing else."""
    recordings = [open_recording(path) for path in (ref, quant)]
    rows = _PIECES_BYTES // (2 * 2 * recordings[0].shape.n_vocab)
    evens = [even for even in map(as_even, recordings) if even is not None]
    readers = [reader for even in evens if (reader := even.reader(rows)) is not None]
    n = evens[0].records
    for first in range(int(n * share), int(n * share) + n // shares - rows, rows):
        for reader in readers:
            reader.read(first, rows)


def results() -> Iterator[Result]:
    with folder() as where:
        pair = tiled(where, MEGABYTES)
        os.sync()
        yield from _one_worker(pair)
        pair = tiled(where, SHARED_MEGABYTES)
        os.sync()
        yield from _two_workers(pair, where)


def _one_worker(pair: Pair) -> Iterator[Result]:
    words = yardstick(pair)
    some = pair.positions // 4
    plain_numpy, compiled = Passes(pair), Passes(pair, compiled=True)
    four = Passes(pair, quants=4)
    four.roots()
    times = in_turn(
        words.sum,
        plain_numpy.roots,
        plain_numpy.rest,
        lambda: plain(pair, some),
        compiled.roots,
        compiled.rest,
        four.rest,
        lambda: read(pair.ref, pair.quant, 0, 1),
        repeats=REPEATS,
    )
    speed = words.nbytes / times[0] / 1e9
    slow = 2 * some * pair.record_bytes / times[3] / 1e9
    roots, kld, roots_fast, kld_fast, reading = (
        pair.bytes / times[i] / 1e9 for i in (1, 2, 4, 5, 7)
    )
    sums, naive = "numpy sums the same bytes in memory", "the plain reader"
    yield Result("read", "reading alone", reading, sums, speed, "GB/s")
    yield Result("roots", "root pass, numpy", roots, sums, speed, "GB/s", 0.3)
    yield Result("kld", "KLD pass, numpy", kld, sums, speed, "GB/s", 0.1)
    yield Result("kld-plain", "KLD pass, numpy", kld, naive, slow, "GB/s", 2.5)
    yield Result(
        "kld-several",
        "KLD pass, numpy, four quants",
        times[6],
        "one by one",
        4 * times[2],
        "s",
        1,
        at_least=False,
    )
    yield Result("roots-fast", "root pass, numba", roots_fast, sums, speed, "GB/s", 0.3)
    yield Result("kld-fast", "KLD pass, numba", kld_fast, sums, speed, "GB/s", 0.3)


def _two_workers(pair: Pair, where: Path) -> Iterator[Result]:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        files = pair.ref, pair.quant
        times = in_turn(
            lambda: pool.apply(read, (*files, 0, 1)),
            lambda: pool.starmap(read, [(*files, 0, 2), (*files, 0.5, 2)], 1),
            repeats=REPEATS,
        )
    one_reads, two_read = (pair.bytes / each / 1e9 for each in times)
    yield Result("read-2", "reading alone, two workers", two_read, "one worker", one_reads, "GB/s")
    for kind, compiled in (("numpy", False), ("numba", True)):
        one = KeptPasses(pair, where, compiled=compiled, crew=False)
        two = KeptPasses(pair, where, compiled=compiled, crew=True)
        try:
            times = in_turn(one.roots, one.rest, two.roots, two.rest, repeats=REPEATS)
        finally:
            one.close()
            two.close()
        rates = [pair.bytes / each / 1e9 for each in times]
        for k, (name, what) in enumerate((("roots", "root pass"), ("kld", "KLD pass"))):
            full = f"{name}-{'fast-' if compiled else ''}2"
            words = f"{what}, {kind}, two workers"
            yield Result(full, words, rates[2 + k], "one worker", rates[k], "GB/s", 1.6)
