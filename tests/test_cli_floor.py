"""`kldtui floor`: a rate with its interval, of one engine against itself and against another."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kldtui.cli import cli
from tests.builders_served import QUANT, REF, server, write_served
from tests.fake_server import EOG, FakeLlama


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_served(tmp_path)


@pytest.fixture
def servers() -> Iterator[tuple[FakeLlama, FakeLlama]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(server(REF, [*b"ok", EOG]).in_thread()),
            stack.enter_context(server(QUANT, [*b"no", EOG]).in_thread()),
        )


def floor(pair: tuple[Path, Path], *args: str) -> Result:
    return CliRunner().invoke(cli, ["floor", str(pair[0]), "-n", "4", *args])


def test_an_engine_that_always_says_the_same_has_no_flips_but_an_interval(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    args = ("--ref-server", servers[0].url, "--quant", str(pair[1]), "--roots", "3", "--json")
    done = floor(pair, *args)
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["at"], len(data["positions"]), data["tokens"]) == ("roots", 3, 4)
    off, on = data["comparisons"]
    assert (off["against"], on["against"]) == ("off", "on")
    assert off["self_flip_rate"]["count"] == 0
    assert off["self_flip_rate"]["of"] > 3
    assert 0 < off["self_flip_rate"]["high"] < 0.6
    assert off["parted"]["of"] == 3
    assert data["self_flip_rate"]["of"] == off["self_flip_rate"]["of"] * 2
    assert off["mean_abs_dlogp"] == 0
    assert data["recording"]["flip_rate"]["count"] == 0
    assert data["engine"]["verify"]["verdict"] == "ok"
    assert data["against"] is None
    caches = [body["cache_prompt"] for body in servers[0].bodies() if body.get("stream")]
    assert caches == [False, False, True] * 3


def test_the_config_file_says_how_many_candidates_are_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[Path, Path],
    servers: tuple[FakeLlama, FakeLlama],
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("top_n_stored = 7")
    monkeypatch.setenv("KLDTUI_CONFIG", str(config))
    done = floor(pair, "--ref-server", servers[0].url, "--roots", "1", "--no-verify")
    assert done.exit_code == 0, done.stderr
    asked = {body["n_probs"] for body in servers[0].bodies() if body.get("stream")}
    assert asked == {7}


def test_the_same_positions_are_run_each_time(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    args = ("--ref-server", servers[0].url, "--no-verify", "--json")
    few, more = (
        json.loads(floor(pair, *args, "--roots", n).stdout)["positions"] for n in ("2", "4")
    )
    assert set(few) < set(more)
    assert json.loads(floor(pair, *args, "--roots", "2").stdout)["at"] == "positions"


def test_another_engine_is_held_against_the_first(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = servers
    args = ("--ref-server", ref.url, "--against", quant.url, "--roots", "5", "--json")
    done = floor(pair, *args)
    assert "it is another model" in done.stderr
    data = json.loads(done.stdout)
    other = data["comparisons"][2]
    assert other["against"] == "other"
    assert other["self_flip_rate"]["count"] > 0
    assert data["against"]["verify"]["verdict"] == "other_model"
    with server(REF, [*b"ok", EOG]).in_thread() as twin:
        same = floor(pair, "--ref-server", ref.url, "--against", twin.url, "--json")
    assert json.loads(same.stdout)["comparisons"][2]["self_flip_rate"]["count"] == 0


def test_people_read_rates_with_their_intervals(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    done = floor(pair, "--ref-server", servers[0].url, "--quant", str(pair[1]), "--roots", "3")
    assert done.exit_code == 0, done.stderr
    assert "ref.kld: 3 roots, 4 tokens from each" in done.stdout
    assert "cache off, on" in done.stdout
    assert "self-flip rate           0.00%  95 % [0.00%, " in done.stdout
    assert "live against the recording" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--ref-server URL or --ref-model FILE"),
        (["--ref-server", "http://127.0.0.1:9"], "nothing answers there"),
        (["--ref-server", "http://127.0.0.1:9", "--against", "ftp://x"], "no HTTP URL"),
        (["--ref-model", "nowhere.gguf"], "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    pair: tuple[Path, Path], args: list[str], words: str
) -> None:
    done = floor(pair, *args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_other_engine_is_sent_the_references_key(
    pair: tuple[Path, Path],
    servers: tuple[FakeLlama, FakeLlama],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KLDTUI_REF_API_KEY", "of-the-reference")
    monkeypatch.setenv("KLDTUI_QUANT_API_KEY", "of-the-quant")
    args = ("--ref-server", servers[0].url, "--quant", str(pair[1]), "--roots", "1")
    with server(REF, [*b"ok", EOG], api_key="of-the-reference").in_thread() as twin:
        done = floor(pair, *args, "--against", twin.url)
        assert done.exit_code == 0, done.stderr
        assert all("of-the-quant" not in str(headers) for _, _, headers in twin.requests)


def test_an_error_stands_on_a_line_of_its_own_on_a_terminal(
    pair: tuple[Path, Path],
    servers: tuple[FakeLlama, FakeLlama],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    servers[0].dies_after = 1
    args = ["floor", str(pair[0]), "--ref-server", servers[0].url, "--no-verify", "-n", "4"]
    with pytest.raises(SystemExit):
        cli.main(args)
    before, _, error = capsys.readouterr().err.rpartition("\r\x1b[K")
    assert "0 of 20 positions" in before
    assert error.startswith("kldtui: ")
