"""The labels of one review: asked for, given, undone, and where to go on.

Knows: label records, actions, undo and redo, the reviewer's place.
Must not know: the screen, engines, the network, how recordings are read, files beyond LabelFile.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kldtui import __version__
from kldtui.errors import LabelFileError
from kldtui.labels.disk import Files
from kldtui.labels.identity import ReviewIdentity
from kldtui.labels.plain import dump, load
from kldtui.labels.record import Key, LabelRecord, scrubbed, summarise
from kldtui.labels.sync import LabelFile
from kldtui.labels.taxonomy import BY_ID
from kldtui.position import Position

Kind = Literal["label", "clear", "note", "skip"]
_WORDS = {"label": "label", "clear": "clearing", "note": "note", "skip": "skip"}
_CACHED = 4096


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
        return f"{_WORDS[self.kind]} at {self.position} of {self.quant}"


@dataclass(frozen=True, slots=True)
class _Done:
    """An action with the lines that it changed; `kept` is the superseded line it left."""

    kind: Kind
    key: Key
    before: bytes | None
    after: bytes | None
    last_before: Any
    last_after: Any
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
    """The labels of a review. Labels and notes are on disk when the call returns.

    A call that changes something raises LabelFileError if the disk refuses; the change stays in
    memory (`unsaved`) and goes to disk with the next one, or with `save()`. Calls may come from
    any thread. Undo and redo reach back to `open`; a later session begins anew.
    """

    def __init__(
        self, file: LabelFile, identity: ReviewIdentity, reviewer: str, now: Callable[[], str]
    ) -> None:
        """Use `open`."""
        self.identity = identity
        self.reviewer = reviewer
        self._file = file
        self._now = now
        self._mutex = threading.RLock()
        self._done: list[_Done] = []
        self._undone: list[_Done] = []
        self._parsed: dict[Key, tuple[bytes, LabelRecord]] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        identity: ReviewIdentity,
        reviewer: str,
        *,
        files: Files | None = None,
        now: Callable[[], str] = utc_now,
    ) -> LabelStore:
        """Read the label file at `path`, if there is one; nothing is written before a label.

        Raises LabelFileError if it cannot be read, is damaged, of another version, or of other
        recordings; it is then left as it is.
        """
        file = LabelFile(path, identity, files if files is not None else Files(), now)
        file.open()
        return cls(file, identity, reviewer, now)

    # ── asking ───────────────────────────────────────────────────────────────────────────────

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def branch_path(self) -> Path:
        return self._file.branches.path

    @property
    def warnings(self) -> list[str]:
        """What is odd about the files, a line each."""
        return [*self._file.notes, *self._file.branches.warnings]

    @property
    def unsaved(self) -> bool:
        """Whether something is in memory that is not yet on disk (a skip counts, too)."""
        return self._file.unsaved

    def get(self, position: Position, quant: str) -> LabelRecord | None:
        """What was said of a root of a quant: a class, a note, or both."""
        key = Key.of(position, quant)
        line = self._file.labels.get(key)
        if line is None:
            return None
        cached = self._parsed.get(key)
        if cached is not None and cached[0] == line:
            return cached[1]
        if len(self._parsed) >= _CACHED:
            self._parsed = {}
        record = LabelRecord.from_line(line)
        self._parsed[key] = (line, record)
        return record

    def class_of(self, position: Position, quant: str) -> str | None:
        """The class id of a root, without parsing its record; for lists of many."""
        return self._file.classes.get(Key.of(position, quant))

    def classes(self, quant: str) -> dict[Position, str]:
        """The class id of each root of a quant that has one."""
        with self._mutex:
            return {
                Position(key.chunk, key.t): class_id
                for key, class_id in self._file.classes.items()
                if class_id is not None and key.quant == quant
            }

    def count(self, quant: str | None = None) -> int:
        """How many roots have a class (hints and bare notes do not count)."""
        return sum(self.counts(quant).values())

    def counts(self, quant: str | None = None) -> Counter[str]:
        """Roots by class id, of one quant or of all."""
        with self._mutex:
            return Counter(
                class_id
                for key, class_id in self._file.classes.items()
                if class_id is not None and quant in (None, key.quant)
            )

    def records(self, quant: str | None = None) -> Iterator[LabelRecord]:
        """All records in stream order."""
        with self._mutex:
            rows = self._file.labels.rows
            lines = [rows[key] for key in sorted(rows) if quant in (None, key.quant)]
        return map(LabelRecord.from_line, lines)

    def superseded(self) -> list[LabelRecord]:
        """Labels that another reviewer's or another program's took the place of.

        `extra["superseded"]` says when, by whom and why (docs/labels.md).
        """
        with self._mutex:
            lines = list(self._file.superseded.rows.values())
        return [LabelRecord.from_line(line) for line in lines]

    def branch(self, branch_id: str) -> dict[str, Any] | None:
        """A stored branch whole, as it was given to `set`; None if the branch file lacks it."""
        with self._mutex:
            return self._file.branches.get(branch_id)

    def keep_branch(self, branch: Mapping[str, Any]) -> None:
        """Write a branch anew that grew after a label was given on it; the label stays as it is.

        On disk with the next label or `save`.
        """
        with self._mutex:
            self._file.branches.add([scrubbed(branch)])

    def branches_of(self, position: Position, quant: str) -> list[dict[str, Any]]:
        """The whole branches that a label was given on, as far as the branch file has them."""
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
        while none leaves them. `reached` may also come as a member of `evidence`.
        Raises ValueError for an unknown class, LabelFileError as the class says.
        """
        if class_id is not None and class_id not in BY_ID:
            raise ValueError(f"no such class: {class_id!r}")
        with self._mutex:
            if class_id is None:
                if self.class_of(position, quant) is not None:
                    self._act("clear", position, quant, {"class": None})
                return
            fields: dict[str, Any] = {"class": class_id}
            if branches:
                whole = [scrubbed(branch) for branch in branches]
                fields["branches"] = [summarise(branch) for branch in whole]
                self._file.branches.add(whole)
            self._act("label", position, quant, fields, evidence, reached)

    def note(
        self,
        position: Position,
        quant: str,
        text: str,
        evidence: Mapping[str, Any] | None = None,
        *,
        reached: str | None = None,
    ) -> None:
        """Write a note on a root, labelled or not; an empty one removes it.

        A label stays as its reviewer gave it, with what it stands on, whoever writes the note.
        """
        with self._mutex:
            old = self.get(position, quant)
            if text != (old.note if old is not None else ""):
                self._act("note", position, quant, {"note": text}, evidence, reached)

    def skip(self, position: Position, quant: str) -> None:
        """Pass a root by: the review resumes after it. On disk with the next label or `save`."""
        with self._mutex:
            key = Key.of(position, quant)
            line = self._file.labels.get(key)
            self._do("skip", key, line, None)

    def _act(
        self,
        kind: Kind,
        position: Position,
        quant: str,
        fields: Mapping[str, Any],
        evidence: Mapping[str, Any] | None = None,
        reached: str | None = None,
    ) -> None:
        old = self.get(position, quant)
        data = (old if old is not None else LabelRecord(position, quant, None)).to_json()
        if kind != "note" or data["class"] is None:
            given = dict(evidence or {})
            how = given.pop("reached", None)
            if given:
                data["evidence"] = given
            if reached is not None or how is not None:
                data["reached"] = str(reached if reached is not None else how)
            data["reviewer"] = self.reviewer
        data.update(fields)
        data.update(time=self._now(), kldtui=__version__)
        line = dump(data) if data["class"] is not None or data["note"] else None
        kept = None
        replaces = old is not None and (old.note if kind == "note" else old.class_id)
        if old is not None and replaces and old.reviewer != self.reviewer:
            before = self._file.labels.rows[Key.of(position, quant)]
            kept = self._file.supersede(before, self.reviewer, "replaced")
        self._do(kind, Key.of(position, quant), line, kept)
        self._file.save()

    def _do(self, kind: Kind, key: Key, after: bytes | None, kept: bytes | None) -> None:
        here: dict[str, Any] = {"chunk": key.chunk, "t": key.t, "quant": key.quant}
        before = self._file.labels.get(key)
        self._done.append(_Done(kind, key, before, after, self._place().get("last"), here, kept))
        self._undone.clear()
        if before != after:
            self._file.put(key, after)
        if kind != "skip" and self._file.classes.get(key) is None:
            here["open"] = True
        self._set_place("last", here)

    def undo(self) -> Action | None:
        """Take back the last action of this session; None if there is none."""
        with self._mutex:
            if not self._done:
                return None
            done = self._done.pop()
            self._undone.append(done)
            self._back(done.key, done.after, done.before)
            self._set_place("last", done.last_before)
            if done.kept is not None:
                self._file.superseded.put(done.kept, None)
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
            self._set_place("last", done.last_after)
            if done.kept is not None:
                self._file.superseded.put(done.kept, done.kept)
            self.save()
            return done.action()

    def _back(self, key: Key, expected: bytes | None, line: bytes | None) -> None:
        if expected == line:
            return
        now = self._file.labels.get(key)
        if now is not None and now not in (expected, line):
            self._file.supersede(now, self.reviewer, "undone")
        self._file.put(key, line)

    # ── where to go on ───────────────────────────────────────────────────────────────────────

    @property
    def last(self) -> tuple[Position, str] | None:
        """The root of this reviewer's last action: labelled, noted, cleared, or passed by."""
        place = self._place().get("last") or {}
        try:
            return Position(int(place["chunk"]), int(place["t"])), str(place["quant"])
        except (TypeError, KeyError, ValueError):
            return None

    @property
    def last_is_open(self) -> bool:
        """Whether the last action left its root to be judged: a note alone, or a cleared label."""
        return bool((self._place().get("last") or {}).get("open"))

    def _place(self) -> dict[str, Any]:
        line = self._file.resume.get(self.reviewer)
        return dict(load(line)) if line is not None else {}

    def _set_place(self, name: str, value: Any) -> None:
        place = {**self._place(), name: value, "time": self._now()}
        self._file.resume.put(self.reviewer, dump(place))

    def resume_at(self, roots: Sequence[tuple[Position, str]]) -> int:
        """The index of the root to go on with: `last` if it is still open, else the first
        unlabelled one after it.

        After the end it goes on from the beginning; if all are labelled it is that of `last`; 0
        for an empty list. A `last` that is not in the list stands before the first root behind it
        if the list is in stream order, else at the list's beginning.
        """
        last, start = self.last, 0
        if last is not None and last in roots:
            start = roots.index(last) + (not self.last_is_open)
        elif last is not None and all(a <= b for a, b in pairwise(roots)):
            start = next((i for i, root in enumerate(roots) if root > last), 0)
        for i in range(len(roots)):
            at = (start + i) % len(roots)
            if self.class_of(*roots[at]) is None:
                return at
        return max(0, start - 1)

    # ── hints ────────────────────────────────────────────────────────────────────────────────

    def set_hint(self, position: Position, quant: str, hint: Mapping[str, Any] | None) -> None:
        """Keep the program's guess, apart from labels; on disk with the next label or `save`.

        hint: `class` (an id or None), `text` (one line), `source`; never counted, never undone.
        """
        key = Key.of(position, quant)
        place = {"chunk": key.chunk, "t": key.t, "quant": key.quant}
        with self._mutex:
            line = dump({**place, **hint, **place, "time": self._now()}) if hint else None
            self._file.hints.put(key, line)

    def hint(self, position: Position, quant: str) -> dict[str, Any] | None:
        """The program's guess about a root; never a label."""
        line = self._file.hints.get(Key.of(position, quant))
        return dict(load(line)) if line is not None else None

    # ── disk ─────────────────────────────────────────────────────────────────────────────────

    def save(self) -> None:
        """Bring to disk what is not there yet. Raises LabelFileError; then all of it stays."""
        with self._mutex:
            if self._file.unsaved:
                self._file.save()

    def close(self) -> None:
        """Save what is left. If that fails, it goes to new files, which the error names.

        Raises LabelFileError, also where the labels were rescued.
        """
        with self._mutex:
            try:
                self.save()
            except LabelFileError:
                lost = self._file.labels.changed or self._file.branches.waiting
                rescued = self._rescue() if lost else None
                if rescued is None:
                    raise
                raise LabelFileError(
                    f"{self._file.trouble}; the labels of this review are in {rescued} instead"
                ) from None

    def _rescue(self) -> Path | None:
        stamp = "".join(c for c in self._now() if c.isdigit())[:14]
        name = f"{self.path.name.removesuffix('.labels.json')}.rescued-{stamp}.labels.json"
        for folder in (self.path.parent, Path.home(), Path(tempfile.gettempdir())):
            try:
                self._file.rescue(folder / name)
            except OSError:
                continue
            return folder / name
        return None
