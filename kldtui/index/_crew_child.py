"""One process of a crew (see crew.py): opens the recordings, maps the tables, fills spans.

Knows: what the crew says, and the passes.
Must not know: which spans there are, who else fills, screens.

Called with COMPILED where compiled kernels are wanted. If these had to be compiled first, it starts
itself anew: what the compiler took, some 50 MB, is not given back otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kldtui.analysis import Kernels, NumpyKernels, load_fast
from kldtui.errors import KldtuiError
from kldtui.index.cache import Keeper, compiled_folder
from kldtui.index.index import Index
from kldtui.index.saved import SavedTable
from kldtui.index.sweep import sweep_or_worker
from kldtui.index.way import Way
from kldtui.recordings import open_recording

COMPILED = "compiled"
_AGAIN = "again"
_RELEASE_SECONDS = 0.5


def main() -> None:
    """Serve standard input until it ends: with the program that started the crew, if not before."""
    try:
        kernels = load_fast(compiled_folder()) if COMPILED in sys.argv else None
        if kernels is not None and kernels.has_compiled and _AGAIN not in sys.argv:
            os.execv(sys.executable, [*sys.orig_argv, _AGAIN])  # noqa: S606 - itself
        _serve((json.loads(line) for line in sys.stdin), kernels or NumpyKernels())
    except KldtuiError as error:
        _say({"error": type(error).__name__, "words": str(error)})
    except Exception as error:
        _say({"error": "", "words": f"a process of the scan failed: {error!r}"})


def _serve(lines: Iterator[Any], kernels: Kernels) -> None:
    opening = next(lines, None)
    if opening is None:
        return
    ref, *quants = [open_recording(Path(path)) for path in opening["recordings"]]
    index = Index(ref, quants, Keeper(Path(opening["folder"])), Way(opening["way"]))
    tables = [index.ref, *index.pairs]
    worker = sweep_or_worker(index, ref, quants, kernels)
    stages: dict[str, Callable[..., None]] = {"roots": worker.first, "rest": worker.second}
    _say({"tables": [str(table.path) for table in tables if isinstance(table, SavedTable)]})
    released = time.monotonic()
    for stage, first, last, numbers in lines:
        stages[stage](first, last, numbers)
        if time.monotonic() - released > _RELEASE_SECONDS:
            index.release()
            released = time.monotonic()
        _say({})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
