"""The saved index: it stands at the next start, after kills, and never in a changed file's name."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.index import Index, Keeper, State, cache, saved
from kldtui.index import index as index_module
from kldtui.index.cache import prune, saved_tables
from kldtui.index.saved import SavedTable
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.kld import KldReader
from tests.builders import make_logits, make_stream, write_kld
from tests.builders_index import (
    kept_index,
    kill,
    mixed_pair,
    plain_pair,
    read_until,
    same,
    scan_all,
    start_slow_scan,
)
from tests.builders_run import run_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every record that any scan reads."""
    read: list[int] = []
    real = KldReader.read

    def counted(reader: KldReader, first: int, count: int) -> Any:
        read.extend(range(first, first + count))
        return real(reader, first, count)

    monkeypatch.setattr(KldReader, "read", counted)
    return read


def reopened(recordings: list[Recording]) -> list[Recording]:
    return [open_recording(recording.path) for recording in recordings]


def all_same(one: Index, two: Index) -> bool:
    tables = zip([one.ref, *one.pairs], [two.ref, *two.pairs], strict=True)
    return all(same(a, b) for a, b in tables)


def test_a_scanned_pair_stands_at_once_when_it_is_opened_again(
    tmp_path: Path, folder: Path, reads: list[int]
) -> None:
    recordings = mixed_pair(tmp_path / "data")
    index = kept_index(recordings, folder)
    expected = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    assert all_same(index, expected)
    index.close()
    reads.clear()
    again = Index(*opened_again(recordings), Keeper(folder))
    assert again.complete
    assert all_same(again, expected)
    scan_all(again)
    assert not reads
    again.close()


def opened_again(recordings: list[Recording]) -> tuple[Recording, list[Recording]]:
    ref, *quants = reopened(recordings)
    return ref, quants


def test_another_quant_of_the_same_reference_finds_the_reference_read(
    tmp_path: Path, folder: Path
) -> None:
    ref, one, two = mixed_pair(tmp_path / "data")
    kept_index([ref, one], folder).close()
    index = Index(ref, [one, two], Keeper(folder))
    assert (index.ref["state"] != State.PENDING).all()
    assert (index.pairs[0]["state"] != State.PENDING).all()
    assert not index.pairs[1]["state"].any()
    assert all_same(
        scan_all(index, compiled=False), scan_all(Index(ref, [one, two]), compiled=False)
    )
    index.close()


