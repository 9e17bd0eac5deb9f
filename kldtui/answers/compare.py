"""Two files of answers, compared: flips, all flips, accuracies, and how sure that is.

Knows: samples that were read, and the figures of "Accuracy is Not All You Need".
Must not know: how a sample file is laid out, recordings, token flips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kldtui.answers.samples import (
    Identity,
    Key,
    Sample,
    TaskSamples,
    is_named,
    read_samples,
    task_of,
)
from kldtui.errors import AnswerFileError
from kldtui.proportions import Share, mcnemar, paired_difference, share

_FIRST_METRICS = ("acc", "exact_match", "acc_norm")
"""Which metric stands for a task in the total, in this order; else the first by name."""
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Change:
    """A document whose answer changed between right and wrong, or between two wrong ones."""

    doc_id: str
    kind: str
    """`correct_to_incorrect`, `incorrect_to_correct` or `incorrect_to_incorrect`"""
    base: str | None
    quant: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One task, metric and filter, over the documents that both files have. Fractions of 1.

    flips: answers that changed between right and wrong. all_flips: also those that changed from
    one wrong answer to another; over `answers_known` documents, where both answers are known.
    difference: accuracy of the quant minus that of the base. p_value: exact McNemar test, two
    sided: how likely so uneven flips are if neither model is better.
    """

    task: str
    metric: str
    filter: str
    documents: int
    base_accuracy: Share
    quant_accuracy: Share
    difference: float
    difference_low: float
    difference_high: float
    p_value: float
    correct_to_incorrect: int
    incorrect_to_correct: int
    incorrect_to_incorrect: int
    answers_known: int
    flips: Share
    all_flips: Share
    changes: tuple[Change, ...]

    def to_json(self, *, with_changes: bool = False) -> dict[str, Any]:
        """Stable names (docs/json.md); None where nothing was compared."""
        out: dict[str, Any] = {
            "task": self.task,
            "metric": self.metric,
            "filter": self.filter,
            "documents": self.documents,
            **_share_json("base_accuracy", self.base_accuracy),
            **_share_json("quant_accuracy", self.quant_accuracy),
            "accuracy_difference": _finite(self.difference),
            "accuracy_difference_low": _finite(self.difference_low),
            "accuracy_difference_high": _finite(self.difference_high),
            "mcnemar_p": _finite(self.p_value),
            "correct_to_incorrect": self.correct_to_incorrect,
            "incorrect_to_correct": self.incorrect_to_correct,
            "incorrect_to_incorrect": self.incorrect_to_incorrect,
            "answers_known": self.answers_known,
            **_share_json("flips", self.flips),
            **_share_json("all_flips", self.all_flips),
        }
        if with_changes:
            out["changes"] = [
                {
                    "doc_id": change.doc_id,
                    "kind": change.kind,
                    "base": change.base,
                    "quant": change.quant,
                }
                for change in self.changes
            ]
        return out


@dataclass(frozen=True, slots=True)
class Report:
    """Every comparison, the total over tasks (one metric each), and what to know beforehand."""

    comparisons: tuple[Comparison, ...]
    total: Comparison | None
    notes: tuple[str, ...]

    def to_json(self, *, with_changes: bool = False) -> dict[str, Any]:
        """Stable names (docs/json.md)."""
        return {
            "tasks": [each.to_json(with_changes=with_changes) for each in self.comparisons],
            "total": None if self.total is None else self.total.to_json(),
            "notes": list(self.notes),
        }


