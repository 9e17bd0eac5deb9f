"""Answers that people saved from servers, as quants and as references."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.branching import Arm, Branch
from kldtui.cli import cli
from kldtui.errors import (
    DamagedRecording,
    NotARecording,
    RecordingError,
    StreamMismatch,
    UnsupportedRecording,
)
from kldtui.index import Index, State
from kldtui.labels.branch_file import line_of
from kldtui.position import Position
from kldtui.recordings import Recording, describe, open_quant, open_recording
from kldtui.recordings.base import prompt_length
from kldtui.review.session import Session
from kldtui.rows import TopRow, TopRows
from kldtui.vocab import NONE, Vocabulary, from_pieces
from tests import builders_foreign as make
from tests.builders import Stream, make_stream, write_kld
from tests.builders_foreign import Json, Model, write_lines

N_VOCAB = 24
STREAM = make_stream(n_chunk=3, n_ctx=16, n_vocab=N_VOCAB, seed=5)
STREAM = Stream(np.where(STREAM.tokens < 4, STREAM.tokens + 4, STREAM.tokens), N_VOCAB)
"""Without the halves of characters and the control token."""


def no_vocabulary() -> Vocabulary:
    raise AssertionError("the ids are there: no vocabulary is needed")


def words() -> Vocabulary:
    return make.vocabulary(N_VOCAB)


@pytest.fixture
def ref(tmp_path: Path) -> Recording:
    model = Model.of(STREAM, 1)
    return open_recording(write_kld(tmp_path / "ref.kld", STREAM, model.logits))


QUANT = Model.of(STREAM, 2)

ALL_KINDS: dict[str, tuple[str, Callable[[int], Json]]] = {
    "llama": ("llama-completion", lambda c: make.llama(QUANT, c)),
    "llama, after sampling": (
        "llama-completion",
        lambda c: make.llama(QUANT, c, post_sampling=True),
    ),
    "llama, old": ("llama-completion", lambda c: make.llama_old(QUANT, c)),
    "vllm": ("vllm", lambda c: make.vllm(QUANT, c)),
    "vllm, without the prompt's ids": ("vllm", lambda c: make.vllm(QUANT, c, ids=False)),
    "vllm, without ranks": ("vllm", lambda c: make.vllm(QUANT, c, ranks=False)),
    "sglang": ("sglang", lambda c: make.sglang(QUANT, c)),
    "sglang, from the middle": ("sglang", lambda c: make.sglang(QUANT, c, start=9)),
    "chat": ("openai-chat", lambda c: make.chat(QUANT, c)),
    "chat with ids": ("openai-chat", lambda c: make.chat(QUANT, c, ids=True)),
    "completions": ("openai-completions", lambda c: make.completions(QUANT, c)),
    "completions with ids": (
        "openai-completions",
        lambda c: make.completions(QUANT, c, token_ids=True),
    ),
    "completions, echoed": ("openai-completions", lambda c: make.completions(QUANT, c, echo=True)),
    "completions with ids, echoed": (
        "openai-completions",
        lambda c: make.completions(QUANT, c, echo=True, token_ids=True),
    ),
}


def assert_says(row: TopRow, model: Model, chunk: int, t: int, n: int) -> None:
    """That a row holds the model's best, at least n of them, and the stream token's log p."""
    logp = model.logp(chunk, t)
    best = row.top(99)
    assert len(best) >= n
    assert [id for id, _ in best] == [id for id, _ in model.top(chunk, t, len(best))]
    for id, value in best:
        assert value == pytest.approx(logp[id], abs=1e-5)


# -- beside a reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_kind_lies_beside_the_reference_as_its_model_said(
    tmp_path: Path, ref: Recording, kind: str
) -> None:
    format, answer = ALL_KINDS[kind]
    path = write_lines(tmp_path / "q.jsonl", (answer(c) for c in (2, 0, 1)))
    found = open_quant(path, ref, words)
    assert found.format == format
    assert found.shape == ref.shape
    first = STREAM.first_t
    for chunk in range(3):
        assert found.tokens(chunk).tolist() == STREAM.tokens[chunk].tolist()
        assert set(found.scored(chunk).tolist()) >= set(range(first, 16))
        for t in range(first, 16):
            row = found.row(Position(chunk, t))
            assert isinstance(row, TopRow)
            assert_says(row, QUANT, chunk, t, 4)
            token = int(STREAM.tokens[chunk][t])
            known = row.logp(token)
            assert known is not None
            if "old" not in kind:  # text and the list alone
                assert not known.bound
                assert known.value == pytest.approx(QUANT.logp(chunk, t)[token], abs=1e-5)
    assert found.row(Position(0, 1)) is None or kind.startswith(("vllm", "sglang", "completions"))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_roots_are_those_of_the_same_model_as_a_kld_file(
    tmp_path: Path, ref: Recording, kind: str
) -> None:
    full = open_recording(write_kld(tmp_path / "q.kld", STREAM, QUANT.logits))
    path = write_lines(tmp_path / "q.jsonl", map(ALL_KINDS[kind][1], range(3)))
    index = Index(ref, [full, open_quant(path, ref, words)])
    for _ in index.scan():
        pass
    exact, found = index.pairs
    assert (found["state"] == State.SCORED).all()
    assert found["kind"].tolist() == exact["kind"].tolist()
    assert found["quant_id"].tolist() == exact["quant_id"].tolist()
    assert (found["kld"] <= exact["kld"] + 1e-4).all()


@pytest.mark.parametrize(
    ("answer", "events"),
    [
        (make.llama(QUANT, 1), make.llama_events(make.llama(QUANT, 1))),
        (make.chat(QUANT, 1), make.chat_chunks(make.chat(QUANT, 1))),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(
    tmp_path: Path, ref: Recording, answer: Json, events: list[Json]
) -> None:
    whole = open_quant(write_lines(tmp_path / "a", [answer]), ref, words)
    for path in (
        make.write_events(tmp_path / "b", events),
        write_lines(tmp_path / "c", events),
        write_lines(tmp_path / "d", [*events, *events]),
    ):
        streamed = open_quant(path, ref, words)
        assert streamed.scored(1).tolist() == whole.scored(1).tolist()
        for t in whole.scored(1).tolist():
            assert streamed.row(Position(1, t)) == whole.row(Position(1, t))


def test_a_stream_that_was_cut_says_so(tmp_path: Path, ref: Recording) -> None:
    events = make.llama_events(make.llama(QUANT, 0))
    request = {"prompt": STREAM.tokens[0][: STREAM.first_t].tolist()}
    lines = [{"request": request, "response": one} for one in events[:3]]
    found = open_quant(write_lines(tmp_path / "q", lines), ref, no_vocabulary)
    assert found.scored(0).size == 3
    assert any("does not end" in problem for problem in found.problems)


@pytest.mark.parametrize("way", ["json", "pretty", "array", "one after another", "gzip", "bom"])
def test_however_the_objects_are_strung_together(tmp_path: Path, ref: Recording, way: str) -> None:
    answers = [make.vllm(QUANT, c) for c in range(3)]
    path = tmp_path / "q.json"
    lines = "".join(json.dumps(a) + "\n" for a in answers)
    texts = {
        "json": json.dumps(answers[0]),
        "pretty": json.dumps(answers[0], indent=2),
        "array": json.dumps(answers),
        "one after another": "\n\n".join(json.dumps(a, indent=1) for a in answers),
        "bom": "\ufeff" + lines,
        "gzip": lines,
    }
    data = texts[way].encode()
    path.write_bytes(gzip.compress(data) if way == "gzip" else data)
    found = open_quant(path, ref, no_vocabulary)
    chunks = range(1 if way in ("json", "pretty") else 3)
    assert all(found.scored(c).size == 15 for c in chunks)


def test_what_went_its_own_way_counts_up_to_there(tmp_path: Path, ref: Recording) -> None:
    """The prediction of the token that differs has the same prefix; later ones have not."""
    first = STREAM.first_t
    own = STREAM.tokens[1][first:].tolist()
    own[3] = 4 + (own[3] - 3) % (N_VOCAB - 4)
    answer = make.llama(QUANT, 1, output=own)
    request = {"prompt": STREAM.tokens[1][:first].tolist()}
    path = write_lines(tmp_path / "q", [{"request": request, "response": answer}])
    found = open_quant(path, ref, no_vocabulary)
    assert found.scored(1).tolist() == list(range(first, first + 4))
    row = found.row(Position(1, first + 3))
    assert isinstance(row, TopRow)
    assert_says(row, QUANT, 1, first + 3, 5)
    known = row.logp(own[3])
    assert known is not None
    assert not known.bound  # what it took itself
    assert any("had gone its own way" in problem for problem in found.problems)


def test_bos_may_stand_in_place_of_the_first_token(tmp_path: Path, ref: Recording) -> None:
    def answer(chunk: int) -> Json:
        out = make.vllm(QUANT, chunk)
        (choice,) = out["choices"]
        choice["prompt_token_ids"] = [1, *choice["prompt_token_ids"][1:]]
        return out

    found = open_quant(write_lines(tmp_path / "q", map(answer, range(3))), ref, no_vocabulary)
    assert [found.scored(c).size for c in range(3)] == [15, 15, 15]
    assert any("token 1 in place of the chunk's first" in problem for problem in found.problems)
    # Another first token in each chunk is no BOS.
    others = [answer(c) for c in range(3)]
    for i, one in enumerate(others):
        one["choices"][0]["prompt_token_ids"][0] = 1 if i else 2
    with pytest.raises(StreamMismatch, match=r"token 0 is \d"):
        open_quant(write_lines(tmp_path / "q", others), ref, no_vocabulary)


def test_another_stream_is_refused_with_the_first_difference(
    tmp_path: Path, ref: Recording
) -> None:
    tokens = STREAM.tokens.copy()
    tokens[:, 5] = 4 + (tokens[:, 5] - 3) % (N_VOCAB - 4)
    other = Model(Stream(tokens, N_VOCAB), QUANT.logits)
    path = write_lines(tmp_path / "q", [make.vllm(other, 0)])
    expected = f"line 1: token 5 is {tokens[0, 5]}, chunk 0 has {STREAM.tokens[0, 5]}"
    with pytest.raises(StreamMismatch, match=expected) as caught:
        open_quant(path, ref, no_vocabulary)
    assert "\n" not in str(caught.value)
    # Some that belong and some that do not: the former count, the latter are said.
    path = write_lines(tmp_path / "q", [make.vllm(other, 0), make.vllm(QUANT, 1)])
    found = open_quant(path, ref, no_vocabulary)
    assert [found.scored(c).size for c in range(3)] == [0, 15, 0]
    assert any("1 of 2 answers belong to no chunk" in problem for problem in found.problems)


def test_one_token_too_many_in_front_is_named(tmp_path: Path, ref: Recording) -> None:
    answer = make.vllm(QUANT, 0)
    (choice,) = answer["choices"]
    choice["prompt_token_ids"].insert(0, 1)
    choice["prompt_logprobs"].insert(1, {str(STREAM.tokens[0][0]): {"logprob": -1, "rank": 1}})
    with pytest.raises(StreamMismatch, match="one token more stands before it"):
        open_quant(write_lines(tmp_path / "q", [answer]), ref, no_vocabulary)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, ref: Recording) -> None:
    answer = make.vllm(QUANT, 0)
    answer["choices"][0]["prompt_logprobs"][9]["151000"] = {"logprob": -30.0, "rank": 6}
    with pytest.raises(StreamMismatch, match="token 151000, n_vocab is 24"):
        open_quant(write_lines(tmp_path / "q", [answer]), ref, no_vocabulary)


def test_an_answer_without_its_prompt_needs_one_place_where_it_fits(
    tmp_path: Path, ref: Recording
) -> None:
    answer = make.llama(QUANT, 2) | {"prompt": None}
    found = open_quant(write_lines(tmp_path / "q", [answer]), ref, lambda: NONE)
    assert [found.scored(c).size for c in range(3)] == [0, 0, 7]
    short = make.llama(QUANT, 2, start=14) | {"prompt": None}
    with pytest.raises(StreamMismatch, match="holds neither the ids of its prompt"):
        open_quant(write_lines(tmp_path / "q", [short]), ref, lambda: NONE)
    # With the prompt as text and a vocabulary two tokens are enough.
    short = make.llama(QUANT, 2, start=14)
    found = open_quant(write_lines(tmp_path / "q", [short]), ref, words)
    assert found.scored(2).tolist() == [14, 15]


def test_positions_asked_for_one_by_one_make_up_a_chunk(tmp_path: Path, ref: Recording) -> None:
    lines = []
    for t in range(STREAM.first_t, 16):
        one = make.llama(QUANT, 1, start=t, output=STREAM.tokens[1][t : t + 1].tolist())
        lines.append({"request": {"prompt": STREAM.tokens[1][:t].tolist()}, "response": one})
    found = open_quant(write_lines(tmp_path / "q", lines), ref, no_vocabulary)
    assert found.scored(1).tolist() == list(range(STREAM.first_t, 16))


# -- numbers ---------------------------------------------------------------------------------------


def test_vllms_actual_token_is_found_by_its_id_and_the_rest_by_rank(
    tmp_path: Path, ref: Recording
) -> None:
    """N or N + 1 entries: one that is no part of the best does not look like the N + 1st."""
    found = open_quant(write_lines(tmp_path / "q", [make.vllm(QUANT, 0, n=3)]), ref, no_vocabulary)
    for t in range(STREAM.first_t, 16):
        token = int(STREAM.tokens[0][t])
        row = found.row(Position(0, t))
        assert isinstance(row, TopRow)
        logp = QUANT.logp(0, t)
        rank = 1 + int((logp > logp[token]).sum())
        assert len(row.top(9)) == (4 if rank == 4 else 3)
        known = row.logp(token)
        assert known is not None
        assert known.value == pytest.approx(logp[token], abs=1e-5)
        assert not known.bound
        assert row.rank(token) == (rank if rank <= 4 else None)


def test_a_probability_of_zero_is_read_as_one(tmp_path: Path, ref: Recording) -> None:
    answer = make.vllm(QUANT, 0)
    t, token = STREAM.first_t, str(STREAM.tokens[0][STREAM.first_t])
    answer["choices"][0]["prompt_logprobs"][t] = {
        token: {"logprob": -9999.0, "rank": 9},
        "7": {"logprob": -0.25, "rank": 1},
        "9": {"logprob": -2.0, "rank": 2},
    }
    row = open_quant(write_lines(tmp_path / "q", [answer]), ref, no_vocabulary).row(Position(0, t))
    assert isinstance(row, TopRow)
    assert row.top(9) == [(7, -0.25), (9, -2.0)]
    known = row.logp(int(token))
    assert known is not None
    assert known.value == -math.inf


def test_openais_stand_in_is_not_taken_for_a_value(tmp_path: Path, ref: Recording) -> None:
    answer = make.chat(QUANT, 0, n=2)
    content = answer["choices"][0]["logprobs"]["content"]
    outside = next(i for i, one in enumerate(content) if one["token"] not in
                   [top["token"] for top in one["top_logprobs"]])  # fmt: skip
    content[outside]["logprob"] = -9999.0
    t = STREAM.first_t + outside
    row = open_quant(write_lines(tmp_path / "q", [answer]), ref, words).row(Position(0, t))
    assert isinstance(row, TopRow)
    known = row.logp(int(STREAM.tokens[0][t]))
    assert known is not None
    assert known.bound  # no more than the last of the list


@pytest.mark.parametrize("shape", [make.chat, make.completions])
def test_openais_stand_in_within_a_list_is_left_out_of_it(
    shape: Any, tmp_path: Path, ref: Recording
) -> None:
    answer = shape(QUANT, 0, n=5)
    whole = open_quant(write_lines(tmp_path / "q", [answer]), ref, words)
    t = STREAM.first_t
    listed = answer["choices"][0]["logprobs"]
    if shape is make.chat:
        listed["content"][0]["top_logprobs"][4]["logprob"] = -9999.0
    else:
        top = listed["top_logprobs"][0]
        top[sorted(top, key=top.__getitem__)[-5]] = -9999.0
    row = open_quant(write_lines(tmp_path / "less", [answer]), ref, words).row(Position(0, t))
    full = whole.row(Position(0, t))
    assert isinstance(row, TopRow)
    assert isinstance(full, TopRow)
    assert not row.invalid
    assert row.top(4) == full.top(4)
    assert full.top(5)[4][0] not in row.known


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"logprob": 0.5}, "a log-probability of 0.5, which cannot be above 0"),
        ({"logprob": "x"}, 'a log-probability is "x", not a number'),
        ({"id": -1}, "-1 in the place of a token id"),
        ({"id": 9}, "id twice"),
        ({"logprob": -0.0001}, "add up to"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, ref: Recording, change: Json, words_: str
) -> None:
    answer = make.llama(QUANT, 0)
    top = answer["completion_probabilities"][1]["top_logprobs"]
    if change.get("logprob") == -0.0001:
        top[0]["logprob"] = -0.01
    top[1]["id"] = 9 if change.get("id") == 9 else top[1]["id"]
    top[2] |= change
    path = write_lines(tmp_path / "q", [make.llama(QUANT, 1), answer])
    with pytest.raises(DamagedRecording, match="line 2: ") as caught:
        open_quant(path, ref, words)
    assert words_ in str(caught.value)


def test_nan_makes_a_position_invalid_and_no_other(tmp_path: Path, ref: Recording) -> None:
    answer = make.vllm(QUANT, 0)
    listed = answer["choices"][0]["prompt_logprobs"][12]
    listed[next(iter(listed))]["logprob"] = math.nan
    index = Index(ref, [open_quant(write_lines(tmp_path / "q", [answer]), ref, no_vocabulary)])
    for _ in index.scan():
        pass
    states = index.pairs[0]["state"][: STREAM.per_chunk]
    assert states.tolist().count(State.INVALID) == 1
    assert states[12 - STREAM.first_t] == State.INVALID


def test_tokens_that_end_in_mid_character_are_missing_and_no_others(tmp_path: Path) -> None:
    """llama-server has no entry for them: 2 then 3 is one character, 2 the half of it."""
    tokens = STREAM.tokens.copy()
    tokens[0, 9:16] = [5, 2, 3, 6, 2, 3, 7]
    stream = Stream(tokens, N_VOCAB)
    model = Model(stream, QUANT.logits)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, model.logits))
    answer = make.llama(model, 0)
    entries = answer["completion_probabilities"]
    for i in (1, 4):
        entries[i + 1] |= {"token": "é", "bytes": [0xC3, 0xA9]}
    answer["completion_probabilities"] = [one for i, one in enumerate(entries) if i not in (1, 4)]
    found = open_quant(write_lines(tmp_path / "q", [answer]), ref, words)
    assert found.scored(0).tolist() == [9, 11, 12, 14, 15]
    assert_says(found.row(Position(0, 11)), model, 0, 11, 5)  # type: ignore[arg-type]
    assert found.pieces.get(3, b"\xa9") == b"\xa9"


def test_an_entry_that_may_be_of_either_of_two_tokens_is_left_out(tmp_path: Path) -> None:
    tokens = STREAM.tokens.copy()
    tokens[0, 9:16] = [5, 3, 3, 6, 7, 8, 9]
    model = Model(Stream(tokens, N_VOCAB), QUANT.logits)
    ref = open_recording(write_kld(tmp_path / "ref.kld", model.stream, model.logits))
    answer = make.llama(model, 0)
    del answer["completion_probabilities"][1]
    found = open_quant(write_lines(tmp_path / "q", [answer]), ref, words)
    assert found.scored(0).tolist() == [9, 12, 13, 14, 15]


def test_mlx_is_read_past_its_unsorted_lists(tmp_path: Path) -> None:
    model = QUANT.greedy()
    ref = open_recording(write_kld(tmp_path / "ref.kld", model.stream, model.logits))
    found = open_quant(write_lines(tmp_path / "q", [make.mlx(model, 1)]), ref, no_vocabulary_text)
    assert found.scored(1).size == 7
    for t in found.scored(1).tolist():
        assert_says(found.row(Position(1, t)), model, 1, t, 5)  # type: ignore[arg-type]
    assert found.pieces == {}  # "Ġw5" is no text


def test_mlx_before_0_30_6_listed_pairs(tmp_path: Path) -> None:
    model = QUANT.greedy()
    ref = open_recording(write_kld(tmp_path / "ref.kld", model.stream, model.logits))
    first, tokens = STREAM.first_t, model.tokens(1)
    logprobs = {
        "tokens": tokens[first:],
        "token_logprobs": [float(model.logp(1, t)[tokens[t]]) for t in range(first, 16)],
        "top_logprobs": [[list(pair) for pair in model.top(1, t, 5)] for t in range(first, 16)],
    }
    choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}
    answer = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": first}}
    found = open_quant(write_lines(tmp_path / "q", [answer]), ref, no_vocabulary_text)
    for t in range(first, 16):
        assert_says(found.row(Position(1, t)), model, 1, t, 4)  # type: ignore[arg-type]


def no_vocabulary_text() -> Vocabulary:
    return NONE


# -- text in place of ids --------------------------------------------------------------------------


def test_text_without_a_vocabulary_is_refused_with_what_to_give(
    tmp_path: Path, ref: Recording
) -> None:
    path = write_lines(tmp_path / "q", [make.chat(QUANT, 0)])
    with pytest.raises(UnsupportedRecording, match="give --tokenizer"):
        open_quant(path, ref, lambda: NONE)


def test_texts_of_several_tokens_are_reported_and_never_make_a_root(tmp_path: Path) -> None:
    """Ids 6 and 7 have the same text: the stream's token is meant where it is one of them."""
    pieces = make.pieces_of(N_VOCAB)
    pieces[7] = pieces[6]
    logits = np.zeros((STREAM.records, N_VOCAB), np.float32)
    logits[:, 7] = 5.0
    tokens = STREAM.tokens.copy()
    tokens[:, 9:] = 7
    model = Model(Stream(tokens, N_VOCAB), logits)
    ref = open_recording(write_kld(tmp_path / "ref.kld", model.stream, logits))
    answer = make.chat(model, 0)
    request = {"prompt": tokens[0, :9].tolist()}
    for one in answer["choices"][0]["logprobs"]["content"]:
        for entry in (one, *one["top_logprobs"]):
            if entry["token"] == " w7":
                entry |= {"token": " w6", "bytes": list(b" w6")}
    path = write_lines(tmp_path / "q", [{"request": request, "response": answer}])
    found = open_quant(path, ref, lambda: from_pieces(dict(enumerate(pieces)), ""))
    rows = found.rows(0, 0, 7)
    assert isinstance(rows, TopRows)
    assert rows.ids[:, 0].tolist() == [7] * 7
    assert any("texts are those of several tokens" in problem for problem in found.problems)


