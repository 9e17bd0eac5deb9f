"""Which recordings a review is of, in a form that tells them apart on another day.

Knows: the Recording protocol; how a label file names its recordings.
Must not know: any recording format, labels, the screen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.errors import RecordingChanged
from kldtui.position import Position
from kldtui.recordings.base import Recording, as_even

_TOKENS_AT_ONCE = 1 << 18
_ROWS = 16
_BEST = 10
_NAME_BYTES = 180


class Identity(Mapping[str, Any]):
    """An identity whose `tokens` are read when they are asked for: all else is at the start of the
    file, but a long stream takes longer to read than a screen to open."""

    def __init__(self, known: Mapping[str, Any], tokens: Callable[[], str | None]) -> None:
        """known: all members, those of `tokens` as a placeholder."""
        self._known, self._tokens = dict(known), tokens
        self._asked = False

    def __getitem__(self, name: str) -> Any:
        if name == "tokens" and not self._asked:
            self._known[name], self._asked = self._tokens(), True
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def identity_of(recording: Recording, name: str | None = None) -> Mapping[str, Any]:
    """What tells this recording from others, as JSON.

    name, format, version, n_ctx, n_vocab, n_chunk; size: bytes of the file; tokens: SHA-256 over
    the three numbers and all tokens; start: the same over the first chunk alone; model: SHA-256
    over the best 10 ids of up to 16 (`rows`) first rows of chunk 0, since all recordings of one
    stream share their tokens. Ids alone, so that another way to round changes nothing.
    A recording that is not here has it from where it was scanned. Raises RecordingChanged; `tokens`
    is None where the file turns out to have changed only when they are asked for.
    """
    known = getattr(recording, "label_identity", None)
    if known is not None:
        return {**known, "name": name if name is not None else known["name"]}
    shape = recording.shape
    head = np.array([shape.n_ctx, shape.n_vocab], "<i4").tobytes()
    start = hashlib.sha256(head)
    if shape.n_chunk:
        start.update(recording.tokens(0).astype("<i4").tobytes())
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
    known = {
        "name": name if name is not None else recording.path.name,
        "file": recording.path.name,
        "format": recording.format,
        "version": recording.version,
        "n_ctx": shape.n_ctx,
        "n_vocab": shape.n_vocab,
        "n_chunk": shape.n_chunk,
        "size": size,
        "tokens": None,
        "start": f"sha256:{start.hexdigest()}",
        "model": f"sha256:{model.hexdigest()}",
        "rows": rows,
    }
    return Identity(known, partial(_hash_of_tokens, recording, head))


def _hash_of_tokens(recording: Recording, head: bytes) -> str | None:
    even, shape = as_even(recording), recording.shape
    found = hashlib.sha256(head)
    try:
        if even is None:
            for chunk in range(shape.n_chunk):
                found.update(recording.tokens(chunk).astype("<i4").tobytes())
        else:
            total = shape.n_chunk * shape.n_ctx
            for start in range(0, total, _TOKENS_AT_ONCE):
                ids = even.flat_tokens(start, min(_TOKENS_AT_ONCE, total - start))
                found.update(ids.astype("<i4").tobytes())
    except RecordingChanged:
        return None  # what was judged is kept all the same
    return f"sha256:{found.hexdigest()}"


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why two identities are of different recordings, in words; None if they are of the same.

    A recording that grew, or was made again over more of the same text, is the same.
    """
    for name in ("n_ctx", "n_vocab"):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)} here and {theirs.get(name)} there"
    if not ours.get("n_chunk") or not theirs.get("n_chunk"):
        return None
    alike = ours.get("n_chunk") == theirs.get("n_chunk")
    which = "tokens" if alike and ours.get("tokens") and theirs.get("tokens") else "start"
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
