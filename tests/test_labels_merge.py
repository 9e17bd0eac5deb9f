"""CASES 27: programs that are killed, and two programs on one label file."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.errors import LabelFileError
from kldtui.position import Position
from tests.builders_labels import (
    Clock,
    FailingFiles,
    evidence,
    left_overs,
    open_store,
    said,
)

ROOT = Path(__file__).parents[1]
HERE, THERE = Position(1, 41), Position(0, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.labels.json"


CHILD = """
import sys
from pathlib import Path
from kldtui.position import Position
from tests.builders_labels import branch, evidence, open_store, utc
store = open_store(Path(sys.argv[1]), reviewer=sys.argv[2], now=utc)
base, count = int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
for i in range(count):
    branches = [branch(1000 * base + i, length=40)]
    store.set(Position(0, base + i), "q5_0", "recovers", evidence(), branches)
    if base:
        store.set(Position(9, i % 3), "q5_0", "unsure", evidence())
    print(i, flush=True)
"""


def start(path: Path, reviewer: str, base: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), reviewer, str(base), str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()


def test_killed_at_any_moment_every_label_that_was_given_is_on_disk(path: Path) -> None:
    for moment in (0.05, 0.31, 0.12, 0.23, 0.17, 0.39):
        known = len(said(path))
        with start(path, "ann", 0, 10_000) as child:
            go(child)
            time.sleep(moment)
            child.send_signal(signal.SIGKILL)
            assert child.stdout is not None
            given_ = len(child.stdout.read().splitlines())
        now = said(path)
        assert len(now) >= max(known, given_)
        assert set(now.values()) <= {"recovers"}
        store = open_store(path)
        for record in list(store.records())[:given_]:
            assert len(store.branches_of(record.position, "q5_0")) == 1
    store.set(THERE, "q5_0", "unsure", evidence())


def test_two_programs_at_once_lose_no_label(path: Path) -> None:
    with start(path, "ann", 100, 25) as ann, start(path, "bob", 200, 25) as bob:
        for child in (ann, bob):
            go(child)
        for child in (ann, bob):
            child.communicate()
            assert child.returncode == 0
    store = open_store(path)
    given_ = {record.position for record in store.records()}
    assert given_ >= {Position(0, base + i) for base in (100, 200) for i in range(25)}
    assert given_ >= {Position(9, i) for i in range(3)}
    for record in store.records():
        if record.position.chunk == 0:
            assert len(store.branches_of(record.position, "q5_0")) == 1
    assert store.warnings == []
    assert left_overs(path) == []


# ── another program wrote the file ───────────────────────────────────────────────────────────────


def test_labels_of_another_program_are_taken_in_before_writing(path: Path) -> None:
    ann, bob = open_store(path), open_store(path, reviewer="bob")
    ann.set(HERE, "q5_0", "recovers", evidence())
    bob.set(THERE, "q5_0", "unsure", evidence())
    assert bob.class_of(HERE, "q5_0") == "recovers"
    ann.note(Position(3, 3), "q5_0", "hm")
    assert said(path) == {
        "c0:t7 q5_0": "unsure",
        "c1:t41 q5_0": "recovers",
        "c3:t3 q5_0": None,
    }
    assert ann.counts() == {"recovers": 1, "unsure": 1}


@pytest.mark.parametrize("ann_is_later", [True, False])
def test_of_two_labels_for_one_root_the_later_counts_and_the_other_is_kept(
    path: Path, ann_is_later: bool
) -> None:
    ann = open_store(path, now=Clock(500 if ann_is_later else 0))
    bob = open_store(path, reviewer="bob", now=Clock(200))
    # Neither sees the other's: ann's save fails first and is made up for after bob's.
    ann._file._files = FailingFiles(1, errno.ENOSPC, only=["rename"], lasting=False)
    with pytest.raises(LabelFileError):
        ann.set(HERE, "q5_0", "recovers", evidence())
    bob.set(HERE, "q5_0", "both_fail", evidence())
    ann.save()
    won, lost = ("recovers", "both_fail") if ann_is_later else ("both_fail", "recovers")
    again = open_store(path)
    assert again.class_of(HERE, "q5_0") == won
    assert ann.class_of(HERE, "q5_0") == won
    [old] = again.superseded()
    assert old.class_id == lost
    assert old.extra["superseded"]["why"] == "merged"


def test_undoing_over_another_programs_change_keeps_that_change_aside(path: Path) -> None:
    clock = Clock()
    ann = open_store(path, now=clock)
    ann.set(HERE, "q5_0", "recovers", evidence())
    bob = open_store(path, now=clock)
    bob.set(HERE, "q5_0", "both_fail", evidence())
    ann.set(THERE, "q5_0", "unsure", evidence())
    ann.undo()
    ann.undo()
    assert said(path) == {}
    assert [old.class_id for old in open_store(path).superseded()] == ["both_fail"]
    ann.redo()
    assert said(path) == {"c1:t41 q5_0": "recovers"}


def test_a_label_that_another_program_undid_is_gone_but_kept_aside(path: Path) -> None:
    ann = open_store(path)
    ann.set(HERE, "q5_0", "recovers", evidence())
    bob = open_store(path, reviewer="bob")
    ann.undo()
    bob.set(THERE, "q5_0", "unsure", evidence())
    assert said(path) == {"c0:t7 q5_0": "unsure"}
    [old] = bob.superseded()
    assert (old.class_id, old.extra["superseded"]["why"]) == ("recovers", "removed")


@pytest.mark.parametrize("clears", [True, False])
def test_of_a_label_that_one_program_clears_and_another_changes_the_change_stays(
    path: Path, clears: bool
) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    ann, bob = open_store(path, now=Clock(100)), open_store(path, reviewer="bob", now=Clock(200))
    ann._file._files = FailingFiles(1, errno.ENOSPC, only=["rename"], lasting=False)
    with pytest.raises(LabelFileError):
        ann.set(HERE, "q5_0", None if clears else "both_fail")
    bob.set(HERE, "q5_0", "both_fail" if clears else None)
    ann.save()
    assert said(path) == {"c1:t41 q5_0": "both_fail"}
    assert ann.class_of(HERE, "q5_0") == "both_fail"


def test_a_file_that_was_deleted_and_cannot_be_written_to_the_end_is_rescued(path: Path) -> None:
    store = open_store(path, files=(files := FailingFiles(only=["rename"])))
    store.set(HERE, "q5_0", "recovers", evidence())
    path.unlink()
    store.skip(THERE, "q5_0")
    files.fail = len(files.calls) + 1
    with pytest.raises(LabelFileError, match="rescued"):
        store.close()
    [rescued] = path.parent.glob("*.rescued-*.labels.json")
    assert said(rescued) == {"c1:t41 q5_0": "recovers"}


def test_a_file_that_was_deleted_meanwhile_is_written_whole_again(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    path.unlink()
    store.set(THERE, "q5_0", "unsure", evidence())
    assert len(said(path)) == 2


def test_an_older_copy_put_back_meanwhile_takes_no_label_from_the_world(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    old = path.read_bytes()
    store.set(THERE, "q5_0", "unsure", evidence())
    path.write_bytes(old)
    store.set(Position(3, 3), "q5_0", "unsure", evidence())
    again = open_store(path)
    kept = {record.position for record in [*again.records(), *again.superseded()]}
    assert kept == {HERE, THERE, Position(3, 3)}


def test_an_older_copy_put_back_meanwhile_takes_nothing_that_was_superseded(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    old = path.read_bytes()
    bob = open_store(path, reviewer="bob", now=Clock(100))
    bob.set(HERE, "q5_0", "both_fail", evidence())
    path.write_bytes(old)
    bob.set(THERE, "q5_0", "unsure", evidence())
    kept = [(r.class_id, r.reviewer) for r in open_store(path).superseded()]
    assert ("recovers", "ann") in kept


def test_a_file_edited_by_hand_meanwhile_is_refused_then_merged_once_marked(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    text = path.read_text().replace('"class":"recovers"', '"class":"unsure"')
    path.write_text(text)
    with pytest.raises(LabelFileError, match="edited it, put null for the checksum"):
        store.set(THERE, "q5_0", "both_fail", evidence())
    assert path.read_text() == text
    data = json.loads(text)
    data["checksum"] = None
    path.write_text(json.dumps(data, indent=1))
    store.save()
    assert said(path) == {"c0:t7 q5_0": "both_fail", "c1:t41 q5_0": "unsure"}


Step = tuple[int, int, str]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, 2), st.sampled_from(["recovers", "unsure", "fail"])
        ),
        max_size=14,
    )
)
def test_however_two_reviewers_take_turns_no_label_vanishes(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.labels.json"
        clock = Clock()
        files = [FailingFiles(only=["rename"], lasting=False) for _ in range(2)]
        stores = [open_store(path, reviewer=str(i), files=files[i], now=clock) for i in range(2)]
        latest: dict[tuple[int, int], str] = {}
        for who, t, what in steps:
            if what == "fail":
                files[who].fail = len(files[who].calls) + 1
                continue
            with contextlib.suppress(LabelFileError):
                stores[who].set(Position(0, t), "q5_0", what, evidence())
            latest[who, t] = what
        for file in files:
            file.fail = 0
        for store in [*stores, *stores]:
            store.save()
        again = open_store(path)
        kept = [*again.records(), *again.superseded()]
        for (who, t), what in latest.items():
            assert any((r.reviewer, r.position.t, r.class_id) == (str(who), t, what) for r in kept)
