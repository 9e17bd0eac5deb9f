"""The labels of one review: in memory, on disk at every change, and undone on request.

Knows: label records, undo, what to do when another program wrote the file, where to resume.
Must not know: the screen, engines, the network, how recordings are read.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from kldtui import __version__
from kldtui.errors import LabelFileError
from kldtui.labels import disk, document
from kldtui.labels.branch_file import BranchFile, branch_path
from kldtui.labels.document import Document
from kldtui.labels.identity import ReviewIdentity, difference
from kldtui.labels.plain import dump, load
from kldtui.labels.record import Key, LabelRecord, summarise
from kldtui.labels.table import Table
from kldtui.labels.taxonomy import BY_ID
from kldtui.position import Position

Kind = Literal["label", "clear", "note", "skip"]


@dataclass(frozen=True, slots=True)
class Action:
    """Something a person did, as undo and redo hand it back: where, and the record then and now.

    `before` and `after` are in the order of doing, also when it is undone.
    """

    kind: Kind
    position: Position
    quant: str
    before: LabelRecord | None
    after: LabelRecord | None

    def __str__(self) -> str:
        words = {"label": "label", "clear": "clearing", "note": "note", "skip": "skip"}
        return f"{words[self.kind]} at {self.position} of {self.quant}"


@dataclass(frozen=True, slots=True)
class _Done:
    """An action with the lines that it changed."""

    kind: Kind
    key: Key
    before: bytes | None
    after: bytes | None
    place_before: bytes | None
    place_after: bytes | None
    kept: bytes | None

    def action(self) -> Action:
        before, after = (
            LabelRecord.from_line(line) if line is not None else None
            for line in (self.before, self.after)
        )
        return Action(self.kind, self.key.position, self.key.quant, before, after)


def utc_now() -> str:
    """UTC to the microsecond, ISO 8601: such strings sort by time."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LabelStore:
    """The labels of a review. Every change is on disk when the call returns.

    A call that changes something raises LabelFileError if the disk refuses; the change stays in
    memory (`unsaved`) and goes to disk with the next one, or with `save()`. Calls may come from
    any thread.
    """

    def __init__(
        self,
        path: Path,
        identity: ReviewIdentity,
        reviewer: str,
        *,
        files: disk.Files | None = None,
        now: Callable[[], str] = utc_now,
    ) -> None:
        """Use `open`."""
        self.path = path
        self.identity = identity
        self.reviewer = reviewer
        self._notes: list[str] = []
        self._files = files if files is not None else disk.Files()
        self._now = now
        self._mutex = threading.RLock()
        self._target = path
        self._seen: disk.Seen | None = None
        self._labels: Table[Key] = Table()
        self._hints: Table[Key] = Table()
        self._resume: Table[str] = Table()
        self._superseded: Table[bytes] = Table()
        self._quants: Table[str] = Table()
        self._taxonomy: Table[str] = Table()
        self._extra: dict[str, Any] = {}
        self._ref: dict[str, Any] = dict(identity.ref)
        self._classes: dict[Key, str | None] = {}
        self._touched: dict[Key, str] = {}
        self._done: list[_Done] = []
        self._undone: list[_Done] = []
        self._branches = BranchFile(branch_path(path), self._files)

    @classmethod
    def open(
        cls,
        path: Path,
        identity: ReviewIdentity,
        reviewer: str,
        *,
        files: disk.Files | None = None,
        now: Callable[[], str] = utc_now,
    ) -> LabelStore:
        """Read the label file at `path`, if there is one; nothing is written yet.

        Raises LabelFileError if it cannot be read, is damaged, of another version, or of other
        recordings; it is then left as it is.
        """
        store = cls(path, identity, reviewer, files=files, now=now)
        store._open()
        return store

    def _open(self) -> None:
        try:
            self._target = Path(os.path.realpath(self.path))
            self._branches = BranchFile(branch_path(self._target), self._files)
            seen = disk.look(self._files, self._target)
            if seen is not None:
                self._take_in()
            elif not self._target.parent.is_dir():
                raise LabelFileError(
                    f"{self.path}: there is no folder {self._target.parent}; make it, or name "
                    "another file with --labels FILE"
                )
        except OSError as error:
            raise self._unreadable(error) from error
        for name, entry in document.taxonomy_rows().items():
            if self._taxonomy.get(name) is None:
                self._taxonomy.put(name, entry)
        for name, identity in self.identity.quants.items():
            if self._quants.get(name) is None:
                self._quants.put(name, dump(dict(identity)))
        if not os.access(self._target.parent, os.W_OK):
            self._notes.append(
                f"labels cannot be written: {self._target.parent} is read-only; start with "
                "--labels FILE elsewhere"
            )

    # ── asking ───────────────────────────────────────────────────────────────────────────────

    @property
    def warnings(self) -> list[str]:
        """What is odd about the files, a line each."""
        return [*self._notes, *self._branches.warnings]

    @property
    def unsaved(self) -> bool:
        """Whether something is in memory that is not yet on disk (a cursor counts, too)."""
        tables = (self._labels, self._hints, self._resume, self._superseded)
        return self._branches.waiting or any(table.changed for table in tables)

    def get(self, position: Position, quant: str) -> LabelRecord | None:
        """What was said of a root of a quant: a class, a note, or both."""
        line = self._labels.get(Key.of(position, quant))
        return LabelRecord.from_line(line) if line is not None else None

    def class_of(self, position: Position, quant: str) -> str | None:
        """The class id of a root, without reading the rest; for lists of many."""
        return self._classes.get(Key.of(position, quant))

    def count(self, quant: str | None = None) -> int:
        """How many roots have a class (hints and bare notes do not count)."""
        return sum(self.counts(quant).values())

    def counts(self, quant: str | None = None) -> Counter[str]:
        """Roots by class id, of one quant or of all."""
        with self._mutex:
            return Counter(
                class_id
                for key, class_id in self._classes.items()
                if class_id is not None and quant in (None, key.quant)
            )

    def records(self, quant: str | None = None) -> Iterator[LabelRecord]:
        """All records in stream order."""
        with self._mutex:
            lines = [self._labels.rows[key] for key in sorted(self._labels.rows)]
        for line in lines:
            record = LabelRecord.from_line(line)
            if quant in (None, record.quant):
                yield record

    def superseded(self) -> list[LabelRecord]:
        """Records that another reviewer's or another program's replaced, oldest first."""
        return [LabelRecord.from_line(line) for line in list(self._superseded.rows.values())]

    def branch(self, branch_id: str) -> dict[str, Any] | None:
        """A stored branch whole, as it was given to `set`; None if the branch file lacks it."""
        with self._mutex:
            return self._branches.get(branch_id)

    def branches_of(self, position: Position, quant: str) -> list[dict[str, Any]]:
        """The whole branches that a label was given on, those apart that are not on disk."""
        record = self.get(position, quant)
        found = [self.branch(str(b.get("id"))) for b in record.branches] if record else []
        return [branch for branch in found if branch is not None]

    # ── acting ───────────────────────────────────────────────────────────────────────────────

    def set(
        self,
        position: Position,
        quant: str,
        class_id: str | None,
        evidence: Mapping[str, Any] | None = None,
        branches: Sequence[Mapping[str, Any]] = (),
        *,
        reached: str | None = None,
    ) -> None:
        """Give a root a class, or with None take it away; a note stays.

        branches: `Branch.to_json()` of the judged ones; they replace those of an earlier label,
        but none leaves them. `reached` may also come as a member of `evidence`.
        Raises ValueError for an unknown class, LabelFileError as the class says.
        """
        if class_id is not None and class_id not in BY_ID:
            raise ValueError(f"no such class: {class_id!r}")
        with self._mutex:
            old = self.get(position, quant)
            if class_id is None:
                if old is None or old.class_id is None:
                    return
                self._act("clear", position, quant, old, {"class": None})
                return
            fields: dict[str, Any] = {"class": class_id}
            if branches:
                self._branches.add(branches)
                fields["branches"] = [summarise(branch) for branch in branches]
            self._act("label", position, quant, old, fields, evidence, reached)

    def note(
        self,
        position: Position,
        quant: str,
        text: str,
        evidence: Mapping[str, Any] | None = None,
        *,
        reached: str | None = None,
    ) -> None:
        """Write a note on a root, labelled or not; an empty one removes it."""
        with self._mutex:
            old = self.get(position, quant)
            if text == (old.note if old is not None else ""):
                return
            self._act("note", position, quant, old, {"note": text}, evidence, reached)

    def skip(self, position: Position, quant: str) -> None:
        """Pass a root by: the review resumes after it. On disk with the next label or `save`."""
        with self._mutex:
            key = Key.of(position, quant)
            line = self._labels.get(key)
            self._do("skip", key, line, line, None)

    def _act(
        self,
        kind: Kind,
        position: Position,
        quant: str,
        old: LabelRecord | None,
        fields: Mapping[str, Any],
        evidence: Mapping[str, Any] | None = None,
        reached: str | None = None,
    ) -> None:
        given = dict(evidence or {})
        how = given.pop("reached", None)
        base = old if old is not None else LabelRecord(position, quant, None)
        data = base.to_json()
        if given:
            data["evidence"] = given
        if reached is not None or how is not None:
            data["reached"] = str(reached if reached is not None else how)
        now = self._now()
        data.update(fields)
        data.update(reviewer=self.reviewer, time=now, kldtui=__version__)
        after = dump(data) if data["class"] is not None or data["note"] else None
        key = Key.of(position, quant)
        kept = None
        if old is not None and old.class_id is not None and old.reviewer != self.reviewer:
            kept = self._outdated(self._labels.rows[key], now, "replaced")
        self._do(kind, key, self._labels.get(key), after, kept)
        self.save()

    def _outdated(self, line: bytes, now: str, why: str) -> bytes:
        return dump({**load(line), "superseded": {"time": now, "by": self.reviewer, "why": why}})

    def _do(
        self, kind: Kind, key: Key, before: bytes | None, after: bytes | None, kept: bytes | None
    ) -> None:
        place = self._resume.get(self.reviewer)
        here = {"chunk": key.chunk, "t": key.t, "quant": key.quant}
        resume = {**(load(place) if place is not None else {}), "last": here, "time": self._now()}
        done = _Done(kind, key, before, after, place, dump(resume), kept)
        self._put(key, after)
        self._resume.put(self.reviewer, done.place_after)
        if kept is not None:
            self._superseded.put(kept, kept)
        self._done.append(done)
        self._undone.clear()

    def _put(self, key: Key, line: bytes | None) -> None:
        self._labels.put(key, line)
        self._touched[key] = self._now()
        if line is None:
            self._classes.pop(key, None)
        else:
            self._classes[key] = load(line)["class"]

    def undo(self) -> Action | None:
        """Take back the last action of this session; None if there is none."""
        with self._mutex:
            if not self._done:
                return None
            done = self._done.pop()
            self._undone.append(done)
            self._back(done.key, done.after, done.before)
            self._resume.put(self.reviewer, done.place_before)
            if done.kept is not None:
                self._superseded.put(done.kept, None)
            self.save()
            return done.action()

    def redo(self) -> Action | None:
        """Do again what `undo` took back last; None if there is nothing."""
        with self._mutex:
            if not self._undone:
                return None
            done = self._undone.pop()
            self._done.append(done)
            self._back(done.key, done.before, done.after)
            self._resume.put(self.reviewer, done.place_after)
            if done.kept is not None:
                self._superseded.put(done.kept, done.kept)
            self.save()
            return done.action()

    def _back(self, key: Key, expected: bytes | None, line: bytes | None) -> None:
        if expected == line:
            return
        now = self._labels.get(key)
        if now is not None and now not in (expected, line):
            kept = self._outdated(now, self._now(), "undone")
            self._superseded.put(kept, kept)
        self._put(key, line)

    # ── where to go on ───────────────────────────────────────────────────────────────────────

    @property
    def last(self) -> tuple[Position, str] | None:
        """The root that this reviewer labelled or passed by last."""
        place = self._place().get("last") or {}
        try:
            return Position(int(place["chunk"]), int(place["t"])), str(place["quant"])
        except (TypeError, KeyError, ValueError):
            return None

    @property
    def cursor(self) -> Position | None:
        """Where this reviewer's cursor was when the file was last written."""
        place = self._place().get("cursor") or {}
        try:
            return Position(int(place["chunk"]), int(place["t"]))
        except (TypeError, KeyError, ValueError):
            return None

    @cursor.setter
    def cursor(self, position: Position) -> None:
        with self._mutex:
            here = {"chunk": position.chunk, "t": position.t}
            place = {**self._place(), "cursor": here, "time": self._now()}
            self._resume.put(self.reviewer, dump(place))

    def _place(self) -> dict[str, Any]:
        line = self._resume.get(self.reviewer)
        return dict(load(line)) if line is not None else {}

    def resume_at(self, roots: Sequence[tuple[Position, str]]) -> int:
        """The index of the root to go on with: the first unlabelled one after `last`.

        After the end it goes on from the beginning; if all are labelled it is that of `last`.
        If `last` is not in the list, the first root behind it in the stream stands for it.
        """
        if not roots:
            return 0
        start = 0
        last = self.last
        if last is not None:
            try:
                start = roots.index(last) + 1
            except ValueError:
                behind = (i for i, root in enumerate(roots) if root > last)
                start = next(behind, 0)
        for i in range(len(roots)):
            at = (start + i) % len(roots)
            if self.class_of(*roots[at]) is None:
                return at
        return max(0, start - 1)

    # ── hints ────────────────────────────────────────────────────────────────────────────────

    def set_hint(self, position: Position, quant: str, hint: Mapping[str, Any] | None) -> None:
        """Keep the program's guess, apart from labels; on disk with the next label or `save`.

        hint: `class` (an id or None), `text` (one line), `source`.
        """
        key = Key.of(position, quant)
        place = {"chunk": key.chunk, "t": key.t, "quant": key.quant}
        with self._mutex:
            line = dump({**hint, **place, "time": self._now()}) if hint is not None else None
            self._hints.put(key, line)

    def hint(self, position: Position, quant: str) -> dict[str, Any] | None:
        """The program's guess about a root; never a label."""
        line = self._hints.get(Key.of(position, quant))
        return dict(load(line)) if line is not None else None

    # ── disk ─────────────────────────────────────────────────────────────────────────────────

    def save(self) -> None:
        """Bring to disk what is not there yet. Raises LabelFileError; then all of it stays."""
        with self._mutex:
            if not self.unsaved:
                return
            trouble: OSError | None = None
            try:
                with disk.locked(self._files, self._target.parent):
                    try:
                        self._branches.flush()
                    except OSError as error:
                        trouble = error
                    self._write()
            except OSError as error:
                raise self._unwritable(error, self.path) from error
            if trouble is not None:
                raise self._unwritable(trouble, self._branches.path) from trouble

    def close(self) -> None:
        """Save what is left (the cursor). Raises LabelFileError."""
        self.save()

    def _write(self) -> None:
        seen = disk.look(self._files, self._target)
        if seen is None:
            for table in self._tables():
                table.unsaved()
        elif seen != self._seen:
            self._take_in()
        whole = Document(
            ref=self._ref,
            quants=self._quants.rows,
            taxonomy=self._taxonomy.rows,
            resume=self._resume.rows,
            labels=self._labels.rows,
            hints=self._hints.rows,
            superseded=self._superseded.rows,
            extra=self._extra,
        )
        if self._seen is None:
            disk.sweep(self._target)
        self._seen = disk.replace(self._files, self._target, document.render(whole))
        for table in self._tables():
            table.saved()

    def _tables(self) -> tuple[Table[Any], ...]:
        return (
            self._labels,
            self._hints,
            self._resume,
            self._superseded,
            self._quants,
            self._taxonomy,
        )

    def _take_in(self) -> None:
        """Read the file and merge it with what is in memory."""
        data, seen = disk.read(self._files, self._target)
        try:
            theirs = document.parse(data)
        except ValueError as error:
            raise LabelFileError(f"{self.path}: {error}; it was left as it is") from None
        self._same_review(theirs)
        self._notes = list(dict.fromkeys([*self._notes, *theirs.warnings]))
        now = self._now()
        _, losers = self._labels.merge(theirs.labels, self._ours_is_later)
        self._superseded.merge(theirs.superseded, lambda *_: True)
        for _, line in losers:
            kept = self._outdated(line, now, "merged")
            self._superseded.put(kept, kept)
        for table, rows in (
            (self._hints, theirs.hints),
            (self._resume, theirs.resume),
            (self._quants, theirs.quants),
            (self._taxonomy, theirs.taxonomy),
        ):
            table.merge(rows, _later)  # type: ignore[arg-type]
        self._classes = {
            key: theirs.classes[key] if line == theirs.labels.get(key) else load(line)["class"]
            for key, line in self._labels.rows.items()
        }
        self._ref = theirs.ref
        self._extra = {**self._extra, **theirs.extra}
        self._seen = seen

    def _ours_is_later(self, key: Key, ours: bytes, theirs: bytes) -> bool:
        return self._touched.get(key, "") >= str(load(theirs)["time"])

    def _same_review(self, theirs: Document) -> None:
        pairs = [("the reference", self.identity.ref, theirs.ref)]
        for name, identity in self.identity.quants.items():
            if name in theirs.quants:
                pairs.append((f"quant {name!r}", identity, load(theirs.quants[name])))
        for what, ours, other in pairs:
            if reason := difference(ours, other):
                raise LabelFileError(
                    f"{self.path}: it holds labels of other recordings ({what}: {reason}); name "
                    "another file with --labels FILE"
                )

    def _unreadable(self, error: OSError) -> LabelFileError:
        return LabelFileError(
            f"{self.path}: cannot be read: {error.strerror or error}; name another file with "
            "--labels FILE"
        )

    def _unwritable(self, error: OSError, path: Path) -> LabelFileError:
        return LabelFileError(
            f"{path}: not saved: {error.strerror or error}; your labels are kept in memory and "
            "saved with the next one; free the disk, or start with --labels FILE elsewhere"
        )


def _later(_: Any, ours: bytes, theirs: bytes) -> bool:
    return str(load(ours).get("time", "")) >= str(load(theirs).get("time", ""))
