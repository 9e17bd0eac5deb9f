"""Which recordings a review is of, in a form that tells them apart on another day.

Knows: the Recording protocol; how a label file names its recordings.
Must not know: any recording format, labels, the screen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.position import Position
from kldtui.recordings.base import Recording

_ROWS = 16
_BEST = 10
_NAME_BYTES = 180


def identity_of(recording: Recording, name: str | None = None) -> dict[str, Any]:
    """What tells this recording from others, as JSON.

    name, format, version, n_ctx, n_vocab, n_chunk; size: bytes of the file; tokens: SHA-256 over
    the three numbers and all tokens; start: the same over the first chunk alone; model: SHA-256
    over the best 10 ids of up to 16 (`rows`) first rows of chunk 0, since all recordings of one
    stream share their tokens. Ids alone, so that another way to round changes nothing.
    A recording that is not here has it from where it was scanned. Raises RecordingChanged.
    """
    known = getattr(recording, "label_identity", None)
    if known is not None:
        return {**known, "name": name if name is not None else known["name"]}
    shape = recording.shape
    head = np.array([shape.n_ctx, shape.n_vocab], "<i4").tobytes()
    tokens = hashlib.sha256(head)
    start = hashlib.sha256(head)
    for chunk in range(shape.n_chunk):
        ids = recording.tokens(chunk).astype("<i4").tobytes()
        tokens.update(ids)
        if chunk == 0:
            start.update(ids)
    model = hashlib.sha256()
    rows = 0
    if shape.n_chunk:
        for t in recording.scored(0)[:_ROWS]:
            row = recording.row(Position(0, int(t)))
            best = row.top(_BEST) if row is not None else []
            model.update(np.array([token for token, _ in best] + [-1], "<i4").tobytes())
            rows += 1
    try:
        size = recording.path.stat().st_size
    except OSError:
        size = None
    return {
        "name": name if name is not None else recording.path.name,
        "file": recording.path.name,
        "format": recording.format,
        "version": recording.version,
        "n_ctx": shape.n_ctx,
        "n_vocab": shape.n_vocab,
        "n_chunk": shape.n_chunk,
        "size": size,
        "tokens": f"sha256:{tokens.hexdigest()}",
        "start": f"sha256:{start.hexdigest()}",
        "model": f"sha256:{model.hexdigest()}",
        "rows": rows,
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why two identities are of different recordings, in words; None if they are of the same.

    A recording that grew, or was made again over more of the same text, is the same.
    """
    for name in ("n_ctx", "n_vocab"):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)} here and {theirs.get(name)} there"
    if not ours.get("n_chunk") or not theirs.get("n_chunk"):
        return None
    which = "tokens" if ours.get("n_chunk") == theirs.get("n_chunk") else "start"
    if ours.get(which) != theirs.get(which):
        return "its tokens are others"
    same_rows = ours.get("rows") == theirs.get("rows") != 0
    if same_rows and ours.get("model") != theirs.get("model"):
        return "the model said something else of the same tokens"
    return None


@dataclass(frozen=True, slots=True)
class ReviewIdentity:
    """The reference's identity, and those of the quants by the name they have in this review."""

    ref: Mapping[str, Any]
    quants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, ref: Recording, quants: Mapping[str, Recording]) -> ReviewIdentity:
        """Identities of open recordings. Raises RecordingChanged."""
        return cls(identity_of(ref), {name: identity_of(q, name) for name, q in quants.items()})


def default_path(ref: Path, quants: Sequence[str], folder: Path | None = None) -> Path:
    """`REF.QUANT+QUANT.labels.json` in `folder` (default: the working directory).

    quants: the names of this review, in any order. Names that are too long are cut, and told
    apart by a hash.
    """
    stem = ref.name.removesuffix(".gz")
    stem = stem.rsplit(".", 1)[0] or stem
    name = ".".join([stem, "+".join(sorted(quants))]) if quants else stem
    safe = re.sub(r"[^\w.+=@,-]", "_", name).lstrip(".-") or "review"
    if safe != name or len(safe.encode()) > _NAME_BYTES:
        mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        safe = safe.encode()[:_NAME_BYTES].decode("utf-8", "ignore") + f"-{mark}"
    return (folder if folder is not None else Path.cwd()) / f"{safe}.labels.json"
