"""The pair below the stream: which branches it shows, of which place, and the table beside it.

Knows: the session's branches, the panes that show them, and how often they are drawn.
Must not know: keys, roots, labels, or how branches are made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from textual.cache import LRUCache
from textual.reactive import reactive
from textual.screen import Screen

from kldtui.branching import Branch, Meeting, Place
from kldtui.config import Config
from kldtui.errors import KldtuiError
from kldtui.facts import RootFacts
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.ui import branch_words, marks, words
from kldtui.ui.bars import KeyBar
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.desk import Desk
from kldtui.ui.detail_view import DetailView
from kldtui.ui.messages import BranchesChanged, DetailLeft, PartMoved
from kldtui.ui.pairs import Pair, View, other_pairs, root_pairs
from kldtui.vocab.glyphs import harmless

SIDES = ("left", "right")
_MEETINGS = 16
_STANDS_SECONDS = 12.0
_SHARE_DRAWING = 3.0
"""Drawing a growing branch takes at most one part in so many of the time."""


@dataclass(frozen=True, slots=True)
class Showing:
    """A place, its branches by key, the pairs that can be shown of them, and the one that is."""

    place: Place
    held: Mapping[str, Branch]
    pairs: list[Pair]
    pair: Pair

    @property
    def branches(self) -> dict[str, Branch | None]:
        """What is shown left and right."""
        keys = (self.place.key(arm) for arm in self.pair)
        return {side: self.held.get(key) for side, key in zip(SIDES, keys, strict=True)}


class PairScreen(Screen[None]):
    """The part of the review that is about branches; it shows them and makes none."""

    cursor: reactive[Position] = reactive(Position(0, 0), init=False, repaint=False)
    quant: reactive[int] = reactive(0, init=False, repaint=False)

    def __init__(self, session: Session, config: Config) -> None:
        super().__init__()
        self.session, self.config = session, config
        self.desk = Desk(session, self, config.branch_tokens, config.top_n_stored)
        self.views: list[View] = []
        self._chosen: Pair | None = None
        self._part: tuple[str, int | None] = ("left", None)
        self._warned = 0
        self._meetings: LRUCache[tuple[object, ...], Meeting | None] = LRUCache(_MEETINGS)
        self._drawn_until = 0.0
        self._draw_due = False
        self._trouble = ""
        self._stands_until: dict[str, float] = {}

    @property
    def facts(self) -> RootFacts | None:
        """What the index says under the cursor, where it is scored."""
        i = self.session.flat(self.cursor)
        if i is None or not self.session.quants:
            return None
        return self.session.facts(i, self.quant)

    def say(
        self, text: str, severity: Literal["information", "warning", "error"] = "information"
    ) -> None:
        """Say something: in passing in the key line, what went wrong over the context; there it is
        not said again while it still stands. Names of files and servers in it drive nothing."""
        text = harmless(text)
        if severity == "information":
            self.query_one(KeyBar).tell(text)
            return
        now = time.monotonic()
        if now >= self._stands_until.get(text, now):
            self._stands_until = {k: end for k, end in self._stands_until.items() if end > now}
            self._stands_until[text] = now + _STANDS_SECONDS
            self.notify(text, severity=severity, markup=False, timeout=_STANDS_SECONDS)

    # ── which pair ───────────────────────────────────────────────────────────────────────────

    @property
    def place(self) -> Place:
        """The place whose branches are shown: the cursor's, or one that was gone to from there."""
        if self.views:
            return self.views[-1].place
        return self.session.place(self.cursor, self.quant)

    @property
    def showing(self) -> Showing:
        """What there is to be shown of the place, and what of it is."""
        place, view = self.place, self.views[-1] if self.views else None
        held = self.session.recall(self.cursor, self.quant) if self.session.quants else {}
        if view is not None:
            return Showing(place, held, other_pairs(view, held), view.pair)
        pairs = root_pairs(place, held, self.session.arms(self.quant))
        return Showing(place, held, pairs, self._chosen if self._chosen is not None else pairs[0])

    @property
    def pairs(self) -> list[Pair]:
        """The pairs that can be shown of the place, in turn."""
        return self.showing.pairs

    @property
    def pair(self) -> Pair:
        """The two arms side by side."""
        return self.showing.pair

    def show_pair(self, pair: Pair) -> None:
        """Put two other arms of the place side by side."""
        if self.views:
            view = self.views[-1]
            self.views[-1] = View(view.place, pair, view.pane, view.token)
        else:
            self._chosen = pair
        self.refresh_pair()
        self.refresh_detail()

    def reset_pair(self) -> None:
        """The cursor moved: its own branches, and each model's own ones first."""
        self.views = []
        self._chosen = None
        self._part = ("left", None)

    def branches(self) -> dict[str, Branch | None]:
        """What is shown left and right."""
        return self.showing.branches

    @property
    def has_branches(self) -> bool:
        """Whether there is a branch of the pair."""
        return any(branch is not None for branch in self.branches().values())

    @property
    def grows(self) -> bool:
        """Whether a branch of the pair can be made longer."""
        shown = self.branches().values()
        return any(b is not None and branch_words.goes_on(self.session, b) for b in shown)

    def pane(self, side: str) -> BranchPane:
        return self.query_one(f"#{side}", BranchPane)

    # ── what is shown ────────────────────────────────────────────────────────────────────────

    def refresh_detail(self) -> None:
        """The top-N of the token under the cursor of the focused branch, else of the stream's."""
        side, token = self._part
        detail = self.query_one(DetailView)
        branches = self.branches() if token is not None and self._part_focused(side) else {}
        try:
            if token is not None and branches.get(side) is not None:
                shown = branch_words.branch_detail(self.session, branches, side, token)
            else:
                shown = words.position_detail(
                    self.session, self.cursor, self.quant, self.config.top_n_shown
                )
        except KldtuiError as error:
            if str(error) != self._trouble:
                self.say(str(error), "error")
            self._trouble = str(error)
            detail.show(None, str(self.cursor), [(str(error), marks.WARN)])
            return
        self._trouble = ""
        detail.show(*shown)

    def _part_focused(self, side: str) -> bool:
        return self.focused in (self.pane(side), self.query_one(DetailView))

    def refresh_pair(self) -> None:
        if not self.session.quants:
            for side in SIDES:
                self.pane(side).show_words("", "no quant: start with --quant FILE")
            return
        showing = self.showing
        self._warn_of_files()
        branches = showing.branches
        forks: dict[str, set[int]] = {}
        for branch in showing.held.values():
            if branch.parent is not None:
                forks.setdefault(branch.parent.branch, set()).add(branch.parent.offset)
        meeting = self._meeting(branches["left"], branches["right"])
        pairs, pair = showing.pairs, showing.pair
        which = ""
        if len(pairs) > 1 and pair in pairs and any(branches.values()):
            which = f" ─ pair {pairs.index(pair) + 1}/{len(pairs)}"
        for side, arm in zip(SIDES, pair, strict=True):
            shown = branches[side]
            if shown is not None:
                title, status = branch_words.branch_words(
                    self.session, self.desk, shown, meeting, side
                )
                title += which if side == "left" else ""
                inside = forks.get(shown.id, set())
                self.pane(side).show_branch(shown, meeting, title, status, inside)
            else:
                words_of = branch_words.no_branch_words(self.session, self.desk, arm, showing.place)
                self.pane(side).show_words(*words_of)

    def _meeting(self, left: Branch | None, right: Branch | None) -> Meeting | None:
        """Where the pair parts and meets, compared anew only where one of the two has changed."""
        pair = (left, right)
        stands = tuple((b.id, len(b.tokens), b.stop) for b in pair if b is not None)
        if stands not in self._meetings:
            self._meetings[stands] = branch_words.meeting_of(left, right)
        return self._meetings[stands]

    def _warn_of_files(self) -> None:
        """What is wrong with files of branches, once each."""
        shelf = self.session.shelf
        warnings = [*(line for log in shelf.logs for line in log.warnings), *shelf.warnings]
        for warning in warnings[self._warned :]:
            self.say(warning, "warning")
        self._warned = len(warnings)

    # ── messages ─────────────────────────────────────────────────────────────────────────────

    def on_part_moved(self, event: PartMoved) -> None:
        if event.token is None and isinstance(self.focused, DetailView):
            return
        self._part = (event.side, event.token)
        self._make_room()
        self.refresh_detail()

    def on_detail_left(self, _event: DetailLeft) -> None:
        if not isinstance(self.focused, BranchPane | DetailView):
            self._part = ("left", None)
        self._make_room()
        self.refresh_detail()

    def _make_room(self) -> None:
        """While judging, the table takes the place of what is beside it when it is looked at."""
        focused = self.focused
        in_branch = isinstance(focused, BranchPane) and focused.branch is not None
        self.set_class(in_branch or isinstance(focused, DetailView), "-part")

    def on_branches_changed(self, event: BranchesChanged) -> None:
        if not self.session.quants or event.quant != self.session.names[self.quant]:
            return
        if event.position == self.cursor and not self._draw_due:
            wait = self._drawn_until - time.monotonic()
            if wait > 0:
                self._draw_due = True
                self.set_timer(wait, self._draw_branches)
            else:
                self._draw_branches()

    def _draw_branches(self) -> None:
        """Draw what has come; a long branch is drawn the less often."""
        self._draw_due = False
        begun = time.monotonic()
        self.refresh_pair()
        self.refresh_detail()
        now = time.monotonic()
        self._drawn_until = now + _SHARE_DRAWING * (now - begun)
