"""Ids to bytes to what is seen: no source's text may harm the terminal or mislead its reader."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.content import Content

from kldtui.vocab import (
    NONE,
    Display,
    display_run,
    safe,
)
from tests.builders_vocab import (
    harmless,
    vocabulary_of,
)


def seen(piece: bytes) -> Display:
    return vocabulary_of(piece).display(0)


# -- what is seen of one token -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        ("\x1b[31m", "␛[31m"),
        ("\x1b]52;c;aGk=\x07", "␛]52;c;aGk=␇"),
        ("\0", "␀"),
        ("a\rb", "a␍b"),
        ("\x7f", "␡"),
        ("\r\n", "␍⏎"),
        ("\t", "→"),
        ("\x9b31m", "<U+009B>31m"),
        ("\x85", "<U+0085>"),
        ("abc\u202edef", "abc<U+202E>def"),
        ("\u2066", "<U+2066>"),
        ("\u200b", "<U+200B>"),
        ("\ufeff", "<U+FEFF>"),
        ("\u3164", "<U+3164>"),
        ("\u2028", "<U+2028>"),
        ("\u00a0", "<U+00A0>"),
        ("\u00ad", "<U+00AD>"),
        ("\U000e0041", "<U+E0041>"),
        ("\ue000", "<U+E000>"),
        ("\u0378", "<U+0378>"),
        ("❤\ufe0f", "❤<U+FE0F>"),
        ("👩\u200d💻", "👩<U+200D>💻"),
        ("👍\U0001f3fd", "👍<U+1F3FD>"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_shown(piece: str, text: str) -> None:
    display = seen(piece.encode())
    assert display.text == text
    assert display.width == cell_len(text)


@pytest.mark.parametrize("piece", [b"[/", b"[0]", b"[red]", b"[b +", b"[/]", b"\\[", b"[@click=a]"])
def test_markup_in_a_token_stays_literal(piece: bytes) -> None:
    display = seen(piece)
    assert display.text == piece.decode()
    assert display.table == piece.decode().replace(" ", "␣")
    assert Content(display.text).plain == piece.decode()


def test_spaces_tabs_and_newlines_are_visibly_different_in_lists() -> None:
    pieces = [b"foo", b" foo", b"foo ", b"\tfoo", b"\nfoo", b" ", b"  ", b"\t", b"\n", b"\r\n"]
    tables = [seen(piece).table for piece in pieces]
    assert tables[:3] == ["foo", "␣foo", "foo␣"]
    assert len(set(tables)) == len(pieces)
    assert not any(" " in table for table in tables)
    assert seen(b" foo").text == " foo"
    assert seen("\u3000".encode()).table != seen(b"  ").table


def test_glyphs_that_stand_for_others_never_stand_for_themselves() -> None:
    for literal, meant in [("⏎", b"\n"), ("␣", b" "), ("␛", b"\x1b"), ("␀", b"\0")]:
        assert seen(literal.encode()).table != seen(meant).table


def test_newline_marks_where_a_line_may_break() -> None:
    assert seen(b"}\n").newline
    assert not seen(b"}\r").newline


@pytest.mark.parametrize(
    ("piece", "text", "width"),
    [
        ("e\u0301", "e\u0301", 1),
        ("\u0301", "◌\u0301", 1),
        (" \u0301", " ◌\u0301", 2),
        ("\n\u0301", "⏎◌\u0301", 2),
        ("\u20e3", "◌\u20e3", 1),
        ("日本", "日本", 4),
        ("e" + "\u0301" * 6, "e" + "\u0301" * 4 + "<U+0301><U+0301>", 17),
    ],
)
def test_marks_stay_on_their_base_and_never_stand_alone(piece: str, text: str, width: int) -> None:
    display = seen(piece.encode())
    assert (display.text, display.width) == (text, width)
    assert cell_len(text) == width


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
@example("\ud800\udcff")
@settings(deadline=None, max_examples=300)
def test_foreign_text_becomes_one_harmless_line(text: str) -> None:
    line = safe(text)
    assert harmless(line)
    line.encode("utf-8")


@given(st.binary(max_size=40))
@example(b"\xed\xa0\x80")
@example(b"\xf0\x9f\x98")
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_shown_harmlessly_and_measured_as_they_are_drawn(piece: bytes) -> None:
    display = seen(piece)
    for text, width in [(display.text, display.width), (display.table, display.table_width)]:
        assert harmless(text)
        assert width == cell_len(text) >= 1


def test_every_character_is_measured_as_it_is_drawn_whatever_its_neighbours() -> None:
    drawn = [seen(chr(c).encode("utf-8", "surrogatepass")) for c in range(0x32000)]
    drawn += [seen(chr(c).encode()) for c in range(0xE0000, 0xE0200)]
    assert [d for d in drawn if d.width != cell_len(d.text) or d.width < 1] == []
    for shuffle in (7, 1009, 40009):
        mixed = [drawn[i * shuffle % len(drawn)] for i in range(5000)]
        assert cell_len("".join(d.text for d in mixed)) == sum(d.width for d in mixed)


def test_a_display_is_made_once() -> None:
    vocab = vocabulary_of(b"a", b"b")
    assert vocab.display(1) is vocab.display(1)
    assert vocab.display(7) is vocab.display(7)


# -- ids without text ----------------------------------------------------------------------------


@pytest.mark.parametrize("id", [-1, 2, 49153, 2**31])
def test_an_id_without_text_is_shown_by_its_number(id: int) -> None:
    vocab = vocabulary_of(b"a", b"b")
    assert vocab.piece(id) is None
    assert vocab.display(id).text == vocab.text([id]) == f"<id {id}>"
    assert [d.text for d in display_run(vocab, [0, id, 1])] == ["a", f"<id {id}>", "b"]


def test_without_a_vocabulary_ids_are_shown_and_the_hint_says_how_to_get_text() -> None:
    assert NONE.display(123).text == "#123"
    assert not NONE
    assert "--tokenizer FILE" in NONE.hint
    assert NONE.source == "none"


def test_lists_have_the_bytes_of_a_token_together() -> None:
    vocab = vocabulary_of(b" \xe5\x88", b"\xe5\x88\xe5x", b"\xe5\x88\x97", b"AB><0xCD>")
    assert [vocab.display(id).table for id in range(4)] == [
        "␣<0xE5 88>", "<0xE5 88 E5>x", "列", "AB><0xCD>",
    ]  # fmt: skip
    assert all(d.table_width == cell_len(d.table) for d in map(vocab.display, range(4)))


# -- consecutive tokens --------------------------------------------------------------------------


def shown(*pieces: bytes) -> list[str]:
    return [d.text for d in display_run(vocabulary_of(*pieces), range(len(pieces)))]


def test_a_character_split_over_tokens_is_shown_by_the_one_that_completes_it() -> None:
    assert shown(b" \xe6\x97", b"\xa5!") == [" ░", "日!"]
    assert shown(b"\xf0", b"\x9f", b"\x98", b"\x80") == ["░", "░", "░", "😀"]
    assert shown(b"\xe6\x97", b"\xa5\xe6\x9c", b"\xac") == ["░", "日░", "本"]


def test_bytes_that_complete_nothing_are_shown_as_bytes() -> None:
    assert shown(b"\x97", b"a") == ["<0x97>", "a"]
    assert shown(b"\xe6\x97", b"a", b"\xa5") == ["<0xE6><0x97>", "a", "<0xA5>"]
    assert shown(b"\xe6", b"\xe6\x97\xa5") == ["<0xE6>", "日"]
    assert shown(b"\xf4", b"\x9f\x80\x80") == ["<0xF4>", "<0x9F><0x80><0x80>"]
    assert shown(b"\xed", b"\xa0", b"\x80") == ["<0xED>", "<0xA0>", "<0x80>"]
    assert shown(b"ends half-way \xf0\x9f") == ["ends half-way <0xF0><0x9F>"]
    vocab = vocabulary_of(b"\xe6\x97", b"\xa5")
    assert [d.text for d in display_run(vocab, [0, 9, 1])] == ["<0xE6><0x97>", "<id 9>", "<0xA5>"]
    assert vocab.text([0, 9, 1]) == "<0xE6><0x97><id 9><0xA5>"


def test_a_mark_or_joiner_of_its_own_token_keeps_its_own_cells() -> None:
    assert shown(b"e", "\u0301".encode()) == ["e", "◌\u0301"]
    assert shown("👩".encode(), "\u200d".encode(), "💻".encode()) == ["👩", "<U+200D>", "💻"]


def cut(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [piece for piece in [*pieces, data] if piece]


@given(st.text("aé日😀ё \n�[", max_size=12), st.lists(st.integers(1, 3), max_size=30))
@settings(deadline=None, max_examples=200)
def test_text_cut_anywhere_reads_right_again(text: str, lengths: list[int]) -> None:
    pieces = cut(text.encode(), lengths)
    vocab = vocabulary_of(*pieces)
    ids = range(len(pieces))
    assert vocab.text(ids) == text
    read = "".join(d.text for d in display_run(vocab, ids)).replace("░", "")
    assert read == safe(text)


@given(
    st.lists(
        st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80", b"e"]),
        max_size=12,
    ),
    st.integers(0, 12),
)
@settings(deadline=None, max_examples=200)
def test_a_run_stays_aligned_is_never_redrawn_and_can_be_cut(pieces: list[bytes], at: int) -> None:
    vocab = vocabulary_of(*pieces)
    ids = list(range(len(pieces)))
    displays = display_run(vocab, ids)
    assert len(displays) == len(ids)
    assert all(harmless(d.text) and d.width >= 1 for d in displays)
    assert cell_len("".join(d.text for d in displays)) == sum(d.width for d in displays)
    settled = max(0, at - 3)
    assert display_run(vocab, ids[:at])[:settled] == displays[:settled]
    assert display_run(vocab, ids[at:], before=ids[max(0, at - 3) : at]) == displays[at:]
