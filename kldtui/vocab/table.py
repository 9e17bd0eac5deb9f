"""From token ids to bytes, to text, to what is seen.

Knows: a table of pieces (id -> bytes) and what its source says of special tokens.
Must not know: where the table came from (sources.py), Textual.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kldtui.vocab.glyphs import PART, SPACE, raw_text, show, show_bytes

HOW_TO_GET_TEXT = (
    "no text: only token ids are known; give --tokenizer FILE (tokenizer.json, a GGUF file, "
    "or a folder that holds either)"
)

_DISPLAYS_KEPT = 1 << 17
_BETWEEN_BYTES = re.compile("(?<=<0x[0-9A-F]{2})><0x(?=[0-9A-F]{2}>)")


@dataclass(frozen=True, slots=True)
class Display:
    """What is seen of a token; glyphs as `glyphs.show` gives them, never empty.

    text: for the stream, spaces as they are; width cells wide (at least 1).
    newline: whether the token holds a line feed (shown as ⏎): a place to break the line after.
    table: for lists, every space as ␣, so that "foo" and " foo" differ, and bytes of no character
    together, as `<0xE5 88>`; table_width cells wide.
    """

    text: str
    width: int
    newline: bool
    table: str
    table_width: int


def _make_display(data: bytes) -> Display:
    text, width = show_bytes(data)
    table, joined = _BETWEEN_BYTES.subn(" ", text.replace(" ", SPACE))
    return Display(text, width, b"\n" in data, table, width - 3 * joined)


def _name(text: str) -> Display:
    text, width = show(text)
    return Display(text, width, False, text, width)


class Vocabulary:
    """The pieces of one tokenizer, as far as its source gives them.

    source: where they come from, for people ("tokenizer.json", "model.gguf", "none").
    hint: one line on what is missing or doubtful and what to do about it; empty if nothing.
    n_vocab: ids the source numbers (padding may follow in the logits); None if it does not say.
    bos_id, add_bos: None where the source does not say.
    eog_ids: ids that end a generation, as far as the source tells.
    """

    def __init__(
        self,
        pieces: Mapping[int, bytes],
        source: str,
        *,
        n_vocab: int | None = None,
        bos_id: int | None = None,
        add_bos: bool | None = None,
        eog_ids: Iterable[int] = (),
        hint: str = "",
        unnamed: str = "<id {}>",
    ) -> None:
        self._pieces = dict(pieces)
        self._displays: dict[int, Display] = {}
        self._standing: dict[int, Display] = {}
        self._unnamed = unnamed
        self.source = source
        self.hint = hint
        self.n_vocab = n_vocab
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.eog_ids = frozenset(eog_ids)

    def __bool__(self) -> bool:
        """Whether there is any text."""
        return bool(self._pieces)

    def piece(self, id: int) -> bytes | None:
        """The exact bytes of a token; None where it has no text here (padding, unknown)."""
        return self._pieces.get(id)

    def text(self, ids: Sequence[int]) -> str:
        """The bytes joined and decoded; bytes of no character as `<0xE6>`, unknown ids `<id 7>`.

        Raw: control characters stay what they are. For a terminal use `display_run` or `safe`.
        """
        parts: list[str] = []
        run = bytearray()
        for id in ids:
            piece = self._pieces.get(id)
            if piece is None:
                parts.append(raw_text(bytes(run)))
                run.clear()
                parts.append(f"<id {id}>")
            else:
                run += piece
        parts.append(raw_text(bytes(run)))
        return "".join(parts)

    def display(self, id: int) -> Display:
        """What is seen of the token by itself; computed once, then O(1)."""
        held = self._displays.get(id)
        if held is None:
            piece = self._pieces.get(id)
            held = _make_display(piece) if piece else _name(self._unnamed.format(id))
            if len(self._displays) >= _DISPLAYS_KEPT:
                self._displays.clear()
                self._standing.clear()
            self._displays[id] = held
        return held

    def standing(self, id: int) -> Display | None:
        """The display of a token whose bytes neither begin nor end inside a character; of any
        other None: what is seen of it depends on its neighbours. O(1) after the first time."""
        held = self._standing.get(id)
        if held is None and _is_text(self._pieces.get(id, b"")):
            held = self._standing[id] = self.display(id)
        return held

    def ids(self) -> Collection[int]:
        """The ids that have text."""
        return self._pieces.keys()


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def no_text(why: str = "") -> Vocabulary:
    """A vocabulary without any text, a token shown as `#123`."""
    return Vocabulary({}, "none", hint=HOW_TO_GET_TEXT + why, unnamed="#{}")


NONE = no_text()
"""The one to compare with and to default to."""


def _needed(lead: int) -> int:
    """How many bytes a UTF-8 character has that begins with `lead`; 0 if none does."""
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 0


def _open_tail(data: bytes) -> bytes:
    """The bytes at the end that begin a character and may yet be completed (at most 3)."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            tail = data[-back:]
            return tail if back < _needed(byte) and _may_open(tail) else b""
    return b""


