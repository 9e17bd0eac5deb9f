"""Runs that were stopped go on, and what is written is on disk."""

from __future__ import annotations

import errno
import gzip
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kldtui.errors import (
    DamagedRecording,
    RecordingError,
)
from kldtui.position import Position
from kldtui.recordings import run_sink
from kldtui.recordings.run_writer import RunWriter
from tests.builders_run import (
    AT,
    CHUNK,
    POSITION,
    Plan,
    any_run,
    contents,
    contents_of,
    first_member,
    folder,
    opened,
    plans,
    small_run,
    written,
)


@any_run
@given(plans(), st.data(), st.booleans())
def test_a_stopped_recording_goes_on(plan: Plan, data: st.DataObject, compress: bool) -> None:
    with folder() as tmp:
        path = written(tmp, plan, compress)
        whole = path.read_bytes()
        least = first_member(whole) if compress else whole.index(b"\n")
        os.truncate(path, data.draw(st.integers(least, len(whole))))
        with RunWriter.append(path) as writer:
            plan.write(writer)
        with opened(path) as run:
            assert run.problems == ()
            assert contents(run) == plan.expected()
        if not compress:
            assert path.read_bytes() == whole


def test_a_plain_run_is_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.position(AT, [(4, -0.5)])
        assert contents_of(path).positions[AT].top == {4: -0.5}


def test_a_gzip_run_is_on_disk_member_by_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_sink, "MEMBER_BYTES", 100)
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20, compress=True) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.position(AT, [(4, -0.5)])
        assert not contents_of(path).positions
        writer.position(Position(0, 2), [(4, -0.5)])
        assert len(contents_of(path).positions) == 2
        writer.position(Position(0, 1), [(4, -0.5)])
        writer.flush()
        assert len(contents_of(path).positions) == 3
    gzip.decompress(path.read_bytes())


def test_members_of_another_programs_making_are_read_and_gone_on_with(tmp_path: Path) -> None:
    """They may end in mid-line, or with half a line, and be followed by zeros."""
    text = small_run(tmp_path / "plain", POSITION, n_positions=2).read_bytes()
    path = tmp_path / "run"
    path.write_bytes(gzip.compress(text[:130]) + gzip.compress(text[130:]) + bytes(50))
    with RunWriter.append(path) as writer:
        writer.position(Position(0, 2), [(4, -0.5)])
    with opened(path) as run:
        assert (run.records, run.problems) == (2, ())
    assert bytes(50) not in path.read_bytes()
    path.write_bytes(gzip.compress(text[:130]) + gzip.compress(text[130:-9]))
    with RunWriter.append(path) as writer:
        writer.position(Position(0, 2), [(4, -0.5)])
        writer.position(AT, [(4, -0.5)])
    with opened(path) as run:
        assert (run.records, run.problems) == (2, ())


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20):
        with pytest.raises(RecordingError, match="another program is recording"):
            RunWriter.append(path)
        with pytest.raises(RecordingError, match="exists already"):
            RunWriter.create(path, n_ctx=4, n_vocab=20)
    RunWriter.append(path).close()


@pytest.mark.parametrize("compress", [False, True])
def test_a_full_disk_leaves_whole_lines(
    compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path, n_ctx=4, n_vocab=20, compress=compress)
    writer.chunk(CHUNK["tokens"])
    writer.flush()
    write = os.write
    wrote: list[int] = []

    def full(fd: int, data: memoryview) -> int:
        if wrote:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote.append(write(fd, data[:5]))
        return 5

    def add() -> None:
        writer.position(AT, [(4, -0.5)])
        writer.flush()

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordingError, match="No space left"):
            add()
    with opened(path) as run:
        assert (run.records, run.problems) == (0, ())
    writer.position(AT, [(4, -0.5)])
    writer.close()
    with opened(path) as run:
        assert run.records == 1


def test_the_writer_refuses_what_the_reader_would_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.pieces({3: b"\xe6"})
        before = path.read_bytes()
        with pytest.raises(RecordingError, match=r"c0:t3: .*above 0"):
            writer.position(AT, [(4, 0.5)])
        with pytest.raises(RecordingError, match="JSON"):
            writer.position(AT, [(4, math.inf)])
        with pytest.raises(RecordingError, match="id twice"):
            writer.position(AT, [(4, -1.0), (4, -1.0)])
        with pytest.raises(RecordingError, match="c1:t3: its chunk is not declared"):
            writer.position(Position(1, 3), [(4, -0.5)])
        with pytest.raises(RecordingError, match="t is not from 1 to 3"):
            writer.position(Position(0, 4), [(4, -0.5)])
        with pytest.raises(RecordingError, match="more than n_ctx 4"):
            writer.chunk([1] * 5)
        with pytest.raises(RecordingError, match="id 3 is stored"):
            writer.pieces({3: b"a"})
        assert path.read_bytes() == before
        assert not writer.has(AT)
    with pytest.raises(RecordingError, match="closed"):
        writer.chunk(CHUNK["tokens"])
    with pytest.raises(RecordingError, match="n_vocab"):
        RunWriter.create(tmp_path / "other", n_ctx=4, n_vocab=0)
    assert not (tmp_path / "other").exists()


def test_a_damaged_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", "nonsense", POSITION)
    before = path.read_bytes()
    with pytest.raises(DamagedRecording, match="line 3"):
        RunWriter.append(path)
    assert path.read_bytes() == before
