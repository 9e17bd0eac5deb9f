"""The Textual application: one review screen, the palette, and what every screen shares.

Knows: how the program starts and ends on a terminal.
Must not know: what a review does (the screens do).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import ClassVar

from textual import events
from textual.actions import ActionParseResult
from textual.app import App
from textual.binding import BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.theme import BUILTIN_THEMES

from kldtui.config import Config
from kldtui.demo import Demo
from kldtui.errors import ConfigError, KldtuiError
from kldtui.review.session import Session
from kldtui.ui.actions import ACTIONS, Action, keys_of
from kldtui.ui.dialogs import PROMPTS, Dialog
from kldtui.ui.review import ReviewScreen
from kldtui.ui.turns import Turns
from kldtui.vocab.glyphs import harmless

SWITCH_SECONDS = 0.0005
PALETTE_LINES = 6
BACK_SECONDS = 0.02
"""After a key, what takes long stands back: for about as long as the next frame takes."""


class ActionCommands(Provider):
    """The palette: every action of the table, with its keys."""

    def _actions(self) -> Iterator[tuple[Action, str]]:
        app = self.app
        keymap: Mapping[str, str] = app.config.keys if isinstance(app, KldtuiApp) else {}
        for action in ACTIONS:
            if action.help and action.id != "palette":
                yield action, f"{action.title}  ({keys_of(action, keymap)})"

    async def discover(self) -> Hits:
        for action, words in self._actions():
            yield DiscoveryHit(words, self._doing(action), help=action.help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action, words in self._actions():
            score = max(matcher.match(words), matcher.match(action.help))
            if score > 0:
                yield Hit(score, words, self._doing(action), help=action.help)

    def _doing(self, action: Action):  # type: ignore[no-untyped-def]
        screen = self.screen

        async def do() -> None:
            await screen.run_action(action.call)

        return do


def check_theme(name: str) -> None:
    """Raises ConfigError for what is no theme."""
    if name not in BUILTIN_THEMES:
        known = ", ".join(BUILTIN_THEMES)
        raise ConfigError(f"config: there is no theme {name!r}; there are {known}")


class KldtuiApp(App[None]):
    """A review of one session. The session stays open when the app ends; its owner closes it."""

    CSS_PATH = "kldtui.tcss"
    TITLE = "kldtui"
    COMMANDS: ClassVar[set[type[Provider] | object]] = {ActionCommands}  # type: ignore[assignment]
    BINDINGS: ClassVar[list[BindingType]] = []
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, session: Session, config: Config, demo: Demo | None = None) -> None:
        super().__init__()
        self.session, self.config = session, config
        self.review = ReviewScreen(session, config, demo)
        self._turns = Turns(self, super().on_event, self._between_dialogs)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent):
            self.session.index.stand_back(BACK_SECONDS)
            self.review.key_came()
        if not isinstance(event, events.Key):
            await super().on_event(event)
        elif not event.is_forwarded:
            await self._turns.come(event)
        else:
            await super().on_event(event)
            await self._turns.came_back(event)

    def _between_dialogs(self) -> bool:
        """Whether a dialog was asked for that does not take keys yet, or what asked for one that
        is closed has still to see the answer."""
        if isinstance(self.screen, Dialog):
            return not self.screen.is_ready
        return any(work.group == PROMPTS and not work.is_finished for work in self.workers)

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """As of any app; what a file or a server refuses is said, and the review goes on."""
        try:
            return await super().run_action(action, default_namespace, namespaces)
        except KldtuiError as error:
            self.notify(harmless(str(error)), severity="error", markup=False)
            return True

    def _end(self, number: int) -> None:
        """Leave as a person would, so that the session saves, or rescues, what it has."""
        self.exit(return_code=128 + number)

    def action_command_palette(self) -> None:
        """As of any app, where there is room for it: Textual's own ends the program elsewhere."""
        if self.size.height >= PALETTE_LINES:
            super().action_command_palette()

    def on_mount(self) -> None:
        if self.config.theme in self.available_themes:
            self.theme = self.config.theme
        self.set_keymap(dict(self.config.keys))
        for number in (signal.SIGTERM, signal.SIGHUP):  # the end of a machine, or of a terminal
            with contextlib.suppress(RuntimeError, ValueError):  # not the program's own thread
                asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        # Python hands the interpreter from thread to thread every so often: a scan in another
        # thread would keep each key waiting for 5 ms, several times.
        sys.setswitchinterval(SWITCH_SECONDS)
        self.push_screen(self.review)
        self.call_later(gc.freeze)  # what is there by now stays; do not look at it again and again