def test_a_list_ends_where_a_text_is_no_tokens(tmp_path: Path, ref: Recording) -> None:
    """What stands below it has a known log p, but what it bounds is not known."""
    answer = make.chat(QUANT, 0)
    content = answer["choices"][0]["logprobs"]["content"]
    content[0]["top_logprobs"][2] |= {"token": "??", "bytes": list(b"??")}
    content[1]["top_logprobs"][0] |= {"token": "??", "bytes": list(b"??")}
    found = open_quant(write_lines(tmp_path / "q", [answer]), ref, words)
    first = STREAM.first_t
    row = found.row(Position(0, first))
    assert isinstance(row, TopRow)
    assert len(row.top(9)) == 2
    assert found.row(Position(0, first + 1)) is None
    assert any("the best token's text is no token's" in problem for problem in found.problems)


# -- as a reference --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        make.vllm(QUANT, 1),
        make.sglang(QUANT, 1),
        make.completions(QUANT, 1, echo=True, token_ids=True),
        {
            "request": {"prompt": STREAM.tokens[1][: STREAM.first_t].tolist()},
            "response": make.llama(QUANT, 1),
        },
        {
            "custom_id": "a",
            "request": {"body": {"prompt": STREAM.tokens[1][: STREAM.first_t].tolist()}},
            "response": {"status_code": 200, "body": make.chat(QUANT, 1, ids=True)},
        },
    ],
)
def test_answers_with_ids_are_a_reference_by_themselves(tmp_path: Path, answer: Json) -> None:
    found = open_recording(write_lines(tmp_path / "ref.jsonl", [answer]))
    n = len(STREAM.tokens[1])
    assert found.tokens(0)[:n].tolist() == STREAM.tokens[1].tolist()
    for t in range(STREAM.first_t, n):
        assert_says(found.row(Position(0, t)), QUANT, 0 + 1, t, 4)  # type: ignore[arg-type]
    assert found.shape.n_vocab == 0
    assert (prompt_length(found, 0) or STREAM.first_t) >= STREAM.first_t


