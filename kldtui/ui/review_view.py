"""What the review screen shows: it owns the cursor and the list, and hands them to its panes.

Knows: which pane shows what of the session, and when to bring it up to date.
Must not know: what the actions do, how panes draw, or any format.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.worker import Worker, WorkerState

from kldtui.config import Config
from kldtui.demo import Demo, Ready
from kldtui.errors import KldtuiError, LabelFileError
from kldtui.index import Progress, State
from kldtui.labels import LabelStore
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import branch_words, words
from kldtui.ui.actions import bindings
from kldtui.ui.bars import ClassesPanel, KeyBar, Minimap, StatusBar
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.detail_view import DetailView
from kldtui.ui.list_screen import REST
from kldtui.ui.messages import (
    CursorMoved,
    EnginesChanged,
    EngineStarted,
    Notice,
    Preparing,
    RootChosen,
    ScanAdvanced,
    TextLearnt,
)
from kldtui.ui.root_list import RootList
from kldtui.ui.search_screen import SearchScreen
from kldtui.ui.stream import StreamView
from kldtui.ui.text import plain
from kldtui.vocab import safe

CREW_SECONDS = 1.0
WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that scan; the others are for the screen, and for whatever else runs."""
COUNT_SECONDS = 0.4
LONG_COUNT_SECONDS = 2.0
"""Between two figures of a scan, and of a long one. After each frame Textual has the next, which
may be a key's, wait for up to two of its ticks."""
HANDS_OFF_SECONDS = 0.5
BUSY_COUNT_SECONDS = 10.0
"""Between two lists of a long scan while keys come, each sooner after the one before than that."""
SETTLE_SECONDS = 0.35
RESUMED = 20_000
"""Of a list of so many roots each label is looked up to find where to go on."""
PANES = ("roots", "stream", "detail", "left", "right")


