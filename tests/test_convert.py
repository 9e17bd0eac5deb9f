"""From files, pipes and answers to runs: what is kept, what is exact, and how it goes on."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kldtui import convert as convert_module
from kldtui.cli import cli
from kldtui.cli.recording import show_progress
from kldtui.convert import Conversion, Progress, Wanted, best_ids
from kldtui.errors import DamagedRecording, RecordingError, StreamMismatch
from kldtui.facts import is_rollout
from kldtui.index import Bound, Index, Kind, State
from kldtui.position import Position
from kldtui.recordings import Recording, open_quant, open_recording
from kldtui.recordings.kld import HEADER_BYTES, decode, parse_header
from kldtui.recordings.kld_stream import KldStream
from kldtui.recordings.kld_writer import encode, record_of
from kldtui.recordings.run import RunRecording, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.report import runs_of
from kldtui.report.diverging import divergence_of
from kldtui.rows import FullRow, TopRow
from kldtui.vocab import NONE, Vocabulary, from_pieces
from tests import builders
from tests import builders_foreign as make
from tests.builders import (
    Stream,
    cut,
    equal_record,
    make_logits,
    make_stream,
    nan_record,
    write_kld,
)
from tests.builders_foreign import Model, write_lines

STREAM = make_stream(n_chunk=4, n_ctx=12, n_vocab=61, seed=3)
TOP = Wanted(top_n=5)
COMMAND = [sys.executable, "-m", "kldtui", "record", "convert"]
ROOT = str(Path(__file__).parents[1])
files = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Recording, Recording]:
    """A reference and a quant with a floor that is reached."""
    first = make_logits(STREAM, 1, spread=6.0)
    logits = [first, first + make_logits(STREAM, 2)]
    ref, quant = (
        open_recording(write_kld(tmp_path / f"{name}.kld", STREAM, each))
        for name, each in zip(("ref", "quant"), logits, strict=True)
    )
    return ref, quant


def converted(
    source: Recording,
    out: Path,
    wanted: Wanted = TOP,
    *,
    ref: Recording | None = None,
    vocab: Vocabulary = NONE,
) -> RunRecording:
    for _ in Conversion(source, out, wanted, ref=ref, vocab=vocab).run():
        pass
    return open_run(out)


def scanned(ref: Recording, *quants: Recording) -> Index:
    index = Index(ref, quants)
    for _ in index.scan():
        pass
    return index


def assert_same_kld(found: Any, expected: Any) -> None:
    """Compiled loops add in another order than those that the conversion uses."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], prog_name="kldtui")


# -- what is kept ----------------------------------------------------------------------------------


