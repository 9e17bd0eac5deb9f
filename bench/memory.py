"""How much memory the real program holds with a large review, through all that one does with it.

Knows: the program on a terminal, its keys, and large reviews.
Must not know: where the program keeps what.

The index of 20 million tokens and five quants holds a million roots, and misses the beginning, so
that a scan runs from the first frame on: first over real rows, then over holes. The figure is the
most that was resident at any moment, mapped pages of index files included, of the program and of
the process that scans for it together: pages that both share count twice.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.data import ROOM, folder, tiled
from bench.measure import Result
from bench.open import frame
from bench.sparse import Sparse, sparse_review
from bench.terminal import Program, Screen, program
from kldtui.demo.pair import demo_pair
from kldtui.index import Index, Keeper
from kldtui.recordings import open_recording

TOKENS, ROOTS, QUANTS = 20_000_000, 1_000_000, 5
ROWS = 1200
"""Positions at the start that have real rows."""
PENDING = 200_000
"""Positions at the start that are not scanned."""
PAGES = [*["\x1b[6~"] * 10, *">>>>>..........", *["\x1b[5~"] * 5]
CLEAR = "\x15"
LIMITS = {"memory": 250, "memory-fast": 350}


def forget(large: Sparse) -> None:
    """Take the beginning out of the index, so that it is scanned again."""
    ref, *quants = (open_recording(path) for path in large.files)
    index = Index(ref, quants, Keeper(large.index))
    for table in (index.ref, *index.pairs):
        for name in ("state", "rest"):
            table[name][:PENDING] = 0
    index.close()
    for recording in (ref, *quants):
        recording.close()


def listed(words: str) -> Callable[[Screen], bool]:
    """A list that is there, with these words in its title."""

    def shown(screen: Screen) -> bool:
        title = screen.lines[1].partition("╮")[0]
        return words in title and "…" not in title.partition("roots")[0]

    return shown


def used(running: Program) -> dict[str, float]:
    """What a person does with a review, while it is scanned; the most memory that it took."""
    running.until(frame)
    running.go_on(5)
    for key in PAGES:
        running.press(key)
        running.go_on(0.1)
    for order in ("by cost", "by KLD", "by margin", "queue", "by position"):
        running.press("s")
        running.until(listed(order))
        running.go_on(0.5)
    for wanted in ("kld>0.5", "cost>0.3", ""):
        running.press("f")
        running.until(lambda screen: "words, any of" in screen.text)
        running.press(CLEAR)
        running.go_on(0.3)
        running.press(f"{wanted}\r")
        running.until(listed(wanted))
        running.go_on(0.5)
    running.press("/")
    running.until(lambda screen: "case matters" in screen.text)
    running.press("the\r")
    running.go_on(3)
    running.press("S")
    running.until(lambda screen: "Perplexity statistics" in screen.text)
    running.go_on(1)
    return running.peak


def without_numba(where: Path) -> str:
    """A search path on which there is no numba."""
    hidden = where / "without"
    hidden.mkdir(exist_ok=True)
    (hidden / "numba.py").write_text("raise ImportError('not installed')\n")
    return os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])


def results() -> Iterator[Result]:
    if not Path("/proc/self/status").exists():
        return
    text = ["--tokenizer", str(demo_pair(ROOM / "demo").tokenizer)]
    with folder() as where:
        for name in ("small", "large"):
            (where / name).mkdir()
        cache = where / "large" / "cache"
        large = sparse_review(
            where / "large", cache / "index", TOKENS, ROOTS, ROWS, QUANTS, PENDING
        )
        pair = tiled(where / "small", 20)
        hidden = {"PYTHONPATH": without_numba(where)}
        small = _peak([pair.ref, pair.quant], where / "small" / "cache", where, text, hidden)
        for name, limit in LIMITS.items():
            fast = name == "memory-fast"
            if fast and importlib.util.find_spec("numba") is None:
                continue
            forget(large)
            peak = _peak(large.files, cache, where, text, {} if fast else hidden)
            most = max(peak["VmRSS"], peak["VmHWM"])
            what = (
                f"resident memory, {'numba' if fast else 'numpy'}: at most "
                f"{peak['RssAnon']:.0f} MB of its own, {peak['RssFile']:.0f} MB of files"
            )
            yield Result(name, what, most, "the limit", limit, "MB", 1, False)
            if not fast:
                whole, other = most, "a 20 MB pair, one quant"
                yield Result(
                    "memory-flat", "resident memory, 5 quants of 1 TB, a million roots",
                    whole, other, small["VmHWM"], "MB",
                )  # fmt: skip


def _peak(
    files: Sequence[Path], cache: Path, where: Path, text: Sequence[str], env: dict[str, str]
) -> dict[str, float]:
    with program(files, where, cache, text, **env) as running:
        return used(running)
