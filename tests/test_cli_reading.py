"""The headless commands as a person or a script meets them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kldtui.cli import COMMANDS, cli
from tests.builders import (
    Stream,
    cut,
    make_logits,
    make_stream,
    nan_record,
    record_of,
    write_kld,
)

Args = list[str | Path]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], prog_name="kldtui")


def run_json(*args: str | Path) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    stream = make_stream(3, 8, 16)
    return (
        write_kld(tmp_path / "ref.kld", stream, make_logits(stream, 1)),
        write_kld(tmp_path / "quant.kld", stream, make_logits(stream, 2)),
    )


# -- stats ---------------------------------------------------------------------------------------


def test_stats_of_the_real_pair_for_scripts(smollm2: Path) -> None:
    files = [smollm2 / f"{name}.kld" for name in ("ref", "q5_0", "q8_0")]
    found = run_json("stats", files[0], "--quant", files[1], "--quant", files[2])
    assert [each["quant"] for each in found] == ["q5_0", "q8_0"]
    five = found[0]
    assert (five["positions"], five["roots"], five["ties"], five["invalid"]) == (248, 40, 0, 0)
    assert five["mean_kld"] == pytest.approx(0.163419, rel=3e-3)
    assert five["same_top"] == pytest.approx(0.83871, abs=1e-5)
    assert five["ppl_quant"] == pytest.approx(11.071418, rel=3e-3)
    assert five["rms_dp"] == pytest.approx(0.10891, rel=3e-3)
    assert five["floor"] is None
    assert (five["near_tie"], five["near_tie_source"]) == (0.3, "default")


def test_a_measured_floor_sets_the_near_tie(smollm2: Path) -> None:
    args: Args = [smollm2 / "ref.kld", "--quant", smollm2 / "q5_0.kld"]
    floor: Args = ["--floor", smollm2 / "ref-ub32.kld"]
    found = run_json("stats", *args, *floor)
    assert len(found) == 1, "the floor is not a quant"
    assert found[0]["near_tie"] == pytest.approx(0.2177, abs=1e-3)
    assert found[0]["near_tie_source"] == "floor"
    assert found[0]["floor"]["roots"] == 7
    assert run_json("stats", *args, *floor, "--near-tie", "0.5")[0]["near_tie"] == 0.5
    text = run("stats", *args, *floor).output
    assert "the floor's 99th percentile" in text
    assert "floor 0.004496" in text


def test_an_index_file_has_its_floor_and_says_the_same_as_the_recordings(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    stream = make_stream(3, 8, 16)
    floor = write_kld(tmp_path / "again.kld", stream, make_logits(stream, 3))
    args: Args = [pair[0], "--quant", pair[1], "--floor", floor]
    index = tmp_path / "carried"
    assert run("scan", *args, "-o", index).exit_code == 0
    for words in (["stats"], ["flips"]):
        given, carried = run_json(*words, *args), run_json(*words, index)
        for each in (*given, *carried):
            each.pop("notes", None)
            (each.get("floor") or {}).pop("notes", None)
        assert carried == given
    assert run_json("stats", index)[0]["floor"]["roots"] > 0
    assert "not measured" not in run("stats", index).output


def test_flips_say_of_each_root_whether_the_floor_flips_there_too(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    stream = make_stream(3, 8, 16)
    floor = write_kld(tmp_path / "again.kld", stream, make_logits(stream, 3))
    args: Args = [pair[0], "--quant", pair[1]]
    alone = {(row["chunk"], row["t"]) for row in run_json("flips", pair[0], "--quant", floor)}
    rows = run_json("flips", *args, "--floor", floor)
    assert {row["floor_flips"] for row in rows} == {True, False}
    for row in rows:
        assert row["floor_flips"] == ((row["chunk"], row["t"]) in alone)
    assert {row["floor_flips"] for row in run_json("flips", *args)} == {None}
    printed = run("flips", *args, "--floor", floor).stdout
    assert printed.count("floor flips too") == sum(row["floor_flips"] for row in rows)


def test_stats_without_a_floor_say_how_to_measure_it(pair: tuple[Path, Path]) -> None:
    text = run("stats", pair[0], "--quant", pair[1]).output
    assert "--floor" in text
    assert text.startswith("quant against ref.kld")


def test_quants_are_named_by_the_user_or_by_their_files(pair: tuple[Path, Path]) -> None:
    ref, quant = pair
    twin = quant.rename(quant.with_name("q.v2.kld"))
    found = run_json("stats", ref, "--quant", twin, "--quant", f"Q5={twin}", "--quant", twin)
    assert [each["quant"] for each in found] == ["q.v2", "Q5", "q.v2-2"]
    result = run("stats", ref, "--quant", f"A={twin}", "--quant", f"A={twin}")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "two quants are named 'A'" in result.stderr
    odd = twin.rename(twin.with_name("a=b.kld"))
    assert run_json("stats", ref, "--quant", odd)[0]["quant"] == "a=b"


def test_a_wrong_partner_is_refused_in_one_line(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = make_stream(3, 8, 17)
    wrong = write_kld(tmp_path / "wrong.kld", other, make_logits(other))
    result = run("stats", pair[0], "--quant", wrong)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "kldtui: wrong.kld is not of the stream of ref.kld: n_vocab is 17, not 16\n"
    )


def test_a_shorter_quant_is_said_to_be_shorter(tmp_path: Path) -> None:
    stream = make_stream(5, 8, 16)
    short = Stream(stream.tokens[:2], 16)
    ref = write_kld(tmp_path / "ref.kld", stream, make_logits(stream))
    quant = write_kld(tmp_path / "quant.kld", short, make_logits(short))
    assert "compared over 2 of 5 chunks" in run("stats", ref, "--quant", quant).output
    found = run_json("stats", ref, "--quant", quant)[0]
    assert (found["chunks"], found["chunks_ref"], found["positions"]) == (2, 5, 6)
    assert found["notes"] == ["compared over 2 of 5 chunks"]


# -- flips ---------------------------------------------------------------------------------------


def test_flips_of_the_real_pair_carry_their_evidence(smollm2: Path) -> None:
    rows = run_json("flips", smollm2 / "ref.kld", "--quant", smollm2 / "q5_0.kld")
    assert len(rows) == 40
    assert [(r["chunk"], r["t"]) for r in rows] == sorted((r["chunk"], r["t"]) for r in rows)
    for row in rows:
        assert row["ref_id"] != row["quant_id"]
        assert row["cost"] == pytest.approx(row["ref_p_ref"] - row["ref_p_quant"], abs=1e-6)
        assert row["cost"] >= row["margin"] - 1e-6
        assert row["quant_p_quant"] >= row["quant_p_ref"]
        assert row["near_tie"] == (row["cost"] < 0.3)
        assert row["quant"] == "q5_0"
    assert rows[0] | {"ref_text": " Life", "quant_text": " the", "stream_text": " Life"} == rows[0]


@pytest.mark.parametrize("order", ["cost", "kld", "margin"])
def test_flips_are_sorted_row_by_row_over_all_quants(smollm2: Path, order: str) -> None:
    quants = [a for n in ("q5_0", "q8_0") for a in ("--quant", smollm2 / f"{n}.kld")]
    rows = run_json("flips", smollm2 / "ref.kld", *quants, "--sort", order)
    values = [row[order] for row in rows]
    assert values == sorted(values, reverse=True)
    assert {row["quant"] for row in rows} == {"q5_0", "q8_0"}
    assert len(rows) == 47


def test_flips_are_narrowed_by_cost_and_chunk(smollm2: Path) -> None:
    args: Args = ["flips", smollm2 / "ref.kld", "--quant", smollm2 / "q5_0.kld"]
    assert all(row["cost"] >= 1 for row in run_json(*args, "--min-cost", "1"))
    assert len(run_json(*args, "--min-cost", "1")) == 9
    assert {row["chunk"] for row in run_json(*args, "--chunk", "6")} == {6}
    assert sum(row["near_tie"] for row in run_json(*args, "--near-tie", "0.1")) == 4


def test_ties_and_moved_positions_are_lists_of_their_own(tmp_path: Path) -> None:
    stream = make_stream(1, 10, 4)
    plain, other = record_of([65535, 60000, 9, 0]), record_of([60000, 65535, 9, 0])
    tied, moved = record_of([65535, 65535, 9, 0]), record_of([65535, 9, 62000, 60000])
    ref = write_kld(tmp_path / "ref.kld", stream, records=[plain, tied, plain, plain])
    quant = write_kld(tmp_path / "quant.kld", stream, records=[other, other, moved, plain])
    args: Args = ["flips", ref, "--quant", quant]
    for option, ts, kind in (((), [6], "root"), (("--ties",), [7], "tie"), (("--moved",), [8], "")):
        rows = run_json(*args, *option)
        assert [row["t"] for row in rows] == ts
        assert kind in ("", rows[0]["kind"])
    assert run(*args, "--ties", "--moved").exit_code == 2
    for other_list in ("--ties", "--moved"):
        result = run(*args, other_list, "--min-cost", "3")
        assert result.exit_code == 2
        assert "--min-cost is for the roots" in result.stderr


def test_a_floored_quant_token_makes_the_cost_a_bound(tmp_path: Path) -> None:
    stream = make_stream(1, 4, 4)
    ref = write_kld(tmp_path / "ref.kld", stream, records=[record_of([65535, 60000, 9, 0])])
    quant = write_kld(tmp_path / "quant.kld", stream, records=[record_of([9, 9, 0, 65535])])
    assert run_json("flips", ref, "--quant", quant)[0]["ref_p_quant_is_bound"]
    assert "≥16.0" in run("flips", ref, "--quant", quant).output


def test_text_of_tokens_never_reaches_the_terminal_raw(tmp_path: Path, smollm2: Path) -> None:
    result = run("flips", smollm2 / "ref.kld", "--quant", smollm2 / "q5_0.kld")
    lines = result.output.splitlines()
    assert len(lines) == 41
    assert any("<0xE6 97> → <0xE9 9D>" in line for line in lines)
    assert any("␣Life → ␣the" in line for line in lines)
    assert not set(map(chr, range(32))) - {"\n"} & set(result.output)


def test_without_a_vocabulary_ids_are_shown_and_how_to_get_text_is_said(
    pair: tuple[Path, Path],
) -> None:
    result = run("flips", pair[0], "--quant", pair[1])
    assert result.exit_code == 0
    assert "#" in result.stdout
    assert "--tokenizer" in result.stderr
    assert run_json("flips", pair[0], "--quant", pair[1])[0]["ref_text"] is None


# -- inspect -------------------------------------------------------------------------------------


def test_inspect_of_a_whole_file(smollm2: Path) -> None:
    assert run_json("inspect", smollm2 / "ref.kld") == {
        "format": "kld",
        "version": 1,
        "n_ctx": 64,
        "n_vocab": 49152,
        "n_chunk": 8,
        "records": 248,
        "records_expected": 248,
        "complete": True,
        "problems": [],
    }


def test_inspect_says_what_is_wrong(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    records = [record_of([65535] + [0] * 15)] * 8 + [nan_record(16)]
    path = write_kld(tmp_path / "x.kld", stream, records=records)
    found = run_json("inspect", path)
    assert found["complete"]
    assert found["problems"] == ["1 record cannot be used: 1 NaN logits"]
    cut(path, stream.data_offset + 4 * stream.record_bytes + 6)
    found = run_json("inspect", path)
    assert (found["records"], found["records_expected"], found["complete"]) == (4, 9, False)
    assert "4 of 9 records" in found["problems"][0]
    cut(path, 12)
    found = run_json("inspect", path)
    assert (found["n_ctx"], found["n_vocab"], found["complete"]) == (8, None, False)
    text = run("inspect", path)
    assert text.exit_code == 0
    assert "n_vocab:          unknown" in text.output


def test_inspect_of_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad\x1b[31m\nname"
    path.write_text("hello")
    result = run("inspect", path)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr


def test_every_json_name_is_documented(pair: tuple[Path, Path]) -> None:
    doc = (Path(__file__).parents[1] / "docs" / "json.md").read_text()
    args: Args = [pair[0], "--quant", pair[1]]
    printed = [*run_json("stats", *args), *run_json("flips", *args), run_json("inspect", pair[0])]
    for name in {name for each in printed for name in each}:
        base = name.removesuffix("_error")
        assert f"`{name}`" in doc or (base != name and f"`{base}`" in doc), name


# -- the command line itself ---------------------------------------------------------------------


def test_every_command_is_listed_with_its_help() -> None:
    text = run("--help").output
    for name, (_, words) in COMMANDS.items():
        assert name in text
        assert words.split(".")[0][:40] in " ".join(text.split())


def test_a_mistyped_command_is_not_taken_for_a_file(pair: tuple[Path, Path]) -> None:
    result = run("stat", pair[0], "--quant", pair[1])
    assert result.exit_code == 2
    assert "did you mean stats?" in result.stderr


def test_open_is_meant_where_no_command_is_named(pair: tuple[Path, Path]) -> None:
    assert run("open", "--help").output == run(pair[0], "--help").output
    assert run("open", "--help").output == run("--quant", pair[1], "--help").output


def kldtui(*args: str | Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kldtui", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        **more,
    )


def test_a_terminal_without_our_glyphs_still_gets_everything(smollm2: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    args: Args = [smollm2 / "ref.kld", "--quant", smollm2 / "q5_0.kld"]
    for more in (["stats"], ["flips"], ["flips", "--json"]):
        out, err = kldtui(*more, *args, env=env, encoding="latin-1").communicate(timeout=60)
        assert err == ""
        assert "\\u2192" in out or "\\u0394p" in out or out.startswith("[")
    assert json.loads(out)[0]["ref_text"] == " Life"


def test_names_never_reach_the_terminal_raw(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    path = write_kld(tmp_path / "evil\x1b]0;x\x07.kld", stream, make_logits(stream))
    for command in ("stats", "flips"):
        result = run(command, path, "--quant", path)
        assert result.exit_code == 0
        assert "\x1b" not in result.output
        assert "\x07" not in result.output


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run("inspect", tmp_path / "pipe")
    assert result.exit_code == 2
    assert "no regular file" in result.stderr


def test_a_reader_that_goes_away_is_no_traceback(pair: tuple[Path, Path]) -> None:
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(
        [sys.executable, "-m", "kldtui", "stats", pair[0], "--quant", pair[1]],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode in (1, 141)


def test_a_terminal_sees_progress_and_ctrl_c_ends_the_scan_with_130(tmp_path: Path) -> None:
    # Unwritten records: minutes of scanning in a file that takes no space.
    stream = Stream(np.zeros((400, 512), np.int32), 150_000)
    path = write_kld(tmp_path / "long.kld", stream)
    os.truncate(path, stream.size)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kldtui", "stats", path, "--quant", path],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=Path(__file__).parents[1],
    )
    os.close(theirs)
    try:
        shown = b""
        while b"left" not in shown:
            shown += os.read(ours, 4096)
        assert re.search(rb"scanning \w+: \d+ % at [\d,]+ MB/s, [\d a-z]+ left", shown)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        rest = b""
        with contextlib.suppress(OSError):  # Linux: the other end of the terminal is closed
            while data := os.read(ours, 4096):
                rest += data
    finally:
        process.kill()
        os.close(ours)
    assert process.returncode == 130
    assert out == b""
    assert rest.endswith(b"\r\x1b[K"), "the line of progress is cleared"
    assert b"Traceback" not in rest


@pytest.mark.parametrize(
    "words",
    [
        ["stats"],
        ["flips", "x.kld", "--sort", "bad"],
        ["branch", "a.kld", "--quant", "b.kld", "--root", "c1:t1", "-n", "0"],
        ["stats", "x.kld", "--nonsense"],
        ["flips", "x.kld", "--moved", "--ties"],
        ["open"],
    ],
)
def test_a_wrong_usage_is_one_line(words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(r"[.?] See kldtui.* --help$", result.stderr.strip())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line(pair: tuple[Path, Path]) -> None:
    ref, quant = pair
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kldtui", "stats", str(ref), "--quant", str(quant)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "kldtui: No space left on device\n"


def test_a_pair_without_a_comparable_position_is_said_to_be_one(tmp_path: Path) -> None:
    stream = make_stream(2, 8, 16)
    ref = write_kld(tmp_path / "ref.kld", stream, make_logits(stream, 1))
    nan = write_kld(tmp_path / "nan.kld", stream, records=[nan_record(16)] * stream.records)
    result = run("stats", ref, "--quant", nan)
    assert result.exit_code == 0
    title, _, rest = result.stdout.partition("\n\n")
    assert title == "nan against ref.kld"
    assert rest.startswith("Nothing to compare")
    assert "nan" not in rest


def test_chunks_without_a_compared_position_are_not_counted(pair: tuple[Path, Path]) -> None:
    ref, quant = pair
    stream = make_stream(3, 8, 16)
    cut(quant, stream.data_offset + 2 * stream.record_bytes)
    found = run_json("stats", ref, "--quant", quant)[0]
    assert (found["chunks"], found["chunks_ref"], found["positions"]) == (1, 3, 2)


@pytest.mark.parametrize("words", [["--min-cost", "nan"], ["--near-tie", "inf"], ["--chunk", "99"]])
def test_amounts_and_chunks_that_cannot_be_are_refused(
    pair: tuple[Path, Path], words: list[str]
) -> None:
    result = run("flips", pair[0], "--quant", pair[1], *words)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_ctrl_c_while_the_program_is_being_loaded_ends_it_without_a_traceback() -> None:
    begin = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('kldtui', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", begin, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert process.stderr is not None
    for line in process.stderr:  # a line for each module that has been loaded
        if b" click.globals" in line:
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate(timeout=60)
    assert b"Traceback" not in rest
    assert out == b""
    assert process.returncode == -signal.SIGINT
