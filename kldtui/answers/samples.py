"""The sample files of lm-evaluation-harness: each document's answer, right or wrong.

Knows: `samples_*.jsonl` as `lm_eval --log_samples` writes them, plain or gzip.
Must not know: a second file, or what is counted.

Fields of a sample (lm_eval/evaluator.py, loggers/evaluation_tracker.py, 0.4): doc_id, doc, target,
arguments, resps, filtered_resps, filter, metrics (the metrics' names), doc_hash, prompt_hash,
target_hash, and one field a metric. The task's name is in the file's name alone. A document has
one sample for each filter; numbers within resps are strings.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kldtui.errors import AnswerFileError

_NAME = re.compile(
    r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\d[T_][0-9.\-:]+)?\.jsonl(?:\.gz)?", re.IGNORECASE
)
_NOT_METRICS = frozenset(
    {
        "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics",
        "doc_hash", "prompt_hash", "target_hash", "task", "task_name", "input", "bypass",
        "truth", "schema_version",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, judged by one metric. answer: what was answered; None where it is not known."""

    correct: bool
    answer: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """By what two samples are known to be of the same document; None where not stored."""

    doc_hash: str | None
    target: str | None
    prompt_hash: str | None


Key = tuple[str, str]
"""Metric and filter."""


@dataclass
class TaskSamples:
    """All samples of one task in one file."""

    task: str
    path: Path
    documents: dict[str, Identity] = field(default_factory=dict)
    samples: dict[Key, dict[str, Sample]] = field(default_factory=dict)
    repeated: int = 0
    """Samples of a document and filter that were there before; the last one counts."""
    graded: Counter[str] = field(default_factory=Counter)
    """Values that are neither right nor wrong, by metric: such a metric is left out."""


def is_named(path: Path) -> bool:
    """Whether a file has a name as the harness gives it, which says what task it is of."""
    return _NAME.fullmatch(path.name) is not None


def task_of(path: Path) -> str:
    """The task by the name that the harness gives a file; else the file's stem."""
    match = _NAME.fullmatch(path.name)
    if match is not None:
        return match["task"]
    return path.name.removesuffix(".gz").rpartition(".")[0] or path.name


def read_samples(path: Path) -> TaskSamples:
    """Read one sample file, plain or gzip. Raises AnswerFileError naming the line."""
    out = TaskSamples(task_of(path), path)
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            for number, line in enumerate(_lines(file, zipped), 1):
                if line.strip():
                    _add(out, line, number)
    except (OSError, EOFError, zlib.error) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise AnswerFileError(f"{path}: cannot be read: {words}") from None
    if not out.documents:
        raise AnswerFileError(f"{path}: holds no samples")
    out.samples = {key: held for key, held in out.samples.items() if key[0] not in out.graded}
    return out


def _lines(file: BinaryIO, zipped: bool) -> Iterator[bytes]:
    if not zipped:
        yield from file
        return
    with gzip.open(file, "rb") as unzipped:
        yield from unzipped


def _add(out: TaskSamples, line: bytes, number: int) -> None:
    where = f"{out.path}: line {number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise AnswerFileError(f"{where}: is no JSON; the file may be cut") from None
    if not isinstance(data, dict) or "doc_id" not in data:
        raise AnswerFileError(
            f"{where}: is no sample of lm-evaluation-harness (no doc_id); give a samples_*.jsonl "
            "file, which lm_eval writes with --log_samples"
        )
    doc = str(data["doc_id"])
    identity = Identity(
        _text(data.get("doc_hash")), _text(data.get("target")), _text(data.get("prompt_hash"))
    )
    before = out.documents.setdefault(doc, identity)
    if before.doc_hash != identity.doc_hash:
        raise AnswerFileError(
            f"{where}: doc_id {doc} is another document than before: samples of several runs or "
            "tasks in one file; split them"
        )
    filter_name = str(data.get("filter") or "none")
    repeated = False
    for name in _metric_names(data):
        value = _number(data[name])
        if value not in (0.0, 1.0):
            out.graded[name] += 1
            continue
        held = out.samples.setdefault((name, filter_name), {})
        repeated |= doc in held
        held[doc] = Sample(bool(value), _answer(data, name, bool(value)))
    out.repeated += repeated


def _metric_names(data: Mapping[str, Any]) -> list[str]:
    listed = data.get("metrics")
    if isinstance(listed, list) and listed:
        return [name for name in listed if isinstance(name, str) and name in data]
    return [
        name
        for name, value in data.items()
        if name not in _NOT_METRICS and _number(value) is not None
    ]


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _answer(data: Mapping[str, Any], metric: str, correct: bool) -> str | None:
    """What was answered: the number of the choice, or the text; None where it is not known."""
    given = data.get("filtered_resps")
    if not isinstance(given, list) or not given:
        return None
    likelihoods = [_likelihood(one) for one in given]
    if any(value is not None for value in likelihoods):
        return _choice(data, metric, correct, likelihoods)
    parts = given if all(isinstance(one, str) for one in given) else [json.dumps(given)]
    return "\n".join(part.strip() for part in parts)


def _likelihood(response: Any) -> float | None:
    """The log-likelihood of `[value, is greedy]`, as the harness stores a choice."""
    if not isinstance(response, list) or len(response) != 2:
        return None
    if str(response[1]) not in ("True", "False", "true", "false", "0", "1"):
        return None
    return _number(response[0])


def _choice(
    data: Mapping[str, Any], metric: str, correct: bool, likelihoods: list[float | None]
) -> str | None:
    """The choice that a metric took, as the harness takes it (`ConfigurableTask.process_results`):
    the likeliest for acc, the likeliest a character for acc_norm."""
    values = [value for value in likelihoods if value is not None]
    if len(values) != len(likelihoods) or len(values) < 2 or any(map(math.isnan, values)):
        return None
    if metric == "acc_norm":
        lengths = _choice_lengths(data.get("arguments"), len(values))
        if lengths is None:
            return None
        values = [value / length for value, length in zip(values, lengths, strict=True)]
    elif metric not in ("acc", "exact_match", "f1"):
        return None
    chosen = max(range(len(values)), key=lambda i: (values[i], -i))
    target = _number(data.get("target"))
    # A target that is a choice's number must agree; if not, the answer was taken otherwise.
    if target is not None and (chosen == target) != correct:
        return None
    return str(chosen)


def _choice_lengths(arguments: Any, count: int) -> list[int] | None:
    """Characters of each choice, without the one space that parts it from the question."""
    if isinstance(arguments, dict):
        arguments = [
            list(each.values()) if isinstance(each, dict) else each for each in arguments.values()
        ]
    if not isinstance(arguments, list) or len(arguments) != count:
        return None
    lengths = []
    for each in arguments:
        if not isinstance(each, list) or len(each) < 2 or not isinstance(each[1], str):
            return None
        lengths.append(max(1, len(each[1].removeprefix(" "))))
    return lengths
