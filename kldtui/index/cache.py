"""Saved tables in the user's cache folder: by which recordings they are found, and what is kept.

Knows: the folder, the identity of recordings, age and size.
Must not know: what columns mean, or how a table is laid out in its file.

A table is found by what its recordings are, not by their names: size, time of the last change,
header and sampled records of each. Where any of it changes, the table is not found again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from kldtui.index.saved import Unusable, open_table, read_head
from kldtui.index.table import Table
from kldtui.recordings.base import Recording

ENV_FOLDER = "KLDTUI_CACHE"
VERSION = 2
"""Goes up whenever the same rows would give other columns."""
MAX_DAYS = 90
MAX_BYTES = 2 << 30
_SUFFIX = ".columns"
_NEW_SECONDS = 3600
_ENDS = 1 << 16
_SECONDS_A_DAY = 86400


def cache_folder() -> Path:
    """kldtui's folder for what can be made anew: KLDTUI_CACHE, or the user's cache folder."""
    given = os.environ.get(ENV_FOLDER)
    return Path(given) if given else Path(platformdirs.user_cache_dir("kldtui"))


def index_folder() -> Path:
    return cache_folder() / "index"


def compiled_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "compiled"


def identity_of(recording: Recording) -> dict[str, Any] | None:
    """What tells a recording's contents from others', as JSON; None where nothing does."""
    known = getattr(recording, "identity", None)
    if known is not None:
        return {"format": recording.format, **known}
    if recording.format != "kldtui-run":
        return None
    try:
        with recording.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            ends = hashlib.sha256(file.read(_ENDS))
            file.seek(max(0, stat.st_size - _ENDS))
            ends.update(file.read(_ENDS))
    except OSError:
        return None
    return {
        "format": recording.format,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "samples": ends.hexdigest(),
    }


def file_key(identities: Sequence[Mapping[str, Any]]) -> str:
    """The name of a table by the recordings it is of."""
    text = json.dumps([VERSION, *identities], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class Keeper:
    """Gives an index its tables, from `folder` where the recordings can be told apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def table(self, recordings: Sequence[Recording], dtype: np.dtype[Any], n: int) -> Table:
        """The table of a reference, or of a reference and a quant; in memory if need be."""
        found = self._place(recordings)
        if found is None:
            return Table.empty(dtype, n)
        path, about = found
        return open_table(path, dtype, n, about)

    def tidy(self) -> None:
        """Prune the folder by its usual limits."""
        prune(self.folder)

    def _place(self, recordings: Sequence[Recording]) -> tuple[Path, dict[str, Any]] | None:
        identities = [identity_of(recording) for recording in recordings]
        known = [each for each in identities if each is not None]
        if len(known) < len(identities):
            return None
        names = [str(recording.path.absolute()) for recording in recordings]
        # The head has room for so much; names serve people alone.
        about = {"names": [name[-2000:] for name in names], "identities": known}
        return self.folder / f"{file_key(known)}{_SUFFIX}", about


# -- the folder -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A table's file. bytes: on disk. used: when it was last opened (seconds since 1970)."""

    path: Path
    names: tuple[str, ...]
    positions: int
    bytes: int
    used: float
    busy: bool
    """Whether a program is filling it."""


def saved_tables(folder: Path) -> list[Saved]:
    """The tables of a folder, the last used first."""
    found = []
    for path in _files(folder):
        with contextlib.suppress(OSError):
            stat = path.stat()
            names, positions, busy = _look(path)
            size = stat.st_blocks * 512
            found.append(Saved(path, names, positions, size, stat.st_mtime, busy))
    return sorted(found, key=lambda each: -each.used)


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)


def _look(path: Path) -> tuple[tuple[str, ...], int, bool]:
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            head = read_head(fd)
        except Unusable:
            head = {}
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            busy = False
        except OSError:
            busy = True
    finally:
        os.close(fd)
    names = head.get("names")
    capacity = head.get("capacity")
    return (
        tuple(str(name) for name in names) if isinstance(names, list) else (),
        capacity if type(capacity) is int else 0,
        busy,
    )


def prune(folder: Path, max_days: float = MAX_DAYS, max_bytes: int = MAX_BYTES) -> list[Saved]:
    """Remove what was not used for so long, then the longest unused beyond so much in all.

    Tables that a program is filling count, but stay; so does the last used, whatever its size.
    Gives what was removed, the longest unused first.
    """
    now, found, removed = time.time(), saved_tables(folder), []
    in_all = sum(each.bytes for each in found)
    for each in reversed(found):
        old = now - each.used > max_days * _SECONDS_A_DAY
        beyond = in_all > max_bytes and each is not found[0]
        if not each.busy and (old or beyond):
            with contextlib.suppress(OSError):
                each.path.unlink()
                removed.append(each)
                in_all -= each.bytes
    with contextlib.suppress(OSError):
        for path in folder.glob(".new-*"):
            if now - path.stat().st_mtime > _NEW_SECONDS:
                path.unlink()
    return removed
