"""`kldtui branch --roots`: one engine at a time, into a file that goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kldtui.cli import cli
from kldtui.index import Index
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.review.branch_log import BranchLog
from kldtui.roots import RootQuery, select
from tests.builders_served import QUANT, REF, ROOT, server, write_served
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


def batch(pair: tuple[Path, Path], *args: str, roots: str = "all") -> Result:
    ref, quant = pair
    out = ref.parent / "b.jsonl"
    line = ["branch", str(ref), "--quant", str(quant), "--roots", roots, "-o", str(out)]
    return CliRunner().invoke(cli, [*line, "-n", "8", *args])


def roots_of(pair: tuple[Path, Path]) -> list[Position]:
    index = Index(*((r := [open_recording(p) for p in pair])[0], r[1:]))
    for _ in index.scan():
        pass
    return [index.layout.position(int(i)) for i in select(index, RootQuery())]


def held(pair: tuple[Path, Path]) -> dict[Position, dict[str, Any]]:
    log = BranchLog.open(pair[0].parent / "b.jsonl", open_recording(pair[0]), ["q4"])
    places = {entry.position for entry in log.entries}
    return {place: log.of(place, "q4") for place in places}


def generated(fake: FakeLlama) -> int:
    """How many judged branches were asked of a server; measuring asks for one more."""
    return sum(bool(body.get("stream")) for body in fake.bodies())


def test_one_engine_then_the_other_into_one_file(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = servers
    first = batch(pair, "--ref-server", ref.url, "--arms", "R.r,R.q")
    assert first.exit_code == 0, first.stderr
    roots = roots_of(pair)
    assert set(held(pair)) == set(roots)
    assert all(set(arms) == {"R·r", "R·q"} for arms in held(pair).values())
    assert f"{len(roots)} roots, arms R·r R·q: {2 * len(roots)} branches to make" in first.stderr
    assert "tokens of prefixes to read at" in first.stderr
    assert "tokens to generate at" in first.stderr
    assert first.stdout == ""
    second = batch(pair, "--quant-server", quant.url)
    assert second.exit_code == 0, second.stderr
    assert all(set(arms) == {"R·r", "R·q", "Q·q"} for arms in held(pair).values())
    at_root = held(pair)[Position.parse(ROOT)]
    assert at_root["R·r"].text == "ok</s>"
    assert at_root["Q·q"].text == "no</s>"
    assert at_root["Q·q"].verify["verdict"] == "ok"
    assert ref.most_running == quant.most_running == 1


def test_what_is_made_is_not_made_again(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    url = ("--ref-server", servers[0].url)
    assert batch(pair, *url, roots="2").exit_code == 0
    before = generated(servers[0])
    size = (pair[0].parent / "b.jsonl").stat().st_size
    again = batch(pair, *url, roots="2")
    assert again.exit_code == 0
    assert "0 branches to make; 4 are in b.jsonl already" in again.stderr
    assert generated(servers[0]) == before
    assert (pair[0].parent / "b.jsonl").stat().st_size == size
    more = batch(pair, *url, roots="3")
    assert "2 branches to make; 4 are in b.jsonl already" in more.stderr
    longer = batch(pair, *url, "-n", "9", roots="2")
    assert "branches to make" in longer.stderr


def test_ctrl_c_at_the_question_ends_it_as_anywhere_else(
    pair: tuple[Path, Path],
    servers: tuple[FakeLlama, FakeLlama],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise click.Abort

    monkeypatch.setattr("kldtui.cli.batching._at_terminal", lambda: True)
    monkeypatch.setattr("click.confirm", interrupted)
    done = batch(pair, "--ref-server", servers[0].url, roots="1")
    assert done.exit_code == 130
    assert "Aborted" not in done.output


def test_a_file_cut_in_its_last_line_goes_on_from_there(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    url = ("--ref-server", servers[0].url)
    batch(pair, *url, roots="2")
    whole = held(pair)
    out = pair[0].parent / "b.jsonl"
    out.write_bytes(out.read_bytes()[:-40])
    again = batch(pair, *url, roots="2")
    assert "last line was cut" in again.stderr
    assert "1 branches to make; 3 are in b.jsonl already" in again.stderr
    assert {place: set(arms) for place, arms in held(pair).items()} == {
        place: set(arms) for place, arms in whole.items()
    }


def test_a_server_that_dies_leaves_a_file_to_go_on_with(pair: tuple[Path, Path]) -> None:
    with server(REF, [*b"okay"]).in_thread() as fake:
        asked = [0]
        known = fake.next_top
        assert known is not None

        def dying(prompt: list[int]) -> list[tuple[int, float]]:
            asked[0] += 1
            if generated(fake) > 4:
                fake.dies_after = 2
            return known(prompt)

        fake.next_top = dying
        broken = batch(pair, "--ref-server", fake.url)
        assert broken.exit_code == 2
        assert "the same command makes the rest" in broken.stderr
        partial = [b for arms in held(pair).values() for b in arms.values() if b.stop == "error"]
        assert [len(branch.tokens) for branch in partial] == [2]
        fake.dies_after, fake.next_top = None, known
        assert batch(pair, "--ref-server", fake.url).exit_code == 0
    everything = [b for arms in held(pair).values() for b in arms.values()]
    assert len(everything) == 2 * len(roots_of(pair))
    assert {branch.stop for branch in everything} <= {"limit", "eog", "loop"}


def test_a_server_that_is_another_model_is_refused_before_it_starts(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = servers
    swapped = batch(pair, "--ref-server", quant.url)
    assert swapped.exit_code == 2
    assert "exchanged" in swapped.stderr
    assert "--no-verify goes on all the same" in swapped.stderr
    assert not (pair[0].parent / "b.jsonl").exists()
    anyway = batch(pair, "--ref-server", quant.url, "--no-verify", roots="1")
    assert anyway.exit_code == 0
    assert ref.requests == []


def test_prefixes_that_do_not_fit_are_left_out_and_named(pair: tuple[Path, Path]) -> None:
    with server(REF, [*b"ok", EOG], n_ctx=18).in_thread() as small:
        done = batch(pair, "--ref-server", small.url, "--no-verify")
    assert done.exit_code == 2
    assert "exceeds the available context size" in done.stderr
    assert "branches cannot be made with this engine" in done.stderr
    assert held(pair)
    assert max(place.t for place in held(pair)) < 18


def test_roots_come_from_what_flips_prints(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama], tmp_path: Path
) -> None:
    url = ("--ref-server", servers[0].url)
    ref, quant = pair
    roots = roots_of(pair)
    listed = CliRunner().invoke(cli, ["flips", str(ref), "--quant", str(quant)])
    text = tmp_path / "roots.txt"
    text.write_text("\n".join(line for line in listed.stdout.splitlines()[-2:]))
    assert batch(pair, *url, "--arms", "R.r", roots=str(text)).exit_code == 0
    assert set(held(pair)) == set(roots[-2:])
    as_json = CliRunner().invoke(cli, ["flips", str(ref), "--quant", str(quant), "--json"])
    data = tmp_path / "roots.json"
    data.write_text(json.dumps(json.loads(as_json.stdout)[:2]))
    assert batch(pair, *url, "--arms", "R.r", roots=str(data)).exit_code == 0
    assert set(held(pair)) == {*roots[-2:], *roots[:2]}
    mixed = tmp_path / "mixed.txt"
    mixed.write_text(f"# mine\n\n{roots[0]}  first\nc0:t1\n")
    done = batch(pair, *url, roots=str(mixed))
    assert "1 of its positions are no roots (c0:t1); left out" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--roots", "nowhere.txt"],
            "'nowhere.txt' is neither `all`, a number from 1 up nor a file",
        ),
        (["--roots", "0"], "'0' is neither `all`, a number from 1 up nor a file"),
        (["--roots", "-1"], "'-1' is neither `all`, a number from 1 up nor a file"),
        (["--roots", "--yes"], "'--yes' is neither `all`, a number from 1 up nor a file"),
        (["--roots", "-"], "'-' is neither `all`, a number from 1 up nor a file"),
        (["--roots", "all", "--json"], "without --json"),
        (["--roots", "all", "--root", "c1:t16"], "give --root"),
        (["--roots", "all", "--arms", "Q.q"], "arm Q·q: no engine for it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama], args: list[str], words: str
) -> None:
    done = batch(pair, "--ref-server", servers[0].url, *args)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no position"),
        ("# none today\n\n", "holds no position"),
        ("position  ref  quant\n", "holds no position"),
        ("[]", "holds no position"),
        ("c0:t1\nc0:t2\n", "none of its 2 positions is a root (c0:t1, c0:t2)"),
    ],
)
def test_a_file_without_a_root_is_refused_and_nothing_is_made(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama], text: str, words: str
) -> None:
    named = pair[0].parent / "roots.txt"
    named.write_text(text)
    done = batch(pair, "--ref-server", servers[0].url, roots=str(named))
    assert done.exit_code == 2
    assert f"{named}: {words}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (pair[0].parent / "b.jsonl").exists()
    assert servers[0].requests == []


def test_somebody_at_a_terminal_is_asked_first(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.cli.batching._at_terminal", lambda: True)
    ref, quant = pair
    out = ref.parent / "b.jsonl"
    line = ["branch", str(ref), "--quant", str(quant), "--roots", "1", "-o", str(out), "-n", "4"]
    line += ["--ref-server", servers[0].url]
    declined = CliRunner().invoke(cli, line, input="n\n")
    assert declined.exit_code == 2
    assert "nothing was made" in declined.stderr
    assert not out.exists()
    assert CliRunner().invoke(cli, line, input="y\n").exit_code == 0
    assert out.exists()
    out.unlink()
    assert CliRunner().invoke(cli, [*line, "--yes"], input="").exit_code == 0


def test_one_root_goes_into_the_file_too(
    pair: tuple[Path, Path], servers: tuple[FakeLlama, FakeLlama]
) -> None:
    ref, quant = pair
    out = ref.parent / "b.jsonl"
    line = ["branch", str(ref), "--quant", str(quant), "--root", ROOT, "-o", str(out)]
    done = CliRunner().invoke(cli, [*line, "--ref-server", servers[0].url])
    assert done.exit_code == 0, done.stderr
    assert set(held(pair)) == {Position.parse(ROOT)}
