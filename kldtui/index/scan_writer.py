"""Writes an index to a file to carry away, where the recordings are (layout: scanfile.py).

Knows: what of an index and its recordings goes into the file, and how a file is written whole or
not at all.
Must not know: how it is read, what columns mean, screens.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kldtui import __version__
from kldtui.errors import KldtuiError, RecordingError
from kldtui.index.absent import describe
from kldtui.index.cache import identity_of
from kldtui.index.index import Index
from kldtui.index.scanfile import DIGITS, MAGIC, VERSION, head_sum, in_words, is_scan_file
from kldtui.recordings.base import Recording, as_even

_PAGE = 4096

Arrays = Iterator[tuple[str, NDArray[Any]]]


def place_for(path: Path) -> Path:
    """Where an index file goes that a person names so: what a link points to.

    Only another index file is ever replaced. Raises KldtuiError.
    """
    place, other = Path(os.path.realpath(path)), "name another file with -o FILE"
    try:
        if not place.parent.is_dir():
            raise KldtuiError(f"{path}: there is no folder {place.parent}; make it, or {other}")
        found = place.stat()
    except FileNotFoundError:
        return place
    except OSError as error:
        raise KldtuiError(f"{path}: cannot be written: {error.strerror}; {other}") from None
    if stat.S_ISDIR(found.st_mode):
        raise KldtuiError(f"{path}: is a folder; {other}")
    if not stat.S_ISREG(found.st_mode):
        raise KldtuiError(f"{path}: is no regular file; {other}")
    if not is_scan_file(place):
        raise KldtuiError(f"{path}: exists and is no index file; it is left as it is: {other}")
    if not found.st_mode & 0o222:
        raise KldtuiError(f"{path}: is read-only; {other}")
    return place


def write_scan(
    path: Path,
    index: Index,
    ref: Recording,
    quants: Sequence[tuple[str, Recording]],
    *,
    floor: bool = False,
    chunks: tuple[int, int] | None = None,
    label_identities: Sequence[Mapping[str, Any]] = (),
    piece: Callable[[int], bytes | None] = lambda token: None,
) -> None:
    """Write what an index holds of some chunks (default: all), once they are scanned to the end:
    nothing can complete the file. Raises KldtuiError.

    quants: by name, in the index's order; with `floor` the last is the null recording.
    label_identities: of the reference and the quants, as labels know them. piece: the bytes of a
    token, so that those that occur can be read where no tokenizer is.
    """
    layout = index.layout
    a, b = chunks if chunks is not None else (0, layout.n_chunk)
    a, b = max(0, a), min(b, layout.n_chunk)
    if a >= b:
        raise RecordingError(f"{ref.path}: has no chunks {a}-{b - 1}; it has {layout.n_chunk}")
    if not index.scanned((a, b)):
        raise KldtuiError(
            f"{path}: is not written: {in_words(a, b)} of {ref.path} are not scanned to the end; "
            "scan them again"
        )
    first, last = index.bounds((a, b))
    about = [describe(name, each) for name, each in (("ref", ref), *quants)]
    for each, recording in zip(about, (ref, *(quant for _, quant in quants)), strict=True):
        each["identity"] = identity_of(recording)
    for each, known in zip(about, label_identities, strict=False):
        each["label_identity"] = dict(known)
    even = as_even(ref)
    head = {
        "kldtui": __version__,
        "recordings": about,
        "floor": floor,
        "chunks": [a, b],
        "positions": [first, last],
        "n": layout.n,
        "even": [even.first_t, even.per_chunk] if even is not None else None,
    }

    def arrays() -> Arrays:
        tokens = np.concatenate([ref.tokens(chunk) for chunk in range(a, b)])
        yield "tokens", tokens
        chosen = [index.ref["ref_id"], *(pair["quant_id"] for pair in index.pairs)]
        columns = [tokens, *(column[first:last] for column in chosen)]
        ids = _occurring(columns, ref.shape.n_vocab)
        yield from pieces_in_arrays({token: piece(token) for token in ids})
        yield from fields_in_arrays([ref.chunk_fields(chunk) for chunk in range(a, b)])
        if even is None:
            slices = [layout.chunk_slice(chunk) for chunk in range(layout.n_chunk)]
            yield "starts", np.array([0, *(each.stop for each in slices)], np.int64)
            yield "t", layout.t(slice(0, layout.n))
            lengths = [len(ref.tokens(chunk)) for chunk in range(layout.n_chunk)]
            yield "lengths", np.array(lengths, np.int64)
        for number, table in enumerate([index.ref, *index.pairs]):
            for name in table.names:
                yield f"{number}/{name}", table[name][first:last]
                table.release()

    write_arrays(path, head, arrays)


def _occurring(columns: Sequence[NDArray[np.int32]], n_vocab: int) -> list[int]:
    occurs = np.zeros(n_vocab, bool)
    for column in columns:
        occurs[column[(column >= 0) & (column < n_vocab)]] = True
    return np.flatnonzero(occurs).tolist()


def pieces_in_arrays(pieces: Mapping[int, bytes | None]) -> Arrays:
    """Bytes by id as arrays: the ids, where the bytes of each end, and all bytes."""
    known = {token: data for token, data in sorted(pieces.items()) if data is not None}
    yield "piece_ids", np.array(list(known), np.int32)
    yield "piece_ends", np.cumsum([len(data) for data in known.values()], dtype=np.int64)
    yield "piece_bytes", np.frombuffer(b"".join(known.values()), np.uint8)


def fields_in_arrays(said: Sequence[Mapping[str, Any]]) -> Arrays:
    """What a recording says of each chunk, as JSON in an array; none where it says nothing."""
    if any(said):
        yield "chunk_fields", np.frombuffer(json.dumps(said).encode("ascii"), np.uint8)


def write_arrays(path: Path, head: Mapping[str, Any], arrays: Callable[[], Arrays]) -> None:
    """The file, whole or not at all. Raises KldtuiError.

    head: without "arrays". arrays: called twice, for the sums and for the bytes.
    """
    listed: list[list[Any]] = []
    sums: list[list[Any]] = [
        [name, array.dtype.str, int(array.size), 0, zlib.crc32(np.ascontiguousarray(array).data)]
        for name, array in arrays()
    ]
    text = _head({**head, "arrays": sums}, 0)
    at = len(text)
    for name, dtype, count, _, total in sums:
        listed.append([name, dtype, count, at, total])
        at += -(-count * np.dtype(dtype).itemsize // 8) * 8
    try:
        with _whole_or_not(place_for(path)) as file:
            file.write(_head({**head, "arrays": listed}, len(text)))
            for (_, array), (*_, offset, _) in zip(arrays(), listed, strict=True):
                file.write(bytes(offset - file.tell()))
                file.write(np.ascontiguousarray(array).data)
    except OSError as error:
        raise KldtuiError(
            f"{path}: cannot be written: {error.strerror}; name another file with -o FILE"
        ) from None


@contextlib.contextmanager
def _whole_or_not(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` once it is on disk; nothing of it stays otherwise."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _head(head: Mapping[str, Any], size: int) -> bytes:
    """Magic, length, JSON, padding; at least `size` bytes. Offsets get room to grow into."""
    text = json.dumps(head).encode("ascii")
    out = MAGIC + VERSION + f"{len(text):0{DIGITS}x}\n".encode() + text
    out += head_sum(out)
    room = size or len(out) + 24 * len(head["arrays"])
    return out.ljust(-(-room // _PAGE) * _PAGE, b"\0")
