"""Index files of parts of one stream become one.

Knows: what index files hold of a stream.
Must not know: how they are laid out on disk, what columns mean, screens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.analysis import PAIR_DTYPE, REF_DTYPE
from kldtui.errors import KldtuiError
from kldtui.index.scan_writer import Arrays, fields_in_arrays, pieces_in_arrays, write_arrays
from kldtui.index.scanfile import ScanFile, in_words
from kldtui.index.table import MARKS


def merge_scans(paths: Sequence[Path], out: Path) -> ScanFile:
    """Join index files of parts of one stream; parts may overlap.

    Raises KldtuiError naming the first that differs, or the chunks between parts that none holds:
    they would stay pending for ever, in a file that claims them.
    """
    files = [ScanFile.open(path) for path in paths]
    one = files[0]
    for other in files[1:]:
        _check_same(one, other)
    a, b = _joined_chunks(files)
    layout = one.layout()
    first, last = int(layout.chunk_slice(a).start), int(layout.chunk_slice(b - 1).stop)
    head = {k: v for k, v in one.head.items() if k != "arrays"}
    head |= {"chunks": [a, b], "positions": [first, last]}

    def joined(number: int, dtype: np.dtype[Any]) -> Arrays:
        """The columns of a table: of each entry that which most stands of, the first of several."""
        held, better = np.zeros(last - first, np.uint8), []
        spans = [slice(low - first, high - first) for low, high in (f.positions for f in files)]
        for file, span in zip(files, spans, strict=True):
            stands = sum((file.array(f"{number}/{mark}") != 0).astype(np.uint8) for mark in MARKS)
            better.append(stands > held[span])
            held[span] = np.maximum(held[span], stands)
        for name in dtype.names or ():
            whole = np.zeros(last - first, dtype[name])
            for file, span, these in zip(files, spans, better, strict=True):
                whole[span][these] = file.array(f"{number}/{name}")[these]
            yield f"{number}/{name}", whole

    def arrays() -> Arrays:
        parts = [(range(*file.chunks), file.recordings()[0]) for file in files]
        refs = [(chunk, next(ref for held, ref in parts if chunk in held)) for chunk in range(a, b)]
        yield "tokens", np.concatenate([ref.tokens(chunk) for chunk, ref in refs])
        yield from fields_in_arrays([ref.chunk_fields(chunk) for chunk, ref in refs])
        yield from pieces_in_arrays({k: v for file in files for k, v in file.pieces().items()})
        if one.head["even"] is None:
            for name in ("starts", "t", "lengths"):
                yield name, one.array(name)
        for number in range(len(one.head["recordings"])):
            yield from joined(number, PAIR_DTYPE if number else REF_DTYPE)

    write_arrays(out, head, arrays)
    return ScanFile.open(out)


def _joined_chunks(files: Sequence[ScanFile]) -> tuple[int, int]:
    held = sorted(file.chunks for file in files)
    first = at = held[0][0]
    gaps = []
    for a, b in held:
        if a > at:
            gaps.append(in_words(at, a))
        at = max(at, b)
    if gaps:
        raise KldtuiError(
            f"{files[0].path}: is not joined: no file holds {', '.join(gaps)}; scan them with "
            "--chunks, and join that file too"
        )
    return first, at


def _check_same(one: ScanFile, other: ScanFile) -> None:
    names = f"{other.path} is not of the recordings of {one.path}"
    if one.names != other.names:
        raise KldtuiError(f"{names}: quants {', '.join(other.names)}, not {', '.join(one.names)}")
    for mine, theirs in zip(one.head["recordings"], other.head["recordings"], strict=True):
        a, b = ({**(each["identity"] or {}), "mtime_ns": None} for each in (mine, theirs))
        if a != b:
            raise KldtuiError(f"{names}: {theirs['path']} is another file than {mine['path']}")
