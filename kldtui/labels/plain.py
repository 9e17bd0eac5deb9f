"""Values as one line of JSON that survives every text a model can produce, and back.

Knows: JSON (RFC 8259), numpy scalars, and the characters that a terminal or an editor chokes on.
Must not know: what the values mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

SMALLEST = float(np.finfo(np.float32).min)
"""Stands for -inf, as llama.cpp's server has it: JSON has no infinities."""

# Valid in JSON strings, but not in UTF-8 (lone surrogates), or invisible, or able to move a
# terminal's cursor or an editor's line count: these are written as escapes.
_ESCAPED = re.compile(
    "[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def plain(value: Any) -> Any:
    """The value as JSON has it: numpy scalars as numbers, NaN as None, -inf as `SMALLEST`."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, np.floating) and not isinstance(value, float):
        value = float(str(value))  # the shortest spelling of a float32, not its 17 digits
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return math.copysign(-SMALLEST, value)
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    raise TypeError(f"a {type(value).__name__} has no place in a label file")


def dump(value: Any) -> bytes:
    """One line of UTF-8 JSON, without a newline; `load(dump(x)) == x` for JSON values.

    Raises TypeError for what JSON cannot hold.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii() or "\x7f" in text:
        text = _ESCAPED.sub(_escape, text)
    return text.encode()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def load(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, NaN and depth included."""
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
