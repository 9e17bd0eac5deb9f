"""Ids through text and back, where it has to be said which come back and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines.parity import SAMPLE, OwnTokenizer
from kldtui.errors import KldtuiError, VocabularyError
from kldtui.recordings import open_recording
from tests import tiny_model as model
from tests.builders_vocab import LLAMA_DECODER, write_tokenizer_json
from tests.mlx_fake import tiny_tokenizer

TINY = tiny_tokenizer()


def test_of_the_real_recording_45_positions_fail_31_of_them_in_one_chunk(smollm2: Path) -> None:
    tokenizer = OwnTokenizer.load(smollm2 / "tokenizer.json")
    recording = open_recording(smollm2 / "ref.kld")
    lost = {}
    for chunk in range(recording.shape.n_chunk):
        tokens = recording.tokens(chunk).tolist()
        checks = [tokenizer.check(tokens[: int(t)]) for t in recording.scored(chunk)]
        lost[chunk] = [check for check in checks if check.text is None]
    recording.close()
    assert [len(lost[chunk]) for chunk in sorted(lost)] == [0, 0, 0, 1, 0, 12, 31, 1]
    assert {(check.at, check.nearest) for check in lost[6]} == {(0, None)}
    assert all(check.nearest is not None for chunk in (3, 5, 7) for check in lost[chunk])


@settings(deadline=None)
@given(st.lists(st.integers(2, model.N_VOCAB - 1), min_size=1, max_size=30))
def test_a_text_gives_exactly_the_ids_and_a_nearest_prefix_does_too(ids: list[int]) -> None:
    parity = TINY.check(ids)
    if parity.text is not None:
        assert model.encode(parity.text) == ids
        assert parity.at is None
        return
    assert parity.at is not None
    assert 0 <= parity.at < len(ids)
    exact = [n for n in range(1, len(ids)) if TINY.text(ids[:n]) is not None]
    assert parity.nearest == max(exact, default=None)


def test_of_a_long_prefix_that_breaks_early_few_others_are_tried() -> None:
    tried: list[str] = []

    def encode(text: str) -> list[int]:
        tried.append(text)
        return model.encode(text)

    tokenizer = OwnTokenizer(encode, model.decode, TINY.vocabulary)
    halves = [model.FIRST_HALF, model.SECOND_HALF]
    parity = tokenizer.check([*model.encode("a b " * 3), *halves, *model.encode("a b" * 500)])
    assert (parity.at, parity.nearest) == (12, 12)
    assert len(tried) < 100


def test_no_ids_have_no_text() -> None:
    assert TINY.check([]).text is None


def test_bos_alone_is_the_empty_text() -> None:
    assert tiny_tokenizer(adds_bos=True).check([model.BOS]).text == ""


def test_what_a_server_puts_around_a_text_is_learnt_from_a_count() -> None:
    bare = len(model.encode(SAMPLE))
    tokenizer = tiny_tokenizer()
    tokenizer.settle(bare + 1)
    assert list(tokenizer.before) == [model.BOS]
    tokenizer.settle(bare)
    assert not tokenizer.before
    with pytest.raises(KldtuiError, match=f"makes {bare + 2} tokens of a text of which"):
        tokenizer.settle(bare + 2)


def test_sentencepiece_keeps_its_extra_space(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "▁the", "▁", "book", "▁book", "t", "h", "e", "b", "o", "k"]
    merges = ["t h", "th e", "▁ the", "b o", "bo o", "boo k", "▁ book"]
    pieces += ["th", "the", "bo", "boo", *"It's204-13,:.\n\tdf(x)rn{a[]}#ïvcé漢字😀", " "]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    write_tokenizer_json(
        tmp_path / "tokenizer.json",
        vocab,
        added=[(0, "<unk>", True), (1, "<s>", True)],
        merges=[line.split(" ") for line in merges],
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        decoder=LLAMA_DECODER,
        unk_token="<unk>",
    )
    tokenizer = OwnTokenizer.load(tmp_path)
    ids = [1, vocab["▁the"], vocab["▁book"]]
    assert tokenizer.before == (1,)
    assert tokenizer.check(ids).text == "the book"
    assert tokenizer.encode("the book") == ids
    assert tokenizer.check(ids[1:]).text is None, "the server would put BOS before it"


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_where_there_is_no_tokenizer_it_says_what_to_give(tmp_path: Path, name: str) -> None:
    with pytest.raises(VocabularyError, match=r"give the tokenizer\.json of the model"):
        OwnTokenizer.load(tmp_path / name)
