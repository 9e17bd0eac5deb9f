"""What the review screen shows: it owns the cursor and the list, and hands them to its panes.

Knows: which pane shows what of the session, and when to bring it up to date.
Must not know: what the actions do (rewords.py), how panes draw, or any format.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual.worker import Worker, WorkerState

from kldtui.config import Config
from kldtui.demo import Demo, Ready
from kldtui.errors import KldtuiError, LabelFileError
from kldtui.index import Progress, State
from kldtui.listing import Filter, Order
from kldtui.position import Position
from kldtui.session import Session
from kldtui.ui import branch_words, words
from kldtui.ui.actions import bindings
from kldtui.ui.bars import ClassesPanel, KeyBar, Minimap, StatusBar
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.detail_view import DetailView
from kldtui.ui.messages import (
    CursorMoved,
    EnginesChanged,
    EngineStarted,
    Notice,
    Preparing,
    RootChosen,
    ScanAdvanced,
    SearchAdvanced,
    TextLearnt,
)
from kldtui.ui.pair_screen import PairScreen
from kldtui.ui.root_list import RootList
from kldtui.ui.stream import StreamView
from kldtui.ui.text import plain
from kldtui.vocab import safe

COUNT_SECONDS = 0.4
SETTLE_SECONDS = 0.35
PANES = ("roots", "stream", "detail", "left", "right")


class ReviewView(PairScreen):
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

    heat: reactive[str] = reactive("kld", init=False)
    judging: reactive[bool] = reactive(False, init=False)

    def __init__(self, session: Session, config: Config, demo: Demo | None = None) -> None:
        super().__init__(session, config)
        self._demo = demo
        self.filter = Filter()
        self.order = cast(Order, config.root_order)
        self.auto_branch = config.auto_branch
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self.unsaved = False
        self.hits: list[Position] = []
        self.needle = ""
        self.how = "order"
        self._scan_words = ""
        self.preparing = ""
        self._counted = 0.0
        self.scanned = False
        self._cancel_scan = threading.Event()
        self._cancel_search = threading.Event()
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
        yield KeyBar(id="keys")

    def on_mount(self) -> None:
        self.query_one("#classes").border_title = plain("your judgement")
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
        labels = self.session.labels
        if labels is not None and labels.path.exists():
            labels.cursor = self.cursor
        self._cancel_scan.set()
        self._cancel_search.set()
        await self.session.close_engines()

    def _first_cursor(self) -> Position:
        layout = self.session.index.layout
        return layout.position(0) if layout.n else Position(0, 0)

    # ── the background pass ──────────────────────────────────────────────────────────────────

    def _scan(self) -> None:
        try:
            for progress in self.session.index.scan(self._cancel_scan):
                self.post_message(ScanAdvanced(progress))
        except KldtuiError as error:
            self.post_message(ScanAdvanced(None, done=True, failed=str(error)))
            return
        if not self._cancel_scan.is_set():
            self.post_message(ScanAdvanced(None, done=True))

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

    def on_preparing(self, event: Preparing) -> None:
        self.preparing = event.words
        self.refresh_status()

    def on_scan_advanced(self, event: ScanAdvanced) -> None:
        if event.progress is not None:
            self._scan_words = words.scan_words(event.progress)
        if event.done:
            self._scan_words, self.scanned = "", True
            self.session.settle_thresholds()
            if event.failed:
                self._scan_words = "scan stopped"
                self.say(event.failed, "error")
        now = time.monotonic()
        if not event.done and now - self._counted < COUNT_SECONDS:
            self.refresh_status()
            return
        self._counted = now
        self.session.count_anew()
        self.refresh_list()
        if event.progress is None or self._on_screen(event.progress):
            self.query_one(StreamView).load()
        self.refresh_all()
        if event.done and not self.moved_by_hand and not event.failed:
            self._resume()

    def _on_screen(self, progress: Progress) -> bool:
        """Whether what was filled lies in the chunk that is shown."""
        where = self.session.index.layout.chunk_slice(self.cursor.chunk)
        return bool(progress.first < where.stop and where.start < progress.last)

    def _resume(self) -> None:
        """Start where the person stood: at the first unlabelled root after the last one."""
        labels = self.session.labels
        if labels is not None and labels.last is not None and self.rows.size:
            pairs = [
                (self.session.position(int(i)), self.session.names[k])
                for i in self.rows
                for k in self.session.flips(int(i))
            ]
            at = labels.resume_at(pairs)
            rows = [row for row, i in enumerate(self.rows) for _ in self.session.flips(int(i))]
            self.choose(rows[at], self.session.names.index(pairs[at][1]))
            return
        if self.rows.size:
            self.choose(0)

    # ── what is shown ────────────────────────────────────────────────────────────────────────

    @property
    def flat(self) -> int | None:
        """The flat index under the cursor, where it is scored."""
        return self.session.flat(self.cursor)

    def refresh_list(self, keep: bool = True) -> None:
        """Ask for the root list again, and keep the chosen root chosen."""
        self.rows = (
            self.session.listed(self.filter, self.order) if self.session.quants else self.rows
        )
        roots = self.query_one(RootList)
        metric = self.order if self.order in ("cost", "margin") else "kld"
        roots.empty = words.empty_words(self.session, self.filter, self.scanned)
        roots.show(self.rows, self.row_of_cursor() if keep else None, self.quant, metric)
        n = max(1, self.session.index.layout.n)
        self.query_one(Minimap).show(self.rows / n)
        roots.border_title = plain(words.list_title(self.filter, self.order, int(self.rows.size)))

    def row_of_cursor(self) -> int | None:
        i = self.flat
        if i is None:
            return None
        at = np.flatnonzero(self.rows == i)
        return int(at[0]) if at.size else None

    def refresh_all(self) -> None:
        """Bring status, detail, pair, classes and keys up to the cursor."""
        self.refresh_status()
        self.refresh_detail()
        self.refresh_pair()
        facts = self.facts
        record = self.session.label(self.cursor, self.quant) if facts is not None else None
        hint = branch_words.hint_words(self.session, self.cursor, self.quant)
        self.query_one(ClassesPanel).show(record.key if record else None, hint)
        self.query_one(KeyBar).show(
            branch_words.key_entries(self.judging, self.desk.busy, self.config.keys)
        )

    def refresh_status(self) -> None:
        activity = self.desk.activity or self.preparing
        left, right = words.status_parts(
            self.session, self.quant, self._scan_words, activity, self.unsaved
        )
        self.query_one(StatusBar).show(left, right)
        n = self.session.index.layout.n
        if n:
            self.query_one(Minimap).place(self.session.scored_before(self.cursor) / n)

    def store(self, change: Callable[[], object]) -> bool:
        """Do something that writes; a disk that refuses is said, and the program goes on."""
        try:
            change()
        except LabelFileError as error:
            self.unsaved = True
            self.say(str(error), "error")
            return False
        self.unsaved = False
        return True

    def refresh_after_label(self) -> None:
        """A label or a note changed: list, stream and bars show it."""
        self.query_one(StreamView).load()
        self.refresh_list()
        self.refresh_all()

    def action_zoom(self) -> None:
        focused = self.focused
        shown = focused is not None and focused.id in PANES and focused.region.area > 0
        name = focused.id if focused is not None and shown else "stream"
        zoomed = self.has_class("zoomed")
        for pane in PANES:
            self.set_class(not zoomed and pane == name, f"zoom-{pane}")
        self.set_class(not zoomed, "zoomed")

    # ── searching ────────────────────────────────────────────────────────────────────────────

    def start_search(self, needle: str) -> None:
        """Look for a text in the background; hits come as they are found."""
        self._cancel_search.set()
        self._cancel_search = cancel = threading.Event()
        self.needle, self.hits = needle, []

        def look() -> None:
            waiting: list[Position] = []
            chunk, told = 0, time.monotonic()
            for chunk, hits in self.session.search(needle):
                if cancel.is_set():
                    return
                waiting += hits
                if time.monotonic() - told > 0.25:
                    told = time.monotonic()
                    self.post_message(SearchAdvanced(needle, waiting, chunk))
                    waiting = []
            self.post_message(SearchAdvanced(needle, waiting, chunk, done=True))

        self.run_worker(look, thread=True, group="search", exclusive=True, exit_on_error=False)

    # ── state ────────────────────────────────────────────────────────────────────────────────

    def watch_cursor(self) -> None:
        if not self.is_mounted:
            return
        i = self.flat
        if i is not None and self.session.quants:
            self.quant = self._quant_for(i)
            if self.session.index.pairs[self.quant][i]["state"] == State.PENDING:
                self._scan_here()
        self.reset_pair()
        self.query_one(RootList).choose(self.row_of_cursor())
        self.refresh_all()
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
        self.query_one(KeyBar).show(
            branch_words.key_entries(self.judging, self.desk.busy, self.config.keys)
        )

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """What a worker did not foresee is said, and the program goes on."""
        if event.state == WorkerState.ERROR:
            self.say(f"{event.worker.name or 'background work'}: {event.worker.error!r}", "error")

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
