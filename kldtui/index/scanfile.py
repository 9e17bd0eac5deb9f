"""An index in a file to carry away, read where the recordings are not.

Knows: the file's layout.
Must not know: how it is written, what columns mean, screens.

Layout: a magic line, the length of the JSON in 16 hexadecimal digits, JSON, the CRC-32 of all this
in 8 digits (files once had zeros there), zero bytes up to a multiple of 4,096; then arrays, one
behind the other, as the JSON lists them: name, dtype, count, offset, CRC-32. Of a stream's chunks
it holds those from `chunks[0]` up to, not including, `chunks[1]`: their tokens, and the columns of
their positions.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import PAIR_DTYPE, REF_DTYPE
from kldtui.errors import (
    DamagedRecording,
    NotARecording,
    RecordingError,
    UnsupportedRecording,
)
from kldtui.index.absent import AbsentRecording
from kldtui.index.cache import Keeper
from kldtui.index.index import Index
from kldtui.index.layout import EvenLayout, Layout
from kldtui.index.table import Table
from kldtui.recordings.base import Recording

MAGIC = b"kldtui-scan "
VERSION = b"1\n"
DIGITS = 16
_START = len(MAGIC) + len(VERSION) + DIGITS + 1
_SUM = 9
_LONGEST = 1 << 26
"""Bytes of JSON in a head."""
_AT_ONCE = 1 << 16

_KINDS = {
    **dict.fromkeys(("name", "path", "format"), str),
    **dict.fromkeys(("version", "n_ctx", "n_vocab", "n_chunk", "records", "records_expected"), int),
    **{"full": bool, "problems": list, "identity": dict | None, "label_identity": dict | None},
    **{"kind": str | None, "sampling": dict | None, "tools": list | None},
    **{"add_bos": bool | None, "bos_id": int | None},
}
"""What the head says of a recording (`describe`), as far as anything rests on it."""


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

    def fields(self) -> dict[int, dict[str, Any]]:
        """What the reference says of the chunks that are held, by chunk; of older files nothing.

        Raises as `array`.
        """
        if all(name != "chunk_fields" for name, *_ in self.head["arrays"]):
            return {}
        return dict(enumerate(json.loads(self.array("chunk_fields").tobytes()), self.chunks[0]))

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
        found[0].pieces, found[0].fields = self.pieces(), self.fields()
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


def head_sum(head: bytes) -> bytes:
    """What stands behind a head's magic line, length and JSON."""
    return f"\n{zlib.crc32(head):08x}".encode()


def _read_head(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes]:
    start = file.read(_START)
    if not start.startswith(MAGIC):
        raise NotARecording(f"{path}: is no index file; `kldtui scan … -o FILE` makes one")
    if not start.startswith(MAGIC + VERSION):
        raise UnsupportedRecording(f"{path}: is an index file of another version of kldtui")
    try:
        length = int(start[-DIGITS - 1 :], 16)
        if not 0 < length <= min(size, _LONGEST):
            raise ValueError("a length that no head has")
        raw, total = file.read(length), file.read(_SUM)
        if total.strip(b"\0") and total != head_sum(start + raw):
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
        if any(not isinstance(about.get(key), kind) for key, kind in _KINDS.items()):
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
    if "chunk_fields" in counts:
        expected["chunk_fields"] = counts["chunk_fields"]
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
