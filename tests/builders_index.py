"""Pairs with everything that a record can be, and how an index over them is filled or killed.

Knows: the builders of `.kld` files, and the scan of an index.
Must not know: how the scan does it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.index import Index, Keeper, Kind, Table
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.kld_writer import encode
from tests.builders import (
    Stream,
    equal_record,
    make_logits,
    make_stream,
    nan_record,
    record_of,
    unwritten_record,
    write_kld,
)


def mixed_records(stream: Stream, seed: int) -> list[NDArray[np.uint16]]:
    """Mostly usual records; each seventh or so NaN, unwritten, all equal, tied or damaged."""
    rng = np.random.default_rng(seed)
    out = list(encode(make_logits(stream, seed)))
    n = stream.n_vocab
    for i in range(len(out)):
        pick = int(rng.integers(0, 24))
        tied = [65535 if t in (1, 4) else 65533 if t == 2 else int(t) for t in range(n)]
        swapped = [65535 if t in (2, n - 1) else int(t) for t in range(n)]
        odd = {
            0: nan_record(n),
            1: unwritten_record(n),
            2: equal_record(n),
            3: record_of(tied),
            4: record_of(swapped),
        }.get(pick)
        if odd is not None:
            out[i] = odd
        elif pick == 5:  # a minimum that is off: the row does not sum to 1
            out[i] = out[i].copy()
            out[i][:4].view("<f4")[1] += 0.3
    return out


def mixed_pair(
    folder: Path, n_chunk: int = 6, n_ctx: int = 32, n_vocab: int = 40
) -> list[Recording]:
    """A reference and two quants, the second of fewer chunks; a few stream tokens are no ids."""
    folder.mkdir(exist_ok=True)
    stream = make_stream(n_chunk, n_ctx, n_vocab)
    stream.tokens[1, n_ctx - 2] = n_vocab + 3
    stream.tokens[2, n_ctx - 3] = -1
    short = Stream(stream.tokens[: n_chunk - 2], n_vocab)
    paths = [
        write_kld(folder / "ref.kld", stream, records=mixed_records(stream, 1)),
        write_kld(folder / "q1.kld", stream, records=mixed_records(stream, 2)),
        write_kld(folder / "q2.kld", short, records=mixed_records(short, 3)),
    ]
    return [open_recording(path) for path in paths]


def plain_pair(
    folder: Path, n_chunk: int = 6, n_ctx: int = 32, n_vocab: int = 40
) -> list[Recording]:
    """A reference and one quant of usual records."""
    folder.mkdir(exist_ok=True)
    stream = make_stream(n_chunk, n_ctx, n_vocab)
    paths = [
        write_kld(folder / f"{name}.kld", stream, make_logits(stream, seed))
        for seed, name in enumerate(("ref", "quant"), 1)
    ]
    return [open_recording(path) for path in paths]


def tied_pair(folder: Path, n_vocab: int = 40) -> tuple[list[Recording], list[Kind]]:
    """A reference and a quant with one best or several each, and how their rows compare."""
    folder.mkdir(exist_ok=True)
    agree, root, tie = Kind.AGREE, Kind.ROOT, Kind.TIE
    late = n_vocab - 3
    cases = [
        ((1, late), (1, late), tie),
        ((1, late), (1,), tie),
        ((1,), (1, late), tie),
        ((1, late), (late,), tie),
        ((late,), (1, late), tie),
        ((1, late), (7, late), tie),
        ((1, late), (7,), root),
        ((7,), (1, late), root),
        ((1, late), (7, late - 2), root),
        ((1,), (1,), agree),
        ((1,), (late,), root),
    ] * 2

    def record(best: tuple[int, ...]) -> NDArray[np.uint16]:
        return record_of([65535 if t in best else t % 700 for t in range(n_vocab)])

    stream = make_stream(2, 24, n_vocab)
    recordings = [
        open_recording(write_kld(folder / f"{name}.kld", stream, records=list(map(record, bests))))
        for name, bests in zip(("ref", "quant"), list(zip(*cases, strict=True))[:2], strict=True)
    ]
    return recordings, [kind for *_, kind in cases]


def scan_all(index: Index, **options: Any) -> Index:
    for _ in index.scan(**options):
        pass
    return index


def kept_index(recordings: list[Recording], folder: Path, **options: Any) -> Index:
    """An index over tables in `folder`, scanned to the end with numpy's kernels."""
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    return scan_all(index, **{"compiled": False, **options})


def same(one: Table, two: Table, near: float = 0.0) -> bool:
    """Whether two tables hold the same, NaN and all; floats to within `near`."""
    if len(one) != len(two):
        return False
    for name in one.names:
        a, b = one[name], two[name]
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return False
        elif not np.allclose(a, b, rtol=0, atol=near, equal_nan=True):
            return False
    return True


def open_files() -> int:
    """How many files this process has open."""
    gc.collect()
    return len(list(Path("/dev/fd").iterdir()))


SLOW_SCAN = """
import sys, time
from pathlib import Path
from kldtui.index import Index, Keeper
from kldtui.index import index as module
from kldtui.recordings import open_recording
module._BLOCK_BYTES, module._YIELD_SECONDS = 1, 0
folder, *paths = map(Path, sys.argv[1:])
ref, *quants = map(open_recording, paths)
index = Index(ref, quants, Keeper(folder))
for progress in index.scan(compiled=False):
    print(progress.stage, progress.done, flush=True)
    time.sleep(0.01)
"""


def start_slow_scan(folder: Path, recordings: list[Recording]) -> subprocess.Popen[str]:
    """Another program that scans the same recordings, a position every hundredth of a second."""
    command = [sys.executable, "-c", SLOW_SCAN, str(folder)]
    command += [str(recording.path) for recording in recordings]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


def read_until(process: subprocess.Popen[str], stage: str, done: int) -> None:
    """Wait until the other program is so far."""
    assert process.stdout is not None
    end = time.monotonic() + 30
    while time.monotonic() < end:
        words = process.stdout.readline().split()
        if words and words[0] == stage and int(words[1]) >= done:
            return
    raise AssertionError("the other program did not come so far")


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
