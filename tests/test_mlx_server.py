"""mlx_lm.server takes text and streams no ids: what comes back has to be the exact branch still."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines.base import Finish, Token, wait_ready
from kldtui.engines.mlx_server import MlxServer
from kldtui.engines.parity import SAMPLE, OwnTokenizer
from kldtui.errors import (
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    InexactPrefix,
    UnusableEngine,
    VocabularyError,
)
from tests import tiny_model as model
from tests.asking import ask
from tests.builders_vocab import BYTE_LEVEL, write_tokenizer_json
from tests.fake_http import Reply
from tests.mlx_fake import COMPLETIONS, FakeMlx, tiny_tokenizer

HALVES = [model.FIRST_HALF, model.SECOND_HALF]
PREFIX = model.encode("The weather ")
AFTER = model.encode(" in town is nice")
BOOK = model.encode("the book of the year is out now")


@contextlib.asynccontextmanager
async def engine_of(
    fake: FakeMlx, tokenizer: OwnTokenizer | Path | None = None, **more: Any
) -> AsyncIterator[MlxServer]:
    """A connected engine over the fake, which is served meanwhile."""
    async with fake:
        engine = MlxServer(fake.url, tokenizer=tokenizer or tiny_tokenizer(), **more)
        try:
            await engine.connect()
            yield engine
        finally:
            await engine.close()


async def branch(
    engine: MlxServer, prefix: Sequence[int], n: int, top_n: int = 5
) -> tuple[list[Token], Finish]:
    said = await ask(engine, prefix, n, top_n)
    if said.error is not None:
        raise said.error
    assert said.finish is not None
    return said.tokens, said.finish


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


# ── the branch ───────────────────────────────────────────────────────────────────────────────


async def test_a_branch_is_what_the_model_says_with_its_probabilities() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        tokens, finish = await branch(engine, PREFIX, 20, 4)
    assert ids_of(tokens) == fake.truth(PREFIX, 20)
    assert b"".join(token.data for token in tokens).startswith(b"the book of the")
    seen = list(PREFIX)
    for at, token in enumerate(tokens):
        forced = BOOK[at] if at < len(BOOK) else None
        values = model.logprobs(tuple(seen), forced)
        assert token.logp == pytest.approx(values[token.id])
        assert [id for id, _ in token.top] == [id for id, _ in model.best(values, 4)]
        seen.append(token.id)
    assert (finish.reason, finish.n_prompt) == ("limit", len(PREFIX))


async def test_it_comes_in_short_steps_that_grow() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        given = []
        async for item in engine.generate(PREFIX, 30, 5):
            if isinstance(item, Token):
                given.append((item.id, len(fake.asked_for())))
    waited = [requests for _, requests in given]
    assert waited[:4] == [1, 1, 1, 1]
    assert waited[4] == 2
    assert waited[-1] <= 6


async def test_every_request_is_one_text_of_exact_ids_seeded_and_of_no_named_model() -> None:
    fake = FakeMlx([*BOOK[:5], *HALVES, *BOOK], PREFIX)
    async with fake:
        engine = MlxServer(fake.url + "/?model=other", tokenizer=tiny_tokenizer())
        await engine.connect()
        tokens, _ = await branch(engine, PREFIX, 25)
        await engine.close()
    whole = [*PREFIX, *ids_of(tokens)]
    for body in fake.asked_for():
        sent = model.encode(body["prompt"])
        assert whole[: len(sent)] == sent
    for body in fake.bodies(COMPLETIONS):
        assert isinstance(body["prompt"], str)
        assert (body["seed"], body["temperature"]) == (0, 0)
        assert "model" not in body
        assert "stream" not in body


async def test_a_character_cut_in_two_is_stepped_over() -> None:
    fake = FakeMlx([*BOOK[:3], model.FIRST_HALF, *BOOK], PREFIX)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 16)
    assert ids_of(tokens) == fake.truth(PREFIX, 16)
    assert tokens[3].data == model.PIECES[model.FIRST_HALF]


async def test_where_the_text_never_fits_again_the_rest_is_asked_for_at_once() -> None:
    fake = FakeMlx([*HALVES, *BOOK, *BOOK, *BOOK, *BOOK], PREFIX)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 110)
    assert ids_of(tokens) == fake.truth(PREFIX, 110)
    asked = fake.asked_for()
    assert len(asked) <= 4
    assert len({body["prompt"] for body in asked}) == 1
    assert asked[-1]["max_tokens"] == 110


@pytest.mark.parametrize("top_n", [0, 1, 10, 40])
async def test_at_most_ten_candidates_come_however_many_are_asked_for(top_n: int) -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 3, top_n)
        assert engine.capabilities.top_n_limit == 10
    assert ids_of(tokens) == BOOK[:3]
    assert [len(token.top) for token in tokens] == [min(top_n, 10)] * 3


async def test_among_equals_the_lowest_id_is_the_sampled_one() -> None:
    def tie(data: dict[str, Any]) -> dict[str, Any]:
        for entry in data["choices"][0]["logprobs"]["content"]:
            for listed in entry.get("top_logprobs", ()):
                listed["logprob"] = max(listed["logprob"], -1.0)
        return data

    fake = FakeMlx(BOOK, PREFIX, rewrite=tie)
    async with engine_of(fake) as engine:
        top = await engine.next_top(PREFIX, 10)
    equal = [id for id, logp in top if logp == top[0][1]]
    assert equal == sorted(equal)


async def test_an_end_of_generation_ends_the_branch() -> None:
    fake = FakeMlx([*BOOK[:6], model.EOS], PREFIX)
    async with engine_of(fake) as engine:
        tokens, finish = await branch(engine, PREFIX, 50)
    assert finish.reason == "eog"
    assert ids_of(tokens) == [*BOOK[:6], model.EOS]
    assert tokens[-1].data == b"<|im_end|>"


async def test_it_ends_where_llama_cpp_would_though_the_server_goes_on() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake, tiny_tokenizer(ends=[BOOK[5]])) as engine:
        tokens, finish = await branch(engine, PREFIX, 50)
    assert finish.reason == "eog"
    assert len(tokens) == BOOK.index(BOOK[5]) + 1


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([*HALVES, model.WHOLE, *model.encode("a foo |xn't.")]), max_size=40),
    st.integers(1, 45),
    st.integers(0, 20),
)
def test_whatever_is_said_comes_back_exactly(script: list[int], n: int, more: int) -> None:
    async def run() -> None:
        fake = FakeMlx(script, PREFIX)
        async with engine_of(fake) as engine:
            tokens, _ = await branch(engine, PREFIX, n)
            assert ids_of(tokens) == fake.truth(PREFIX, n)
            if ids_of(tokens)[-1:] != [model.EOS]:
                longer, _ = await branch(engine, [*PREFIX, *ids_of(tokens)], more)
                assert ids_of([*tokens, *longer]) == fake.truth(PREFIX, n + more)
        assert fake.drops == 0

    asyncio.run(run())


# ── what cannot be sent ──────────────────────────────────────────────────────────────────────


async def test_a_prefix_whose_text_gives_other_ids_is_refused_and_never_sent() -> None:
    prefix = [*PREFIX, *HALVES, *AFTER]
    fake = FakeMlx()
    async with engine_of(fake) as engine:
        with pytest.raises(InexactPrefix) as caught:
            await branch(engine, prefix, 5)
        with pytest.raises(InexactPrefix):
            await engine.next_top(prefix, 5)
    assert (caught.value.at, caught.value.nearest) == (len(PREFIX), len(PREFIX))
    for part in (f"from t{len(PREFIX)} (<0xE7 BE>) on", f"ends before t{len(PREFIX)}"):
        assert part in str(caught.value)
    for part in ("--quant-model", "kldtui[mlx]"):
        assert part in str(caught.value)
    text = model.decode(prefix)
    assert all(body["prompt"] != text for body in fake.asked_for())


async def test_a_chunk_that_begins_in_mid_character_has_no_position_that_can_be_reached() -> None:
    fake = FakeMlx()
    async with engine_of(fake) as engine:
        with pytest.raises(InexactPrefix, match="begins in mid-character") as caught:
            await branch(engine, [model.SECOND_HALF, *AFTER], 5)
    assert (caught.value.at, caught.value.nearest) == (0, None)
    assert not fake.asked_for()


async def test_the_check_alone_sends_nothing() -> None:
    fake = FakeMlx()
    async with engine_of(fake) as engine:
        assert engine.tokenizer is not None
        assert engine.tokenizer.check(PREFIX).text == "The weather "
        parity = engine.tokenizer.check([*PREFIX, *HALVES])
    assert (parity.text, parity.at) == (None, len(PREFIX))
    assert not fake.asked_for()


async def test_a_prefix_that_the_model_says_by_itself_is_reached_from_before_the_break() -> None:
    fake = FakeMlx([*HALVES, *AFTER, *BOOK], PREFIX)
    async with engine_of(fake) as engine:
        prefix = [*PREFIX, *HALVES, *AFTER]
        tokens, finish = await branch(engine, prefix, 8)
        assert ids_of(tokens) == BOOK[:8]
        assert finish.n_prompt == len(prefix)
        assert (await engine.next_top(prefix, 3))[0][0] == BOOK[0]


async def test_bos_is_learnt_from_the_server_and_prefixes_need_it_then() -> None:
    tokenizer = tiny_tokenizer()
    fake = FakeMlx(BOOK, [model.BOS, *PREFIX], adds_bos=True)
    async with engine_of(fake, tokenizer) as engine:
        assert engine.info is not None
        assert (engine.info.add_bos, engine.info.bos_id) == (True, model.BOS)
        tokens, _ = await branch(engine, [model.BOS, *PREFIX], 5)
        assert ids_of(tokens) == BOOK[:5]
        with pytest.raises(InexactPrefix, match="puts other tokens before every text"):
            await branch(engine, PREFIX, 5)


async def test_a_server_that_adds_no_bos_is_believed_over_the_tokenizer() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake, tiny_tokenizer(adds_bos=True)) as engine:
        assert engine.info is not None
        assert engine.info.add_bos is False
        tokens, _ = await branch(engine, PREFIX, 5)
    assert ids_of(tokens) == BOOK[:5]


async def test_another_models_tokenizer_is_refused_at_once() -> None:
    fake = FakeMlx(miscounts=2)
    with pytest.raises(UnusableEngine, match="give the tokenizer of the model that it serves"):
        async with engine_of(fake):
            pass


async def test_a_prompt_that_is_read_as_other_tokens_ends_the_branch() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        fake.miscounts = 1
        with pytest.raises(UnusableEngine, match=r"it read 9 tokens where 8 were meant"):
            await branch(engine, model.encode("The book"), 5)


# ── its prompt cache ─────────────────────────────────────────────────────────────────────────


async def test_no_prompt_ever_equals_an_earlier_one_with_its_answer() -> None:
    fake = FakeMlx([*BOOK, *BOOK], PREFIX)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 12)
        longer, _ = await branch(engine, [*PREFIX, *ids_of(tokens)], 12)
        again, _ = await branch(engine, PREFIX, 24)
        for at in range(6):
            top = await engine.next_top([*PREFIX, *BOOK[:at]], 3)
            assert top[0][0] == BOOK[at]
    assert ids_of([*tokens, *longer]) == ids_of(again) == fake.truth(PREFIX, 24)
    assert fake.drops == 0


async def test_a_prompt_that_others_had_answered_costs_one_connection_and_no_branch() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        fake.held.append([*PREFIX, *BOOK[:4]])
        tokens, _ = await branch(engine, [*PREFIX, *BOOK[:4]], 8)
    assert ids_of(tokens) == fake.truth([*PREFIX, *BOOK[:4]], 8)
    assert fake.drops == 1
    assert not fake.thread_died


async def test_without_a_prompt_cache_the_steps_are_few() -> None:
    fake = FakeMlx([*BOOK, *BOOK, *BOOK], PREFIX, cache_size=0)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 60)
    assert ids_of(tokens) == fake.truth(PREFIX, 60)
    assert len(fake.asked_for()) <= 6


async def test_parts_that_do_not_fit_together_are_asked_for_again_in_one_piece() -> None:
    fake = FakeMlx([*BOOK, *BOOK], PREFIX)
    wrong: list[int] = []

    def once(seen: list[int]) -> int | None:
        if seen == [*PREFIX, *BOOK[:3]] and len(fake.asked_for()) == 2:
            wrong.append(5)
            return 5
        return None

    fake.slips = once
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 20)
    assert wrong
    assert ids_of(tokens) == fake.truth(PREFIX, 20)


async def test_a_server_that_never_answers_alike_is_refused_and_what_came_is_kept() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    fake.slips = lambda seen: 5 + len(fake.asked_for())
    async with engine_of(fake) as engine:
        said = await ask(engine, PREFIX, 20)
    assert isinstance(said.error, UnusableEngine)
    assert "answers the same text differently" in str(said.error)
    assert len(said.ids) == 4


# ── who is there ─────────────────────────────────────────────────────────────────────────────


async def test_it_says_what_serves_and_what_that_cannot_do() -> None:
    fake = FakeMlx(models={"data": [{"id": "org/other"}, {"id": "/models/tiny-4bit"}]})
    async with engine_of(fake) as engine:
        info, can = engine.info, engine.capabilities
    assert info is not None
    assert (info.kind, info.model, info.build) == (
        "mlx_lm.server",
        "tiny-4bit",
        "mlx-lm 0.32.2, mlx 0.32.4",
    )
    assert info.details["model_path"] == "/models/tiny-4bit"
    assert (can.takes_ids, can.returns_ids, can.streams_probabilities) == (False, True, False)
    assert not can.cache_switch
    assert any("text only" in note for note in can.notes)


@pytest.mark.parametrize(
    ("models", "name"),
    [
        (None, "unnamed"),
        ({"data": []}, "unnamed"),
        ({"data": [{"id": "org/one"}, {"id": "org/two"}]}, "unnamed"),
        ({"data": [{"id": "mlx-community/one-4bit"}]}, "one-4bit"),
    ],
)
async def test_a_server_that_does_not_name_its_model_serves_all_the_same(
    models: Any, name: str
) -> None:
    async with engine_of(FakeMlx(BOOK, PREFIX, models=models)) as engine:
        assert engine.info is not None
        assert engine.info.model == name
        assert ids_of((await branch(engine, PREFIX, 3))[0]) == BOOK[:3]


def write_tiny_tokenizer(folder: Path) -> None:
    spelled = {chr(code): code - 32 for code in range(33, 127)} | {"Ġ": 0, "Ċ": 95, "ef": 96}
    merges = [["e", "f"]]
    path = folder / "tokenizer.json"
    write_tokenizer_json(path, spelled, pre_tokenizer=BYTE_LEVEL, decoder=BYTE_LEVEL, merges=merges)


async def test_the_tokenizer_of_a_folder_that_a_server_here_names_is_taken(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    own = OwnTokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 128, "quantization": {"bits": 4}}')
    fake = FakeMlx(models={"data": [{"id": str(tmp_path)}]})
    fake.miscounts = len(own.encode(SAMPLE)) - len(model.encode(SAMPLE))
    async with fake:
        engine = MlxServer(fake.url)
        info = await engine.connect()
        assert info.n_vocab == 128
        assert info.details["quantization"] == {"bits": 4}
        assert await engine.pieces([96, 127]) == {96: b"ef"}
        await engine.close()


async def test_without_any_tokenizer_it_says_which_to_give() -> None:
    async with FakeMlx() as fake:
        engine = MlxServer(fake.url)
        with pytest.raises(UnusableEngine, match="--tokenizer"):
            await engine.connect()
        await engine.close()


async def test_a_list_of_pieces_is_no_tokenizer(tmp_path: Path) -> None:
    write_tokenizer_json(
        tmp_path / "tokenizer.json",
        {chr(code): code - 32 for code in range(33, 127)},
        pre_tokenizer=BYTE_LEVEL,
        decoder=BYTE_LEVEL,
    )
    with pytest.raises(VocabularyError, match="no merges"):
        async with engine_of(FakeMlx(), tmp_path / "tokenizer.json"):
            pass


async def test_the_shape_of_before_0_30_6_is_read() -> None:
    fake = FakeMlx(BOOK, PREFIX, older=True)
    async with engine_of(fake) as engine:
        tokens, _ = await branch(engine, PREFIX, 20, 4)
        assert engine.settings["logprobs"] == 10
    assert ids_of(tokens) == fake.truth(PREFIX, 20)
    assert [len(token.top) for token in tokens] == [4] * 20
    assert all(token.top[0] == (token.id, token.logp) for token in tokens)


async def test_settings_tell_how_a_branch_was_asked_for() -> None:
    async with engine_of(FakeMlx()) as engine:
        assert engine.settings["seed"] == 0
        assert engine.settings["top_logprobs"] == 10


# ── faults ───────────────────────────────────────────────────────────────────────────────────


def with_logprob(value: float) -> Any:
    def rewrite(data: dict[str, Any]) -> dict[str, Any]:
        for entry in data["choices"][0]["logprobs"]["content"]:
            for listed in entry.get("top_logprobs", ()):
                listed["logprob"] = value
        return data

    return rewrite


@pytest.mark.parametrize(("value", "words"), [(0.7, "cannot be above 0"), (math.nan, "NaN")])
async def test_numbers_that_are_no_log_probabilities_are_refused(value: float, words: str) -> None:
    async with engine_of(FakeMlx(BOOK, PREFIX, rewrite=with_logprob(value))) as engine:
        with pytest.raises(UnusableEngine, match=words) as caught:
            await branch(engine, PREFIX, 5)
    assert str(caught.value).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": {"content": [{}]}, "finish_reason": "length"}], "usage": {}},
        [],
        "text",
    ],
)
async def test_an_answer_of_no_known_shape_breaks_the_branch_by_name(answer: Any) -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        fake.replies[COMPLETIONS] = Reply(200, answer)
        with pytest.raises(EngineBroke, match="no known shape"):
            await branch(engine, PREFIX, 5)


async def test_a_server_without_log_probabilities_is_refused() -> None:
    def bare(data: dict[str, Any]) -> dict[str, Any]:
        del data["choices"][0]["logprobs"]
        return data

    with pytest.raises(UnusableEngine, match="no log-probabilities"):
        async with engine_of(FakeMlx(rewrite=bare)):
            pass


async def test_a_refusal_is_quoted() -> None:
    fake = FakeMlx()
    async with engine_of(fake) as engine:
        fake.replies[COMPLETIONS] = Reply(404, {"error": "No safetensors found in x"})
        with pytest.raises(EngineRefused, match="No safetensors found in x"):
            await branch(engine, PREFIX, 5)


async def test_a_dead_generation_thread_asks_for_a_restart() -> None:
    fake = FakeMlx()
    async with engine_of(fake) as engine:
        fake.thread_died = True
        with pytest.raises(EngineRefused, match=r"generation thread died.*restart it"):
            await branch(engine, PREFIX, 5)
        with pytest.raises(EngineRefused, match="restart it"):
            await engine.connect()


async def test_a_server_that_dies_in_mid_branch_keeps_what_came_and_is_asked_again() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        fake.dies_at = 2
        said = await ask(engine, PREFIX, 20)
        assert isinstance(said.error, EngineBroke)
        assert "closed the connection" in str(said.error)
        assert said.ids == BOOK[:4]
        fake.dies_at = None
        assert (await ask(engine, PREFIX, 20)).ids == fake.truth(PREFIX, 20)


async def test_while_it_loads_one_request_waits_however_often_it_is_asked() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    fake.loading.clear()
    waits = []

    def waited(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            fake.loading.set()

    async with fake:
        engine = MlxServer(fake.url, tokenizer=tiny_tokenizer(), first_answer_seconds=0.02)
        with pytest.raises(EngineLoading, match="wait for it"):
            await engine.connect()
        await wait_ready(engine, waited, interval=0.01)
        assert len(fake.bodies(COMPLETIONS)) == 1
        assert ids_of((await branch(engine, PREFIX, 3))[0]) == BOOK[:3]
        await engine.close()


async def test_closing_while_it_loads_leaves_nothing_waiting() -> None:
    fake = FakeMlx()
    fake.loading.clear()
    async with fake:
        engine = MlxServer(fake.url, tokenizer=tiny_tokenizer(), first_answer_seconds=0.02)
        with pytest.raises(EngineLoading):
            await engine.connect()
        await engine.close()


async def test_a_cancelled_branch_leaves_the_next_one_whole() -> None:
    fake = FakeMlx(BOOK, PREFIX)
    async with engine_of(fake) as engine:
        async with contextlib.aclosing(engine.generate(PREFIX, 20, 5)) as items:
            async for _ in items:
                break
        tokens, _ = await branch(engine, PREFIX, 20)
    assert ids_of(tokens) == fake.truth(PREFIX, 20)
    assert fake.drops == 0


async def test_one_that_never_answers_is_given_up() -> None:
    fake = FakeMlx()
    async with engine_of(fake, answer_seconds=0.05) as engine:
        fake.loading.clear()
        with pytest.raises(EngineError, match="stopped answering"):
            await branch(engine, PREFIX, 5)


async def test_a_key_is_asked_for_by_name() -> None:
    fake = FakeMlx(BOOK, PREFIX, api_key="sesame")
    with pytest.raises(EngineUnauthorized, match="KLDTUI_API_KEY"):
        async with engine_of(fake):
            pass
    async with engine_of(fake, api_key="sesame") as engine:
        assert ids_of((await branch(engine, PREFIX, 3))[0]) == BOOK[:3]


async def test_nothing_is_asked_before_it_is_connected() -> None:
    async with FakeMlx() as fake:
        engine = MlxServer(fake.url, tokenizer=tiny_tokenizer())
        with pytest.raises(EngineError, match="not connected"):
            await engine.next_top(PREFIX, 5)
        await engine.close()
