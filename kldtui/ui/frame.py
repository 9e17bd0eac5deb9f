"""Lines within a border, in their last colours, made in one step.

Knows: how Textual draws a border at either side of a line, and what its filters make of styles.
Must not know: any widget of this program.

Textual pads a line, styles it, puts the border to it and filters it one after the other, each time
into lines of their own; that is half of what a frame takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip
from textual.widget import Widget

_EDGES = {"round": "│"}
"""Which borders are drawn here, and what with."""


class Frame:
    """What lies around and beneath the lines of a widget."""

    def __init__(
        self, edge: str, colour: Color, background: Color, filters: Sequence[LineFilter]
    ) -> None:
        self._made_of = (edge, colour, background, tuple(filters))
        self._background, self._filters = background, filters
        self._looks: dict[Style, dict[Style | None, Style]] = {}
        style = Style.from_color(colour.rich_color, background.rich_color)
        self._edge = Segment(edge, self._look(Style(), style))

    @staticmethod
    def of(widget: Widget, before: Frame | None) -> Frame | None:
        """The frame of a widget as it is now; the one before, if that is the same. None where
        Textual has to draw it."""
        (left, colour), right = widget.styles.border_left, widget.styles.border_right
        edge = _EDGES.get(left)
        if edge is None or right != (left, colour) or widget.opacity < 1:
            return None
        beneath, own = widget.background_colors
        background = beneath + own
        filters = widget.get_line_filters()
        made_of = (edge, beneath + colour, background, tuple(filters))
        if before is not None and before._made_of == made_of:
            return before
        return Frame(edge, beneath + colour, background, filters)

    def line(self, segments: Iterable[Segment], style: Style, width: int) -> Strip:
        """Segments of `width` cells, in a style, between the edges."""
        looks = self._looks.get(style)
        if looks is None:
            looks = self._looks[style] = {}
        out = [self._edge]
        for text, own, _ in segments:
            look = looks.get(own)
            if look is None:
                look = looks[own] = self._look(style, own)
            out.append(Segment(text, look))
        out.append(self._edge)
        return Strip(out, width + 2)

    def _look(self, style: Style, own: Style | None) -> Style:
        segments = [Segment(" ", style if own is None else style + own)]
        for each in self._filters:
            segments = each.apply(segments, self._background)
        return segments[0].style or Style()
