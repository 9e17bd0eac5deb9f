"""What commands take: paths that name nothing, or something that is no file, are refused in one
line without waiting; chunks are written in one way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kldtui.cli import cli
from kldtui.cli.values import CHUNKS
from tests.builders import make_logits, make_stream, write_kld

SERVER = "http://127.0.0.1:1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a pair, and a pipe that nobody writes to."""
    stream = make_stream(3, 8, 16)
    write_kld(tmp_path / "ref.kld", stream, make_logits(stream, 1))
    write_kld(tmp_path / "quant.kld", stream, make_logits(stream, 2))
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def refused(folder: Path, line: str) -> str:
    """The one line that a command ends with, in time, in a program of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kldtui", *line.split(" ")],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "pipe --quant quant.kld",
        "stats pipe --quant quant.kld",
        "stats ref.kld --quant pipe",
        "flips ref.kld --quant quant.kld --tokenizer pipe",
        "labels pipe",
        "labels /dev/null",
        "open ref.kld --quant quant.kld --branches pipe",
        "open ref.kld --quant quant.kld --labels pipe",
        f"branch ref.kld --quant quant.kld --roots 1 --ref-server {SERVER} --yes -o pipe",
    ],
)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(folder: Path, line: str) -> None:
    assert "is no regular file" in refused(folder, line)


def test_a_pipe_beside_the_reference_is_no_vocabulary(folder: Path) -> None:
    (folder / "pipe").rename(folder / "model.gguf")
    done = CliRunner().invoke(
        cli, ["flips", str(folder / "ref.kld"), "--quant", str(folder / "quant.kld")]
    )
    assert done.exit_code == 0


@pytest.mark.parametrize("place", [".", "/", "..", "./"])
def test_a_folder_is_no_label_file(folder: Path, place: str) -> None:
    assert "is a folder" in refused(folder, f"ref.kld --quant quant.kld --labels {place}")
    assert "is a folder" in refused(folder, f"labels {place}")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["", "--quant", "q"], "REF"),
        (["r", "--quant", ""], "--quant"),
        (["r", "--quant", "q", "--labels", ""], "--labels"),
        (["r", "--quant", "q", "--floor", ""], "--floor"),
        (["r", "--quant", "q", "--branches", ""], "--branches"),
        (["stats", "", "--quant", "q"], "REF"),
        (["flips", "r", "--quant", ""], "--quant"),
        (["inspect", ""], "FILE"),
        (["labels", ""], "FILE"),
        (["answers", "a", ""], "QUANT"),
        (["scan", "r", "--quant", ""], "--quant"),
        (["scan", "r", "--quant", "q", "-o", ""], "'-o' / '--output'"),
        (["branch", "r", "--quant", "", "--root", "c0:t1"], "--quant"),
        (["floor", "r", "--against", ""], "--against"),
        (["floor", "r", "--quant", ""], "--quant"),
        (["r", "--quant-model", ""], "--quant-model"),
        (["record", "convert", "", "-o", "x"], "IN"),
        (["record", "score", "", "-o", "x"], "REF"),
        (["demo", "--labels", ""], "--labels"),
    ],
)
def test_an_empty_path_is_said_to_be_empty(words: list[str], option: str) -> None:
    done = CliRunner().invoke(cli, words, prog_name="kldtui")
    assert done.exit_code == 2
    assert option in done.stderr
    assert "the path is empty" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "chunks"),
    [("3", (3, 3)), ("0-9", (0, 9)), ("c0-c9", (0, 9)), (" c2-4 ", (2, 4)), ("5-5", (5, 5))],
)
def test_chunks_are_written_in_one_way(words: str, chunks: tuple[int, int]) -> None:
    assert CHUNKS.convert(words, None, None) == chunks


@pytest.mark.parametrize("words", ["", "-", "a-b", "1-", "-1", "2-1", "1-2-3", "9" * 5000])
def test_what_is_no_range_of_chunks_is_refused(words: str) -> None:
    with pytest.raises(click.BadParameter, match="no range of chunks"):
        CHUNKS.convert(words, None, None)


@pytest.mark.parametrize("start", [["stats"], ["flips"], ["scan"], ["open"]])
def test_a_floor_is_a_recording_of_its_own(folder: Path, start: list[str]) -> None:
    (folder / "link").symlink_to(folder / "quant.kld")
    for floor, whose in (("ref.kld", "the reference"), ("link", "the quant q4")):
        words = [*start, str(folder / "ref.kld"), "--quant", f"q4={folder / 'quant.kld'}"]
        done = CliRunner().invoke(cli, [*words, "--floor", str(folder / floor)])
        assert done.exit_code == 2
        assert done.stderr == (
            f"kldtui: --floor {folder / floor}: is the file of {whose}; a floor is the reference "
            "recorded again, with another micro-batch (-ub)\n"
        )


@pytest.mark.parametrize("more", ["", " -o out.idx"])
def test_chunks_that_are_not_there_are_refused_before_the_scan(folder: Path, more: str) -> None:
    words = refused(folder, f"scan ref.kld --quant quant.kld --chunks 3-9{more}")
    assert "ref.kld has no chunks 3-9; it has chunks 0-2" in words


@pytest.mark.parametrize("given", ["inf", "nan", "1e400", "-1"])
@pytest.mark.parametrize("option", ["--days", "--megabytes"])
def test_what_the_cache_is_pruned_by_is_a_finite_number(
    folder: Path, option: str, given: str
) -> None:
    assert option in refused(folder, f"cache prune {option} {given}")
