"""The whole job with real servers: open, branch from a root, judge, quit; the label is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kldtui.config import Config
from kldtui.demo import DemoPair
from kldtui.demo.pair import demo_pair
from kldtui.review.session import Session
from tests.ui.review import Driver, running

_DOCS = Path(__file__).parents[2] / "docs"
_TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> DemoPair:
    return demo_pair(tmp_path_factory.mktemp("pair"))


def open_session(pair: DemoPair, labels: Path, ref: str, quant: str) -> Session:
    session = Session.open(pair.ref, [("q5_0", pair.quant)], tokenizer=pair.tokenizer)
    session.keep_labels(labels, "tester")
    session.add_server("ref", ref)
    session.add_server("q5_0", quant)
    return session


async def branched(driver: Driver) -> None:
    await driver.press("b")
    desk, session = driver.review.desk, driver.app.session
    await driver.until(
        lambda: not desk.busy and {"R·r", "Q·q"} <= session.recall(driver.review.cursor, 0).keys(),
        90,
    )


def direct(url: str, prefix: list[int], n: int) -> list[int]:
    """The same greedy request by hand, unstreamed."""
    body: dict[str, Any] = {
        "prompt": prefix,
        "n_predict": n,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k", "temperature"],
        "return_tokens": True,
        "cache_prompt": False,
    }
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post(f"{url}/completion", json=body)
        answer.raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens


async def test_a_review_by_keyboard_ends_in_a_label_with_both_branches(
    tmp_path: Path, pair: DemoPair, ref_server: str, quant_server: str
) -> None:
    labels = tmp_path / "labels.json"
    session = open_session(pair, labels, ref_server, quant_server)
    async with running(session, config=Config(branch_tokens=_TOKENS)) as driver:
        await driver.press(".")
        place = driver.review.cursor
        prefix = [int(token) for token in session.chunk_tokens(place.chunk)[: place.t]]
        rows = [recording.row(place) for recording in (session.ref, session.quants[0].recording)]
        best = [row.top(1)[0][0] for row in rows if row is not None]
        await branched(driver)
        assert "R·r reference" in driver.text
        assert "Q·q q5_0" in driver.text
        assert "NOT VERIFIED" not in driver.text
        for role in ("ref", "q5_0"):
            verified = session.slots[role].verified
            assert verified is not None
            assert verified.passed, verified.detail
        await driver.press("2")
        await driver.until(lambda: session.label(place, 0) is not None)
        await driver.press("q")

    document = json.loads(labels.read_text(encoding="utf-8"))
    jsonschema.validate(document, json.loads((_DOCS / "labels.schema.json").read_text()))
    (record,) = document["labels"]
    assert record["class"] == "changes_meaning"
    arms = {branch["arm"]: branch for branch in record["branches"]}
    assert set(arms) == {"R·r", "Q·q", "R·q"}
    assert [arms["R·r"]["start_id"], arms["Q·q"]["start_id"]] == best
    assert all(branch["engine"]["model"] for branch in arms.values())
    for code, url in (("R·r", ref_server), ("Q·q", quant_server)):
        arm = arms[code]
        assert arm["ids"] == direct(url, [*prefix, arm["start_id"]], _TOKENS)[: len(arm["ids"])]
        assert arm["ids"]


async def test_exchanged_servers_are_named_and_their_branches_marked(
    tmp_path: Path, pair: DemoPair, ref_server: str, quant_server: str
) -> None:
    session = open_session(pair, tmp_path / "labels.json", quant_server, ref_server)
    async with running(session, config=Config(branch_tokens=4)) as driver:
        await branched(driver)
        verdicts = {role: slot.verified for role, slot in session.slots.items()}
        assert all(v is not None and v.verdict == "swapped" for v in verdicts.values()), verdicts
        assert "NOT VERIFIED" in driver.text