def test_a_run_says_of_each_position_what_the_file_says(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    found = converted(quant, tmp_path / "q.gguf-run", ref=ref)
    assert found.whole
    assert found.problems == ()
    assert found.header["top_n"] == 5
    for chunk in range(4):
        assert found.tokens(chunk).tolist() == quant.tokens(chunk).tolist()
        assert found.scored(chunk).tolist() == quant.scored(chunk).tolist()
        for t in found.scored(chunk).tolist():
            row, whole = found.row(Position(chunk, t)), quant.row(Position(chunk, t))
            mine = ref.row(Position(chunk, t))
            assert isinstance(row, TopRow)
            assert isinstance(whole, FullRow)
            assert isinstance(mine, FullRow)
            assert row.top(9) == whole.top(5)
            # The stream's and the reference's token are there wherever they lie, bounds as bounds.
            for token in (int(quant.tokens(chunk)[t]), mine.top(1)[0][0]):
                assert row.logp(token) == whole.logp(token)


def test_the_exact_kld_goes_along_and_roots_stay_what_they_are(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    mailed = [
        converted(ref, tmp_path / "ref.gguf-run"),
        converted(quant, tmp_path / "q.gguf-run", ref=ref),
    ]
    exact = scanned(ref, quant).pairs[0]
    assert (exact["kld_floored"] > 0).any()
    for index in (scanned(ref, mailed[1]), scanned(*mailed)):
        found = index.pairs[0]
        for name in ("state", "kind", "quant_id"):
            assert found[name].tolist() == exact[name].tolist(), name
        for name in ("kld", "kld_floored", "kld_more"):
            assert_same_kld(found[name], exact[name])
        assert not (found["bounds"] & Bound.KLD).any()
        assert found["quant_stream"].tolist() == exact["quant_stream"].tolist()
        floored = [columns["bounds"] & Bound.QUANT_STREAM for columns in (found, exact)]
        assert floored[0].tolist() == floored[1].tolist()


def test_without_a_pair_the_kld_is_a_bound_as_before(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    found = scanned(ref, converted(quant, tmp_path / "q.gguf-run")).pairs[0]
    assert (found["bounds"] & Bound.KLD).all()


def test_whole_rows_are_kept_at_roots_and_nowhere_else(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    wanted = Wanted(top_n=5, full=frozenset({"roots"}))
    out = tmp_path / "q.gguf-run"
    found = converted(quant, out, wanted, ref=ref)
    index = scanned(ref, quant)
    roots = index.pairs[0]["kind"] == Kind.ROOT
    assert 0 < roots.sum() < len(roots)
    for i, root in enumerate(roots):
        position = index.layout.position(i)
        row, whole = found.row(position), quant.row(position)
        assert isinstance(whole, FullRow)
        if root:
            assert isinstance(row, FullRow)
            assert row.logp_all.tolist() == whole.logp_all.tolist()
            assert row.floor == whole.floor
        else:
            assert isinstance(row, TopRow)
    schema = json.loads((Path(__file__).parents[1] / "docs" / "run.schema.json").read_text())
    for line in out.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)


def test_whole_rows_are_kept_inside_tool_calls(tmp_path: Path) -> None:
    text = [
        b"Hi",
        b"! ",
        b'{"',
        b"name",
        b'": "f", "',
        b"arguments",
        b'": {',
        b"}}",
        b" done",
        b" .",
    ]
    tokens = np.array([[0, 1, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9]], np.int32)
    stream = Stream(tokens, 10)
    source = open_recording(write_kld(tmp_path / "q.kld", stream, make_logits(stream)))
    wanted = Wanted(top_n=3, full=frozenset({"tool-calls"}))
    vocab = from_pieces(dict(enumerate(text)), "test")
    found = converted(source, tmp_path / "q.gguf-run", wanted, vocab=vocab)
    kinds = [isinstance(found.row(Position(0, t)), FullRow) for t in found.scored(0).tolist()]
    assert kinds == [True, True, True, False, False]  # t 7 to 9 end the call
    assert found.pieces[3] == b"name"
    with pytest.raises(RecordingError, match="--tokenizer"):
        Conversion(source, tmp_path / "x", wanted, vocab=NONE)
    with pytest.raises(RecordingError, match="--against"):
        Conversion(source, tmp_path / "x", Wanted(full=frozenset({"roots"})), vocab=NONE)


def test_odd_records_stay_odd(tmp_path: Path) -> None:
    """Invalid rows, an all-way tie, and more ties for the best than the list is long."""
    stream = make_stream(1, 12, 8)
    codes = [65535] * 4 + [9, 9, 0, 0]
    records = [
        nan_record(8),
        equal_record(8),
        builders.record_of(codes),
        nan_record(8),
        nan_record(8),
    ]
    quant = open_recording(write_kld(tmp_path / "q.kld", stream, records=records))
    logits = make_logits(stream)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, logits))
    run_ = converted(quant, tmp_path / "q.gguf-run", Wanted(top_n=2), ref=ref)
    index = scanned(ref, quant, run_)
    exact, found = index.pairs
    assert found["state"].tolist() == exact["state"].tolist()
    assert found["kind"].tolist() == exact["kind"].tolist()
    assert_same_kld(found["kld"][1:3], exact["kld"][1:3])


def test_an_infinite_kld_stays_infinite(tmp_path: Path) -> None:
    """An exact zero of a `_logits2` file where the reference has some probability."""
    stream = make_stream(1, 6, 5)
    logits = make_logits(stream)
    zero = logits.copy()
    zero[0, 3] = -np.inf
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, logits, version=2))
    quant = open_recording(write_kld(tmp_path / "q.kld", stream, zero, version=2))
    wanted = Wanted(top_n=2, full=frozenset({"roots"}))
    found = scanned(ref, converted(quant, tmp_path / "q.gguf-run", wanted, ref=ref)).pairs[0]
    assert np.isinf(found["kld"][0])
    assert np.isfinite(found["kld"][1])


