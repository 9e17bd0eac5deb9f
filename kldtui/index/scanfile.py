"""An index in a file to carry away: made where the recordings are, read where they are not.

Knows: the file's layout.
Must not know: what columns mean, screens.

Layout: a magic line, the length of the JSON in 16 hexadecimal digits, JSON, the CRC-32 of all this
in 8 digits (files once had zeros there), zero bytes up to a multiple of 4,096; then arrays, one
behind the other, as the JSON lists them: name, dtype, count, offset, CRC-32. Of a stream's chunks
it holds those from `chunks[0]` up to, not including, `chunks[1]`: their tokens, and the columns of
their positions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kldtui import __version__
from kldtui.analysis import PAIR_DTYPE, REF_DTYPE
from kldtui.errors import (
    DamagedRecording,
    KldtuiError,
    NotARecording,
    RecordingError,
    UnsupportedRecording,
)
from kldtui.index.absent import AbsentRecording, describe
from kldtui.index.cache import Keeper, identity_of
from kldtui.index.index import Index
from kldtui.index.layout import EvenLayout, Layout
from kldtui.index.table import Table
from kldtui.recordings.base import Recording, as_even

MAGIC = b"kldtui-scan "
_VERSION = b"1\n"
_DIGITS = 16
_START = len(MAGIC) + len(_VERSION) + _DIGITS + 1
_SUM = 9
_LONGEST = 1 << 26
"""Bytes of JSON in a head."""
_PAGE = 4096
_AT_ONCE = 1 << 16

_KINDS = {
    **dict.fromkeys(("name", "path", "format"), str),
    **dict.fromkeys(("version", "n_ctx", "n_vocab", "n_chunk", "records", "records_expected"), int),
    **{"full": bool, "problems": list, "identity": dict | None, "label_identity": dict | None},
}
"""What the head says of a recording (`describe`), as far as anything rests on it."""

Arrays = Iterator[tuple[str, NDArray[Any]]]


def in_words(a: int, b: int) -> str:
    """The chunks `a` up to, not including, `b`."""
    return f"chunk {a}" if b == a + 1 else f"chunks {a}-{b - 1}"


def is_scan_file(path: Path) -> bool:
    """Whether a file is an index file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# -- writing --------------------------------------------------------------------------------------


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
    out = MAGIC + _VERSION + f"{len(text):0{_DIGITS}x}\n".encode() + text
    out += _sum(out)
    room = size or len(out) + 24 * len(head["arrays"])
    return out.ljust(-(-room // _PAGE) * _PAGE, b"\0")


def _sum(head: bytes) -> bytes:
    return f"\n{zlib.crc32(head):08x}".encode()


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScanFile:
    """An index file, opened: its head, and its arrays as they are asked for."""

    path: Path
    head: dict[str, Any]
    identity: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> ScanFile:
        """Raises DamagedRecording, UnsupportedRecording, RecordingError."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head, raw = _read_head(path, file, size)
        except OSError as error:
            raise RecordingError(f"{path}: cannot be opened: {error.strerror}") from None
        out = cls(path, head, {"size": size, "head": zlib.crc32(raw)})
        for _, dtype, count, offset, _ in head["arrays"]:
            if offset + count * np.dtype(dtype).itemsize > size:
                raise DamagedRecording(f"{path}: is cut short; copy it again")
        return out

    @property
    def chunks(self) -> tuple[int, int]:
        return int(self.head["chunks"][0]), int(self.head["chunks"][1])

    @property
    def positions(self) -> tuple[int, int]:
        return int(self.head["positions"][0]), int(self.head["positions"][1])

    @property
    def names(self) -> list[str]:
        """The quants' names; the null recording's last, where there is one."""
        return [str(each["name"]) for each in self.head["recordings"][1:]]

    @property
    def floor(self) -> bool:
        return bool(self.head["floor"])

    def array(self, name: str) -> NDArray[Any]:
        """One array, whole. Raises DamagedRecording where its sum is another, RecordingError."""
        listed = {known: place for known, *place in self.head["arrays"]}
        dtype, count, offset, total = listed[name]
        try:
            out = np.fromfile(self.path, dtype, count, offset=offset)
        except OSError as error:
            raise RecordingError(f"{self.path}: cannot be read: {error.strerror}") from None
        if zlib.crc32(out.data) != total:
            raise DamagedRecording(f"{self.path}: is damaged in {name}; copy it again")
        return out

    def layout(self) -> Layout:
        """Where the positions of the whole stream lie."""
        if self.head["even"] is not None:
            first_t, per_chunk = self.head["even"]
            n_chunk = int(self.head["recordings"][0]["n_chunk"])
            return EvenLayout(int(first_t), int(per_chunk), int(self.head["n"]), n_chunk)
        starts, t = self.array("starts").tolist(), self.array("t")
        return Layout([t[a:b] for a, b in itertools.pairwise(starts)])

    def pieces(self) -> dict[int, bytes]:
        """The bytes of the tokens that occur, as far as they were known; of older files none.

        Raises as `array`.
        """
        if all(name != "piece_ids" for name, *_ in self.head["arrays"]):
            return {}
        ids, ends = self.array("piece_ids").tolist(), self.array("piece_ends").tolist()
        data, cuts = self.array("piece_bytes").tobytes(), itertools.pairwise([0, *ends])
        return {token: data[a:b] for token, (a, b) in zip(ids, cuts, strict=True)}

    def recordings(self) -> list[AbsentRecording]:
        """The reference and the quants, as far as the file knows them."""
        layout, tokens = self.layout(), self.array("tokens")
        a, b = self.chunks
        lengths: NDArray[np.int64] | int = int(self.head["recordings"][0]["n_ctx"])
        if self.head["even"] is None:
            lengths = self.array("lengths")
            ends = np.cumsum(lengths[a:b])
        else:
            ends = np.arange(1, b - a + 1) * lengths
        by_chunk = {
            a + k: tokens[int(ends[k - 1]) if k else 0 : int(ends[k])] for k in range(b - a)
        }
        found = [
            AbsentRecording(about, self.path.parent, by_chunk, lengths, layout, self.identity)
            for about in self.head["recordings"]
        ]
        found[0].pieces = self.pieces()
        return found

    def index(self, keeper: Keeper | None = None) -> tuple[Index, list[AbsentRecording]]:
        """The index, with the recordings it is of. Raises DamagedRecording."""
        recordings = self.recordings()
        index = Index(recordings[0], recordings[1:], _Given(self, keeper, recordings))
        if self.chunks != (0, index.layout.n_chunk):
            a, b = self.chunks
            for notes in index.notes:
                notes.insert(0, f"holds {in_words(a, b)} of {index.layout.n_chunk}")
        return index, recordings


def _read_head(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes]:
    start = file.read(_START)
    if not start.startswith(MAGIC):
        raise NotARecording(f"{path}: is no index file; `kldtui scan … -o FILE` makes one")
    if not start.startswith(MAGIC + _VERSION):
        raise UnsupportedRecording(f"{path}: is an index file of another version of kldtui")
    try:
        length = int(start[-_DIGITS - 1 :], 16)
        if not 0 < length <= min(size, _LONGEST):
            raise ValueError("a length that no head has")
        raw, total = file.read(length), file.read(_SUM)
        if total.strip(b"\0") and total != _sum(start + raw):
            raise ValueError("another sum")
        head = json.loads(raw)
        _check_head(head)
    except (ValueError, LookupError, TypeError):
        raise DamagedRecording(f"{path}: has a damaged head; copy it again") from None
    return head, raw


def _check_head(head: Any) -> None:
    """Raises ValueError, LookupError, TypeError where what a head says does not go together: where
    it has no sum, nothing else tells."""
    recordings, n, even, _ = head["recordings"], head["n"], head["even"], head["floor"]
    (a, b), (first, last) = head["chunks"], head["positions"]
    for about in recordings:
        if any(not isinstance(about[key], kind) for key, kind in _KINDS.items()):
            raise TypeError("a recording that is none")
    n_chunk, n_ctx = recordings[0]["n_chunk"], recordings[0]["n_ctx"]
    numbers = [n, a, b, first, last, *(even or ())]
    counts = {}
    for name, dtype, count, offset, total in head["arrays"]:
        counts[name] = count
        numbers += [count, offset, total]
        if np.dtype(dtype).kind not in "iuf":
            raise TypeError("an array of no numbers")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("a number that is none")
    expected = {
        f"{number}/{name}": last - first
        for number in range(len(recordings))
        for name in (PAIR_DTYPE if number else REF_DTYPE).names or ()
    }
    if "piece_ids" in counts:
        expected |= dict.fromkeys(("piece_ids", "piece_ends"), counts["piece_ids"])
        expected["piece_bytes"] = counts["piece_bytes"]
    if even is None:
        expected |= {"starts": n_chunk + 1, "t": n, "lengths": n_chunk, "tokens": counts["tokens"]}
        lies_so = 0 <= first <= last <= n
    else:
        _, per_chunk = even
        expected["tokens"] = (b - a) * n_ctx
        lies_so = [first, last, n] == [min(n, k * per_chunk) for k in (a, b, n_chunk)]
    if not (0 <= a < b <= n_chunk and lies_so and counts == expected):
        raise ValueError("arrays of other chunks")


class _Given(Keeper):
    """Tables from an index file: copied once into the cache, where there is one."""

    def __init__(
        self, file: ScanFile, keeper: Keeper | None, recordings: Sequence[AbsentRecording]
    ) -> None:
        self._file, self._kept = file, keeper
        self._numbers = {id(recording): k for k, recording in enumerate(recordings)}

    def table(self, recordings: Sequence[Recording], dtype: np.dtype[Any], n: int) -> Table:
        number = self._numbers[id(recordings[-1])]
        if self._kept is not None:
            table = self._kept.table(recordings, dtype, n)
        else:
            table = Table.empty(dtype, n)
        try:
            return self._filled(table, number)
        except BaseException:
            table.close()
            raise

    def _filled(self, table: Table, number: int) -> Table:
        first, last = self._file.positions
        state = self._file.array(f"{number}/state")
        if np.array_equal(table["state"][first:last], state):
            return table
        if not table.own():
            table.close()
            table = Table.empty(table.dtype, len(table))
        entries = np.zeros(last - first, table.dtype)
        for name in table.names:
            entries[name] = self._file.array(f"{number}/{name}")
        for start in range(0, last - first, _AT_ONCE):
            table.put(first + start, entries[start : start + _AT_ONCE])
        table.save()
        table.release()
        return table
