"""One branch of the pair: the end of its prefix, its start token, and the continuation.

Knows: how a branch is drawn, where it parted from its neighbour, and a cursor over its tokens.
Must not know: engines, or how branches are made.
"""

from __future__ import annotations

from collections.abc import Collection

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from kldtui.branching import Branch, Meeting, Start
from kldtui.review.session import Session
from kldtui.ui import marks
from kldtui.ui.messages import PartMoved
from kldtui.ui.text import wrap_words
from kldtui.ui.token_pane import Cells, Styles, TokenPane
from kldtui.vocab import display_run

CONTEXT_TOKENS = 48
_START_STYLES: dict[Start, Style] = {
    "ref": marks.REF,
    "quant": marks.QUANT,
    "stream": marks.STREAM,
    "picked": marks.TITLE,
}


class BranchPane(TokenPane):
    """`side` is "left" or "right"."""

    def __init__(self, session: Session, side: str, *, id: str) -> None:
        super().__init__(id=id)
        self._session = session
        self.side = side
        self.branch: Branch | None = None
        self._offset = 0
        self._shown: tuple[object, ...] = ()
        """What is laid out: of the same nothing is laid out again, long branches being slow."""
        self._said: tuple[str, str] | None = None
        self._lines: list[str] = []

    def show_branch(
        self,
        branch: Branch,
        meeting: Meeting | None,
        title: str,
        status: str,
        forks: Collection[int] = (),
    ) -> None:
        """Show a branch as far as it has come, with its place in the pair.

        forks: numbers of generated tokens from which other branches begin.
        """
        same = self.branch is branch
        self.branch = branch
        self.head(title, status)
        start = min(len(branch.prefix_ids), CONTEXT_TOKENS)
        follows = not same or not self.has_focus
        shown = (branch.id, len(branch.tokens), meeting, frozenset(forks), self._session.vocab)
        if not same or shown != self._shown:
            self._shown = shown
            self._lay(branch, meeting, forks, same)
        if follows:
            self._follow(start)

    def _lay(
        self, branch: Branch, meeting: Meeting | None, forks: Collection[int], same: bool
    ) -> None:
        prefix = branch.prefix_ids[-CONTEXT_TOKENS:]
        ids = [*prefix, branch.start_id, *branch.ids]
        displays = display_run(self._session.vocab, ids)
        start = len(prefix)
        self._offset = start + 1
        start_style = _START_STYLES[branch.arm.start]
        own = start_style + Style(underline=True)

        def style(token: int) -> Style:
            if token <= start:
                return marks.DIM if token < start else own
            return self._style(token - start - 1, meeting)

        edges = {self._offset + k: (marks.FORK, marks.TITLE) for k in forks}
        edges |= {start: ("▐", start_style), start + 1: ("▌", start_style)}
        symbols = {k: mark for k, mark in edges.items() if k < len(ids)}
        at = self.at if same and self.at is not None and self.at >= start else start
        self.show(Cells(displays, Styles(len(ids), style), symbols), at)

    def _follow(self, start: int) -> None:
        """While a branch grows unwatched, keep its end in sight, but its start if all fits."""
        first = max(0, self.wrapped.line_of(start) - 1)
        height = self.size.height
        top = min(first, max(0, self.wrapped.lines - height)) if height else first
        last = max(0, self.wrapped.lines - height)
        running = self.branch is not None and self.branch.stop is None
        self.scroll_to(0, max(top, last) if running else first, animate=False, immediate=True)

    def _style(self, k: int, meeting: Meeting | None) -> Style:
        if meeting is None or meeting.parts_at is None or k < meeting.parts_at:
            return marks.PLAIN
        met = meeting.meet_a if self.side == "left" else meeting.meet_b
        if met is not None and met <= k < met + meeting.meet_length:
            return marks.MET
        if met is None or k < met:
            return marks.PARTED
        return marks.PLAIN

    def show_words(self, title: str, words: str) -> None:
        """Show a line or two instead of a branch."""
        if self.branch is None and (title, words) == self._said:
            return
        self.head(title)
        anew = self.branch is not None or self._said is None
        self.branch, self._said = None, (title, words)
        if anew:
            self.show(Cells([], [], {}), None)
        self._wrap_words()

    def _wrap_words(self) -> None:
        """Lay out the words, and paint the lines that they take or took."""
        before, words = len(self._lines), self._said[1] if self._said else ""
        self._lines = wrap_words(words, max(1, self.size.width))
        self.refresh(Region(0, 0, self.size.width, max(before, len(self._lines))))

    def relayout(self) -> None:
        super().relayout()
        if self.branch is None:
            self._wrap_words()

    def render_line(self, y: int) -> Strip:
        if self.branch is None:
            words = [Segment(text, marks.DIM) for text in self._lines[y : y + 1]]
            return self.line(words, None, self.base_style)
        return super().render_line(y)

    @property
    def token(self) -> int | None:
        """The generated token under the cursor, by its number; None on prefix or start token."""
        if self.branch is None or self.at is None or self.at < self._offset:
            return None
        return self.at - self._offset

    def move(self, where: str) -> None:
        """Move the cursor over start and generated tokens."""
        if self.branch is None:
            return
        to = self.target(where)
        if where == "first" or (to is not None and to < self._offset - 1):
            to = self._offset - 1
        if to is not None:
            self.picked(to)

    def place_token(self, token: int) -> None:
        """Put the cursor on a generated token, by its number."""
        if self.branch is not None and token < len(self.branch.tokens):
            self.picked(self._offset + token)

    def picked(self, token: int) -> None:
        self.place_cursor(max(token, self._offset - 1))
        self.post_message(PartMoved(self.side, self.token))

    def on_focus(self) -> None:
        super().on_focus()
        self.post_message(PartMoved(self.side, self.token))

    def on_blur(self) -> None:
        super().on_blur()
        self.post_message(PartMoved(self.side, None))
