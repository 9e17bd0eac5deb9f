"""CASES 27: a crash or a failing disk at every single call, and what lies around the file."""

from __future__ import annotations

import errno
import functools
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kldtui.errors import LabelFileError
from kldtui.labels import LabelStore, branch_path, disk
from kldtui.position import Position
from tests.builders_labels import (
    FailingFiles,
    Killed,
    branch,
    evidence,
    left_overs,
    open_store,
    refusal,
    said,
)

HERE, THERE = Position(1, 41), Position(0, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.labels.json"


def calls_of(act: Callable[[LabelStore], None], path: Path) -> list[str]:
    files = FailingFiles()
    act(open_store(path, files=files))
    return files.calls


def relabel(store: LabelStore) -> None:
    store.set(HERE, "q5_0", "both_fail", evidence(), [branch(7), branch(8)])


@pytest.mark.parametrize("exists", [True, False])
def test_a_crash_at_any_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, exists: bool
) -> None:
    total = len(calls_of(relabel, tmp_path / "counted.labels.json")) + 30
    seen = set()
    for number in range(1, total):
        path = tmp_path / f"{number}.labels.json"
        if exists:
            open_store(path).set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
        try:
            relabel(open_store(path, files=FailingFiles(number, None)))
        except Killed:
            ended = False
        else:
            ended = True
        now = said(path).get("c1:t41 q5_0")
        assert now in ("both_fail", "recovers" if exists else None)
        assert not ended or now == "both_fail"
        if now == "both_fail":
            assert len(open_store(path).branches_of(HERE, "q5_0")) == 2
        seen.add(now)
        store = open_store(path)
        store.set(THERE, "q5_0", "unsure", evidence(), [branch(9)])
        assert store.branches_of(THERE, "q5_0") == [branch(9)]
        assert len(said(path)) == (2 if now else 1)
    assert len(seen) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails_at_any_call_is_reported_and_nothing_is_lost(
    tmp_path: Path, code: int
) -> None:
    total = len(calls_of(relabel, tmp_path / "counted.labels.json")) + 30
    failed = 0
    for number in range(1, total):
        path = tmp_path / f"{number}.labels.json"
        open_store(path).set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
        files = FailingFiles()
        store = open_store(path, files=files)
        files.fail, files.code = len(files.calls) + number, code
        words = refusal(functools.partial(relabel, store))
        if words is not None:
            failed += 1
            assert "kept in memory" in words
            assert store.class_of(HERE, "q5_0") == "both_fail"
        assert said(path)["c1:t41 q5_0"] in ("recovers", "both_fail")
        files.fail = 0
        store.set(THERE, "q5_0", "unsure", evidence())
        assert not store.unsaved
        assert said(path) == {"c0:t7 q5_0": "unsure", "c1:t41 q5_0": "both_fail"}
        assert open_store(path).branches_of(HERE, "q5_0") == [branch(7), branch(8)]
    assert failed > 5


