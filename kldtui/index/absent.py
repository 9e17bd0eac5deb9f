"""A recording that is not here: what an index file knows of it, without a row.

Knows: the Recording protocol.
Must not know: how index files are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import RecordingError
from kldtui.index.layout import Layout
from kldtui.position import Position
from kldtui.recordings.base import Made, Recording, Scratch, StreamShape
from kldtui.rows import Row, Rows

NOT_HERE = "the recordings are not here, only their index: no full rows"

_MADE = [field.name for field in fields(Made)]


class AbsentRecording:
    """What an index file keeps of a recording. Its rows can only be had where the recording is."""

    absent = True

    def __init__(
        self,
        about: Mapping[str, Any],
        folder: Path,
        tokens: Mapping[int, NDArray[np.int32]],
        lengths: NDArray[np.int64] | int,
        layout: Layout,
        identity: Mapping[str, Any],
    ) -> None:
        """about: as `describe` gives it. folder: where the index file is; what belongs to the
        recording, such as a tokenizer, is looked for there. tokens: of the chunks that the file
        holds; lengths: of every chunk, or one for all. identity: what tells the file from others.
        """
        self.path = folder / Path(str(about["path"])).name
        self.format = str(about["format"])
        self.version = int(about["version"])
        self.full = bool(about["full"])
        self.shape = StreamShape(*(int(about[k]) for k in ("n_ctx", "n_vocab", "n_chunk")))
        self.records = int(about["records"])
        self.records_expected = int(about["records_expected"])
        self.problems = tuple(str(problem) for problem in about["problems"])
        self.label_identity: Mapping[str, Any] | None = about.get("label_identity")
        self.pieces: dict[int, bytes] = {}
        self.fields: Mapping[int, dict[str, Any]] = {}
        """By chunk, where anything is said of it."""
        self.engine: dict[str, Any] = {}
        # Older index files know of the sampling alone.
        self.made = Made(**{name: about[name] for name in _MADE if about.get(name) is not None})
        self.identity = {**identity, "of": str(about["name"])}
        self.layout = layout
        self._tokens, self._lengths = tokens, lengths

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens; -1 each where the index file does not hold the chunk."""
        held = self._tokens.get(chunk)
        if held is not None:
            return held
        length = self._lengths if isinstance(self._lengths, int) else int(self._lengths[chunk])
        return np.full(length, -1, np.int32)

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return dict(self.fields.get(chunk, {}))

    def scored(self, chunk: int) -> NDArray[np.int32]:
        return self.layout.t(self.layout.chunk_slice(chunk))

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> Rows:
        """Raises RecordingError, always."""
        raise RecordingError(f"{self.path}: {NOT_HERE}; open it where it is")

    def row(self, position: Position) -> Row | None:
        return None

    def close(self) -> None:
        return None


def describe(name: str, recording: Recording) -> dict[str, Any]:
    """What is kept of a recording, as JSON."""
    shape = recording.shape
    return {
        "name": name,
        "path": str(recording.path.absolute()),
        "format": recording.format,
        "version": recording.version,
        "full": recording.full,
        "n_ctx": shape.n_ctx,
        "n_vocab": shape.n_vocab,
        "n_chunk": shape.n_chunk,
        "records": recording.records,
        "records_expected": recording.records_expected,
        "problems": list(recording.problems),
        **asdict(recording.made),
        "label_identity": getattr(recording, "label_identity", None),
    }
