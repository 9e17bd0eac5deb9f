"""Rows by key that remember what changed since they were last on disk, and merge by it.

Knows: opaque lines, keys, and the three-way merge (ours, theirs, what both began with).
Must not know: what a line holds, or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")


class Table(Generic[K]):
    """key -> line; `changed` holds, for each key we touched, the line that disk has (or None)."""

    def __init__(self) -> None:
        self.rows: dict[K, bytes] = {}
        self.changed: dict[K, bytes | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[K]:
        return iter(self.rows)

    def get(self, key: K) -> bytes | None:
        return self.rows.get(key)

    def put(self, key: K, line: bytes | None) -> None:
        """Set or, with None, remove a row."""
        before = self.rows.get(key)
        if before == line:
            return
        base = self.changed.setdefault(key, before)
        if line is None:
            del self.rows[key]
        else:
            self.rows[key] = line
        if base == line:
            del self.changed[key]

    def saved(self) -> None:
        """Disk now has what we have."""
        self.changed.clear()

    def unsaved(self) -> None:
        """Disk has nothing any more: all of it is to be written anew."""
        self.changed = dict.fromkeys(self.rows)

    def merge(
        self, theirs: Mapping[K, bytes], ours_wins: Callable[[K, bytes, bytes], bool]
    ) -> tuple[dict[K, bytes], list[tuple[K, bytes]]]:
        """Take in what disk has now; afterwards `changed` is relative to it.

        Where both sides changed a row, `ours_wins(key, ours, theirs)` decides; a change beats a
        removal. Returns (previous lines of ours that changed under us, the losers).
        """
        losers: list[tuple[K, bytes]] = []
        moved: dict[K, bytes] = {}
        merged: dict[K, bytes] = {}
        changed: dict[K, bytes | None] = {}
        for key in {**self.rows, **theirs, **self.changed}:
            ours, other = self.rows.get(key), theirs.get(key)
            base = self.changed.get(key, ours)
            if ours in (other, base):
                final = other
            elif other == base:
                final = ours
            elif ours is None or other is None:
                final = ours or other
            elif ours_wins(key, ours, other):
                final = ours
                losers.append((key, other))
            else:
                final = other
                losers.append((key, ours))
            if final is not None:
                merged[key] = final
            if final != other:
                changed[key] = other
            if ours is not None and final != ours:
                moved[key] = ours
        self.rows, self.changed = merged, changed
        return moved, losers
