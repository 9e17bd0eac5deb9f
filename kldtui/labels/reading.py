"""Reading a label file without its recordings.

Knows: the file's format.
Must not know: stores, recordings, the screen.
"""

from __future__ import annotations

from pathlib import Path

from kldtui.errors import LabelFileError
from kldtui.labels import disk, document
from kldtui.labels.record import LabelRecord


def read_labels(path: Path) -> list[LabelRecord]:
    """The labels of a file in stream order. Raises LabelFileError for any other file."""
    try:
        held = document.parse(disk.read(disk.Files(), path)[0])
    except OSError as error:
        raise LabelFileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LabelFileError(f"{path}: {error}") from None
    return [LabelRecord.from_line(held.labels[key]) for key in sorted(held.labels)]