def test_two_files_of_answers_make_a_review(tmp_path: Path) -> None:
    other = Model.of(STREAM, 8)
    ref = write_lines(tmp_path / "ref.jsonl", (make.vllm(QUANT, c) for c in range(3)))
    quant = write_lines(tmp_path / "q.jsonl", (make.sglang(other, c) for c in range(3)))
    session = Session.open(ref, [("q", quant)])
    for _ in session.index.scan():
        pass
    scored = session.index.pairs[0]["state"] == State.SCORED
    assert int(scored.sum()) == 45
    session.close()


@pytest.mark.parametrize(
    ("answer", "words_"),
    [
        (make.llama(QUANT, 1), "holds no ids of its prompt"),
        (make.chat(QUANT, 1), "given as text, not as ids"),
        (make.completions(QUANT, 1, echo=True), "given as text, not as ids"),
        (make.vllm(QUANT, 1, ids=False), "holds no ids of its prompt"),
    ],
)
def test_answers_without_ids_are_no_reference_and_say_what_they_are_good_for(
    tmp_path: Path, answer: Json, words_: str
) -> None:
    with pytest.raises(UnsupportedRecording, match=words_) as caught:
        open_recording(write_lines(tmp_path / "ref.jsonl", [answer]))
    assert "give it as --quant" in str(caught.value)


