"""The root list: a row a position, only the visible ones ever made.

Knows: how one root becomes one line, and which row is chosen.
Must not know: filters, orders (the screen gives it the rows), or what choosing leads to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.cache import LRUCache
from textual.strip import Strip

from kldtui.facts import Brief
from kldtui.index import Bound, State
from kldtui.review.session import Session
from kldtui.ui import marks
from kldtui.ui.base_style import Pane
from kldtui.ui.messages import RootChosen
from kldtui.ui.text import fit, nats

TITLES = {"cost": "cost", "kld": "KLD", "margin": "margin"}


class RootList(Pane):
    """`rows` are flat indices; `chosen` is a row number."""

    def __init__(self, session: Session, *, id: str) -> None:
        super().__init__(id=id)
        self._session = session
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self.chosen: int | None = None
        self.quant = 0
        self.metric = "kld"
        self.empty = "no roots"
        self._name_shown = ""
        self._strips: LRUCache[tuple[object, ...], Strip] = LRUCache(512)
        self.rendered = 0

    def show(self, rows: NDArray[np.int64], chosen: int | None, quant: int, metric: str) -> None:
        """Show other rows; `metric` (cost, kld or margin) is the figure beside each."""
        self.rows, self.chosen, self.quant, self.metric = rows, chosen, quant, metric
        self._strips.clear()
        self.extend(max(1, int(rows.size)))
        self._head()
        self.refresh()
        self.reveal()

    @property
    def shown(self) -> NDArray[np.int64]:
        """The flat indices of the rows on screen, int64[k]."""
        first = self.scroll_offset.y
        return self.rows[first : first + self.size.height]

    def choose(self, row: int | None) -> None:
        """Move the mark to another row."""
        before, self.chosen = self.chosen, row
        if row != before:
            self.repaint(number for number in (before, row) if number is not None)
        self.reveal()

    def reveal(self) -> None:
        if self.chosen is not None:
            self.bring(self.chosen, 1)

    def render_line(self, y: int) -> Strip:
        self.rendered += 1
        laid = self.laid
        number, width, thumb = y + laid.top, laid.across, laid.thumb(y)
        if number >= self.rows.size:
            text = fit(self.empty if number == 0 else "", width)
            return self.line([Segment(text, marks.DIM)], thumb, self.base_style)
        chosen = number == self.chosen
        key = (number, width, thumb, laid.frame, chosen, self.has_focus if chosen else None)
        strip = self._strips.get(key)
        if strip is None:
            base = self.base_style
            if chosen:
                base += marks.SELECTED if self.has_focus else marks.SELECTED_ELSEWHERE
            segments = self._draw(int(self.rows[number]), width, chosen)
            strip = self._strips[key] = self.line(segments, thumb, base)
        return strip

    def _draw(self, i: int, width: int, chosen: bool) -> list[Segment]:
        session = self._session
        flips = session.flips(i)
        quant = self.quant if self.quant in flips or not flips else flips[0]
        facts, position = session.brief(i, quant), session.position(i)
        record = session.label(position, quant)
        label = marks.LABELS.get(record.key or "", "✎") if record is not None else " "
        strip = ""
        if len(session.quants) > 1:
            strip = "".join(marks.FLIPS[stands] for stands in session.stands(i))
        figures = self._figures(facts, width)
        place = f"{position!s:<8}"
        noise = marks.NEAR_TIE if facts.near_tie else " "
        if session.floor_flips(i):
            noise = marks.FLOOR
        used = 1 + cell_len(place) + 1 + cell_len(figures) + len(strip) + 2 + (1 if strip else 0)
        words = max(6, width - used)
        segments = [
            Segment("▸" if chosen else " ", marks.ROOT_STYLE if chosen else marks.PLAIN),
            Segment(place, marks.DIM),
            Segment(noise, marks.QUIET),
            *self._change(facts, words),
            Segment(figures, marks.NEAR_STYLE if facts.near_tie else marks.PLAIN),
        ]
        if strip:
            segments.append(Segment(" " + strip, marks.QUANT))
        segments.append(Segment(f" {label}", marks.GOOD))
        return segments

    def on_mount(self) -> None:
        self._head()

    def _head(self) -> None:
        names = self._columns(self.across)
        strip = "  flips" if len(self._session.quants) > 1 else ""
        heads = "".join(f"{TITLES[name]:>7}" for name in names)
        self.head(self._name_shown, heads.strip() + strip)

    def named(self, title: str) -> None:
        """Say what the list is of."""
        self._name_shown = title
        self._head()

    def _columns(self, width: int) -> tuple[str, ...]:
        return (self.metric,) if width < 44 else ("cost", "kld", "margin")

    def _figures(self, facts: Brief, width: int) -> str:
        bounds = facts.bounds
        shown = {
            "kld": nats(facts.kld, "≥" if bounds & Bound.KLD else ""),
            "cost": nats(facts.cost, "≥" if bounds & Bound.REF_P_QUANT else ""),
            "margin": nats(facts.margin),
        }
        return "".join(f"{shown[name]:>7}" for name in self._columns(width))

    def _change(self, facts: Brief, width: int) -> list[Segment]:
        """`␣three→␣week` in exactly `width` cells, each token its own colour."""
        if facts.state == State.INVALID:
            return [Segment(fit("invalid row", width), marks.INVALID_STYLE)]
        ref = self._session.vocab.display(facts.ref_id).table
        if facts.ref_id == facts.quant_id:
            return [Segment(fit(ref, width), marks.REF)]
        quant = self._session.vocab.display(facts.quant_id).table
        room = width - 1
        first = min(cell_len(ref), max(room // 2, room - cell_len(quant)))
        segments = [Segment(fit(ref, first), marks.REF), Segment("→", marks.DIM)]
        return [*segments, Segment(fit(quant, room - first), marks.QUANT)]

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()

    def _redraw(self) -> None:
        self._strips.clear()
        self.refresh()

    def on_focus(self) -> None:
        self._redraw()

    def on_blur(self) -> None:
        self._redraw()

    def on_resize(self, _event: events.Resize) -> None:
        self._head()
        self._redraw()

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def after(self, where: str) -> int | None:
        """The row that a move leads to."""
        n = int(self.rows.size)
        if not n or where in ("left", "right"):
            return None
        at = self.chosen if self.chosen is not None else -1
        page = max(1, self.size.height - 1)
        to = {
            "up": at - 1,
            "down": at + 1,
            "page_up": at - page,
            "page_down": at + page,
            "first": 0,
            "last": n - 1,
        }[where]
        return min(max(to, 0), n - 1)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if self.scrolled_to(offset):
            return
        if offset is not None and offset.y + self.scroll_offset.y < self.rows.size:
            self.post_message(RootChosen(offset.y + self.scroll_offset.y))
