"""Columns of one length, each an array of its own, indexed like one structured array.

Knows: numpy arrays, and in what order an entry is written.
Must not know: what the columns mean (but for the marks that are written last), files.

Whoever asks for one column touches that column's memory alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Columns = NDArray[Any]
MARKS = ("state", "rest")
"""Columns that say that others stand; written after them."""


class Table:
    """`table["kld"]` is a column, `table[5]` an entry (a dict by column), `table[3:9]` a
    structured array of entries.

    Columns are views that may be written to; entries and arrays of them are copies.
    """

    def __init__(self, dtype: np.dtype[Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """arrays: one for each field of `dtype`, all of one length."""
        self.dtype = dtype
        self.names: tuple[str, ...] = dtype.names or ()
        self._arrays = dict(arrays)

    @classmethod
    def empty(cls, dtype: np.dtype[Any], n: int) -> Table:
        """A table in memory, all zero; memory is taken as it is written to."""
        return cls(dtype, {name: np.zeros(n, dtype[name]) for name in dtype.names or ()})

    def grown(self, n: int) -> Table:
        """A table of `n` entries in memory that begins with this one's."""
        out = Table.empty(self.dtype, n)
        for name, array in self._arrays.items():
            out[name][: len(self)] = array[:n]
        return out

    def __len__(self) -> int:
        return int(self._arrays[self.names[0]].size)

    @overload
    def __getitem__(self, key: str) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice | NDArray[Any] | list[int]) -> Columns: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._arrays[key]
        return self.entries(key, self.names)

    def __setitem__(self, name: str, values: Any) -> None:
        self._arrays[name][...] = values

    def entries(self, key: Any, names: Sequence[str]) -> Any:
        """Entries with only some of their columns; the others are 0, or not there in a dict."""
        if isinstance(key, int | np.integer):
            return {name: self._arrays[name][key] for name in names}
        first = self._arrays[self.names[0]][key]
        out = np.zeros(first.shape, self.dtype)
        for name in names:
            out[name] = self._arrays[name][key]
        return out

    def mark(self, name: str, i: int) -> int:
        """One value of a column of bytes."""
        return int(self._arrays[name][i])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def put(
        self,
        first: int,
        entries: Columns,
        names: Sequence[str] = (),
        where: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write entries from index `first` on (those `where`, some columns), marks last."""
        span = slice(first, first + len(entries))
        chosen = names or self.names
        ordered = [name for name in chosen if name not in MARKS]
        for name in (*ordered, *(name for name in MARKS if name in chosen)):
            column = self._arrays[name]
            if where is None:
                column[span] = entries[name]
            else:
                column[span][where] = entries[name][where]

    # -- what a table that is kept on disk does more -----------------------------------------------

    @property
    def kept(self) -> bool:
        """Whether the entries outlive the program."""
        return False

    def own(self) -> bool:
        """Whether this program is the one to fill the table; another's end makes room."""
        return True

    def verify(self) -> None:
        """Take back what was damaged since it was written: it is pending again."""

    def save(self, hurry: bool = True) -> None:
        """See that what stands would survive a loss of power."""

    def release(self) -> None:
        """Give back memory that only mirrors the disk."""

    def close(self) -> None:
        """Save, and let others fill the table."""
