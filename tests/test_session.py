"""A review without a screen: what a label is given on, and which branches belong to a root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kldtui.branching import Arm, Branch
from kldtui.engines.base import Token
from kldtui.facts import RootFacts
from kldtui.floor import SelfRuns
from kldtui.labels import LabelStore
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.vocab.table import NONE
from tests.builders_engines import ScriptedEngine, info
from tests.ui.review import N_VOCAB, open_review

HERE = Position(0, 10)
CALL = b'<tool_call>{"name": f}</tool_call>'


def scanned(folder: Path, reviewer: str = "tester") -> Session:
    session = open_review(folder)
    session.keep_labels(folder / "labels.json", reviewer)
    for _ in session.index.scan():
        pass
    session.count_anew()
    return session


def facts(session: Session) -> RootFacts:
    return session.facts_of(HERE, 0)


def store(session: Session) -> LabelStore:
    assert session.labels is not None
    return session.labels


def branch(session: Session, said: Sequence[bytes] = (b"ok",), **more: Any) -> Branch:
    """Q·q of HERE, as a server would have made it."""
    fields: dict[str, Any] = {
        "position": HERE,
        "arm": Arm.parse("Q·q"),
        "quant": "q4",
        "start_id": session.place(HERE, 0).starts["quant"],
        "prefix_ids": session.chunk_tokens(0)[: HERE.t].tolist(),
        "tokens": [Token(1, data, -0.5, ()) for data in said],
        "stop": "eog",
        "complete": True,
    }
    return Branch(**(fields | more))


def test_a_hint_goes_with_the_branch_it_was_of(tmp_path: Path) -> None:
    session = scanned(tmp_path)
    session.remember(branch(session, [CALL]))
    session.set_label(facts(session), "3", "order")
    hint = store(session).hint(HERE, "q4")
    assert hint is not None
    assert hint["class"] == "malformed_tool_call"
    session.remember(branch(session))
    session.set_label(facts(session), "1", "order")
    session.close()
    again = scanned(tmp_path)
    assert store(again).hint(HERE, "q4") is None
    again.close()


def test_a_stored_branch_of_another_start_token_is_not_shown(tmp_path: Path) -> None:
    session = scanned(tmp_path)
    start = session.place(HERE, 0).starts["quant"]
    kept = [branch(session), branch(session, start_id=start + 1, arm=Arm.parse("R·q"))]
    store(session).set(HERE, "q4", "recovers", {}, [each.to_json() for each in kept])
    assert set(session.recall(HERE, 0)) == {"Q·q"}
    session.close()


def test_a_branch_that_grows_on_after_the_label_is_kept_as_it_was_judged(tmp_path: Path) -> None:
    session = scanned(tmp_path)
    growing = branch(session, [b"a"], stop=None, complete=False)
    session.remember(growing)
    session.set_label(facts(session), "1", "order")
    growing.tokens.append(Token(2, b"b", -0.5, ()))
    growing.end("eog")
    session.keep_grown(growing)
    session.close()
    shown = session.recall(HERE, 0)["Q·q"]
    assert (shown.text, shown.stop, shown.complete) == ("a", "cancelled", False)
    again = scanned(tmp_path)
    [stored] = store(again).branches_of(HERE, "q4")
    assert (stored["text"], stored["stop"]) == ("a", "cancelled")
    again.close()


def test_a_judged_branch_that_is_made_longer_is_kept_whole(tmp_path: Path) -> None:
    session = scanned(tmp_path)
    judged = branch(session, [b"a"], stop="limit", complete=False)
    session.remember(judged)
    session.set_label(facts(session), "1", "order")
    judged.tokens.append(Token(2, b"b", -0.5, ()))
    session.keep_grown(judged)
    session.close()
    again = scanned(tmp_path)
    assert [each["text"] for each in store(again).branches_of(HERE, "q4")] == ["ab"]
    again.close()


@pytest.mark.parametrize("reviewer", ["tester", "bob"])
def test_a_self_run_goes_with_ones_own_label_and_takes_over_no_others(
    tmp_path: Path, reviewer: str
) -> None:
    first = scanned(tmp_path)
    first.set_label(facts(first), "1", "order")
    first.close()
    runs = SelfRuns(12, None, None, 0.0, 0.0)
    session = scanned(tmp_path, reviewer)
    session.keep_self_run(facts(session), runs)
    assert session.self_run(HERE, 0) == runs
    record = session.label(HERE, 0)
    session.close()
    assert record is not None
    assert record.reviewer == "tester"
    assert (record.evidence["self_runs"] is not None) == (reviewer == "tester")
    assert store(session).superseded() == []


@pytest.mark.parametrize(("n_vocab", "learns"), [(N_VOCAB, True), (None, True), (99, False)])
async def test_text_is_learnt_only_from_a_server_of_the_same_vocabulary(
    tmp_path: Path, n_vocab: int | None, learns: bool
) -> None:
    session = scanned(tmp_path)
    session.vocab = NONE
    engine = ScriptedEngine(info=info(n_vocab=n_vocab))
    slot = EngineSlot("ref", engine, info=engine.info)
    assert await session.learn_text(slot) is learns
    assert bool(session.vocab) is learns
    session.close()
