"""One writer a file.

Knows: advisory locks.
Must not know: what is written.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from kldtui.errors import RecordingError


def lock(fd: int, path: Path) -> None:
    """Hold the file until `fd` is closed. Raises RecordingError where another program does.

    A file system without locks is written to all the same.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordingError(f"{path}: another program is recording to it") from None
    except OSError:
        pass
