"""The `.kld` reader and writer: what a record holds, and every way a file can be broken."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kldtui.errors import (
    DamagedRecording,
    KldtuiError,
    NotARecording,
    RecordingChanged,
    RecordingError,
    UnsupportedRecording,
)
from kldtui.position import Position
from kldtui.recordings import describe, open_recording
from kldtui.recordings.base import Scratch
from kldtui.recordings.kld import HEADER_BYTES, KldRecording, decode
from kldtui.recordings.kld_writer import KldWriter, encode
from kldtui.rows import FullRow, FullRows, Invalid
from tests.builders import (
    NAN,
    Stream,
    cut,
    equal_record,
    header,
    log_softmax,
    make_logits,
    make_stream,
    nan_record,
    record,
    record_of,
    unwritten_record,
    write_kld,
    write_sparse,
)

INF = float("inf")


def all_rows(recording: KldRecording) -> NDArray[np.float32]:
    """Every row of a recording in order, float32[records, n_vocab]."""
    parts = [
        recording.rows(chunk, 0, len(recording.scored(chunk))).logp
        for chunk in range(recording.shape.n_chunk)
    ]
    return np.concatenate(parts)


def opened(path: Path) -> KldRecording:
    recording = open_recording(path)
    assert isinstance(recording, KldRecording)
    return recording


# -- what a record holds -------------------------------------------------------------------------

# A difference of 1e-38 is below what float32 can take steps of; no model gives one.
some_logit = st.floats(-60, 60, width=32).map(lambda x: x if abs(x) > 1e-6 else 0.0)
logit_rows = st.integers(1, 40).flatmap(lambda n: st.lists(some_logit, min_size=n, max_size=n))


@given(logit_rows, st.sampled_from([16.0, 24.0]))
@settings(deadline=None, max_examples=200)
def test_v1_rows_come_back_within_half_a_step_and_the_floor_is_the_records_own(
    row: list[float], spread: float
) -> None:
    logits = np.array([row], np.float32)
    if np.ptp(logits) == 0 and len(row) == 1:
        return  # one id with all the probability is written as an all-zero record
    rows = decode(encode(logits, 1, spread), len(row), 1)
    exact = log_softmax(logits)[0]
    assert rows.invalid[0] == Invalid.NO
    above = exact > exact.max() - spread + 1e-3
    step = spread / 65535
    assert np.abs(rows.logp[0] - exact)[above].max() <= 0.51 * step + 1e-5
    if np.ptp(logits) > spread + 1e-3:
        assert rows.floor[0] == pytest.approx(exact.max() - spread, abs=1e-4)
        assert (rows.logp[0][exact < exact.max() - spread - step] == rows.floor[0]).all()


@given(logit_rows, st.data())
@settings(deadline=None, max_examples=200)
def test_v2_rows_sum_to_one_and_know_exact_zeros(row: list[float], data: st.DataObject) -> None:
    logits = np.array([row], np.float32)
    masked = data.draw(st.sets(st.integers(0, len(row) - 1), max_size=len(row) - 1))
    logits[0, list(masked)] = -np.inf
    rows = decode(encode(logits, 2), len(row), 2)
    assert rows.invalid[0] == Invalid.NO
    assert np.exp(rows.logp[0].astype(float)).sum() == pytest.approx(1, abs=1e-5)
    assert {int(i) for i in np.flatnonzero(np.isneginf(rows.logp[0]))} == masked
    assert rows.floor[0] == -np.inf
    kept = [i for i in range(len(row)) if i not in masked]
    exact = log_softmax(logits[:, kept])[0]
    step = np.ptp(logits[0, kept]) / 65534
    assert np.abs(rows.logp[0, kept] - exact).max() <= step + 1e-4


def test_real_records_are_encoded_again_within_one_code(smollm2: Path) -> None:
    recording = opened(smollm2 / "ref.kld")
    rows = recording.rows(3, 4, 6)
    raw = np.fromfile(
        smollm2 / "ref.kld",
        "<u2",
        2 * recording.header.record_words,
        offset=recording.header.data_offset + 2 * recording.header.record_words * (3 * 31 + 4),
    ).reshape(2, -1)
    again = encode(rows.logp)
    assert np.abs(again[:, 4:].astype(int) - raw[:, 4:].astype(int)).max() <= 1


def test_real_rows_are_distributions_of_the_text(smollm2: Path) -> None:
    recording = opened(smollm2 / "ref.kld")
    assert recording.problems == ()
    rows = recording.rows(0, 0, 31)
    above = np.where(rows.logp > rows.floor[:, None], np.exp(rows.logp.astype(float)), 0)
    assert np.abs(above.sum(axis=1) - 1).max() < 0.01
    tokens = recording.tokens(0)
    stream = rows.logp[np.arange(31), tokens[33:]]
    assert np.exp(-stream.astype(float).mean()) == pytest.approx(2.79, abs=0.02)


def test_code_0_is_a_bound_in_v1_and_a_zero_in_v2(tmp_path: Path) -> None:
    stream = make_stream(1, 4, 4)
    one = opened(write_kld(tmp_path / "1.kld", stream, records=[record_of([65535, 9, 0, 0])]))
    row = one.row(Position(0, 3))
    assert isinstance(row, FullRow)
    assert [row.logp(i).bound for i in range(4) if row.logp(i)] == [False, False, True, True]  # type: ignore[union-attr]
    two = opened(
        write_kld(tmp_path / "2.kld", stream, records=[record_of([65535, 9, 0, 0])], version=2)
    )
    row = two.row(Position(0, 3))
    assert isinstance(row, FullRow)
    assert row.logp(2) == (-np.inf, False)


def test_odd_vocabulary_reads_every_record_in_place(tmp_path: Path) -> None:
    stream = make_stream(2, 9, 7)
    logits = make_logits(stream)
    recording = opened(write_kld(tmp_path / "odd.kld", stream, logits))
    assert recording.records == stream.records == 8
    assert np.abs(all_rows(recording) - log_softmax(logits)).max() < 3e-4


def test_positions_are_those_llama_perplexity_scores(tmp_path: Path) -> None:
    for n_ctx, ts in ((8, [5, 6, 7]), (9, [5, 6, 7, 8]), (3, [2])):
        stream = make_stream(2, n_ctx, 5)
        recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))
        assert recording.scored(1).tolist() == ts
        assert recording.row(Position(0, ts[0] - 1)) is None
        assert recording.row(Position(0, ts[-1] + 1)) is None
        assert recording.row(Position(2, ts[0])) is None
        last = recording.row(Position(1, ts[-1]))
        assert isinstance(last, FullRow)
        assert np.array_equal(last.logp_all, all_rows(recording)[-1])


def test_a_file_past_32_bits_gives_its_last_record(tmp_path: Path) -> None:
    stream = Stream(np.full((2, 16384), 7, np.int32), 151936)
    logits = make_logits(Stream(np.zeros((1, 3), np.int32), 151936))
    path = tmp_path / "long.kld"
    try:
        write_sparse(path, stream, stream.records - 1, encode(logits)[0])
    except OSError as error:  # pragma: no cover
        pytest.skip(f"no sparse files here: {error}")
    if path.stat().st_blocks * 512 > 1 << 30:  # pragma: no cover
        pytest.skip("no sparse files here")
    assert stream.size > 1 << 32
    recording = opened(path)
    assert recording.records == recording.records_expected == 2 * 8191
    row = recording.row(Position(1, 16383))
    assert isinstance(row, FullRow)
    exact = log_softmax(logits)[0]
    assert [token for token, _ in row.top(3)] == np.argsort(-exact)[:3].tolist()
    assert row.top(1)[0][1] == pytest.approx(exact.max(), abs=1e-3)
    before = recording.row(Position(1, 16382))
    assert before is not None
    assert before.invalid == Invalid.UNWRITTEN


def test_unusable_records_say_why(tmp_path: Path) -> None:
    stream = make_stream(3, 9, 6)
    good = record_of([65535, 3, 2, 1, 0, 0])
    records = [
        nan_record(6),
        record([0] * 6, 1e-4, NAN),
        record([1] * 6, NAN, -3.0),
        record([1] * 6, INF, -3.0),
        record([1] * 6, 1e-4, -INF),
        unwritten_record(6),
        record([5] * 6, 0.0, -3.0),
        record([5] * 6, -1e-4, -3.0),
        record([65535] * 6, 1e30, -3.0),
        equal_record(6),
        good,
        good,
    ]
    path = write_kld(tmp_path / "odd.kld", stream, records=records)
    recording = opened(path)
    found = [Invalid(int(i)) for c in range(3) for i in recording.rows(c, 0, 4).invalid]
    assert found == [
        *[Invalid.NOT_A_NUMBER] * 3,
        *[Invalid.INFINITE] * 2,
        Invalid.UNWRITTEN,
        *[Invalid.CONTRADICTORY] * 3,
        *[Invalid.NO] * 3,
    ]
    assert "9 records cannot be used: 1 never written" in " ".join(describe(path).problems)
    equal = recording.rows(2, 1, 2)
    assert np.allclose(equal.logp, -np.log(6), atol=1e-6)
    assert not np.isfinite(equal.floor[0]), "equal logits are values, not bounds"


def test_v2_without_any_finite_logit_is_invalid_and_one_finite_logit_is_certain() -> None:
    logits = np.full((2, 4), -np.inf, np.float32)
    logits[1, 2] = 3
    rows = decode(encode(logits, 2), 4, 2)
    assert rows.invalid.tolist() == [Invalid.INFINITE, Invalid.NO]
    assert rows.logp[1].tolist() == [-INF, -INF, 0, -INF]


def test_nan_logits_are_written_as_llama_does_and_read_as_invalid() -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[0, 3] = np.nan
    logits[1] = np.nan
    rows = decode(encode(logits), 5, 1)
    assert rows.invalid.tolist() == [Invalid.NOT_A_NUMBER] * 2


def test_writer_writes_what_the_reader_reads(tmp_path: Path) -> None:
    stream = make_stream(2, 8, 11)
    logits = make_logits(stream)
    for version in (1, 2):
        path = tmp_path / f"{version}.kld"
        with KldWriter(path, stream.tokens, stream.n_vocab, version) as writer:
            writer.write(logits[:4])
            writer.write(logits[4:])
            with pytest.raises(ValueError, match="0 are left"):
                writer.write(logits[:1])
        recording = opened(path)
        assert recording.version == version
        assert recording.problems == ()
        assert np.array_equal(recording.tokens(1), stream.tokens[1])
        assert np.abs(all_rows(recording) - log_softmax(logits)).max() < 5e-4


def test_writer_left_early_leaves_whole_records(tmp_path: Path) -> None:
    stream = make_stream(2, 8, 11)
    with KldWriter(tmp_path / "x.kld", stream.tokens, stream.n_vocab) as writer:
        writer.write(make_logits(stream)[:4])
    assert opened(tmp_path / "x.kld").records == 4


def test_writer_that_cannot_write_says_so_in_one_line(tmp_path: Path) -> None:
    stream = make_stream()
    with pytest.raises(RecordingError, match=r"no/x\.kld: cannot be written: No such file"):
        KldWriter(tmp_path / "no" / "x.kld", stream.tokens, stream.n_vocab)


# -- broken files --------------------------------------------------------------------------------


def test_a_cut_file_works_on_its_whole_records_and_says_how_many(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    logits = make_logits(stream)
    for whole in (1, 7):  # chunk 0 and chunk 2
        path = write_kld(tmp_path / f"{whole}.kld", stream, logits)
        cut(path, stream.data_offset + whole * stream.record_bytes + 11)
        recording = opened(path)
        assert recording.records == whole
        assert recording.records_expected == 9
        assert sum(len(recording.scored(c)) for c in range(3)) == whole
        assert f"holds {whole} of 9 records and 11 bytes of another" in recording.problems[0]
        assert np.abs(all_rows(recording) - log_softmax(logits)[:whole]).max() < 5e-4
        assert recording.row(Position(2, 7)) is None
        with pytest.raises(IndexError):
            recording.rows(2, 0, 3)


def test_tokens_without_records_open_and_can_be_read(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    recording = opened(write_kld(tmp_path / "tokens.kld", stream))
    assert (recording.records, recording.records_expected) == (0, 9)
    assert [recording.tokens(c).tolist() for c in range(3)] == stream.tokens.tolist()
    assert recording.scored(0).size == 0
    assert "0 of 9 records" in recording.problems[0]


def test_twelve_bytes_of_a_failed_run_are_named(tmp_path: Path) -> None:
    path = tmp_path / "failed.kld"
    path.write_bytes(b"_logits_" + struct.pack("<i", 512))
    with pytest.raises(DamagedRecording, match="only 12 bytes of its header"):
        open_recording(path)
    found = describe(path)
    assert (found.n_ctx, found.n_vocab, found.records_expected) == (512, None, None)
    assert not found.complete
    assert "record it again" in found.problems[0]


@given(st.integers(0, 400))
@settings(deadline=None, max_examples=120)
def test_any_cut_is_a_named_error_or_a_right_partial_reading(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    stream = make_stream(2, 8, 15)
    logits = make_logits(stream)
    path = tmp_path_factory.mktemp("cut") / "x.kld"
    write_kld(path, stream, logits)
    size = min(size, stream.size)
    cut(path, size)
    if size < stream.data_offset:
        with pytest.raises((DamagedRecording, NotARecording)):
            open_recording(path)
        return
    recording = opened(path)
    whole = (size - stream.data_offset) // stream.record_bytes
    assert recording.records == whole
    assert bool(recording.problems) == (size < stream.size)
    assert np.abs(all_rows(recording) - log_softmax(logits)[:whole]).max(initial=0) < 5e-4
    recording.close()


@pytest.mark.parametrize("bit", range(8 * 8, 8 * HEADER_BYTES))
def test_any_flipped_bit_of_the_header_is_noticed_and_yields_no_wrong_row(
    tmp_path: Path, bit: int
) -> None:
    stream = make_stream(4, 16, 300)
    logits = make_logits(stream)
    path = write_kld(tmp_path / "x.kld", stream, logits)
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    try:
        recording = opened(path)
    except KldtuiError:
        return
    assert recording.problems
    for chunk in range(recording.shape.n_chunk):
        rows = recording.rows(chunk, 0, len(recording.scored(chunk)))
        for i in np.flatnonzero(rows.invalid == Invalid.NO):
            above = rows.logp[i][rows.logp[i] > rows.floor[i]]
            strange = abs(np.exp(above.astype(float)).sum() - 1) > 0.05
            exact = log_softmax(logits)[chunk * stream.per_chunk + i]
            assert strange or np.abs(rows.logp[i][:300] - exact).max() < 1e-3


@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_of_the_magic_is_never_read_as_another_version(
    tmp_path: Path, bit: int
) -> None:
    stream = make_stream()
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises((NotARecording, UnsupportedRecording)):
        open_recording(path)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-8, 16, 2), "n_ctx -8"),
        ((8, 0, 2), "n_vocab 0"),
        ((8, 16, -1), "n_chunk -1"),
        ((2, 16, 2), "n_ctx 2"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1), "ends within its tokens"),
    ],
)
def test_absurd_headers_are_refused(
    tmp_path: Path, numbers: tuple[int, int, int], words: str
) -> None:
    path = tmp_path / "x.kld"
    path.write_bytes(b"_logits_" + struct.pack("<iii", *numbers) + bytes(500))
    with pytest.raises(DamagedRecording, match=words):
        open_recording(path)
    assert not describe(path).complete


def test_a_file_of_no_chunks_opens_with_nothing_in_it(tmp_path: Path) -> None:
    path = tmp_path / "x.kld"
    path.write_bytes(b"_logits_" + struct.pack("<iii", 8, 16, 0))
    recording = opened(path)
    assert recording.records_expected == 0
    assert recording.problems == ("holds no chunks",)


def test_tokens_outside_the_vocabulary_are_a_named_problem(tmp_path: Path) -> None:
    stream = make_stream(2, 8, 16)
    stream.tokens[1, 3] = 16
    stream.tokens[1, 5] = -1
    recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))
    assert recording.problems == ("2 tokens lie outside the vocabulary, the first at c1:t3",)


def test_bytes_after_the_last_record_are_a_named_problem(tmp_path: Path) -> None:
    stream = make_stream(2, 8, 16)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    with path.open("ab") as file:
        file.write(b"abc")
    recording = opened(path)
    assert recording.problems == ("3 bytes follow the last record that it promises",)
    assert recording.records == 6


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.kld"
    cases: list[tuple[bytes, type[KldtuiError], str]] = [
        (b"", NotARecording, "is empty"),
        (b"_logits", NotARecording, "only the first 7 bytes of a .kld file"),
        (b"_logits3" + bytes(40), UnsupportedRecording, "_logits3"),
        (b"GGUF" + bytes(40), UnsupportedRecording, "GGUF model"),
        (b"\x93NUMPY" + bytes(40), UnsupportedRecording, "NumPy"),
        (b"hello", NotARecording, "no recording that kldtui reads"),
    ]
    for data, error, words in cases:
        path.write_bytes(data)
        with pytest.raises(error, match=words):
            open_recording(path)
    with pytest.raises(RecordingError, match="No such file"):
        open_recording(tmp_path / "none")
    with pytest.raises(RecordingError, match="is a folder"):
        open_recording(tmp_path)


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    stream = make_stream()
    assert opened(write_kld(tmp_path / "a.json.gz", stream, make_logits(stream))).format == "kld"


# -- files that change while they are open -------------------------------------------------------


def test_a_file_cut_while_it_is_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    recording = opened(path)
    cut(path, stream.data_offset + stream.record_bytes)
    with pytest.raises(RecordingChanged, match="was cut from"):
        recording.rows(2, 0, 3)
    cut(path, 30)
    with pytest.raises(RecordingChanged, match="open it again"):
        recording.tokens(2)


def test_a_file_that_grows_while_it_is_open_keeps_what_it_had(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    logits = make_logits(stream)
    path = write_kld(tmp_path / "x.kld", stream, logits[:4])
    recording = opened(path)
    before = all_rows(recording)
    with path.open("ab") as file:
        file.write(encode(logits[4:]).tobytes())
    assert recording.records == 4
    assert np.array_equal(all_rows(recording), before)
    assert opened(path).records == 9


def test_a_file_written_anew_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    recording = opened(path)
    write_kld(path, stream, make_logits(stream, seed=9))
    os.utime(path, ns=(1, 1))
    with pytest.raises(RecordingChanged, match="written anew"):
        recording.rows(0, 0, 1)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_deleted_or_replaced_while_it_is_open_is_noticed(
    tmp_path: Path, replaced: bool
) -> None:
    stream = make_stream(2, 16, 20)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    other = write_kld(tmp_path / "y.kld", stream, make_logits(stream, 7))
    recording = open_recording(path)
    if replaced:
        other.rename(path)
    else:
        path.unlink()
    with pytest.raises(RecordingChanged, match="deleted or replaced"):
        recording.row(Position(0, 10))
    assert recording.tokens(0).tolist() == stream.tokens[0].tolist()
    recording.close()


def test_a_touched_file_is_the_same_file(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    recording = opened(path)
    os.utime(path, ns=(1, 1))
    assert len(recording.rows(0, 0, 1)) == 1


def test_short_and_interrupted_reads_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make_stream(3, 8, 16)
    logits = make_logits(stream)
    recording = opened(write_kld(tmp_path / "x.kld", stream, logits))
    real, calls = os.preadv, 0

    def preadv(fd: int, buffers: list[memoryview], offset: int, *rest: Any) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError
        return real(fd, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert np.abs(all_rows(recording) - log_softmax(logits)).max() < 5e-4
    assert calls > 100


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream()
    recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))

    def preadv(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(RecordingChanged, match="Input/output error"):
        recording.rows(0, 0, 1)


def test_a_closed_recording_says_so(tmp_path: Path) -> None:
    stream = make_stream()
    recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))
    recording.close()
    recording.close()
    with pytest.raises(RecordingError, match=r"x\.kld: has been closed"):
        recording.rows(0, 0, 1)


def test_closing_waits_for_a_read_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make_stream()
    logits = make_logits(stream)
    recording = opened(write_kld(tmp_path / "x.kld", stream, logits))
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        recording.close()
        os.close(os.open(tmp_path, os.O_RDONLY))  # would take the number if it were free
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    got = recording.rows(0, 0, 1).logp
    assert np.abs(got - log_softmax(logits)[:1]).max() < 5e-4


def test_threads_read_one_recording_at_once(tmp_path: Path) -> None:
    stream = make_stream(6, 32, 64)
    recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))
    expected = all_rows(recording)
    wrong: list[int] = []

    def read(seed: int) -> None:
        scratch = Scratch()
        rng = np.random.default_rng(seed)
        for _ in range(200):
            chunk, start = int(rng.integers(6)), int(rng.integers(10))
            rows = recording.rows(chunk, start, start + 5, scratch)
            at = chunk * stream.per_chunk + start
            if not np.array_equal(rows.logp, expected[at : at + 5]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_with_a_scratch_reuse_its_memory(tmp_path: Path) -> None:
    stream = make_stream(2, 16, 64)
    recording = opened(write_kld(tmp_path / "x.kld", stream, make_logits(stream)))
    scratch = Scratch()
    first: FullRows = recording.rows(0, 0, 4, scratch)
    second: FullRows = recording.rows(1, 0, 4, scratch)
    assert np.shares_memory(first.codes, second.codes)
    assert not np.shares_memory(recording.rows(0, 0, 4).codes, second.codes)


def test_header_bytes_are_where_the_builder_puts_them() -> None:
    assert len(header(make_stream())) == HEADER_BYTES
