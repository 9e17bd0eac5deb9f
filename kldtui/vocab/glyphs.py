"""Foreign text made visible: one line, no control characters, a width that terminals agree on.

Knows: which characters a terminal would obey, hide, join or measure differently, and what is shown
instead; the width in cells of what is shown.
Must not know: tokens, files, Textual.

Every width is additive: no character is let through whose width depends on its neighbours (joiners,
variation selectors, emoji modifiers, conjoining jamo), so texts can be cut and joined at will.
Widths are those of Unicode's EastAsianWidth (UAX #11); what rich, C libraries, tmux and terminals
measure differently is spelled out as `<U+1F3FD>`: aligned columns before pretty emoji.
"""

from __future__ import annotations

import re
import unicodedata
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

NEWLINE = "⏎"
TAB = "→"
SPACE = "␣"
PART = "░"
"""Stands for the bytes of a character that a later token completes."""
CARRIER = "◌"
"""Carries a combining mark that has no base of its own."""

_MARKS_PER_BASE = 4
"""More on one base than any orthography stacks: the rest is spelled out."""

_OBEYED_OR_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs", "Mc"})
"""Categories never shown as they are. Mc (spacing marks): 0 cells in rich, 1 in C libraries."""

_SPELLED = re.compile(
    "["
    # Default_Ignorable_Code_Point where the category does not tell (UCD, DerivedCoreProperties).
    "\u034f\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\ufff0-\ufff8\U000e0000-\U000e0fff"
    "\u115f\u3164\uffa0"  # Hangul fillers
    "\u2800"  # the blank of the Braille patterns
    "\u1160-\u11ff\ud7b0-\ud7ff"  # jamo that conjoin with what stands before them
    "\u302e\u302f\U0001f3fb-\U0001f3ff"  # tone marks and emoji modifiers: attached or not
    # Made wide by Unicode 16: as wide as the table that is asked.
    "\u2630-\u2637\u268a-\u268f\u4dc0-\u4dff\U0001d300-\U0001d356\U0001d360-\U0001d376"
    "\u3248-\u324f"  # ambiguous (UAX 11), and wide in the GNU C library
    # Narrow in rich; wide in tmux 3.5: regional indicators and emoji that take a modifier.
    "\U0001f1e6-\U0001f1ff\u261d\u270c\u270d\U0001f3cb\U0001f3cc\U0001f574\U0001f575\U0001f590"
    # What stands for others here never stands for itself (but for the arrow, which is common).
    "\u2400-\u2426\u23ce\u25cc\u2591"
    "]"
)


class _Kind(Enum):
    BASE = 0
    MARK = 1
    APART = 2
    """Carries no marks: a space, or something spelled out."""


class _Glyph(NamedTuple):
    text: str
    width: int
    kind: _Kind


class Shown(NamedTuple):
    """Visible text and its width in cells."""

    text: str
    width: int


def _apart(text: str) -> _Glyph:
    return _Glyph(text, len(text), _Kind.APART)


def codepoint(character: str) -> str:
    """`<U+202E>`."""
    return f"<U+{ord(character):04X}>"


@lru_cache(maxsize=1 << 14)
def _glyph(character: str) -> _Glyph:
    number = ord(character)
    if character == " ":
        return _apart(" ")
    if character == "\n":
        return _apart(NEWLINE)
    if character == "\t":
        return _apart(TAB)
    if number < 0x20:
        return _apart(chr(0x2400 + number))
    if number == 0x7F:
        return _apart("\u2421")
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is part of no character (surrogateescape)
        return _apart(f"<0x{number - 0xDC00:02X}>")
    category = unicodedata.category(character)
    if category in _OBEYED_OR_HIDDEN or _SPELLED.match(character):
        return _apart(codepoint(character))
    if category in {"Mn", "Me"}:
        return _Glyph(character, 0, _Kind.MARK)
    wide = unicodedata.east_asian_width(character) in {"W", "F"}
    return _Glyph(character, 2 if wide else 1, _Kind.BASE)


def show(text: str) -> Shown:
    """`text` as one line of visible glyphs, spaces as they are, and its width in cells.

    Newline ⏎, tab →, other C0 as control pictures (␀ ␛ ␍ ␡), C1, bidirectional, zero-width,
    unassigned, private and other invisible characters as `<U+202E>`, undecodable bytes (low
    surrogates as made by `surrogateescape`) as `<0xE6>`; a combining mark without a base on ◌.
    """
    if text.isascii() and text.isprintable():
        return Shown(text, len(text))
    shown: list[str] = []
    width = 0
    room: int | None = None  # marks that the last base still takes; None without a base
    for character in text:
        glyph = _glyph(character)
        if glyph.kind is not _Kind.MARK:
            room = _MARKS_PER_BASE if glyph.kind is _Kind.BASE else None
        elif room is None:
            glyph = _Glyph(CARRIER + character, 1, _Kind.MARK)
            room = _MARKS_PER_BASE - 1
        elif room == 0:
            glyph = _apart(codepoint(character))
        else:
            room -= 1
        shown.append(glyph.text)
        width += glyph.width
    return Shown("".join(shown), width)


def show_bytes(data: bytes) -> Shown:
    """`data` as `show` gives it, UTF-8 where it is, `<0xE6>` for every byte where it is not."""
    return show(data.decode("utf-8", "surrogateescape"))


def safe(text: str) -> str:
    """Foreign text (a server's words, a file's or model's name) as one line of visible glyphs."""
    return show(text).text


def harmless(text: str) -> str:
    """Text that may hold glyphs of `show` already: only what a terminal obeys or hides is spelt."""
    return "".join(c if c.isprintable() else _glyph(c).text for c in text)


_LONE = re.compile("[\udc80-\udcff]")


def raw_text(data: bytes) -> str:
    """`data` decoded, nothing substituted but undecodable bytes, which become `<0xE6>`."""
    text = data.decode("utf-8", "surrogateescape")
    return _LONE.sub(lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>", text)