def test_only_the_chunks_that_were_asked_for(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    found = converted(quant, tmp_path / "q", Wanted(top_n=5, chunks=(1, 2)), ref=ref)
    assert found.whole
    assert [found.scored(c).size for c in range(4)] == [0, 5, 5, 0]
    index = scanned(ref, quant, found)
    assert (
        index.pairs[1]["state"].tolist()
        == [State.MISSING] * 5 + [State.SCORED] * 10 + [State.MISSING] * 5
    )
    for wrong in ((3, 4), (2, 1)):
        with pytest.raises(RecordingError, match="has chunks 0 to 3"):
            Conversion(quant, tmp_path / "x", Wanted(chunks=wrong), vocab=NONE)


def test_a_wrong_partner_is_refused_before_anything_is_written(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    other = make_stream(n_chunk=4, n_ctx=12, n_vocab=61, seed=4)
    ref = open_recording(write_kld(tmp_path / "other.kld", other, make_logits(other)))
    result = run("record", "convert", pair[1].path, "-o", tmp_path / "x", "--against", ref.path)
    assert result.exit_code == 2
    assert "is not of the stream of" in result.output
    assert not (tmp_path / "x").exists()
    with pytest.raises(StreamMismatch):
        Conversion(pair[1], tmp_path / "x", TOP, ref=ref, vocab=NONE)


@files
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 12), st.booleans())
def test_the_best_are_those_of_the_whole_row(codes: list[int], n: int, zeros: bool) -> None:
    row = builders.record_of([*codes, 65535])
    rows = decode(row[None].copy(), len(codes) + 1, 2 if zeros else 1)
    ids = best_ids(rows, 0, n)
    whole = rows.row(0)
    above = [(id, value) for id, value in whole.top(n) if value > -np.inf]
    if not zeros:
        above = [(id, value) for id, value in above if value > whole.floor]
    assert ids.tolist() == [id for id, _ in above]


@pytest.mark.parametrize("version", [1, 2])
def test_a_record_is_made_back_from_its_row(version: int) -> None:
    records = encode(make_logits(STREAM, 7), version)
    rows = decode(records.copy(), STREAM.n_vocab, version)
    for i in range(3):
        back = record_of(rows, i)
        again = decode(back[None].copy(), STREAM.n_vocab, version)
        assert again.logp[0] == pytest.approx(rows.logp[i], abs=1e-5)
        if version == 1:
            assert back.tobytes() == records[i].tobytes()


# -- pipes -----------------------------------------------------------------------------------------


