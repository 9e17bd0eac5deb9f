"""The JSON objects in a file that somebody saved from a server, however they are strung together.

Knows: JSON, JSON Lines, arrays, pretty-printed objects one behind the other, server-sent events
(`data: {…}`), gzip; and wrappings that put the request beside the answer.
Must not know: what the fields of an answer mean.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kldtui.errors import DamagedRecording, RecordingError

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_STARTS = (b"{", b"[", b"data:", b"event:", b"id:", b": ")
_MOST = 1 << 31
"""Bytes of a file that is not in lines, which has to be read whole."""


class Object(NamedTuple):
    """A JSON object: the line it starts at (from 1), the request beside it if there is one."""

    line: int
    answer: dict[str, Any]
    request: dict[str, Any]


def may_be_json(head: bytes) -> bool:
    """Whether a file that starts with these bytes (some thousand will do) may hold objects."""
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1 << 12)
        except zlib.error:
            return False
    head = head.removeprefix(_BOM)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # else a character that the cut goes through
            return False
    return b"\0" not in head and head.lstrip().startswith(_STARTS)


def read_objects(path: Path, problems: list[str]) -> Iterator[Object]:
    """Every object of the file, in order; of an array its members.

    A last line that is cut is left out, and `problems` says so. Raises RecordingError where the
    file cannot be read, DamagedRecording where something else than JSON stands in it.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == _GZIP
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            first = file.readline().removeprefix(_BOM)
            while first and not first.strip():
                first = file.readline()
            file.seek(0)
            if _is_line(first):
                yield from _by_lines(path, file, problems)
            else:
                yield from _whole(path, file)
    except (OSError, EOFError, zlib.error) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise RecordingError(f"{path}: cannot be read: {words}") from None


def _is_line(first: bytes) -> bool:
    """Whether the first line is whole by itself."""
    if not first.lstrip().startswith((b"{", b"[")):
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _by_lines(path: Path, file: Any, problems: list[str]) -> Iterator[Object]:
    for number, raw in enumerate(file, 1):
        line = raw.removeprefix(_BOM) if number == 1 else raw
        line = line.strip()
        if line.startswith((b":", b"event:", b"id:", b"retry:")):
            continue
        line = line.removeprefix(b"data:").strip()
        if not line or line == b"[DONE]":
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if not raw.endswith(b"\n"):
                problems.append(f"the last line ({number}) is cut: left out")
                return
            raise DamagedRecording(
                f"{path}: line {number}: is no JSON; mend the line, or record again"
            ) from None
        yield from _members(value, number)


def _whole(path: Path, file: Any) -> Iterator[Object]:
    data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise RecordingError(f"{path}: is one JSON value of over 2 GiB; write it as JSON Lines")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DamagedRecording(f"{path}: is not UTF-8 (byte {error.start + 1})") from None
    decoder, at, line = json.JSONDecoder(), 0, 1
    while True:
        start = len(text) - len(text[at:].lstrip())
        line += text.count("\n", at, start)
        if start == len(text):
            return
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            raise DamagedRecording(
                f"{path}: line {line}: what starts here is no JSON, or is cut; record it again"
            ) from None
        yield from _members(value, line)
        line += text.count("\n", start, end)
        at = end


def _members(value: Any, line: int) -> Iterator[Object]:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict):
            yield _unwrap(one, line)


def _unwrap(value: dict[str, Any], line: int) -> Object:
    """Take the answer out of `{"request": …, "response": …}`, also as OpenAI's batches have it."""
    answer, request = value.get("response"), value.get("request")
    if isinstance(answer, dict):
        body = answer.get("body")
        answer = body if isinstance(body, dict) else answer
    else:
        answer = value
    if isinstance(request, dict):
        body = request.get("body")
        request = body if isinstance(body, dict) else request
    return Object(line, answer, request if isinstance(request, dict) else {})
