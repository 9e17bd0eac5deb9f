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
_COLUMNS = 2048
_FEW = 4 * _COLUMNS
_ONES = 8


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

    def tops(
        self, codes: Codes
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
        """Lowest id of the best code, the best code, and the best of the others, [r] each."""

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
        3: the quant's mass (of the same tokens, or of the whole row), by `straight`.
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

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def _buffer(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        held = self._buffers.get(name)
        if held is None or held.size < size:
            held = self._buffers[name] = np.empty(size + size // 4, dtype)
        return held[:size]

    def tops(
        self, codes: Codes
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
        grid = codes.grid
        if codes.n < _FEW or not len(codes):
            return _tops_by_rows(grid)
        count, n_vocab = grid.shape
        deep = n_vocab // _COLUMNS
        body = np.lib.stride_tricks.as_strided(
            grid, (count, deep, _COLUMNS), (grid.strides[0], 2 * _COLUMNS, 2), writeable=False
        )
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
        return ids, top, second

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
        for i in which.tolist():
            low = int(least[i])
            if low <= 65535:
                head = [float(x[i]) for x in heads]
                self._row(ref.grid[i], quant.grid[i], head, low, out[i])
            else:
                out[i] = 0

    def _row(
        self,
        mine: NDArray[np.uint16],
        theirs: NDArray[np.uint16],
        head: Sequence[float],
        least: int,
        out: NDArray[np.float64],
    ) -> None:
        scale, base, other, other_base = head
        n = mine.size
        # numpy finds the places of few ones by a slow search and those of many by a quick loop;
        # ones behind the end make them many.
        spare = n // _ONES + 1
        mask = self._buffer("mask", n + spare, np.bool_)
        np.greater_equal(mine, least, out=mask[:n])
        mask[n:] = True
        ids = mask.nonzero()[0][:-spare]
        k = ids.size
        codes = self._buffer("codes", k, np.uint16)
        x, y, p = (self._buffer(name, k, np.float32) for name in ("x", "y", "p"))
        # Counted down from 65535, so that the tokens with the most probability have the fewest
        # steps, and float32 sums stay exact where it matters.
        mine.take(ids, out=codes, mode="clip")
        np.invert(codes, out=codes)
        np.copyto(x, codes)
        theirs.take(ids, out=codes, mode="clip")
        np.invert(codes, out=codes)
        np.copyto(y, codes)
        top, other_top = base + 65535.0 * scale, other_base + 65535.0 * other
        x *= np.float32(-scale)
        y *= np.float32(-other)
        np.exp(x, out=p)
        x -= y  # equal rows differ by exactly nothing
        total = float(p.sum())
        share = math.exp(top)
        out[0] = share * ((top - other_top) * total + float(p.dot(x)))
        out[1] = 0.0
        out[2] = share * total
        at_floor = self._buffer("floor", k, np.bool_)
        np.equal(codes, 65535, out=at_floor)
        if at_floor.any():
            np.copyto(x, at_floor)
            out[1] = share * float(p.dot(x))
        y *= np.float32(LOG2E * 8388608)
        y += np.float32((other_top * LOG2E + 127) * 8388608)
        np.copyto(p.view(np.int32), y, casting="unsafe")
        out[3] = float(p.sum())


def _tops_by_rows(
    codes: NDArray[np.uint16],
) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
    ids = codes.argmax(axis=1)
    top = codes[np.arange(len(codes)), ids]
    second = np.zeros(len(codes), np.uint16)
    for i, best in enumerate(ids.tolist()):
        row = codes[i]
        before = row[:best].max() if best else 0
        second[i] = max(before, row[best + 1 :].max() if best + 1 < row.size else 0)
    return ids, top, second
