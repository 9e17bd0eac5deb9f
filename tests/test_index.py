"""The scan: every position once, resumable, cancellable, and never a flip that is none."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kldtui.errors import RecordingChanged, StreamMismatch
from kldtui.index import Bound, Index, Kind, Layout, State, check_streams
from kldtui.index import index as index_module
from kldtui.position import Position
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.recordings.kld import KldReader
from kldtui.recordings.kld_writer import encode
from kldtui.rows import TopRow, TopRows
from tests.builders import (
    Stream,
    cut,
    equal_record,
    make_logits,
    make_stream,
    nan_record,
    record_of,
    unwritten_record,
    write_kld,
)
from tests.test_analysis import top_rows


class MemoryRun:
    """A top-N recording in memory: some positions, each with its k best."""

    format, version, full = "kldtui-run", 1, False
    problems: tuple[str, ...] = ()
    made = Made()

    def __init__(
        self,
        stream: Stream,
        logp: NDArray[np.floating],
        k: int,
        leave_out: frozenset[int] = frozenset(),
    ) -> None:
        """logp [records, n_vocab] in the order of the positions; `leave_out` are flat indices."""
        self.path = Path("memory.gguf-run")
        self.shape = StreamShape(stream.n_ctx, stream.n_vocab, stream.n_chunk)
        self.pieces: dict[int, bytes] = {}
        self.engine: dict[str, Any] = {}
        self._stream, self._logp, self._k, self._out = stream, logp, k, leave_out
        self.records = stream.records - len(leave_out)
        self.records_expected = stream.records

    def _held(self, chunk: int) -> list[int]:
        size = self._stream.per_chunk
        return [i for i in range(chunk * size, (chunk + 1) * size) if i not in self._out]

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return {}

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        return np.asarray(self._stream.tokens[chunk])

    def scored(self, chunk: int) -> NDArray[np.int32]:
        size = self._stream.per_chunk
        return np.array([i % size + self._stream.first_t for i in self._held(chunk)], np.int32)

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> TopRows:
        held = self._held(chunk)[start:stop]
        ts = self.scored(chunk)[start:stop]
        return top_rows(self._logp[held], self._k, self.tokens(chunk)[ts].tolist())

    def row(self, position: Position) -> TopRow | None:
        raise NotImplementedError

    def close(self) -> None: ...


def scanned(ref: Recording, *quants: Recording, **options: Any) -> Index:
    index = Index(ref, quants)
    for _ in index.scan(**options):
        pass
    assert index.complete
    return index


def pair_of_files(
    tmp_path: Path, stream: Stream, *, quant: Stream | None = None
) -> tuple[Recording, Recording]:
    a = write_kld(tmp_path / "ref.kld", stream, make_logits(stream, 1))
    b = write_kld(tmp_path / "quant.kld", quant or stream, make_logits(quant or stream, 2))
    return open_recording(a), open_recording(b)


# -- layout --------------------------------------------------------------------------------------


def test_layout_goes_from_index_to_position_and_back() -> None:
    ts = [np.array(t, np.int32) for t in ([5, 6, 7], [], [2, 9], [5])]
    layout = Layout(ts)
    assert layout.n == 6
    expected = [(0, 5), (0, 6), (0, 7), (2, 2), (2, 9), (3, 5)]
    for i, (chunk, t) in enumerate(expected):
        assert layout.position(i) == Position(chunk, t)
        assert layout.index(Position(chunk, t)) == i
    for chunk, t in ((0, 4), (0, 8), (1, 5), (2, 5), (4, 5), (-1, 5)):
        assert layout.index(Position(chunk, t)) is None
    assert layout.chunk_slice(2) == slice(3, 5)
    for i in (-1, 6):
        with pytest.raises(IndexError):
            layout.position(i)


# -- streams -------------------------------------------------------------------------------------


def test_streams_that_differ_are_refused_with_the_first_difference(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream))
    tokens = stream.tokens.copy()
    tokens[1, 4] = 15 - tokens[1, 4]
    cases = [
        (make_stream(3, 10, 16), "n_ctx is 10, not 8"),
        (Stream(stream.tokens, 17), "n_vocab is 17, not 16"),
        (
            Stream(tokens, 16),
            f"token 4 of chunk 1 is {tokens[1, 4]}, not {stream.tokens[1, 4]}",
        ),
    ]
    for other, words in cases:
        quant = open_recording(write_kld(tmp_path / "quant.kld", other))
        with pytest.raises(StreamMismatch, match=words) as caught:
            Index(ref, [quant])
        assert "quant.kld" in str(caught.value)
        assert "ref.kld" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_shorter_quant_is_compared_over_the_common_chunks(tmp_path: Path) -> None:
    stream = make_stream(5, 8, 16)
    short = Stream(stream.tokens[:2], 16)
    ref, quant = pair_of_files(tmp_path, stream, quant=short)
    assert check_streams(ref, quant) == 2
    index = scanned(ref, quant)
    assert index.common_chunks == [2]
    assert index.notes == [["compared over 2 of 5 chunks"]]
    assert (index.pairs[0]["state"][:6] == State.SCORED).all()
    assert (index.pairs[0]["state"][6:] == State.MISSING).all()
    back = scanned(quant, ref)
    assert back.notes == [["compared over 2 of the quant's 5 chunks"]]
    assert (back.pairs[0]["state"] == State.SCORED).all()


def test_a_cut_quant_is_compared_over_its_whole_records(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref, _ = pair_of_files(tmp_path, stream)
    cut(tmp_path / "quant.kld", stream.data_offset + 4 * stream.record_bytes + 3)
    index = scanned(ref, open_recording(tmp_path / "quant.kld"))
    assert (index.pairs[0]["state"] == State.SCORED).sum() == 4
    assert (index.pairs[0]["state"] == State.MISSING).sum() == 5
    assert index.notes[0][0].startswith("quant.kld: holds 4 of 9 records")


def test_a_reference_without_records_has_no_positions(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream))
    quant = open_recording(write_kld(tmp_path / "quant.kld", stream, make_logits(stream)))
    index = scanned(ref, quant)
    assert index.layout.n == 0


# -- columns -------------------------------------------------------------------------------------


def test_real_pairs_have_the_roots_that_llama_perplexity_counts(smollm2: Path) -> None:
    ref = open_recording(smollm2 / "ref.kld")
    quants = [open_recording(smollm2 / f"{n}.kld") for n in ("q5_0", "q8_0", "ref-ub32")]
    index = scanned(ref, *quants)
    assert index.layout.n == 248
    assert [int((pair["kind"] == Kind.ROOT).sum()) for pair in index.pairs] == [40, 7, 7]
    assert not any((pair["kind"] == Kind.TIE).any() for pair in index.pairs)
    assert not any(pair["bounds"].any() for pair in index.pairs)
    for pair, kld in zip(index.pairs, (0.163419, 0.008323, 0.004496), strict=True):
        assert pair["kld"].astype(float).mean() == pytest.approx(kld, rel=3e-3)


def test_odd_records_are_counted_and_never_a_flip(tmp_path: Path) -> None:
    stream = make_stream(1, 16, 4)
    good, other = record_of([65535, 9, 9, 0]), record_of([9, 65535, 9, 0])
    tied = record_of([65535, 65535, 9, 0])
    refs = [good, nan_record(4), good, unwritten_record(4), good, tied, equal_record(4)]
    quants = [other, other, nan_record(4), other, unwritten_record(4), other, other]
    index = scanned(
        open_recording(write_kld(tmp_path / "ref.kld", stream, records=refs)),
        open_recording(write_kld(tmp_path / "quant.kld", stream, records=quants)),
    )
    scored, invalid = State.SCORED, State.INVALID
    states = [scored, invalid, invalid, invalid, invalid, scored, scored]
    assert index.pairs[0]["state"].tolist() == states
    kinds = index.pairs[0]["kind"][np.array(states) == scored]
    assert kinds.tolist() == [Kind.ROOT, Kind.TIE, Kind.TIE]
    assert index.ref["state"].tolist() == [scored, invalid, scored, invalid, scored, scored, scored]
    assert index.ref["ref_id"][[1, 3]].tolist() == [-1, -1]
    assert index.pairs[0]["quant_id"].tolist() == [1, 1, -1, 1, -1, 1, 1]
    assert np.isnan(index.pairs[0]["kld"]).tolist() == [state == invalid for state in states]


@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_in_the_head_of_a_record_is_noticed_or_harmless(
    tmp_path: Path, bit: int
) -> None:
    stream = make_stream(2, 8, 40)
    logits = make_logits(stream)
    good = encode(logits)
    bad = good.copy()
    bad.view(np.uint8).reshape(len(bad), -1)[3, bit // 8] ^= 1 << bit % 8
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, logits))
    quant = open_recording(write_kld(tmp_path / "quant.kld", stream, records=list(bad)))
    pair = scanned(ref, quant).pairs[0]
    assert (np.delete(pair["kld"], 3) == 0).all(), "the other records are read as they are"
    invalid = pair["state"][3] == State.INVALID
    marked = bool(pair["bounds"][3] & Bound.MASS)
    assert invalid or marked or abs(pair["kld"][3]) < 0.1


def test_all_quants_share_one_pass_over_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make_stream(4, 8, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    read: list[tuple[int, int]] = []
    real = KldReader.read

    def counted(reader: KldReader, first: int, count: int) -> Any:
        if reader._recording is ref:
            read.append((first, first + count))
        return real(reader, first, count)

    monkeypatch.setattr(KldReader, "read", counted)
    index = scanned(ref, quant, ref, quant)
    assert sum(last - first for first, last in read) == 2 * (12 + 12)  # ref is also a quant
    assert np.array_equal(index.pairs[0], index.pairs[2])
    assert (index.pairs[1]["kld"] == 0).all()


@pytest.mark.parametrize("block_bytes", [1, 4 * 16 * 2, 1 << 20])
def test_the_size_of_a_block_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    stream = make_stream(4, 12, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    whole = scanned(ref, quant)
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", block_bytes)
    again = scanned(ref, quant)
    assert np.array_equal(whole.pairs[0], again.pairs[0])
    assert np.array_equal(whole.ref, again.ref)


def test_one_position_can_be_scanned_ahead_of_the_rest(tmp_path: Path) -> None:
    stream = make_stream(4, 12, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    index = Index(ref, [quant])
    index.scan_position(Position(2, 9))
    index.scan_position(Position(2, 3))  # context only: nothing to scan
    at = index.layout.index(Position(2, 9))
    assert np.flatnonzero(index.pairs[0]["state"] == State.SCORED).tolist() == [at]
    whole = scanned(ref, quant, compiled=False)
    assert at is not None
    assert index.pairs[0][at] == whole.pairs[0][at]
    for _ in index.scan(compiled=False):
        pass
    assert np.array_equal(index.pairs[0], whole.pairs[0])


def test_a_cancelled_scan_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(index_module, "_YIELD_SECONDS", 0)
    stream = make_stream(4, 12, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    index, cancel, done = Index(ref, [quant]), threading.Event(), []
    for progress in index.scan(cancel):
        done.append(progress)
        if progress.done == 7:
            cancel.set()
    assert (index.pairs[0]["state"] == State.SCORED).tolist() == [True] * 7 + [False] * 13
    assert not index.complete
    rest = list(index.scan())
    assert (rest[0].first, rest[-1].done, rest[-1].total) == (7, 20, 20)
    assert index.complete
    assert list(index.scan()) == []
    for before, after in itertools.pairwise(done):
        assert after.first == before.last


def test_a_file_cut_under_a_scan_keeps_what_was_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(index_module, "_YIELD_SECONDS", 0)
    monkeypatch.setattr("kldtui.index.work._GROWTH", 1)
    stream = make_stream(4, 12, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    index = Index(ref, [quant])
    scan = index.scan()
    for _ in range(5):
        next(scan)
    cut(tmp_path / "quant.kld", stream.data_offset + 5 * stream.record_bytes)
    with pytest.raises(RecordingChanged, match=r"quant\.kld"):
        list(scan)
    assert (index.pairs[0]["state"] == State.SCORED).sum() == 5


def test_columns_are_whole_wherever_their_mark_says_so(tmp_path: Path) -> None:
    stream = make_stream(40, 32, 64)
    ref, quant = pair_of_files(tmp_path, stream)
    expected = scanned(ref, quant, compiled=False).pairs[0]
    index, torn = Index(ref, [quant]), []
    pair, finished = index.pairs[0], threading.Event()

    def watch() -> None:
        while not finished.is_set():
            for mark, column in (("state", "quant_id"), ("rest", "kld")):
                done = pair[mark] == 1
                if not np.array_equal(pair[column][done], expected[column][done]):
                    torn.append(column)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(0, index.layout.n, 7):
        index.scan_position(index.layout.position(i))
    for _ in index.scan(compiled=False):
        pass
    finished.set()
    watcher.join()
    assert not torn


# -- top-N recordings ----------------------------------------------------------------------------


def test_runs_and_files_compare_in_all_four_ways(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    exact = scanned(ref, quant).pairs[0]
    logp = [np.concatenate([r.rows(c, 0, 3).logp for c in range(3)]) for r in (ref, quant)]
    small_ref, small_quant = (MemoryRun(stream, each, 5) for each in logp)
    for a, b in ((ref, small_quant), (small_ref, quant), (small_ref, small_quant)):
        got = scanned(a, b).pairs[0]
        assert (got["kind"] == exact["kind"]).all()
        assert (got["quant_id"] == exact["quant_id"]).all()
        assert (got["bounds"] & Bound.KLD != 0).all()
        assert (got["kld"] <= exact["kld"] + 1e-3).all()
        assert np.allclose(got["quant_stream"], exact["quant_stream"], atol=1e-6)


def test_positions_a_run_left_out_are_missing(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref, quant = pair_of_files(tmp_path, stream)
    exact = scanned(ref, quant).pairs[0]
    logp = np.concatenate([quant.rows(c, 0, 3).logp for c in range(3)])
    run = MemoryRun(stream, logp, 16, frozenset({1, 3, 4, 5, 8}))
    index = scanned(ref, run)
    missing = index.pairs[0]["state"] == State.MISSING
    assert np.flatnonzero(missing).tolist() == [1, 3, 4, 5, 8]
    assert (index.pairs[0]["quant_id"][~missing] == exact["quant_id"][~missing]).all()
    assert np.isnan(index.pairs[0]["kld"][missing]).all()
