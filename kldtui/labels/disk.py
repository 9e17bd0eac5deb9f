"""Files that are the old or the new one at every instant, whoever else writes them.

Knows: the operating system's files: temporary file, fsync, rename, locks, what changed.
Must not know: what is in a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_TAIL = 128
_LOCK_SECONDS = 3.0
_STALE_SECONDS = 60.0
_BLOCK = 1 << 20
# What file systems answer that cannot sync or lock a folder; the rest of the protocol still holds.
_NOT_HERE = {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.ENOSYS, errno.EACCES}


class Files:
    """The calls to the operating system, each through `call`, so that tests can make one fail."""

    def call(self, name: str, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return do(*args, **kwargs)

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        return self.call("open", os.open, path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        self.call("close", os.close, fd)

    def write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self.call("write", os.write, fd, view)
            view = view[written:]

    def fsync(self, fd: int) -> None:
        self.call("fsync", os.fsync, fd)

    def rename(self, source: Path, target: Path) -> None:
        self.call("rename", os.replace, source, target)

    def unlink(self, path: Path) -> None:
        self.call("unlink", os.unlink, path)

    def fstat(self, fd: int) -> os.stat_result:
        return self.call("fstat", os.fstat, fd)

    def chmod(self, fd: int, mode: int) -> None:
        self.call("chmod", os.fchmod, fd, mode)

    def chown(self, fd: int, uid: int, gid: int) -> None:
        self.call("chown", os.fchown, fd, uid, gid)

    def truncate(self, fd: int, size: int) -> None:
        self.call("truncate", os.ftruncate, fd, size)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self.call("read", os.pread, fd, size, offset)

    def read_all(self, fd: int) -> bytes:
        parts: list[bytes] = []
        offset = 0
        while part := self.pread(fd, _BLOCK, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as it was when we last read or wrote it; unequal to the next one if it changed.

    `tail` tells two files apart that share an inode number, a size and a tick of the clock.
    """

    inode: tuple[int, int]
    size: int
    times: tuple[int, int]
    tail: bytes


def _seen(files: Files, fd: int) -> Seen:
    status = files.fstat(fd)
    tail = files.pread(fd, _TAIL, max(0, status.st_size - _TAIL))
    return Seen(
        (status.st_dev, status.st_ino),
        status.st_size,
        (status.st_mtime_ns, status.st_ctime_ns),
        tail,
    )


@contextlib.contextmanager
def opened(files: Files, path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A file descriptor, closed at the end. Raises OSError."""
    fd = files.open(path, flags, mode)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)


@contextlib.contextmanager
def regular(files: Files, path: Path) -> Iterator[int]:
    """A regular file to read; of a pipe no writer is waited for. Raises OSError."""
    with opened(files, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        mode = files.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "it is a folder")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield fd


def look(files: Files, path: Path) -> Seen | None:
    """The regular file at `path` as it is now; None if nothing is there. Raises OSError."""
    try:
        with regular(files, path) as fd:
            return _seen(files, fd)
    except FileNotFoundError:
        return None


def read(files: Files, path: Path) -> tuple[bytes, Seen]:
    """The bytes of a regular file, and what to know it by. Raises OSError."""
    with regular(files, path) as fd:
        before = _seen(files, fd)
        data = files.read_all(fd)
        if _seen(files, fd) != before or len(data) != before.size:
            raise OSError(errno.EAGAIN, "it is being written by another program")
        return data, before


@contextlib.contextmanager
def locked(files: Files, folder: Path, seconds: float = _LOCK_SECONDS) -> Iterator[bool]:
    """Hold the advisory lock of a folder; False where it cannot be had (then go on without).

    The folder itself is locked: a lock file would stay behind, or be removed under another's
    hands, and the file in it is replaced at each save.
    """
    try:
        fd = files.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        yield _lock(fd, seconds)
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)


def _lock(fd: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        except OSError:
            return False
        else:
            return True


def target_of(path: Path) -> Path:
    """Where `path` leads through symlinks; the file itself need not exist. Raises OSError."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def _prefix(path: Path) -> str:
    return f".kldtui-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]}-"


def sync_folder(files: Files, folder: Path) -> None:
    """Make a rename or a new file in `folder` last. Raises OSError for a failing disk."""
    try:
        with opened(files, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            files.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise


def replace(files: Files, path: Path, data: bytes) -> Seen:
    """Put `data` at `path` (no symlink) atomically; mode and, where allowed, owner stay.

    Raises OSError; then `path` holds what it held, or, if only the folder could not be synced,
    the new bytes.
    """
    _refuse_read_only(path)
    temporary = path.with_name(f"{_prefix(path)}{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with opened(files, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        try:
            _keep_access(files, path, fd)
            files.write_all(fd, data)
            files.fsync(fd)
            files.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.unlink(temporary)
            raise
        seen = _seen(files, fd)
    sync_folder(files, path.parent)
    return seen


def _refuse_read_only(path: Path) -> None:
    # A rename would go through all the same: the folder's permissions decide about it.
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not mode & 0o222:
        raise OSError(errno.EACCES, "the file is read-only")


def create(files: Files, path: Path, data: bytes) -> None:
    """Write a new file and sync it. Raises OSError, FileExistsError among them; then no part of
    it stays."""
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        try:
            files.write_all(fd, data)
            files.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    sync_folder(files, path.parent)


def _keep_access(files: Files, path: Path, fd: int) -> None:
    try:
        old = path.stat()
    except FileNotFoundError:
        return
    ours = files.fstat(fd)
    if (old.st_uid, old.st_gid) != (ours.st_uid, ours.st_gid):
        with contextlib.suppress(OSError):
            files.chown(fd, old.st_uid, old.st_gid)
    if stat.S_IMODE(old.st_mode) != stat.S_IMODE(ours.st_mode):
        files.chmod(fd, stat.S_IMODE(old.st_mode))


def sweep(path: Path) -> None:
    """Remove temporary files that a killed program left for `path`."""
    now = time.time()
    for left in path.parent.glob(f"{_prefix(path)}*.tmp"):
        with contextlib.suppress(OSError):
            if now - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


def append(files: Files, path: Path, lines: list[bytes]) -> int:
    """Add whole lines to a file of lines and sync it; a cut last line stays a line of its own.

    Hold the folder's lock meanwhile. Gives where the first line begins, in bytes. Raises OSError;
    then the file is as it was, or ends in a cut line.
    """
    new = not path.exists()
    with opened(files, path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as fd:
        status = files.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        size = begin = status.st_size
        data = b"".join(line + b"\n" for line in lines)
        if size and files.pread(fd, 1, size - 1) != b"\n":
            data, begin = b"\n" + data, size + 1
        try:
            files.write_all(fd, data)
            files.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                files.truncate(fd, size)
            raise
    if new:
        sync_folder(files, path.parent)
    return begin
