"""The root list of a screen: asked for at once, or in the background where that takes long.

Knows: filter, order, the rows they give, and how a row is found again.
Must not know: how rows are drawn, what is done with them, or how the session finds them.

A list over millions of positions is made in a thread; the screen stays as it was until it is
there, and whatever depends on it is done then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from textual.message import Message

from kldtui.config import Config
from kldtui.errors import KldtuiError
from kldtui.review.listing import Filter, Order
from kldtui.review.session import Session
from kldtui.ui import words
from kldtui.ui.bars import Minimap
from kldtui.ui.pair_screen import PairScreen
from kldtui.ui.root_list import RootList

REST = 10.0
"""Between two lists of a scan lies so many times what the last one took."""
SOON = 20_000
"""So many of the list are asked to be completed first."""


class Places:
    """The rows of a list, and in which row a flat index is. ordered: the rows, ascending."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        """rows: flat indices, each once, in any order. int64[k]."""
        self.rows = rows
        self._order: NDArray[np.int64] | None = None
        if rows.size > 1 and not bool((rows[1:] > rows[:-1]).all()):
            self._order = np.argsort(rows, kind="stable")
        self.ordered = rows if self._order is None else rows[self._order]

    def find(self, i: int) -> int | None:
        """The row of a flat index; None where the list does not have it."""
        at = int(np.searchsorted(self.ordered, i))
        if at >= self.ordered.size or self.ordered[at] != i:
            return None
        return at if self._order is None else int(self._order[at])

    def next_to(self, here: int, step: int) -> int | None:
        """The row of the nearest flat index from `here` on (step > 0), or before it."""
        at = int(np.searchsorted(self.ordered, here)) - (step <= 0)
        if not 0 <= at < self.ordered.size:
            return None
        return at if self._order is None else int(self._order[at])


@dataclass(frozen=True, slots=True)
class Listed:
    """A list as it was asked for. cells: how many of its roots lie in each cell of the minimap;
    trouble: why it is still the one before, if it is."""

    filter: Filter
    order: Order
    places: Places
    cells: NDArray[np.int64]
    trouble: str = ""


class ListScreen(PairScreen):
    """A screen with a root list and a minimap."""

    class Made(Message):
        """A list was made in the background. asked: by which request; counted: figures too."""

        def __init__(self, listed: Listed, asked: int, counted: bool) -> None:
            super().__init__()
            self.listed, self.asked, self.counted = listed, asked, counted

    def __init__(self, session: Session, config: Config) -> None:
        super().__init__(session, config)
        self.filter = Filter()
        self.order = cast(Order, config.root_order)
        self.places = Places(np.zeros(0, np.int64))
        self.scanned = self.rooted = False
        """Whether the scan has come to its end, and to that of its first pass."""
        self._lock = threading.Lock()
        self._asked, self._count, self._busy = 0, False, False
        self._waiting: list[tuple[int, bool, Callable[[], None] | None]] = []
        self._list_trouble = ""
        self.list_seconds = 0.0
        """How long the last list took."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """The flat indices of the list, int64[k]."""
        return self.places.rows

    @property
    def list_busy(self) -> bool:
        """Whether a list is being made in the background, or has not been taken yet."""
        return self._busy or bool(self._waiting)

    def row_of_cursor(self) -> int | None:
        """The row of the position under the cursor."""
        i = self.session.flat(self.cursor)
        return self.places.find(i) if i is not None else None

    def refresh_list(
        self,
        keep: bool = True,
        then: Callable[[], None] | None = None,
        count: bool = False,
    ) -> None:
        """Ask for the list again, and keep the chosen root chosen.

        then: what depends on the list; done at once, but for long streams. count: count the
        session's figures anew, too.
        """
        if not self.session.is_long:
            if count:
                self._count_anew()
            self._take(self._make(self.filter, self.order), keep)
            if then is not None:
                then()
            return
        with self._lock:
            self._asked += 1
            self._count |= count
            self._waiting.append((self._asked, keep, then))
            busy, self._busy = self._busy, True
        if not count:  # a person asked, and is told that it takes a moment
            self._title("… ")
        if not busy:
            self.run_worker(self._make_all, thread=True, group="list", exit_on_error=False)

    def _make(self, wanted: Filter, order: Order) -> Listed:
        if not self.session.quants:
            return Listed(wanted, order, self.places, np.zeros(0, np.int64))
        places, trouble = self.places, ""
        try:
            places = Places(self.session.listed(wanted, order))
        except KldtuiError as error:
            trouble = str(error)
        width = max(1, self.query_one(Minimap).size.width)
        n = self.session.index.layout.n
        return Listed(wanted, order, places, Minimap.cells(places.ordered, n, width), trouble)

    def _make_all(self) -> None:
        """In a thread: make the list until it is the one that was asked for last."""
        while True:
            began = time.monotonic()
            with self._lock:
                asked, count, self._count = self._asked, self._count, False
            try:
                if count:
                    self._count_anew()
                listed = self._make(self.filter, self.order)
            except BaseException:
                self._busy = False  # the next one asked for is made
                raise
            self.session.index.release()
            self.list_seconds = time.monotonic() - began
            self.post_message(self.Made(listed, asked, count))
            with self._lock:
                if self._asked == asked:
                    self._busy = False
                    return

    def _count_anew(self) -> None:
        if self.rooted:
            self.session.settle_thresholds()
        self.session.count_anew()

    def on_list_screen_made(self, event: Made) -> None:
        due = [each for each in self._waiting if each[0] <= event.asked]
        self._waiting = [each for each in self._waiting if each[0] > event.asked]
        self._take(event.listed, all(keep for _, keep, _ in due))
        for _, _, then in due:
            if then is not None:
                then()
        self.list_changed(event.counted)

    def list_changed(self, counted: bool) -> None:
        """A list came in from the background. counted: and the figures are new."""

    def _take(self, listed: Listed, keep: bool) -> None:
        self.places = listed.places
        if listed.trouble and listed.trouble != self._list_trouble:
            self.say(listed.trouble, "error")
        self._list_trouble = listed.trouble
        roots = self.query_one(RootList)
        metric = listed.order if listed.order in ("cost", "margin") else "kld"
        roots.empty = words.empty_words(self.session, listed.filter, self.scanned)
        roots.show(self.rows, self.row_of_cursor() if keep else None, self.quant, metric)
        self.query_one(Minimap).show(self.places.ordered, self.session.index.layout.n, listed.cells)
        self._title("")
        self.prefer()

    def _title(self, before: str) -> None:
        title = words.list_title(self.filter, self.order, int(self.rows.size))
        self.query_one(RootList).named(before + title)

    def prefer(self) -> None:
        """Have the scan take first what is on screen, and then the list."""
        index = self.session.index
        where = index.layout.chunk_slice(self.cursor.chunk) if index.layout.n else slice(0, 0)
        shown = [*self.query_one(RootList).shown.tolist(), *range(where.start, where.stop)]
        index.prefer(np.array(shown, np.int64), self.rows[:SOON])
