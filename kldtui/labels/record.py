"""A label as it is kept: one line of JSON for a position and a quant.

Knows: the fields of a label record and of a branch's summary in it.
Must not know: the file around them, the screen, engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from kldtui.labels.plain import load
from kldtui.labels.taxonomy import BY_ID, LabelClass
from kldtui.position import Position


class Key(NamedTuple):
    """What a label is of; sorts in stream order."""

    chunk: int
    t: int
    quant: str

    @classmethod
    def of(cls, position: Position, quant: str) -> Key:
        return cls(position.chunk, position.t, quant)

    @property
    def position(self) -> Position:
        return Position(self.chunk, self.t)

    def __str__(self) -> str:
        return f"c{self.chunk}:t{self.t} of {self.quant}"


@dataclass(frozen=True, slots=True)
class LabelRecord:
    """What a person said of one root of one quant.

    class_id: None where there is only a note.
    evidence: what the label stands on, as docs/labels.md lists it; log-probabilities in nats.
    branches: summaries of the judged branches; the whole ones are in the branch file by `id`.
    reached: how the person came to the root.
    reviewer: who gave the class; without one, who wrote the note.
    time: of the last change, UTC, ISO 8601.
    extra: fields of the file that this version does not know.
    """

    position: Position
    quant: str
    class_id: str | None
    note: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[Mapping[str, Any], ...] = ()
    reached: str = ""
    reviewer: str = ""
    time: str = ""
    kldtui: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label_class(self) -> LabelClass | None:
        """The class, if this version has it."""
        return BY_ID.get(self.class_id) if self.class_id is not None else None

    @property
    def key(self) -> str | None:
        """The key of the class ("1" to "7"); None where there is only a note."""
        found = self.label_class
        return found.key if found is not None else None

    def to_json(self) -> dict[str, Any]:
        """As docs/labels.schema.json has it."""
        return {
            "chunk": self.position.chunk,
            "t": self.position.t,
            "quant": self.quant,
            "class": self.class_id,
            "note": self.note,
            "evidence": dict(self.evidence),
            "branches": [dict(branch) for branch in self.branches],
            "reached": self.reached,
            "reviewer": self.reviewer,
            "time": self.time,
            "kldtui": self.kldtui,
            **self.extra,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LabelRecord:
        """The inverse, for data that `check_record` passed."""
        return cls(
            position=Position(data["chunk"], data["t"]),
            quant=data["quant"],
            class_id=data["class"],
            note=data["note"],
            evidence=data["evidence"],
            branches=tuple(data["branches"]),
            reached=data["reached"],
            reviewer=data["reviewer"],
            time=data["time"],
            kldtui=data["kldtui"],
            extra={name: value for name, value in data.items() if name not in _FIELDS},
        )

    @classmethod
    def from_line(cls, line: bytes) -> LabelRecord:
        return cls.from_json(load(line))


def record_class(line: bytes) -> str | None:
    """The class id of a record's line."""
    found = load(line)["class"]
    return found if isinstance(found, str) else None


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "chunk": int,
    "t": int,
    "quant": str,
    "class": (str, type(None)),
    "note": str,
    "evidence": dict,
    "branches": list,
    "reached": str,
    "reviewer": str,
    "time": str,
    "kldtui": str,
}


def check_record(data: Any, classes: Sequence[str]) -> Key:
    """The key of a record read from a file. Raises ValueError in words for what is wrong."""
    if not isinstance(data, dict):
        raise ValueError("a label that is not an object")
    for name, kind in _FIELDS.items():
        if name not in data:
            raise ValueError(f"a label without {name!r}")
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise ValueError(f"a label whose {name!r} is {data[name]!r:.40}")
    if data["chunk"] < 0 or data["t"] < 0:
        raise ValueError("a label at a negative position")
    if not all(isinstance(branch, dict) for branch in data["branches"]):
        raise ValueError("a label with a branch that is not an object")
    if data["class"] is not None and data["class"] not in classes:
        raise ValueError(f"a label of class {data['class']!r:.40}, which its taxonomy lacks")
    return Key(data["chunk"], data["t"], data["quant"])


def without_secrets(url: str) -> str:
    """A URL without user, password, query or fragment: label files are passed around."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def scrubbed(branch: Mapping[str, Any]) -> dict[str, Any]:
    """The branch with `without_secrets` applied to its engine's URL."""
    engine = branch.get("engine")
    if isinstance(engine, Mapping) and isinstance(engine.get("url"), str):
        return {**branch, "engine": {**engine, "url": without_secrets(engine["url"])}}
    return dict(branch)


_KEPT = (
    "parent",
    "start_id",
    "start_text",
    "text",
    "stop",
    "complete",
    "error",
    "settings",
    "verify",
)
_KEPT_TOO = ("continued_at", "seconds", "tokens_per_second", "created")
_OF_ENGINE = ("kind", "url", "model", "build", "n_ctx", "add_bos")


def summarise(branch: Mapping[str, Any]) -> dict[str, Any]:
    """What a label keeps of a branch (`Branch.to_json`): ids, text and where they come from.

    The top-N, the prefix and the engine's details are in the branch file only.
    """
    arm = branch.get("arm")
    if isinstance(arm, Mapping):
        arm = "·".join(
            ("R" if arm.get("engine") == "ref" else "Q", "r" if arm.get("start") == "ref" else "q")
        )
    engine = branch.get("engine") or {}
    kept = {name: engine[name] for name in _OF_ENGINE if name in engine}
    tokens = branch.get("tokens") or []
    summary: dict[str, Any] = {"id": branch["id"], "arm": arm, "engine": kept}
    summary.update({name: branch[name] for name in _KEPT if name in branch})
    summary["ids"] = [t["id"] if isinstance(t, Mapping) else t for t in tokens]
    if "text" not in branch:
        summary["text"] = "".join(
            str(t.get("text", "")) if isinstance(t, Mapping) else "" for t in tokens
        )
    summary["prefix_length"] = len(branch.get("prefix_ids") or [])
    summary.update({name: branch[name] for name in _KEPT_TOO if name in branch})
    return summary
