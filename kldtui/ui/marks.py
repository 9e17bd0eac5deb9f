"""Colours and symbols of the stream and the lists, in one place.

Knows: the heat scale, the mark of each kind of position, and the styles they are drawn in.
Must not know: widgets, or where the figures come from.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

ROOT = "▚"
FIRST = "◆"
NEAR_TIE = "≈"
TIE = "="
INVALID = "✗"
FORK = "◆"
THUMB = "▐"
FLIPS: dict[bool | None, str] = {True: "●", False: "·", None: "-"}
"""Of a quant that flips, that does not, and of which it is not known."""
FLOOR = "~"
LABELS = dict(zip("1234567", "①②③④⑤⑥⑦", strict=True))
BLOCKS = " ▏▎▍▌▋▊▉█"
LEVELS = 8

# Dark to bright, told apart also in grey; the text on them keeps a contrast above 4.5.
_HEAT = ("#1d2b3a", "#243a4a", "#3a4a3a", "#55502a", "#6b4a1e", "#7f3f1a", "#8f3018", "#a01f1f")

REF = Style(color="#7cc7ff", bold=True)
QUANT = Style(color="#ffb454", bold=True)
STREAM = Style(color="#9ece6a")
DIM = Style(color="#7d8590")
PLAIN = Style()
WARN = Style(color="#ff6b6b", bold=True)
GOOD = Style(color="#7ee787")
TITLE = Style(bold=True)
QUIET = Style(color="#c8b68a")
CURSOR = Style(reverse=True, bold=True)
CURSOR_ELSEWHERE = Style(underline=True, bold=True)
HIT = Style(color="#101010", bgcolor="#f2d45c")
ROOT_STYLE = Style(color="#ff9e64", bold=True, underline=True)
NEAR_STYLE = Style(color="#c8b68a", underline=True)
TIE_STYLE = Style(color="#b39ddb")
INVALID_STYLE = Style(color="#ff6b6b", strike=True)
PARTED = Style(color="#ffffff", bgcolor="#4a2f5e")
MET = Style(color="#ffffff", bgcolor="#24503a")
SELECTED = Style(bgcolor="#2d4a6b", bold=True)
SELECTED_ELSEWHERE = Style(bgcolor="#2a3038")


def heat_levels(values: NDArray[np.floating], low: float, high: float) -> NDArray[np.int64]:
    """0 below `low`, then 1…LEVELS-1 on a log scale up to `high` (both nats); NaN is 0."""
    steps = np.geomspace(low, high, LEVELS)
    levels = np.minimum(np.searchsorted(steps, values, side="right"), LEVELS - 1)
    return np.where(np.isnan(values), 0, levels)


@cache
def heat_style(level: int) -> Style:
    """The background of a heat level; level 0 has none."""
    return Style(bgcolor=_HEAT[level]) if level else PLAIN


def bar(share: float, width: int) -> str:
    """A bar of `width` cells for a share of 0…1, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share if math.isfinite(share) else 0.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = BLOCKS[8] * full + (BLOCKS[rest] if rest and full < width else "")
    return text.ljust(width)
