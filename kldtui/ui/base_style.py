"""A widget's own colours and the words in its border, painted again only when they change.

Knows: what Textual asks of a widget when its style changes, and what a border's words cost.
Must not know: any widget of this program.
"""

from __future__ import annotations

from rich.style import Style
from textual.widget import Widget

from kldtui.ui.text import plain


class BaseStyled(Widget):
    """A widget that draws many lines: `rich_style` walks up the screen each time it is asked,
    and other words in the border have all of the widget painted again."""

    _base_style: Style | None = None
    _heads: tuple[str, str] | None = None

    @property
    def base_style(self) -> Style:
        """`rich_style`, as it was when the widget's style last changed."""
        if self._base_style is None:
            self._base_style = self.rich_style
        return self._base_style

    def head(self, title: str, subtitle: str = "") -> None:
        """Set the border's words, as they are; what is the same is not painted again."""
        before = self._heads or ("", "")
        self._heads = (title, subtitle)
        if title != before[0]:
            self.border_title = plain(title)
        if subtitle != before[1]:
            self.border_subtitle = plain(subtitle)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base_style = None
