"""`kldtui branch`: both arms of a root on stdout, as text or JSON, whatever the servers do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kldtui.branching import Branch
from kldtui.cli import cli
from kldtui.recordings import open_recording
from tests.builders import Stream, write_kld
from tests.builders_run import run_of
from tests.builders_served import (
    N_VOCAB,
    QUANT,
    REF,
    ROOT,
    STREAM,
    T,
    logits,
    server,
    write_served,
)
from tests.fake_server import BOS, EOG, FakeLlama


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_served(tmp_path)


CALL = b'{"name": "f", "arguments": "{"}'


@pytest.fixture
def servers() -> Iterator[tuple[FakeLlama, FakeLlama]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(server(REF, [*b"ok", EOG]).in_thread()),
            stack.enter_context(server(QUANT, [*CALL, EOG]).in_thread()),
        )


def branch(pair: tuple[Path, Path], *args: str) -> Result:
    ref, quant = pair
    line = ["branch", str(ref), "--quant", str(quant), "--root", ROOT, *args]
    return CliRunner().invoke(cli, line)


def test_three_arms_as_json(pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]) -> None:
    ref, quant = servers
    urls = ("--ref-server", ref.url, "--quant-server", quant.url)
    done = branch(pair, *urls, "-n", "32", "--top-n", "3", "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    first, second, third = data["arms"]
    prefix = STREAM.tokens[1][:T].tolist()
    assert (first["engine"], first["start"], first["start_id"]) == ("ref", "ref", 98)
    assert (second["engine"], second["start"], second["start_id"]) == ("quant", "quant", 99)
    assert first["prefix_ids"] == second["prefix_ids"] == prefix
    assert first["tokens"] == [*b"ok", EOG]
    assert (first["text"], first["stop"], first["complete"]) == ("ok</s>", "eog", True)
    assert [len(top) for top in first["top"]] == [3, 3, 3]
    assert second["text"].startswith(CALL.decode())
    assert second["hint"]["kind"] == "arguments_do_not_parse"
    assert data["verify"]["ref"]["verdict"] == data["verify"]["quant"]["verdict"] == "ok"
    assert (third["arm"], third["engine"], third["start_id"]) == ("R·q", "ref", 99)
    assert ref.most_running == quant.most_running == 1, "arms of one server share no batch"
    assert data["meeting"]["parts_at"] == 0
    assert [m["arms"] for m in data["meetings"]] == [
        ["R·r", "Q·q"],
        ["R·r", "R·q"],
        ["Q·q", "R·q"],
    ]
    assert data["root"] is True
    for stored in data["arms"]:
        read = Branch.from_json(stored | {"engine": stored["server"]})
        assert read.ids == stored["tokens"]


def test_the_config_file_holds_until_an_option_says_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    servers: tuple[FakeLlama, FakeLlama],
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("branch_tokens = 2\ntop_n_stored = 3\nnear_tie = 50\n")
    monkeypatch.setenv("KLDTUI_CONFIG", str(config))
    args = ("--ref-server", servers[0].url, "--arm", "R.r", "--json")
    data = json.loads(branch(pair, *args).stdout)
    assert (len(data["arms"][0]["tokens"]), data["arms"][0]["stop"]) == (2, "limit")
    assert [len(top) for top in data["arms"][0]["top"]] == [3, 3]
    assert (data["near_tie"], data["near_tie_threshold"]) == (True, 50)
    data = json.loads(branch(pair, *args, "-n", "8", "--top-n", "4").stdout)
    assert [len(top) for top in data["arms"][0]["top"]] == [4, 4, 4]
    config.write_text("branch_tokens = 0")
    done = branch(pair, *args)
    assert done.exit_code == 2
    assert done.stderr == f"kldtui: {config}: branch_tokens must be 1 to 1000000, not 0\n"


def test_text_streams_for_people(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = servers
    done = branch(pair, "--ref-server", ref.url, "--quant-server", quant.url)
    assert done.exit_code == 0, done.stderr
    assert "R·r: the reference engine continues the reference token" in done.stdout
    assert "bok</s>" in done.stdout
    assert CALL.decode() in done.stdout
    assert "hint: does not parse" in done.stdout
    assert "eog]" in done.stdout
    assert "R·r and Q·q: they part at +0" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("option", "made", "arms"),
    [("--ref-server", REF, ["R·r", "R·q"]), ("--quant-server", QUANT, ["Q·r", "Q·q"])],
)
def test_one_server_continues_both_tokens_by_the_name_of_its_own_arms(
    pair: tuple[Path, Path], option: str, made: np.ndarray[Any, Any], arms: list[str]
) -> None:
    with server(made, [*b"ok", EOG]).in_thread() as one:
        done = branch(pair, option, one.url, "--json")
    data = json.loads(done.stdout)
    assert [arm["arm"] for arm in data["arms"]] == arms
    assert [arm["start_id"] for arm in data["arms"]] == [98, 99]
    assert len({arm["served_by"] for arm in data["arms"]}) == 1
    assert list(data["verify"]) == [option[2:].removesuffix("-server")]


def test_figures_that_are_bounds_are_printed_as_such(
    tmp_path: Path, pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    top3 = tmp_path / "ref.gguf-run"
    with contextlib.closing(open_recording(pair[0])) as whole:
        run_of(whole, top3, top_n=3)
    args = ("--ref-server", servers[0].url, "--no-verify", "--arm", "R.r", "-n", "1")
    bound = branch((top3, pair[1]), *args, "--json")
    data = json.loads(bound.stdout)
    assert (data["ref_p_quant_is_bound"], data["kld_is_lower_bound"]) == (True, True)
    head = branch((top3, pair[1]), *args).stdout.splitlines()[0]
    assert f"KLD ≥{data['kld']:.3f}, " in head
    assert f"cost ≥{data['cost']:.2f} nat" in head
    assert "≥" not in branch(pair, *args).stdout


def test_an_arm_without_its_engine_is_refused(pair: tuple[Path, Path]) -> None:
    done = branch(pair, "--ref-server", "http://127.0.0.1:9", "--arms", "R.r,Q.q")
    assert done.exit_code == 2
    assert "arm Q·q: no engine for it; give --quant-server URL" in done.stderr


def test_other_arms(pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]) -> None:
    ref, quant = servers
    urls = ("--ref-server", ref.url, "--quant-server", quant.url)
    done = branch(pair, *urls, "--arm", "Rq", "--arm", "qr", "--json")
    arms = json.loads(done.stdout)["arms"]
    assert [(arm["arm"], arm["start_id"]) for arm in arms] == [("R·q", 99), ("Q·r", 98)]


def test_exchanged_servers_are_said_and_stored(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = servers
    done = branch(pair, "--ref-server", quant.url, "--quant-server", ref.url, "--json")
    assert done.exit_code == 0
    assert "exchanged" in done.stderr
    data = json.loads(done.stdout)
    assert {each["verdict"] for each in data["verify"].values()} == {"swapped"}
    assert all(arm["verify"]["verdict"] == "swapped" for arm in data["arms"])


def test_a_server_that_dies_leaves_the_branches_and_a_failed_status(
    pair: tuple[Path, Path],
) -> None:
    with server(REF, [*b"okay"], dies_after=2).in_thread() as dying:
        done = branch(pair, "--ref-server", dying.url, "--json")
    assert done.exit_code == 2
    data = json.loads(done.stdout)
    assert [arm["text"] for arm in data["arms"]] == ["ok", "ok"]
    assert all(arm["stop"] == "error" and not arm["complete"] for arm in data["arms"])
    assert "closed the connection" in data["arms"][0]["error"]
    assert done.stderr.startswith("kldtui: http://127.0.0.1")


def test_a_model_cannot_steer_the_terminal(pair: tuple[Path, Path]) -> None:
    said = [*b"a\x1b]52;c;x\x07\r[red]", EOG]
    with server(REF, said).in_thread() as one:
        done = branch(pair, "--ref-server", one.url, "--no-verify")
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert "\r" not in done.stdout
    assert "[red]" in done.stdout


def test_a_server_without_the_recordings_bos_is_sent_it_and_named(tmp_path: Path) -> None:
    tokens = STREAM.tokens.copy()
    tokens[0, 0] = BOS
    ref = write_kld(tmp_path / "ref.kld", Stream(tokens, N_VOCAB), REF)
    quant = write_kld(tmp_path / "q4.kld", Stream(tokens, N_VOCAB), QUANT)
    right = server(REF, [*b"ok", EOG])
    lost = server(logits(7, 100), [EOG])
    known, other = right.next_top, lost.next_top
    assert known is not None
    assert other is not None
    right.next_top = lambda prompt: known(prompt) if prompt[0] == BOS else other(prompt)
    with right.in_thread() as one:
        done = branch((ref, quant), "--ref-server", one.url, "--json")
    data = json.loads(done.stdout)
    assert data["verify"]["ref"]["verdict"] == "bos"
    assert data["arms"][0]["prefix_ids"] == [BOS, *tokens[1, 1:T].tolist()]
    assert "begins with BOS" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--ref-server"),
        (["--ref-server", "ftp://x"], "no HTTP URL"),
        (["--ref-server", "http://127.0.0.1:9"], "nothing answers there"),
        (["--ref-server", "h", "--root", "c1:t2"], "c1:t2 is not recorded; of chunk 1: t13 to t23"),
        (["--ref-server", "h", "--root", "c9:t2"], "has chunks 0 to 1"),
        (["--ref-server", "h", "--root", "x"], "not a position"),
        (["--ref-server", "h", "--arm", "Qq", "--quant-server", "other=h"], "there are: q4"),
        (["--ref-server", "h", "--arms", "R.x"], "not an arm: 'R.x'"),
        (["--ref-server", "h", "--arms", "R.s"], "of a root there are R.r"),
        (["--ref-server", "h", "--roots", "all"], "give --root"),
        (["--ref-server", "h", "--ref-model", "x.gguf"], "one engine"),
        (["--ref-model", "/nowhere.gguf"], "/nowhere.gguf: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    pair: tuple[Path, Path], args: list[str], words: str
) -> None:
    done = branch(pair, *args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_where_both_say_the_same_it_branches_but_says_so(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    agree = next(
        k
        for k in range(STREAM.per_chunk)
        if REF[STREAM.per_chunk + k].argmax() == QUANT[STREAM.per_chunk + k].argmax()
    )
    url = servers[0].url
    place = f"c1:t{STREAM.first_t + agree}"
    done = branch(pair, "--ref-server", url, "--no-verify", "--root", place, "-n", "2", "--json")
    assert done.exit_code == 0, done.stderr
    assert "is no root: both say the same" in done.stderr
    assert json.loads(done.stdout)["root"] is False
