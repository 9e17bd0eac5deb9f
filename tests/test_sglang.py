"""What a review relies on when it asks SGLang: ids in and out, honest numbers, named faults."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines import wait_ready
from kldtui.engines.sglang import SglangAnswer, SglangServer
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    UnusableEngine,
)
from tests import tiny_model as model
from tests.asking import ask, same_top
from tests.fake_http import SILENCE, Died, Reply
from tests.fake_sglang import FakeSglang

PREFIX = [model.BOS, *model.encode("Hello")]
PATH = "/generate"


async def connected(fake: FakeSglang, **more: Any) -> SglangServer:
    engine = SglangServer(fake.url, **more)
    await engine.connect()
    return engine


# ── who is there ─────────────────────────────────────────────────────────────────────────────


async def test_says_who_answers_and_keeps_no_secret_of_its_settings() -> None:
    async with FakeSglang(api_key="sk-secret") as fake:
        engine = await connected(fake, api_key="sk-secret")
        info = engine.info
    assert info is not None
    assert (info.kind, info.model, info.build) == ("sglang", "org/tiny", "0.5.5")
    assert (info.n_ctx, info.add_bos, info.bos_id) == (128, True, model.BOS)
    assert info.details == {"model_path": "/models/tiny", "dtype": "auto", "tp_size": 2}
    assert info.warnings == ()


async def test_an_old_build_is_known_by_its_old_paths_and_does_not_say_its_bos_rule() -> None:
    async with FakeSglang(old=True) as fake:
        info = await SglangServer(fake.url).connect()
    assert (info.model, info.build, info.add_bos) == ("org/tiny", "0.5.5", None)
    assert "does not say whether it adds BOS" in info.warnings[0]


async def test_waits_while_it_warms_up() -> None:
    async with FakeSglang(starting=2) as fake:
        with pytest.raises(EngineLoading, match="not ready yet"):
            await SglangServer(fake.url).connect()
        info = await wait_ready(SglangServer(fake.url), interval=0.01)
    assert info.model == "org/tiny"


async def test_speculative_decoding_is_warned_of() -> None:
    async with FakeSglang(server={"speculative_algorithm": "EAGLE3"}) as fake:
        info = await SglangServer(fake.url).connect()
    assert "speculatively" in info.warnings[0]


async def test_a_model_that_does_not_generate_is_refused() -> None:
    said = Reply(200, {"model_path": "/m", "is_generation": False})
    async with FakeSglang(replies={"/model_info": said}) as fake:
        with pytest.raises(UnusableEngine, match="does not generate"):
            await SglangServer(fake.url).connect()


async def test_a_key_is_needed_and_never_said() -> None:
    async with FakeSglang(api_key="sk-secret") as fake:
        with pytest.raises(EngineUnauthorized, match="KLDTUI_REF_API_KEY") as told:
            await SglangServer(fake.url, key_hint="KLDTUI_REF_API_KEY").connect()
    assert "sk-secret" not in str(told.value)


# ── a branch ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("repeats", ["all", "none", "but_ids"])
@pytest.mark.parametrize("interval", [1, 3])
async def test_a_branch_is_what_the_model_says_however_it_is_streamed(
    repeats: str, interval: int
) -> None:
    script = [*model.encode("haha foo foo"), model.FIRST_HALF, model.SECOND_HALF, model.EOS]
    async with FakeSglang(script, repeats=repeats, interval=interval) as fake:
        said = await ask(await connected(fake), PREFIX, n=32, top_n=4)
    assert said.error is None
    assert said.ids == script
    assert said.data == "haha foo foo美<|im_end|>".encode()
    for at, token in enumerate(said.tokens):
        values = model.logprobs((*PREFIX, *script[:at]), script[at])
        assert token.logp == pytest.approx(values[token.id])
        assert same_top(token.top, model.best(values, 4))
    assert said.finish is not None
    assert (said.finish.reason, said.finish.n_prompt) == ("eog", len(PREFIX))


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(2, model.N_VOCAB - 2), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    repeats=st.sampled_from(["all", "none", "but_ids"]),
    counts=st.booleans(),
)
def test_no_token_is_lost_or_doubled_however_many_come_at_once(
    ids: list[int], cuts: list[int], repeats: str, counts: bool
) -> None:
    """Without `completion_tokens` only streams that say everything again can be told."""
    counts = counts or repeats != "all"
    answer, at, got = SglangAnswer(1, 1, cache=False), 0, []
    for cut in cuts:
        upto = min(len(ids), at + cut)
        own = [[-1.0, id, None] for id in ids]
        start = at if repeats == "none" else 0
        meta: dict[str, Any] = {
            "output_token_logprobs": own[start:upto],
            "output_top_logprobs": [[entry] for entry in own[start:upto]],
        }
        if counts:
            meta["completion_tokens"] = upto
        event = {
            "meta_info": meta,
            "output_ids": ids[0 if repeats == "all" else at : upto],
            "text": "a" * (upto - start),
        }
        got += answer.feed(event)
        at = upto
    assert [token.id for token in got] == ids[:at]
    assert b"".join(token.data for token in got) == b"a" * at


async def test_it_is_asked_for_by_ids_greedily_and_outside_its_cache() -> None:
    async with FakeSglang() as fake:
        engine = await connected(fake)
        for cache in (False, False, True):
            await ask(engine, PREFIX, n=2, cache=cache)
    first, second, cached = fake.bodies(PATH)
    assert first["input_ids"] == PREFIX
    assert first["return_logprob"] is True
    assert (first["top_logprobs_num"], first["logprob_start_len"]) == (3, -1)
    neutral = {"temperature": 0, "repetition_penalty": 1, "frequency_penalty": 0, "top_p": 1}
    assert first["sampling_params"].items() >= neutral.items()
    assert first["extra_key"] != second["extra_key"]
    assert "extra_key" not in cached
    stored = {**engine.settings["sampling_params"], "max_new_tokens": 2}
    assert first["sampling_params"] == stored


async def test_what_came_from_the_cache_against_the_wish_is_said() -> None:
    async with FakeSglang(cached=5) as fake:
        engine = await connected(fake)
        said, wished = await ask(engine, PREFIX), await ask(engine, PREFIX, cache=True)
    assert said.finish is not None
    assert "5 tokens of the prompt came from its cache" in said.finish.detail
    assert wished.finish is not None
    assert "cache" not in wished.finish.detail


async def test_any_number_of_candidates_and_none_of_probability_zero_is_lost() -> None:
    async with FakeSglang() as fake:
        top = await (await connected(fake)).next_top(PREFIX, model.N_VOCAB)
    assert len(top) == model.N_VOCAB
    assert top[-1] == (model.NEVER, -math.inf)


async def test_an_answer_cut_inside_a_character_keeps_its_ids_and_invents_no_bytes() -> None:
    script = [*model.encode("ab"), model.FIRST_HALF]
    async with FakeSglang(script) as fake:
        said = await ask(await connected(fake), PREFIX, n=3)
    assert said.ids == script
    assert said.data == b"ab"


async def test_a_build_without_output_ids_is_read_by_its_log_probabilities() -> None:
    script = [*model.encode("Hi"), model.EOS]
    async with FakeSglang(script, ids=False) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert said.ids == script


async def test_closing_an_answer_ends_it_at_the_server_and_frees_the_engine() -> None:
    async with FakeSglang(fault={1: [SILENCE]}) as fake:
        engine = await connected(fake)
        items = engine.generate(PREFIX, 8, 3)
        await items.__anext__()
        await items.aclose()
        top = await asyncio.wait_for(engine.next_top(PREFIX, 3), 5)
    assert same_top(top, model.best(model.logprobs(tuple(PREFIX)), 3))


# ── what it does not give ────────────────────────────────────────────────────────────────────


async def test_a_branch_that_fills_the_context_says_so() -> None:
    async with FakeSglang(context_len=len(PREFIX) + 4) as fake:
        said = await ask(await connected(fake), PREFIX, n=50)
    assert len(said.tokens) == 3, "it wants one token of the context left free"
    assert said.finish is not None
    assert said.finish.reason == "context"


async def test_a_prefix_that_does_not_fit_is_refused_with_the_option_that_helps() -> None:
    async with FakeSglang(context_len=4) as fake:
        said = await ask(await connected(fake), PREFIX)
    assert isinstance(said.error, ContextExceeded)
    assert "--context-length" in str(said.error)


async def test_ids_of_another_vocabulary_are_refused_as_such() -> None:
    async with FakeSglang() as fake:
        engine = await connected(fake)
        said = await ask(engine, [model.N_VOCAB + 5])
        with pytest.raises(EngineRefused, match="invalid tokens"):
            await engine.next_top([model.N_VOCAB + 5], 3)
    assert isinstance(said.error, EngineRefused)
    assert "invalid tokens" in str(said.error)


# ── answers that cannot be trusted ───────────────────────────────────────────────────────────


def meta(change: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def rewrite(data: dict[str, Any]) -> dict[str, Any]:
        data["meta_info"] |= change
        return data

    return rewrite


ABORT = {"type": "abort", "message": "out of KV cache"}


@pytest.mark.parametrize(
    ("rewrite", "kind", "words"),
    [
        (meta({"output_token_logprobs": [[0.7, 99, None]]}), UnusableEngine, "cannot be above 0"),
        (meta({"output_token_logprobs": [[-40.0, 99, None]]}), UnusableEngine, "most likely"),
        (meta({"output_top_logprobs": [[[0.5, 99, None]]]}), UnusableEngine, "above 0"),
        (meta({"output_token_logprobs": None}), UnusableEngine, "without log-probabilities"),
        (meta({"output_token_logprobs": [[-1.0, 98, None]]}), EngineBroke, "do not belong"),
        (meta({"completion_tokens": 5}), EngineBroke, "counts 5 tokens"),
        (meta({"output_token_logprobs": [["x", 99, 0]]}), EngineBroke, "no known shape"),
        (meta({"prompt_tokens": 3}), UnusableEngine, "read 3 tokens where 6 were sent"),
        (meta({"finish_reason": ABORT}), EngineBroke, "out of KV cache"),
        (lambda data: {"text": "x"}, EngineBroke, "no known shape"),
    ],
)
async def test_numbers_that_cannot_be_what_they_are_called_are_refused(
    rewrite: Any, kind: type[EngineError], words: str
) -> None:
    async with FakeSglang([model.WHOLE], rewrite=rewrite) as fake:
        said = await ask(await connected(fake), PREFIX)
        assert type(said.error) is kind
        assert re.search(words, str(said.error))
        assert str(said.error).startswith(fake.url)


# ── faults ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Died(), "closed the connection"),
        ([], "ended in mid-answer"),
        ([b"data: [DONE]\n\n"], "ended in mid-answer"),
        ([b"data: {oh no\n\n"], "no JSON"),
        ([b'data: {"meta_info"'], "ended in mid-answer"),
        ([{"error": {"message": "The server is shutting down"}}], "shutting down"),
    ],
)
async def test_what_arrived_before_a_fault_is_kept_and_a_second_branch_succeeds(
    fault: Any, words: str
) -> None:
    async with FakeSglang(fault={2: fault}) as fake:
        engine = await connected(fake)
        said = await ask(engine, PREFIX)
        assert len(said.tokens) == 2
        assert words in str(said.error)
        fake.fault = {}
        again = await ask(engine, PREFIX)
        assert again.error is None
        assert again.ids[:2] == said.ids


async def test_a_stream_without_an_end_is_no_finished_branch() -> None:
    async with FakeSglang(no_end=True) as fake:
        said = await ask(await connected(fake), PREFIX, n=3)
    assert isinstance(said.error, EngineBroke)
    assert len(said.tokens) == 3


# ── a given text ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX[:1]])
async def test_a_given_text_is_scored_in_one_request(prefix: list[int]) -> None:
    targets = [*model.encode("z foo"), model.EOS]
    async with FakeSglang() as fake:
        got = await (await connected(fake)).score(prefix, targets, 4)
    assert [token.id for token in got] == targets
    for at, token in enumerate(got):
        values = model.logprobs((*prefix, *targets[:at]))
        assert token.logp == pytest.approx(values[token.id])
        assert same_top(token.top, model.best(values, 4))
    assert len(fake.bodies(PATH)) == 1


async def test_scores_of_other_tokens_than_were_sent_are_refused() -> None:
    other = meta({"input_token_logprobs": [[-1.0, 5, None]], "input_top_logprobs": [[]]})
    async with FakeSglang(rewrite=other) as fake:
        with pytest.raises(EngineBroke, match="other tokens"):
            await (await connected(fake)).score(PREFIX, [3], 4)


# ── text of tokens ───────────────────────────────────────────────────────────────────────────


async def test_pieces_keep_spaces_and_invent_nothing_for_parts_of_characters() -> None:
    async with FakeSglang() as fake:
        got = await (await connected(fake)).pieces(range(model.N_VOCAB))
    halves = {model.FIRST_HALF, model.SECOND_HALF}
    assert got == {id: piece for id, piece in enumerate(model.PIECES) if id not in halves}


async def test_an_old_build_gives_no_pieces() -> None:
    async with FakeSglang(old=True) as fake:
        assert await (await connected(fake)).pieces([4, 5]) == {}
