"""What all that draws lines has in common: its own colours, the words in its border, scrolling.

Knows: what Textual asks of a widget when its style changes, and what it has painted again.
Must not know: any widget of this program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Offset, Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from kldtui.ui import marks
from kldtui.ui.frame import Frame
from kldtui.ui.text import plain

_BARS = {thumb: Segment(marks.THUMB if thumb else " ", marks.DIM) for thumb in (True, False)}


class BaseStyled(Widget):
    """A widget that draws many lines: `rich_style` walks up the screen each time it is asked,
    and other words in the border would have all of the widget painted again."""

    _base_style: Style | None = None
    _heads: tuple[str, str] = ("", "")
    _instead: tuple[Region, ...] = ()

    @property
    def base_style(self) -> Style:
        """`rich_style`, as it was when the widget's style last changed."""
        if self._base_style is None:
            self._base_style = self.rich_style
        return self._base_style

    def head(self, title: str, subtitle: str = "") -> None:
        """Set the border's words, as they are; only what changes of them is painted again."""
        before, self._heads = self._heads, (title, subtitle)
        width, height = self.outer_size
        left, top = -self.gutter.left, -self.gutter.top
        try:
            if title != before[0]:
                self._instead = (Region(left, top, width, 1),)
                self.border_title = plain(title)
            if subtitle != before[1]:
                self._instead = (Region(left, top + height - 1, width, 1),)
                self.border_subtitle = plain(subtitle)
        finally:
            self._instead = ()

    def refresh(
        self,
        *regions: Region,
        repaint: bool = True,
        layout: bool = False,
        recompose: bool = False,
    ) -> Self:
        """As of any widget, but lines whole: Textual would cut what is within the border out of
        each. And its setters of the border's words ask for the whole widget."""
        across, width = -self.gutter.left, self.outer_size.width
        lines = (Region(across, region.y, width, region.height) for region in regions)
        where = (*lines, *(() if regions else self._instead))
        self.forget(where)
        return super().refresh(*where, repaint=repaint, layout=layout, recompose=recompose)

    def forget(self, regions: Sequence[Region]) -> None:
        """What was drawn of these regions, or of all if there are none, is not to be used again."""

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base_style = None


class Laid(NamedTuple):
    """How the lines of a pane lie. top: the first one on screen; across: the cells of each, beside
    the scrollbar; bar: the lines on screen that have its thumb, None without a scrollbar; frame:
    what is drawn around them, None where Textual does that."""

    top: int
    across: int
    bar: range | None
    frame: Frame | None = None

    def thumb(self, y: int) -> bool | None:
        """Whether line `y` of the pane has the scrollbar's thumb; None without a scrollbar."""
        return None if self.bar is None else y in self.bar


