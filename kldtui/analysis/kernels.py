"""The loops over whole rows: best two codes, and the sums that make a KLD, a block at a time.

Knows: numpy, codes, and how to keep a core busy with them.
Must not know: columns, files, or what the sums are for.

A kernel keeps buffers between blocks: one for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kldtui.rows import Codes, least_codes

KLD_CUT = -16.0
"""llama.cpp sums the KLD over tokens whose reference log p is above this (`log_softmax`)."""
LOG2E = math.log2(math.e)
LINE = 1.0615
"""2^n (1 + f) is at least 2^(n + f) and less than this many times it, for 0 <= f < 1."""
_COLUMNS = 4096
_FEW = 2 * _COLUMNS
_AT_ONCE = 8192
_EACH = np.ones(_AT_ONCE, np.float32)


class Head(NamedTuple):
    """How the codes of rows are decoded: log p = scale * code + base, nats; float32[r] each."""

    scale: NDArray[np.float32]
    base: NDArray[np.float32]


class TopCodes(NamedTuple):
    """Lowest id of the best code, the best code, and the best of the others, [r] each.

    mass: the sum of each row, float64[r], by `straight`; None where it was not asked for, or
    where the kernel gives it with the sums.
    """

    id: NDArray[np.int64]
    top: NDArray[np.uint16]
    second: NDArray[np.uint16]
    mass: NDArray[np.float64] | None = None


class Summed(NamedTuple):
    """A quant's rows to be summed against a reference's.

    which: the rows that are wanted. out: float64[r, 4], where their sums go. 0: the KLD, over the
    tokens above KLD_CUT in the reference, nats. 1: the reference's probability of those of them
    that lie at the quant's floor. 2: of all of them. 3: the quant's mass of the same tokens; NaN
    if `tops` gives the whole one.
    """

    codes: Codes
    head: Head
    which: NDArray[np.int64]
    out: NDArray[np.float64]


class Kernels(Protocol):
    """The loops, however they are made; one object serves one thread."""

    @property
    def name(self) -> str: ...

    @property
    def has_compiled(self) -> bool:
        """Whether this process had to compile them, and its compiler still holds memory."""

    def tops(self, codes: Codes, head: Head | None = None) -> TopCodes:
        """The best of each row. head: given where the masses are wanted."""

    def above(
        self, codes: Codes, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """How many codes of row `which[k]` are above that of `ids[k]`, int64[k]."""

    def sums(self, ref: Codes, head: Head, quants: Sequence[Summed]) -> None:
        """Fill the sums of some quants' rows against a reference's.

        Scales are above 0, and bases such that float32 has a normal exp of them.
        """


def load_fast(folder: Path) -> Kernels | None:
    """Compiled kernels, where numba is installed (`kldtui[fast]`); None where it is not.

    folder: where compiled code is kept, so that only the first run of all compiles.
    """
    try:
        import numba
    except ImportError:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
        from kldtui.analysis.kernels_numba import NumbaKernels

        return NumbaKernels()
    except (OSError, RuntimeError, ImportError):
        return None  # no place for compiled code, or a numba that does not fit this machine


def straight(logp: NDArray[Any]) -> NDArray[np.float64]:
    """exp(logp) with its power of two between integers replaced by a straight line."""
    power = np.asarray(logp, np.float64) * LOG2E
    whole = np.floor(power)
    return np.asarray(np.exp2(whole) * (1 + power - whole))


def brackets(
    lined: NDArray[np.float64], best: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What a mass lies between, from its sum by `straight`; the best token's part is taken exactly.

    That one token may be nearly all, and the line then as far off as it can be.
    """
    rest = np.maximum(lined - straight(best), 0.0)
    exact = np.exp(best.astype(np.float64))
    return exact + rest / LINE, exact + rest


