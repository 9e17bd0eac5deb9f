"""The lines that frame the screen: status above, minimap, classes, keys below.

Knows: how a few facts become one line that fits any width.
Must not know: where the facts come from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer

from kldtui.labels import TAXONOMY, LabelClass
from kldtui.ui import marks
from kldtui.ui.base_style import BaseStyled
from kldtui.ui.text import fit, wrap_words

Part = tuple[str, Style]
TOLD_SECONDS = 4.0
READ_SECONDS = 1.0
_DENSITY = " ▁▂▃▄▅▆▇█"


class StatusBar(BaseStyled):
    """Parts from the left, and parts from the right that stay when there is little room."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._left: Sequence[Part] = ()
        self._right: Sequence[Part] = ()

    def show(self, left: Sequence[Part], right: Sequence[Part]) -> None:
        """Show other parts; of the left ones as many as there is room for."""
        if (left, right) != (self._left, self._right):
            self._left, self._right = left, right
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        kept: list[Part] = []
        room = width
        for text, style in self._right:
            if cell_len(text) + 1 <= room - 8:
                kept.append((text, style))
                room -= cell_len(text) + 1
        segments: list[Segment] = []
        for text, style in self._left:
            if cell_len(text) + 2 > room:
                if not segments:
                    segments.append(Segment(" " + fit(text, max(1, room - 2)), style))
                    room = 0
                continue
            segments.append(Segment(f" {text} ", style))
            room -= cell_len(text) + 2
        segments.append(Segment(" " * max(0, room)))
        segments += [Segment(f"{text} ", style) for text, style in kept]
        return (
            Strip(segments).adjust_cell_length(width, self.base_style).apply_style(self.base_style)
        )