# ScrollView comes first: a widget has the default CSS of its first base alone.
class Pane(ScrollView, BaseStyled, can_focus=True, inherit_bindings=False):
    """Lines to scroll through, of which only the visible ones are drawn.

    The scrollbar is the last cell of each line: as a widget of its own it would take as long as
    the lines, and have the whole screen laid out as it comes and goes.
    """

    DEFAULT_CSS = "Pane { overflow: hidden hidden; }"
    _laid: Laid | None = None
    _frame: Frame | None = None

    def __init__(self, *, id: str) -> None:
        self._kept: dict[int, Strip] = {}
        self._kept_as: tuple[Laid, Size] | None = None
        super().__init__(id=id)

    @property
    def allow_vertical_scroll(self) -> bool:
        """Whether there are more lines than fit; then there is a scrollbar."""
        return self.virtual_size.height > self.size.height

    @property
    def across(self) -> int:
        """The cells of a line, beside the scrollbar."""
        return max(0, self.size.width - self.allow_vertical_scroll)

    def extend(self, lines: int) -> None:
        """Say how many lines there are; what changes of the scrollbar is painted again."""
        before = self._lay_out()
        self.set_reactive(Pane.virtual_size, Size(self.size.width, lines))
        self.scroll_y = self.validate_scroll_y(self.scroll_y)
        after, (width, height) = self._lay_out(), self.size
        if after.across != before.across:
            self.refresh()
        elif after.bar != before.bar:
            moved = [y for y in range(height) if before.thumb(y) != after.thumb(y)]
            self.refresh(*(Region(0, y, width, 1) for y in moved))

    @property
    def laid(self) -> Laid:
        """How the lines lie now; while they are painted, as it was when that began."""
        return self._laid or self._lay_out()

    def _lay_out(self) -> Laid:
        height, top = self.size.height, self.scroll_offset.y
        if not self.allow_vertical_scroll:
            return Laid(top, self.across, None)
        long = max(1, height * height // self.virtual_size.height)
        first = round(top / max(1, self.max_scroll_y) * (height - long))
        return Laid(top, self.across, range(first, first + long))

    def render_lines(self, crop: Region) -> list[Strip]:
        # To say its size, a widget is looked up on the screen: once is enough for all lines.
        self._frame = Frame.of(self, self._frame)
        self._laid = self._lay_out()._replace(frame=self._frame)
        try:
            if self._frame is None:
                return super().render_lines(crop)
            return self._framed_lines(crop)
        finally:
            self._laid = None

    def _framed_lines(self, crop: Region) -> list[Strip]:
        """Textual asks for all lines between those that changed, too."""
        size = self.outer_size
        if self._kept_as != (self.laid, size):
            self._kept.clear()
            self._kept_as = self.laid, size
        strips = []
        for y in crop.line_range:
            strip = self._kept.get(y)
            if strip is None:
                if 0 < y < size.height - 1:
                    strip = self.render_line(y - 1)
                else:  # with the border's words
                    strip = super().render_lines(Region(0, y, size.width, 1))[0]
                self._kept[y] = strip
            strips.append(strip)
        if crop.column_span != (0, size.width):
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def forget(self, regions: Sequence[Region]) -> None:
        if not regions:
            self._kept.clear()
        for region in regions:
            for y in region.line_range:
                self._kept.pop(y + 1, None)

    def line(self, segments: Iterable[Segment], thumb: bool | None, style: Style) -> Strip:
        """A whole line of the pane, in a style; with the border, where that is drawn here."""
        laid = self.laid
        whole = Segment.adjust_line_length(list(segments), laid.across)
        if thumb is not None:
            whole.append(_BARS[thumb])
        width = laid.across + (thumb is not None)
        if laid.frame is not None:
            return laid.frame.line(whole, style, width)
        return Strip(Segment.apply_style(whole, style), width)

    def scrolled_to(self, offset: Offset | None) -> bool:
        """Scroll to where the scrollbar was clicked; false for a click beside it."""
        if offset is None or offset.x < self.across:
            return False
        share = offset.y / max(1, self.size.height - 1)
        self.scroll_to(y=round(share * self.max_scroll_y), animate=False)
        return True

    def bring(self, line: int, around: int) -> None:
        """Scroll where a line, or one of the `around` next to it, is out of sight.

        Not by as little as can be, which would paint all lines at each key from there on: a third
        of the pane then lies before the line, seen from where it was come from.
        """
        top, height = self.scroll_offset.y, self.size.height
        around = min(around, height // 3)
        if max(0, line - around) < top:
            self.scroll_to(y=line - height + 1 + height // 3, animate=False)
        elif line + around >= top + height:
            self.scroll_to(y=line - height // 3, animate=False)

    def repaint(self, lines: Iterable[int]) -> None:
        """Have these lines painted again, as far as they are on screen."""
        (width, height), top = self.size, self.scroll_offset.y
        seen = [Region(0, line - top, width, 1) for line in lines if 0 <= line - top < height]
        if seen:
            self.refresh(*seen)
