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


class Heads(NamedTuple):
    """How the codes of a reference and a quant are decoded: log p = scale * code + base, nats.

    float32[r] each; scales above 0, and a base that float32 has a normal exp of.
    """

    scale: NDArray[np.float32]
    base: NDArray[np.float32]
    other_scale: NDArray[np.float32]
    other_base: NDArray[np.float32]


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

    def sums(
        self,
        ref: Codes,
        quant: Codes,
        heads: Heads,
        which: NDArray[np.int64],
        out: NDArray[np.float64],
    ) -> None:
        """Sums over the rows `which` of two blocks, into the same rows of `out`, float64[r, 4].

        0: the KLD, over the tokens above KLD_CUT in the reference, nats. 1: the reference's
        probability of those of them that lie at the quant's floor. 2: of all of them.
        3: the quant's mass of the same tokens; NaN if `tops` gives the whole one.
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
        self._floats = np.empty((4, _AT_ONCE), np.float32)

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

    def sums(
        self,
        ref: Codes,
        quant: Codes,
        heads: Heads,
        which: NDArray[np.int64],
        out: NDArray[np.float64],
    ) -> None:
        least = least_codes(heads.scale, heads.base, KLD_CUT)
        mask = self._buffer("mask", ref.n, np.bool_)
        out[which] = 0
        for i in which.tolist():
            low = int(least[i])
            if low > 65535:
                continue
            ids = np.greater_equal(ref.grid[i], low, out=mask).nonzero()[0]
            head = [float(x[i]) for x in heads]
            for start in range(0, ids.size, _AT_ONCE):
                part = ids[start : start + _AT_ONCE]
                out[i] += self._sums_of(ref.grid[i], quant.grid[i], part, head)

    def _sums_of(
        self,
        mine: NDArray[np.uint16],
        theirs: NDArray[np.uint16],
        ids: NDArray[np.int64],
        head: Sequence[float],
    ) -> tuple[float, float, float, float]:
        """`sums`, over a few tokens of one row: so few that all that is made of them is cached."""
        scale, base, other, other_base = head
        x, y, p, floored = self._floats[:, : ids.size]
        # Counted down from 65535, so that the tokens with the most probability have the fewest
        # steps, and float32 sums stay exact where it matters.
        codes = mine.take(ids)
        np.invert(codes, out=codes)
        np.multiply(codes, np.float32(-scale), out=x)
        codes = theirs.take(ids)
        np.invert(codes, out=codes)
        np.multiply(codes, np.float32(-other), out=y)
        np.equal(codes, 65535, out=floored)
        top, other_top = base + 65535.0 * scale, other_base + 65535.0 * other
        share = math.exp(top)
        np.exp(x, out=p)
        total = float(p.dot(_EACH[: ids.size]))
        x -= y  # equal rows differ by exactly nothing
        np.exp(y, out=y)
        return (
            share * ((top - other_top) * total + float(p.dot(x))),
            share * float(p.dot(floored)),
            share * total,
            math.exp(other_top) * float(y.dot(_EACH[: ids.size])),
        )


def _tops_by_rows(codes: NDArray[np.uint16]) -> TopCodes:
    ids = codes.argmax(axis=1)
    top = codes[np.arange(len(codes)), ids]
    second = np.zeros(len(codes), np.uint16)
    for i, best in enumerate(ids.tolist()):
        row = codes[i]
        before = row[:best].max() if best else 0
        second[i] = max(before, row[best + 1 :].max() if best + 1 < row.size else 0)
    return TopCodes(ids, top, second)
