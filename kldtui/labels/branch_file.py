"""Whole branches, a line each, in a file that only grows.

Knows: the lines of `X.labels.branches.jsonl` (docs/labels.md).
Must not know: what a branch holds beyond its id; labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kldtui.labels import disk
from kldtui.labels.plain import dump, load

SCHEMA = 1
_SUM = b',"sha256":"'
_HEAD = b'{"id":"'
_BLOCK = 1 << 20


def branch_path(labels: Path) -> Path:
    """`X.labels.json` -> `X.labels.branches.jsonl`."""
    return labels.with_name(labels.name.removesuffix(".json") + ".branches.jsonl")


def line_of(branch: Mapping[str, Any]) -> bytes:
    """The branch as one line, its id first and the SHA-256 of all before it last."""
    rest = {name: value for name, value in branch.items() if name not in ("id", "schema")}
    body = dump({"id": branch["id"], "schema": SCHEMA, **rest})[:-1]
    return body + _SUM + hashlib.sha256(body).hexdigest().encode() + b'"}'


def read_line(line: bytes) -> dict[str, Any]:
    """The branch of a line. Raises ValueError if it was cut or damaged, or is of another schema."""
    data = load(line)
    if not isinstance(data, dict) or not isinstance(data.get("id"), str):
        raise ValueError("not a branch")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"a branch of schema {data.get('schema')!r:.20}")
    body = line.rpartition(_SUM)[0]
    if data.get("sha256") != hashlib.sha256(body).hexdigest():
        raise ValueError("its checksum is wrong")
    return {name: value for name, value in data.items() if name not in ("schema", "sha256")}


def unchanged(line: bytes) -> bool:
    """Whether a line ends with the checksum of what is before it; then it is whole."""
    body, found, digest = line.rpartition(_SUM)
    return bool(found) and digest == hashlib.sha256(body).hexdigest().encode() + b'"}'


class BranchFile:
    """Reads branches by id, the last line of an id counting; appends what is not there yet."""

    def __init__(self, path: Path, files: disk.Files) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._files = files
        self._places: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, bytes] = {}
        self._scanned = 0
        self._known = 0
        self._waiting: dict[str, bytes] = {}

    def add(self, branches: Sequence[Mapping[str, Any]]) -> None:
        """Keep branches for the next `flush`, those apart that are on disk as they are."""
        self._forget_what_is_gone()
        for branch in branches:
            line = line_of(branch)
            if self._digests.get(branch["id"]) != hashlib.sha256(line).digest():
                self._waiting[branch["id"]] = line

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def flush(self, path: Path | None = None) -> None:
        """Append what waits (to another file, if given). Raises OSError; then it still waits."""
        if not self._waiting:
            return
        lines = list(self._waiting.values())
        begin = disk.append(self._files, path or self.path, lines)
        if path is None:
            self._known = begin + sum(len(line) + 1 for line in lines)
        for name, line in self._waiting.items():
            self._digests[name] = hashlib.sha256(line).digest()
        self._waiting = {}

    def get(self, branch_id: str) -> dict[str, Any] | None:
        """A branch as it was given, or None if the file does not have it whole."""
        waiting = self._waiting.get(branch_id)
        if waiting is not None:
            return read_line(waiting)
        try:
            self._scan()
            place = self._places.get(branch_id)
            if place is None:
                return None
            with disk.regular(self._files, self.path) as fd:
                line = self._files.pread(fd, place[1], place[0])
            branch = read_line(line)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"{self.path}: branch {branch_id} cannot be read: {error}")
            return None
        self._digests[branch_id] = hashlib.sha256(line).digest()
        return branch

    def ids(self) -> list[str]:
        """Ids of the branches on disk and waiting."""
        try:
            self._scan()
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"{self.path}: cannot be read: {error.strerror}")
        return list({**self._places, **self._waiting})

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _forget_what_is_gone(self) -> None:
        """A file that was deleted, or is shorter than we knew it, has none of what it had."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < max(self._known, self._scanned):
            self._known = self._scanned = 0
            self._places, self._digests = {}, {}

    def _scan(self) -> None:
        """Find lines written since the last scan; whole lines only."""
        self._forget_what_is_gone()
        with disk.regular(self._files, self.path) as fd:
            rest = b""
            while block := self._files.pread(fd, _BLOCK, self._scanned + len(rest)):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._place(line, self._scanned)
                    self._scanned += len(line) + 1
            if rest:
                self._warn(f"{self.path}: its last line was cut; that branch is left out")

    def _place(self, line: bytes, offset: int) -> None:
        if not line.strip():
            return
        try:
            name = _quick_id(line) or read_line(line)["id"]
        except ValueError as error:
            self._warn(f"{self.path}: the line at byte {offset} is left out: {error}")
            return
        self._places[name] = (offset, len(line))


def _quick_id(line: bytes) -> str | None:
    """The id of a line that we wrote and that is whole, without parsing its 100 KB of top-N."""
    body = line.rpartition(_SUM)[0]
    if not (body.startswith(_HEAD) and unchanged(line)):
        return None
    name = body[len(_HEAD) : body.find(b'"', len(_HEAD))]
    follows = body[len(_HEAD) + len(name) :].startswith(b'","schema":%d,' % SCHEMA)
    return name.decode() if follows and b"\\" not in name else None
