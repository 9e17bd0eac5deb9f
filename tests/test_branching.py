"""From a root, what the models go on to say: exact prefixes, honest ends, and where they meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.branching import (
    Arm,
    Branch,
    Meeting,
    Parent,
    Place,
    bos_warning,
    default_arms,
    divergence,
    follow_stream,
    inside,
    is_recorded,
    loop_period,
    meeting,
    prefix_of,
    run_branch,
)
from kldtui.engines.base import Engine, Token
from kldtui.errors import EngineError, KldtuiError
from kldtui.position import Position
from kldtui.recordings.base import Made
from tests.builders_engines import MemoryRecording, ScriptedEngine, info

BOS = 1


def recording(first_token: int = 5) -> MemoryRecording:
    stream = [[first_token, *range(10, 29)], list(range(30, 50)), [BOS, *range(50, 69)]]
    return MemoryRecording(stream, lambda _: np.zeros(100))


def new(**more: object) -> Branch:
    fields = {
        "position": Position(1, 12),
        "arm": Arm("ref", "quant"),
        "quant": "q4",
        "start_id": 77,
        "prefix_ids": [1, 2, 3],
    }
    return Branch(**(fields | more))  # type: ignore[arg-type]


def tokens_of(ids: Sequence[int]) -> list[Token]:
    return [Token(id, b"w%d " % id, -0.5, ()) for id in ids]


async def run(engine: Engine, branch: Branch, n: int = 128, before: str = "") -> Sequence[object]:
    return [item async for item in run_branch(engine, branch, n, 5, before=before)]


# ── prefixes ─────────────────────────────────────────────────────────────────────────────────


def test_exactly_one_bos_in_place_of_the_chunks_first_token() -> None:
    made = recording()
    assert prefix_of(made, Position(1, 12), True, BOS) == [BOS, *range(31, 42)]
    already = prefix_of(made, Position(2, 12), True, BOS)
    assert already == [BOS, *range(50, 61)]
    assert already.count(BOS) == 1


def test_without_bos_the_prefix_is_the_chunk_from_its_start() -> None:
    assert prefix_of(recording(), Position(1, 12), False, BOS) == list(range(30, 42))
    assert prefix_of(recording(), Position(1, 12), None, None) == list(range(30, 42))


def test_the_rule_that_a_run_states_goes_before_the_servers() -> None:
    run = recording()
    run.format = "kldtui-run"
    run.made = Made(add_bos=True, bos_id=9)
    assert prefix_of(run, Position(1, 12), False, BOS)[0] == 9
    assert prefix_of(run, Position(1, 12), False, BOS, own_rule=False)[0] == 30
    warning = bos_warning(run, False, BOS)
    assert warning is not None
    assert "was made with BOS" in warning
    assert bos_warning(run, True, 9) is None


def test_a_run_that_states_no_bos_is_sent_none_whatever_the_server_adds() -> None:
    run = recording()
    run.format = "kldtui-run"
    run.made = Made(add_bos=False)
    assert prefix_of(run, Position(1, 12), True, BOS)[0] == 30
    warning = bos_warning(run, True, BOS)
    assert warning is not None
    assert "was made without BOS, but the server's model adds it" in warning


@pytest.mark.parametrize("position", [Position(3, 9), Position(0, 0), Position(0, 20)])
def test_a_position_outside_is_refused_by_name(position: Position) -> None:
    with pytest.raises(KldtuiError, match=str(position)):
        prefix_of(recording(), position, False, None)


def test_a_bos_without_id_is_refused() -> None:
    with pytest.raises(KldtuiError, match="BOS"):
        prefix_of(recording(), Position(1, 12), True, None)


def test_file_and_server_that_disagree_about_bos_are_warned_of() -> None:
    assert bos_warning(recording(BOS), True, BOS) is None
    assert bos_warning(recording(5), False, BOS) is None
    starts = bos_warning(recording(BOS), False, BOS)
    lacks = bos_warning(recording(5), True, BOS)
    silent = bos_warning(recording(BOS), None, BOS)
    assert starts is not None
    assert "begins with BOS (id 1)" in starts
    assert "adds none" in starts
    assert lacks is not None
    assert "begins without BOS" in lacks
    assert silent is not None
    assert "does not say" in silent


# ── ends ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_branch_asks_for_prefix_and_start_token_and_fills() -> None:
    engine = ScriptedEngine([4, 5, 2])
    branch = new()
    await run(engine, branch)
    assert engine.asked == [([1, 2, 3, 77], 128)]
    assert branch.ids == [4, 5, 2]
    assert (branch.stop, branch.complete) == ("eog", True)
    assert branch.settings == {"temperature": 0, "cache_prompt": False, "n_probs": 5}
    assert branch.engine["model"] == "m.gguf"
    assert branch.tokens_per_second == 20.0


async def test_a_branch_cut_by_its_length_is_unfinished_and_can_be_made_longer() -> None:
    branch = new()
    await run(ScriptedEngine([4, 5, 6, 7, 8]), branch, 3)
    assert (branch.ids, branch.stop, branch.complete) == ([4, 5, 6], "limit", False)
    longer = ScriptedEngine([7, 8])
    await run(longer, branch, 3)
    assert longer.asked == [([1, 2, 3, 77, 4, 5, 6], 3)]
    assert (branch.ids, branch.stop, branch.complete) == ([4, 5, 6, 7, 8], "eog", True)
    assert branch.continued_at == [3]
    await run(longer, branch, 3)
    assert len(longer.asked) == 1


async def test_a_full_context_leaves_it_unfinished() -> None:
    branch = new()
    await run(ScriptedEngine([4], reason="context"), branch)
    assert (branch.stop, branch.complete) == ("context", False)


async def test_a_closed_tool_call_ends_it() -> None:
    call = [b'{"name": "f", ', b'"arguments": {"a": "}}"', b"}}", b"\n", b"Observation"]
    branch = new()
    await run(ScriptedEngine(call), branch)
    assert (branch.stop, branch.complete, len(branch.tokens)) == ("tool_call", True, 3)
    await run(ScriptedEngine([b"\n", b"more", b"}"]), branch)
    assert branch.stop == "eog"
    assert branch.text.endswith("more}")


async def test_a_branch_cut_inside_a_call_and_made_longer_ends_where_the_call_closes() -> None:
    branch = new()
    call = [b'{"name": "f", ', b'"arguments": {}', b"}", b" and"]
    await run(ScriptedEngine(call), branch, 1)
    assert branch.stop == "limit"
    await run(ScriptedEngine(call[1:]), branch)
    assert (branch.stop, branch.data) == ("tool_call", b"".join(call[:3]))


async def test_the_seconds_of_a_branch_that_is_made_longer_add_up() -> None:
    branch = new()
    await run(ScriptedEngine([4, 5, 6]), branch, 1)
    branch.seconds = 60.0
    await run(ScriptedEngine([5, 6]), branch)
    assert 60.0 <= branch.seconds < 120.0


async def test_a_tool_call_that_opened_in_the_prefix_ends_it() -> None:
    branch = new()
    engine = ScriptedEngine([b"Paris", b'"}', b"}", b" and"])
    await run(engine, branch, before='Assistant: {"name": "f", "arguments": {"city": "')
    assert branch.stop == "tool_call"
    assert branch.text == 'Paris"}}'


async def test_an_unclosed_or_unrelated_brace_ends_nothing() -> None:
    branch = new()
    code = [b"{", b" x = 1;", b" }", b'{"name":"f",', b'"arguments":"{', b"}}"]
    await run(ScriptedEngine(code), branch)
    assert branch.stop == "eog"
    assert len(branch.tokens) == len(code)


async def test_a_loop_ends_it_and_is_no_unfinished_branch() -> None:
    branch = new()
    await run(ScriptedEngine([9, 8, *[4, 5, 6] * 40]), branch)
    assert (branch.stop, branch.complete) == ("loop", True)
    assert len(branch.tokens) == 2 + 32
    await run(ScriptedEngine([4, 5, 6] * 2), branch)
    assert branch.stop == "eog"


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([1] * 32, 1),
        ([1] * 31, None),
        ([7, *[1, 2] * 16], 2),
        ([*range(8)] * 4, 8),
        ([*range(9)] * 4, 9),
        ([*range(9)] * 3, None),
        ([*range(16)] * 3, None),  # 48 tokens, but three rounds
        ([*range(16)] * 4, 16),
        ([*range(32)] * 4, 32),
        ([*range(40)], None),
        ([*range(8)] * 3 + [*range(7), 9], None),
    ],
)
def test_what_counts_as_a_loop(ids: list[int], period: int | None) -> None:
    assert loop_period(ids) == period


async def test_an_error_keeps_what_arrived_and_the_servers_words() -> None:
    branch = new()
    with pytest.raises(EngineError):
        await run(ScriptedEngine([4, 5, 6], breaks_after=2), branch)
    assert branch.ids == [4, 5]
    assert (branch.stop, branch.complete) == ("error", False)
    assert branch.error == "http://fake: it died"
    await run(ScriptedEngine([6, 2]), branch)
    assert branch.to_json()["error"] is None
    assert (branch.ids, branch.stop) == ([4, 5, 6, 2], "eog")


async def test_cancelling_keeps_what_arrived_and_marks_it() -> None:
    branch = new()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await run(ScriptedEngine([4, 5, 6], pause_after=2), branch)
    assert (branch.ids, branch.stop, branch.complete) == ([4, 5], "cancelled", False)


async def test_closing_the_iterator_marks_it_but_not_a_branch_that_had_ended() -> None:
    branch, ended = new(), new()
    async with contextlib.aclosing(run_branch(ScriptedEngine([4, 5]), branch)) as items:
        async for _ in items:
            break
    assert branch.stop == "cancelled"
    call = [b'{"name": "f", "arguments": {}}', b"x"]
    async with contextlib.aclosing(run_branch(ScriptedEngine(call), ended)) as items:
        async for _ in items:
            break
    assert ended.stop == "tool_call"


# ── text and JSON ────────────────────────────────────────────────────────────────────────────


async def test_raw_text_is_kept_tags_lone_bytes_and_all() -> None:
    branch = new()
    said = [b"<think>", "美".encode()[:2], "美".encode()[2:], b"</think>", b"<|im_end|>", b"\xe6"]
    await run(ScriptedEngine(said), branch)
    assert branch.text == "<think>美</think><|im_end|><0xE6>"


PIECES = st.binary(max_size=6)
LOGP = st.none() | st.floats(-50, 0) | st.just(-math.inf)
TOKENS = st.builds(
    Token,
    st.integers(0, 200_000),
    PIECES,
    st.none() | st.floats(-50, 0),
    st.lists(st.tuples(st.integers(0, 9), LOGP.filter(lambda v: v is not None)), max_size=3).map(
        tuple
    ),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(TOKENS, max_size=6), PIECES)
def test_a_branch_survives_json(tokens: list[Token], start: bytes) -> None:
    inside_another = Parent("ab" * 16, 3)
    branch = new(
        tokens=tokens, start_data=start, stop="limit", continued_at=[2], parent=inside_another
    )
    branch.engine = info().to_json()
    stored = json.loads(json.dumps(branch.to_json(), allow_nan=False))
    read = Branch.from_json(stored)
    branch.seconds = round(branch.seconds, 3)
    assert read == branch
    assert stored["text"] == branch.text
    assert stored["tokens"] == branch.ids


def test_what_is_no_branch_is_refused() -> None:
    with pytest.raises(KldtuiError, match="not a branch"):
        Branch.from_json({"id": "x"})


def test_arms_are_written_as_people_write_them() -> None:
    assert [Arm.parse(code).code for code in ("R·r", "Qq", "r.q", "QR")] == [
        "R·r",
        "Q·q",
        "R·q",
        "Q·r",
    ]
    assert [Arm.parse(code).code for code in ("R.s", "qS", "R·p", "Q.p")] == [
        "R·s",
        "Q·s",
        "R·p",
        "Q·p",
    ]
    for wrong in ("X·y", "R", "", "Rqq", "q"):
        with pytest.raises(KldtuiError, match="not an arm"):
            Arm.parse(wrong)


def test_r_q_is_made_by_default_where_both_engines_are_there() -> None:
    codes = {
        key: [arm.code for arm in default_arms(*key)]
        for key in ((True, True), (True, False), (False, True))
    }
    assert codes[True, True] == ["R·r", "Q·q", "R·q"]
    assert codes[True, False] == ["R·r", "R·q"]
    assert codes[False, True] == ["Q·r", "Q·q"]


def test_a_root_tells_its_branches_apart_by_arm_token_and_parent() -> None:
    stream, picked = Arm("ref", "stream"), Arm("ref", "picked")
    here = [
        new(),
        new(arm=stream),
        new(arm=picked, start_id=5),
        new(arm=picked, start_id=6),
        new(arm=stream, parent=Parent("a", 1)),
        new(arm=stream, parent=Parent("a", 2)),
        new(arm=stream, parent=Parent("b", 1)),
    ]
    assert new().key == "R·q"
    assert len({branch.key for branch in here}) == len(here)
    assert new(arm=stream, start_id=9).key == new(arm=stream).key


# ── places ───────────────────────────────────────────────────────────────────────────────────


def test_a_place_inside_a_branch_keeps_all_that_came_before_it() -> None:
    outer = new(prefix_ids=list(range(12)), start_id=77, tokens=tokens_of([4, 5, 6]))
    place = inside(outer, 2, 0)
    assert place.tail == (77, 4, 5)
    assert place.starts == {"stream": 6}
    assert place.parent == Parent(outer.id, 2)
    inner = new(
        prefix_ids=[*range(12), *place.tail], start_id=6, parent=place.parent, tokens=tokens_of([8])
    )
    deeper = inside(inner, 0, 0)
    assert deeper.tail == (77, 4, 5, 6)
    assert deeper.starts == {"stream": 8}
    assert inside(outer, 3, 0).starts == {}
    with pytest.raises(KldtuiError, match="3 tokens"):
        inside(outer, 4, 0)


def test_a_picked_token_that_is_there_for_a_reason_keeps_its_name() -> None:
    place = Place(Position(1, 12), 0, {"ref": 5, "quant": 6, "stream": 5})
    assert place.picking(6)[1] == "quant"
    assert place.picking(5)[1] == "ref"
    other, start = place.picking(9)
    assert (start, other.key(Arm("quant", "picked"))) == ("picked", "Q·p:9")
    assert other.picking(9)[0] == other
    assert place.key(Arm("quant", "picked")) == ""


# ── the stream as a branch ───────────────────────────────────────────────────────────────────


def followed(stream: list[int], n: int, branch: Branch | None = None, before: str = "") -> Branch:
    made = branch or new(position=Position(0, 2), start_id=stream[2])
    follow_stream(
        made,
        stream,
        n,
        piece=lambda id: b"%c" % id,
        logp=lambda t: -0.01 * t,
        eog_ids={2},
        before=before,
    )
    return made


def test_in_a_rollout_the_stream_itself_is_the_branch() -> None:
    made = followed([9, 9, 65, 66, 67, 2, 68], 99)
    assert (made.ids, made.stop, made.complete) == ([66, 67, 2], "eog", True)
    assert made.tokens[0].logp == pytest.approx(-0.03)
    cut = followed([9, 9, 65, 66, 67, 68], 2)
    assert (cut.ids, cut.stop, cut.complete) == ([66, 67], "limit", False)
    followed([9, 9, 65, 66, 67, 68], 2, cut)
    assert (cut.ids, cut.stop) == ([66, 67, 68], "limit")
    followed([9, 9, 65, 66, 67, 68], 2, cut)
    assert cut.ids == [66, 67, 68]
    call = [ord(c) for c in 'x{"name": "f", "arguments": {}}after']
    assert followed([9, 9, *call], 99).text.endswith("}}")
    assert followed([9, 9, *call], 99).stop == "tool_call"


def test_the_stream_as_a_branch_says_that_no_server_made_it() -> None:
    assert is_recorded(new(engine={"kind": "recording"}))
    assert not is_recorded(new(engine=info().to_json()))


# ── where two branches part and meet ─────────────────────────────────────────────────────────

TAIL = list(range(100, 128))


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ([1, 2, 3], [1, 2, 3], Meeting(None, None, None, 0)),
        ([1, 2, 3], [1, 2], Meeting(2, None, None, 0)),
        ([1, 2, 3, 4], [1, 9, 8, 7], Meeting(1, None, None, 0)),
        ([50, *TAIL], [*TAIL], Meeting(0, 1, 0, 28)),
        ([1, 50, 51, 52, *TAIL], [1, 60, *TAIL], Meeting(1, 4, 2, 28)),
        ([1, 50, *TAIL[:4], 7, 7], [1, *TAIL[:4], 8], Meeting(1, 2, 1, 4)),
        ([1, 50, *TAIL[:3], 7], [1, *TAIL[:3], 8], Meeting(1, None, None, 0)),
        ([], [], Meeting(None, None, None, 0)),
        ([], [1], Meeting(0, None, None, 0)),
    ],
)
def test_parting_and_meeting(a: list[int], b: list[int], found: Meeting) -> None:
    assert divergence(a, b) == found
    back = divergence(b, a)
    assert (back.parts_at, back.meet_a, back.meet_b) == (found.parts_at, found.meet_b, found.meet_a)


def test_a_short_common_end_counts_where_both_have_ended() -> None:
    a, b = new(), new()
    for branch, ids in ((a, [1, 5, 8, 2]), (b, [1, 6, 7, 8, 2])):
        branch.tokens = [Token(id, b"", None, ()) for id in ids]
        branch.stop = "eog"
    assert meeting(a, b) == Meeting(1, 2, 3, 2)
    b.stop = "limit"
    assert meeting(a, b) == Meeting(1, None, None, 0)


class Watched(list[int]):
    """Counts how many ids are looked at."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Watched.looked += len(found) if isinstance(at, slice) else 1
        return found


