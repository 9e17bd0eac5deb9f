"""A scrolling pane of tokens: wrapping, drawing, cursor and mouse, shared by stream and branches.

Knows: displays (visible pieces), marks and styles per token, and how lines of them are drawn.
Must not know: recordings, engines, or what a token means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.cache import LRUCache
from textual.strip import Strip

from kldtui.ui import marks
from kldtui.ui.base_style import Pane
from kldtui.ui.text import fit
from kldtui.ui.wrap import Wrapped
from kldtui.vocab import Display
from kldtui.vocab.glyphs import NEWLINE


class Styles(Sequence[Style]):
    """As many styles, each made when it is drawn."""

    def __init__(self, n: int, style: Callable[[int], Style]) -> None:
        self._n, self._style = n, style

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, token: Any) -> Any:
        return self._style(token)


@dataclass(slots=True)
class Cells:
    """What a pane shows: a display and style per token, and a mark before those that have one.

    `marks` maps token number to (symbol, style); a symbol is one cell wide.
    """

    displays: list[Display] = field(default_factory=list)
    styles: Sequence[Style] = ()
    marks: dict[int, tuple[str, Style]] = field(default_factory=dict)


def tail(display: Display) -> str:
    """What follows a token's last line feed: it begins the next line."""
    return display.text[display.text.rfind(NEWLINE) + 1 :] if display.newline else ""


class TokenPane(Pane):
    """Tokens in lines. Subclasses fill `cells` with `show` and say what moving means."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.cells = Cells()
        self.at: int | None = None
        self.wrapped = Wrapped(np.zeros(0, np.int64), np.zeros(0, bool), 1)
        self._strips: LRUCache[tuple[object, ...], Strip] = LRUCache(512)
        self.rendered = 0

    # ── content ──────────────────────────────────────────────────────────────────────────────

    def show(self, cells: Cells, at: int | None) -> None:
        """Show other tokens, with the cursor on token `at`."""
        self.cells, self.at = cells, at
        self.relayout()

    def relayout(self) -> None:
        """Wrap anew after tokens, marks or the pane's width changed."""
        width = max(1, self.size.width)
        self._wrap(max(1, width - 1))  # beside a scrollbar
        if self.wrapped.lines <= self.size.height:
            self._wrap(width)
        self.extend(self.wrapped.lines)
        self._strips.clear()
        self.refresh()
        self.reveal()

    def _wrap(self, width: int) -> None:
        displays = self.cells.displays
        # Displays are few, and each stands for many tokens: what they measure is asked once.
        kinds, first, which = np.unique(
            np.fromiter(map(id, displays), np.int64, len(displays)),
            return_index=True,
            return_inverse=True,
        )
        few, n = [displays[i] for i in first.tolist()], kinds.size
        widths = np.fromiter((d.width for d in few), np.int64, n)[which]
        marked = [token for token in self.cells.marks if 0 <= token < len(displays)]
        widths[marked] += 1
        widths = np.minimum(widths, width)
        breaks = np.fromiter((d.newline for d in few), bool, n)[which]
        openers = np.fromiter((d.text.startswith(" ") for d in few), bool, n)[which]
        openers[1:] |= breaks[:-1]
        tails = np.fromiter((cell_len(tail(d)) if d.newline else 0 for d in few), np.int64, n)[
            which
        ]
        self.wrapped = Wrapped(widths, breaks, width, openers, tails)

    def reveal(self) -> None:
        """Scroll so that the cursor's line is on screen, with a line or two around it."""
        if self.at is None or not self.wrapped.lines:
            return
        self.bring(self.wrapped.line_of(self.at), 2)

    def place_cursor(self, at: int | None) -> None:
        """Move the cursor within what is shown; only the lines concerned are drawn again."""
        before, self.at = self.at, at
        for token in (before, at):
            if token is not None and token < self.wrapped.n:
                line = self.wrapped.line_of(token)
                self.repaint((line, line + 1) if self.wrapped.indent(line + 1) else (line,))
        self.reveal()

    # ── drawing ──────────────────────────────────────────────────────────────────────────────

    def render_line(self, y: int) -> Strip:
        self.rendered += 1
        laid = self.laid
        line, width, thumb = y + laid.top, laid.across, laid.thumb(y)
        first, stop = self.wrapped.span(line)
        before = first - (1 if self.wrapped.indent(line) else 0)
        at = self.at if self.at is not None and before <= self.at < stop else None
        focused = self.has_focus
        key = (line, width, thumb, laid.frame, at, focused if at is not None else None)
        strip = self._strips.get(key)
        if strip is None:
            segments = self._draw(line, at, focused, width)
            strip = self._strips[key] = self.line(segments, thumb, self.base_style)
        return strip

    def _draw(self, line: int, at: int | None, focused: bool, width: int) -> Iterable[Segment]:
        first, stop = self.wrapped.span(line)
        cursor = marks.CURSOR if focused else marks.CURSOR_ELSEWHERE
        segments: list[Segment] = []
        indent = self.wrapped.indent(line)
        if indent:
            style = self.cells.styles[first - 1]
            rest = tail(self.cells.displays[first - 1])
            segments.append(
                Segment(fit(rest, indent), style + cursor if at == first - 1 else style)
            )
        for token in range(first, stop):
            display, style = self.cells.displays[token], self.cells.styles[token]
            mark = self.cells.marks.get(token)
            if mark is not None:
                segments.append(Segment(mark[0], mark[1]))
            text = display.text
            if display.newline:
                text = text[: len(text) - len(tail(display))]
            if display.width + (mark is not None) > width:
                text = set_cell_size(text, max(0, width - 1 - (mark is not None))) + "…"
            segments.append(Segment(text, style + cursor if token == at else style))
        return Segment.simplify(segments)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()

    def on_resize(self, _event: events.Resize) -> None:
        self.relayout()

    def on_focus(self) -> None:
        self._strips.clear()
        self.refresh()

    def on_blur(self) -> None:
        self._strips.clear()
        self.refresh()

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def target(self, where: str) -> int | None:
        """The token that a move leads to, or None where it leads out of what is shown."""
        n = self.wrapped.n
        if not n:
            return None
        at = self.at if self.at is not None else 0
        if where in ("left", "right"):
            to = at + (1 if where == "right" else -1)
            return to if 0 <= to < n else None
        if where in ("first", "last"):
            return 0 if where == "first" else n - 1
        page = max(1, self.size.height - 2)
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page}[where]
        here = self.wrapped.line_of(at)
        line = here + step
        if abs(step) > 1:
            line = min(max(line, 0), self.wrapped.lines - 1)
            if line == here:
                return None
        if not 0 <= line < self.wrapped.lines:
            return None
        return self.wrapped.token_at(line, self.wrapped.column_of(at))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if self.scrolled_to(offset):
            return
        token = self.wrapped.token_at(offset.y + self.scroll_offset.y, offset.x)
        if token is not None:
            self.picked(token)

    def picked(self, token: int) -> None:
        """A token was clicked."""