class KeyBar(BaseStyled):
    """Keys and what they do, as many as fit; a click does it."""

    class Pressed(Message):
        """An entry was clicked."""

        def __init__(self, action_id: str) -> None:
            super().__init__()
            self.action_id = action_id

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._entries: Sequence[tuple[str, str, str]] = ()
        self._told, self._told_at = "", 0.0
        self._timer: Timer | None = None

    def tell(self, text: str) -> None:
        """Say something in place of the keys, for some seconds."""
        self._told, self._told_at = text, time.monotonic()
        self.refresh()
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(TOLD_SECONDS, self._forget)

    def key_came(self) -> None:
        """A person goes on: what was said before, and could be read by now, is over."""
        if self._told and time.monotonic() - self._told_at > READ_SECONDS:
            self._forget()

    def _forget(self) -> None:
        self._told = ""
        self.refresh()

    def show(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """(action id, keys, words) each, the most useful first."""
        if entries != self._entries:
            self._entries = entries
            self.refresh()

    def _fitting(self) -> list[tuple[str, str, str]]:
        out, room = [], self.size.width - 1
        for entry in self._entries:
            room -= cell_len(entry[1]) + cell_len(entry[2]) + 3
            if room < 0:
                break
            out.append(entry)
        return out

    def render_line(self, y: int) -> Strip:
        segments = [Segment(" ")]
        if self._told:
            segments.append(Segment(fit(self._told, max(0, self.size.width - 2)), marks.TITLE))
            strip = Strip(segments).adjust_cell_length(self.size.width, self.base_style)
            return strip.apply_style(self.base_style)
        for _, keys, words in self._fitting():
            segments += [Segment(keys, marks.QUANT), Segment(f" {words}  ")]
        strip = Strip(segments).adjust_cell_length(self.size.width, self.base_style)
        return strip.apply_style(self.base_style)

    def on_click(self, event: events.Click) -> None:
        x = 1
        for action_id, keys, words in self._fitting():
            x += cell_len(keys) + cell_len(words) + 3
            if event.x < x:
                self.post_message(self.Pressed(action_id))
                return


class Minimap(BaseStyled):
    """The whole stream in one line: how many roots, and where the cursor is. A click goes there."""

    class Picked(Message):
        """A place was clicked, as a share of the stream."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._roots: NDArray[np.int64] = np.zeros(0, np.int64)
        self._n = 1
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._cursor = 0.0
        self._drawn = ""

    @staticmethod
    def cells(roots: NDArray[np.int64], n: int, width: int) -> NDArray[np.int64]:
        """How many lie in each of `width` cells, by their share of the stream, int64[width].

        roots: flat indices below `n`, ascending.
        """
        edges = -(-np.arange(width + 1, dtype=np.int64) * n // width)
        return np.diff(roots.searchsorted(edges))

    def show(self, roots: NDArray[np.int64], n: int, counts: NDArray[np.int64]) -> None:
        """roots: flat indices below `n`, int64[k], ascending; counts: their `cells`."""
        self._roots, self._n, self._counts = roots, max(1, n), counts
        self._drawn = ""
        self.refresh()

    def place(self, cursor: float) -> None:
        """cursor: its place as a share of the stream."""
        before, self._cursor = self._cell, cursor
        if self._cell != before:
            self.refresh()

    @property
    def _cell(self) -> int:
        """The cell that the cursor is in."""
        return min(self.size.width - 1, int(self._cursor * self.size.width))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if self._counts.size != width:
            self._counts = self.cells(self._roots, self._n, width)
            self._drawn = ""
        if len(self._drawn) != width:
            most = max(2, int(self._counts.max(initial=0)))
            levels = np.where(self._counts > 0, 1 + np.rint(7 * (self._counts - 1) / (most - 1)), 0)
            self._drawn = "".join(_DENSITY[level] for level in levels.astype(int).tolist())
        here = self._cell
        style = marks.ROOT_STYLE + Style(underline=False)
        parts = (
            (self._drawn[:here], style),
            (self._drawn[here : here + 1], marks.CURSOR),
            (self._drawn[here + 1 :], style),
        )
        strip = Strip([Segment(*part) for part in parts if part[0]])
        return strip.adjust_cell_length(width, self.base_style).apply_style(self.base_style)

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Picked((event.x + 0.5) / max(1, self.size.width)))


class ClassesPanel(BaseStyled):
    """The classes, a line each with its definition; the root's own is marked."""

    class Chosen(Message):
        """A class was clicked."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._current: str | None = None
        self._hint = self._note = ""

    def show(self, current: str | None, hint: str, note: str) -> None:
        """current: the root's class key. hint: the program's guess, in words, or empty. note: the
        person's own words."""
        if (current, hint, note) != (self._current, self._hint, self._note):
            self._current, self._hint, self._note = current, hint, note
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.content_size.width
        segments: list[Segment] = []
        lines = self.content_size.height
        each = max(1, -(-len(TAXONOMY) // max(1, lines)))
        below = self._below(width, lines - len(TAXONOMY))
        hint = "" if below else self._hint
        for entry in TAXONOMY[y * each : (y + 1) * each]:
            segments += self._entry(entry, hint, width // each, with_definition=each == 1)
        if y >= len(TAXONOMY) and y - len(TAXONOMY) < len(below):
            segments.append(Segment(*below[y - len(TAXONOMY)]))
        return (
            Strip(segments).adjust_cell_length(width, self.base_style).apply_style(self.base_style)
        )

    def _below(self, width: int, room: int) -> list[tuple[str, Style]]:
        """Hint and note in the lines under the classes; nothing where not each has one."""
        said = [
            (f"   {name}: {words}", style)
            for name, words, style in (
                ("hint", self._hint, marks.QUIET),
                ("note", self._note, marks.GOOD),
            )
            if words
        ]
        if room < len(said):
            return []
        out: list[tuple[str, Style]] = []
        for k, (words, style) in enumerate(said):
            lines = wrap_words(words, width - 1)
            free = room - len(out) - (len(said) - 1 - k)
            rest = " ".join(lines[free - 1 :]) if len(lines) > free else ""
            kept = [*lines[: free - 1], rest] if rest else lines
            out += [(fit(line, width), style) for line in kept]
        return out

    def _entry(
        self, entry: LabelClass, hint: str, width: int, *, with_definition: bool
    ) -> list[Segment]:
        """A class in `width` cells; a hint stands in place of its definition."""
        chosen = entry.key == self._current
        style = marks.GOOD + marks.TITLE if chosen else marks.PLAIN
        name = fit(entry.name, max(0, width - 4)) if not with_definition else entry.name
        segments = [
            Segment("▸" if chosen else " ", marks.GOOD),
            Segment(f"{entry.key} ", marks.QUANT),
            Segment(f"{name} ", style),
        ]
        if with_definition:
            hinted = hint if entry.id == "malformed_tool_call" else ""
            words = f"hint: {hinted}" if hinted else entry.definition
            used = sum(cell_len(segment.text) for segment in segments) + 1
            style = marks.QUIET if hinted else marks.DIM
            segments.append(Segment(" " + fit(words, max(0, width - used)), style))
        return segments

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self.content_size.height >= len(TAXONOMY) > offset.y:
            self.post_message(self.Chosen(TAXONOMY[offset.y].key))
