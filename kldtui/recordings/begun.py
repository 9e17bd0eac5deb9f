"""Whether a run that is to be gone on with is there, and was begun as it is asked for now.

Knows: which option of `kldtui record` a header field comes from.
Must not know: how a run is recorded, engines.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kldtui.errors import RecordingError
from kldtui.recordings.run_scan import is_run

_HEAD_BYTES = 1 << 16
_DIGITS = 8


def is_begun(path: Path) -> bool:
    """Whether a run is there; an empty file, which was stopped before its first line, is removed.

    Raises RecordingError where something else is there.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise RecordingError(f"{path}: exists and is no file; choose another name (-o)")
        if not found.st_size:
            path.unlink()
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror}") from None
    if not is_run(head):
        raise RecordingError(
            f"{path}: exists and is no run; it is left as it is: choose another name (-o)"
        )
    return True


class _Option(NamedTuple):
    field: str
    """Of the header; a dot leads into an object."""
    name: str
    words: Callable[[Any], str]


def _range(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _file(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return f"{value.get('name')} ({str(value.get('tokens'))[:_DIGITS]})"


_OPTIONS = (
    _Option("asked.n", "-n", str),
    _Option("sampling.temperature", "--temperature", str),
    _Option("sampling.seed", "--seed", str),
    _Option("sampling.repeat", "--repeat", str),
    _Option("asked.chunks", "--chunks", _range),
    _Option("chunks", "--chunks", _range),
    _Option("asked.ref", "REF", str),
    _Option("asked.trace", "TRACE", str),
    _Option("source", "IN", _file),
    _Option("against", "--against", _file),
    _Option("rows.at", "--full", lambda value: ",".join(map(str, value))),
    _Option("top_n", "--top-n", str),
)


def difference(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How a header differs from the one that would be written now; empty where it does not.

    What was asked for comes first, by the name of its option: other options make other streams.
    Fields that `wanted` lacks may be anything, those apart that options make.
    """
    wanted = json.loads(json.dumps(wanted))
    by, now = _command(there), _command(wanted)
    if by != now:
        return f"was begun with {by}, not with {now}"
    for option in _OPTIONS:
        old, new = _at(there, option.field), _at(wanted, option.field)
        if _nameless(old) != _nameless(new):
            return f"was begun {_with(option, old)}, not {_with(option, new)}"
    old, new = (_at(one, "asked.positions") == "all" for one in (there, wanted))
    if old != new:
        return "was begun with --all, not without" if old else "was begun without --all, not with"
    old, new = (str(_at(one, "asked.prompts"))[:_DIGITS] for one in (there, wanted))
    # Another model may read other ids in the same prompts.
    if old != new and _at(there, "engine.model") == _at(wanted, "engine.model"):
        return f"was begun with other --prompts than these ({old}, now {new})"
    return _first_other(there, {"engine": wanted.get("engine"), **wanted})


def _command(header: Mapping[str, Any]) -> str:
    asked = header.get("asked") or {}
    for field, name in (("prompts", "rollout"), ("trace", "import"), ("ref", "score")):
        if field in asked:
            return f"kldtui record {name}"
    return "kldtui record convert" if header.get("source") else "another program"


def _at(header: Mapping[str, Any], field: str) -> Any:
    value: Any = header
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _with(option: _Option, value: Any) -> str:
    if value is None:
        return f"without {option.name}"
    return f"with {option.name} {option.words(value)}"


def _nameless(value: Any) -> Any:
    """Without the name of a file, which may be moved."""
    if isinstance(value, dict) and "tokens" in value:
        return {name: inner for name, inner in value.items() if name != "name"}
    return value


def _first_other(there: Mapping[str, Any], wanted: Mapping[str, Any], inside: str = "") -> str:
    for name, value in wanted.items():
        old, new = _nameless(there.get(name)), _nameless(value)
        if isinstance(new, dict) and isinstance(old, dict):
            names = dict.fromkeys([*new, *old])
            found = _first_other(old, {n: new.get(n) for n in names}, f"{inside}{name}.")
            if found:
                return found
        elif old != new:
            return f"was begun otherwise: its {inside}{name} is {_short(old)}, not {_short(new)}"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
