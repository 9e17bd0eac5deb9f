"""Processes that fill an index together: the same columns, whatever becomes of one of them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from kldtui.errors import RecordingChanged
from kldtui.index import Index, Keeper
from kldtui.index import index as index_module
from kldtui.index.crew import Crew
from kldtui.recordings import Recording
from tests.builders_index import kept_index, mixed_pair, plain_pair, same, scan_all


def hire(recordings: list[Recording], folder: Path, count: int = 2) -> tuple[Index, Crew]:
    """An index and a crew that is ready for it."""
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    crew = index.crew(count, compiled=False, after=0)
    assert crew is not None
    assert all(member.is_ready(60) for member in crew.members)
    return index, crew


def test_a_crew_fills_what_one_process_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 300)
    recordings = mixed_pair(tmp_path, n_chunk=12)
    index, crew = hire(recordings, tmp_path / "crew")
    with crew:
        scan_all(index, crew=crew)
    assert index.complete
    alone = kept_index(recordings, tmp_path / "alone")
    for one, two in zip([index.ref, *index.pairs], [alone.ref, *alone.pairs], strict=True):
        assert same(one, two)
    index.close()
    again = Index(recordings[0], recordings[1:], Keeper(tmp_path / "crew"))
    assert again.complete, "what a crew filled is kept"
    for table in (again.ref, *again.pairs):
        table.verify()
    assert again.complete, "and its checksums hold"


def test_where_a_process_is_killed_this_one_goes_on(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path)
    index, crew = hire(recordings, tmp_path / "kept")
    with crew:
        scan_all(index, crew=crew, stages=["roots"])
        for member in crew.members:
            assert member.process is not None
            os.kill(member.process.pid, signal.SIGKILL)
        scan_all(index, crew=crew)
    assert index.complete
    alone = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    assert same(index.pairs[0], alone.pairs[0])


def test_a_crew_stands_back_when_it_is_asked(tmp_path: Path) -> None:
    index, crew = hire(plain_pair(tmp_path), tmp_path / "kept")
    with crew:
        for stage in ("roots", "rest"):
            began = time.monotonic()
            index.stand_back(0.2)
            scan_all(index, crew=crew, stages=[stage])
            assert time.monotonic() - began >= 0.2
        assert index.complete


def test_a_crew_scans_where_there_is_no_place_to_ask_it_to_stand_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    index, crew = hire(plain_pair(tmp_path), tmp_path / "kept", 1)
    with crew:
        index.stand_back(0.05)
        scan_all(index, crew=crew)
    assert index.complete


def test_a_file_cut_under_a_crew_is_named(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path)
    index, crew = hire(recordings, tmp_path / "kept")
    with crew:
        os.truncate(tmp_path / "quant.kld", 2000)
        with pytest.raises(RecordingChanged, match=r"quant\.kld"):
            scan_all(index, crew=crew)


def test_a_file_replaced_before_the_crew_opens_it_is_named(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path)
    index = Index(recordings[0], recordings[1:], Keeper(tmp_path / "kept"))
    (tmp_path / "other").mkdir()
    plain_pair(tmp_path / "other", n_chunk=5)
    (tmp_path / "other" / "quant.kld").rename(tmp_path / "quant.kld")
    crew = index.crew(1, compiled=False, after=0)
    assert crew is not None
    with crew, pytest.raises(RecordingChanged, match="open it again"):
        crew.members[0].is_ready(60)


def test_where_processes_cannot_help_none_is_started(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path)
    assert Index(recordings[0], recordings[1:]).crew(2, after=0) is None, "in memory alone"
    index = Index(recordings[0], recordings[1:], Keeper(tmp_path / "kept"))
    crew = index.crew(2)
    assert crew is not None
    with crew:
        scan_all(index, crew=crew)
        assert index.complete
        assert [member.process for member in crew.members] == [None, None], "it was done at once"


def test_until_a_process_is_ready_and_if_it_never_is_this_one_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.index.crew._CHILD", [sys.executable, "-c", "raise SystemExit(1)"])
    recordings = plain_pair(tmp_path)
    index = Index(recordings[0], recordings[1:], Keeper(tmp_path / "kept"))
    crew = index.crew(1, compiled=False, after=0)
    assert crew is not None
    with crew:
        assert not crew.members[0].is_ready(60)
        scan_all(index, crew=crew)
    assert index.complete


def test_what_somebody_waits_for_comes_first_with_a_crew_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(index_module, "_YIELD_SECONDS", 0)
    index, crew = hire(plain_pair(tmp_path), tmp_path / "kept", count=1)
    with crew:
        scan = index.scan(crew=crew)
        next(scan)
        index.prefer(np.array([70, 41, 42]))
        next(scan)
        next(scan)
        assert np.flatnonzero(index.pairs[0]["rest"]).tolist() == [41, 42, 70]
        list(scan)


def test_a_process_that_is_still_starting_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr("kldtui.index.crew._CHILD", endless)
    monkeypatch.setattr("kldtui.index.crew._LEAVE_SECONDS", 600)
    recordings = plain_pair(tmp_path)
    index = Index(recordings[0], recordings[1:], Keeper(tmp_path / "kept"))
    crew = index.crew(1, compiled=False, after=0)
    assert crew is not None
    with crew:
        scan_all(index, crew=crew)
        process = crew.members[0].process
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_closing_a_crew_ends_its_processes(tmp_path: Path) -> None:
    _, crew = hire(plain_pair(tmp_path), tmp_path / "kept")
    processes = [member.process for member in crew.members]
    crew.close()
    crew.close()
    assert [process and process.returncode for process in processes] == [0, 0]