# -- files that are something else -----------------------------------------------------------------


def _branch(**fields: Any) -> Json:
    """A line of what `kldtui branch -o` writes."""
    arm = Arm.parse("R·r")
    new = Branch(Position(1, 12), arm, "q4", start_id=77, prefix_ids=[1, 2], **fields)
    return cast(Json, json.loads(line_of(new.to_json())))


@pytest.mark.parametrize(
    ("content", "error", "words_"),
    [
        ({"doc_id": 1, "resps": [], "acc": 1}, UnsupportedRecording, "kldtui answers reads them"),
        ({"model": "m", "created_at": "x", "response": "a", "done": True}, UnsupportedRecording,
         "an answer of Ollama"),
        ({"generated_text": "x", "details": {}}, UnsupportedRecording, "Text Generation Inference"),
        ({"candidates": [], "usageMetadata": {}}, UnsupportedRecording, "Gemini"),
        ({"object": "response", "output": []}, UnsupportedRecording, "Responses API"),
        ({"type": "message", "content": []}, UnsupportedRecording, "Anthropic"),
        ({"added_tokens": [], "model": {}}, UnsupportedRecording, "give it as --tokenizer"),
        ({"format": "kldtui-labels"}, UnsupportedRecording, "no recording"),
        (_branch(), UnsupportedRecording, "file of branches, not a recording: .*--branches"),
        (_branch(error="it closed"), UnsupportedRecording, "file of branches, not a recording"),
        ({"object": "response", "output": [], "error": None}, UnsupportedRecording, "Responses"),
        ({"error": {"code": 503, "message": "Loading model"}}, NotARecording, "Loading model"),
        ({"foo": 1, "bar": 2}, NotARecording, "bar, foo"),
        (make.llama(QUANT, 0) | {"completion_probabilities": []}, UnsupportedRecording, "n_probs"),
        (make.llama(QUANT, 0) | {"truncated": True}, UnsupportedRecording, "larger context"),
        (make.sglang(QUANT, 0, tops=False), UnsupportedRecording, "top_logprobs_num"),
        ({"choices": [{"message": {}, "logprobs": None, "finish_reason": "stop"}]},
         UnsupportedRecording, "top_logprobs"),
        ({"choices": [{"text": "", "logprobs": None, "finish_reason": "stop"}]},
         UnsupportedRecording, "logprobs: 20"),
    ],
)  # fmt: skip
def test_what_is_of_no_use_is_refused_by_name(
    tmp_path: Path, ref: Recording, content: Json, error: type[RecordingError], words_: str
) -> None:
    path = write_lines(tmp_path / "x", [content])
    for open_ in (open_recording, lambda p: open_quant(p, ref, words)):
        with pytest.raises(error, match=words_) as caught:
            open_(path)
        assert "\n" not in str(caught.value)


