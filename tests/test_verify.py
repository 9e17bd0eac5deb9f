"""Is this server the model that made this recording? What it says when it is, and when not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from kldtui.engines.base import Capabilities, Top
from kldtui.errors import ContextExceeded, EngineBroke, EngineRefused, InexactPrefix
from kldtui.index import State
from kldtui.position import Position
from kldtui.rows import FullRow, Invalid, TopRow
from kldtui.verify import VerifyResult, gap, verify
from tests.builders_engines import MemoryRecording, ScriptedEngine, info, model, served

STREAM = [[5, *range(20 + chunk, 60 + chunk)] for chunk in range(4)]
REF, QUANT, THIRD = model(1), model(2), model(3)


def recording(distribution: Any, name: str, **more: Any) -> MemoryRecording:
    return MemoryRecording(STREAM, distribution, name=name, **more)


def engine(distribution: Any, noise: float = 0.1, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(next=served(distribution, noise), info=info(**more))


ref, quant = recording(REF, "ref.kld"), recording(QUANT, "q4.kld")


async def test_the_right_server_passes() -> None:
    asked = engine(REF)
    result = await verify(asked, ref, quant, None, Position(2, 30))
    assert result.verdict == "ok"
    assert result.passed
    assert result.own is not None
    assert result.other is not None
    assert result.own < 0.3 < result.other
    assert result.positions >= 8
    assert "it agrees with ref.kld" in result.detail
    assert [*STREAM[2][:30]] in [prefix for prefix, _ in asked.asked]


async def test_it_costs_short_prefixes_only() -> None:
    stream = [[5, *(20 + k % 70 for k in range(400))] for _ in range(3)]
    long = MemoryRecording(stream, REF, first=200)
    asked = engine(REF)
    result = await verify(asked, long, MemoryRecording(stream, QUANT, first=200))
    assert result.passed
    assert max(len(prefix) for prefix, _ in asked.asked) < 200 + 33


class TextServer(ScriptedEngine):
    """Takes text, and cannot be sent every prefix; gives ten candidates."""

    every = 3

    async def next_top(self, prefix: Any, top_n: int, *, cache: bool = True) -> Top:
        assert top_n <= 10
        if len(prefix) % self.every == 0:
            raise InexactPrefix("the text gives other tokens", 3, 2)
        return await super().next_top(prefix, top_n, cache=cache)


def text_server(distribution: Any, every: int = 3) -> TextServer:
    """Of the lengths of prefixes it cannot be sent one in `every`."""
    made = TextServer(next=served(distribution, 0.1), info=info())
    made.capabilities = Capabilities(False, True, 10, False, False)
    made.every = every
    return made


async def test_prefixes_that_a_text_server_cannot_be_sent_are_left_out() -> None:
    result = await verify(text_server(REF), ref, quant)
    assert result.verdict == "ok"
    assert 8 <= result.positions < 24
    wrong = await verify(text_server(QUANT), ref, quant)
    assert wrong.verdict == "swapped"


async def test_where_no_prefix_can_be_sent_nothing_is_claimed() -> None:
    result = await verify(text_server(REF, every=1), ref, quant)
    assert result.verdict == "unchecked"
    assert "can be sent to it exactly" in result.detail


async def test_a_recording_that_does_not_say_its_vocabulary_is_compared_all_the_same() -> None:
    silent = recording(REF, "answers.json", n_vocab=0)
    assert (await verify(engine(REF), silent, quant)).verdict == "ok"


async def test_exchanged_servers_are_named() -> None:
    as_ref = await verify(engine(QUANT), ref, quant, which="ref")
    as_quant = await verify(engine(REF), quant, ref, which="quant")
    assert (as_ref.verdict, as_quant.verdict) == ("swapped", "swapped")
    assert "as the reference server it holds the model of q4.kld" in as_ref.detail
    assert "exchanged" in as_quant.detail


async def test_another_model_is_named() -> None:
    result = await verify(engine(THIRD), ref, quant)
    assert result.verdict == "other_model"
    assert "another model" in result.detail
    alone = await verify(engine(THIRD), ref)
    assert alone.verdict == "other_model"
    assert alone.other is None


async def test_a_missing_bos_is_told_from_another_model() -> None:
    made = recording(REF, "ref.kld", bos=1)
    result = await verify(engine(REF, add_bos=False), made, None)
    assert result.verdict == "bos"
    assert result.add_bos is True
    assert "only with BOS" in result.detail
    assert "add_bos_token=bool:true" in result.detail


async def test_a_wrong_bos_is_told_from_another_model() -> None:
    result = await verify(engine(REF, add_bos=True), ref, quant)
    assert result.verdict == "bos"
    assert result.add_bos is False
    assert "only without BOS" in result.detail


async def test_the_right_bos_passes_and_a_swap_is_seen_through_a_wrong_one() -> None:
    made, other = recording(REF, "ref.kld", bos=1), recording(QUANT, "q4.kld", bos=1)
    assert (await verify(engine(REF, add_bos=True), made, other)).verdict == "ok"
    assert (await verify(engine(QUANT, add_bos=False), made, other)).verdict == "swapped"


async def test_two_recordings_of_one_model_are_too_alike_to_name_a_swap() -> None:
    def again(prefix: Any) -> Any:
        noise = np.random.default_rng([9, *prefix]).normal(0, 0.1, 100)
        return REF(prefix) + noise

    result = await verify(engine(REF), ref, recording(again, "ub32.kld"))
    assert result.verdict == "ok"
    near_lossless = await verify(engine(REF), recording(again, "q8.kld"), ref)
    assert near_lossless.own is not None
    assert near_lossless.own < 0.3


def off_by(nats: float) -> ScriptedEngine:
    """A server whose every log p is so far from what REF says."""
    says = served(REF, 0.0)
    shifted = lambda prefix: tuple((id, logp - nats) for id, logp in says(prefix))  # noqa: E731
    return ScriptedEngine(next=shifted, info=info())


@pytest.mark.parametrize(("nats", "verdict"), [(0.25, "ok"), (0.35, "other_model")])
async def test_a_server_is_another_model_from_0_3_nat_on(nats: float, verdict: str) -> None:
    result = await verify(off_by(nats), ref)
    assert result.own == pytest.approx(nats, abs=0.01)
    assert result.verdict == verdict


async def test_of_another_model_it_is_said_how_far_it_is_under_its_own_bos_rule() -> None:
    says = served(REF, 0.0)

    def nearer_with_bos(prefix: Any) -> Top:
        nats = 0.5 if prefix[0] == 1 else 2.0
        return tuple((id, logp - nats) for id, logp in says([5, *prefix[1:]]))

    result = await verify(ScriptedEngine(next=nearer_with_bos, info=info()), ref)
    assert result.verdict == "other_model"
    assert result.own == pytest.approx(2.0, abs=0.01)
    assert result.add_bos is False


async def test_a_swap_is_not_named_for_what_chance_does() -> None:
    def again(seed: int) -> Any:
        return lambda prefix: (
            REF(prefix) + np.random.default_rng([seed, *prefix]).normal(0, 0.1, 100)
        )

    named = 0
    for seed in range(0, 60, 3):
        own, other = recording(again(seed), "a.kld"), recording(again(seed + 1), "b.kld")
        result = await verify(engine(again(seed + 2), 0.0), own, other)
        named += result.verdict == "swapped"
    assert named <= 2, "of 20, half of which are nearer to the other recording"


async def test_it_asks_where_the_two_recordings_differ_most() -> None:
    where = range(14, 22)

    def elsewhere(prefix: Any) -> Any:
        return QUANT(prefix) if prefix[1] == 21 and len(prefix) in where else REF(prefix)

    asked = engine(REF)
    await verify(asked, ref, recording(elsewhere, "q4.kld"))
    lengths = {len(prefix) for prefix, _ in asked.asked if prefix[1] == 21}
    assert lengths >= set(where)


async def test_the_longest_prefix_needs_room_for_one_more_token() -> None:
    root = Position(2, 30)  # 30 tokens go before it, and one is said
    assert (await verify(engine(REF, n_ctx=31), ref, None, None, root)).verdict == "context"
    assert (await verify(engine(REF, n_ctx=32), ref, None, None, root)).verdict == "ok"


async def test_another_vocabulary_and_too_small_a_context_are_named() -> None:
    words = await verify(engine(REF, n_vocab=101), ref, quant)
    assert words.verdict == "vocabulary"
    assert "101" in words.detail
    assert "100" in words.detail
    small = await verify(engine(REF, n_ctx=32), ref, quant)
    assert small.verdict == "context"
    assert "32" in small.detail
    assert (await verify(engine(REF, n_ctx=42), ref, quant)).verdict == "ok"
    assert (await verify(engine(REF, n_ctx=64), ref, quant, None, Position(0, 12))).passed


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ContextExceeded("http://fake: exceeds the context"), "context"),
        (EngineRefused("http://fake: Prompt contains invalid tokens"), "vocabulary"),
    ],
)
async def test_what_the_server_refuses_is_named(error: Exception, verdict: str) -> None:
    def refuses(_: Any) -> Top:
        raise error

    asked = ScriptedEngine(next=refuses, info=info(n_vocab=None, n_ctx=None))
    assert (await verify(asked, ref, quant)).verdict == verdict


async def test_a_server_that_breaks_is_no_verdict() -> None:
    def breaks(_: Any) -> Top:
        raise EngineBroke("http://fake: gone")

    with pytest.raises(EngineBroke):
        await verify(ScriptedEngine(next=breaks), ref, quant)


async def test_without_common_records_nothing_is_claimed() -> None:
    tokens_only = MemoryRecording(STREAM, REF, first=99)
    result = await verify(engine(REF), tokens_only, quant)
    assert (result.verdict, result.positions, result.passed) == ("unchecked", 0, False)


async def test_invalid_and_missing_rows_are_left_out() -> None:
    bad = frozenset(Position(0, t) for t in range(9, 20))
    broken = recording(REF, "ref.kld", invalid=bad)
    shorter = MemoryRecording(STREAM[:2], QUANT, name="q4.kld")
    result = await verify(engine(REF), broken, shorter)
    assert result.verdict == "ok"


async def test_a_quant_recorded_as_top_n_is_verified_too() -> None:
    class TopOnly(MemoryRecording):
        def row(self, position: Position) -> Any:
            row = super().row(position)
            assert isinstance(row, FullRow)
            return TopRow(dict(row.top(10)), {}, Invalid.NO)

    own = TopOnly(STREAM, QUANT, name="q4.gguf-run", format="kldtui-run")
    assert (await verify(engine(QUANT), own, ref, which="quant")).verdict == "ok"
    assert (await verify(engine(REF), own, ref, which="quant")).verdict == "swapped"


async def test_the_index_sends_it_to_chunks_where_the_recordings_differ() -> None:
    class Layout:
        def chunk_slice(self, chunk: int) -> slice:
            return slice(chunk * 32, chunk * 32 + 32)

    class Columns:
        def __init__(self) -> None:
            self.layout = Layout()
            pair = np.zeros(128, [("state", "u1"), ("kld", "f4")])
            pair["state"][32:] = State.SCORED
            pair["kld"][96:] = 1.0
            self.pairs = [pair]

    asked = engine(REF)
    await verify(asked, ref, quant, Columns())  # type: ignore[arg-type]
    chunks = {prefix[1] - 20 for prefix, _ in asked.asked}
    assert 3 in chunks
    assert 0 not in chunks


def test_bounds_are_left_out_of_the_gap() -> None:
    logp = np.array([-0.5, -1.0, -16.5, -16.5], np.float32)
    row = FullRow(logp, -16.5, Invalid.NO)
    assert gap(row, ((0, -0.5), (1, -1.5), (2, -30.0), (3, -17.0))) == pytest.approx(0.25)


def test_a_token_that_the_servers_list_lacks_counts_as_far_as_its_end_tells() -> None:
    row = TopRow({0: -0.5, 1: -1.0, 2: -9.0}, {}, Invalid.NO)
    top: Top = ((0, -0.5), (5, -3.0))
    assert gap(row, top) == pytest.approx((0 + 2.0) / 2)
    assert math.isfinite(gap(row, ((1, -1.0), (0, -math.inf))))


def test_the_result_is_json() -> None:
    result = VerifyResult("ok", 0.1, 0.9, 17, "fine", False)
    assert result.to_json() == {
        "verdict": "ok",
        "own": 0.1,
        "other": 0.9,
        "positions": 17,
        "add_bos": False,
        "detail": "fine",
    }


def test_it_runs_outside_a_test_loop_too() -> None:
    assert asyncio.run(verify(engine(REF), ref, quant)).passed