def test_a_save_that_fails_leaves_no_rubbish_behind(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    broken = open_store(path, files=FailingFiles(1, errno.ENOSPC, only=["rename"]))
    with pytest.raises(LabelFileError, match="No space left on device"):
        relabel(broken)
    assert left_overs(path) == []
    assert said(path) == {"c1:t41 q5_0": "recovers"}


def test_data_is_synced_before_the_rename_and_the_folder_after_it(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    calls = calls_of(lambda s: s.set(THERE, "q5_0", "unsure", evidence()), path)
    order = [name for name in calls if name in ("write", "fsync", "rename")]
    assert order == ["write", "fsync", "rename", "fsync"]


def test_branches_are_on_disk_before_the_label_that_names_them(path: Path) -> None:
    broken = open_store(path, files=FailingFiles(1, None, only=["rename"]))
    with pytest.raises(Killed):
        relabel(broken)
    assert not path.exists()
    assert len(branch_path(path).read_text().splitlines()) == 2


def test_a_label_is_saved_even_if_its_branches_cannot_be(path: Path) -> None:
    branch_path(path).mkdir()
    store = open_store(path)
    with pytest.raises(LabelFileError, match=r"branches\.jsonl: not saved"):
        relabel(store)
    assert said(path) == {"c1:t41 q5_0": "both_fail"}
    branch_path(path).rmdir()
    assert store.unsaved
    store.save()
    assert not store.unsaved
    assert len(open_store(path).branches_of(HERE, "q5_0")) == 2


@pytest.mark.parametrize("reads", [True, False])
def test_a_branch_file_that_was_deleted_meanwhile_is_written_again(path: Path, reads: bool) -> None:
    store = open_store(path)
    relabel(store)
    if reads:
        assert store.branches_of(HERE, "q5_0") == [branch(7), branch(8)]
    branch_path(path).unlink()
    relabel(store)
    assert store.branches_of(HERE, "q5_0") == [branch(7), branch(8)]
    assert open_store(path).branches_of(HERE, "q5_0") == [branch(7), branch(8)]
    size = branch_path(path).stat().st_size
    relabel(store)
    assert branch_path(path).stat().st_size == size, "written once is enough"


def test_a_file_size_limit_of_the_system_is_such_a_disk(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(LabelFileError, match="File too large"):
            store.set(THERE, "q5_0", "unsure", evidence(stream_text="x" * 4096), [branch(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said(path) == {"c1:t41 q5_0": "recovers"}
    store.save()
    assert len(said(path)) == 2
    assert open_store(path).branches_of(THERE, "q5_0") == [branch(1)]


def test_a_session_that_cannot_save_to_the_end_rescues_its_labels(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    path.write_text("ruined by something else")
    with pytest.raises(LabelFileError, match="not JSON"):
        relabel(store)
    with pytest.raises(
        LabelFileError, match=r"not JSON.* are in .*rescued-\d+\.labels\.json instead"
    ):
        store.close()
    assert path.read_text() == "ruined by something else"
    [rescued] = path.parent.glob("*.rescued-*.labels.json")
    assert said(rescued) == {"c1:t41 q5_0": "both_fail"}
    store = open_store(path.with_name("other.labels.json"))
    store.close()


def test_branches_alone_that_cannot_be_written_to_the_end_are_rescued_too(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    branch_path(path).mkdir()
    with pytest.raises(LabelFileError):
        store.set(THERE, "q5_0", "unsure", evidence(), [branch(1)])
    assert len(said(path)) == 2, "the label itself found room"
    with pytest.raises(LabelFileError, match=r"are in .*rescued-\d+\.labels\.json instead"):
        store.close()
    [rescued] = path.parent.glob("*.rescued-*.labels.json")
    assert open_store(rescued).branches_of(THERE, "q5_0") == [branch(1)]


def test_a_skip_alone_that_cannot_be_saved_makes_no_rescue_file(path: Path) -> None:
    store = open_store(path, files=FailingFiles(1, errno.ENOSPC, only=["rename"]))
    store.skip(HERE, "q5_0")
    with pytest.raises(LabelFileError, match="not saved"):
        store.close()
    assert left_overs(path) == []


# ── what the file system has around the file ─────────────────────────────────────────────────────


def test_permissions_and_symlinks_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "x.labels.json", tmp_path / "link.labels.json"
    link.symlink_to(target)
    store = open_store(link)
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
    target.chmod(0o640)
    store.set(THERE, "q5_0", "unsure", evidence())
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert len(said(link)) == 2
    assert branch_path(target).exists()
    assert open_store(link).branches_of(HERE, "q5_0") == [branch(1)]


def test_a_new_file_has_the_permissions_that_the_umask_gives(path: Path) -> None:
    old = os.umask(0o027)
    try:
        open_store(path).set(HERE, "q5_0", "recovers", evidence())
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_read_only_file_is_not_replaced(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    path.chmod(0o444)
    with pytest.raises(LabelFileError, match=r"read-only.*--labels FILE"):
        open_store(path).set(HERE, "q5_0", "unsure", evidence())
    assert said(path) == {"c1:t41 q5_0": "recovers"}


def test_in_a_read_only_folder_the_error_says_what_to_do(path: Path) -> None:
    store = open_store(path, files=FailingFiles(4, errno.EROFS, only=["open"]))
    with pytest.raises(LabelFileError, match=r"Read-only file system.*--labels FILE elsewhere"):
        store.set(HERE, "q5_0", "recovers", evidence())
    assert store.class_of(HERE, "q5_0") == "recovers"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told_at_open_already(tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    folder.chmod(0o555)
    try:
        store = open_store(folder / "x.labels.json")
        assert any("read-only" in warning for warning in store.warnings)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "loop"])
def test_what_is_no_file_is_refused_at_open(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.labels.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.symlink_to(path)
    with pytest.raises(LabelFileError, match="--labels FILE"):
        open_store(path)


def test_what_a_killed_program_left_is_swept_away_later(path: Path) -> None:
    with pytest.raises(Killed):
        relabel(open_store(path, files=FailingFiles(1, None, only=["rename", "unlink"])))
    [left] = left_overs(path)
    open_store(path).set(HERE, "q5_0", "unsure", evidence())
    assert left in left_overs(path)
    stranger = path.parent / ".kldtui-000000000000-1-aa.tmp"
    stranger.touch()
    for file in (path.parent / left, stranger):
        os.utime(file, (1, 1))
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    assert left_overs(path) == [stranger.name]


def test_without_locks_labels_are_saved_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    assert said(path) == {"c1:t41 q5_0": "recovers"}


def test_a_rescue_that_fails_leaves_no_empty_file(tmp_path: Path) -> None:
    class Full(disk.Files):
        def write_all(self, fd: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        disk.create(Full(), tmp_path / "x.json", b"{}")
    assert list(tmp_path.iterdir()) == []
