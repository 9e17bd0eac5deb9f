"""Files of branches made ahead: only what belongs is taken, and damage costs one branch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jsonschema
import numpy as np
import pytest

from kldtui.branching import Arm, Branch, Parent
from kldtui.engines.base import Token
from kldtui.errors import KldtuiError
from kldtui.labels import disk
from kldtui.position import Position
from kldtui.review.branch_log import BranchLog
from kldtui.review.shelf import Shelf
from tests.builders_engines import MemoryRecording, info

P = ParamSpec("P")
R = TypeVar("R")

STREAM = [list(range(5, 25)), list(range(30, 50))]
REF = MemoryRecording(STREAM, lambda _: np.zeros(100))
HERE = Position(1, 12)


def branch(code: str = "R·r", **more: Any) -> Branch:
    fields: dict[str, Any] = {
        "position": HERE,
        "arm": Arm.parse(code),
        "quant": "q4",
        "start_id": 77,
        "prefix_ids": STREAM[1][:12],
        "tokens": [Token(id, b"w%d" % id, -0.5, ((id, -0.5), (3, -2.0))) for id in (1, 2)],
        "stop": "eog",
        "complete": True,
        "engine": info().to_json(),
    }
    return Branch(**(fields | more))


def written(path: Path, *branches: Branch) -> BranchLog:
    log = BranchLog.open(path, REF, ["q4"], missing_ok=True)
    for each in branches:
        log.add(each)
    return log


def opened(path: Path, names: tuple[str, ...] = ("q4",)) -> BranchLog:
    return BranchLog.open(path, REF, names)


def test_what_is_added_is_found_by_root_and_key(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    first = branch()
    inner = branch("Q·s", parent=Parent(first.id, 1), prefix_ids=[*STREAM[1][:12], 77, 1])
    log = written(path, first, branch("R·q"), inner)
    for held in (log, opened(path)):
        found = held.of(HERE, "q4")
        assert set(found) == {"R·r", "R·q", inner.key}
        assert found["R·r"] == first
        assert held.of(Position(1, 13), "q4") == {}
        assert len(held) == 3
    schema = json.loads((Path(__file__).parents[1] / "docs/branches.schema.json").read_text())
    for line in path.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)


def test_of_two_branches_of_one_key_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    later = branch(tokens=[Token(9, b"x", None, ())])
    written(path, branch(), later)
    assert opened(path).of(HERE, "q4")["R·r"].ids == [9]
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("when", ["write", "fsync"])
def test_two_programs_that_add_to_one_file_each_find_their_own(tmp_path: Path, when: str) -> None:
    path = tmp_path / "b.jsonl"
    one, two = BranchLog(path), BranchLog(path)
    ours, theirs = branch(), branch("R·q", tokens=[])
    other = threading.Thread(target=two.add, args=[theirs])

    class Between(disk.Files):
        def call(self, name: str, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
            """The other program begins before this call, and has time."""
            if name == when and not other.ident:
                other.start()
                other.join(0.2)
            return do(*args, **kwargs)

    one._files = Between()
    one.add(ours)
    other.join()
    assert one.of(HERE, "q4") == {"R·r": ours}
    assert two.of(HERE, "q4") == {"R·q": theirs}
    assert set(opened(path).of(HERE, "q4")) == {"R·r", "R·q"}


def test_a_server_with_bos_counts_as_of_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch(prefix_ids=[1, *STREAM[1][1:12]]))
    assert len(opened(path)) == 1


def test_a_cut_last_line_is_left_out_and_written_behind(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch(), branch("R·q"))
    whole = path.read_bytes()
    for cut in (1, 30, 200):
        path.write_bytes(whole[:-cut])
        log = opened(path)
        assert set(log.of(HERE, "q4")) == {"R·r"}
        assert "last line was cut" in log.warnings[0]
        log.add(branch("Q·q"))
        assert set(log.of(HERE, "q4")) == {"R·r", "Q·q"}
        assert set(opened(path).of(HERE, "q4")) >= {"R·r", "Q·q"}


def test_a_damaged_line_costs_that_branch_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch(), branch("R·q"), branch("Q·q"))
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"limit"', b'"eog"').replace(b'"text"', b'"test"')
    path.write_bytes(b"\n".join(lines))
    log = opened(path)
    assert set(log.of(HERE, "q4")) == {"R·r", "Q·q"}
    assert len(log.warnings) == 1
    assert "left out" in log.warnings[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"quant": "q5"}, "no quant 'q5'"),
        ({"position": Position(7, 12)}, "no chunk 7"),
        ({"prefix_ids": [*STREAM[1][:11], 99]}, "other tokens before c1:t12"),
        ({"prefix_ids": STREAM[1][:5]}, "other tokens"),
    ],
)
def test_branches_of_another_review_are_refused_or_left_out(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    path = tmp_path / "b.jsonl"
    log = BranchLog(path)
    log.add(branch(**more))
    with pytest.raises(KldtuiError, match=words):
        opened(path)
    log.add(branch("Q·q"))
    mixed = opened(path)
    assert len(mixed) == 1
    assert words in mixed.warnings[0]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KldtuiError, match=r"none\.jsonl: no such file"):
        opened(tmp_path / "none.jsonl")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(KldtuiError, match="cannot be written"):
        BranchLog(tmp_path / "nowhere" / "b.jsonl").add(branch())


def test_a_line_by_another_program_is_read_whatever_its_order(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch())
    data = json.loads(path.read_text())
    del data["sha256"]
    path.write_text(json.dumps(data) + "\n")
    log = opened(path)
    assert "its checksum is wrong" in log.warnings[0]


# ── of several places where branches are, which counts ───────────────────────────────────────


def test_now_counts_before_a_label_and_that_before_what_was_made_ahead(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    written(one, branch(start_id=1), branch("R·q", start_id=1), branch("Q·q", start_id=1))
    written(two, branch(start_id=2), branch("Q·r", start_id=2))
    shelf = Shelf()
    shelf.logs = [opened(one), opened(two)]
    shelf.put(branch("R·q", start_id=4))
    stored = [branch("Q·q", start_id=3).to_json()]
    found = shelf.of(HERE, "q4", lambda: stored)
    assert {key: each.start_id for key, each in found.items()} == {
        "R·r": 2,
        "R·q": 4,
        "Q·q": 3,
        "Q·r": 2,
    }


def test_a_stored_branch_that_cannot_be_read_is_said_and_left_out() -> None:
    shelf = Shelf()
    assert shelf.of(HERE, "q4", lambda: [{"id": "x"}]) == {}
    assert "not a branch" in shelf.warnings[0]


def test_a_branch_that_is_dropped_takes_along_those_inside_it() -> None:
    shelf = Shelf()
    outer, other = branch(), branch("R·q")
    inner = branch("R·s", parent=Parent(outer.id, 0))
    innermost = branch("Q·s", parent=Parent(inner.id, 0))
    for each in (outer, other, inner, innermost):
        shelf.put(each)
    shelf.drop(HERE, "q4", "R·r")
    assert set(shelf.of(HERE, "q4", list)) == {"R·q"}


@pytest.mark.parametrize(
    "content",
    [
        b'{\n"format":"kldtui-labels",\n"version":1,\n',
        b"_logits_" + bytes(4096),
        b'{"format": "kldtui-run", "version": 1}\n',
        b'{"prompt": "x"}\n',
        b"\x00" * 100,
    ],
)
def test_nothing_is_ever_appended_to_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    for missing_ok in (True, False):
        with pytest.raises(KldtuiError, match="no file of branches"):
            BranchLog.open(path, REF, ["q4"], missing_ok=missing_ok)
    assert path.read_bytes() == content


@pytest.mark.parametrize("length", [0, 3, 7, 200])
def test_a_file_cut_in_its_first_branch_goes_on(tmp_path: Path, length: int) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch())
    path.write_bytes(path.read_bytes()[:length])
    written(path, branch())
    assert set(opened(path).of(HERE, "q4")) == {"R·r"}


def test_many_faults_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    written(path, branch())
    with path.open("ab") as file:
        file.write(b"nonsense\n" * 1000)
    warnings = opened(path).warnings
    assert len(warnings) == 4
    assert "997 more" in warnings[-1]
