"""A scan spread over the workers of a dask cluster (`kldtui[dask]`), chunks mapped over them.

Knows: dask.distributed, and how parts of a scan come together.
Must not know: how recordings are opened, how a part is scanned, screens.

Every worker must see the recordings under the same paths, and have kldtui installed.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from kldtui.analysis import Columns
from kldtui.errors import KldtuiError
from kldtui.index.index import Index, Progress
from kldtui.recordings import Recording

Opener = Callable[[], AbstractContextManager[Sequence[Recording]]]
"""Opens the reference and its quants, wherever it is called, and closes them; it is pickled."""

_ADDRESS = re.compile(r"(?:\w+://)?[^\s/]+:\d+(?:/\S*)?|inproc://\S+")
_PARTS_A_WORKER = 4
_WAIT_SECONDS = 30


def scan_part(opened: Opener, chunks: tuple[int, int]) -> tuple[int, list[Columns]]:
    """Scan some chunks here: the first flat index, and the entries of every table."""
    with opened() as (ref, *quants):
        index = Index(ref, quants)
        for _ in index.scan(chunks=chunks):
            pass
        first, last = index.bounds(chunks)
        return first, [table[first:last] for table in (index.ref, *index.pairs)]


def scan_on_cluster(
    scheduler: str, index: Index, opened: Opener, chunks: tuple[int, int] | None = None
) -> Iterator[Progress]:
    """Fill an index by the workers of a cluster; yields as parts come in.

    opened: what the index is of, by paths that every worker sees.

    Raises KldtuiError where dask is not installed, the scheduler does not answer, it has no
    workers, or a worker fails. What came in stays; leaving the iteration cancels the rest.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise KldtuiError("--dask needs dask.distributed: pip install 'kldtui[dask]'") from None
    if not _ADDRESS.fullmatch(scheduler):  # dask's client never ends after such a one
        raise KldtuiError(f"--dask {scheduler}: no address; write it as HOST:PORT")
    try:
        client = Client(scheduler, timeout=_WAIT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise KldtuiError(f"--dask {scheduler}: no scheduler answers: {error}") from None
    with client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise KldtuiError(f"--dask {scheduler}: the cluster has no workers")
        todo = parts(index, workers * _PARTS_A_WORKER, chunks)
        futures = client.map(partial(scan_part, opened), todo, pure=False)
        try:
            arriving = as_completed(futures, with_results=True, loop=client.loop)
            yield from _gather(index, arriving, todo, chunks)
        finally:
            client.cancel(futures)


def _gather(
    index: Index,
    arriving: Any,
    todo: Sequence[tuple[int, int]],
    chunks: tuple[int, int] | None,
) -> Iterator[Progress]:
    def count(chunks: tuple[int, int] | None) -> int:
        first, last = index.bounds(chunks)
        return last - first

    began, total = time.monotonic(), count(chunks)
    done = stood = total - sum(map(count, todo))
    try:
        for _, (first, entries) in arriving:
            for table, new in zip((index.ref, *index.pairs), entries, strict=True):
                unfinished = table["rest"][first : first + len(new)] == 0
                table.put(first, new, where=unfinished)
            done += len(entries[0])
            seconds = time.monotonic() - began
            left = (total - done) * seconds / (done - stood) if done > stood else None
            yield Progress(done, total, 0.0, left, first, first + len(entries[0]), "rest")
    except KldtuiError:
        raise
    except Exception as error:  # whatever a worker raised
        raise KldtuiError(f"a worker of the cluster failed: {error}") from error


def parts(index: Index, count: int, chunks: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Chunks that are not scanned to the end, in about so many ranges."""
    n_chunk = index.layout.n_chunk
    a, b = chunks if chunks is not None else (0, n_chunk)
    a, b = max(0, a), min(b, n_chunk)
    if a >= b:
        return []
    edges = np.unique(np.linspace(a, b, min(count, b - a) + 1).astype(int)).tolist()
    out = []
    for part in itertools.pairwise(edges):
        if not index.scanned(part):
            out.append(part)
    return out
