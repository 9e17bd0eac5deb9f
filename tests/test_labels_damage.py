"""CASES 27: label files that are not to be overwritten, and damaged lines of branch files."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.errors import LabelFileError
from kldtui.labels import ReviewIdentity, branch_path
from kldtui.position import Position
from tests.builders_labels import (
    FakeRecording,
    branch,
    evidence,
    open_store,
    recording,
    refusal,
    review,
    said,
)

HERE, THERE = Position(1, 41), Position(0, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.labels.json"


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


def test_a_recording_whose_first_chunk_grew_is_the_same_recording(path: Path) -> None:
    def quant(rows: int) -> FakeRecording:
        whole = recording(model=1, n_chunk=1)
        return dataclasses.replace(whole, best=dict(list(whole.best.items())[:rows]))

    def identity(rows: int) -> ReviewIdentity:
        return ReviewIdentity.of(recording(), {"q5_0": quant(rows)})

    open_store(path, identity=identity(1)).set(HERE, "q5_0", "recovers", evidence())
    assert open_store(path, identity=identity(3)).class_of(HERE, "q5_0") == "recovers"


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
    assert set(json.loads(path.read_text())["recordings"]["quants"]) == {"a", "b"}
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


# ── the branch file ──────────────────────────────────────────────────────────────────────────────


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