def touch(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


def rewrite(path: Path) -> None:
    """Other records, at the same time of change."""
    stat = path.stat()
    stream = make_stream(6, 32, 40)
    write_kld(path, stream, make_logits(stream, 77))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def shorten(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.truncate(stat.st_size - 5)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("name", ["ref.kld", "quant.kld"])
@pytest.mark.parametrize("change", [touch, rewrite, shorten])
def test_a_changed_file_is_never_taken_for_the_scanned_one(
    tmp_path: Path, folder: Path, change: Callable[[Path], None], name: str
) -> None:
    recordings = plain_pair(tmp_path / "data")
    kept_index(recordings, folder).close()
    change(tmp_path / "data" / name)
    ref, quants = opened_again(recordings)
    index = Index(ref, quants, Keeper(folder))
    assert not index.pairs[0]["state"].any()
    expected = scan_all(Index(ref, quants), compiled=False)
    assert same(scan_all(index, compiled=False).pairs[0], expected.pairs[0])
    assert np.array_equal(index.ref["ref_id"], expected.ref["ref_id"])
    index.close()


def test_a_changed_run_is_never_taken_for_the_scanned_one(tmp_path: Path, folder: Path) -> None:
    ref, quant = plain_pair(tmp_path / "data")
    path = run_of(quant, tmp_path / "quant.gguf-run", top_n=5)
    kept_index([ref, open_recording(path)], folder).close()
    touch(path)  # in its middle another digit may have changed: no sample would tell
    index = Index(ref, [open_recording(path)], Keeper(folder))
    assert not index.pairs[0]["state"].any()
    assert index.ref["state"].all(), "the reference is as it was"
    index.close()


def test_what_was_scanned_of_a_growing_file_stands_when_it_is_opened_again(
    tmp_path: Path, folder: Path
) -> None:
    ref, quant = plain_pair(tmp_path / "data")
    whole = quant.path.read_bytes()
    quant.path.write_bytes(whole[: len(whole) // 2])
    ref, (quant, *_) = opened_again([ref, quant])
    index = kept_index([ref, quant], folder)
    quant.path.write_bytes(whole)
    assert index.grow()
    scan_all(index, compiled=False).close()
    again = Index(*opened_again([ref, quant]), Keeper(folder))
    assert again.complete
    assert all_same(again, scan_all(Index(ref, [open_recording(quant.path)]), compiled=False))
    again.close()


def test_a_renamed_or_copied_pair_is_found_by_what_it_is(tmp_path: Path, folder: Path) -> None:
    recordings = plain_pair(tmp_path / "data")
    kept_index(recordings, folder).close()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    ref, quant = (open_recording(tmp_path / "elsewhere" / r.path.name) for r in recordings)
    index = Index(ref, [quant], Keeper(folder))
    assert index.complete
    index.close()


# -- kills and two programs ------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "done"), [("roots", 20), ("rest", 30)])
def test_a_killed_scan_goes_on_where_it_was(
    tmp_path: Path, folder: Path, reads: list[int], stage: str, done: int
) -> None:
    recordings = plain_pair(tmp_path / "data")
    process = start_slow_scan(folder, recordings)
    read_until(process, stage, done)
    kill(process)
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    stands = int(np.count_nonzero(index.pairs[0]["rest" if stage == "rest" else "state"]))
    assert done <= stands < index.layout.n
    reads.clear()
    scan_all(index, compiled=False)
    assert len(reads) == 2 * (index.layout.n - stands) * (2 if stage == "roots" else 1) + (
        2 * stands if stage == "roots" else 0
    )
    assert all_same(index, scan_all(Index(recordings[0], recordings[1:]), compiled=False))
    index.close()


def test_two_programs_share_one_scan(
    tmp_path: Path, folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_POLL_SECONDS", 0.02)
    recordings = plain_pair(tmp_path / "data")
    process = start_slow_scan(folder, recordings)
    read_until(process, "roots", 5)
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    seen = [progress.done for progress in index.scan()]
    assert process.wait(30) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert index.complete
    assert not reads, "the other program read the files"
    assert len(set(seen)) > 2, "progress of the other program is shown"
    assert all_same(index, scan_all(Index(recordings[0], recordings[1:]), compiled=False))
    index.close()


def test_when_the_other_program_dies_this_one_goes_on(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_POLL_SECONDS", 0.02)
    recordings = plain_pair(tmp_path / "data")
    process = start_slow_scan(folder, recordings)
    read_until(process, "roots", 5)
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    scan = index.scan(compiled=False)
    next(scan)
    kill(process)
    for _ in scan:
        pass
    assert index.complete
    assert all_same(index, scan_all(Index(recordings[0], recordings[1:]), compiled=False))
    index.close()


def test_a_cancelled_wait_for_another_program_ends(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_POLL_SECONDS", 5.0)
    recordings = plain_pair(tmp_path / "data")
    first = Index(recordings[0], recordings[1:], Keeper(folder))
    second = Index(recordings[0], recordings[1:], Keeper(folder))
    cancel = threading.Event()
    threading.Timer(0.05, cancel.set).start()
    began = time.monotonic()
    for _ in second.scan(cancel):
        pass
    assert time.monotonic() - began < 3
    first.close()
    scan_all(second)
    assert second.complete
    second.close()


# -- damage ---------------------------------------------------------------------------------------


def table_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.columns"))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(5000)


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(os.urandom(20_000)),
    cut_short,
    lambda path: overwrite(path, 0, b"\xff" * 100),
    lambda path: overwrite(path, 20, b"}"),
    lambda path: overwrite(path, saved.HEAD_BYTES, b"\xc8" * 64),  # states that there are not
    lambda path: overwrite(path, saved.HEAD_BYTES + 5 * 4096 + 40, b"\x00\x01\x02\x03"),
    lambda path: overwrite(path, path.stat().st_size - 4096, os.urandom(5)),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_anew_and_never_an_error(
    tmp_path: Path, folder: Path, damage: Callable[[Path], object]
) -> None:
    recordings = mixed_pair(tmp_path / "data")
    kept_index(recordings, folder).close()
    files = table_files(folder)
    assert len(files) == 3
    for path in files:
        damage(path)
    ref, quants = opened_again(recordings)
    index = scan_all(Index(ref, quants, Keeper(folder)), compiled=False)
    assert all_same(index, scan_all(Index(ref, quants), compiled=False))
    index.close()
    again = Index(ref, quants, Keeper(folder))
    assert again.complete
    again.close()


def test_after_a_loss_of_power_only_what_was_saved_is_trusted(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path / "data")
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    scan_all(index, chunks=(0, 3))
    pair = index.pairs[0]
    assert isinstance(pair, SavedTable)
    pair._unlock()  # the program is gone, and nothing was saved
    pair._fd = -1
    index.ref.close()
    monkeypatch.setattr(saved, "boot", lambda: "another start")
    again = Index(*opened_again(recordings), Keeper(folder))
    assert not again.pairs[0]["state"].any()
    assert (again.ref["state"] == State.SCORED).sum() == again.layout.n // 2, "this was saved"
    again.close()


def test_without_a_folder_to_write_to_the_index_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings = plain_pair(tmp_path / "data")
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    index = kept_index(recordings, blocked / "cache")
    assert index.complete
    assert not index.pairs[0].kept

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert kept_index(recordings, tmp_path / "full").complete
    assert not list((tmp_path / "full").iterdir()), "no half-made file is left behind"


# -- the folder -----------------------------------------------------------------------------------


def aged(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then))


def test_tables_unused_for_long_or_beyond_the_size_are_removed(
    tmp_path: Path, folder: Path
) -> None:
    for k in range(4):
        kept_index(plain_pair(tmp_path / f"{k}")[:1], folder).close()
    found = saved_tables(folder)
    assert len(found) == 4
    assert {Path(each.names[0]).name for each in found} == {"ref.kld"}
    assert all(each.positions == 90 and each.bytes > 0 for each in found)
    for k, each in enumerate(found):
        aged(each.path, 10 * k)
    gone = prune(folder, max_days=25, max_bytes=1 << 40)
    assert [each.path for each in gone] == [found[3].path]
    room = found[0].bytes + found[1].bytes
    assert [each.path for each in prune(folder, 365, room)] == [found[2].path]
    assert {each.path for each in saved_tables(folder)} == {found[0].path, found[1].path}


def sized(folder: Path, *megabytes: int) -> list[Path]:
    """Tables of these sizes, each used a day before the one that is named first."""
    folder.mkdir()
    paths = [folder / f"{k}.columns" for k in range(len(megabytes))]
    for k, (path, size) in enumerate(zip(paths, megabytes, strict=True)):
        path.write_bytes(bytes(size << 20))
        aged(path, 1 + k)
    return paths


def test_the_longest_unused_goes_first_however_small_it_is(folder: Path) -> None:
    new, large, small, smallest = sized(folder, 1, 4, 2, 1)
    assert [each.path for each in prune(folder, max_bytes=6 << 20)] == [smallest, small]
    assert [each.path for each in prune(folder, max_bytes=4 << 20)] == [large]
    assert list(folder.iterdir()) == [new]


def test_a_table_that_was_just_used_stays_whatever_its_size(folder: Path) -> None:
    new, _ = sized(folder, 4, 1)
    assert len(prune(folder, max_bytes=1 << 20)) == 1
    assert list(folder.iterdir()) == [new]
    assert len(prune(folder, max_days=0.5)) == 1, "but not whatever its age"


def test_what_is_being_filled_counts_but_stays(folder: Path) -> None:
    _, middle, filled = sized(folder, 1, 1, 4)
    with filled.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [each.path for each in prune(folder, max_bytes=5 << 20)] == [middle]


def test_every_scan_sweeps_up_what_is_old(tmp_path: Path, folder: Path) -> None:
    kept_index(plain_pair(tmp_path / "old"), folder).close()
    for path in table_files(folder):
        aged(path, 100)
    kept_index(plain_pair(tmp_path / "new"), folder).close()
    assert all(Path(each.names[0]).parent.name == "new" for each in saved_tables(folder))


def test_what_is_being_filled_is_not_removed(tmp_path: Path, folder: Path) -> None:
    recordings = plain_pair(tmp_path / "data")
    index = Index(recordings[0], recordings[1:], Keeper(folder))
    assert prune(folder, max_days=0, max_bytes=0) == []
    index.close()
    assert len(prune(folder, max_days=0, max_bytes=0)) == 2
    assert not index.ref["state"].any(), "what is still mapped can still be read"
    assert list(index.scan()) == [], "a closed index is not scanned"


def test_half_made_files_are_swept_up_and_strange_ones_left_alone(folder: Path) -> None:
    folder.mkdir()
    old, new, other = folder / ".new-a", folder / ".new-b", folder / "notes.txt"
    for path in (old, new, other):
        path.write_text("x")
    aged(old, 1)
    aged(other, 1000)
    prune(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".new-b", "notes.txt"]


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.ENV_FOLDER, str(tmp_path / "here"))
    assert cache.index_folder() == tmp_path / "here" / "index"
