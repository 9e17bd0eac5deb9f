"""What label files are called, and what of any text and number is in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.labels import branch_path, default_path, summarise
from kldtui.labels.plain import dump, load
from kldtui.position import Position
from tests.builders_labels import branch, evidence, open_store

HERE = Position(1, 41)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.labels.json"


def test_a_text_no_file_could_hold_comes_back_and_cannot_move_a_terminal(path: Path) -> None:
    odd = "a\ud800b\x1b]52;c;x\x07\x9b31m\x7f\u202e\u2028\u200d\ufeff\x00日本🐈‍⬛é\r\n"
    store = open_store(path)
    store.note(HERE, "q5_0", odd)
    store.set(HERE, "q5_0", "recovers", evidence(ref_text=odd), [branch(1, text=odd)])
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert record.note == odd
    assert record.evidence["ref_text"] == odd
    assert record.branches[0]["text"] == odd
    assert open_store(path).branches_of(HERE, "q5_0")[0]["text"] == odd
    for file in (path, branch_path(path)):
        text = file.read_bytes().decode("utf-8")
        assert "日本" in text
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u202e\u2060-\u206f\ufeff]", text)


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters()))
def test_any_text_survives_the_spelling(text: str) -> None:
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert load(dump({"text": text})) == {"text": joined}


def test_numbers_of_numpy_and_numbers_that_json_lacks(path: Path) -> None:
    store = open_store(path)
    row = np.zeros(1, [("kld", "f4"), ("ref_id", "i4"), ("near_tie", "?")])[0]
    row["kld"] = 2.57
    given_ = {name: row[name] for name in ("kld", "ref_id", "near_tie")}
    given_ |= {"margin": float("nan"), "cost": float("-inf"), "ids": np.arange(3)}
    store.set(HERE, "q5_0", "recovers", given_)
    record = store.get(HERE, "q5_0")
    assert record is not None
    assert record.evidence == {
        "kld": 2.57,
        "ref_id": 0,
        "near_tie": False,
        "margin": None,
        "cost": pytest.approx(-3.4028235e38),
        "ids": [0, 1, 2],
    }


def test_label_files_hold_no_password(path: Path) -> None:
    url = "https://me:secret@host:8080/v1?api_key=secret#secret"
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1, engine={"url": url})])
    assert b"secret" not in path.read_bytes() + branch_path(path).read_bytes()
    assert json.loads(path.read_text())["labels"][0]["branches"][0]["engine"] == {
        "url": "https://host:8080/v1"
    }


def test_a_summary_leaves_out_what_is_long_and_in_the_branch_file() -> None:
    summary = summarise(branch(1))
    assert not {"top", "prefix_ids", "tokens"} & summary.keys()
    assert summary["prefix_length"] == 3


def test_members_that_this_version_does_not_know_are_kept(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    data = json.loads(path.read_text())
    data["project"] = {"ticket": 7}
    data["labels"][0]["severity"] = "high"
    data["checksum"] = None
    path.write_text(json.dumps(data, indent=2))
    store = open_store(path)
    assert any("no checksum" in warning for warning in store.warnings)
    store.note(HERE, "q5_0", "x")
    data = json.loads(path.read_text())
    assert data["project"] == {"ticket": 7}
    assert data["labels"][0]["severity"] == "high"
    assert open_store(path).warnings == []


def test_the_default_name_is_that_of_both_recordings_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_path(Path("/x/ref.kld"), ["q5_0"]) == tmp_path / "ref.q5_0.labels.json"
    both = default_path(Path("ref.kld.gz"), ["q8_0", "q5_0"])
    assert both == tmp_path / "ref.q5_0+q8_0.labels.json"
    assert both == default_path(Path("ref.kld"), ["q5_0", "q8_0"])


@settings(deadline=None, max_examples=60)
@given(
    st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=300), st.lists(st.text())
)
def test_a_default_name_is_always_one_that_a_folder_takes(stem: str, quants: list[str]) -> None:
    path = default_path(Path(f"{stem}.kld"), quants, Path("/w"))
    assert path.parent == Path("/w")
    assert path.name.endswith(".labels.json")
    assert not path.name.startswith((".", "-"))
    assert len(branch_path(path).name.encode()) <= 255
    assert path.name.isprintable()
