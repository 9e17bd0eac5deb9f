"""Scoring a given text with a llama-server: exact by either route, and never deadly to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.scoring import Scored, most_at_once, score, scorer
from kldtui.errors import ContextExceeded, EngineError, EngineRefused, UnusableEngine
from tests.builders_engines import ScriptedEngine, model, served
from tests.fake_server import EOG, FakeLlama

N_VOCAB = 306
SAYS = model(5, N_VOCAB)
PREFIX = [97, 98, 99]
WHOLE = [100, 300, 303, 101, 257, 10]
CUT, END, CONTROL = 301, EOG, 1
MIXED = [100, 300, CUT, 0x8E, 303, END, 101, 102, CONTROL, 103, 302]


def fake(**more: object) -> FakeLlama:
    answer = served(SAYS)
    return FakeLlama(next_top=lambda prompt: list(answer(prompt)), n_ctx=128, **more)  # type: ignore[arg-type]


async def ask(
    server: FakeLlama,
    targets: Sequence[int],
    also: Sequence[int | None] | None = None,
    *,
    top_n: int = 4,
    grammar: bool = True,
) -> tuple[list[Scored], LlamaServer]:
    engine = LlamaServer(server.url)
    await engine.connect()
    engine.scorer.grammar = grammar
    others = also if also is not None else [None] * len(targets)
    found = await score(scorer(engine), PREFIX, targets, others, top_n)
    return found, engine


def told(targets: Sequence[int], also: Sequence[int | None], top_n: int = 4) -> list[Scored]:
    """What the model says, without any server."""
    out = []
    for k, (target, other) in enumerate(zip(targets, also, strict=True)):
        logp = SAYS([*PREFIX, *targets[:k]])
        top = served(SAYS)([*PREFIX, *targets[:k]])[:top_n]
        apart = None if other is None else float(logp[other])
        out.append(Scored(target, float(logp[target]), top, apart))
    return out


def same(got: Sequence[Scored], want: Sequence[Scored]) -> None:
    assert [one.id for one in got] == [one.id for one in want]
    for one, other in zip(got, want, strict=True):
        assert one.logp == pytest.approx(other.logp)
        assert one.also == pytest.approx(other.also)
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top])


@pytest.mark.parametrize("grammar", [True, False], ids=["grammar", "stepwise"])
@pytest.mark.parametrize("targets", [WHOLE, MIXED, [CUT], [END], [100]])
async def test_each_token_gets_what_the_model_says_of_it(targets: list[int], grammar: bool) -> None:
    also = [(7 * k) % N_VOCAB if k % 3 else None for k in range(len(targets))]
    async with fake() as server:
        found, engine = await ask(server, targets, also, grammar=grammar)
    same(found, told(targets, also))
    assert engine.scorer.recomputed == 0
    assert any(body.get("grammar") for body in server.bodies()) == (grammar and len(targets) > 1)


async def test_whole_text_is_one_request() -> None:
    async with fake() as server:
        await ask(server, WHOLE)
    asked = [body for body in server.bodies() if body["prompt"][:3] == PREFIX]
    assert len(asked) == 1
    assert asked[0]["grammar"] == "root ::= " + " ".join(f"<[{id}]>" for id in WHOLE)
    assert asked[0]["cache_prompt"] is False


@given(st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None)
async def test_no_grammar_ever_holds_what_would_kill_the_server(targets: list[int]) -> None:
    async with fake() as server:
        found, _ = await ask(server, targets)
    assert server.killed_by == []
    same(found, told(targets, [None] * len(targets)))


async def test_a_server_that_does_not_list_its_ends_is_never_sent_a_grammar() -> None:
    async with fake(lists_ends=False) as server:
        found, _ = await ask(server, MIXED)
    same(found, told(MIXED, [None] * len(MIXED)))
    assert not any(body.get("grammar") for body in server.bodies())


@pytest.mark.parametrize("grammars", ["none", "loose"])
async def test_a_build_without_grammars_of_ids_is_asked_stepwise(grammars: str) -> None:
    async with fake(grammars=grammars) as server:
        found, engine = await ask(server, WHOLE, [None] * len(WHOLE))
        await score(scorer(engine), PREFIX, WHOLE, [None] * len(WHOLE), 4)
    same(found, told(WHOLE, [None] * len(WHOLE)))
    assert sum("grammar" in body for body in server.bodies()) == 1, "it is not tried twice"


@pytest.mark.parametrize("targets", [WHOLE, MIXED, [CUT, 0x8E, CUT, 0x8E], [100, CUT, 101]])
async def test_both_routes_compute_every_token_in_the_same_way(targets: list[int]) -> None:
    """What tokens are computed in one batch moves last digits: none may differ."""
    also = [5 + k for k in range(len(targets))]
    async with fake(drift=0.2) as server:
        by_grammar, engine = await ask(server, targets, also)
        again, _ = await ask(server, targets, also)
        stepwise, _ = await ask(server, targets, also, grammar=False)
    assert by_grammar == again == stepwise
    assert engine.scorer.recomputed == 0
    async with fake() as server:
        still, _ = await ask(server, targets, also)
    assert still != by_grammar, "this server no longer drifts"


async def test_what_is_asked_once_more_goes_from_the_last_place_to_the_first() -> None:
    also = [5] * len(WHOLE)
    async with fake() as server:
        await ask(server, WHOLE, also)
    more = [body for body in server.bodies() if body.get("logit_bias") and len(body["prompt"]) > 2]
    lengths = [len(body["prompt"]) for body in more]
    assert lengths == sorted(lengths, reverse=True)
    assert all(body["cache_prompt"] for body in more)


async def test_a_list_whose_numbers_move_with_its_length_is_brought_back() -> None:
    """llama.cpp adds up what it lists first: a longer list has another last digit."""
    rest = [id for id in range(N_VOCAB) if id not in (7, CUT)]

    async with fake() as server:
        server.next_top = lambda prompt: [
            (7, -0.5),
            *((id, -3.0 - id / 99) for id in rest),
            (CUT, -9),
        ]
        moved = 1e-4

        def move(answer: dict[str, object]) -> dict[str, object]:
            for entry in answer["completion_probabilities"]:  # type: ignore[attr-defined]
                if len(entry["top_logprobs"]) > 10:
                    for one in entry["top_logprobs"]:
                        one["logprob"] -= moved
            return answer

        server.rewrite = move
        found, _ = await ask(server, [CUT])
    assert found[0].logp == pytest.approx(-9, abs=1e-7)


async def test_a_server_that_does_not_keep_its_cache_is_noticed() -> None:
    async with fake(keeps_cache=False) as server:
        found, engine = await ask(server, MIXED)
    same(found, told(MIXED, [None] * len(MIXED)))
    assert engine.scorer.recomputed > 0


async def test_a_probability_of_zero_stays_one() -> None:
    async with fake() as server:
        server.next_top = lambda prompt: [(7, -0.1), *((id, -3.4e38) for id in range(8, N_VOCAB))]
        found, _ = await ask(server, [100, 101], [CUT, None])
    assert [one.logp for one in found] == [-math.inf, -math.inf]
    assert found[0].also == -math.inf


@pytest.mark.parametrize(
    ("targets", "kind", "words"),
    [
        ([N_VOCAB], UnusableEngine, "its vocabulary has 306 tokens; there is no id 306"),
        ([100] * 126, ContextExceeded, "-c 129"),
        ([], EngineError, "one to score"),
    ],
)
async def test_what_cannot_be_scored_is_refused_before_anything_is_sent(
    targets: list[int], kind: type[EngineError], words: str
) -> None:
    async with fake() as server:
        with pytest.raises(kind, match=words):
            await ask(server, targets)
    assert server.bodies() == []


async def test_other_refusals_are_not_taken_for_a_missing_grammar() -> None:
    async with fake() as server:
        server.replies["/completion"] = (500, {"error": {"message": "slot broke", "type": "x"}})
        with pytest.raises(EngineRefused, match="slot broke"):
            await ask(server, WHOLE)


def test_an_engine_that_only_generates_is_refused_with_what_to_use() -> None:
    with pytest.raises(UnusableEngine, match="--mlx-model"):
        scorer(ScriptedEngine())


def test_requests_grow_with_what_must_be_read_before_them() -> None:
    stepwise = LlamaServer("http://x")
    assert most_at_once(stepwise, 10) == 256
    assert most_at_once(stepwise, 10_000) == 2500
