"""The quick way and the slow way, one thread and several, in any order: all fill the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.analysis import Kernels, NumpyKernels, load_fast
from kldtui.errors import StreamMismatch
from kldtui.index import Bound, Index, State, streams
from kldtui.index import index as index_module
from kldtui.index.passes import Worker
from kldtui.index.sweep import Sweep, sweep_or_worker
from kldtui.position import Position
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.kld import KldReader, KldRecording
from tests.builders import Stream, make_logits, make_stream, write_kld
from tests.builders_index import mixed_pair, plain_pair, same, scan_all, tied_pair


def slowly(recordings: list[Recording], kernels: Kernels | None = None) -> Index:
    """Filled a row at a time by the way that knows every kind of row."""
    index = Index(recordings[0], recordings[1:])
    worker = Worker(index, recordings[0], recordings[1:], kernels or NumpyKernels())
    numbers = range(len(index.pairs))
    for i in range(index.layout.n):
        worker.first(i, i + 1, numbers)
        worker.second(i, i + 1, numbers)
    return index


def all_same(one: Index, two: Index, near: float = 0.0) -> bool:
    tables = zip([one.ref, *one.pairs], [two.ref, *two.pairs], strict=True)
    return all(same(a, b, near) for a, b in tables)


@pytest.mark.parametrize("n_vocab", [40, 8197, 8200])
def test_the_quick_way_gives_what_the_slow_way_gives(tmp_path: Path, n_vocab: int) -> None:
    recordings = mixed_pair(tmp_path, n_vocab=n_vocab)
    made = sweep_or_worker(
        Index(recordings[0], recordings[1:]), recordings[0], recordings[1:], NumpyKernels()
    )
    assert isinstance(made, Sweep)
    slow = slowly(recordings)
    quick = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    assert all_same(slow, quick)
    states = quick.pairs[1]["state"]
    assert {int(s) for s in np.unique(states)} == {State.SCORED, State.INVALID, State.MISSING}
    assert (quick.pairs[0]["bounds"] & 64).any(), "rows that do not sum to 1 are marked"


@pytest.mark.parametrize("n_vocab", [40, 8200])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_rows_that_do_not_sum_to_1_are_marked_by_whichever_kernels_meet(
    tmp_path: Path, n_vocab: int, first: bool, second: bool
) -> None:
    """Compiled ones sum the quant's row on the first pass, numpy's on the second."""
    pytest.importorskip("numba")
    recordings = mixed_pair(tmp_path, n_vocab=n_vocab)
    index = Index(recordings[0], recordings[1:])
    scan_all(index, stages=["roots"], compiled=first)
    scan_all(index, stages=["rest"], compiled=second)
    for found, slow in zip(index.pairs, slowly(recordings).pairs, strict=True):
        assert not (found["bounds"] & Bound.UNWEIGHED).any()
        # Numpy's kernels see only the tokens that the reference counts.
        assert (found["bounds"] | Bound.MASS == slow["bounds"] | Bound.MASS).all()
        assert (found["bounds"] >= slow["bounds"]).all()
        assert found["kld"] == pytest.approx(slow["kld"], abs=1e-4, nan_ok=True)
        assert (slow["bounds"] & Bound.MASS).any()


@pytest.mark.parametrize("n_vocab", [40, 8200])
def test_all_ways_agree_on_what_is_a_tie(tmp_path: Path, n_vocab: int) -> None:
    recordings, kinds = tied_pair(tmp_path, n_vocab)
    ways = [
        slowly(recordings),
        scan_all(Index(recordings[0], recordings[1:]), compiled=False),
    ]
    fast = load_fast(tmp_path / "compiled")
    if fast is not None:
        ways += [slowly(recordings, fast), scan_all(Index(recordings[0], recordings[1:]))]
    for index in ways:
        assert (index.pairs[0]["state"] == State.SCORED).all()
        assert index.pairs[0]["kind"].tolist() == kinds


@pytest.mark.parametrize("kind", ["quick", "slow"])
def test_a_pass_takes_nothing_back_that_stands(tmp_path: Path, kind: str) -> None:
    """Another program, or what somebody waited for, may be ahead of the first pass."""
    recordings = plain_pair(tmp_path)
    index = Index(recordings[0], recordings[1:])
    ahead = [17, 18, 40]
    for i in ahead:
        index.scan_position(index.layout.position(i))
    stood = [table[ahead].tobytes() for table in (index.ref, *index.pairs)]
    if kind == "quick":
        scan_all(index, stages=["roots"], compiled=False)
    else:
        worker = Worker(index, recordings[0], recordings[1:], NumpyKernels())
        worker.first(0, index.layout.n, [0])
    assert (index.pairs[0]["state"] == State.SCORED).all()
    assert np.flatnonzero(index.pairs[0]["rest"]).tolist() == ahead
    assert [table[ahead].tobytes() for table in (index.ref, *index.pairs)] == stood


def test_two_threads_fill_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = mixed_pair(tmp_path, n_chunk=12)
    one = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 300)
    two = scan_all(Index(recordings[0], recordings[1:]), compiled=False, workers=3)
    assert all_same(one, two)


def test_an_error_in_a_thread_ends_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path, n_chunk=12)
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 300)
    real = KldReader.read

    def failing(reader: KldReader, first: int, count: int) -> Any:
        if first > 60:
            raise ValueError("no further")
        return real(reader, first, count)

    monkeypatch.setattr(KldReader, "read", failing)
    index = Index(recordings[0], recordings[1:])
    with pytest.raises(ValueError, match="no further"):
        scan_all(index, workers=2)
    assert (index.ref["state"][:50] == State.SCORED).any()


def test_roots_stand_everywhere_before_the_first_kld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path)
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(index_module, "_YIELD_SECONDS", 0)
    index = Index(recordings[0], recordings[1:])
    stages = []
    for progress in index.scan():
        stages.append(progress.stage)
        if progress.stage == "roots" and progress.done < progress.total:
            assert not index.pairs[0]["rest"].any()
        tables = (index.ref, *index.pairs)
        roots_stand = all((table["state"] != State.PENDING).all() for table in tables)
        assert roots_stand == (progress.done == progress.total or stages[-1] == "rest")
    assert stages == sorted(stages, key=["roots", "rest"].index)
    assert index.complete


def test_every_code_is_read_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = plain_pair(tmp_path)
    read: list[tuple[str, int]] = []
    real = KldReader.read

    def counted(reader: KldReader, first: int, count: int) -> Any:
        read.extend((reader._recording.path.name, i) for i in range(first, first + count))
        return real(reader, first, count)

    monkeypatch.setattr(KldReader, "read", counted)
    index = Index(recordings[0], recordings[1:])
    for stage in ("roots", "rest"):
        scan_all(index, stages=[stage])
        assert sorted(read) == sorted(
            (name, i) for name in ("ref.kld", "quant.kld") for i in range(index.layout.n)
        )
        read.clear()
    scan_all(index)
    assert not read


@pytest.mark.parametrize("kind", ["quick", "slow"])
def test_a_scan_in_this_process_stands_back_when_it_is_asked(tmp_path: Path, kind: str) -> None:
    make = plain_pair if kind == "quick" else mixed_pair
    recordings = make(tmp_path)
    index = Index(recordings[0], recordings[1:])
    began = time.monotonic()
    index.stand_back(0.2)
    for stage in ("roots", "rest"):
        scan_all(index, stages=[stage], compiled=False)
        assert time.monotonic() - began >= 0.2
        began = time.monotonic()
        index.stand_back(0.2)
    assert index.complete


def test_what_somebody_waits_for_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path)
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(index_module, "_YIELD_SECONDS", 0)
    index = Index(recordings[0], recordings[1:])
    scan = index.scan(compiled=False)
    next(scan)
    shown, listed = np.array([70, 41, 42]), np.array([60, 12, 81])
    index.prefer(shown, listed)
    next(scan)
    rest = index.pairs[0]["rest"]
    assert np.flatnonzero(rest).tolist() == [41, 42, 70]
    assert index.ref["state"][60] == State.PENDING, "the list waits for the second pass"
    for progress in scan:
        if progress.stage == "rest":
            break
    assert rest[listed].all()
    assert not rest[30:40].any()


def test_a_long_list_that_is_waited_for_does_not_hold_up_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path)
    index = scan_all(Index(recordings[0], recordings[1:]), stages=["roots"], compiled=False)
    spans, listed = list[int](), list[int]()
    second = Sweep.second

    def counted(sweep: Sweep, first: int, last: int, numbers: Any) -> None:
        spans.append(last - first)
        second(sweep, first, last, numbers)

    def slowly(worker: Any, found: list[tuple[int, int]]) -> None:
        if found:
            listed.append(len(found))
            time.sleep(0.05)

    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(Sweep, "second", counted)
    monkeypatch.setattr(index, "_fill_whole", slowly)
    every = np.arange(index.layout.n)
    for _ in index.scan(compiled=False, stages=["rest"]):
        index.prefer(every[:0], every[::2])
    assert len(spans) < index.layout.n / 4, "spans grow as ever"
    assert 0 < len(listed) < len(spans), "and the list has a part of the time, not all"


def test_only_some_chunks_are_scanned(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path)
    index = Index(recordings[0], recordings[1:])
    scan_all(index, chunks=(2, 4))
    per = index.layout.n // 6
    done = np.flatnonzero(index.pairs[0]["rest"]).tolist()
    assert done == list(range(2 * per, 4 * per))
    scan_all(index, chunks=(5, 99))
    assert np.flatnonzero(index.ref["state"]).max() == 6 * per - 1
    assert list(Index(recordings[0], recordings[1:]).scan(chunks=(3, 3))) == []


# -- long streams ---------------------------------------------------------------------------------


def differing_pair(folder: Path, chunk: int) -> tuple[Recording, Recording]:
    stream = make_stream(8, 16, 20)
    tokens = stream.tokens.copy()
    tokens[chunk, 5] = 19 - tokens[chunk, 5]
    ref = write_kld(folder / "ref.kld", stream, make_logits(stream, 1))
    quant = write_kld(folder / "quant.kld", Stream(tokens, 20), make_logits(stream, 2))
    return open_recording(ref), open_recording(quant)


def test_no_root_is_shown_of_a_chunk_whose_tokens_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_AT_OPEN", 16)
    monkeypatch.setattr(streams, "_AT_ONCE", 16)
    ref, quant = differing_pair(tmp_path, 4)
    index = Index(ref, [quant])
    index.scan_position(Position(3, 10))
    assert (index.ref["state"] == State.SCORED).sum() == 1
    with pytest.raises(StreamMismatch, match="token 5 of chunk 4"):
        index.scan_position(Position(4, 10))
    with pytest.raises(StreamMismatch, match="token 5 of chunk 4"):
        scan_all(index)
    assert (index.pairs[0]["state"] == State.SCORED).sum() == 1


@pytest.mark.parametrize("chunk", [0, 7])
def test_the_first_and_the_last_chunk_are_compared_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(streams, "_AT_OPEN", 16)
    monkeypatch.setattr(streams, "_AT_ONCE", 16)
    ref, quant = differing_pair(tmp_path, chunk)
    with pytest.raises(StreamMismatch, match=f"token 5 of chunk {chunk}"):
        Index(ref, [quant])


def test_opening_reads_no_more_of_a_longer_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_AT_OPEN", 1 << 12)
    monkeypatch.setattr(streams, "_AT_ONCE", 1 << 12)
    monkeypatch.setattr("kldtui.recordings.kld._TOKENS_AT_OPEN", 1 << 12)
    read = [0]
    real = KldRecording._read

    def counted(self: KldRecording, view: memoryview, offset: int) -> None:
        read[0] += len(view)
        real(self, view, offset)

    monkeypatch.setattr(KldRecording, "_read", counted)
    sizes = []
    for n_chunk in (300, 3000):
        stream = make_stream(n_chunk, 64, 4)
        paths = [write_kld(tmp_path / f"{n}.kld", stream, make_logits(stream)) for n in "ab"]
        read[0] = 0
        ref, quant = (open_recording(path) for path in paths)
        Index(ref, [quant])
        sizes.append(read[0])
    assert sizes[0] == sizes[1]


# -- recordings that grow -------------------------------------------------------------------------


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("ahead", ["ref", "quant"])
def test_a_recording_that_is_being_written_grows(tmp_path: Path, ahead: str) -> None:
    stream = make_stream(3, 16, 20)
    whole = {
        name: write_kld(tmp_path / f"whole-{name}", stream, make_logits(stream, seed)).read_bytes()
        for seed, name in enumerate(("ref", "quant"), 1)
    }
    cut = dict.fromkeys(whole, stream.data_offset + 5 * stream.record_bytes + 7)
    cut[ahead] += 6 * stream.record_bytes
    paths = {name: tmp_path / f"{name}.kld" for name in whole}
    for name, path in paths.items():
        path.write_bytes(whole[name][: cut[name]])
    ref, quant = open_recording(paths["ref"]), open_recording(paths["quant"])
    index = scan_all(Index(ref, [quant]))
    assert int((index.pairs[0]["state"] == State.SCORED).sum()) == 5
    assert not index.grow()
    for name, path in paths.items():
        append(path, whole[name][cut[name] :])
    assert index.grow()
    scan_all(index)
    assert index.layout.n == 21
    assert index.complete
    assert (index.pairs[0]["state"] == State.SCORED).all()
    assert index.notes == [[]]
    again = open_recording(paths["ref"]), [open_recording(paths["quant"])]
    expected = scan_all(Index(*again))
    assert all_same(index, expected)


def test_a_scan_that_follows_takes_in_what_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_POLL_SECONDS", 0.01)
    stream = make_stream(3, 16, 20)
    path = write_kld(tmp_path / "x.kld", stream, make_logits(stream))
    data = path.read_bytes()
    path.write_bytes(data[: stream.data_offset + 4 * stream.record_bytes])
    recording = open_recording(path)
    index, cancel = Index(recording, []), threading.Event()
    seen = []
    for progress in index.scan(cancel, follow=True):
        if progress.stage == "waiting" and progress.total not in seen:
            seen.append(progress.total)
            if len(seen) == 1:
                append(
                    path, data[path.stat().st_size : stream.data_offset + 9 * stream.record_bytes]
                )
            else:
                append(path, data[path.stat().st_size :])
    assert seen == [4, 9]
    assert index.layout.n == stream.records
    assert index.complete
