"""CASES 27: crashes, full disks, damage, and two programs on one label file."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.errors import LabelFileError
from kldtui.labels import LabelStore, ReviewIdentity, branch_path
from kldtui.position import Position
from tests.builders_labels import (
    Clock,
    FailingFiles,
    Killed,
    branch,
    evidence,
    open_store,
    recording,
    review,
)

ROOT = Path(__file__).parents[1]
HERE, THERE = Position(1, 41), Position(0, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.labels.json"


def said(path: Path) -> dict[str, str | None]:
    """What a fresh program reads."""
    return {f"{r.position} {r.quant}": r.class_id for r in open_store(path).records()}


def refusal(act: Callable[[], object]) -> str | None:
    """The one line of a LabelFileError, or None if all went well."""
    try:
        act()
    except LabelFileError as error:
        words = str(error)
    else:
        return None
    assert "\n" not in words
    return words


def left_overs(path: Path) -> list[str]:
    known = {path.name, branch_path(path).name}
    return [p.name for p in path.parent.iterdir() if p.name not in known]


# ── a crash or a failing disk at every single call ───────────────────────────────────────────


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
    with pytest.raises(LabelFileError, match=r"rescued in .*rescued-\d+\.labels\.json"):
        store.close()
    assert path.read_text() == "ruined by something else"
    [rescued] = path.parent.glob("*.rescued-*.labels.json")
    assert said(rescued) == {"c1:t41 q5_0": "both_fail"}
    store = open_store(path.with_name("other.labels.json"))
    store.close()


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


# ── another program wrote the file ───────────────────────────────────────────────────────────


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


# ── files that are not to be overwritten ─────────────────────────────────────────────────────


@functools.cache
def whole() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.labels.json"
        store = open_store(path)
        store.set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
        store.note(THERE, "q5_0", "é日")
        store.set_hint(HERE, "q5_0", {"text": "hm"})
        open_store(path, reviewer="bob").set(HERE, "q5_0", "unsure", evidence())
        return path.read_bytes()


def refused_or_right(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.labels.json"
        path.write_bytes(data)
        if refusal(lambda: said(path)) is not None:
            assert path.read_bytes() == data
        else:
            assert said(path) == {"c0:t7 q5_0": None, "c1:t41 q5_0": "unsure"}
            [old] = open_store(path).superseded()
            assert old.evidence == evidence()


@settings(deadline=None, max_examples=150)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_refused_or_harmless(place: float, bit: int) -> None:
    data = bytearray(whole())
    data[int(place * len(data))] ^= 1 << bit
    refused_or_right(bytes(data))


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1))
def test_a_file_cut_anywhere_is_refused_or_harmless(place: float) -> None:
    refused_or_right(whole()[: int(place * len(whole()))])


def test_every_bit_of_the_checksums_own_lines_is_guarded() -> None:
    data = whole()
    for i in range(data.rindex(b'"checksum"') - 2, len(data)):
        for bit in range(8):
            refused_or_right(data[:i] + bytes([data[i] ^ (1 << bit)]) + data[i + 1 :])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\x00" * 512, "not JSON"),
        (b'{"labels": []}', "no kldtui label file"),
        (b"[1, 2]", "no kldtui label file"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format":"kldtui-labels","version":2}', "version 2.*update kldtui"),
        (b'{"format":"kldtui-labels","version":true}', "version True"),
        (b'{"format":"kldtui-labels","version":1}', "no recordings"),
        (whole().replace(b'"note":"",', b""), "checksum"),
    ],
)
def test_an_unreadable_file_is_refused_in_one_line_and_left_alone(
    path: Path, data: bytes, words: str
) -> None:
    path.write_bytes(data)
    with pytest.raises(LabelFileError, match=words) as caught:
        open_store(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"class":"unsure"', '"class":"fine"', "class 'fine', which its taxonomy lacks"),
        ('"note":""', '"note":7', "'note' is 7"),
        ('"t":41', '"t":-41', "negative"),
        ('"t":41', '"t":true', "'t' is True"),
        ('"branches":[{', '"branches":[5,{', "branch that is not an object"),
        ('"reviewer":', '"reviever":', "without 'reviewer'"),
        ('"kld":', '"kld":NaN,"x":', "not JSON"),
    ],
)
def test_a_hand_edited_file_that_is_wrong_is_refused_by_what_is_wrong(
    path: Path, old: str, new: str, words: str
) -> None:
    text = whole().decode()
    assert old in text
    start_of_sum = text.rindex('"checksum"')
    path.write_text(text[:start_of_sum].replace(old, new) + '"checksum":null}')
    with pytest.raises(LabelFileError, match=words):
        open_store(path)


def test_a_root_labelled_twice_in_a_file_merged_by_hand_loses_neither(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    data = json.loads(path.read_text())
    data["labels"].append({**data["labels"][0], "class": "unsure", "time": "2027-01-01T00:00:00Z"})
    data["checksum"] = None
    path.write_text(json.dumps(data))
    store = open_store(path)
    assert store.class_of(HERE, "q5_0") == "unsure"
    assert [old.class_id for old in store.superseded()] == ["recovers"]
    assert any("labelled twice" in warning for warning in store.warnings)


def test_labels_of_other_recordings_are_not_mixed_with_these(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    before = path.read_bytes()
    other_text = ReviewIdentity.of(recording(seed=9), {"q5_0": recording(seed=9, model=1)})
    with pytest.raises(LabelFileError, match=r"other recordings.*its tokens are others.*--labels"):
        open_store(path, identity=other_text)
    other_quant = ReviewIdentity.of(recording(), {"q5_0": recording(model=5)})
    with pytest.raises(LabelFileError, match="quant 'q5_0': the model said something else"):
        open_store(path, identity=other_quant)
    other_size = ReviewIdentity({**review().ref, "n_vocab": 65}, {})
    with pytest.raises(LabelFileError, match="n_vocab is 65 here and 64 there"):
        open_store(path, identity=other_size)
    assert path.read_bytes() == before


def test_a_recording_that_grew_is_the_same_recording(path: Path) -> None:
    short = ReviewIdentity.of(recording(n_chunk=2), {"q5_0": recording(n_chunk=2, model=1)})
    long = ReviewIdentity.of(recording(n_chunk=5), {"q5_0": recording(n_chunk=5, model=1)})
    open_store(path, identity=short).set(THERE, "q5_0", "recovers", evidence())
    store = open_store(path, identity=long)
    assert store.class_of(THERE, "q5_0") == "recovers"
    store.note(THERE, "q5_0", "x")
    assert json.loads(path.read_text())["recordings"]["ref"]["n_chunk"] == 5


def test_quants_may_join_and_leave_a_review_without_losing_labels(path: Path) -> None:
    open_store(path, identity=review("a", "b")).set(HERE, "b", "recovers", evidence())
    alone = open_store(path, identity=review("a"))
    alone.set(HERE, "a", "unsure", evidence())
    again = open_store(path, identity=review("a", "b", "c"))
    again.set(HERE, "c", "both_fail", evidence())
    assert again.counts() == {"recovers": 1, "unsure": 1, "both_fail": 1}
    assert list(json.loads(path.read_text())["recordings"]["quants"]) == ["a", "b", "c"]


def test_a_quant_under_another_name_is_told_where_its_labels_are(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    renamed = ReviewIdentity(review().ref, {"mine": review().quants["q5_0"]})
    [warning] = open_store(path, identity=renamed).warnings
    assert "--quant q5_0=FILE" in warning
    assert open_store(path).warnings == []


def test_real_recordings_are_told_apart_and_known_again(smollm2: Path) -> None:
    from kldtui.labels import identity_of
    from kldtui.labels.identity import difference
    from kldtui.recordings import open_recording

    names = ("ref", "ref-ub32", "q8_0", "q5_0")
    found = [identity_of(open_recording(smollm2 / f"{name}.kld")) for name in names]
    again = [identity_of(open_recording(smollm2 / f"{name}.kld")) for name in names]
    assert found == again
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert difference(one, other) == "the model said something else of the same tokens"


# ── what the file system has around the file ─────────────────────────────────────────────────


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


# ── the branch file ──────────────────────────────────────────────────────────────────────────


def test_a_cut_last_line_is_left_out_with_a_warning_and_stays_a_line_of_its_own(
    path: Path,
) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1), branch(2)])
    file = branch_path(path)
    file.write_bytes(file.read_bytes()[:-40])
    store = open_store(path)
    assert store.branches_of(HERE, "q5_0") == [branch(1)]
    assert any("last line was cut" in warning for warning in store.warnings)
    store.set(THERE, "q5_0", "unsure", evidence(), [branch(3)])
    store = open_store(path)
    assert store.branches_of(THERE, "q5_0") == [branch(3)]
    assert store.branches_of(HERE, "q5_0") == [branch(1)]
    assert any("is left out" in warning for warning in store.warnings)


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_in_the_branch_file_never_gives_a_wrong_branch(
    place: float, bit: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.labels.json"
        wanted = [branch(1), branch(2), branch(3)]
        open_store(path).set(HERE, "q5_0", "recovers", evidence(), wanted)
        data = bytearray(branch_path(path).read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        branch_path(path).write_bytes(data)
        found = open_store(path).branches_of(HERE, "q5_0")
        assert all(one in wanted for one in found)
        assert len(found) >= 1


def test_a_branch_made_longer_counts_in_its_longer_form(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "unsure", evidence(), [branch(1, length=3)])
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1, length=6)])
    store.set(HERE, "q5_0", "both_fail", evidence(), [branch(1, length=6)])
    assert len(branch_path(path).read_text().splitlines()) == 2
    again = open_store(path)
    assert again.branches_of(HERE, "q5_0") == [branch(1, length=6)]
    record = again.get(HERE, "q5_0")
    assert record is not None
    assert len(record.branches[0]["ids"]) == 6


def test_a_branch_file_that_is_gone_leaves_the_labels_whole(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
    branch_path(path).unlink()
    again = open_store(path)
    assert again.branches_of(HERE, "q5_0") == []
    record = again.get(HERE, "q5_0")
    assert record is not None
    assert record.branches[0]["text"] == branch(1)["text"]


def test_a_save_writes_the_new_branch_only_and_no_top_n_into_the_label_file(path: Path) -> None:
    store = open_store(path)
    for i in range(50):
        store.set(Position(2, i), "q5_0", "recovers", evidence(), [branch(i, length=64)])
    before = branch_path(path).stat().st_size
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(99, length=64)])
    assert branch_path(path).stat().st_size - before < before / 40
    assert b'"top"' not in path.read_bytes()