class NumpyKernels:
    """Plain numpy: maxima down columns, and only tokens above the cut decoded."""

    name = "numpy"
    has_compiled = False

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}
        self._floats = np.empty((5, _AT_ONCE), np.float32)

    def _buffer(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        held = self._buffers.get(name)
        if held is None or held.size < size:
            held = self._buffers[name] = np.empty(size + size // 4, dtype)
        return held[:size]

    def tops(self, codes: Codes, head: Head | None = None) -> TopCodes:
        grid = codes.grid
        if codes.n < _FEW or not len(codes):
            return _tops_by_rows(grid)
        count, n_vocab = grid.shape
        deep = n_vocab // _COLUMNS
        body = grid[:, : deep * _COLUMNS].reshape(count, deep, _COLUMNS)
        # One pass down the columns finds the best of each; the rest is about a few thousand codes.
        spare = n_vocab - deep * _COLUMNS
        size = _COLUMNS + spare
        wide = self._buffer("wide", count * size, np.uint16).reshape(count, size)
        np.maximum.reduce(body, axis=1, out=wide[:, :_COLUMNS])
        wide[:, _COLUMNS:] = grid[:, deep * _COLUMNS :]
        at = np.arange(count)
        column = wide.argmax(axis=1)
        top = wide[at, column]
        wide[at, column] = 0
        second = wide.max(axis=1)
        inside = column < _COLUMNS
        strip = body[at, :, np.where(inside, column, 0)]
        depth = strip.argmax(axis=1)
        strip[at, depth] = 0
        second = np.where(inside, np.maximum(second, strip.max(axis=1)), second)
        ids = np.where(inside, depth * _COLUMNS + column, deep * _COLUMNS + column - _COLUMNS)
        for i in np.flatnonzero(second == top).tolist():
            ids[i] = grid[i].argmax()
        return TopCodes(ids, top, second)

    def above(
        self, codes: Codes, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        mask = self._buffer("mask", codes.n, np.bool_)
        out = np.empty(which.size, np.int64)
        for k, (i, token) in enumerate(zip(which.tolist(), ids.tolist(), strict=True)):
            row = codes.grid[i]
            out[k] = np.count_nonzero(np.greater(row, row[token], out=mask))
        return out

    def sums(self, ref: Codes, head: Head, quants: Sequence[Summed]) -> None:
        least = least_codes(head.scale, head.base, KLD_CUT)
        mask = self._buffer("mask", ref.n, np.bool_)
        rows: dict[int, list[Summed]] = {}
        for quant in quants:
            quant.out[quant.which] = 0
            for i in quant.which.tolist():
                rows.setdefault(i, []).append(quant)
        for i, wanted in rows.items():
            low = int(least[i])
            if low > 65535:
                continue
            row = ref.grid[i]
            ids = np.greater_equal(row, low, out=mask).nonzero()[0]
            for start in range(0, ids.size, _AT_ONCE):
                self._add(i, row, head, ids[start : start + _AT_ONCE], wanted)

    def _add(
        self,
        i: int,
        row: NDArray[np.uint16],
        head: Head,
        ids: NDArray[np.int64],
        quants: Sequence[Summed],
    ) -> None:
        """`sums`, over a few tokens of one row: so few that all that is made of them is cached."""
        x, y, p, apart, floored = self._floats[:, : ids.size]
        each = _EACH[: ids.size]
        top = _counted_down(row.take(ids), head, i, x)
        np.exp(x, out=p)
        share, total = math.exp(top), float(p.dot(each))
        for quant in quants:
            codes = quant.codes.grid[i].take(ids)
            other_top = _counted_down(codes, quant.head, i, y)
            np.equal(codes, 65535, out=floored)
            np.subtract(x, y, out=apart)  # equal rows differ by exactly nothing
            np.exp(y, out=y)
            quant.out[i] += (
                share * ((top - other_top) * total + float(p.dot(apart))),
                share * float(p.dot(floored)),
                share * total,
                math.exp(other_top) * float(y.dot(each)),
            )


def _counted_down(codes: NDArray[np.uint16], head: Head, i: int, out: NDArray[np.float32]) -> float:
    """Decode codes of row `i` into `out`, less the log p of code 65535, which is given.

    The tokens with the most probability have the fewest steps then, and float32 sums stay exact
    where it matters. codes: are inverted in place.
    """
    scale, base = float(head.scale[i]), float(head.base[i])
    np.invert(codes, out=codes)
    np.multiply(codes, np.float32(-scale), out=out)
    return base + 65535.0 * scale


def _tops_by_rows(codes: NDArray[np.uint16]) -> TopCodes:
    ids = codes.argmax(axis=1)
    top = codes[np.arange(len(codes)), ids]
    second = np.zeros(len(codes), np.uint16)
    for i, best in enumerate(ids.tolist()):
        row = codes[i]
        before = row[:best].max() if best else 0
        second[i] = max(before, row[best + 1 :].max() if best + 1 < row.size else 0)
    return TopCodes(ids, top, second)
