"""How long the real program takes from its start to what a person can use, by the size of files.

Knows: the program on a terminal, what its screen says, and large files.
Must not know: how the program opens anything.

The sizes are opened in turn, each time with an empty cache folder; compiled code alone is kept. A
review that is opened again has all of its index.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.data import folder, tiled
from bench.measure import Result, in_turn, seconds
from bench.sparse import N_CTX, sparse_files, sparse_review
from bench.terminal import Screen, program
from kldtui.recordings import open_recording
from kldtui.review.session import Session

REPEATS = 7
LARGE_BYTES = 20_000_000_000
SMALL_MEGABYTES = 20
ROWS = 600
"""Positions at the start of the large file that have real rows."""
TOKENS, ROOTS = 20_000_000, 1_000_000
IMPORTS = "import kldtui.cli.reviewing, kldtui.ui.app"


def frame(screen: Screen) -> bool:
    """The stream's first chunk and the table of its first position."""
    return "chunk 0 of" in screen.text and "ref %" in screen.text


def roots(screen: Screen) -> bool:
    """That, and a root in the list."""
    return frame(screen) and "→" in screen.lines[2].partition("│╭")[0][:36]


def all_roots(screen: Screen) -> bool:
    """The list of a million, and no word of a scan."""
    return roots(screen) and f"{ROOTS} roots" in screen.lines[1] and not scanning(screen)


def scanning(screen: Screen) -> bool:
    return "%" in screen.lines[0] or "scan" in screen.lines[0]


class Opener:
    """Opens the program again and again, and keeps how long each step took."""

    def __init__(self, where: Path) -> None:
        self._where, self._cache = where, where / "cache"
        self._compiled = where / "compiled"
        self._compiled.mkdir()

    def _empty(self) -> Path:
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir()
        (self._cache / "compiled").symlink_to(self._compiled)
        return self._cache

    def anew(self, files: Sequence[Path]) -> tuple[float, float]:
        """Seconds to the first frame, and to the first roots in it."""
        with program(files, self._where, self._empty()) as running:
            return running.until(frame), running.until(roots)

    def again(self, files: Sequence[Path], cache: Path) -> tuple[float, float]:
        """Seconds to the first frame, and to the list of all roots."""
        with program(files, self._where, cache) as running:
            return running.until(frame), running.until(all_roots)

    def own(self, files: Sequence[Path]) -> None:
        """The part of opening that is ours, without imports and the screen."""
        os.environ["KLDTUI_CACHE"] = str(self._empty())
        Session.open(files[0], [("quant", files[1])]).close()


def large_pair(where: Path) -> list[Path]:
    """Files of LARGE_BYTES each, that take little of the disk."""
    small = tiled(where, 1)
    n_vocab = open_recording(small.ref).shape.n_vocab
    positions = LARGE_BYTES // (2 * n_vocab + 8)
    return sparse_files(where, positions // (N_CTX // 2 - 1) * N_CTX, ROWS)


def medians(times: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*times, strict=True)]


def imports() -> object:
    return subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def results() -> Iterator[Result]:
    held = os.environ.get("KLDTUI_CACHE")
    try:
        with folder() as where:
            for name in ("small", "large", "huge"):
                (where / name).mkdir()
            pair = tiled(where / "small", SMALL_MEGABYTES)
            small, large = [pair.ref, pair.quant], large_pair(where / "large")
            cache = where / "huge" / "cache"
            huge = sparse_review(where / "huge", cache / "index", TOKENS, ROOTS, ROWS)
            os.sync()
            yield from _measured(Opener(where), small, large, huge.files, cache)
    finally:
        os.environ.pop("KLDTUI_CACHE", None)
        if held is not None:
            os.environ["KLDTUI_CACHE"] = held


def _measured(
    opener: Opener, small: list[Path], large: list[Path], huge: list[Path], cache: Path
) -> Iterator[Result]:
    taken: dict[str, list[Any]] = {"small": [], "large": [], "huge": [], "imports": []}
    for k in range(1 + REPEATS):
        found = {
            "small": opener.anew(small),
            "large": opener.anew(large),
            "huge": opener.again(huge, cache),
            "imports": (seconds(imports),),
        }
        for name, times in found.items():
            if k:
                taken[name].append(times)
    small_frame, small_roots = medians(taken["small"])
    large_frame, large_roots = medians(taken["large"])
    _, listed = medians(taken["huge"])
    (imported,) = medians(taken["imports"])
    own_small, own_large = in_turn(lambda: opener.own(small), lambda: opener.own(large), repeats=15)
    other = f"a {SMALL_MEGABYTES} MB pair"
    for name, what, ours, than, theirs, goal in (
        ("open-frame", "first frame", large_frame, other, small_frame, 1.2),
        ("open", "first roots listed", large_roots, other, small_roots, 1.2),
        ("open-imports", "first frame", large_frame, "imports alone", imported, None),
    ):
        yield Result(name, f"20 GB pair: {what}", ours, than, theirs, "s", goal, False)
    what, than = "a million roots listed again", f"{other}: first frame"
    yield Result("reopen", what, listed, than, small_frame, "s", 1.2, False)
    what, own = "20 GB pair: opening the files", (1e3 * own_large, 1e3 * own_small)
    yield Result("open-own", what, own[0], other, own[1], "ms")