def _may_open(tail: bytes) -> bool:
    """Whether `tail` (a lead byte and what follows) is the beginning of a valid character."""
    if len(tail) < 2:
        return True
    low, high = {
        0xE0: (0xA0, 0xBF),
        0xED: (0x80, 0x9F),
        0xF0: (0x90, 0xBF),
        0xF4: (0x80, 0x8F),
    }.get(tail[0], (0x80, 0xBF))
    return low <= tail[1] <= high


@lru_cache(maxsize=1 << 12)
def _display_of(data: bytes) -> Display:
    return _make_display(data)


def display_run(vocab: Vocabulary, ids: Sequence[int], before: Sequence[int] = ()) -> list[Display]:
    """What is seen of consecutive tokens, one display each.

    Where a character's bytes are spread over several tokens, the token that completes it shows the
    character, and the ones before show ░ for their part of it. Bytes that complete nothing, or
    have not yet, are shown as `<0xE6>`. So of what is streamed in, only the last three displays
    may change. `before`: the ids that precede (the last three suffice), when `ids` is a cut from
    the middle.
    """
    displays: list[Display] = []
    open_bytes = b""
    openers: list[tuple[int, bytes]] = []
    known = vocab._standing.get
    for id in (*before, *ids) if before else ids:
        display = None if open_bytes else known(id) or vocab.standing(id)
        if display is None:
            piece = vocab.piece(id)
            if piece:
                display, left, completes = _continue(open_bytes, piece)
                if completes:
                    for k, head in openers:
                        displays[k] = _display_of_part(head)
                if completes or not left or len(left) <= len(open_bytes):
                    openers = []
                if left:
                    shown = open_bytes + piece if completes else piece
                    openers.append((len(displays), shown[: max(0, len(shown) - len(left))]))
                open_bytes = left
            else:
                display, open_bytes, openers = vocab.display(id), b"", []
        displays.append(display)
    return displays[len(before) :] if before else displays


@lru_cache(maxsize=1 << 12)
def _display_of_part(head: bytes) -> Display:
    """A token whose last bytes, behind `head`, are part of a character shown later."""
    text, width = show_bytes(head) if head else ("", 0)
    text += PART
    return Display(text, width + 1, b"\n" in head, text.replace(" ", SPACE), width + 1)


def _continue(open_bytes: bytes, piece: bytes) -> tuple[Display, bytes, bool]:
    """The display of `piece` after the beginning of a character, what it leaves open, and
    whether it completes that character."""
    joined = open_bytes + piece
    if open_bytes and len(joined) < _needed(joined[0]) and _open_tail(joined) == joined:
        return _display_of(piece), joined, False
    missing = _needed(open_bytes[0]) - len(open_bytes) if open_bytes else 0
    completes = bool(missing) and _is_text(joined[: len(open_bytes) + missing])
    shown = joined if completes else piece
    return _display_of(shown), _open_tail(piece), completes


def compare(a: Vocabulary, b: Vocabulary) -> list[str]:
    """Where two vocabularies differ, a line each; empty if one dictionary serves both.

    Padding is tolerated: an id without text (or with empty text) in one of them differs from
    nothing, except where the other has text beyond the last id that the one numbers.
    """
    lines: list[str] = []
    differing = sorted(
        id for id in a.ids() if a.piece(id) and b.piece(id) and a.piece(id) != b.piece(id)
    )
    if differing:
        first = differing[0]
        more = f" (and {len(differing) - 1:,} more ids)" if len(differing) > 1 else ""
        lines.append(
            f"token {first} is {a.display(first).table} in {a.source}, "
            f"{b.display(first).table} in {b.source}{more}"
        )
    for one, other in ((a, b), (b, a)):
        if one.n_vocab is None or other.n_vocab is None:
            continue
        beyond = [id for id in one.ids() if id >= other.n_vocab and one.piece(id)]
        if beyond:
            first = min(beyond)
            lines.append(
                f"{len(beyond):,} tokens from {first} ({one.display(first).table}) on are in "
                f"{one.source} only: {other.source} has {other.n_vocab:,}"
            )
    return lines
