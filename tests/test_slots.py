"""What an engine cannot do, which of them share a server, and whether two have one dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest

from kldtui.engines.base import Capabilities
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, compare_dictionaries, one_server_each
from kldtui.verify import VerifyResult
from tests.builders_engines import ScriptedEngine, info
from tests.builders_run import CHUNK, HEADER, raw_run

WORDS = {id: b" w%d" % id for id in range(100)}


class Spelling(ScriptedEngine):
    """An engine with a dictionary of its own."""

    words: dict[int, bytes] = WORDS

    async def pieces(self, ids: object) -> dict[int, bytes]:
        return {id: self.words[id] for id in ids if id in self.words}  # type: ignore[attr-defined]


def slot(
    role: str = "ref", words: dict[int, bytes] | None = None, n_vocab: int | None = 100
) -> EngineSlot:
    engine = Spelling(info=info(n_vocab=n_vocab))
    engine.words = WORDS if words is None else words
    return EngineSlot(role, engine, engine.info)


def able(*flags: bool | int | None, **more: object) -> EngineSlot:
    made = slot()
    made.engine.capabilities = Capabilities(*flags, **more)  # type: ignore[arg-type, misc]
    return made


def test_an_engine_that_can_do_all_is_silent_on_connecting() -> None:
    whole = able(True, True, None, True, True, notes=("a remark",))
    assert not whole.falls_short(40)
    assert whole.refusal == ""
    assert whole.top_n(40) == 40
    assert whole.limits(40) == ["a remark"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((False, True, None, True, True), ""),
        ((True, True, None, False, True), ""),
        ((True, True, None, True, False), "cannot keep it from using its cache"),
        ((True, True, 20, True, True), "at most 20 candidates"),
    ],
)
def test_what_changes_a_branch_is_told(flags: tuple[bool | int | None, ...], words: str) -> None:
    less = able(*flags)
    assert less.falls_short(40)
    assert words in "; ".join(less.limits(40))
    assert less.refusal == ""


def test_a_limit_that_is_not_reached_is_none() -> None:
    enough = able(True, True, 50, True, True)
    assert not enough.falls_short(40)
    assert enough.top_n(40) == 40
    assert enough.top_n(60) == 50


def test_no_branch_is_judged_on_ids_that_are_not_said_or_not_sent() -> None:
    assert "which ids" in able(True, False, None, True, True).refusal
    refused = able(False, True, None, True, True, notes=("it takes text",), exact=False)
    assert "other ids" in refused.refusal
    assert "it takes text" in refused.refusal


def test_jobs_of_one_server_follow_each_other() -> None:
    one, same, other = slot("ref"), slot("q4"), slot("q8")
    other.engine.url = "http://other"  # type: ignore[misc]
    groups = one_server_each([(one, 1), (other, 2), (same, 3)])
    assert [[job for _, job in group] for group in groups] == [[1, 3], [2]]


async def test_equal_dictionaries_say_nothing_and_padding_is_tolerated() -> None:
    padded = {**WORDS, 100: b"[PAD100]", 101: b"[PAD101]"}
    a, b = slot(), slot("q4", padded, 102)
    assert await compare_dictionaries(a, b) == []
    assert a.dictionary == b.dictionary == []


async def test_what_differs_is_named_by_id_and_bytes() -> None:
    steps: list[str] = []
    a, b = slot(), slot("q4", {**WORDS, 7: b" other", 100: b" more"}, 101)
    lines = await compare_dictionaries(a, b, steps.append)
    assert lines[0] == "token 7 is ␣w7 in the ref engine, ␣other in the q4 engine"
    assert "100 (␣more) on are in the q4 engine only" in lines[1]
    assert len(steps) == 2


async def test_an_engine_that_does_not_say_how_many_is_asked_for_those_of_the_other() -> None:
    assert await compare_dictionaries(slot(n_vocab=None), slot("q4")) == []
    other = {**WORDS, 7: b" other"}
    lines = await compare_dictionaries(slot(n_vocab=None, words=other), slot("q4"))
    assert lines == ["token 7 is ␣other in the ref engine, ␣w7 in the q4 engine"]


async def test_engines_that_say_nothing_are_said_to() -> None:
    neither = await compare_dictionaries(slot(n_vocab=None), slot("q4", n_vocab=None))
    assert neither == ["neither engine says how many tokens its dictionary has"]
    lines = await compare_dictionaries(slot(words={}), slot("q4", n_vocab=99))
    assert "the ref engine does not say what its tokens are spelled" in lines
    assert "they have 100 and 99 tokens" in lines


@pytest.mark.parametrize(("found", "first"), [(None, 2), (True, 2), (False, CHUNK["tokens"][0])])
def test_the_bos_rule_that_the_answers_show_goes_before_what_the_recording_states(
    tmp_path: Path, found: bool | None, first: int
) -> None:
    position = {"chunk": 0, "t": 3, "token": 10, "logp": -1.5, "top": [[4, -0.5], [10, -1.5]]}
    header = {**HEADER, "bos": {"rule": "replaces_first", "id": 2}}
    path = raw_run(tmp_path / "ref", [header, CHUNK, position])
    session = Session.open(path, [("q", path)])
    engine = slot()
    if found is not None:
        engine.verified = VerifyResult("bos", 0.0, None, 1, "", add_bos=found)
        engine.info = info(bos_id=2, add_bos=not found)
    assert session.prefix(Position(0, 3), engine) == [first, *CHUNK["tokens"][1:3]]
