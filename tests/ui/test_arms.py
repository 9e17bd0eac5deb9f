"""Arms beyond the first pair: which are made, which are shown, and the way back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest

from kldtui.branching import Branch
from kldtui.config import Config
from kldtui.engines.base import Capabilities
from kldtui.errors import EngineError, EngineUnreachable, InexactPrefix
from kldtui.position import Position
from kldtui.review.branch_log import BranchLog
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.ui.detail_view import DetailView
from kldtui.ui.words import help_facts
from tests.ui.review import Driver, ScriptedEngine, add_engines, open_review, running

ROOT = Position(0, 10)
DOCS = Path(__file__).parents[2] / "docs"

REF_SAYS, QUANT_SAYS = [0, 1, 2], [4, 7, 8]


def said(session: Session) -> tuple[ScriptedEngine, ScriptedEngine]:
    return add_engines(session, lambda p: REF_SAYS, lambda p: QUANT_SAYS)


def held(session: Session) -> dict[str, Branch]:
    return session.recall(ROOT, 0)


def titles(driver: Driver) -> tuple[str, str]:
    """The arms that are side by side, as the panes are titled."""
    left, right = (str(driver.review.pane(side).border_title) for side in ("left", "right"))
    return left.split()[0], right.split()[0]


def status(driver: Driver, side: str) -> str:
    """How the branch of a pane stands."""
    return str(driver.review.pane(side).border_subtitle)


async def made(driver: Driver, *keys: str) -> None:
    await driver.press(*keys)
    await driver.until(lambda: not driver.review.desk.busy)
    await driver.pilot.pause()


def prefix_of_root(session: Session) -> list[int]:
    return [int(t) for t in session.chunk_tokens(0)[:10]]


# ── the four arms ────────────────────────────────────────────────────────────────────────────


async def test_the_third_arm_follows_on_the_same_engine_and_never_beside_it(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = add_engines(session, lambda p: [0, 0.05, 1], lambda p: [4, 0.05, 7])
    async with running(session) as driver:
        await made(driver, "b")
        facts = session.facts_of(ROOT, 0)
        prefix = prefix_of_root(session)
        assert ref.asked == [[*prefix, facts.ref_id], [*prefix, facts.quant_id]]
        assert quant.asked == [[*prefix, facts.quant_id]]
        assert ref.most_running == quant.most_running == 1
        assert held(session)["R·q"].ids == [0, 1]


async def test_two_roles_of_one_server_are_never_asked_at_once(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = add_engines(session, lambda p: [0, 0.05, 1], lambda p: [4])
    session.slots["q4"] = EngineSlot("q4", ref)
    async with running(session) as driver:
        await made(driver, "b")
        assert set(held(session)) == {"R·r", "Q·q", "R·q"}
        assert ref.most_running == 1


async def test_a_cycles_through_the_pairs_and_w_makes_the_fourth_arm(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    async with running(session) as driver:
        await made(driver, "b")
        seen = [titles(driver)]
        for _ in range(3):
            await made(driver, "a")
            seen.append(titles(driver))
        assert seen == [("R·r", "Q·q"), ("R·r", "R·q"), ("R·q", "Q·q"), ("R·r", "Q·q")]
        assert len(quant.asked) == 1
        await made(driver, "w")
        assert titles(driver) == ("R·r", "Q·r")
        assert quant.asked[1] == [*prefix_of_root(session), session.facts_of(ROOT, 0).ref_id]
        seen = []
        for _ in range(6):
            await made(driver, "a")
            seen.append(titles(driver))
        assert len(set(seen)) == 6
        assert len(ref.asked) == 2
        assert len(quant.asked) == 2


async def test_the_fourth_arm_waits_for_what_runs_and_does_not_stop_it(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 0.1, 1], lambda p: [4, 0.1, 7])
    async with running(session) as driver:
        await driver.press("b", "w")
        await driver.until(lambda: "Q·r" in held(session) and not driver.review.desk.busy)
        assert {branch.stop for branch in held(session).values()} == {"eog"}
        assert set(held(session)) == {"R·r", "Q·q", "R·q", "Q·r"}


@pytest.mark.parametrize(("role", "arms"), [("ref", {"R·r", "R·q"}), ("q4", {"Q·r", "Q·q"})])
async def test_one_engine_continues_both_tokens_as_its_own_arms(
    tmp_path: Path, role: str, arms: set[str]
) -> None:
    session = open_review(tmp_path)
    said(session)
    del session.slots["q4" if role == "ref" else "ref"]
    async with running(session) as driver:
        await made(driver, "b")
        assert set(held(session)) == set(titles(driver)) == arms


async def test_an_engine_that_fails_leaves_the_other_ones_arms(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = said(session)
    ref.fails = EngineUnreachable("http://127.0.0.1:1: nothing answers there")
    async with running(session) as driver:
        await made(driver, "b")
        assert set(held(session)) == {"Q·q"}
        assert "nothing answers there" in driver.text
        ref.fails = None
        await made(driver, "b")
        assert set(held(session)) == {"R·r", "Q·q", "R·q"}


async def test_what_the_reference_says_is_asked_once_for_several_quants(tmp_path: Path) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    ref, _ = said(session)
    async with running(session) as driver:
        await made(driver, ".", "b")
        assert len(ref.asked) == 2
        await made(driver, "Q", "b")
        both = session.recall(Position(0, 13), 1)
        assert both["R·r"].quant == "q8"
        assert len(ref.asked) == 2


# ── from other tokens ────────────────────────────────────────────────────────────────────────


async def test_t_branches_from_the_stream_token_and_escape_comes_back(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    async with running(session) as driver:
        await driver.press(":")
        await driver.type("c2:t12")
        where = driver.review.cursor
        assert "no root here" in driver.text
        await made(driver, "t")
        stream = int(session.chunk_tokens(2)[12])
        prefix = [int(t) for t in session.chunk_tokens(2)[:12]]
        assert ref.asked == quant.asked == [[*prefix, stream]]
        facts = session.facts_of(where, 0)
        assert facts.ref_id != stream
        assert titles(driver) == ("R·s", "Q·s")
        assert {branch.arm.start for branch in session.recall(where, 0).values()} == {"stream"}
        await made(driver, "escape")
        assert not driver.review.views
        await made(driver, "t")
        assert titles(driver) == ("R·s", "Q·s")
        assert len(ref.asked) == 1, "what is there is not asked for again"


async def test_the_stream_token_is_branched_from_where_nothing_is_recorded(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = said(session)
    async with running(session) as driver:
        await made(driver, "g", "t")
        assert "there is no prefix" in driver.text
        await made(driver, "right", "right", "right", "t")
        tokens = [int(t) for t in session.chunk_tokens(0)[:4]]
        assert ref.asked == [tokens]
        assert titles(driver) == ("R·s", "Q·s")


async def test_a_stream_token_that_is_the_refs_is_that_arm(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await made(driver, "t")
        assert titles(driver) == ("R·r", "Q·r")
        assert set(held(session)) == {"R·r", "Q·r"}


async def test_a_token_picked_in_the_top_list_is_continued_by_both(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    async with running(session) as driver:
        await driver.press("p", "down", "down")
        detail = driver.review.query_one(DetailView)
        picked = detail.token
        assert picked is not None
        facts = session.facts_of(ROOT, 0)
        assert picked not in (facts.ref_id, facts.quant_id)
        await made(driver, "b")
        assert ref.asked == quant.asked == [[*prefix_of_root(session), picked]]
        assert set(held(session)) == {f"R·p:{picked}", f"Q·p:{picked}"}
        assert titles(driver) == ("R·p", "Q·p")
        await made(driver, "escape", "b")
        assert titles(driver) == ("R·r", "Q·q")


async def test_picking_the_quants_own_token_is_its_arm(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await driver.press("p")
        detail = driver.review.query_one(DetailView)
        quant = session.facts_of(ROOT, 0).quant_id
        for _ in range(20):
            if detail.token == quant:
                break
            await driver.press("down")
        await made(driver, "b")
        assert titles(driver) == ("R·q", "Q·q")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_picked_row_is_seen_on_every_screen(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session, size) as driver:
        for judging in (False, True):
            if judging:
                await made(driver, "b")
            await driver.press("p")
            detail = driver.review.query_one(DetailView)
            assert detail.has_focus
            word = session.vocab.display(detail.token or 0).table[:6]
            assert word in driver.inside("detail")
            await driver.press("g")
            tokens = [detail.token]
            for _ in range(9):
                await driver.press("down")
                tokens.append(detail.token)
                word = session.vocab.display(detail.token or 0).table[:6]
                assert word in driver.inside("detail")
            assert len(set(tokens)) == 10
            await driver.press("escape")


# ── inside a branch ──────────────────────────────────────────────────────────────────────────


async def in_left(driver: Driver, token: int) -> None:
    """The cursor on a generated token of the left pane."""
    driver.review.pane("left").focus()
    await driver.press("g", *["right"] * (token + 1))
    assert driver.review.pane("left").token == token


async def test_a_branch_begins_inside_a_branch_and_escape_goes_back_to_its_place(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    async with running(session) as driver:
        await made(driver, "b")
        outer = held(session)["R·r"]
        await in_left(driver, 1)
        await made(driver, "b")
        prompt = [*prefix_of_root(session), outer.start_id, *REF_SAYS[:2]]
        assert ref.asked[-1] == quant.asked[-1] == prompt
        assert titles(driver) == ("R·s", "Q·s")
        assert "in R·r +1" in driver.text
        inner = next(b for b in held(session).values() if b.parent and b.arm.engine == "quant")
        assert inner.parent is not None
        assert (inner.parent.branch, inner.parent.offset) == (outer.id, 1)
        assert inner.prefix_ids == prompt[:-1]
        await driver.press("escape")
        assert titles(driver) == ("R·r", "Q·q")
        pane = driver.review.pane("left")
        assert pane.has_focus
        assert pane.token == 1
        assert "◆" in driver.text
        asked = len(quant.asked)
        await made(driver, "b")
        assert "in R·r +1" in driver.text
        assert len(quant.asked) == asked, "what is there is not asked for again"


async def test_branches_nest_and_each_escape_goes_one_back(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, _ = said(session)
    async with running(session) as driver:
        await made(driver, "b")
        start = held(session)["R·r"].start_id
        await in_left(driver, 0)
        await made(driver, "b")
        await in_left(driver, 1)
        await made(driver, "b")
        whole = [*prefix_of_root(session), start, REF_SAYS[0], *REF_SAYS[:2]]
        assert ref.asked[-1] == whole
        assert len(driver.review.views) == 2
        await driver.press("escape")
        assert "in R·r +0" in driver.text
        assert driver.review.pane("left").token == 1
        await driver.press("escape")
        assert titles(driver) == ("R·r", "Q·q")
        await driver.press("escape")
        assert not driver.review.judging


async def test_a_token_is_picked_inside_a_branch(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    async with running(session) as driver:
        await made(driver, "b")
        start = held(session)["R·r"].start_id
        await in_left(driver, 2)
        await driver.press("p")
        assert "branch +2" in driver.text
        detail = driver.review.query_one(DetailView)
        assert detail.token == REF_SAYS[2]
        await driver.press("down")
        picked = detail.token
        assert picked == REF_SAYS[2] + 1
        await made(driver, "b")
        prompt = [*prefix_of_root(session), start, *REF_SAYS[:2], picked]
        assert ref.asked[-1] == quant.asked[-1] == prompt
        assert titles(driver) == ("R·p", "Q·p")
        await driver.press("escape")
        assert driver.review.pane("left").token == 2


async def test_moving_on_leaves_what_was_gone_into(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await made(driver, "b")
        await in_left(driver, 1)
        await made(driver, "b")
        await driver.press(".")
        assert not driver.review.views
        assert titles(driver) == ("R·r", "Q·q")


# ── kept ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_label_holds_every_arm_and_a_session_without_servers_shows_them(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await made(driver, "b")
        await made(driver, "w")
        await in_left(driver, 1)
        await made(driver, "b")
        await made(driver, "escape", "p", "down", "down", "b")
        await driver.press("1")
        await driver.until(lambda: session.label(ROOT, 0))
    document = json.loads((tmp_path / "labels.json").read_text())
    jsonschema.validate(document, json.loads((DOCS / "labels.schema.json").read_text()))
    branches = document["labels"][0]["branches"]
    arms = [branch["arm"] for branch in branches]
    assert {"R·r", "Q·q", "R·q", "Q·r", "R·s", "Q·s", "R·p", "Q·p"} <= set(arms)
    parents = [branch["parent"] for branch in branches if branch["parent"]]
    assert {parent["branch"] for parent in parents} == {
        branch["id"] for branch in branches if branch["arm"] == "R·r"
    }
    for line in (tmp_path / "labels.branches.jsonl").read_text().splitlines():
        schema = json.loads((DOCS / "branches.schema.json").read_text())
        jsonschema.validate(json.loads(line), schema)

    async with running(open_review(tmp_path)) as driver:
        await driver.press(":")
        await driver.type("c0:t10")
        assert titles(driver) == ("R·r", "Q·q")
        await driver.press("a", "a", "a")
        assert titles(driver) == ("R·r", "Q·r")
        await driver.press("a", "a", "a", "b")
        await in_left(driver, 1)
        await driver.press("b")
        assert titles(driver) == ("R·s", "Q·s")
        assert "in R·r +1" in driver.text
        assert " gamma" in driver.text


async def test_a_branch_that_is_made_longer_after_its_label_is_kept_whole(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1, 2, 4, 7, 8], lambda p: [4])
    async with running(session, config=Config(branch_tokens=2)) as driver:
        await made(driver, "b")
        await driver.press("1", ",")
        await made(driver, "+")
        assert held(session)["R·r"].ids == [0, 1, 0, 1]
    again = open_review(tmp_path)
    assert again.recall(ROOT, 0)["R·r"].ids == [0, 1, 0, 1]
    assert again.recall(ROOT, 0)["R·r"].continued_at == [2]
    again.close()


async def test_branches_made_ahead_are_shown_without_a_server(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await made(driver, "b")
        ahead = list(held(session).values())
    path = tmp_path / "ahead.jsonl"
    log = BranchLog.open(path, session.ref, session.names, missing_ok=True)
    for branch in ahead:
        log.add(branch)
    later = open_review(tmp_path)
    later.open_branches(path)
    async with running(later) as driver:
        assert titles(driver) == ("R·r", "Q·q")
        assert " gamma" in driver.text
        await driver.press("b", "a")
        assert titles(driver) == ("R·r", "R·q")
        await driver.press("2")
        await driver.until(lambda: later.label(ROOT, 0))
        record = later.label(ROOT, 0)
        assert record is not None
        assert len(record.branches) == 3
        assert any("3 branches made ahead" in line for line in help_facts(later, 40))


async def test_what_is_wrong_with_a_file_of_branches_is_said(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session) as driver:
        await made(driver, "b")
        ahead = list(held(session).values())
    path = tmp_path / "ahead.jsonl"
    log = BranchLog.open(path, session.ref, session.names, missing_ok=True)
    for branch in ahead:
        log.add(branch)
    path.write_bytes(path.read_bytes()[:-20])
    later = open_review(tmp_path)
    later.open_branches(path)
    async with running(later) as driver:
        assert "its last line was cut" in driver.notices
        assert len(held(later)) == 2


# ── the stream as R·r ────────────────────────────────────────────────────────────────────────


async def test_in_a_rollout_the_stream_is_shown_as_r_r_at_once_and_marked(tmp_path: Path) -> None:
    session = open_review(tmp_path, rollout=True)
    async with running(session) as driver:
        assert "the recorded stream itself" in driver.text
        branch = held(session)["R·r"]
        assert branch.ids == [int(t) for t in session.chunk_tokens(0)[11:]]
        assert branch.engine["kind"] == "recording"
        assert "NOT VERIFIED" not in driver.text
        driver.review.pane("left").focus()
        await driver.press("right", "right")
        assert "branch +1" in driver.text
        assert "87.1" in driver.inside("detail")


async def test_in_a_rollout_only_the_other_arms_are_asked_for(tmp_path: Path) -> None:
    session = open_review(tmp_path, rollout=True)
    ref, quant = said(session)
    async with running(session) as driver:
        await made(driver, "b")
        facts = session.facts_of(ROOT, 0)
        assert ref.asked == [[*prefix_of_root(session), facts.quant_id]]
        assert len(quant.asked) == 1
        await made(driver, "B")
        assert [*prefix_of_root(session), facts.ref_id] in ref.asked
        assert held(session)["R·r"].ids == REF_SAYS


async def test_the_stream_as_a_branch_can_be_made_longer_to_its_end(tmp_path: Path) -> None:
    session = open_review(tmp_path, rollout=True)
    async with running(session, config=Config(branch_tokens=2)) as driver:
        await driver.press("b")
        assert len(held(session)["R·r"].ids) == 2
        await made(driver, "+")
        assert len(held(session)["R·r"].ids) == 4
        await made(driver, "+")
        await made(driver, "+")
        assert len(held(session)["R·r"].ids) == 5
        assert "nothing to continue: R·r is recorded no further" in driver.text
        assert "itself, no server · the chunk ends here" in status(driver, "left")


async def test_where_nothing_can_be_made_longer_it_is_not_offered(tmp_path: Path) -> None:
    """c2:t15 is the last of its chunk: of the stream nothing is recorded behind it."""
    session = open_review(tmp_path, rollout=True)
    async with running(session, config=Config(branch_tokens=2), size=(200, 60)) as driver:
        await driver.press("b")
        assert "limit, + goes on" in status(driver, "left")
        assert "+ longer" in driver.inside("keys")
        for _ in range(3):
            await driver.press(".")
        assert driver.review.cursor == Position(2, 15)
        shown = status(driver, "left")
        assert "no server · the chunk ends here · 0 tokens" in shown
        assert "goes on" not in shown
        assert "+ longer" not in driver.inside("keys")


async def test_a_branch_whose_engine_is_gone_does_not_offer_to_go_on(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    said(session)
    async with running(session, config=Config(branch_tokens=2), size=(200, 60)) as driver:
        await made(driver, "b")
        assert "limit, + goes on" in status(driver, "left")
        session.slots.clear()
        driver.review.refresh_all()
        await driver.pilot.pause()
        for side in ("left", "right"):
            assert status(driver, side).startswith("limit · ")
        assert "+ longer" not in driver.inside("keys")


# ── the floor ────────────────────────────────────────────────────────────────────────────────


async def test_the_floor_is_shown_and_stored_with_the_label(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    runs = [[3, 1, 2], [3, 1, 2], [3, 4, 2]]
    ref, _ = add_engines(session, lambda p: runs.pop(0), lambda p: [4])
    async with running(session) as driver:
        await made(driver, "V")
        assert ref.asked == [prefix_of_root(session)] * 3
        assert "with the cache on it parts from itself at +1" in driver.inside("detail")
        runs.extend([[0], [0]])
        await made(driver, "b")
        assert "≠ itself +1" in str(driver.review.pane("left").border_subtitle)
        await driver.press("1")
        await driver.until(lambda: session.label(ROOT, 0))
    record = session.label(ROOT, 0)
    assert record is not None
    assert record.evidence["self_runs"]["parts_on"] == 1
    assert record.evidence["self_runs"]["parts_off"] is None
    async with running(open_review(tmp_path), (200, 60)) as driver:
        await driver.press(":")
        await driver.type("c0:t10")
        assert "parts from itself at +1" in driver.inside("detail")


async def test_a_floor_run_after_the_label_is_stored_with_it_too(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    add_engines(session, lambda p: [0, 1], lambda p: [4])
    async with running(session, (200, 60)) as driver:
        await driver.press("1", ",")
        await made(driver, "V")
        record = session.label(ROOT, 0)
        assert record is not None
        assert record.evidence["self_runs"]["tokens"] == 2
        assert record.class_id == "recovers"
        assert "live, the reference says" in driver.inside("detail")


# ── what a server cannot do ──────────────────────────────────────────────────────────────────


async def test_fewer_candidates_are_asked_of_a_server_that_gives_fewer(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    ref, quant = said(session)
    quant.capabilities = Capabilities(False, True, 10, False, False, ("it takes text only",))
    async with running(session) as driver:
        await driver.until(lambda: "it takes text only" in driver.notices)
        assert "at most 10 candidates" in driver.notices
        await made(driver, "b")
        assert (set(ref.top_ns), set(quant.top_ns)) == ({40}, {10})
        assert any("it takes text only" in line for line in help_facts(session, 40))


@pytest.mark.parametrize(
    ("can", "why"),
    [
        (Capabilities(True, False, None, True, True), "which ids it generates"),
        (Capabilities(False, True, None, True, True, exact=False), "it takes text"),
    ],
)
async def test_a_server_that_cannot_be_exact_is_refused_with_the_reason(
    tmp_path: Path, can: Capabilities, why: str
) -> None:
    session = open_review(tmp_path)
    _, quant = said(session)
    quant.capabilities = can
    async with running(session) as driver:
        await made(driver, "b")
        assert quant.asked == []
        assert "Q·q" not in held(session)
        assert "no branch can be judged on it" in driver.inside("right")
        assert why in driver.inside("right")
        assert why in driver.notices
        assert set(held(session)) == {"R·r", "R·q"}


async def test_a_prefix_that_a_text_server_cannot_be_sent_names_the_nearest_place(
    tmp_path: Path,
) -> None:
    session = open_review(tmp_path)
    inexact: Sequence[int | float | EngineError] = [InexactPrefix("its text differs", 8, 7)]
    add_engines(session, lambda p: REF_SAYS, lambda p: inexact)
    async with running(session) as driver:
        await made(driver, "b")
        assert ": goes to c0:t7" in driver.notices
        assert session.slots["q4"].state == "ready"
        assert held(session)["Q·q"].stop == "error"


async def test_engines_of_two_kinds_compare_their_dictionaries_first(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    _, quant = said(session)
    quant.kind = "mlx_lm"
    quant.words = {**quant.words, 2: b" Gamma"}
    async with running(session) as driver:
        await made(driver, "b")
        assert "two dictionaries: token 2 is ␣gamma in the ref engine" in driver.notices
        assert "other dictionary" in driver.text
        stored = held(session)["Q·q"].verify
        assert stored is not None
        assert "token 2" in stored["dictionary"][0]


async def test_engines_of_one_dictionary_are_not_marked(tmp_path: Path) -> None:
    session = open_review(tmp_path)
    _, quant = said(session)
    quant.kind = "mlx_lm"
    async with running(session) as driver:
        await made(driver, "b")
        assert "dictionar" not in driver.text
        assert session.slots["q4"].dictionary == []
