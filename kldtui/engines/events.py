"""Server-sent events, read from bytes that arrive cut anywhere.

Knows: the lines of an event stream (https://html.spec.whatwg.org/multipage/server-sent-events.html)
and that every event here is one JSON object.
Must not know: what is in the objects, sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kldtui.errors import EngineBroke

LONGEST = 64 << 20
"""Bytes of one event: the whole vocabulary's top list fits, an endless line does not."""


class EventReader:
    """Server-sent events out of bytes that arrive cut anywhere.

    A line is decoded when it is whole, so that no character is cut. Comments (pings) are skipped;
    old builds sent faults as `error:` fields.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """The events that became whole with `chunk`.

        Raises EngineBroke for what is no JSON, and for an event that does not end.
        """
        self._rest += chunk
        while (end := self._rest.find(b"\n")) >= 0:
            line = self._rest[:end].decode("utf-8", "replace").removesuffix("\r")
            del self._rest[: end + 1]
            if not line:
                yield from self._whole()
            elif line.startswith(("data:", "error:")):
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                self._data.append(value if field == "data" else f'{{"error":{value}}}')
        if len(self._rest) > LONGEST:
            raise EngineBroke("it sent an event without end")

    def close(self) -> Iterator[dict[str, Any]]:
        """The event that was not followed by an empty line, if there is one and it is whole."""
        try:
            yield from self.feed(b"\n\n")
        except EngineBroke:
            return

    def _whole(self) -> Iterator[dict[str, Any]]:
        text, self._data = "\n".join(self._data), []
        if not text or text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError as error:
            raise EngineBroke(f"it sent what is no JSON: {text[:80]!r}") from error
        if not isinstance(event, dict):
            raise EngineBroke(f"it sent what is no event: {text[:80]!r}")
        yield event
