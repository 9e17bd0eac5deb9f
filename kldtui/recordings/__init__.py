"""Open a recording by what is in it, never by its name.

Knows: which format has which first bytes, and what other files say of themselves.
Must not know: how a format is decoded, or what is done with its rows.
"""

from __future__ import annotations

from pathlib import Path

from kldtui.errors import NotARecording, RecordingError
from kldtui.recordings.base import Recording, Scratch, StreamShape
from kldtui.recordings.kld import KldRecording, parse_header

__all__ = ["Recording", "Scratch", "StreamShape", "open_recording"]

_HEAD_BYTES = 4096


def open_recording(path: Path | str) -> Recording:
    """Open a `.kld` file or a run, detected by content.

    Raises NotARecording or UnsupportedRecording naming what the file is, DamagedRecording where
    nothing of it can be read, RecordingError where it cannot be opened.
    """
    path = Path(path)
    head = _head(path)
    if parse_header(head) is not None:
        return KldRecording(path)
    from kldtui.recordings import run

    if run.is_run(head):
        return run.open_run(path)
    raise NotARecording(f"{path}: is no recording that kldtui reads")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
