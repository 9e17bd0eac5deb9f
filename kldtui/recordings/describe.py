"""What a recording holds and what is wrong with it, even where it cannot be opened.

Knows: what the formats say of themselves; a `.kld` file does so however damaged it is.
Must not know: how a record is decoded, or what is done with rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kldtui.errors import DamagedRecording
from kldtui.recordings.foreign import ForeignFile
from kldtui.recordings.kld import KldHeader, KldRecording
from kldtui.recordings.run import RunRecording, open_run
from kldtui.rows import Invalid


@dataclass(frozen=True, slots=True)
class Description:
    """What `kldtui inspect` says; None for what the file is too damaged to say."""

    format: str
    version: int
    n_ctx: int | None
    n_vocab: int | None
    n_chunk: int | None
    records: int
    records_expected: int | None
    complete: bool
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable names (docs/json.md)."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return out | {"problems": list(self.problems)}


def describe_kld(path: Path, header: KldHeader) -> Description:
    """Describe a `.kld` file whose header has been read, however damaged it is."""
    try:
        recording = KldRecording(path)
    except DamagedRecording as error:
        numbers = (header.n_ctx, header.n_vocab, header.n_chunk)
        problem = str(error).removeprefix(f"{path}: ")
        expected = header.records_expected if header.is_sane else None
        return Description("kld", header.version, *numbers, 0, expected, False, (problem,))
    return _describe(recording, recording.records == recording.records_expected)


def describe_run(path: Path) -> Description:
    """Describe a run. Raises DamagedRecording where it cannot be opened."""
    recording = open_run(path)
    return _describe(recording, recording.whole)


def describe_foreign(file: ForeignFile) -> Description:
    """Describe answers of a server; a chunk is an answer, a record a position of which the best
    tokens are known. Such files do not say how large the vocabulary is."""
    answers = file.answers
    lengths = [len(answer.ids or answer.output) for answer in answers]
    said = [step for answer in answers for step in (*answer.scored.values(), *answer.output)]
    whole = sum(not step.empty for step in said)
    return Description(
        file.format,
        1,
        max(lengths),
        None,
        len(answers),
        whole,
        len(said),
        whole == len(said),
        tuple(file.problems),
    )


def _describe(recording: KldRecording | RunRecording, complete: bool) -> Description:
    """Close the recording when all of it has been looked at."""
    try:
        shape = recording.shape
        return Description(
            recording.format,
            recording.version,
            shape.n_ctx,
            shape.n_vocab,
            shape.n_chunk,
            recording.records,
            recording.records_expected,
            complete,
            (*recording.problems, *_unusable(recording.survey())),
        )
    finally:
        recording.close()


def _unusable(counts: Counter[Invalid]) -> list[str]:
    total = sum(counts.values())
    if not total:
        return []
    parts = ", ".join(f"{count:,} {reason.words}" for reason, count in sorted(counts.items()))
    noun = "record" if total == 1 else "records"
    return [f"{total:,} {noun} cannot be used: {parts}"]