def _share_json(name: str, value: Share) -> dict[str, Any]:
    return {
        name: _finite(value.value),
        f"{name}_low": _finite(value.low),
        f"{name}_high": _finite(value.high),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare_answers(base: Path, quant: Path, metric: str | None = None) -> Report:
    """Compare two sample files, or every task that two folders of them share.

    metric: only this one; else every metric that is right or wrong (0 or 1).
    Raises AnswerFileError.
    """
    notes: list[str] = []
    ours, theirs = _load(base, notes), _load(quant, notes)
    if len(ours) == len(theirs) == 1:
        _pair_up(ours, theirs, base, quant)
    tasks = [task for task in ours if task in theirs]
    for mine, other, place in ((ours, theirs, quant), (theirs, ours, base)):
        alone = sorted(mine.keys() - other.keys())
        if alone:
            notes.append(f"{place} has no samples of: {', '.join(alone)}")
    if not tasks:
        raise AnswerFileError(
            f"{base} and {quant} have no task in common; give files of the same task"
        )
    found = []
    for task in tasks:
        found += _compare_task(ours[task], theirs[task], metric, notes)
    if not found:
        what = "metric that is right or wrong" if metric is None else f"metric {metric!r}"
        known = sorted({name for task in tasks for name, _ in ours[task].samples})
        raise AnswerFileError(
            f"{base} and {quant} share no {what}"
            + (f"; known are: {', '.join(known)}" if known else "")
        )
    if not any(one.documents for one in found):
        why = f" ({'; '.join(notes[:_NAMED])})" if notes else ""
        raise AnswerFileError(
            f"{base} and {quant} have no document in common{why}; give samples of the same "
            "documents"
        )
    return Report(tuple(found), _total(found), tuple(notes))


def _load(place: Path, notes: list[str]) -> dict[str, TaskSamples]:
    """The samples by task; of a folder the newest file of each task, wherever below it."""
    if not place.is_dir():
        return {one.task: one for one in [read_samples(place)]}
    paths = sorted(place.rglob("samples_*.jsonl*"), key=lambda path: path.name)
    chosen: dict[str, Path] = {}
    again: set[str] = set()
    for path in paths:
        task = task_of(path)
        if task in chosen:
            again.add(task)
        chosen[task] = path
    if not chosen:
        raise AnswerFileError(
            f"{place}: holds no samples_*.jsonl; run lm_eval with --log_samples --output_path"
        )
    for task in sorted(again):
        notes.append(f"{place}: several files of {task}; the newest is taken: {chosen[task].name}")
    return {task: read_samples(path) for task, path in chosen.items()}


def _pair_up(
    ours: dict[str, TaskSamples], theirs: dict[str, TaskSamples], base: Path, quant: Path
) -> None:
    """Two single files are of one task, unless the harness's own names say otherwise."""
    (mine,), (other,) = ours.values(), theirs.values()
    if mine.task == other.task:
        return
    if is_named(mine.path) and is_named(other.path):
        raise AnswerFileError(
            f"{base} is of the task {mine.task}, {quant} of {other.task}; give files of one task"
        )
    task = other.task if is_named(other.path) else mine.task
    for named in (ours, theirs):
        (one,) = named.values()
        named.clear()
        one.task = task
        named[task] = one


def _compare_task(
    base: TaskSamples, quant: TaskSamples, metric: str | None, notes: list[str]
) -> list[Comparison]:
    task = base.task
    both = [doc for doc in base.documents if doc in quant.documents]
    other = [doc for doc in both if not _same(base.documents[doc], quant.documents[doc])]
    for words, alone in (
        ("only in the base", [doc for doc in base.documents if doc not in quant.documents]),
        ("only in the quant", [doc for doc in quant.documents if doc not in base.documents]),
        ("another document, or another target, under the same doc_id; left out", other),
    ):
        if alone:
            notes.append(f"{task}: {len(alone):,} {words} (first: doc_id {alone[0]})")
    different = set(other)
    shared = [doc for doc in both if doc not in different]
    prompts = [doc for doc in shared if _other_prompt(base.documents[doc], quant.documents[doc])]
    if prompts:
        notes.append(
            f"{task}: {len(prompts):,} of {len(shared):,} prompts differ (first: doc_id "
            f"{prompts[0]}): another template or other examples, so not the quantization alone"
        )
    for one in (base, quant):
        if one.repeated:
            notes.append(
                f"{one.path.name}: {one.repeated:,} samples are there again; the last counts"
            )
        for name in one.graded:
            if metric in (None, name):
                notes.append(f"{task}: {name} is neither right nor wrong; left out")
    return [
        _compare(task, key, shared, base.samples[key], quant.samples[key])
        for key in base.samples
        if key in quant.samples and metric in (None, key[0])
    ]


def _same(a: Identity, b: Identity) -> bool:
    hashes = None in (a.doc_hash, b.doc_hash) or a.doc_hash == b.doc_hash
    return hashes and (None in (a.target, b.target) or a.target == b.target)


def _other_prompt(a: Identity, b: Identity) -> bool:
    return None not in (a.prompt_hash, b.prompt_hash) and a.prompt_hash != b.prompt_hash


def _compare(
    task: str, key: Key, docs: list[str], base: dict[str, Sample], quant: dict[str, Sample]
) -> Comparison:
    pairs = [(doc, base[doc], quant[doc]) for doc in docs if doc in base and doc in quant]
    changes = [change for pair in pairs if (change := _change(*pair)) is not None]
    kinds = Counter(change.kind for change in changes)
    known = sum(a.answer is not None and b.answer is not None for _, a, b in pairs)
    return _comparison(
        task,
        *key,
        n=len(pairs),
        right=(sum(a.correct for _, a, _ in pairs), sum(b.correct for _, _, b in pairs)),
        kinds=kinds,
        known=known,
        known_flips=sum(
            a.correct != b.correct
            for _, a, b in pairs
            if a.answer is not None and b.answer is not None
        ),
        changes=tuple(changes),
    )


def _change(doc: str, base: Sample, quant: Sample) -> Change | None:
    if base.correct and not quant.correct:
        kind = "correct_to_incorrect"
    elif quant.correct and not base.correct:
        kind = "incorrect_to_correct"
    elif (
        base.correct or None in (base.answer, quant.answer) or base.answer == quant.answer
    ):  # both right, or no other answer
        return None
    else:
        kind = "incorrect_to_incorrect"
    return Change(doc, kind, base.answer, quant.answer)


def _comparison(
    task: str,
    metric: str,
    filter_name: str,
    *,
    n: int,
    right: tuple[int, int],
    kinds: Mapping[str, int],
    known: int,
    known_flips: int,
    changes: tuple[Change, ...],
) -> Comparison:
    lost, won = kinds.get("correct_to_incorrect", 0), kinds.get("incorrect_to_correct", 0)
    other = kinds.get("incorrect_to_incorrect", 0)
    difference = paired_difference(won, lost, n)
    return Comparison(
        task=task,
        metric=metric,
        filter=filter_name,
        documents=n,
        base_accuracy=share(right[0], n),
        quant_accuracy=share(right[1], n),
        difference=difference.value,
        difference_low=difference.low,
        difference_high=difference.high,
        p_value=mcnemar(won, lost) if n else math.nan,
        correct_to_incorrect=lost,
        incorrect_to_correct=won,
        incorrect_to_incorrect=other,
        answers_known=known,
        flips=share(lost + won, n),
        all_flips=share(known_flips + other, known),
        changes=changes,
    )


def _total(found: list[Comparison]) -> Comparison | None:
    """Over several tasks, one metric and filter of each; None for a single task."""
    chosen: dict[str, Comparison] = {}
    for one in sorted(found, key=lambda one: (_metric_order(one.metric), one.metric)):
        chosen.setdefault(one.task, one)
    if len(chosen) < 2:
        return None
    parts = list(chosen.values())
    kinds: Counter[str] = Counter()
    for one in parts:
        kinds["correct_to_incorrect"] += one.correct_to_incorrect
        kinds["incorrect_to_correct"] += one.incorrect_to_correct
        kinds["incorrect_to_incorrect"] += one.incorrect_to_incorrect
    return _comparison(
        f"{len(parts)} tasks",
        ", ".join(sorted({one.metric for one in parts})),
        ", ".join(sorted({one.filter for one in parts})),
        n=sum(one.documents for one in parts),
        right=(
            sum(one.base_accuracy.part for one in parts),
            sum(one.quant_accuracy.part for one in parts),
        ),
        kinds=kinds,
        known=sum(one.answers_known for one in parts),
        known_flips=sum(one.all_flips.part - one.incorrect_to_incorrect for one in parts),
        changes=(),
    )


def _metric_order(name: str) -> int:
    return _FIRST_METRICS.index(name) if name in _FIRST_METRICS else len(_FIRST_METRICS)