def test_long_branches_are_compared_as_far_as_they_meet() -> None:
    """As they are drawn while they grow, this is done over and over."""
    Watched.looked = 0
    a = Watched([1, *TAIL[:8], *range(1_000, 50_000)])
    b = Watched([2, 3, *TAIL[:8], *range(100_000, 150_000)])
    assert divergence(a, b) == Meeting(0, 1, 2, 8)
    assert Watched.looked < 10_000


IDS = st.lists(st.integers(0, 3), max_size=30)


@settings(deadline=None, max_examples=150)
@given(IDS, IDS, st.booleans(), st.sampled_from([1, 5, 256]))
def test_meetings_are_what_they_claim(a: list[int], b: list[int], ended: bool, reach: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["kldtui.branching.meeting"], "_REACH", reach)
        found = divergence(a, b, ended=ended)
    if found.parts_at is None:
        assert a == b
        return
    assert a[: found.parts_at] == b[: found.parts_at]
    assert a[found.parts_at : found.parts_at + 1] != b[found.parts_at : found.parts_at + 1]
    if found.meet_a is None or found.meet_b is None:
        assert found.meet_length == 0
        return
    i, j, k = found.meet_a, found.meet_b, found.meet_length
    assert min(i, j) >= found.parts_at
    assert a[i : i + k] == b[j : j + k]
    assert k >= 4 or (ended and i + k == len(a) and j + k == len(b))
    best = min(
        (
            (x + y, abs(x - y))
            for x in range(found.parts_at, len(a) - 3)
            for y in range(found.parts_at, len(b) - 3)
            if a[x : x + 4] == b[y : y + 4]
        ),
        default=(i + j, abs(i - j)),
    )
    assert (i + j, abs(i - j)) == best