def test_speculative_decoding_is_unusable_and_says_so(tmp_path: Path, ref: Recording) -> None:
    answer = make.llama(QUANT, 0)
    for one in answer["completion_probabilities"]:
        one |= {"logprob": 0.0, "top_logprobs": []}
    with pytest.raises(UnsupportedRecording, match="speculative decoding"):
        open_quant(write_lines(tmp_path / "q", [answer]), ref, words)


def test_a_damaged_line_is_named_and_a_cut_one_left_out(tmp_path: Path, ref: Recording) -> None:
    line = json.dumps(make.vllm(QUANT, 0))
    path = tmp_path / "q"
    path.write_text(line + "\n" + line[:200])
    found = open_quant(path, ref, no_vocabulary)
    assert any("the last line (2) is cut" in problem for problem in found.problems)
    path.write_text(line + "\n" + line[:200] + "\n" + line + "\n")
    with pytest.raises(DamagedRecording, match="line 2: is no JSON"):
        open_quant(path, ref, no_vocabulary)
    with pytest.raises(NotARecording):
        open_recording(_bytes(path, b"{\x00\xff\xff"))


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats(-20, 1) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(sorted(ALL_KINDS)), st.data())
def test_no_damage_ends_in_anything_but_an_error_for_the_user(kind: str, data: Any) -> None:
    """One value anywhere in an answer is replaced by another."""
    answer = json.loads(json.dumps(ALL_KINDS[kind][1](1)))
    where: Any = answer
    for _ in range(data.draw(st.integers(1, 7))):
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(where[key], dict | list) and data.draw(st.booleans()):
            where = where[key]
            continue
        where[key] = data.draw(JSON)
        break
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "q", [answer])
        ref = open_recording(write_kld(Path(folder) / "ref.kld", STREAM, QUANT.logits))
        for open_ in (open_recording, lambda p: open_quant(p, ref, words)):
            with suppress(RecordingError):
                found = open_(path)
                for chunk in range(found.shape.n_chunk):
                    found.rows(chunk, 0, found.scored(chunk).size)
        ref.close()


# -- the commands ----------------------------------------------------------------------------------


def test_inspect_and_stats_read_answers(tmp_path: Path) -> None:
    ref = write_kld(tmp_path / "ref.kld", STREAM, Model.of(STREAM, 1).logits)
    path = write_lines(tmp_path / "q.jsonl", (make.llama(QUANT, c) for c in range(3)))
    found = describe(path)
    assert (found.format, found.n_chunk, found.records, found.complete) == (
        "llama-completion",
        3,
        21,
        True,
    )
    assert found.n_vocab is None
    result = CliRunner().invoke(cli, ["stats", str(ref), "--quant", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (stats,) = json.loads(result.stdout)
    assert stats["positions"] == 21
    assert stats["mean_kld"] is None
    assert stats["mean_kld_lower_bound"] > 0
