"""The top-N table of one prediction: both models aligned by token, with bars; a token can be
picked in it.

Knows: how a Detail is drawn, and the words around it.
Must not know: where the rows come from.
"""

from __future__ import annotations

import itertools
import math

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.strip import Strip

from kldtui.detail import Detail
from kldtui.review.session import Session
from kldtui.ui import marks
from kldtui.ui.base_style import Pane
from kldtui.ui.messages import DetailLeft
from kldtui.ui.text import fit, percent, wrap_words

Shown = tuple[Detail | None, str, list[tuple[str, Style]], tuple[str, str]]
"""What `DetailView.show` takes: the table, its heading, the figures under it, both names."""


class DetailView(Pane):
    """Shows a Detail; `heading` is where it is, `figures` the lines below the table."""

    def __init__(self, session: Session, *, id: str) -> None:
        super().__init__(id=id)
        self._session = session
        self._lines: list[list[Segment]] = []
        self._detail: Detail | None = None
        self._names = ("reference", "quant")
        self._figures: list[tuple[str, Style]] = []
        self._row = 0
        self._heading = ""

    @property
    def token(self) -> int | None:
        """The picked token: that of the marked row; None while the table has not the focus."""
        if self._detail is None or not self.has_focus or not self._detail.rows:
            return None
        return self._detail.rows[self._row].token

    def show(
        self,
        detail: Detail | None,
        heading: str,
        figures: list[tuple[str, Style]],
        names: tuple[str, str] = ("reference", "quant"),
    ) -> None:
        """Show another prediction; None where nothing was recorded."""
        before = self._detail
        same = heading == self._heading
        kept = before.rows[self._row].token if same and before and before.rows else None
        self._heading = heading
        self._detail, self._figures, self._names = detail, figures, names
        tokens = [row.token for row in detail.rows] if detail is not None else []
        self._mark_row(tokens.index(kept) if kept in tokens else 0)
        self.head(heading)
        self._lay()
        if not same:
            self.scroll_to(0, 0, animate=False)

    def _lay(self) -> None:
        lines = self._drawn(max(20, self.size.width))
        if len(lines) > self.size.height:
            lines = self._drawn(max(20, self.size.width - 1))  # beside the scrollbar
        before, self._lines = self._lines, lines
        self.extend(len(lines))
        pairs = enumerate(itertools.zip_longest(before, lines))
        self.repaint(number for number, (was, now) in pairs if was != now)

    def _drawn(self, width: int) -> list[list[Segment]]:
        lines: list[list[Segment]] = []
        if self._detail is not None:
            lines += self._table(self._detail, width)
        for text, style in self._figures:
            lines += [[Segment(fit(part, width), style)] for part in wrap_words(text, width)]
        return lines

    def _table(self, detail: Detail, width: int) -> list[list[Segment]]:
        number = 6
        word = min(14, max(7, (width - 2 * number - 4) // 3))
        room = max(1, (width - word - 2 * number - 4) // 2)
        head = [
            Segment(fit("", word + 1)),
            Segment(fit(self._names[0].rjust(number) + " %", number + room + 1), marks.REF),
            Segment(fit(self._names[1].rjust(number) + " %", number + room + 1), marks.QUANT),
        ]
        lines = [head]
        for row in detail.rows:
            mark, style = self._mark(detail, row.token)
            line = [Segment(fit(self._session.vocab.display(row.token).table, word) + " ", style)]
            for logp, colour in ((row.ref, marks.REF), (row.quant, marks.QUANT)):
                share = math.exp(logp.value) if logp is not None and not logp.bound else 0.0
                line.append(Segment(f"{percent(logp):>{number}} "))
                line.append(Segment(marks.bar(share, room), Style(color=colour.color)))
            line.append(Segment(mark, style))
            lines.append(line)
        return lines

    @staticmethod
    def _mark(detail: Detail, token: int) -> tuple[str, Style]:
        ref, quant = token == detail.ref_id, token == detail.quant_id
        text = "r" * ref + "q" * quant + "·" * (token == detail.stream_id)
        if ref and not quant:
            return text, marks.REF
        if quant and not ref:
            return text, marks.QUANT
        return text, marks.STREAM if token == detail.stream_id else marks.PLAIN

    def render_line(self, y: int) -> Strip:
        laid = self.laid
        number = y + laid.top
        segments = self._lines[number] if number < len(self._lines) else []
        style = self.base_style
        if self.token is not None and number == self._row + 1:
            style += marks.SELECTED
        return self.line(segments, laid.thumb(y), style)

    def _mark_row(self, row: int) -> None:
        """Mark another row of the table; its head is the line before the first."""
        before, self._row = self._row, row
        if row != before:
            self.repaint((before + 1, row + 1))

    def on_resize(self) -> None:
        self._lay()
        if self.has_focus:
            self._pick(self._row)

    def on_focus(self) -> None:
        self._pick(self._row)
        self.repaint((self._row + 1,))

    def on_blur(self) -> None:
        self.repaint((self._row + 1,))
        self.post_message(DetailLeft())

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and not self.scrolled_to(offset):
            self._pick(offset.y + self.scroll_offset.y - 1)

    def move(self, where: str) -> None:
        """Mark another row; beyond the table, scroll to what stands under it."""
        last = len(self._detail.rows) - 1 if self._detail is not None else -1
        step = {"up": -1, "down": 1, "page_up": -8, "page_down": 8, "first": -999, "last": 999}
        by = step.get(where, 0)
        if last < 0 or (by > 0 and self._row == last):
            self.scroll_relative(y=by, animate=False)
        else:
            self._pick(max(0, min(last, self._row + by)))

    def _pick(self, row: int) -> None:
        if self._detail is not None and 0 <= row < len(self._detail.rows):
            self._mark_row(row)
            top = 0 if row == 0 else row + 1
            self.scroll_to_region(Region(0, top, 1, 1), animate=False, force=True)
