"""What a review relies on when it asks vLLM: ids in and out, honest numbers, named faults."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import pytest

from kldtui.engines import Finish, wait_ready
from kldtui.engines.vllm import VllmAnswer, VllmServer
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineRefused,
    EngineUnauthorized,
    UnusableEngine,
)
from tests import tiny_model as model
from tests.asking import ask, same_top
from tests.fake_http import SILENCE, Died, Reply
from tests.fake_vllm import FakeVllm, refused

PREFIX = [model.BOS, *model.encode("Hello")]
PATH = "/v1/completions"


async def connected(fake: FakeVllm, **more: Any) -> VllmServer:
    engine = VllmServer(fake.url, **more)
    await engine.connect()
    return engine


# ── who is there ─────────────────────────────────────────────────────────────────────────────


async def test_says_who_answers() -> None:
    async with FakeVllm() as fake:
        info = await wait_ready(VllmServer(fake.url + "/v1"))
    assert (info.kind, info.model, info.build) == ("vllm", "org/tiny", "0.11.0")
    assert (info.n_ctx, info.n_vocab) == (128, None)
    assert (info.add_bos, info.bos_id, info.warnings) == (True, model.BOS, ())
    assert info.details["model_path"] == "/models/tiny"


async def test_a_tokenizer_without_bos_and_a_server_that_does_not_say() -> None:
    async with FakeVllm(add_bos=False) as fake:
        plain = await VllmServer(fake.url).connect()
    assert (plain.add_bos, plain.bos_id) == (False, None)
    async with FakeVllm(replies={"/tokenize": Reply(404, {"detail": "Not Found"})}) as fake:
        silent = await VllmServer(fake.url).connect()
    assert silent.add_bos is None
    assert "does not say whether it adds BOS" in silent.warnings[0]


async def test_an_adapter_is_chosen_by_name_and_a_wrong_name_lists_the_right_ones() -> None:
    cards = [
        {"id": "org/tiny", "root": "/models/tiny", "parent": None},
        {"id": "tuned", "root": "/lora/tuned", "parent": "org/tiny"},
    ]
    async with FakeVllm(cards=cards) as fake:
        engine = await connected(fake)
        assert engine.info is not None
        assert engine.info.model == "org/tiny"
        assert any("?model=NAME" in note and "tuned" in note for note in engine.capabilities.notes)
        tuned = VllmServer(fake.url + "?model=tuned")
        info = await tuned.connect()
        assert (info.model, info.n_ctx) == ("tuned", 128)
        await ask(tuned, PREFIX)
        assert fake.bodies(PATH)[-1]["model"] == "tuned"
        with pytest.raises(UnusableEngine, match="no model 'other', only org/tiny, tuned"):
            await VllmServer(fake.url + "?model=other").connect()


async def test_a_dead_engine_behind_a_living_server_is_told() -> None:
    async with FakeVllm(dead=True) as fake:
        with pytest.raises(EngineBroke, match="its engine has died"):
            await VllmServer(fake.url).connect()


async def test_a_key_is_needed_and_never_said() -> None:
    async with FakeVllm(api_key="sk-secret") as fake:
        with pytest.raises(EngineUnauthorized, match="set KLDTUI_QUANT_API_KEY") as told:
            await VllmServer(fake.url, key_hint="KLDTUI_QUANT_API_KEY").connect()
        assert "sk-secret" not in str(told.value)
        engine = await connected(fake, api_key="sk-secret")
        said = await ask(engine, PREFIX)
    assert said.error is None
    assert engine.info is not None
    assert "sk-secret" not in str(engine.info.to_json()) + str(engine.settings)


# ── a branch ─────────────────────────────────────────────────────────────────────────────────


async def test_a_branch_is_what_the_model_says_with_its_numbers() -> None:
    script = [*model.encode("Hi foo"), model.WHOLE, model.EOS]
    async with FakeVllm(script) as fake:
        said = await ask(await connected(fake), PREFIX, n=16, top_n=4)
    assert said.ids == script
    assert said.data == "Hi foo美<|im_end|>".encode()
    for at, token in enumerate(said.tokens):
        values = model.logprobs((*PREFIX, *script[:at]), script[at])
        assert token.logp == pytest.approx(values[token.id])
        assert same_top(token.top, model.best(values, 4))
    assert isinstance(said.finish, Finish)
    assert (said.finish.reason, said.finish.n_prompt) == ("eog", len(PREFIX))


async def test_it_is_asked_for_by_ids_greedily_and_without_the_cache() -> None:
    async with FakeVllm() as fake:
        engine = await connected(fake)
        await ask(engine, PREFIX, n=2)
        await ask(engine, PREFIX, n=2)
        await ask(engine, PREFIX, n=2, cache=True)
    first, second, cached = fake.bodies(PATH)
    assert first["prompt"] == PREFIX
    neutral = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0}
    assert first.items() >= {**neutral, "frequency_penalty": 0, "logprobs": 3}.items()
    assert first["return_token_ids"]
    assert first["return_tokens_as_token_ids"]
    assert not first["skip_special_tokens"]
    assert first["cache_salt"] != second["cache_salt"]
    assert "cache_salt" not in cached
    stored = {name: value for name, value in engine.settings.items() if name in first}
    assert {n: v for n, v in first.items() if n in stored and n != "cache_salt"} == {
        n: v for n, v in stored.items() if n != "cache_salt"
    }


@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_chunks_of_several_tokens_are_taken_apart(interval: int) -> None:
    script = [*model.encode("a foo b"), model.FIRST_HALF, model.SECOND_HALF, model.EOS]
    async with FakeVllm(script, interval=interval) as fake:
        said = await ask(await connected(fake), PREFIX, n=32)
    assert said.ids == script
    assert said.data == "a foo b美<|im_end|>".encode()


async def test_a_split_character_is_carried_by_the_token_that_completes_it() -> None:
    script = [model.FIRST_HALF, model.SECOND_HALF, model.EOS]
    async with FakeVllm(script) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert [token.data for token in said.tokens] == [b"", "美".encode(), b"<|im_end|>"]


async def test_an_answer_cut_inside_a_character_keeps_its_ids_and_invents_no_bytes() -> None:
    script = [*model.encode("ab"), model.FIRST_HALF]

    def flushed(data: dict[str, Any]) -> dict[str, Any]:
        choice = data["choices"][0]
        if choice["finish_reason"]:
            choice["text"] += "\N{REPLACEMENT CHARACTER}"
        return data

    async with FakeVllm(script, rewrite=flushed) as fake:
        said = await ask(await connected(fake), PREFIX, n=3)
    assert said.ids == script
    assert said.data == b"ab"


async def test_a_version_without_return_token_ids_is_read_by_its_named_tokens() -> None:
    script = [*model.encode("Hi"), model.EOS]
    async with FakeVllm(script, ids=False) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert said.ids == script


async def test_a_version_that_names_tokens_by_text_is_refused() -> None:
    async with FakeVllm(ids=False, named=False) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert isinstance(said.error, UnusableEngine)
    assert "token ids: use vLLM 0.6.4" in str(said.error)


async def test_one_answer_at_a_time_and_closing_one_frees_the_engine() -> None:
    async with FakeVllm(fault={1: [SILENCE]}) as fake:
        engine = await connected(fake)
        items = engine.generate(PREFIX, 8, 3)
        await items.__anext__()
        waiting = asyncio.create_task(engine.next_top(PREFIX, 3))
        await asyncio.sleep(0.05)
        assert len(fake.bodies(PATH)) == 1
        await items.aclose()
        top = await asyncio.wait_for(waiting, 5)
    assert same_top(top, model.best(model.logprobs(tuple(PREFIX)), 3))


# ── what it does not give ────────────────────────────────────────────────────────────────────


async def test_the_limit_of_candidates_is_learnt_from_its_refusal_once() -> None:
    async with FakeVllm(max_logprobs=5) as fake:
        engine = await connected(fake)
        assert engine.capabilities.top_n_limit == 20
        said = await ask(engine, PREFIX, n=2, top_n=40)
        assert said.error is None
        assert {len(token.top) for token in said.tokens} == {5}
        assert engine.capabilities.top_n_limit == 5
        assert engine.settings["top_n_limit"] == 5
        assert len(await engine.next_top(PREFIX, 500)) == 5
    assert [body["logprobs"] for body in fake.bodies(PATH)] == [40, 5, 5]


async def test_a_server_started_for_more_candidates_gives_more() -> None:
    async with FakeVllm(max_logprobs=100) as fake:
        engine = await connected(fake)
        said = await ask(engine, PREFIX, n=1, top_n=40)
        assert len(said.tokens[0].top) == 40
        assert engine.capabilities.top_n_limit == 40


async def test_a_server_that_refuses_cache_salt_is_asked_without_and_says_so() -> None:
    async with FakeVllm(salts=False) as fake:
        engine = await connected(fake)
        assert engine.capabilities.cache_switch
        said = await ask(engine, PREFIX, n=2)
        assert said.error is None
        assert not engine.capabilities.cache_switch
        assert any("--no-enable-prefix-caching" in note for note in engine.capabilities.notes)
        assert "cache_salt" not in engine.settings


async def test_any_other_refusal_is_not_asked_again() -> None:
    async with FakeVllm(replies={PATH: refused("no such thing")}) as fake:
        said = await ask(await connected(fake), PREFIX)
        assert isinstance(said.error, EngineRefused)
        assert "no such thing" in str(said.error)
        assert len(fake.bodies(PATH)) == 1


async def test_a_branch_that_fills_the_context_says_so() -> None:
    async with FakeVllm(max_model_len=len(PREFIX) + 3) as fake:
        said = await ask(await connected(fake), PREFIX, n=50)
    assert len(said.tokens) == 3
    assert said.finish is not None
    assert said.finish.reason == "context"
    assert f"context of {len(PREFIX) + 3} tokens is full" in said.finish.detail


async def test_a_prefix_that_does_not_fit_is_refused_with_the_option_that_helps() -> None:
    async with FakeVllm(max_model_len=4) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert isinstance(said.error, ContextExceeded)
    assert "--max-model-len" in str(said.error)


async def test_ids_of_another_vocabulary_are_refused_as_such() -> None:
    async with FakeVllm() as fake:
        said = await ask(await connected(fake), [model.N_VOCAB + 5])
    assert isinstance(said.error, EngineRefused)
    assert "invalid tokens" in str(said.error)


# ── answers that cannot be trusted ───────────────────────────────────────────────────────────


def choices(change: dict[str, Any]) -> Any:
    def rewrite(data: dict[str, Any]) -> dict[str, Any]:
        data["choices"][0] |= change
        return data

    return rewrite


def logprobs(change: dict[str, Any]) -> Any:
    def rewrite(data: dict[str, Any]) -> dict[str, Any]:
        data["choices"][0]["logprobs"] |= change
        return data

    return rewrite


@pytest.mark.parametrize(
    ("rewrite", "kind", "words"),
    [
        (logprobs({"token_logprobs": [0.7]}), UnusableEngine, "cannot be above 0"),
        (logprobs({"token_logprobs": [math.nan]}), UnusableEngine, "NaN"),
        (logprobs({"token_logprobs": [-30.0]}), UnusableEngine, "most likely token"),
        (logprobs({"top_logprobs": [{"token_id:3": 0.5}]}), UnusableEngine, "above 0"),
        (logprobs({"top_logprobs": [{"Paris": -0.5}]}), UnusableEngine, "ambiguous"),
        (logprobs({"token_logprobs": [-1.0, -2.0]}), EngineBroke, "do not belong"),
        (logprobs({"tokens": ["token_id:3"]}), EngineBroke, "do not belong"),
        (logprobs({"token_logprobs": ["x"]}), EngineBroke, "no known shape"),
        (choices({"logprobs": None}), UnusableEngine, "token ids|without log-probabilities"),
        (choices({"prompt_token_ids": [1, 2]}), UnusableEngine, "other tokens than were sent"),
        (choices({"finish_reason": "abort"}), EngineBroke, "gave the answer up"),
        (lambda data: {"choices": [None]}, EngineBroke, "no known shape"),
    ],
)
async def test_numbers_that_cannot_be_what_they_are_called_are_refused(
    rewrite: Any, kind: type[EngineError], words: str
) -> None:
    async with FakeVllm([model.WHOLE], rewrite=rewrite) as fake:
        said = await ask(await connected(fake), PREFIX)
        assert type(said.error) is kind
        assert said.error is not None
        assert re.search(words, str(said.error))
        assert str(said.error).startswith(fake.url)
        assert said.tokens == []


def test_zero_probability_is_minus_infinity_and_the_extra_candidate_is_not_a_fourth() -> None:
    values = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-1.0],
        "top_logprobs": [
            {"token_id:7": -1.0, "token_id:5": -1.0, "token_id:9": -9999.0, "token_id:3": -2.0}
        ],
    }
    answer = VllmAnswer([1], 3)
    (token,) = answer.feed({"choices": [{"text": "x", "token_ids": [7], "logprobs": values}]})
    assert token.top == ((5, -1.0), (7, -1.0), (3, -2.0))
    (token,) = VllmAnswer([1], 4).feed(
        {"choices": [{"text": "x", "token_ids": [7], "logprobs": values}]}
    )
    assert token.top[-1] == (9, -math.inf)


# ── faults ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Died(), "closed the connection"),
        ([], "ended in mid-answer"),
        ([b"data: [DONE]\n\n"], "ended in mid-answer"),
        ([b"data: {oh no\n\n"], "no JSON"),
        ([b'data: {"choices"'], "ended in mid-answer"),
        ([{"error": {"message": "EngineCore died", "type": "InternalServerError"}}], "EngineCore"),
    ],
)
async def test_what_arrived_before_a_fault_is_kept_and_a_second_branch_succeeds(
    fault: Any, words: str
) -> None:
    async with FakeVllm(fault={2: fault}) as fake:
        engine = await connected(fake)
        said = await ask(engine, PREFIX)
        assert len(said.tokens) == 2
        assert words in str(said.error)
        fake.fault = {}
        again = await ask(engine, PREFIX)
        assert again.error is None
        assert again.ids[:2] == said.ids


async def test_a_stream_without_an_end_is_no_finished_branch() -> None:
    async with FakeVllm(no_end=True) as fake:
        said = await ask(await connected(fake), PREFIX, n=3)
    assert isinstance(said.error, EngineBroke)
    assert len(said.tokens) == 3


# ── a given text ─────────────────────────────────────────────────────────────────────────────


async def test_a_given_text_is_scored_by_its_ids_and_the_rest_by_rank() -> None:
    targets = [model.NEVER, *model.encode("z foo"), model.EOS]
    async with FakeVllm() as fake:
        got = await (await connected(fake)).score(PREFIX, targets, 4)
    assert [token.id for token in got] == targets
    for at, token in enumerate(got):
        values = model.logprobs((*PREFIX, *targets[:at]))
        assert token.logp == pytest.approx(values[token.id])
        assert [id for id, _ in token.top] == [id for id, _ in model.best(values, 4)]
    assert got[0].logp == -math.inf
    (body,) = fake.bodies(PATH)
    assert (body["prompt_logprobs"], body["temperature"]) == (4, 0)
    assert "stream" not in body


async def test_scoring_learns_the_limit_too() -> None:
    async with FakeVllm(max_logprobs=5) as fake:
        got = await (await connected(fake)).score(PREFIX, [3, 4], 40)
    assert [len(token.top) for token in got] == [5, 5]


async def test_scores_of_other_tokens_than_were_sent_are_refused() -> None:
    def shifted(data: dict[str, Any]) -> dict[str, Any]:
        data["choices"][0]["prompt_logprobs"].reverse()
        return data

    def short(data: dict[str, Any]) -> dict[str, Any]:
        data["choices"][0]["prompt_logprobs"].pop()
        return data

    for rewrite, words in ((shifted, "another token"), (short, "tokens where")):
        async with FakeVllm(rewrite=rewrite) as fake:
            with pytest.raises(EngineBroke, match=words):
                await (await connected(fake)).score(PREFIX, [model.WHOLE, model.EOS], 1)


async def test_there_is_nothing_to_score_without_a_prefix() -> None:
    with pytest.raises(EngineError, match="at least one token"):
        await VllmServer("http://127.0.0.1:1").score([], [1], 3)


# ── text of tokens ───────────────────────────────────────────────────────────────────────────


async def test_pieces_keep_spaces_and_invent_nothing_for_parts_of_characters() -> None:
    async with FakeVllm() as fake:
        engine = await connected(fake)
        got = await engine.pieces(range(model.N_VOCAB))
        asked = len(fake.bodies("/detokenize"))
        assert await engine.pieces([5, 6]) == {id: model.PIECES[id] for id in (5, 6)}
        assert len(fake.bodies("/detokenize")) == asked
    halves = {model.FIRST_HALF, model.SECOND_HALF}
    assert got == {id: piece for id, piece in enumerate(model.PIECES) if id not in halves}
    assert asked < model.N_VOCAB


async def test_ids_that_the_server_does_not_know_have_no_piece() -> None:
    async with FakeVllm() as fake:
        got = await (await connected(fake)).pieces([4, model.N_VOCAB + 3, 5])
    assert set(got) == {4, 5}


async def test_where_a_tokenizer_takes_spaces_away_unsure_pieces_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = model.decode

    def cleaned(ids: list[int]) -> str:
        return plain(ids).replace(" .", ".").replace(" n't", "n't")

    monkeypatch.setattr(model, "decode", cleaned)
    dot, spaced = model.encode(".")[0], model.encode(" .")[0]
    async with FakeVllm() as fake:
        got = await (await connected(fake)).pieces([dot, spaced, 40])
    assert got == {40: model.PIECES[40]}


async def test_a_server_that_does_not_decode_gives_no_pieces() -> None:
    async with FakeVllm(replies={"/tokenize": Reply(404, {"detail": "Not Found"})}) as fake:
        assert await (await connected(fake)).pieces([4, 5]) == {}
