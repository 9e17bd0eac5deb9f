"""Figures and words, in exactly so many cells.

Knows: cell widths and how numbers are spelt on screen.
Must not know: widgets, recordings.
"""

from __future__ import annotations

import math

from rich.cells import cell_len, set_cell_size
from textual.content import Content

from kldtui.rows import Logp


def plain(text: str) -> Content:
    """Text as it is, for titles: a string there would be read as markup."""
    return Content(text)


def fit(text: str, width: int) -> str:
    """Exactly `width` cells: padded, or cut with an ellipsis."""
    if cell_len(text) > width:
        return set_cell_size(text, max(0, width - 1)) + "…" if width > 0 else ""
    return set_cell_size(text, width)


def wrap_words(text: str, width: int) -> list[str]:
    """Words into lines of at most `width` cells; a longer word is cut by `fit` when drawn."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if line and cell_len(joined) > width:
            lines.append(line)
            line = word
        else:
            line = joined
    return [*lines, line]


def many(n: int, what: str) -> str:
    """`1 root`, `1,000 roots`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def nats(value: float, bound: str = "") -> str:
    """A figure in nats, or a dash for what is not known; `bound` is a sign such as `≥`."""
    if not math.isfinite(value):
        return "–"
    return f"{bound}{value:.2f}" if abs(value) < 100 else f"{bound}{value:.0f}"


def percent(logp: Logp | None) -> str:
    """A probability in percent, at most 6 cells; `≤` where only a bound is known."""
    if logp is None:
        return "–"
    p = 100 * math.exp(min(logp.value, 0.0))
    if p >= 0.1:
        text = f"{p:.1f}"
    elif p >= 0.0095:
        text = f"{p:.2f}"
    else:
        text = f"{p:.0e}".replace("e-0", "e-") if p > 0 else "0"
    return ("≤" if logp.bound else "") + text


def duration(seconds: float) -> str:
    """`8 s`, `3 min`, `2 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
