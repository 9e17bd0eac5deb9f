"""Branches made ahead, one a line, in a file that only grows: what `kldtui branch -o` writes.

Knows: the lines (those of a label file's branch file, docs/branch-json.md), which branch is whose.
Must not know: engines, labels, how branches are made or shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kldtui.branching import Arm, Branch, Parent, key_of
from kldtui.errors import KldtuiError
from kldtui.labels import disk
from kldtui.labels.branch_file import line_of, read_line, unchanged
from kldtui.labels.record import scrubbed
from kldtui.position import Position
from kldtui.recordings.base import Recording

_HEAD_ENDS = b',"start_text":'
_SHOWN = 3
_BEGINS = b'{"id":'
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """A branch in the file, by what its root knows it by; `at` and `length` in bytes."""

    position: Position
    quant: str
    key: str
    at: int
    length: int


class BranchLog:
    """A file of branches. Of lines with the same root, quant and key the last one counts.

    `warnings` has what is wrong with the file, a line each; the rest of it is used all the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._entries: dict[tuple[Position, str], dict[str, Entry]] = {}
        self._files = disk.Files()
        self._faults = 0

    @classmethod
    def open(
        cls, path: Path, ref: Recording, names: Sequence[str], *, missing_ok: bool = False
    ) -> BranchLog:
        """Find the branches of `path` that belong to this reference and these quants.

        Raises KldtuiError for a file that cannot be read, that is no file of branches, or that
        holds none of them though it holds branches.
        """
        log = cls(path)
        try:
            log._refuse_others()
            strangers = log._scan(ref, names)
        except FileNotFoundError:
            if missing_ok:
                return log
            raise KldtuiError(f"{path}: no such file of branches") from None
        except OSError as error:
            raise KldtuiError(f"{path}: cannot be read: {error.strerror}") from None
        if strangers and not log._entries:
            raise KldtuiError(f"{path}: its branches are not of this review: {strangers[0]}")
        if strangers:
            log.warnings.append(
                f"{path.name}: {len(strangers)} branches are not of this review "
                f"({'; '.join(list(dict.fromkeys(strangers))[:_SHOWN])}); they are left out"
            )
        return log

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    @property
    def entries(self) -> Iterator[Entry]:
        """What it holds, in no order."""
        for entries in self._entries.values():
            yield from entries.values()

    def of(self, position: Position, quant: str) -> dict[str, Branch]:
        """The branches of a root, by key. Raises KldtuiError if the file changed underneath."""
        entries = self._entries.get((position, quant), {})
        return {key: self.read(entry) for key, entry in entries.items()}

    def entry(self, position: Position, quant: str, key: str) -> Entry | None:
        return self._entries.get((position, quant), {}).get(key)

    def read(self, entry: Entry) -> Branch:
        """A branch whole. Raises KldtuiError if the file changed underneath."""
        try:
            with self.path.open("rb") as file:
                file.seek(entry.at)
                return Branch.from_json(read_line(file.read(entry.length)))
        except OSError as error:
            raise KldtuiError(f"{self.path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise KldtuiError(
                f"{self.path}: the branch at byte {entry.at} cannot be read: {error}"
            ) from None

    def add(self, branch: Branch) -> None:
        """Append a branch; it is on disk when this returns. Raises KldtuiError."""
        line = line_of(scrubbed(branch.to_json()))
        try:
            with disk.locked(self._files, self.path.parent):
                at = disk.append(self._files, self.path, [line])
        except OSError as error:
            raise KldtuiError(
                f"{self.path}: cannot be written: {error.strerror}; what is in it stays, and the "
                "same command goes on from there"
            ) from None
        self._put(Entry(branch.position, branch.quant, branch.key, at, len(line)))

    def _put(self, entry: Entry) -> None:
        self._entries.setdefault((entry.position, entry.quant), {})[entry.key] = entry

    def _refuse_others(self) -> None:
        """Nothing is ever appended to a recording, a label file or anything else: raises
        KldtuiError unless the file is empty or begins as a branch does, if cut."""
        with disk.regular(self._files, self.path) as fd:
            first, *rest = self._files.pread(fd, _HEAD_BYTES, 0).lstrip().split(b"\n")
        cut = _BEGINS.startswith(first) and all(line.startswith(_BEGINS) for line in rest[:1])
        if not first.startswith(_BEGINS) and not cut:
            raise KldtuiError(
                f"{self.path}: exists and is no file of branches; it is left as it is: give "
                "another file"
            )

    def _warn(self, text: str) -> None:
        """The first few in words; the rest are counted."""
        self._faults += 1
        if self._faults <= _SHOWN:
            self.warnings.append(f"{self.path.name}: {text}")
        elif self._faults == _SHOWN + 1:
            self.warnings.append("")
        if self._faults > _SHOWN:
            self.warnings[-1] = f"{self.path.name}: and {self._faults - _SHOWN} more such lines"

    def _scan(self, ref: Recording, names: Sequence[str]) -> list[str]:
        """Enter what belongs; gives why other branches do not, one each."""
        strangers: list[str] = []
        at = 0
        with self.path.open("rb") as file:
            for line in file:
                where, at = at, at + len(line)
                if not line.endswith(b"\n"):
                    self.warnings.append(
                        f"{self.path.name}: its last line was cut; that branch is left out"
                    )
                    break
                line = line[:-1]
                if not line.strip():
                    continue
                try:
                    entry, prefix = _enter(line, where)
                except (ValueError, KeyError, TypeError, KldtuiError) as error:
                    self._warn(f"the line at byte {where} is left out: {error}")
                    continue
                stranger = _stranger(entry, prefix, ref, names)
                if stranger:
                    strangers.append(stranger)
                else:
                    self._put(entry)
        return strangers


def _enter(line: bytes, at: int) -> tuple[Entry, list[int]]:
    """The entry of a line and its prefix, without parsing the 100 KB of a line's top-N."""
    head, found, _ = line.partition(_HEAD_ENDS)
    data = json.loads(head + b"}") if found and unchanged(line) else read_line(line)
    parent = data.get("parent")
    key = key_of(
        Arm.parse(data["arm"]),
        int(data["start_id"]),
        Parent(str(parent["branch"]), int(parent["offset"])) if parent else None,
    )
    position = Position(int(data["chunk"]), int(data["t"]))
    return Entry(position, str(data["quant"]), key, at, len(line)), data["prefix_ids"]


def _stranger(entry: Entry, prefix: list[int], ref: Recording, names: Sequence[str]) -> str:
    """Why a branch is not of these recordings; empty where it is."""
    if entry.quant not in names:
        return f"there is no quant {entry.quant!r} here"
    where = entry.position
    if not 0 <= where.chunk < ref.shape.n_chunk:
        return f"{ref.path.name} has no chunk {where.chunk}"
    tokens = ref.tokens(where.chunk)[1 : where.t].tolist()
    if prefix[1 : where.t] != tokens:
        return f"{ref.path.name} has other tokens before {where}"
    return ""
