"""Recordings made of real servers, against each other and against llama-perplexity's.

Run with `-s` to see the positions at which a server and a recording of its own model differ.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kldtui.branching import QQ, RR
from kldtui.index import Index, Kind, State
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.recordings.base import prompt_length
from kldtui.recordings.run import RunRecording, open_run
from kldtui.review.session import Session
from kldtui.rows import TopRow
from tests.ui.review import running

CHUNKS = "5"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PROMPTS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "You can call tools."},
            {"role": "user", "content": "What is the weather in Paris?"},
        ],
        "tools": [WEATHER],
    },
    {"messages": [{"role": "user", "content": "今天天气怎么样? Answer in Chinese, with 😀."}]},
    {"prompt": "The capital of France is"},
]


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "kldtui", "record", *(str(arg) for arg in args)]


def record(*args: object) -> str:
    done = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def undated(path: Path) -> bytes:
    return re.sub(rb'"created":"[^"]*"', b"", path.read_bytes())


@contextmanager
def opened(path: Path) -> Iterator[RunRecording]:
    with closing(open_run(path)) as run:
        yield run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def scored(folder: Path, quant_server: str, smollm2: Path) -> Path:
    """The quant, scored on the stream of ref.kld."""
    print("\n" + record("score", smollm2 / "ref.kld", "--server", quant_server, "-o", folder / "q"))
    return folder / "q"


# ── a scored stream ──────────────────────────────────────────────────────────────────────────


def test_a_scored_quants_roots_are_the_recordings_but_at_near_ties(
    scored: Path, smollm2: Path
) -> None:
    """The live server takes another micro-batch than llama-perplexity did: only where the quant's
    two best are close does that show."""
    with (
        closing(open_recording(smollm2 / "ref.kld")) as ref,
        closing(open_recording(smollm2 / "q5_0.kld")) as recorded,
        opened(scored) as live,
    ):
        index = Index(ref, [recorded, live])
        list(index.scan())
        a, b = index.pairs
        assert bool(np.all(b["state"] == State.SCORED))
        roots_a, roots_b = a["kind"] == Kind.ROOT, b["kind"] == Kind.ROOT
        print(f"\nroots: {roots_a.sum()} recorded, {roots_b.sum()} live")
        assert 30 <= roots_b.sum() <= 50
        for i in np.flatnonzero((roots_a != roots_b) | (a["quant_id"] != b["quant_id"])):
            position = index.layout.position(int(i))
            row = recorded.row(position)
            assert row is not None
            (first, p), (second, q) = row.top(2)
            print(f"{position}: {first} or {second}, {p - q:.3f} nat apart")
            assert p - q < 0.5
        exact = b["bounds"] & 1 == 0
        print(f"cost exact at {exact.sum()} of {exact.size} positions")
        assert bool(exact.all()), "log p of the reference's token is known at every position"


def test_it_is_exactly_what_the_server_says_stepwise(scored: Path, quant_server: str) -> None:
    """By hand, one token after the other on top of the last."""
    with opened(scored) as run, httpx.Client(trust_env=False, timeout=60) as client:
        tokens = run.tokens(2).tolist()
        for t in run.scored(2).tolist()[:12]:
            body = {
                "prompt": tokens[:t],
                "n_predict": 1,
                "temperature": 0,
                "top_k": 1,
                "samplers": ["top_k", "temperature"],
                "logit_bias": [[tokens[t], 1e6]],
                "n_probs": 40,
                "return_tokens": True,
                "cache_prompt": t != int(run.scored(2)[0]),
            }
            answer = client.post(f"{quant_server}/completion", json=body).json()
            (entry,) = answer["completion_probabilities"]
            row = run.row(Position(2, t))
            assert isinstance(row, TopRow)
            said = {one["id"]: float(np.float32(one["logprob"])) for one in entry["top_logprobs"]}
            assert row.known == said
            own = row.logp(tokens[t])
            assert own is not None
            assert own.value == float(np.float32(entry["logprob"]))


def test_grammar_and_stepwise_give_the_same_run(
    folder: Path, quant_server: str, smollm2: Path
) -> None:
    line = ("score", smollm2 / "ref.kld", "--server", quant_server, "--chunks", CHUNKS)
    record(*line, "-o", folder / "grammar")
    record(*line, "-o", folder / "stepwise", "--stepwise")
    assert undated(folder / "grammar") == undated(folder / "stepwise")


def test_killed_at_a_random_moment_and_gone_on_with_it_is_the_same(
    folder: Path, scored: Path, quant_server: str, smollm2: Path
) -> None:
    path = folder / "killed"
    line = ("score", smollm2 / "ref.kld", "--server", quant_server, "-o", path)
    process = subprocess.Popen(command(*line), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wanted = random.SystemRandom().randint(1, scored.stat().st_size - 20_000)
    until = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < wanted) and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    held = path.stat().st_size
    print(f"\nkilled at {held} of {scored.stat().st_size} bytes; {record(*line)}")
    assert wanted <= held < scored.stat().st_size
    assert undated(path) == undated(scored)


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def rollouts(folder: Path, ref_server: str, quant_server: str) -> dict[str, Path]:
    """The reference's own, the quant's own, and the quant scored on the reference's."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(one) for one in PROMPTS))
    for name, url in (("ref", ref_server), ("own", quant_server)):
        record("rollout", "--server", url, "--prompts", prompts, "-n", 24, "-o", folder / name)
    record("score", folder / "ref", "--server", quant_server, "-o", folder / "on-ref")
    return {name: folder / name for name in ("ref", "own", "on-ref")}


