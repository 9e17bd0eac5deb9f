"""What a recording holds and what is wrong with it, even where it cannot be opened.

Knows: that a `.kld` file says something of itself however damaged it is.
Must not know: how a record is decoded, or what is done with rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kldtui.errors import DamagedRecording
from kldtui.recordings.kld import KldHeader, KldRecording
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
    """Describe a `.kld` file whose header has been read. Reads the head of every record."""
    numbers = (header.n_ctx, header.n_vocab, header.n_chunk)
    try:
        recording = KldRecording(path)
    except DamagedRecording as error:
        problem = str(error).removeprefix(f"{path}: ")
        known = None not in numbers and header.is_sane
        expected = header.records_expected if known else None
        return Description("kld", header.version, *numbers, 0, expected, False, (problem,))
    try:
        complete = recording.records == recording.records_expected
        return Description(
            "kld",
            header.version,
            *numbers,
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
    return [f"{total:,} records cannot be used: {parts}"]
