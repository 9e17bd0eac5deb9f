"""What a label costs to save, against what the disk alone takes for as many bytes.

Knows: label files, and how labels get into them.
Must not know: how the store writes them.

Every label stands on evidence; the first thousand have two branches of 128 tokens with a top-40.
"fsync" is the same number of bytes written and synced twice (file and branch file) by nothing but
the system: what no program can be faster than on this disk.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.data import folder
from bench.measure import Result, in_turn
from kldtui.labels import LabelStore, branch_path
from kldtui.position import Position
from tests.builders_labels import branch, evidence, open_store, utc

COUNTS = (1, 1000, 10_000)
TOP = [[[1000 + rank, -1.2345678 - rank] for rank in range(40)] for _ in range(128)]
WITH_BRANCHES = 1000
REPEATS = 50


def pair(number: int) -> list[dict[str, object]]:
    """The two branches of a root."""
    return [branch(2 * number + i, arm, 128, top=TOP) for i, arm in enumerate(("R·r", "Q·q"))]


def floor(where: Path, sizes: Sequence[int]) -> Callable[[], None]:
    """Write and sync so many bytes, in so many files."""
    blocks = [b"x" * size for size in sizes]

    def write() -> None:
        for block in blocks:
            with open(where / "floor", "wb") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

    return write


def filled(path: Path, count: int) -> LabelStore:
    """A store of so many labels, saved once."""
    store = open_store(path, now=utc)
    save, store._file.save = store._file.save, lambda: None  # type: ignore[method-assign]
    for i in range(count):
        branches = pair(i) if i < WITH_BRANCHES else []
        store.set(Position(i // 100, i % 100), "q5_0", "recovers", evidence(), branches)
    store._file.save = save  # type: ignore[method-assign]
    store.save()
    return store


def results() -> Iterator[Result]:
    for count in COUNTS:
        with folder() as where:
            yield from _of(where, count)


def _of(where: Path, count: int) -> Iterator[Result]:
    path = where / "x.labels.json"
    store, numbers = filled(path, count), itertools.count()
    size, whole = path.stat().st_size, branch_path(path).stat().st_size

    def relabel(*, fresh: bool) -> None:
        i = next(numbers)
        branches = pair(10_000_000 + i) if fresh else []
        store.set(Position(0, i), "q5_0", "unsure", evidence(), branches)

    with_pair, alone, synced = in_turn(
        lambda: relabel(fresh=True),
        lambda: relabel(fresh=False),
        floor(where, [size, whole // min(count, WITH_BRANCHES)]),
        repeats=REPEATS,
    )
    opening, parsing = in_turn(
        lambda: open_store(path), lambda: json.loads(path.read_bytes()), repeats=3
    )
    many = f"{count:,} label{'s' if count > 1 else ''} ({size / 1e6:.1f} MB)"
    fsync = "fsync of as many bytes"
    for name, what, ours, than, theirs in (
        (f"label-pair-{count}", f"a label with its pair to {many}", with_pair, fsync, synced),
        (f"label-{count}", f"a label without branches to {many}", alone, fsync, synced),
        (f"labels-open-{count}", f"opening {many}", opening, "its JSON parsed", parsing),
    ):
        yield Result(name, what, 1e3 * ours, than, 1e3 * theirs, "ms")
