"""Arms, floors and batches with real servers: short, and held to direct requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from kldtui.cli import cli
from kldtui.cli.engines import add_engines
from kldtui.config import Config
from kldtui.position import Position
from kldtui.review.session import Session
from tests.builders_demo import wait_gone
from tests.ui.review import running

ROOT = Position(3, 38)
_TOKENS = 6


def direct(url: str, prompt: list[int], n: int) -> list[int]:
    """The same greedy request by hand, unstreamed."""
    body: dict[str, Any] = {
        "prompt": prompt,
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


def session_of(smollm2: Path, labels: Path) -> Session:
    session = Session.open(
        smollm2 / "ref.kld",
        [("q5_0", smollm2 / "q5_0.kld")],
        tokenizer=smollm2 / "tokenizer.json",
    )
    session.keep_labels(labels, "tester")
    return session


async def test_four_arms_and_a_branch_inside_one_by_keyboard(
    tmp_path: Path, smollm2: Path, ref_server: str, quant_server: str
) -> None:
    session = session_of(smollm2, tmp_path / "labels.json")
    session.add_server("ref", ref_server)
    session.add_server("q5_0", quant_server)
    urls = {"R": ref_server, "Q": quant_server}
    async with running(session, config=Config(branch_tokens=_TOKENS)) as driver:
        desk = driver.review.desk

        async def made(*keys: str) -> None:
            await driver.press(*keys)
            await driver.until(lambda: not desk.busy, 90)

        await driver.press(":")
        await driver.type(str(ROOT))
        await made("b")
        await made("w")
        prefix = [int(t) for t in session.chunk_tokens(ROOT.chunk)[: ROOT.t]]
        held = session.recall(ROOT, 0)
        assert set(held) == {"R·r", "Q·q", "R·q", "Q·r"}
        for code, branch in held.items():
            assert branch.ids == direct(urls[code[0]], [*prefix, branch.start_id], _TOKENS)
        assert "NOT VERIFIED" not in driver.text
        driver.review.pane("left").focus()
        await driver.press("g", "right", "right", "right")
        await made("b")
        outer = held["R·r"]
        inside = [b for b in session.recall(ROOT, 0).values() if b.parent is not None]
        assert {branch.arm.code for branch in inside} == {"R·s", "Q·s"}
        for branch in inside:
            prompt = [*prefix, outer.start_id, *outer.ids[:3]]
            assert [*branch.prefix_ids, branch.start_id] == prompt
            assert branch.ids == direct(urls[branch.arm.code[0]], prompt, _TOKENS)
            if branch.arm.engine == "ref":
                assert branch.ids[: _TOKENS - 3] == outer.ids[3:]
        await driver.press("escape")
        await made("V")
        runs = session.self_runs[ROOT]
        assert runs.parts_off is None
        assert runs.logp_off < 1e-3


async def test_models_are_run_by_the_review_itself_and_are_gone_with_it(
    tmp_path: Path, smollm2: Path, ref_model: Path, quant_model: Path
) -> None:
    session = session_of(smollm2, tmp_path / "labels.json")
    add_engines(session, None, ref_model, (), (str(quant_model),))
    async with running(session, config=Config(branch_tokens=4)) as driver:
        slots = session.slots
        await driver.until(lambda: all(slot.state == "ready" for slot in slots.values()), 90)
        await driver.press("b")
        await driver.until(lambda: not driver.review.desk.busy, 90)
        held = session.recall(driver.review.cursor, 0)
        assert {code for code, branch in held.items() if branch.made} == {"R·r", "Q·q", "R·q"}
        assert all((b.verify or {})["verdict"] == "ok" for b in held.values())
        pids = [slot.engine.served.engine_pid for slot in slots.values()]  # type: ignore[attr-defined]
    assert wait_gone(*pids)


def test_branches_made_ahead_one_server_at_a_time_open_without_any(
    tmp_path: Path, smollm2: Path, ref_server: str, quant_server: str
) -> None:
    out = tmp_path / "b.jsonl"
    line = ["branch", str(smollm2 / "ref.kld"), "--quant", str(smollm2 / "q5_0.kld")]
    line += ["--roots", "2", "-n", "4", "-o", str(out)]
    for option, url in (("--ref-server", ref_server), ("--quant-server", quant_server)):
        done = CliRunner().invoke(cli, [*line, option, url])
        assert done.exit_code == 0, done.stderr
    session = session_of(smollm2, tmp_path / "labels.json")
    log = session.open_branches(out)
    places = {entry.position for entry in log.entries}
    assert len(places) == 2
    for _ in session.index.scan():
        pass
    for place in places:
        held = session.recall(place, 0)
        assert set(held) == {"R·r", "Q·q", "R·q"}
        assert {(branch.verify or {})["verdict"] for branch in held.values()} == {"ok"}
        prompt = [*held["R·q"].prefix_ids, held["R·q"].start_id]
        assert held["R·q"].ids == direct(ref_server, prompt, 4)
    session.close()


@pytest.mark.parametrize("against", [False, True])
def test_the_floor_of_one_server_is_nothing_and_of_two_models_is_not(
    smollm2: Path, ref_server: str, quant_server: str, against: bool
) -> None:
    line = ["floor", str(smollm2 / "ref.kld"), "--quant", str(smollm2 / "q5_0.kld"), "--json"]
    line += ["--ref-server", ref_server, "--roots", "3", "-n", "4"]
    done = CliRunner().invoke(cli, [*line, *(["--against", quant_server] if against else [])])
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    off = data["comparisons"][0]
    assert off["self_flip_rate"]["count"] == 0
    assert off["max_abs_dlogp"] < 1e-3
    assert off["self_flip_rate"]["high"] > 0
    if against:
        assert data["comparisons"][2]["self_flip_rate"]["count"] > 0
