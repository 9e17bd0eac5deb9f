"""Label files in figures."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kldtui.cli import cli
from kldtui.errors import LabelFileError
from kldtui.label_report import write_report
from kldtui.position import Position
from tests.ui.review import open_review, open_top3_review


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Two labels and a note on the small pair; the note tries to be a table of its own."""
    session = open_review(tmp_path)
    while any(True for _ in session.index.scan()):
        pass
    session.count_anew()
    roots = [session.facts(i, 0) for i in range(session.index.layout.n) if session.flips(i)]
    session.set_label(roots[0], "1", "order")
    session.set_label(roots[1], "2", "order")
    session.set_note(roots[1], "a | b\n# c", "order")
    assert session.labels is not None
    write_report(session.labels)
    session.close()
    return tmp_path / "labels.json"


def test_the_summary_counts_classes_and_never_hints(labelled: Path) -> None:
    result = CliRunner().invoke(cli, ["labels", str(labelled), "--json"])
    assert result.exit_code == 0
    (entry,) = json.loads(result.output)
    assert entry["quant"] == "q4"
    assert entry["labelled"] == 2
    assert entry["classes"]["recovers"] == 1
    assert sum(entry["classes"].values()) == 2
    assert entry["notes"] == 1


def test_the_report_has_a_row_a_label_and_text_stays_in_its_cell(labelled: Path) -> None:
    text = labelled.with_suffix(".md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| c0:")]
    assert len(rows) == 2
    assert "a \\| b" in rows[1]
    assert CliRunner().invoke(cli, ["labels", str(labelled)]).output.strip() == text.strip()


def test_tokens_and_notes_are_never_markup_in_the_report(labelled: Path) -> None:
    data = json.loads(labelled.read_text())
    data["checksum"] = None
    data["labels"][0]["evidence"] |= {"ref_text": "```", "quant_text": " `a|b\x1b"}
    data["labels"][0]["note"] = "*no* <b>bold</b> q5_0 _x_ `c`"
    labelled.write_text(json.dumps(data))
    text = CliRunner().invoke(cli, ["labels", str(labelled)]).output
    assert "| ````'```'```` → ``' `a\\|b\\x1b'`` |" in text
    assert r"\*no\* \<b\>bold\</b\> q5_0 \_x\_ \`c\`" in text


def test_a_cost_that_is_a_bound_is_stored_and_reported_as_one(tmp_path: Path) -> None:
    session = open_top3_review(tmp_path)
    facts = session.facts_of(Position(0, 10), 0)
    session.set_label(facts, "1", "order")
    assert session.labels is not None
    report = write_report(session.labels).read_text(encoding="utf-8")
    record = session.label(facts.position, 0)
    session.close()
    assert record is not None
    assert record.evidence["ref_p_quant_is_bound"] is True
    assert record.evidence["quant_p_ref_is_bound"] is False
    assert f"| ≥ {facts.cost:.3f} | ≥ {facts.kld:.3f} |" in report
    data = json.loads((tmp_path / "labels.json").read_text())
    for name in ("ref_p_quant_is_bound", "quant_p_ref_is_bound"):
        del data["labels"][0]["evidence"][name]
    old = tmp_path / "old.labels.json"
    old.write_text(json.dumps(data | {"checksum": None}))
    printed = CliRunner().invoke(cli, ["labels", str(old)])
    assert f"| {facts.cost:.3f} | ≥ {facts.kld:.3f} |" in printed.output


def test_what_is_no_label_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    other = tmp_path / "x.json"
    other.write_text("{}")
    result = CliRunner().invoke(cli, ["labels", str(other)])
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_report_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_review(tmp_path)
    assert session.labels is not None

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as failing:
        failing.setattr(Path, "replace", full)
        with pytest.raises(LabelFileError, match="No space left"):
            write_report(session.labels)
    assert sorted(tmp_path.iterdir()) == before
    session.close()
