"""Values by their rank, exact, of up to two thousand million: from two readings, in little memory.

Knows: numpy, and the order of float32 by their bits.
Must not know: what the values are, or where they come from.

The first reading counts values by the upper half of their bits, the second those that share the
upper half of a wanted one by the lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Read = Callable[[], Iterable[tuple[NDArray[np.float32], NDArray[np.intp]]]]
"""Gives all values, none of them NaN, and the group of each, as often as it is called."""

_HALF = 1 << 16


class Ranks:
    """The values of each group, in ascending order, to be asked by rank."""

    def __init__(self, read: Read, groups: int = 1) -> None:
        self._read = read
        counts = np.zeros(groups * _HALF, np.int32)
        for values, group in read():
            found = np.bincount(group * _HALF + (_keys(values) >> 16), minlength=counts.size)
            np.add(counts, found, out=counts, casting="unsafe")
        self._counts = counts.reshape(groups, _HALF)
        self._upto = self._counts.cumsum(axis=1, dtype=np.int32)

    def count(self, group: int = 0) -> int:
        """How many values a group has."""
        return int(self._upto[group, -1])

    def at(self, wanted: Sequence[tuple[int, int]]) -> list[float]:
        """The value for each (group, rank from 0). Raises IndexError for a rank that none has."""
        places: list[tuple[int, int]] = []
        for group, rank in wanted:
            if not 0 <= rank < self.count(group):
                raise IndexError(f"rank {rank} of {self.count(group)}")
            places.append((group, int(self._upto[group].searchsorted(rank, side="right"))))
        slots = {place: slot for slot, place in enumerate(dict.fromkeys(places))}
        lower = self._lower(slots)
        out = []
        for (group, rank), place in zip(wanted, places, strict=True):
            high = place[1]
            within = rank - int(self._upto[group, high] - self._counts[group, high])
            low = int(lower[slots[place]].cumsum().searchsorted(within, side="right"))
            # Values that change between the readings must not lead outside.
            out.append(_value(high << 16 | min(low, _HALF - 1)))
        return out

    def _lower(self, slots: dict[tuple[int, int], int]) -> NDArray[np.int32]:
        """Of the values in each slot, how many have which lower half, int32[slots, 65536]."""
        of = np.full(self._counts.size, -1, np.int16)
        for (number, high), slot in slots.items():
            of[number * _HALF + high] = slot
        found = np.zeros((len(slots), _HALF), np.int32)
        for values, group in self._read():
            keys = _keys(values)
            slot_of = of[group * _HALF + (keys >> 16)]
            here = np.flatnonzero(slot_of >= 0)
            np.add.at(found, (slot_of[here], keys[here] & (_HALF - 1)), 1)
        return found

    def percentiles(self, percents: Sequence[float], group: int = 0) -> list[float]:
        """Percentiles of a group that is not empty, interpolated linearly."""
        places = [percent / 100 * (self.count(group) - 1) for percent in percents]
        ranks = [rank for at in places for rank in (int(at), int(at) + (at > int(at)))]
        values = self.at([(group, rank) for rank in ranks])
        out = []
        for k, at in enumerate(places):
            low, high, part = values[2 * k], values[2 * k + 1], at - int(at)
            out.append((1 - part) * low + part * high if part else low)
        return out


def medians(ranks: Ranks, groups: int) -> list[float]:
    """The median of each group; NaN of an empty one."""
    wanted, out = [], [float("nan")] * groups
    for group in range(groups):
        count = ranks.count(group)
        wanted += [(group, (count - 1) // 2), (group, count // 2)] if count else []
    values = ranks.at(wanted)
    for k in range(0, len(wanted), 2):
        out[wanted[k][0]] = (values[k] + values[k + 1]) / 2
    return out


def _keys(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Integers 0 … 2**32 - 1 in the order of the values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.int64)
    return np.where(bits >> 31 == 1, 0xFFFFFFFF - bits, bits + 0x80000000)


def _value(key: int) -> float:
    bits = key - 0x80000000 if key >= 0x80000000 else 0xFFFFFFFF - key
    return float(np.array([bits], np.uint32).view(np.float32)[0])
