"""A scan spread over the workers of a dask cluster (`kldtui[dask]`), chunks mapped over them.

Knows: dask.distributed, and how parts of a scan come together.
Must not know: how a part is scanned, screens.

Every worker must see the recordings under the same paths, and have kldtui installed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.analysis import Columns, State
from kldtui.errors import KldtuiError
from kldtui.index.index import Index, Progress
from kldtui.recordings import open_recording

_PARTS_A_WORKER = 4
_WAIT_SECONDS = 30


def scan_part(
    ref: str, quants: Sequence[str], chunks: tuple[int, int]
) -> tuple[int, list[Columns]]:
    """Scan some chunks here: the first flat index, and the entries of every table."""
    opened = [open_recording(path) for path in (ref, *quants)]
    try:
        index = Index(opened[0], opened[1:])
        for _ in index.scan(chunks=chunks):
            pass
        a, b = chunks
        first = int(index.layout.chunk_slice(a).start)
        last = int(index.layout.chunk_slice(b - 1).stop)
        return first, [table[first:last] for table in (index.ref, *index.pairs)]
    finally:
        for recording in opened:
            recording.close()


def scan_on_cluster(
    scheduler: str,
    index: Index,
    ref: Path,
    quants: Sequence[Path],
    chunks: tuple[int, int] | None = None,
) -> Iterator[Progress]:
    """Fill an index by the workers of a cluster; yields as parts come in.

    Raises KldtuiError where dask is not installed, the scheduler does not answer, it has no
    workers, or a worker fails. What came in stays; leaving the iteration cancels the rest.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise KldtuiError("--dask needs dask.distributed: pip install 'kldtui[dask]'") from None
    try:
        client = Client(scheduler, timeout=_WAIT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise KldtuiError(f"--dask {scheduler}: no scheduler answers: {error}") from None
    with client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise KldtuiError(f"--dask {scheduler}: the cluster has no workers")
        paths = [str(path.absolute()) for path in (ref, *quants)]
        futures = client.map(
            partial(scan_part, paths[0], paths[1:]),
            parts(index, workers * _PARTS_A_WORKER, chunks),
            pure=False,
        )
        try:
            arriving = as_completed(futures, with_results=True, loop=client.loop)
            yield from _gather(index, arriving)
        finally:
            client.cancel(futures)


def _gather(index: Index, arriving: Any) -> Iterator[Progress]:
    began, done, total = time.monotonic(), 0, index.layout.n
    try:
        for _, (first, entries) in arriving:
            for table, new in zip((index.ref, *index.pairs), entries, strict=True):
                pending = table["state"][first : first + len(new)] == State.PENDING
                table.put(first, new, where=pending)
            done += len(entries[0])
            seconds = time.monotonic() - began
            left = (total - done) * seconds / done if done else None
            yield Progress(done, total, 0.0, left, first, first + len(entries[0]), "rest")
    except KldtuiError:
        raise
    except Exception as error:  # whatever a worker raised
        raise KldtuiError(f"a worker of the cluster failed: {error}") from error


def parts(index: Index, count: int, chunks: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Chunks with positions that are pending, in about so many ranges."""
    layout = index.layout
    a, b = chunks if chunks is not None else (0, layout.n_chunk)
    a, b = max(0, a), min(b, layout.n_chunk)
    edges = np.unique(np.linspace(a, b, min(count, max(1, b - a)) + 1).astype(int)).tolist()
    out = []
    for low, high in itertools.pairwise(edges):
        where = slice(layout.chunk_slice(low).start, layout.chunk_slice(high - 1).stop)
        stands = index.ref["state"][where].all()
        stands &= all(
            pair["state"][where].all() and pair["rest"][where].all() for pair in index.pairs
        )
        if not stands:
            out.append((low, high))
    return out
