"""Open a recording by what is in it, never by its name.

Knows: which format has which first bytes, and what other files say of themselves.
Must not know: how a format is decoded, or what is done with its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kldtui.errors import NotARecording, RecordingError, UnsupportedRecording
from kldtui.recordings.base import Recording, Scratch, StreamShape
from kldtui.recordings.describe import Description, describe_foreign, describe_kld, describe_run
from kldtui.recordings.foreign import (
    READ,
    ForeignFile,
    Pieces,
    alone,
    beside,
    may_be_json,
    read_file,
)
from kldtui.recordings.kld import KldRecording, parse_header
from kldtui.recordings.named import name_files, split_named
from kldtui.recordings.own_rollout import own_rollouts
from kldtui.recordings.run import is_run, open_run

__all__ = [
    "Description",
    "Recording",
    "Scratch",
    "StreamShape",
    "describe",
    "name_files",
    "open_quant",
    "open_recording",
    "split_named",
]

_HEAD_BYTES = 4096
_KNOWN = (
    (b"GGUF", "a GGUF model: record it with llama-perplexity --save-all-logits, or give it as "
              "--tokenizer"),
    (b"GGML", "a GGML file, not a recording"),
    (b"kldtui-scan ", "an index file of kldtui scan: review it with kldtui FILE"),
    (b"PK\x03\x04", "a zip archive (NumPy .npz, PyTorch), not a recording"),
    (b"\x93NUMPY", "a NumPy array, not a recording"),
    (b"\x89HDF", "an HDF5 file, not a recording"),
)  # fmt: skip


def open_recording(path: Path | str) -> Recording:
    """Open a `.kld` file, a run, or answers of a server that carry ids, detected by content.

    Raises NotARecording or UnsupportedRecording naming what the file is, DamagedRecording where
    nothing of it can be read, RecordingError where it cannot be opened.
    """
    path = Path(path)
    head = _head(path)
    return _open_own(path, head) or alone(_read_foreign(path, head))


def open_quant(path: Path | str, ref: Recording, text: Callable[[], Pieces]) -> Recording:
    """Open a recording to be compared with a reference.

    Answers of a server have no chunks of their own: they are laid beside the reference's
    (`foreign.place`), by ids, else with the vocabulary that `text` gives, which is asked only
    then. Rollouts of its own from the reference's prompts are compared as far as both say the
    same (`own_rollout`). Raises as `open_recording`, and StreamMismatch where no answer belongs to
    the stream.
    """
    path = Path(path)
    head = _head(path)
    own = _open_own(path, head)
    if own is None:
        return beside(_read_foreign(path, head), ref, text)
    return own_rollouts(own, ref) or own


def _open_own(path: Path, head: bytes) -> Recording | None:
    if parse_header(head) is not None:
        return KldRecording(path)
    return open_run(path) if is_run(head) else None


def _read_foreign(path: Path, head: bytes) -> ForeignFile:
    if not may_be_json(head):
        raise _refusal(path, head)
    return read_file(path)


def describe(path: Path | str) -> Description:
    """What a recording holds and what is wrong with it. Raises what `open_recording` raises,
    but describes a damaged `.kld` file as far as its header goes."""
    path = Path(path)
    head = _head(path)
    header = parse_header(head)
    if header is not None:
        return describe_kld(path, header)
    if is_run(head):
        return describe_run(path)
    return describe_foreign(_read_foreign(path, head))


def _refusal(path: Path, head: bytes) -> RecordingError:
    if not head:
        return NotARecording(f"{path}: is empty")
    if head[:7] == b"_logits":
        name = head[:8].decode("ascii", "backslashreplace")
        if len(head) < 8:
            return NotARecording(f"{path}: holds only the first {len(head)} bytes of a .kld file")
        return UnsupportedRecording(
            f"{path}: is a .kld file of version {name!r}; kldtui reads _logits_ and _logits2"
        )
    for magic, words in _KNOWN:
        if head.startswith(magic):
            return UnsupportedRecording(f"{path}: is {words}")
    return NotARecording(f"{path}: is no recording that kldtui reads ({READ})")


def _head(path: Path) -> bytes:
    if path.is_dir():
        raise RecordingError(f"{path}: is a folder, not a recording")
    if path.exists() and not path.is_file():
        raise RecordingError(f"{path}: is no regular file; recordings are read in any order")
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
