"""`record rollout`: what a model says by itself, a reference; and two models' own rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kldtui.branching import QQ, Branch
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    RecordingError,
    StreamMismatch,
    UnusableEngine,
)
from kldtui.facts import is_rollout
from kldtui.index import Index
from kldtui.position import Position
from kldtui.recorder.free import own_branch
from kldtui.recorder.prompts import Prompt, PromptFileError, read_prompts
from kldtui.recorder.rollout import RolloutJob, Sampling
from kldtui.recordings import open_quant, open_recording
from kldtui.recordings.base import prompt_length
from kldtui.recordings.own_rollout import OwnRollouts, pair_rollouts
from kldtui.recordings.run import RunRecording, open_run
from kldtui.report import pair_stats
from kldtui.rows import TopRow
from kldtui.vocab import NONE
from tests import tiny_model
from tests.builders_engines import ScriptedEngine
from tests.builders_recorder import PROMPTS, chatml, own_pair, roll, rolling_server, said, teller
from tests.fake_server import EOG
from tests.fake_vllm import FakeVllm


def generated(run: RunRecording, chunk: int) -> list[int]:
    ids: list[int] = run.tokens(chunk).tolist()
    return ids[prompt_length(run, chunk) :]


# ── what is recorded ─────────────────────────────────────────────────────────────────────────


async def test_a_rollout_is_the_prompt_and_what_the_model_said_by_itself(tmp_path: Path) -> None:
    async with rolling_server() as fake:
        assert await roll(fake, tmp_path / "r.run") == 3
    run = open_run(tmp_path / "r.run")
    assert run.made.kind == "rollout"
    prompts = [[*b"What is"], [97, 98, 99], [*b"Once"]]
    for chunk, prompt in enumerate(prompts):
        ids = run.tokens(chunk).tolist()
        assert ids[: len(prompt)] == prompt
        assert prompt_length(run, chunk) == len(prompt)
        told = run.chunk_fields(chunk)
        assert told["turns"] == [[len(prompt), len(ids)]]
        assert told["source"] == {"line": PROMPTS[chunk].line}
        assert told["stop"] == ("eog" if ids[-1] == EOG else "limit")
        assert run.scored(chunk).tolist() == list(range(len(prompt), len(ids)))
        for t in range(len(prompt), len(ids)):
            row = run.row(Position(chunk, t))
            assert isinstance(row, TopRow)
            assert row.top(1)[0][0] == ids[t], "greedy: each token is the most likely one"
            assert len(row.known) == 4
    assert {run.chunk_fields(chunk)["stop"] for chunk in range(3)} == {"eog", "limit"}
    assert any(301 in generated(run, chunk)[:-1] for chunk in range(3)), "no cut character in it"
    assert run.header["n_ctx"] == len(prompts[0]) + 10
    assert "sampling" not in run.header
    run.close()


async def test_messages_are_rendered_by_the_servers_own_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    conversation = {"messages": [said("user", "hi")], "tools": tools}
    async with rolling_server(template=chatml) as fake:
        await roll(fake, tmp_path / "r.run", [Prompt(1, conversation=conversation), PROMPTS[1]])
    run = open_run(tmp_path / "r.run")
    prompt = run.tokens(0)[: prompt_length(run, 0)].tolist()
    assert prompt == [1, *b"tools 1", 2, 10, 1, *b"user\nhi", 2, 10, 1, *b"assistant\n"]
    assert run.header["tools"] == [tools]
    assert run.chunk_fields(0)["tools"] == 0
    assert "tools" not in run.chunk_fields(1)
    run.close()


async def test_a_model_with_bos_has_it_in_a_texts_prompt_and_not_in_ids(tmp_path: Path) -> None:
    async with rolling_server(add_bos=True) as fake:
        await roll(fake, tmp_path / "r.run")
    run = open_run(tmp_path / "r.run")
    assert run.tokens(0)[:2].tolist() == [1, ord("W")]
    assert run.tokens(1)[0] == 97
    assert run.header["bos"]["rule"] == "none", "it is a token of the chunk, nothing replaces it"
    run.close()


async def test_drawn_rollouts_are_kept_apart(tmp_path: Path) -> None:
    async with rolling_server() as fake:
        drawn = Sampling(0.8, seed=7, repeat=2)
        assert await roll(fake, tmp_path / "r.run", sampling=drawn) == 6
        asked = [body for body in fake.bodies() if body.get("stream")]
    run = open_run(tmp_path / "r.run")
    assert run.header["sampling"] == {"temperature": 0.8, "seed": 7, "repeat": 2}
    told = [run.chunk_fields(chunk) for chunk in range(6)]
    assert [(one["source"]["line"], one["sample"], one["seed"]) for one in told] == [
        (1, 0, 7),
        (1, 1, 8),
        (2, 0, 7),
        (2, 1, 8),
        (4, 0, 7),
        (4, 1, 8),
    ]
    assert [body["seed"] for body in asked] == [7, 8] * 3
    assert all(body["samplers"] == ["temperature"] for body in asked)
    assert all(body["temperature"] == 0.8 and "top_k" not in body for body in asked)
    run.close()


async def test_a_drawn_text_is_no_greedy_rollout_though_it_looks_like_one(tmp_path: Path) -> None:
    """FDT and SDT are not reckoned on it; at a low temperature every token may be the best."""
    found = {}
    for name, sampling in (("greedy", None), ("drawn", Sampling(0.01))):
        async with rolling_server() as fake:
            await roll(fake, tmp_path / name, sampling=sampling)
        run = open_run(tmp_path / name)
        index = Index(run, [run])
        list(index.scan())
        assert (index.ref["stream_rank"] == 1).all()
        found[name] = (is_rollout(index), pair_stats(index, 0).to_json()["fdt"] is not None)
        run.close()
    assert found == {"greedy": (True, True), "drawn": (False, False)}


# ── going on ─────────────────────────────────────────────────────────────────────────────────


@given(st.floats(0, 1))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_cut_anywhere_and_gone_on_with_it_is_the_same_file(
    tmp_path: Path, where: float
) -> None:
    whole, cut = tmp_path / "whole.run", tmp_path / "cut.run"
    async with rolling_server() as fake:
        if not whole.exists():
            await roll(fake, whole)
        data = whole.read_bytes()
        kept = int(where * len(data))
        cut.write_bytes(data[:kept])
        if 0 < kept < data.index(b"\n") + 1:
            return
        await roll(fake, cut)
    assert cut.read_bytes() == data


async def test_a_server_that_dies_leaves_whole_rollouts(tmp_path: Path) -> None:
    async with rolling_server() as fake:
        await roll(fake, tmp_path / "whole.run")
    path = tmp_path / "r.run"
    async with rolling_server(dies_after=8) as fake:
        with pytest.raises(EngineBroke):
            await roll(fake, path)
    run = open_run(path)
    assert all(run.chunk_fields(chunk)["stop"] == "eog" for chunk in range(run.shape.n_chunk))
    assert run.shape.n_chunk < 3
    run.close()
    async with rolling_server() as fake:
        await roll(fake, path)
    assert path.read_bytes() == (tmp_path / "whole.run").read_bytes()


async def test_a_server_that_goes_on_otherwise_is_said(tmp_path: Path) -> None:
    path = tmp_path / "r.run"
    async with rolling_server() as fake:
        await roll(fake, path)
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(k for k, line in enumerate(lines) if b'"tokens"' in line)
    path.write_bytes(b"".join(lines[: last + 2]))
    async with rolling_server(next_top=teller({ord("O"): 6})) as fake:
        with pytest.raises(RecordingError, match="goes on otherwise from the prompt of line 4"):
            await roll(fake, path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 12}, "was begun with -n 10, not with -n 12;"),
        (
            {"prompts": [PROMPTS[0], PROMPTS[2], Prompt(5, text="A longer one")], "top_n": 3},
            r"was begun with --top-n 4, not with --top-n 3;",
        ),
        (
            {"prompts": [*PROMPTS, Prompt(5, text="A longer one")]},
            r"was begun with other --prompts than these \([0-9a-f]{8}, now [0-9a-f]{8}\);",
        ),
        (
            {"sampling": Sampling(0.8)},
            r"was begun without --temperature, not with --temperature 0\.8;",
        ),
    ],
)
async def test_rollouts_begun_otherwise_are_refused_by_the_option_that_differs(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    path = tmp_path / "r.run"
    async with rolling_server() as fake:
        await roll(fake, path)
        data = path.read_bytes()
        with pytest.raises(RecordingError, match=words):
            await roll(fake, path, **more)
    assert path.read_bytes() == data


async def test_drawn_rollouts_are_no_greedy_ones(tmp_path: Path) -> None:
    path = tmp_path / "r.run"
    async with rolling_server() as fake:
        await roll(fake, path, sampling=Sampling(0.8, seed=3))
        for sampling, words in (
            (None, r"begun with --temperature 0\.8, not without --temperature"),
            (Sampling(0.8, seed=4), "begun with --seed 3, not with --seed 4"),
        ):
            with pytest.raises(RecordingError, match=words):
                await roll(fake, path, sampling=sampling)


async def test_another_model_is_not_taken_for_other_prompts(tmp_path: Path) -> None:
    """It may read other ids in the same ones."""
    path = tmp_path / "r.run"
    async with rolling_server() as fake:
        await roll(fake, path)
    async with rolling_server(model_path="/models/other.gguf") as fake:
        with pytest.raises(RecordingError, match=r"engine\.model is"):
            await roll(fake, path, [Prompt(1, text="What was")])


# ── what cannot be ───────────────────────────────────────────────────────────────────────────


async def test_a_prompt_that_does_not_fit_is_named_by_its_line(tmp_path: Path) -> None:
    async with rolling_server(n_ctx=6) as fake:
        with pytest.raises(ContextExceeded, match="prompt of line 1 has 7 tokens, its context 6"):
            await roll(fake, tmp_path / "r.run")
    async with rolling_server() as fake:
        with pytest.raises(EngineError, match="line 2 has id 306"):
            await roll(fake, tmp_path / "r.run", [PROMPTS[0], Prompt(2, ids=(97, 306))])


async def test_what_vllm_does_not_say_is_asked_of_the_user(tmp_path: Path) -> None:
    prompts = [Prompt(1, ids=tuple(tiny_model.encode("Hello")))]
    async with FakeVllm() as fake:
        with pytest.raises(UnusableEngine, match="--n-vocab N"):
            await roll(fake, tmp_path / "r.run", prompts)
        await roll(fake, tmp_path / "r.run", prompts, n_vocab=tiny_model.N_VOCAB)
        with pytest.raises(UnusableEngine, match="messages; llama-server can"):
            await roll(fake, tmp_path / "m.run", [Prompt(1, conversation={"messages": []})])
    run = open_run(tmp_path / "r.run")
    assert len(generated(run, 0)) > 1
    run.close()


async def test_vllm_reads_texts_and_draws_too(tmp_path: Path) -> None:
    prompts = [Prompt(1, text="Hello")]
    async with FakeVllm() as fake:
        drawn = Sampling(0.7, seed=3)
        path = tmp_path / "r.run"
        await roll(fake, path, prompts, n_vocab=tiny_model.N_VOCAB, sampling=drawn)
        (asked,) = [body for body in fake.bodies("/v1/completions") if body.get("stream")]
    assert {name: asked[name] for name in ("temperature", "seed", "top_k", "top_p", "min_p")} == {
        "temperature": 0.7,
        "seed": 3,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    run = open_run(path)
    assert run.tokens(0)[0] == tiny_model.BOS
    first = run.row(Position(0, prompt_length(run, 0) or 0))
    assert isinstance(first, TopRow)
    assert first.top(2)[1][0] == generated(run, 0)[0], "what was drawn need not be the best"
    run.close()


async def test_an_engine_that_cannot_draw_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine([1])
    with pytest.raises(UnusableEngine, match="llama-server and vLLM can"):
        RolloutJob(
            engine, PROMPTS[1:2], [[97]], tmp_path / "r", n=2, top_n=4, sampling=Sampling(1.0)
        )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("one\n\n  two \n", [(1, "one"), (3, "  two ")]),
        ('{"prompt": "a\\nb"}\n"c"\n', [(1, "a\nb"), (2, "c")]),
        ('\n{"tokens": [1, 2]}\n{"prompt": [3]}', [(2, (1, 2)), (3, (3,))]),
    ],
)
def test_prompts_are_lines_of_text_or_json(tmp_path: Path, text: str, want: list[Any]) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    found = read_prompts(path)
    assert [(one.line, one.text if one.ids is None else one.ids) for one in found] == want


def test_messages_take_along_what_the_template_needs_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    line = {
        "messages": [said("user", "hi")],
        "tools": [{"a": 1}],
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.7,
    }
    path.write_text(json.dumps(line))
    conversation = read_prompts(path)[0].conversation
    assert conversation == {name: line[name] for name in list(line)[:3]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\nb', "line 2: is no JSON"),
        ('{"text": "a"}', "line 1: has no prompt"),
        ('{"tokens": [1, "2"]}', "line 1: its tokens are no list of token ids"),
        ('{"prompt": "a"}\n[1]', "line 2: is neither an object nor a text"),
    ],
)
def test_what_is_wrong_with_prompts_names_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=words):
        read_prompts(path)


# ── two models' own rollouts ─────────────────────────────────────────────────────────────────


async def test_rollouts_of_the_same_prompts_part_where_the_models_do(tmp_path: Path) -> None:
    ref, quant = (open_run(path) for path in await own_pair(tmp_path))
    found = {pair.ref: pair.agreed for pair in pair_rollouts(ref, quant)}
    assert found[0] == 3
    assert found[2] == 0
    for chunk in range(3):
        mine, theirs = generated(ref, chunk), generated(quant, chunk)
        agreed = next(
            (k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None
        )
        assert agreed is None or found[chunk] == agreed
    ref.close()
    quant.close()


async def test_where_they_part_the_quants_opens_as_a_recorded_branch(tmp_path: Path) -> None:
    first, second = await own_pair(tmp_path)
    ref, run = open_recording(first), open_run(second)
    quant = open_quant(second, ref, lambda: NONE)
    root = Position(0, len(b"What is") + 3)
    branch = own_branch(quant, root, "q4")
    assert branch is not None
    assert branch.arm == QQ
    assert branch.prefix_ids == ref.tokens(0)[: root.t].tolist()
    assert branch.start_id != ref.tokens(0)[root.t]
    assert [branch.start_id, *branch.ids] == run.tokens(0)[root.t :].tolist()
    assert branch.stop == run.chunk_fields(0)["stop"]
    assert branch.complete == (branch.stop == "eog")
    assert all(token.top[0][0] == token.id for token in branch.tokens)
    assert branch.engine["model"] == "/models/fake-q4.gguf"
    assert Branch.from_json(branch.to_json()) == branch
    assert own_branch(quant, Position(0, root.t - 1), "q4") is None
    assert own_branch(ref, root, "q4") is None
    for each in (ref, run, quant):
        each.close()


async def test_as_a_quant_they_are_compared_up_to_where_they_part(tmp_path: Path) -> None:
    first, second = await own_pair(tmp_path)
    ref = open_recording(first)
    quant = open_quant(second, ref, lambda: NONE)
    assert isinstance(quant, OwnRollouts)
    assert quant.shape == ref.shape
    assert "compared up to there" in quant.problems[-1]
    start = len(b"What is")
    assert quant.scored(0).tolist() == list(range(start, start + 4))
    assert quant.tokens(0).tolist() == ref.tokens(0).tolist()
    rows = quant.rows(0, 0, 4)
    assert rows.stream_ids.tolist() == ref.tokens(0)[start : start + 4].tolist()
    assert (rows.ids[:3, 0] == rows.stream_ids[:3]).all()
    assert rows.ids[3, 0] != rows.stream_ids[3]
    assert quant.row(Position(0, start + 4)) is None
    whole = quant.scored(1)
    assert whole.tolist() == ref.scored(1).tolist()
    quant.close()
    ref.close()


async def test_rollouts_of_other_prompts_are_refused(tmp_path: Path) -> None:
    first, _ = await own_pair(tmp_path)
    async with rolling_server() as fake:
        await roll(fake, tmp_path / "other.run", [Prompt(1, text="Else")])
    ref = open_recording(first)
    with pytest.raises(StreamMismatch, match="no prompt is in both"):
        open_quant(tmp_path / "other.run", ref, lambda: NONE)
    ref.close()
