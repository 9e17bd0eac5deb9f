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
from textual.screen import ModalScreen

LOST_SECONDS = 0.25
"""What was to say that a key is taken may have been closed by it."""
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
        self._number = 0
        self._taking = self._ended = False
        self._began = 0.0

    def end(self) -> None:
        """The app is being left: keys that are still to come mean nothing any more."""
        self._ended = True
        self._waiting.clear()

    async def come(self, key: events.Key) -> None:
        """A key was pressed: hand it on, now or in its turn."""
        if self._ended:
            return
        self._waiting.append(key)
        if not self._taking:
            await self._take()
        elif len(self._waiting) == 1:
            self._app.set_timer(LOST_SECONDS, partial(self._taken, self._number))

    async def _take(self) -> None:
        self._number, self._taking, self._began = self._number + 1, True, time.monotonic()
        path = list((self._app.focused or self._app.screen).ancestors_with_self)
        if isinstance(self._app.screen, ModalScreen):
            path *= 2  # an input tells in a message of its own that it was sent off
        await self._hand_on(self._waiting.popleft())
        await self._follow(self._number, path)

    async def _follow(self, number: int, path: Sequence[MessagePump]) -> None:
        """Go the way of the key behind it, from queue to queue: it arrives when that is done."""
        for k, pump in enumerate(path, 1):
            if pump.call_later(self._follow, number, path[k:]):
                return
        await self._taken(number)

    async def _taken(self, number: int) -> None:
        if number != self._number or not self._taking:
            return
        if self._between() and time.monotonic() - self._began < DIALOG_SECONDS:
            self._app.set_timer(LOOK_SECONDS, partial(self._taken, number))
            return
        self._taking = False
        if self._waiting:
            await self._take()
            if self._waiting:
                self._app.set_timer(LOST_SECONDS, partial(self._taken, self._number))
