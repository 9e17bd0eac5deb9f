"""A table in a file of its own, mapped: what was scanned once stands at the next start.

Knows: the file's layout, how it survives kills and power cuts, and who may fill it.
Must not know: what the columns mean, recordings, where files are kept.

Layout: a page-aligned head (a magic line, JSON), then each column for itself from a page on, then
for each block of 4,096 entries a checksum and whether it holds. Only files that kldtui itself
wrote are mapped: their space is allocated before, so that a full disk is an error, not a crash.
- Entries are written with their marks last: after a kill what is marked is whole, since the pages
  outlive the program. After a loss of power only blocks whose checksum was saved are trusted.
- A block's checksum is given up before the block is written to.
- Whoever holds the file's lock fills and verifies it; others read along, and may fill entries
  that they cannot wait for: all write the same values.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.index.table import Columns, Table

MAGIC = b"kldtui-index 1\n"
HEAD_BYTES = 1 << 14
BLOCK = 4096
_PAGE = 4096
_ROOM = 1 << 20
_LOOKS = 16


class Unusable(Exception):
    """The file is no table of this layout, or of other columns; it can only be made anew."""


class SavedTable(Table):
    """A `Table` in a file. Open with `open_table`."""

    def __init__(self, path: Path, dtype: np.dtype[Any], n: int) -> None:
        """Map an existing file. Raises Unusable, OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        self._owner = False
        try:
            self.head = read_head(self._fd)
            capacity = _checked_capacity(self.head, dtype)
            places, blocks_at, size = layout(dtype, capacity)
            self._places = places
            if os.fstat(self._fd).st_size != size or n != capacity:
                raise Unusable(f"{path}: has another size than its head says")
            self._map = mmap.mmap(self._fd, size)
            arrays = {
                name: np.frombuffer(self._map, dtype[name], capacity, places[name])
                for name in dtype.names or ()
            }
            n_blocks = -(-capacity // BLOCK)
            self._sums: NDArray[np.uint32] = np.frombuffer(self._map, "<u4", n_blocks, blocks_at)
            self._holds: NDArray[np.uint8] = np.frombuffer(
                self._map, "u1", n_blocks, blocks_at + 4 * n_blocks
            )
        except BaseException:
            os.close(self._fd)
            raise
        super().__init__(dtype, arrays)
        self._reads = os.dup(self._fd)  # open for as long as anybody may still look
        weakref.finalize(self, os.close, self._reads)
        self._looks = 0
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used

    @property
    def kept(self) -> bool:
        return True

    def is_plausible(self) -> bool:
        """Whether no mark or kind has a value that none has."""
        most = {"state": 3, "kind": 2, "tie": 1, "quant_tie": 1, "rest": 1}
        plausible = all(
            int(self._arrays[name].max(initial=0)) <= limit
            for name, limit in most.items()
            if name in self._arrays
        )
        self.release()
        return plausible

    def put(
        self,
        first: int,
        entries: Columns,
        names: Any = (),
        where: NDArray[np.bool_] | None = None,
    ) -> None:
        blocks = slice(first // BLOCK, (first + max(1, len(entries)) - 1) // BLOCK + 1)
        self._holds[blocks] = 0
        super().put(first, entries, names, where)

    def entries(self, key: Any, names: Sequence[str]) -> Any:
        """As of any table, but beside the map: one look at an entry through it may map megabytes
        around each of its columns. Entries here and there give the memory back now and then."""
        if isinstance(key, int | np.integer):
            at = int(key) if key >= 0 else int(key) + len(self)
            if not 0 <= at < len(self):
                raise IndexError(f"entry {key} of {len(self)}")
            return self._read(at, at + 1, names)[0]
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            if step == 1:
                return self._read(first, max(first, last), names)
        self._looks += 1
        if self._looks % _LOOKS == 0:
            self.release()
        return super().entries(key, names)

    def mark(self, name: str, i: int) -> int:
        return (os.pread(self._reads, 1, self._places[name] + i) or b"\0")[0]

    def _read(self, first: int, last: int, names: Sequence[str]) -> Columns:
        out = np.zeros(last - first, self.dtype)
        for name in names:
            size = self.dtype[name].itemsize
            data = os.pread(self._reads, size * out.size, self._places[name] + size * first)
            part = np.frombuffer(data, self.dtype[name], len(data) // size)
            out[name][: part.size] = part
        return out

    # -- whose it is -------------------------------------------------------------------------------

    def own(self) -> bool:
        if not self._owner and self._fd >= 0:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            self._owner = True
            if self.head.get("boot") != boot():
                self._forget_unsaved()
                self._rewrite_head({"boot": boot()})
        return self._owner

    def _unlock(self) -> None:
        # The map holds a duplicate of the file's number, and with it the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _rewrite_head(self, changes: Mapping[str, Any]) -> None:
        self.head.update(changes)
        os.pwrite(self._fd, pack_head(self.head), 0)

    # -- what can be trusted -----------------------------------------------------------------------

    def _forget_unsaved(self) -> None:
        """After a loss of power: only blocks with a checksum may hold what was written."""
        for block in np.flatnonzero(self._holds == 0).tolist():
            self._clear(block)

    def verify(self) -> None:
        """Compare the blocks that have a checksum with it; those that differ are pending again."""
        for block in np.flatnonzero(self._holds).tolist():
            if self._holds[block] and self._sum(block) != int(self._sums[block]):
                self._clear(block)

    def _clear(self, block: int) -> None:
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        self._holds[block] = 0
        for name in ("state", *self.names):
            if self._arrays[name][part].any():
                self._arrays[name][part] = 0

    def _sum(self, block: int) -> int:
        """CRC-32 over the block's part of every column, read beside the map."""
        value = 0
        for name in self.names:
            array = self._arrays[name][block * BLOCK : (block + 1) * BLOCK]
            offset = self._places[name] + block * BLOCK * array.itemsize
            value = zlib.crc32(os.pread(self._fd, array.nbytes, offset), value)
        return value

    def save(self, hurry: bool = True) -> None:
        """Write out what stands, with a checksum for each block that is done.

        hurry: only blocks of which nothing is pending any more; otherwise all.
        """
        if not self._owner:
            return
        ready = []
        for block in np.flatnonzero(self._holds == 0).tolist():
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            state = self._arrays["state"][part]
            if not state.size or not state.any():
                continue
            if hurry and not (state.all() and self._arrays["rest"][part].all()):
                continue
            ready.append(block)
        if not ready:
            return
        self._sync()
        for block in ready:
            self._holds[block] = 1  # given up again by whoever writes from here on
            self._sums[block] = self._sum(block)
        self._sync()

    def _sync(self) -> None:
        """Have what was written to the map on the disk; other threads go on meanwhile."""
        if hasattr(os, "fdatasync"):  # where this is, it minds mapped pages
            os.fdatasync(self._fd)
        else:
            self._map.flush()

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Save, and let others fill the table. The columns can still be read."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.save(hurry=False)
            self._unlock()
            os.close(self._fd)
            self._fd, self._owner = -1, False


def open_table(path: Path, dtype: np.dtype[Any], n: int, about: Mapping[str, Any]) -> Table:
    """The table at `path`, made if it is not there; in memory where no file can be had.

    A file that is damaged is made anew. about: goes into a new file's head.
    """
    for _ in range(3):
        try:
            table = SavedTable(path, dtype, n)
        except FileNotFoundError:
            pass
        except Unusable:
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError:
            break
        else:
            if table.is_plausible():
                return table
            table.close()
            with contextlib.suppress(OSError):
                path.unlink()
        try:
            make_file(path, dtype, n, about)
        except OSError:
            break
    return Table.empty(dtype, n)


def make_file(path: Path, dtype: np.dtype[Any], capacity: int, about: Mapping[str, Any]) -> None:
    """A new table, all pending, with its space allocated; nothing if another was quicker.

    Raises OSError.
    """
    head = {**about, "capacity": capacity, "boot": boot(), "columns": _columns(dtype)}
    _, _, size = layout(dtype, capacity)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        _allocate(fd, size)
        os.pwrite(fd, pack_head(head), 0)
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.close(fd)
        Path(name).unlink()


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    room = memoryview(bytes(_ROOM))
    for start in range(0, size, _ROOM):
        os.pwrite(fd, room[: size - start], start)


def layout(dtype: np.dtype[Any], capacity: int) -> tuple[dict[str, int], int, int]:
    """Where each column begins, where the blocks' checksums do, and the file's size."""
    places, at = {}, HEAD_BYTES
    for name in dtype.names or ():
        places[name] = at
        at = _aligned(at + capacity * dtype[name].itemsize)
    n_blocks = -(-capacity // BLOCK)
    return places, at, _aligned(at + 5 * n_blocks + 1)


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def pack_head(head: Mapping[str, Any]) -> bytes:
    """The head's bytes, padded. Raises OSError where it is too long."""
    text = MAGIC + json.dumps(head).encode("ascii") + b"\n"
    if len(text) > HEAD_BYTES:
        raise OSError("the head of an index file is too long")
    return text.ljust(HEAD_BYTES, b"\0")


def read_head(fd: int) -> dict[str, Any]:
    """What a table's head says. Raises Unusable, OSError."""
    data = os.pread(fd, HEAD_BYTES, 0).rstrip(b"\0")
    if not data.startswith(MAGIC):
        raise Unusable("no index file of this version")
    try:
        head = json.loads(data[len(MAGIC) :])
    except ValueError:
        raise Unusable("a damaged head") from None
    if not isinstance(head, dict):
        raise Unusable("a damaged head")
    return head


def _checked_capacity(head: Mapping[str, Any], dtype: np.dtype[Any]) -> int:
    capacity = head.get("capacity")
    if head.get("columns") != _columns(dtype) or type(capacity) is not int or capacity < 0:
        raise Unusable("other columns")
    return capacity


def _columns(dtype: np.dtype[Any]) -> list[list[str]]:
    return [[name, dtype[name].str] for name in dtype.names or ()]


def boot() -> str:
    """Which start of the machine this is; what was written before another may not be on disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"process {os.getpid()}"