def test_a_rollout_is_greedy_to_the_last_bit_cut_characters_included(
    rollouts: dict[str, Path], ref_server: str
) -> None:
    with opened(rollouts["ref"]) as run:
        for chunk in range(run.shape.n_chunk):
            scored = run.scored(chunk)
            rows = run.rows(chunk, 0, scored.size)
            assert rows.ids[:, 0].tolist() == run.tokens(chunk)[scored].tolist()
        with httpx.Client(trust_env=False) as client:
            body = {name: PROMPTS[0][name] for name in ("messages", "tools")}
            text = client.post(f"{ref_server}/apply-template", json=body).json()["prompt"]
            body = {"content": text, "add_special": True}
            ids = client.post(f"{ref_server}/tokenize", json=body).json()["tokens"]
        assert run.tokens(0)[: prompt_length(run, 0)].tolist() == ids
        assert run.header["tools"] == [[WEATHER]]
        said = b"".join(run.pieces[id] for id in run.tokens(1)[prompt_length(run, 1) :].tolist())
        print("\n" + said.decode("utf-8", "replace"))
        cut = [id for id in run.tokens(1).tolist() if not _whole(run.pieces[id])]
        assert cut, "this rollout no longer has a character in parts"


def _whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_quant_parts_from_the_reference_where_scoring_it_says(
    rollouts: dict[str, Path],
) -> None:
    """Its first root on the reference's rollout is where its own rollout goes elsewhere."""
    with (
        opened(rollouts["ref"]) as ref,
        opened(rollouts["own"]) as own,
        opened(rollouts["on-ref"]) as on_ref,
    ):
        index = Index(ref, [on_ref])
        list(index.scan())
        for chunk in range(ref.shape.n_chunk):
            where = index.layout.chunk_slice(chunk)
            flips = np.flatnonzero(index.pairs[0]["kind"][where] == Kind.ROOT)
            mine, theirs = ref.tokens(chunk).tolist(), own.tokens(chunk).tolist()
            parts = next(
                (t for t, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None
            )
            first = int(ref.scored(chunk)[flips[0]]) if flips.size else None
            print(f"\nchunk {chunk}: parts at {parts}, first root at {first}")
            assert parts == first


async def test_a_rollout_is_reviewed_in_the_same_screen_its_prompt_as_context(
    rollouts: dict[str, Path],
) -> None:
    session = Session.open(rollouts["ref"], [("q5_0", rollouts["on-ref"])])
    async with running(session) as driver:
        await driver.press(".")
        place = driver.review.cursor
        assert place.t >= (prompt_length(open_run(rollouts["ref"]), place.chunk) or 0)
        assert "What is the weather in Paris?" in driver.text
        assert "greedy rollout" in driver.text
        assert session.rollout is True
        assert RR.code in session.recall(place, 0), "what the reference says there is known"


async def test_two_models_own_rollouts_open_as_a_pair_at_their_root(
    rollouts: dict[str, Path],
) -> None:
    session = Session.open(rollouts["ref"], [("q5_0", rollouts["own"])])
    async with running(session) as driver:
        await driver.press("g", ".")
        place = driver.review.cursor
        pair = session.recall(place, 0)
        assert {RR.code, QQ.code} <= pair.keys()
        with opened(rollouts["own"]) as own:
            branch = pair[QQ.code]
            assert [branch.start_id, *branch.ids] == own.tokens(place.chunk)[place.t :].tolist()
        assert "Q·q q5_0" in driver.text


# ── a trace ──────────────────────────────────────────────────────────────────────────────────


def test_a_logged_conversation_becomes_a_reference(folder: Path, ref_server: str) -> None:
    conversation = {
        "messages": [
            {"role": "system", "content": "You can call tools."},
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 °C"},
            {"role": "assistant", "content": "It is sunny in Paris: 21 °C. 😀"},
        ],
        "tools": [WEATHER],
    }
    trace = folder / "trace.json"
    trace.write_text(json.dumps(conversation))
    record("import", trace, "--server", ref_server, "-o", folder / "trace")
    with opened(folder / "trace") as run:

        def text(a: int, b: int) -> str:
            return b"".join(run.pieces[id] for id in run.tokens(0)[a:b].tolist()).decode()

        told = run.chunk_fields(0)
        assert [text(a, b) for a, b in told["turns"]] == [
            "Let me look.<|im_end|>",
            "It is sunny in Paris: 21 °C. 😀<|im_end|>",
        ]
        assert run.scored(0).tolist() == [t for a, b in told["turns"] for t in range(a, b)]
        assert [name for name, _, _ in told["tags"]] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert run.problems == ()
