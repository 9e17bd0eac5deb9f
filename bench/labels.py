"""What a label costs to save: `python bench/labels.py [labels …]`, median and worst of 50.

Every label stands on evidence; the first thousand have two branches of 128 tokens with a top-40.
"fsync" is the same number of bytes written and synced twice (file and branch file) by nothing but
the system: what no program can be faster than on this disk.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kldtui.labels import branch_path
from kldtui.position import Position
from tests.builders_labels import branch, evidence, open_store, utc

TOP = [[[1000 + rank, -1.2345678 - rank] for rank in range(40)] for _ in range(128)]
REPEATS = 50


def pair(number: int) -> list[dict[str, object]]:
    return [branch(2 * number + i, arm, 128, top=TOP) for i, arm in enumerate(("R·r", "Q·q"))]


def timed(act: Callable[[int], object]) -> str:
    times = []
    for i in range(REPEATS):
        start = time.perf_counter()
        act(i)
        times.append(1000 * (time.perf_counter() - start))
    return f"{statistics.median(times):7.1f} {max(times):7.1f} ms"


def floor(folder: Path, sizes: list[int]) -> Callable[[int], None]:
    blocks = [b"x" * size for size in sizes]

    def write(_: int) -> None:
        for block in blocks:
            with open(folder / "floor", "wb") as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

    return write


def measure(count: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        path = folder / "x.labels.json"
        store = open_store(path, now=utc)
        save, store._file.save = store._file.save, lambda: None  # type: ignore[method-assign]
        for i in range(count):
            branches = pair(i) if i < 1000 else []
            store.set(Position(i // 100, i % 100), "q5_0", "recovers", evidence(), branches)
        store._file.save = save  # type: ignore[method-assign]
        store.save()

        def relabel(i: int, *, fresh: bool) -> None:
            branches = pair(10_000_000 + i) if fresh else []
            store.set(Position(0, i), "q5_0", "unsure", evidence(), branches)

        size, whole = path.stat().st_size, branch_path(path).stat().st_size
        print(f"{count} labels: {size / 1e6:.1f} MB, branches {whole / 1e6:.0f} MB")
        print("  a label with its pair   ", timed(lambda i: relabel(i, fresh=True)))
        print("  a label without branches", timed(lambda i: relabel(i, fresh=False)))
        print("  fsync of as many bytes  ", timed(floor(folder, [size, whole // (count or 1)])))
        start = time.perf_counter()
        open_store(path)
        print(f"  opening                  {1000 * (time.perf_counter() - start):7.1f} ms")


if __name__ == "__main__":
    for wanted in [int(text) for text in sys.argv[1:]] or [1, 1000, 10_000]:
        measure(wanted)