class ReviewView(SearchScreen):
    """Everything a review needs, on one screen; ReviewScreen adds what can be done."""

    BINDINGS: ClassVar[list[BindingType]] = list(bindings())
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-tiny"),
        (66, "-narrow"),
        (110, "-medium"),
        (170, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-short"),
        (32, "-tall"),
    ]

    heat: reactive[str] = reactive("kld", init=False, repaint=False)
    judging: reactive[bool] = reactive(False, init=False, repaint=False)

    def __init__(self, session: Session, config: Config, demo: Demo | None = None) -> None:
        super().__init__(session, config)
        self._demo = demo
        self.auto_branch = config.auto_branch
        self.unsaved = False
        self.how = "order"
        self._scan_words = ""
        self._counted = self._told = 0.0
        self.touched = -math.inf
        """When a person last pressed something, by time.monotonic()."""
        self._loaded = True
        self._key_bar: KeyBar | None = None
        self._cancel_scan = threading.Event()
        self.moved_by_hand = False

    # ── layout ───────────────────────────────────────────────────────────────────────────────

    def compose(self) -> ComposeResult:
        session, config = self.session, self.config
        yield StatusBar(id="status")
        with Horizontal(id="upper"):
            yield RootList(session, id="roots")
            with Vertical(id="centre"):
                yield StreamView(
                    session, (config.heat_low, config.heat_high), id="stream"
                ).data_bind(ReviewView.cursor, ReviewView.quant, ReviewView.heat)
                yield Minimap(id="minimap")
            yield DetailView(session, id="detail")
            yield ClassesPanel(id="classes")
        with Horizontal(id="pair"):
            yield BranchPane(session, "left", id="left")
            yield BranchPane(session, "right", id="right")
        self._key_bar = KeyBar(id="keys")
        yield self._key_bar

    def on_mount(self) -> None:
        self.cursor = self._first_cursor()
        self.run_worker(self._scan, thread=True, group="scan", exclusive=True, exit_on_error=False)
        if self.session.labels is not None:
            for warning in self.session.labels.warnings:
                self.say(warning, "warning")
        for log in self.session.shelf.logs:
            for warning in log.warnings:
                self.say(safe(warning), "warning")
        self.desk.connect_all()
        if self._demo is not None:
            self.run_worker(self._serve, thread=True, group="demo", exit_on_error=False)
        self.query_one(StreamView).focus()
        self.refresh_list(keep=False)
        self.refresh_all()

    async def on_unmount(self) -> None:
        self._cancel_scan.set()
        self._cancel_search.set()
        await self.session.close_engines()

    def _first_cursor(self) -> Position:
        layout = self.session.index.layout
        return layout.position(0) if layout.n else Position(0, 0)

    # ── the background pass ──────────────────────────────────────────────────────────────────

    def _scan(self) -> None:
        """In a thread: fill the index, and follow recordings that are still being written."""
        told, roots = -1, False
        index = self.session.index
        # In processes, where there is much to do: a thread would keep keys waiting. But not while
        # the screen has still to open.
        crew = index.crew(WORKERS, after=CREW_SECONDS)
        try:
            with crew or nullcontext():
                for progress in index.scan(
                    self._cancel_scan, workers=WORKERS, follow=True, crew=crew
                ):
                    if progress.stage != "waiting":
                        complete = progress.stage == "rest" and not roots
                        roots = progress.stage == "rest"
                        self.post_message(ScanAdvanced(progress, roots=complete))
                    elif progress.total != told:
                        told = progress.total
                        self.post_message(ScanAdvanced(None, done=True))
                if not self._cancel_scan.is_set():
                    self.post_message(ScanAdvanced(None, done=True))
        except KldtuiError as error:
            self.post_message(ScanAdvanced(None, done=True, failed=str(error)))

    # ── the demo's engines ───────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        """Bring the demo's engines up, in a thread: the screen is in use meanwhile."""
        if self._demo is None:
            return
        try:
            for event in self._demo.serve():
                if isinstance(event, Ready):
                    role = "ref" if event.role == "ref" else self.session.names[0]
                    self.post_message(EngineStarted(role, event.url, event.program))
                else:
                    self.post_message(Preparing(words.step_words(event)))
        except KldtuiError as error:
            if not self._demo.cancel.is_set():
                self.post_message(Notice(f"branches stay off: {error}", "warning"))
        self.post_message(Preparing(""))

    def on_engine_started(self, event: EngineStarted) -> None:
        self.desk.replace(event.role, event.url, event.program)

    def key_came(self) -> None:
        """A person pressed something."""
        self.touched = time.monotonic()
        if self._key_bar is not None:
            self._key_bar.key_came()

    def on_preparing(self, event: Preparing) -> None:
        self.desk.prepare(event.words)

    def on_scan_advanced(self, event: ScanAdvanced) -> None:
        if event.progress is not None:
            self._scan_words = words.scan_words(event.progress)
        if event.done:
            self._scan_words, self.scanned = "", True
            if event.failed:
                self._scan_words = "scan stopped"
                self.say(event.failed, "error")
        settled = event.done or event.roots
        self.rooted |= settled
        now = time.monotonic()
        least = LONG_COUNT_SECONDS if self.session.is_long else COUNT_SECONDS
        pause = max(least, REST * self.list_seconds)
        if self.session.is_long and now - self.touched < HANDS_OFF_SECONDS:
            pause = max(pause, BUSY_COUNT_SECONDS)
        if not settled and now - self._counted < pause:
            if now - self._told >= least:
                self._told = now
                self.refresh_status()
            return
        self._counted = self._told = now
        resume = settled and not self.moved_by_hand and not event.failed
        self._loaded = event.progress is not None and not self._on_screen(event.progress)
        self.refresh_list(then=self._resume if resume else None, count=True)
        if not self.session.is_long:
            self.list_changed(True)

    def list_changed(self, counted: bool) -> None:
        """The list, and perhaps the figures, are those of a later moment: the panes follow."""
        if not counted:
            return
        if not self._loaded:
            self.query_one(StreamView).load()
        self._loaded = True
        self.refresh_all()

    def _on_screen(self, progress: Progress) -> bool:
        """Whether what was filled lies in the chunk that is shown."""
        where = self.session.index.layout.chunk_slice(self.cursor.chunk)
        return bool(progress.first < where.stop and where.start < progress.last)

    def _resume(self) -> None:
        """Start where the person stood: at the first unlabelled root after the last one, or at
        that where it was not judged yet."""
        labels, n = self.session.labels, int(self.rows.size)
        if not n or self.moved_by_hand:
            return
        if labels is None or labels.last is None:
            self.choose(0)
            return
        if n > RESUMED:
            self._resume_in_many(labels)
            return
        pairs = [
            (self.session.position(int(i)), self.session.names[k])
            for i in self.rows
            for k in self.session.flips(int(i))
        ]
        if not pairs:  # a list of what no quant flips at
            self.choose(0)
            return
        at = labels.resume_at(pairs)
        rows = [row for row, i in enumerate(self.rows) for _ in self.session.flips(int(i))]
        self.choose(rows[at], self.session.names.index(pairs[at][1]))

    def _resume_in_many(self, labels: LabelStore) -> None:
        """The same in a long list, without asking for the label of each."""
        if labels.last is None:
            return
        position, name = labels.last
        row = self.places.next_to(self.session.scored_before(position), 1) or 0
        last = self.session.names.index(name) if name in self.session.names else 0
        self.choose(row, last if last in self.owners(int(self.rows[row])) else None)
        passed = self.cursor == position and not labels.last_is_open
        if passed or self.session.class_of(self.cursor, self.quant) is not None:
            self.advance()

    def advance(self) -> bool:
        """On to the next root without a label: first the other quants here, then down the list."""
        n = int(self.rows.size)
        here, begin = (self.cursor, self.quant), self.row_of_cursor()
        for step in range(n):
            row = ((begin or 0) + step) % n
            i = int(self.rows[row])
            position = self.session.position(i)
            for quant in self.owners(i):
                known = self.session.class_of(position, quant)
                if known is None and (position, quant) != here:
                    self.choose(row, quant)
                    return True
        return False

    # ── what is shown ────────────────────────────────────────────────────────────────────────

    @property
    def flat(self) -> int | None:
        """The flat index under the cursor, where it is scored."""
        return self.session.flat(self.cursor)

    def refresh_all(self) -> None:
        """Bring everything but the list and the stream up to date."""
        self.refresh_status()
        self.refresh_here()
        self.refresh_keys()

    def refresh_keys(self) -> None:
        judging, busy = self.judging, self.desk.busy
        entries = branch_words.key_entries(
            judging, busy, self.has_branches, self.grows, self.config.keys
        )
        self.query_one(KeyBar).show(entries)

    def refresh_here(self) -> None:
        """Bring what is said of the place under the cursor up to date."""
        n = self.session.index.layout.n
        if n:
            self.query_one(Minimap).place(self.session.scored_before(self.cursor) / n)
        self.refresh_detail()
        self.refresh_pair()
        if self.judging:  # only then classes are seen, and what can be done depends on the root
            record = self.session.label(self.cursor, self.quant) if self.flat is not None else None
            hint = branch_words.hint_words(self.session, self.cursor, self.quant)
            panel = self.query_one(ClassesPanel)
            note = safe(record.note) if record is not None and record.note else ""
            panel.show(record.key if record else None, hint, note)
            names = self.session.names
            of = f" of {safe(names[self.quant])}" if len(names) > 1 else ""
            panel.border_title = plain(f"your judgement{of}")
            self.refresh_keys()
            self.refresh_status()

    def refresh_status(self) -> None:
        """Bring the line above up to date; of the cursor it tells only what is judged."""
        activity = self.desk.activity or self.searching
        left, right = words.status_parts(
            self.session,
            self.quant,
            self._scan_words,
            activity,
            self.unsaved,
            self.facts if self.judging else None,
        )
        self.query_one(StatusBar).show(left, right)

    def store(self, change: Callable[[], object]) -> bool:
        """Do something that writes; a disk that refuses is said, and the program goes on."""
        try:
            change()
        except LabelFileError as error:
            self.unsaved = True
            self.say(str(error), "error")
            return False
        labels = self.session.labels  # there may have been nothing to write
        self.unsaved = self.unsaved and labels is not None and labels.unsaved
        return True

    def refresh_after_label(self) -> None:
        """A label or a note changed: list, stream and bars show it."""
        self.query_one(StreamView).load()
        self.refresh_list()
        self.refresh_all()

    def is_shown(self, pane: str) -> bool:
        """Whether a pane has room on screen."""
        return self.query_one(f"#{pane}").region.area > 0

    def action_zoom(self) -> None:
        focused = self.focused
        first = focused.id if focused is not None and focused.id in PANES else "stream"
        shown = (name for name in (first, "stream", *PANES) if self.is_shown(str(name)))
        name = next(shown, "stream")
        zoomed = self.has_class("zoomed")
        for pane in PANES:
            self.set_class(not zoomed and pane == name, f"zoom-{pane}")
        self.set_class(not zoomed, "zoomed")

    # ── state ────────────────────────────────────────────────────────────────────────────────

    async def _dispatch_message(self, message: Message) -> None:
        """As of any screen; what a file refuses is said, as of an action (see app.py)."""
        try:
            await super()._dispatch_message(message)
        except KldtuiError as error:
            self.say(str(error), "error")

    def validate_cursor(self, to: Position) -> Position:
        """Stay where one is, if a chunk cannot be read any more: nothing of it could be shown."""
        try:
            self.session.chunk_tokens(to.chunk)
        except KldtuiError as error:
            if self.is_mounted:
                self.say(str(error), "error")
            return self.cursor
        return to

    def watch_cursor(self) -> None:
        if not self.is_mounted:
            return
        i = self.flat
        if i is not None and self.session.quants:
            self.quant = self._quant_for(i)
            if self.session.index.pairs[self.quant]["state"][i] == State.PENDING:
                self._scan_here()
        self.reset_pair()
        self.query_one(RootList).choose(self.row_of_cursor())
        self.refresh_here()
        if self.judging and self.auto_branch:
            self.set_timer(SETTLE_SECONDS, partial(self._branch_if_still_at, self.cursor))

    def _branch_if_still_at(self, position: Position) -> None:
        facts = self.facts
        if position == self.cursor and self.judging and facts is not None and facts.is_root:
            self.desk.branch(self.place, self.session.arms(self.quant))

    def _scan_here(self) -> None:
        """What is on screen does not wait for its turn in the background pass."""
        try:
            self.session.index.scan_position(self.cursor)
        except KldtuiError as error:
            self.say(str(error), "error")

    def watch_quant(self) -> None:
        if self.is_mounted:
            self.refresh_list()
            self.refresh_all()

    def watch_judging(self, judging: bool) -> None:
        self.set_class(judging, "judging")
        self.refresh_all()

    def on_cursor_moved(self, event: CursorMoved) -> None:
        self.moved_by_hand, self.how = True, "hand"
        self.cursor = event.position

    def on_root_chosen(self, event: RootChosen) -> None:
        self.choose(event.row)

    def choose(self, row: int, quant: int | None = None) -> None:
        """Go to a row of the list, and look at the quant that it is there for."""
        i = int(self.rows[row])
        self.moved_by_hand = True
        narrowed = self.filter.describe()
        self.how = f"filter:{narrowed}" if narrowed else f"order:{self.order}"
        self.cursor = self.session.position(i)
        self.quant = quant if quant is not None else self._quant_for(i)

    def owners(self, i: int) -> tuple[int, ...]:
        """The quants that flip at a flat index, as far as the filter lets them."""
        flips = self.session.flips(i)
        if self.filter.quant is None:
            return flips
        wanted = self.session.names.index(self.filter.quant)
        return (wanted,) if wanted in flips else ()

    def _quant_for(self, i: int) -> int:
        """The quant to look at there: the one looked at, if it flips, else the first that does."""
        owners = self.owners(i)
        if not owners:
            return self.session.names.index(self.filter.quant) if self.filter.quant else self.quant
        return self.quant if self.quant in owners else owners[0]

    def on_engines_changed(self, _event: EnginesChanged) -> None:
        self.refresh_status()
        self.refresh_pair()
        self.refresh_keys()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """What a worker did not foresee is said, and the program goes on."""
        if event.state == WorkerState.ERROR:
            error, name = event.worker.error, event.worker.name or "background work"
            known = isinstance(error, KldtuiError)
            self.say(str(error) if known else f"{name}: {error!r}", "error")

    def on_text_learnt(self, _event: TextLearnt) -> None:
        self.query_one(StreamView).forget_text()
        self.refresh_list()
        self.refresh_all()

    def on_notice(self, event: Notice) -> None:
        self.say(event.text, event.severity)  # type: ignore[arg-type]

    def on_minimap_picked(self, event: Minimap.Picked) -> None:
        n = self.session.index.layout.n
        if n:
            self.moved_by_hand = True
            self.cursor = self.session.position(min(n - 1, int(event.share * n)))
