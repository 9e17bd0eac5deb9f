"""The label file as a whole: what is in it, how it is spelt, and when it is refused.

Knows: the file format (docs/labels.md, docs/labels.schema.json), version 1.
Must not know: how files get to disk, merging, the screen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kldtui import __version__
from kldtui.labels.plain import dump, load
from kldtui.labels.record import Key, check_record
from kldtui.labels.taxonomy import TAXONOMY

FORMAT = "kldtui-labels"
VERSION = 1
_SUM = b'\n"checksum":"sha256:'
_SECTIONS = ("recordings", "taxonomy", "resume", "labels", "hints", "superseded")
_KNOWN = {"format", "version", "kldtui", *_SECTIONS, "checksum"}


@dataclass
class Document:
    """The sections of a label file; records as lines, by key."""

    ref: dict[str, Any] = field(default_factory=dict)
    quants: dict[str, bytes] = field(default_factory=dict)
    taxonomy: dict[str, bytes] = field(default_factory=dict)
    resume: dict[str, bytes] = field(default_factory=dict)
    labels: dict[Key, bytes] = field(default_factory=dict)
    hints: dict[Key, bytes] = field(default_factory=dict)
    superseded: dict[bytes, bytes] = field(default_factory=dict)
    classes: dict[Key, str | None] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def taxonomy_rows() -> dict[str, bytes]:
    """The taxonomy of this version, by class id."""
    return {entry.id: dump(entry.to_json()) for entry in TAXONOMY}


def _rows(opening: bytes, lines: Sequence[bytes], closing: bytes) -> list[bytes]:
    if not lines:
        return [opening + closing + b",\n"]
    return [opening + b"\n", b",\n".join(lines), b"\n" + closing + b",\n"]


def _named(rows: Iterable[tuple[str, bytes]]) -> list[bytes]:
    return [dump(name) + b":" + line for name, line in rows]


def render(document: Document) -> bytes:
    """The bytes of the file: JSON with one record a line, its checksum last.

    The checksum is SHA-256 over all bytes before its own line.
    """
    labels, hints = document.labels, document.hints
    parts = [
        b'{\n"format":' + dump(FORMAT) + b",\n",
        b'"version":%d,\n' % VERSION,
        b'"kldtui":' + dump(__version__) + b",\n",
        b'"recordings":{"ref":' + dump(document.ref) + b",",
        *_rows(b'"quants":{', _named(document.quants.items()), b"}}"),
        *_rows(b'"taxonomy":[', list(document.taxonomy.values()), b"]"),
        *(line + b",\n" for line in _named((n, dump(v)) for n, v in document.extra.items())),
        *_rows(b'"resume":{', _named(sorted(document.resume.items())), b"}"),
        *_rows(b'"labels":[', [labels[key] for key in sorted(labels)], b"]"),
        *_rows(b'"hints":[', [hints[key] for key in sorted(hints)], b"]"),
        *_rows(b'"superseded":[', list(document.superseded.values()), b"]"),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, _SUM[1:], digest.hexdigest().encode(), b'"\n}\n'])


def parse(data: bytes) -> Document:
    """What a label file holds. Raises ValueError, in words that finish a sentence, for any other
    file: damaged, of another version, or not a label file at all."""
    if not data.strip():
        raise ValueError("it is empty, not a label file; delete it to begin anew")
    try:
        top = load(data)
    except ValueError as error:
        raise ValueError(f"it is damaged or no label file (not JSON: {error})") from None
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise ValueError("it is JSON, but no kldtui label file")
    if type(top.get("version")) is not int or top["version"] != VERSION:
        raise ValueError(
            f"its format is version {top.get('version')!r:.20}, and this kldtui "
            f"({__version__}) knows version {VERSION}; update kldtui"
        )
    out = Document()
    _check_sum(data, top.get("checksum"), out)
    try:
        _fill(out, top)
    except ValueError as error:
        raise ValueError(f"it holds {error}") from None
    return out


def _check_sum(data: bytes, checksum: Any, out: Document) -> None:
    if checksum is None:
        out.warnings.append("the label file has no checksum: damage to it cannot be noticed")
        return
    digest = hashlib.sha256(data[: data.rfind(_SUM) + 1]).hexdigest()
    if checksum != f"sha256:{digest}":
        raise ValueError(
            "its content does not fit its checksum: it is damaged, or was edited; if you "
            "edited it, put null for the checksum in its last lines"
        )


def _need(top: Mapping[str, Any], name: str, kind: type) -> Any:
    value = top.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"no {name}" if value is None else f"{name} of the wrong kind")
    return value


def _fill(out: Document, top: Mapping[str, Any]) -> None:
    recordings = _need(top, "recordings", dict)
    out.ref = _need(recordings, "ref", dict)
    for name, identity in _need(recordings, "quants", dict).items():
        if not isinstance(identity, dict):
            raise ValueError("a quant's identity that is not an object")
        out.quants[name] = dump(identity)
    for entry in _need(top, "taxonomy", list):
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise ValueError("a class without an id")
        out.taxonomy[entry["id"]] = dump(entry)
    for name, value in _need(top, "resume", dict).items():
        if not isinstance(value, dict):
            raise ValueError("a place to resume that is not an object")
        out.resume[name] = dump(value)
    classes = list(out.taxonomy)
    for record in _need(top, "labels", list):
        key = check_record(record, classes)
        line = dump(record)
        if key in out.labels and out.labels[key] != line:
            older, newer = sorted((load(out.labels[key]), record), key=lambda r: str(r["time"]))
            out.warnings.append(f"{key} was labelled twice; the later label counts")
            mark = {"time": str(newer["time"]), "by": str(newer["reviewer"]), "why": "twice"}
            kept = dump({**older, "superseded": mark})
            out.superseded[kept] = kept
            line, record = dump(newer), newer
        out.labels[key] = line
        out.classes[key] = record["class"]
    for hint in _need(top, "hints", list):
        out.hints[_hint_key(hint)] = dump(hint)
    for record in _need(top, "superseded", list):
        check_record(record, classes)
        line = dump(record)
        out.superseded[line] = line
    out.extra = {name: value for name, value in top.items() if name not in _KNOWN}


def _hint_key(hint: Any) -> Key:
    if not isinstance(hint, dict):
        raise ValueError("a hint that is not an object")
    chunk, t, quant = hint.get("chunk"), hint.get("t"), hint.get("quant")
    if type(chunk) is not int or type(t) is not int or not isinstance(quant, str):
        raise ValueError("a hint without its position and quant")
    return Key(chunk, t, quant)
