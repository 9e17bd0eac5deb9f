"""Searching the stream's text, in the background.

Knows: what is looked for, what was found so far, and how far the search is.
Must not know: how the session finds text, keys, or what hits look like.
"""

from __future__ import annotations

import threading
import time

from kldtui.config import Config
from kldtui.errors import KldtuiError
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui.list_screen import ListScreen
from kldtui.ui.messages import SearchAdvanced
from kldtui.ui.stream import StreamView

TOLD_SECONDS = 0.25


class SearchScreen(ListScreen):
    """A screen that searches."""

    def __init__(self, session: Session, config: Config) -> None:
        super().__init__(session, config)
        self.needle = ""
        self.hits: list[Position] = []
        """What was found so far, ascending."""
        self.searching = ""
        """How far the search is, in words; empty while there is none."""
        self._cancel_search = threading.Event()

    def refresh_status(self) -> None:
        """Show what goes on."""

    def start_search(self, needle: str) -> None:
        """Look for a text in the background; hits come as they are found."""
        self._cancel_search.set()
        self._cancel_search = cancel = threading.Event()
        self.needle, self.hits = needle, []
        stream = self.query_one(StreamView)
        stream.hits = self.hits
        stream.load()

        def look() -> None:
            waiting: list[Position] = []
            chunk, told, failed = 0, time.monotonic(), ""
            try:
                for chunk, hits in self.session.search(needle):
                    if cancel.is_set():
                        return
                    waiting += hits
                    if time.monotonic() - told >= TOLD_SECONDS:
                        told = time.monotonic()
                        self.post_message(SearchAdvanced(needle, waiting, chunk))
                        waiting = []
            except KldtuiError as error:
                failed = str(error)
            self.post_message(SearchAdvanced(needle, waiting, chunk, done=True, failed=failed))

        self.run_worker(look, thread=True, group="search", exclusive=True, exit_on_error=False)

    def stop_search(self) -> bool:
        """End a search that goes on; what it has found stays. False if none does."""
        if not self.searching:
            return False
        self._cancel_search.set()
        self.searching = ""
        self.refresh_status()
        return True
