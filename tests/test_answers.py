"""Answer-level flips, from files as lm-evaluation-harness writes them."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import tempfile
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.answers import Comparison, compare_answers, task_of
from kldtui.answers.samples import read_samples
from kldtui.cli import cli
from kldtui.errors import AnswerFileError
from kldtui.proportions import mcnemar, paired_difference, share

CHOICES = (" red", " green", " dark blue")


def choice(doc: int, target: int, answer: int, **fields: Any) -> dict[str, Any]:
    """A multiple-choice sample: `answer` has the best log-likelihood."""
    values = [-5.0 - i for i in range(3)]
    values[answer] = -1.0
    return {
        "doc_id": doc,
        "doc": {"question": "?"},
        "target": str(target),
        "arguments": {f"gen_args_{i}": {"arg_0": "Q:", "arg_1": c} for i, c in enumerate(CHOICES)},
        "resps": [[[str(v), "False"]] for v in values],
        "filtered_resps": [[str(v), "False"] for v in values],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"hash of {doc}",
        "prompt_hash": f"prompt of {doc}",
        "target_hash": "t",
        "acc": float(target == answer),
    } | fields


def text(doc: int, target: str, answer: str, filter: str = "strict-match") -> dict[str, Any]:
    """A generated answer, judged by exact_match."""
    return {
        "doc_id": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": "Q:", "arg_1": {"until": ["Q:"]}}},
        "resps": [[f"so {answer}"]],
        "filtered_resps": [answer],
        "filter": filter,
        "metrics": ["exact_match"],
        "doc_hash": f"hash of {doc}",
        "exact_match": float(target == answer),
    }


def write(path: Path, samples: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def samples_at(folder: Path, task: str, samples: Iterable[dict[str, Any]]) -> Path:
    return write(folder / f"samples_{task}_2026-05-20T12-34-56.123456.jsonl", samples)


def only(base: Path, quant: Path, **options: Any) -> Comparison:
    (found,) = compare_answers(base, quant, **options).comparisons
    return found


# -- what is counted -------------------------------------------------------------------------------


def test_answers_are_counted_by_where_they_went(tmp_path: Path) -> None:
    #          target, base, quant
    given_ = [
        (0, 0, 0),  # right, right
        (0, 0, 1),  # correct to incorrect
        (1, 1, 2),  # correct to incorrect
        (2, 0, 2),  # incorrect to correct
        (2, 0, 1),  # another wrong answer
        (2, 1, 1),  # the same wrong answer
    ]
    base = samples_at(
        tmp_path / "b", "arc", (choice(i, t, a) for i, (t, a, _) in enumerate(given_))
    )
    quant = samples_at(
        tmp_path / "q", "arc", (choice(i, t, b) for i, (t, _, b) in enumerate(given_))
    )
    found = only(base, quant)
    assert (found.task, found.metric, found.filter, found.documents) == ("arc", "acc", "none", 6)
    assert found.correct_to_incorrect == 2
    assert found.incorrect_to_correct == 1
    assert found.incorrect_to_incorrect == 1
    assert found.flips[:2] == (3, 6)
    assert found.all_flips[:2] == (4, 6)
    assert found.base_accuracy.value == pytest.approx(3 / 6)
    assert found.quant_accuracy.value == pytest.approx(2 / 6)
    assert found.difference == pytest.approx(-1 / 6)
    assert [(change.doc_id, change.base, change.quant) for change in found.changes] == [
        ("1", "0", "1"),
        ("2", "1", "2"),
        ("3", "0", "2"),
        ("4", "0", "1"),
    ]


def test_acc_norm_takes_the_likeliest_a_character(tmp_path: Path) -> None:
    # "dark blue" has 9 characters, so -4.5 of it is better than -2.4 of "red".
    sample = choice(0, 2, 0, metrics=["acc", "acc_norm"], acc=0.0, acc_norm=1.0)
    sample["filtered_resps"] = [["-2.4", "False"], ["-9", "False"], ["-4.5", "False"]]
    other = sample | {"filtered_resps": [["-2.4", "False"], ["-9", "False"], ["-9", "False"]]}
    other["acc_norm"] = 0.0
    base = write(tmp_path / "base.jsonl", [sample])
    quant = write(tmp_path / "quant.jsonl", [other])
    found = {one.metric: one for one in compare_answers(base, quant).comparisons}
    assert found["acc"].changes == ()
    (change,) = found["acc_norm"].changes
    assert (change.base, change.quant) == ("2", "0")
    assert found["acc_norm"].answers_known == 1


def test_an_answer_that_contradicts_its_metric_is_not_taken_for_known(tmp_path: Path) -> None:
    """A metric that took the answer in a way of its own: only right and wrong are certain."""
    base = write(tmp_path / "base.jsonl", [choice(0, 2, 0), choice(1, 2, 0, acc=1.0)])
    quant = write(tmp_path / "quant.jsonl", [choice(0, 2, 1), choice(1, 2, 1)])
    found = only(base, quant)
    assert found.answers_known == 1
    assert found.flips[:2] == (1, 2)
    assert found.all_flips[:2] == (1, 1)


def test_each_filter_of_a_generated_answer_is_compared_by_itself(tmp_path: Path) -> None:
    base = write(
        tmp_path / "base.jsonl",
        [text(0, "7", "7"), text(0, "7", "7", "flexible-extract"), text(1, "8", "1")],
    )
    quant = write(
        tmp_path / "quant.jsonl",
        [text(0, "7", "[invalid]"), text(0, "7", " 7 ", "flexible-extract"), text(1, "8", "2")],
    )
    found = {one.filter: one for one in compare_answers(base, quant).comparisons}
    assert found["strict-match"].correct_to_incorrect == 1
    assert found["strict-match"].incorrect_to_incorrect == 1
    assert found["flexible-extract"].documents == 1


def test_metrics_that_are_no_verdicts_are_left_out_and_named(tmp_path: Path) -> None:
    samples = [
        text(i, "7", "7") | {"metrics": ["exact_match", "bleu"], "bleu": 0.5} for i in (0, 1)
    ]
    a, b = (write(tmp_path / name, samples) for name in ("a.jsonl", "b.jsonl"))
    report = compare_answers(a, b)
    assert [one.metric for one in report.comparisons] == ["exact_match"]
    assert any("bleu is neither right nor wrong" in note for note in report.notes)
    with pytest.raises(AnswerFileError, match="known are: exact_match"):
        compare_answers(a, b, metric="bleu")


def test_old_files_without_a_list_of_metrics_are_read(tmp_path: Path) -> None:
    def old(doc: int, acc: str) -> dict[str, Any]:
        return {"doc_id": doc, "doc": {}, "target": "A", "logit_0": "-1.5", "acc": acc}

    base = write(tmp_path / "base.jsonl", [old(0, "1.0"), old(1, "0.0")])
    quant = write(tmp_path / "quant.jsonl", [old(0, "0.0"), old(1, "0.0")])
    found = only(base, quant)
    assert (found.metric, found.correct_to_incorrect, found.answers_known) == ("acc", 1, 0)
    assert math.isnan(found.all_flips.value)
    assert found.to_json()["all_flips"] is None


# -- which documents are the same ------------------------------------------------------------------


def test_documents_that_do_not_match_are_left_out_and_reported(tmp_path: Path) -> None:
    base = samples_at(tmp_path / "b", "arc", [choice(i, 0, 0) for i in range(5)])
    quant = samples_at(
        tmp_path / "q",
        "arc",
        [
            choice(1, 0, 1),
            choice(2, 0, 1, doc_hash="of another text"),
            choice(3, 1, 1),  # another target
            choice(4, 0, 0, prompt_hash="other examples"),
            choice(9, 0, 0),
        ],
    )
    report = compare_answers(base, quant)
    (found,) = report.comparisons
    assert (found.documents, found.correct_to_incorrect) == (2, 1)
    notes = "\n".join(report.notes)
    assert "1 only in the base (first: doc_id 0)" in notes
    assert "1 only in the quant (first: doc_id 9)" in notes
    assert "2 another document, or another target" in notes
    assert "1 of 2 prompts differ (first: doc_id 4)" in notes


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            [choice(7, 0, 0)],
            r"arc: 2 only in the base \(first: doc_id 0\); arc: 1 only in the quant",
        ),
        ([choice(1, 0, 0, doc_hash="of another text")], "another document, or another target"),
    ],
)
def test_files_without_a_common_document_are_refused(
    tmp_path: Path, theirs: list[dict[str, Any]], words: str
) -> None:
    base = samples_at(tmp_path / "b", "arc", [choice(0, 0, 0), choice(1, 0, 0)])
    quant = samples_at(tmp_path / "q", "arc", theirs)
    for more in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["answers", str(base), str(quant), *more])
        assert done.exit_code == 2
        assert "have no document in common" in done.stderr
        assert re.search(words, done.stderr)
        assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_a_sample_that_is_there_again_counts_once(tmp_path: Path) -> None:
    base = samples_at(tmp_path / "b", "arc", [choice(0, 0, 1), choice(0, 0, 0)])
    quant = samples_at(tmp_path / "q", "arc", [choice(0, 0, 0)])
    report = compare_answers(base, quant)
    assert report.comparisons[0].documents == 1
    assert report.comparisons[0].base_accuracy.part == 1
    assert any("1 samples are there again; the last counts" in note for note in report.notes)


def test_folders_are_compared_task_by_task_with_a_total(tmp_path: Path) -> None:
    for side, answer in (("base", 0), ("quant", 1)):
        folder = tmp_path / side / "model__name"
        samples_at(folder, "arc_easy", [choice(0, 0, answer), choice(1, 0, 0)])
        samples_at(folder, "gsm8k", [text(0, "0", str(answer))])
    write(
        tmp_path / "base" / "samples_arc_easy_2025-01-01T00-00-00.000001.jsonl", [choice(7, 0, 0)]
    )
    samples_at(tmp_path / "quant", "hellaswag", [choice(0, 0, 0)])
    report = compare_answers(tmp_path / "base", tmp_path / "quant")
    assert [(one.task, one.documents) for one in report.comparisons] == [
        ("arc_easy", 2),
        ("gsm8k", 1),
    ]
    assert report.total is not None
    assert (report.total.documents, report.total.correct_to_incorrect) == (3, 2)
    assert report.total.flips.value == pytest.approx(2 / 3)
    notes = "\n".join(report.notes)
    assert "base has no samples of: hellaswag" in notes
    assert "several files of arc_easy; the newest is taken" in notes


def test_two_tasks_are_not_compared_with_each_other(tmp_path: Path) -> None:
    base = samples_at(tmp_path, "arc", [choice(0, 0, 0)])
    quant = samples_at(tmp_path, "mmlu", [choice(0, 0, 0)])
    with pytest.raises(AnswerFileError, match=r"is of the task arc, .* of mmlu"):
        compare_answers(base, quant)
    # A file that was renamed does not say what it is of.
    assert only(base, quant.rename(tmp_path / "q4.jsonl")).task == "arc"


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("samples_arc_easy_2026-05-20T12-34-56.123456.jsonl", "arc_easy"),
        ("samples_mmlu_2020_2026-05-20T12-34-56.jsonl.gz", "mmlu_2020"),
        ("samples_gsm8k.jsonl", "gsm8k"),
        ("q4.jsonl", "q4"),
    ],
)
def test_the_task_is_in_the_name_that_the_harness_gives(name: str, task: str) -> None:
    assert task_of(Path(name)) == task


def test_compressed_samples_are_read(tmp_path: Path) -> None:
    plain = write(tmp_path / "base.jsonl", [choice(0, 0, 0)])
    zipped = tmp_path / "quant.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert only(plain, zipped).documents == 1
    zipped.write_bytes(zipped.read_bytes()[:-9])
    with pytest.raises(AnswerFileError, match="cannot be read"):
        compare_answers(plain, zipped)


ZIPPED = gzip.compress(b"".join(json.dumps(choice(i, 0, 0)).encode() + b"\n" for i in range(9)))


@settings(deadline=None, max_examples=200)
@given(st.integers(2, len(ZIPPED) - 1), st.integers(1, 255))
def test_compressed_samples_that_are_damaged_are_refused_or_read_whole(at: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples_arc.jsonl.gz"
        file.write_bytes(ZIPPED[:at] + bytes([ZIPPED[at] ^ flip]) + ZIPPED[at + 1 :])
        with contextlib.suppress(AnswerFileError):
            assert len(read_samples(file).documents) == 9


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no samples"),
        (b'{"doc_id": 0, "acc": 1.0}\n{"doc_id"', "line 2: is no JSON"),
        (b'{"format": "kldtui-run"}\n', "line 1: is no sample of lm-evaluation-harness"),
        (b"[1]\n", "line 1: is no sample"),
        (b'{"doc_id": 0, "doc_hash": "a"}\n{"doc_id": 0, "doc_hash": "b"}', "another document"),
        (b'{"doc_id": 0, "target": "x"}\n', "share no metric"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    with pytest.raises(AnswerFileError, match=words) as caught:
        compare_answers(path, path)
    assert "\n" not in str(caught.value)


# -- uncertainty -----------------------------------------------------------------------------------


def test_shares_have_wilsons_interval() -> None:
    # Newcombe 1998, table I: 81/263, 15/148, 0/20, 1/29.
    for count, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = share(count, total)
        assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    assert math.isnan(share(0, 0).value)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_exact_binomial_test(won: int, lost: int) -> None:
    n, k = won + lost, min(won, lost)
    exact = 2 * sum(Fraction(math.comb(n, i), 2**n) for i in range(k + 1))
    assert mcnemar(won, lost) == pytest.approx(min(1.0, float(exact)), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 100))
def test_the_paired_interval_holds_the_difference(won: int, lost: int, rest: int) -> None:
    total = won + lost + rest
    found = paired_difference(won, lost, total)
    if not total:
        assert math.isnan(found.value)
        return
    assert found.value == (won - lost) / total
    assert -1 <= found.low < found.high <= 1
    mirrored = paired_difference(lost, won, total)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_every_figure_and_speaks_json(tmp_path: Path) -> None:
    base = samples_at(tmp_path / "b", "arc", [choice(i, 0, 0) for i in range(4)])
    quant = samples_at(tmp_path / "q", "arc", [choice(i, 0, int(i == 2)) for i in range(4)])
    runner = CliRunner()
    shown = runner.invoke(cli, ["answers", str(base), str(quant), "--list"])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    for part in (
        "accuracy, base 100.00 %",
        "accuracy, quant 75.00 %",
        "correct → incorrect 1",
        "flips 25.00 %",
        "McNemar p = 1",
        "doc 2: correct to incorrect '0' → '1'",
    ):
        assert part in words
    found = json.loads(
        runner.invoke(cli, ["answers", str(base), str(quant), "--json", "--list"]).stdout
    )
    (task,) = found["tasks"]
    assert task["flips"] == 0.25
    assert task["flips_low"] < 0.25 < task["flips_high"]
    assert task["changes"] == [
        {"doc_id": "2", "kind": "correct_to_incorrect", "base": "0", "quant": "1"}
    ]
    assert found["total"] is None


def test_text_from_a_file_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    base = write(tmp_path / "base.jsonl", [text(0, "7", "7")])
    quant = write(tmp_path / "quant.jsonl", [text(0, "7", "\x1b]52;c;AAAA\x07")])
    shown = CliRunner().invoke(cli, ["answers", str(base), str(quant), "--list"])
    assert "\x1b" not in shown.output
    failed = CliRunner().invoke(cli, ["answers", str(base), str(tmp_path / "none.jsonl")])
    assert failed.exit_code == 2
    assert failed.output.count("\n") == 1