def write_slowly(path: Path, data: bytes, step: int = 977) -> threading.Thread:
    """Write as a program would that computes in between."""

    def write() -> None:
        with path.open("wb") as pipe:
            for start in range(0, len(data), step):
                pipe.write(data[start : start + step])
                pipe.flush()

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_pipe_gives_the_same_run_as_the_file(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    wanted = Wanted(top_n=5, full=frozenset({"roots"}))
    converted(quant, tmp_path / "a", wanted, ref=ref)
    os.mkfifo(tmp_path / "quant-pipe")
    thread = write_slowly(tmp_path / "quant-pipe", quant.path.read_bytes())
    stream = KldStream(str(tmp_path / "quant-pipe"))
    converted(stream, tmp_path / "b", wanted, ref=ref)
    stream.close()
    thread.join()
    lines = [(tmp_path / name).read_text().splitlines() for name in "ab"]
    assert lines[0][1:] == lines[1][1:]


def _cuts(quant: Recording) -> list[int]:
    """Where a pipe may end: at each record but the last, after it, and in its middle."""
    header = parse_header(quant.path.read_bytes()[:HEADER_BYTES])
    assert header is not None
    record = 2 * header.record_words
    return [header.data_offset + record * k // 2 for k in range(2 * STREAM.records)]


def test_a_pipe_that_ends_early_keeps_what_came_and_goes_on_as_if_it_had_not(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    vocab = Vocabulary({id: b"w%d" % id for id in range(STREAM.n_vocab)}, "test")
    whole = quant.path.read_bytes()
    pipe, once = tmp_path / "pipe", tmp_path / "once"
    converted(quant, once, ref=ref, vocab=vocab)
    os.mkfifo(pipe)
    for end in _cuts(quant):
        out = tmp_path / f"q{end}"
        for data in (whole[:end], whole):
            thread = write_slowly(pipe, data)
            stream = KldStream(str(pipe))
            if data is whole:
                converted(stream, out, ref=ref, vocab=vocab)
            else:
                with pytest.raises(DamagedRecording, match="ended before the last"):
                    converted(stream, out, ref=ref, vocab=vocab)
                assert open_run(out).records < STREAM.records
            stream.close()
            thread.join()
        lines = [path.read_text().splitlines() for path in (out, once)]
        assert lines[0][1:] == lines[1][1:], f"cut at {end}"


@pytest.mark.parametrize("length", [0, 7, 11, 19, 40])
def test_a_pipe_that_ends_before_its_records_is_named(
    tmp_path: Path, pair: tuple[Recording, Recording], length: int
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = write_slowly(pipe, pair[1].path.read_bytes()[:length])
    with pytest.raises(RecordingError) as caught:
        KldStream(str(pipe))
    assert str(pipe) in str(caught.value)
    thread.join()


def test_standard_input_serves(tmp_path: Path, pair: tuple[Recording, Recording]) -> None:
    ref, quant = pair
    command = [*COMMAND, "-", "-o", str(tmp_path / "q")]
    done = subprocess.run(
        [*command, "--against", str(ref.path)],
        input=quant.path.read_bytes(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "q").whole
    assert open_run(tmp_path / "q").header["source"]["name"] == "standard input"
    other = subprocess.run(command, input=b"GGUF....", capture_output=True)
    assert other.returncode == 2
    assert b"no .kld file" in other.stderr


def test_no_more_than_a_block_is_held(
    tmp_path: Path, pair: tuple[Recording, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_BLOCK_BYTES", 2 * 61 * 2)
    asked = []
    ref, quant = pair
    rows = type(quant).rows

    def counted(self: Any, chunk: int, start: int, stop: int, scratch: Any = None) -> Any:
        asked.append(stop - start)
        return rows(self, chunk, start, stop, scratch)

    monkeypatch.setattr(type(quant), "rows", counted)
    converted(quant, tmp_path / "a", ref=ref)
    assert max(asked) == 2


# -- stopping and going on -------------------------------------------------------------------------


@files
@given(part=st.floats(0, 1), gz=st.booleans(), data=st.data())
def test_stopped_anywhere_it_ends_as_in_one_go(
    tmp_path_factory: pytest.TempPathFactory, part: float, gz: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("go")
    ref, quant = (
        open_recording(write_kld(folder / f"{seed}.kld", STREAM, make_logits(STREAM, seed)))
        for seed in (1, 2)
    )
    vocab = make.vocabulary(61)
    wanted = Wanted(top_n=3, full=frozenset({"roots"}), compress=gz)
    once, out = folder / "once", folder / "out"
    converted(quant, once, wanted, ref=ref, vocab=vocab)
    text = once.read_bytes()
    out.write_bytes(
        text[: max(len(text.split(b"\n", 1)[0]) + 1 if not gz else 0, int(part * len(text)))]
    )
    if gz and not _readable(out):
        return
    converted(quant, out, wanted, ref=ref, vocab=vocab)
    ours, theirs = (gzip.decompress(p.read_bytes()) if gz else p.read_bytes() for p in (out, once))
    assert ours == theirs
    # And again: nothing is left to do.
    job = Conversion(quant, out, wanted, ref=ref, vocab=vocab)
    for _ in job.run():
        pass
    assert job.positions == 0


def _readable(path: Path) -> bool:
    try:
        open_run(path).close()
    except RecordingError:
        return False
    return True


def test_a_run_that_was_stopped_before_its_first_line_is_begun(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    (tmp_path / "q").touch()
    assert converted(pair[1], tmp_path / "q").whole


def test_what_is_no_run_is_left_as_it_is(tmp_path: Path, pair: tuple[Recording, Recording]) -> None:
    out = tmp_path / "notes"
    out.write_text("mine\n")
    with pytest.raises(RecordingError, match="exists and is no run;"):
        converted(pair[1], out)
    assert out.read_text() == "mine\n"


def test_another_recording_is_not_gone_on_with(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    out = tmp_path / "q"
    converted(quant, out, Wanted(top_n=5), ref=ref)
    cut(out, int(out.stat().st_size * 0.7))
    before = out.read_bytes()
    other = open_recording(write_kld(tmp_path / "o.kld", STREAM, make_logits(STREAM, 9)))
    cases: list[tuple[Recording, Wanted, Recording | None, str]] = [
        (other, Wanted(top_n=5), ref, "made from another recording"),
        (quant, Wanted(top_n=6), ref, "begun with --top-n 5, not with --top-n 6;"),
        (quant, Wanted(top_n=5, chunks=(0, 1)), ref, "without --chunks, not with --chunks 0-1;"),
        (quant, Wanted(top_n=5), None, r"with --against \S+\.kld \(\w+\), not without --against;"),
        (
            quant,
            Wanted(top_n=5, full=frozenset({"roots"})),
            ref,
            "without --full, not with --full roots;",
        ),
    ]
    for source, wanted, against, words in cases:
        with pytest.raises(RecordingError, match=words):
            converted(source, out, wanted, ref=against)
        assert _lines(out.read_bytes()) == _lines(before)


def _lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def test_it_stops_when_told_to_and_what_is_written_is_a_run(
    tmp_path: Path, pair: tuple[Recording, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_YIELD_SECONDS", 0.0)
    monkeypatch.setattr(convert_module, "_BLOCK_BYTES", 1)
    cancel = threading.Event()
    seen = []
    job = Conversion(pair[1], tmp_path / "q", TOP, ref=pair[0], vocab=NONE)
    for progress in job.run(cancel):
        seen.append((progress.done, progress.total))
        if progress.done == 7:
            cancel.set()
    assert seen == [(n, 20) for n in range(1, 8)]
    held = open_run(tmp_path / "q")
    assert held.records == 7
    assert not held.whole


def test_interrupted_on_the_command_line_it_says_how_to_go_on(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [*COMMAND, str(pipe), "-o", str(tmp_path / "q")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    data = write_kld(tmp_path / "q.kld", STREAM, make_logits(STREAM)).read_bytes()
    with pipe.open("wb") as writer:
        writer.write(data[:-600])
        writer.flush()
        deadline = time.monotonic() + 20
        out = tmp_path / "q"
        while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"the same command goes on from here" in error
    assert open_run(tmp_path / "q").header["kind"] == "teacher_forced"


@pytest.mark.parametrize("source", ["pipe", "-"])
def test_a_pipe_that_nobody_writes_to_is_said_to_be_waited_for(tmp_path: Path, source: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [*COMMAND, source, "-o", "q"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    with process:
        assert process.stderr is not None
        hangs = threading.Timer(20, process.kill)
        hangs.start()
        name = {"-": "standard input"}.get(source, source)
        words = f"kldtui: {name}: waiting for a program that writes a .kld file to it"
        assert process.stderr.readline().decode().startswith(words)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        hangs.cancel()
    assert process.returncode == 130
    assert not (tmp_path / "q").exists()


# -- answers of servers ----------------------------------------------------------------------------


def test_answers_become_a_run_of_their_own(tmp_path: Path) -> None:
    model = Model.of(make_stream(2, 16, 24, seed=5), 2)
    path = write_lines(tmp_path / "a.jsonl", (make.vllm(model, c) for c in range(2)))
    source = open_recording(path)
    with pytest.raises(RecordingError, match="how large the vocabulary is"):
        converted(source, tmp_path / "x")
    vocab = Vocabulary(dict(enumerate(make.pieces_of(24))), "test", n_vocab=24)
    found = converted(source, tmp_path / "q", Wanted(top_n=4), vocab=vocab)
    assert (found.made.kind, found.shape.n_vocab, found.engine["model"]) == (
        "teacher_forced",
        24,
        "org/tiny",
    )
    for t in source.scored(1).tolist():
        mine, theirs = found.row(Position(1, t)), source.row(Position(1, t))
        assert isinstance(mine, TopRow)
        assert isinstance(theirs, TopRow)
        assert mine.top(4) == theirs.top(4)
        token = int(source.tokens(1)[t])
        assert mine.logp(token) == theirs.logp(token)
    assert found.pieces[7] == b" w7"


def test_answers_beside_a_reference_become_a_run_of_its_stream(tmp_path: Path) -> None:
    stream = make_stream(3, 16, 24, seed=5)
    stream = Stream(np.maximum(stream.tokens, 4), 24)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, Model.of(stream, 1).logits))
    model = Model.of(stream, 2)
    path = write_lines(tmp_path / "a.jsonl", (make.chat(model, c) for c in (2, 1)))
    beside = open_quant(path, ref, lambda: make.vocabulary(24))
    found = converted(beside, tmp_path / "q", ref=ref, vocab=make.vocabulary(24))
    assert found.shape == ref.shape
    assert [found.scored(c).size for c in range(3)] == [0, 7, 7]
    index = scanned(ref, beside, found)
    for name in ("state", "kind", "quant_id", "kld"):
        np.testing.assert_array_equal(index.pairs[0][name], index.pairs[1][name])
    assert (index.pairs[1]["bounds"][7:] & Bound.KLD).all()


def test_a_run_of_a_run_keeps_what_was_measured(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    ref, quant = pair
    first = converted(quant, tmp_path / "a", Wanted(top_n=8), ref=ref)
    second = converted(first, tmp_path / "b", Wanted(top_n=3), ref=ref)
    index = scanned(ref, first, second)
    assert index.pairs[1]["kld"].tolist() == index.pairs[0]["kld"].tolist()
    assert not (index.pairs[1]["bounds"] & Bound.KLD).any()


TOLD: list[dict[str, Any]] = [
    {"turns": [[4, 12]], "tags": [["user", 0, 4], ["call", 6, 9]], "tools": 0, "stop": "eog"},
    {"turns": [[3, 7], [8, 12]], "source": {"line": 9}, "sample": 1, "seed": 7},
]
TOOLS = [[{"type": "function", "function": {"name": "f"}}]]


def drawn_run(ref: Recording, path: Path) -> RunRecording:
    """Rollouts that were drawn, of a model that reads BOS, with all that a run can say of them."""
    with RunWriter.create(
        path,
        kind="rollout",
        n_ctx=12,
        n_vocab=61,
        add_bos=True,
        bos_id=5,
        fields={"sampling": {"temperature": 0.7, "seed": 7, "repeat": 1}, "tools": TOOLS},
    ) as writer:
        for chunk, fields in enumerate(TOLD):
            writer.chunk(ref.tokens(chunk), prompt_length=4 - chunk, fields=fields)
            for t in range(4 - chunk, 12):
                row = [(int(ref.tokens(chunk)[t]), -0.1), (60, -4.0)]
                writer.position(Position(chunk, t), row if row[0][0] != 60 else row[:1])
    return open_run(path)


def test_a_run_of_a_run_says_all_that_was_said_of_its_text(
    tmp_path: Path, pair: tuple[Recording, Recording]
) -> None:
    """Text that was drawn stays so: FDT and SDT are not named for it; turns stay turns."""
    first = drawn_run(pair[0], tmp_path / "a.run")
    second = converted(first, tmp_path / "b.run", Wanted(top_n=3))
    assert second.made == first.made
    assert [second.chunk_fields(c) for c in (0, 1)] == [first.chunk_fields(c) for c in (0, 1)]
    for run in (first, second):
        index = scanned(run, run)
        assert (index.drawn, is_rollout(index)) == (True, False)
        found = divergence_of(index, 0, runs_of(index, run)).to_json()
        assert found["fdt"] is None
        assert (found["first_flip"]["unit"], found["first_flip"]["runs"]) == ("turn", 3)
    again = converted(first, tmp_path / "b.run", Wanted(top_n=3))
    assert again.header == second.header, "and it is gone on with as the same"


# -- the command and the real pair -----------------------------------------------------------------


def test_the_real_pair_gives_the_same_statistics_as_runs(smollm2: Path, tmp_path: Path) -> None:
    ref, quant = smollm2 / "ref.kld", smollm2 / "q5_0.kld"
    cases: list[tuple[Path, Path, list[str | Path]]] = [
        (ref, tmp_path / "ref.gguf-run", []),
        (quant, tmp_path / "q5.gguf-run", ["--against", ref, "--full", "roots", "--gzip"]),
    ]
    for source, out, more in cases:
        result = run("record", "convert", source, "-o", out, *more)
        assert result.exit_code == 0, result.output
    assert "exact KLD at 248 of them" in result.output
    assert "whole rows at 40 of them" in result.output
    found = []
    for pair_ in ((ref, quant), (tmp_path / "ref.gguf-run", tmp_path / "q5.gguf-run")):
        result = run("stats", pair_[0], "--quant", pair_[1], "--json")
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)[0])
    for name in found[0]:
        if name not in ("quant", "notes"):
            assert_close(found[1][name], found[0][name], name)
    assert (tmp_path / "ref.gguf-run").stat().st_size < quant.stat().st_size / 50


def test_progress_has_rate_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_progress(iter([Progress(5, 20, 2.4e6, 64.2), Progress(20, 20, 0.0, None)]), "converting")
    shown = capsys.readouterr().err
    assert "converting: 5 of 20 positions (25 %) at 2 MB/s, 1 min 5 s left" in shown
    assert "20 of 20 positions (100 %)\x1b[K" in shown
    assert shown.endswith("\r\x1b[K")


def assert_close(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_close(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for i, value in enumerate(expected):
            assert_close(found[i], value, f"{name}[{i}]")
    elif isinstance(expected, int | float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    else:
        assert found == expected, name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--full", "roofs"], "'roofs' is not one of roots, tool-calls"),
        (["--chunks", "5-2"], "no range of chunks"),
        (["--full", "roots"], "--against REF"),
    ],
)
def test_wrong_options_are_refused_in_words(
    tmp_path: Path, pair: tuple[Recording, Recording], args: list[str], words: str
) -> None:
    result = run("record", "convert", pair[1].path, "-o", tmp_path / "x", *args)
    assert result.exit_code == 2
    assert words in result.output
    assert not (tmp_path / "x").exists()
