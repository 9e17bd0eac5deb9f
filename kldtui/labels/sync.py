"""The sections of a label file in memory, and their way to and from disk.

Knows: reading, merging what another program wrote, saving, who wins, what is kept of the loser.
Must not know: undo, reviewers' actions, the screen; how files are made atomic.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kldtui.errors import LabelFileError
from kldtui.labels import disk, document
from kldtui.labels.branch_file import BranchFile, branch_path
from kldtui.labels.document import Document
from kldtui.labels.identity import ReviewIdentity, difference
from kldtui.labels.plain import dump, load
from kldtui.labels.record import Key, record_class
from kldtui.labels.table import Table


class LabelFile:
    """Tables of lines; `save` brings them to disk, taking in first what others wrote.

    classes: class id by key, kept beside the lines so that counting parses nothing.
    trouble: why the last save that failed did so, one line without advice.
    touched: when we last changed a label, for the merge: an undone label has an old time.
    """

    def __init__(
        self, path: Path, identity: ReviewIdentity, files: disk.Files, now: Callable[[], str]
    ) -> None:
        if not path.name:
            raise LabelFileError(f"{path}: is a folder; name a file with --labels FILE")
        self.path = path
        self.labels: Table[Key] = Table()
        self.hints: Table[Key] = Table()
        self.resume: Table[str] = Table()
        self.superseded: Table[bytes] = Table()
        self.classes: dict[Key, str | None] = {}
        self.touched: dict[Key, str] = {}
        self.notes: list[str] = []
        self._identity = identity
        self._files = files
        self._now = now
        self._quants: Table[str] = Table()
        self._taxonomy: Table[str] = Table()
        self._extra: dict[str, Any] = {}
        self._seen: disk.Seen | None = None
        self._target = path
        self._swept = False
        self.trouble = ""
        self.branches = BranchFile(branch_path(path), files)

    def open(self) -> None:
        """Read the file if there is one. Raises LabelFileError; nothing is ever written here."""
        try:
            self._target = disk.target_of(self.path)
            self.branches = BranchFile(branch_path(self._target), self._files)
            if disk.look(self._files, self._target) is not None:
                self._take_in()
        except OSError as error:
            raise LabelFileError(
                f"{self.path}: cannot be read: {error.strerror or error}; name another file with "
                "--labels FILE"
            ) from error
        folder = self._target.parent
        if not folder.is_dir():
            raise LabelFileError(
                f"{self.path}: there is no folder {folder}; make it, or name another file with "
                "--labels FILE"
            )
        if not os.access(folder, os.W_OK):
            self.note(f"labels cannot be saved: {folder} is read-only; use --labels FILE elsewhere")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def unsaved(self) -> bool:
        """Whether something that a person or a hint said is not on disk yet."""
        tables = (self.labels, self.hints, self.resume, self.superseded)
        return self.branches.waiting or any(table.changed for table in tables)

    def put(self, key: Key, line: bytes | None) -> None:
        """Set or remove a label."""
        self.labels.put(key, line)
        self.touched[key] = self._now()
        if line is None:
            self.classes.pop(key, None)
        else:
            self.classes[key] = record_class(line)

    def supersede(self, line: bytes, by: str, why: str) -> bytes:
        """Keep a label that another takes the place of; gives the line that holds it."""
        mark = {"time": self._now(), "by": by, "why": why}
        kept = dump({**load(line), "superseded": mark})
        self.superseded.put(kept, kept)
        return kept

    def save(self) -> None:
        """Bring to disk what is not there. Raises LabelFileError; then all of it stays unsaved."""
        trouble: OSError | None = None
        try:
            with disk.locked(self._files, self._target.parent):
                try:
                    self.branches.flush()
                except OSError as error:
                    trouble = error
                self._write()
        except OSError as error:
            raise self._unwritable(error, self.path) from error
        if trouble is not None:
            raise self._unwritable(trouble, self.branches.path) from trouble

    def rescue(self, path: Path) -> None:
        """Write all labels and the waiting branches to new files at `path`. Raises OSError."""
        disk.create(self._files, path, self._render())
        self.branches.flush(branch_path(path))

    def _write(self) -> None:
        seen = disk.look(self._files, self._target)
        if seen is None:
            for table in self._tables():
                table.unsaved()
        elif seen != self._seen:
            self._take_in()
        if not self._swept:
            self._swept = True
            disk.sweep(self._target)
        self._seen = disk.replace(self._files, self._target, self._render())
        for table in self._tables():
            table.saved()

    def _render(self) -> bytes:
        ours = self._identity
        return document.render(
            Document(
                ref=dict(ours.ref),
                quants={
                    **self._quants.rows,
                    **{name: dump(dict(quant)) for name, quant in ours.quants.items()},
                },
                taxonomy={**document.taxonomy_rows(), **self._taxonomy.rows},
                resume=self.resume.rows,
                labels=self.labels.rows,
                hints=self.hints.rows,
                superseded=self.superseded.rows,
                extra=self._extra,
            )
        )

    def _tables(self) -> tuple[Table[Any], ...]:
        return (
            self.labels,
            self.hints,
            self.resume,
            self.superseded,
            self._quants,
            self._taxonomy,
        )

    def _take_in(self) -> None:
        """Read the file and merge it with what is in memory."""
        data, seen = disk.read(self._files, self._target)
        try:
            theirs = document.parse(data)
        except ValueError as error:
            self.trouble = f"{self.path}: {error}; it was left as it is"
            kept = "; your labels are kept in memory" if self.labels.changed else ""
            raise LabelFileError(self.trouble + kept) from None
        self._same_review(theirs)
        for name, identity in theirs.quants.items():
            if (now := self._renamed(name, load(identity))) is not None:
                self.note(
                    f"{self.path}: labels of {now!r} under its former name {name!r} are not "
                    f"shown; --quant {name}=FILE shows them"
                )
        for warning in theirs.warnings:
            self.note(f"{self.path}: {warning}")
        moved, losers = self.labels.merge(theirs.labels, self._ours_is_later)
        # What was superseded stays so, whoever no longer lists it.
        self.superseded.merge({**self.superseded.rows, **theirs.superseded}, _later)
        for _, line in losers:
            self.supersede(line, "", "merged")
        for key, line in moved.items():
            if key not in self.labels.rows:
                self.supersede(line, "", "removed")
        self.hints.merge(theirs.hints, _later)
        self.resume.merge(theirs.resume, _later)
        self._quants.merge(theirs.quants, _later)
        self._taxonomy.merge(theirs.taxonomy, _later)
        self.classes = {
            key: theirs.classes[key] if line == theirs.labels.get(key) else record_class(line)
            for key, line in self.labels.rows.items()
        }
        self._extra = {**self._extra, **theirs.extra}
        self._seen = seen

    def _ours_is_later(self, key: Key, _: bytes, theirs: bytes) -> bool:
        return self.touched.get(key, "") >= str(load(theirs)["time"])

    def _same_review(self, theirs: Document) -> None:
        pairs = [("the reference", self._identity.ref, theirs.ref)]
        for name, identity in self._identity.quants.items():
            if name in theirs.quants:
                pairs.append((f"quant {name!r}", identity, load(theirs.quants[name])))
        for what, ours, other in pairs:
            if reason := difference(ours, other):
                raise LabelFileError(
                    f"{self.path}: it holds labels of other recordings ({what}: {reason}); name "
                    "another file with --labels FILE"
                )

    def _renamed(self, name: str, identity: dict[str, Any]) -> str | None:
        """What a quant of the file that this review does not have is called here, if it is here."""
        if name in self._identity.quants or not identity.get("rows"):
            return None
        for now, ours in self._identity.quants.items():
            same_model = ours.get("model") == identity.get("model")
            if same_model and difference(ours, identity) is None:
                return now
        return None

    def _unwritable(self, error: OSError, path: Path) -> LabelFileError:
        self.trouble = f"{path}: not saved: {error.strerror or error}"
        remedy = "make room" if error.errno in _NO_ROOM else "make it writable"
        return LabelFileError(
            f"{self.trouble}; your labels are kept in memory and saved with the next one; "
            f"{remedy}, or start with --labels FILE elsewhere"
        )


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _later(_: Any, ours: bytes, theirs: bytes) -> bool:
    return str(load(ours).get("time", "")) >= str(load(theirs).get("time", ""))
