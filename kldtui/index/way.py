"""Who has the right of way: a person's key before what takes long, in all processes of a scan.

Knows: a moment, and a page of memory that processes share to tell it.
Must not know: what takes long, keys, screens.

A scan in a process of its own still takes the screen's cache and its share of the memory's rate;
where there are few cores, a frame takes half as long again while it runs.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from typing import IO

import numpy as np
from numpy.typing import NDArray

_BYTES = mmap.ALLOCATIONGRANULARITY
_LONGEST_NAP = 0.02
"""Seconds; a moment that was read half written is read again soon."""


class Way:
    """The moment until which all that take long stand back, by time.monotonic()."""

    def __init__(self, shared: int | None = None) -> None:
        """shared: the file descriptor that another process gave (`share`). Raises OSError."""
        self._file: IO[bytes] | None = None
        self._until: NDArray[np.float64] = np.zeros(1) if shared is None else _mapped(shared)

    def share(self) -> int | None:
        """A file descriptor to open the same way by; None where there is no place for it."""
        if self._file is None:
            try:
                file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this
                file.write(bytes(_BYTES))
                file.flush()
                self._until = _mapped(file.fileno())
            except OSError:
                return None
            self._file = file
        return self._file.fileno()

    def stand_back(self, seconds: float) -> None:
        """Have whoever asks `give_way` wait for so long."""
        self._until[0] = time.monotonic() + seconds

    def give_way(self) -> None:
        """Wait as long as one is asked to stand back."""
        while (left := float(self._until[0]) - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_NAP))


def _mapped(descriptor: int) -> NDArray[np.float64]:
    return np.frombuffer(mmap.mmap(descriptor, _BYTES), np.float64, 1)
