"""Labels as a reviewer uses them: given, changed, undone, found again, and spelt as documented."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.errors import LabelFileError
from kldtui.labels import BY_KEY, TAXONOMY, LabelStore, branch_path
from kldtui.position import Position
from tests.builders_labels import Clock, branch, evidence, open_store, review

DOCS = Path(__file__).parents[1] / "docs"
HERE, THERE = Position(1, 41), Position(0, 7)


def schema(name: str) -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(json.loads((DOCS / name).read_text()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ref.q5_0.labels.json"


def test_the_seven_classes_have_the_keys_and_ids_that_files_and_fingers_know() -> None:
    assert [(entry.key, entry.id) for entry in TAXONOMY] == [
        ("1", "recovers"),
        ("2", "changes_meaning"),
        ("3", "malformed_tool_call"),
        ("4", "both_fail"),
        ("5", "same_meaning"),
        ("6", "quant_better"),
        ("7", "unsure"),
    ]
    assert BY_KEY["5"].name == "other wording, same meaning"
    assert all(len(entry.definition) <= 90 and "\n" not in entry.definition for entry in TAXONOMY)


def test_a_label_is_on_disk_with_all_it_stands_on_when_set_returns(path: Path) -> None:
    store = open_store(path)
    pair = [branch(1, "R·r"), branch(2, "Q·q", complete=True, stop="eog")]
    store.set(HERE, "q5_0", "changes_meaning", evidence(), pair, reached="list by KLD")

    [label] = json.loads(path.read_text())["labels"]
    assert (label["chunk"], label["t"], label["quant"]) == (1, 41, "q5_0")
    assert label["class"] == "changes_meaning"
    assert label["evidence"] == evidence()
    assert label["reached"] == "list by KLD"
    assert label["reviewer"] == "ann"
    assert label["kldtui"]
    for kept, given_ in zip(label["branches"], pair, strict=True):
        assert kept["ids"] == given_["tokens"]
        for name in ("id", "arm", "text", "start_id", "complete", "stop", "settings", "engine"):
            assert kept[name] == given_[name]


def test_the_branch_file_holds_the_branches_whole(path: Path) -> None:
    store = open_store(path)
    pair = [branch(1), branch(2, "Q·q")]
    store.set(HERE, "q5_0", "recovers", evidence(), pair)
    lines = [json.loads(line) for line in branch_path(path).read_text().splitlines()]
    assert [line["top"] for line in lines] == [one["top"] for one in pair]
    assert open_store(path).branches_of(HERE, "q5_0") == pair


def test_both_files_fit_their_schemas(path: Path) -> None:
    store = open_store(path, identity=review("q5_0", "q8_0"))
    store.set(HERE, "q5_0", "recovers", evidence(kld=np.float32("nan")), [branch(1)])
    store.note(THERE, "q8_0", "ask again")
    store.set_hint(HERE, "q5_0", {"class": "malformed_tool_call", "text": "does not parse"})
    other = open_store(path, reviewer="bob", now=Clock(1000))
    other.set(HERE, "q5_0", "unsure", evidence(), [branch(2, complete=True)])
    other.undo()
    other.redo()
    schema("labels.schema.json").validate(json.loads(path.read_text()))
    for line in branch_path(path).read_text().splitlines():
        schema("branches.schema.json").validate(json.loads(line))


def test_an_empty_review_fits_the_schema_and_writes_nothing_before_it_must(path: Path) -> None:
    store = open_store(path)
    assert not path.exists()
    store.set(HERE, "q5_0", "recovers", evidence())
    store.undo()
    data = json.loads(path.read_text())
    schema("labels.schema.json").validate(data)
    assert data["labels"] == []


@pytest.mark.parametrize(
    "damage", [{"class": 3}, {"t": -1}, {"time": "yesterday"}, {"quant": None}]
)
def test_the_schema_refuses_what_is_no_label(path: Path, damage: dict[str, Any]) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    data = json.loads(path.read_text())
    data["labels"][0].update(damage)
    assert not schema("labels.schema.json").is_valid(data)


def test_the_file_is_one_record_a_line_in_stream_order(path: Path) -> None:
    store = open_store(path)
    for position in (HERE, THERE, Position(1, 5)):
        store.set(position, "q5_0", "unsure", evidence())
    lines = [line for line in path.read_text().splitlines() if line.startswith('{"chunk"')]
    found = [json.loads(line.rstrip(",")) for line in lines]
    assert [(one["chunk"], one["t"]) for one in found] == [(0, 7), (1, 5), (1, 41)]


def test_clearing_takes_the_class_and_leaves_the_note(path: Path) -> None:
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence())
    store.note(HERE, "q5_0", "look at the date")
    store.set(HERE, "q5_0", None)
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert (record.class_id, record.key, record.note) == (None, None, "look at the date")
    assert store.count() == 0
    store.note(HERE, "q5_0", "")
    assert open_store(path).get(HERE, "q5_0") is None


def test_a_label_again_keeps_the_note_and_without_new_branches_the_old_ones(path: Path) -> None:
    store = open_store(path)
    store.note(HERE, "q5_0", "hm")
    store.set(HERE, "q5_0", "unsure", evidence(), [branch(1)])
    store.set(HERE, "q5_0", "recovers", evidence())
    record = store.get(HERE, "q5_0")
    assert record is not None
    assert (record.class_id, record.note) == ("recovers", "hm")
    assert [one["id"] for one in record.branches] == [branch(1)["id"]]


def test_each_quant_has_its_own_label_at_a_root(path: Path) -> None:
    store = open_store(path, identity=review("q5_0", "q8_0"))
    store.set(HERE, "q5_0", "recovers", evidence())
    store.set(HERE, "q8_0", "quant_better", evidence())
    store.set(THERE, "q8_0", "quant_better", evidence())
    again = open_store(path, identity=review("q5_0", "q8_0"))
    assert again.class_of(HERE, "q5_0") == "recovers"
    assert (again.count(), again.count("q5_0"), again.count("q8_0")) == (3, 1, 2)
    assert again.counts("q8_0") == {"quant_better": 2}
    assert [(r.position, r.quant) for r in again.records("q8_0")] == [
        (THERE, "q8_0"),
        (HERE, "q8_0"),
    ]


def test_an_unknown_class_is_a_mistake_of_the_program(path: Path) -> None:
    with pytest.raises(ValueError, match="no such class"):
        open_store(path).set(HERE, "q5_0", "9")


def test_hints_are_kept_apart_and_never_counted(path: Path) -> None:
    store = open_store(path)
    store.set_hint(HERE, "q5_0", {"class": "malformed_tool_call", "text": "does not parse"})
    assert store.count() == 0
    assert store.get(HERE, "q5_0") is None
    store.save()
    again = open_store(path)
    hint = again.hint(HERE, "q5_0")
    assert hint is not None
    assert hint["text"] == "does not parse"
    assert (again.count(), list(again.records())) == (0, [])
    assert again.resume_at([(HERE, "q5_0")]) == 0
    assert json.loads(path.read_text())["labels"] == []


ROOTS = [(Position(0, t), "q5_0") for t in range(5)]


def test_a_reopened_review_goes_on_at_the_first_unlabelled_root_after_the_last_one(
    path: Path,
) -> None:
    store = open_store(path)
    assert store.resume_at(ROOTS) == 0
    for i in (0, 3, 2):
        store.set(*ROOTS[i], "unsure", evidence())
    assert open_store(path).resume_at(ROOTS) == 4
    store.set(*ROOTS[4], "unsure", evidence())
    assert open_store(path).resume_at(ROOTS) == 1
    store.set(*ROOTS[1], "unsure", evidence())
    assert open_store(path).resume_at(ROOTS) == 1
    assert store.resume_at([]) == 0


def test_it_goes_on_in_the_order_of_the_list_it_is_given(path: Path) -> None:
    store = open_store(path)
    store.set(*ROOTS[3], "unsure", evidence())
    by_cost = [ROOTS[i] for i in (4, 3, 0, 2, 1)]
    assert store.resume_at(by_cost) == 2
    assert store.resume_at([root for root in ROOTS if root != ROOTS[3]]) == 3
    assert store.resume_at([ROOTS[4], ROOTS[0]]) == 0


def test_a_root_passed_by_moves_the_place_to_resume_and_can_be_undone(path: Path) -> None:
    store = open_store(path)
    store.set(*ROOTS[0], "unsure", evidence())
    store.skip(*ROOTS[1])
    store.close()
    again = open_store(path)
    assert again.last == ROOTS[1]
    assert again.resume_at(ROOTS) == 2
    action = store.undo()
    assert action is not None
    assert (action.kind, action.position) == ("skip", ROOTS[1][0])
    assert open_store(path).resume_at(ROOTS) == 1


def test_two_reviewers_of_one_file_each_resume_at_their_own_place(path: Path) -> None:
    ann = open_store(path)
    ann.set(*ROOTS[0], "unsure", evidence())
    ann.close()
    bob = open_store(path, reviewer="bob")
    assert bob.last is None
    bob.set(*ROOTS[3], "unsure", evidence())
    assert open_store(path).last == ROOTS[0]


def test_a_root_with_a_note_alone_is_gone_back_to_until_it_is_passed_by(path: Path) -> None:
    store = open_store(path)
    store.set(*ROOTS[0], "unsure", evidence())
    store.note(*ROOTS[1], "look again")
    assert open_store(path).resume_at(ROOTS) == 1
    store.skip(*ROOTS[1])
    store.close()
    assert open_store(path).resume_at(ROOTS) == 2
    store.set(*ROOTS[3], "unsure", evidence())
    store.note(*ROOTS[3], "sure")
    assert open_store(path).resume_at(ROOTS) == 4
    store.set(*ROOTS[3], None)
    assert open_store(path).resume_at(ROOTS) == 3


def test_a_label_of_another_reviewer_is_kept_when_it_is_replaced(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "unsure", evidence())
    bob = open_store(path, reviewer="bob")
    bob.set(HERE, "q5_0", "recovers", evidence())
    bob.set(HERE, "q5_0", "both_fail", evidence())
    [old] = open_store(path).superseded()
    assert (old.class_id, old.reviewer) == ("unsure", "ann")
    assert old.extra["superseded"]["by"] == "bob"
    bob.undo()
    bob.undo()
    assert bob.superseded() == []
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert (record.class_id, record.reviewer) == ("unsure", "ann")


def test_a_note_on_anothers_label_leaves_it_as_it_was_given(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence(), reached="by KLD")
    bob = open_store(path, reviewer="bob")
    bob.note(HERE, "q5_0", "hm", evidence(near_tie_threshold=0.5), reached="by cost")
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert (record.class_id, record.reviewer, record.note) == ("recovers", "ann", "hm")
    assert (record.reached, record.evidence) == ("by KLD", evidence())
    assert bob.superseded() == []
    bob.set(HERE, "q5_0", None)
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert (record.class_id, record.reviewer, record.note) == (None, "bob", "hm")
    assert [old.reviewer for old in bob.superseded()] == ["ann"]


@pytest.mark.parametrize("labelled", [True, False])
def test_a_note_of_another_reviewer_is_kept_when_it_is_replaced(path: Path, labelled: bool) -> None:
    ann = open_store(path)
    ann.note(HERE, "q5_0", "look at the date")
    if labelled:
        ann.set(HERE, "q5_0", "recovers", evidence())
    bob = open_store(path, reviewer="bob")
    bob.note(HERE, "q5_0", "")
    [old] = open_store(path).superseded()
    assert (old.note, old.reviewer) == ("look at the date", "ann")
    bob.undo()
    record = open_store(path).get(HERE, "q5_0")
    assert record is not None
    assert (record.note, bob.superseded()) == ("look at the date", [])


def test_undo_and_redo_name_what_they_did_and_where(path: Path) -> None:
    store = open_store(path)
    assert store.undo() is None
    assert store.redo() is None
    store.set(HERE, "q5_0", "recovers", evidence())
    store.set(HERE, "q5_0", None)
    action = store.undo()
    assert action is not None
    assert str(action) == "clearing at c1:t41 of q5_0"
    assert action.before is not None
    assert action.before.class_id == "recovers"
    assert action.after is None
    assert store.class_of(HERE, "q5_0") == "recovers"
    store.set(THERE, "q5_0", "unsure", evidence())
    assert store.redo() is None


# ── any sequence of actions is what a simple model says ──────────────────────────────────────

_ROOT = st.sampled_from([(Position(0, t), quant) for t in (5, 6) for quant in ("q5_0", "q8_0")])
_STEP = st.one_of(
    st.tuples(st.just("set"), _ROOT, st.sampled_from([entry.id for entry in TAXONOMY])),
    st.tuples(st.just("clear"), _ROOT, st.none()),
    st.tuples(
        st.just("note"), _ROOT, st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    ),
    st.tuples(st.just("skip"), _ROOT, st.none()),
    st.tuples(st.sampled_from(["undo", "undo", "redo", "reopen"]), st.none(), st.none()),
)
Model = dict[tuple[Position, str], tuple[str | None, str]]


def _contents(store: LabelStore) -> Model:
    return {(r.position, r.quant): (r.class_id, r.note) for r in store.records()}


@settings(deadline=None, max_examples=60)
@given(st.lists(_STEP, max_size=25))
def test_any_sequence_of_actions_is_what_a_simple_model_says(
    steps: list[tuple[str, Any, Any]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.labels.json"
        identity, clock = review("q5_0", "q8_0"), Clock()
        store = open_store(path, identity=identity, now=clock)
        now: Model = {}
        last: tuple[Position, str] | None = None
        past: list[tuple[Model, Any]] = []
        future: list[tuple[Model, Any]] = []
        for what, root, value in steps:
            before = (dict(now), last)
            done = True
            if what == "set":
                store.set(root[0], root[1], value, evidence())
                now[root] = (value, now.get(root, (None, ""))[1])
            elif what == "clear":
                store.set(root[0], root[1], None)
                done = now.get(root, (None, ""))[0] is not None
                if done:
                    now[root] = (None, now[root][1])
            elif what == "note":
                store.note(root[0], root[1], value)
                done = now.get(root, (None, ""))[1] != value
                if done:
                    now[root] = (now.get(root, (None, ""))[0], value)
            elif what == "skip":
                store.skip(*root)
            elif what == "undo":
                assert (store.undo() is not None) == bool(past)
                if past:
                    future.append(before)
                    now, last = past.pop()
                done = False
            elif what == "redo":
                assert (store.redo() is not None) == bool(future)
                if future:
                    past.append(before)
                    now, last = future.pop()
                done = False
            else:
                store.close()
                store = open_store(path, identity=identity, now=clock)
                past, future, done = [], [], False
            if done:
                past.append(before)
                future, last = [], root
            now = {key: said for key, said in now.items() if said != (None, "")}
            assert _contents(store) == now
            assert store.last == last
            assert store.count() == sum(class_id is not None for class_id, _ in now.values())
        store.close()
        again = open_store(path, identity=identity)
        assert _contents(again) == now
        assert again.last == last


def test_a_folder_that_is_not_there_is_named_at_open(path: Path) -> None:
    with pytest.raises(LabelFileError, match=r"there is no folder .*nowhere.*--labels FILE"):
        open_store(path.parent / "nowhere" / "x.labels.json")


def test_the_documentation_has_the_classes_and_members_as_they_are(path: Path) -> None:
    text = (DOCS / "labels.md").read_text()
    for entry in TAXONOMY:
        row = f"| `{entry.key}` | `{entry.id}` | {entry.name} | {entry.definition} |"
        assert row in text
    store = open_store(path)
    store.set(HERE, "q5_0", "recovers", evidence(), [branch(1)])
    data = json.loads(path.read_text())
    [label] = data["labels"]
    names = [*data, *label, *label["branches"][0], *data["recordings"]["ref"]]
    assert [name for name in names if f"`{name}`" not in text] == []
    bare = [name for name in label["evidence"] if not name.endswith("_text")]
    assert [name for name in bare if f"`{name}" not in text] == []


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="this system has no sha256sum")
def test_the_documented_checksum_can_be_had_with_two_common_tools(path: Path) -> None:
    open_store(path).set(HERE, "q5_0", "recovers", evidence())
    command = """sed '/^"checksum"/,$d' "$1" | sha256sum"""
    done = subprocess.run(
        ["sh", "-c", command, "sh", path], capture_output=True, text=True, check=True
    )
    assert json.loads(path.read_text())["checksum"] == f"sha256:{done.stdout.split()[0]}"
