"""Keys take turns: each is taken whole, with the dialog that it opens or closes, before the next.

Knows: how a key goes from the app to what has the focus, and back up to whose binding it is.
Must not know: what any key does.

Over a slow line, keys come in bursts. Textual hands each of them on at once, to what has the focus
at that moment: the note that is typed behind `m` would be keys of the review, and the keys behind
an Enter would go into the line that it closes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from textual import events
from textual.app import App
from textual.message_pump import MessagePump
from textual.widgets import Input

LOST_SECONDS = 0.25
"""Something may have stopped a key on its way back."""
DIALOG_SECONDS = 1.0
LOOK_SECONDS = 0.01


class Turns:
    """hand_on: gives a key to Textual. between: whether a dialog is about to open or to close."""

    def __init__(
        self,
        app: App[Any],
        hand_on: Callable[[events.Key], Awaitable[None]],
        between: Callable[[], bool],
    ) -> None:
        self._app, self._hand_on, self._between = app, hand_on, between
        self._waiting: deque[events.Key] = deque()
        self._key: events.Key | None = None
        self._line: Input | None = None
        self._began = 0.0

    async def come(self, key: events.Key) -> None:
        """A key was pressed: hand it on, now or in its turn."""
        self._waiting.append(key)
        if self._key is None:
            await self._take()
        elif len(self._waiting) == 1:
            self._look_later(LOST_SECONDS)

    async def came_back(self, key: events.Key) -> None:
        """A key has come back to the app, and what it is bound to has been done."""
        if key is not self._key:
            return
        if key.key == "enter" and self._line is not None:
            # An input tells in a message that it was sent off: this one comes behind that.
            await self._follow(key, list(self._line.ancestors_with_self))
        else:
            await self._taken(key)

    async def _take(self) -> None:
        key = self._key = self._waiting.popleft()
        focused = self._app.focused
        self._line = focused if isinstance(focused, Input) else None
        self._began = time.monotonic()
        await self._hand_on(key)
        if not key.is_forwarded or (self._line is not None and key.is_printable):
            await self._taken(key)
        elif self._waiting:
            self._look_later(LOST_SECONDS)

    async def _follow(self, key: events.Key, path: Sequence[MessagePump]) -> None:
        """Go from queue to queue: it arrives when what was in them before is done."""
        for k, pump in enumerate(path, 1):
            if pump.call_later(self._follow, key, path[k:]):
                return
        await self._taken(key)

    def _look_later(self, seconds: float) -> None:
        if self._key is not None:
            self._app.set_timer(seconds, partial(self._taken, self._key))

    async def _taken(self, key: events.Key) -> None:
        if key is not self._key:
            return
        if self._between() and time.monotonic() - self._began < DIALOG_SECONDS:
            self._look_later(LOOK_SECONDS)
            return
        self._key = None
        if self._waiting:
            await self._take()
