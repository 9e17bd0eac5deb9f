"""`kldtui record score`, `rollout` and `import`: from a server to a review, stopped and gone on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kldtui.cli import cli
from kldtui.recordings.run import open_run
from tests.builders_recorder import chatml, quant_server, reference, said
from tests.fake_server import FakeLlama
from tests.fake_vllm import FakeVllm


def record(*args: object) -> Result:
    return CliRunner().invoke(cli, ["record", *(str(arg) for arg in args)])


def undated(path: Path) -> bytes:
    """A run without the moment at which it was begun."""
    return re.sub(rb'"created":"[^"]*"', b"", path.read_bytes())


def test_a_quant_is_scored_and_compared(tmp_path: Path) -> None:
    ref, run = reference(tmp_path / "ref.kld"), tmp_path / "q.run"
    with quant_server().in_thread() as server:
        done = record("score", ref, "--server", server.url, "-o", run, "--top-n", 6)
        again = record("score", ref, "--server", server.url, "-o", run, "--top-n", 6)
    assert done.exit_code == 0, done.stderr
    assert "21 positions in" in done.stdout
    assert "is whole already (21 positions" in again.stdout
    found = CliRunner().invoke(cli, ["stats", str(ref), "--quant", str(run), "--json"])
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)[0]["positions"] == 21


def test_rollouts_become_a_reference_and_a_quant_is_scored_on_them(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"messages": [said("user", "hi")]}) + "\n" + json.dumps({"prompt": "Once"})
    )
    ref, run = tmp_path / "ref.run", tmp_path / "q.run"
    with quant_server(template=chatml).in_thread() as server:
        made = record("rollout", "--server", server.url, "--prompts", prompts, "-n", 8, "-o", ref)
        done = record("score", ref, "--server", server.url, "-o", run)
    assert made.exit_code == 0, made.stderr
    assert "2 rollouts in" in made.stdout
    assert done.exit_code == 0, done.stderr
    opened = open_run(run)
    assert opened.records == open_run(ref).records
    opened.close()


def test_a_trace_becomes_a_reference_and_what_was_left_out_is_said(tmp_path: Path) -> None:
    trace, run = tmp_path / "trace.jsonl", tmp_path / "ref.run"
    twice = [said("user", "hi"), said("assistant", "Yo."), said("assistant", "Yo!")]
    trace.write_text("\n".join(json.dumps({"messages": twice}) for _ in range(12)))
    with quant_server(template=chatml, n_ctx=128).in_thread() as server:
        done = record("import", trace, "--server", server.url, "-o", run)
    assert done.exit_code == 0, done.stderr
    assert "48 positions in" in done.stdout
    assert done.stderr.count("it goes on from another of its own") == 8
    assert "and 4 more like these" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["score", "REF"], "--server URL, --model FILE.gguf or --mlx-model FOLDER"),
        (
            ["score", "REF", "--server", "h", "--model", "x"],
            "--server URL, --model FILE.gguf or --mlx-model FOLDER",
        ),
        (["score", "REF", "--server", "ftp://x"], "no HTTP URL"),
        (["score", "REF", "--server", "http://127.0.0.1:9"], "nothing answers there"),
        (["score", "REF", "--server", "h", "--chunks", "1-9"], "has chunks 0 to 2"),
        (["score", "nothing.kld", "--server", "h"], "cannot be opened"),
        (["score", "REF", "--model", "nothing.gguf"], "no such model: nothing.gguf"),
        (["score", "REF", "--mlx-model", "nothing"], "no MLX folder"),
        (["score", "REF", "--mlx-model", "x", "--kld", "--all"], "--kld: a .kld file holds"),
        (["score", "REF", "--mlx-model", "x", "--kld", "--top-n", "9"], "leave out --top-n"),
        (
            ["score", "REF", "--mlx-model", "x", "--kld", "--top-n", "40", "--stepwise"],
            "leave out --top-n and --stepwise",
        ),
        (["rollout", "--prompts", "REF", "--server", "h"], "is no UTF-8 text"),
        (["rollout", "--prompts", "x", "--server", "h", "--seed", "3"], "give --temperature"),
        (["import", "nothing.jsonl", "--server", "h"], "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, args: list[str], words: str) -> None:
    ref = reference(tmp_path / "ref.kld")
    line = [str(ref) if arg == "REF" else arg for arg in args]
    done = record(*line, "-o", tmp_path / "q.run")
    assert done.exit_code == 2
    assert words in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kldtui: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "q.run").exists()


def test_a_server_that_sees_another_bos_is_named(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    with quant_server(add_bos=True).in_thread() as server:
        done = record("score", ref, "--server", server.url, "-o", tmp_path / "q.run")
    assert done.exit_code == 0
    assert "begins without BOS" in done.stderr


def test_a_server_that_does_not_keep_its_cache_is_named(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    with quant_server(keeps_cache=False).in_thread() as server:
        done = record("score", ref, "--server", server.url, "-o", tmp_path / "q.run")
    assert done.exit_code == 0
    assert "last digits differ from run to run" in done.stderr


def start(server: FakeLlama, ref: Path, run: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "kldtui", "record", "score", ref, "--server", server.url]
    return subprocess.Popen(
        [*map(str, line), "-o", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )


def positions(run: Path) -> int:
    return run.read_bytes().count(b'"top"') if run.exists() else 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_by_a_signal_the_same_command_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    ref, run, whole = reference(tmp_path / "ref.kld"), tmp_path / "q.run", tmp_path / "whole.run"
    with quant_server(pause=0.05).in_thread() as server:
        process = start(server, ref, run)
        until = time.monotonic() + 30
        while positions(run) < 7 and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(how)
        _, errors = process.communicate(timeout=30)
        held = positions(run)
        server.pause = 0.0
        done = record("score", ref, "--server", server.url, "-o", run)
        record("score", ref, "--server", server.url, "-o", whole)
    assert 7 <= held < 21, "it was not stopped on the way"
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert errors.splitlines()[-1].endswith("the same command goes on")
        assert "Traceback" not in errors
    assert done.exit_code == 0, done.stderr
    assert f"{21 - held} positions in" in done.stdout
    assert undated(run) == undated(whole)


def test_a_server_that_dies_leaves_its_cause_and_what_was_recorded(tmp_path: Path) -> None:
    ref, run = reference(tmp_path / "ref.kld"), tmp_path / "q.run"
    with quant_server(dies_after=5).in_thread() as server:
        done = record("score", ref, "--server", server.url, "-o", run)
    assert done.exit_code == 2
    assert "closed the connection" in done.stderr
    assert done.stderr.count("\n") <= 2


def test_recording_does_not_load_the_user_interface() -> None:
    code = (
        "import sys, kldtui.cli.record_live\n"
        "print([m for m in ('textual', 'gguf', 'xllamacpp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def settings_of(run: Path) -> Any:
    opened = open_run(run)
    opened.close()
    return opened.engine["settings"]


def test_both_routes_of_the_command_write_the_same(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    with quant_server().in_thread() as server:
        for name, more in (("a", ()), ("b", ("--stepwise",))):
            done = record("score", ref, "--server", server.url, "-o", tmp_path / name, *more)
            assert done.exit_code == 0
        stepwise = [body for body in server.bodies() if "grammar" in body]
    assert stepwise, "the first one had no grammar"
    assert undated(tmp_path / "a") == undated(tmp_path / "b")
    assert settings_of(tmp_path / "a")["cache_prompt"] is False


def test_the_stepwise_route_is_refused_where_a_server_has_no_other(tmp_path: Path) -> None:
    ref, run = reference(tmp_path / "ref.kld"), tmp_path / "q.run"
    with FakeVllm(add_bos=False).in_thread() as server:
        refused = record("score", ref, "--server", server.url, "-o", run, "--stepwise")
        asked = [path for path in server.paths() if path == "/v1/completions"]
    assert refused.exit_code == 2
    assert "--stepwise is for llama-server" in refused.stderr
    assert not run.exists()
    assert not asked
