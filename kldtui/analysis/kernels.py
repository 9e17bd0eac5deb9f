"""The loops over whole rows: best two codes, and the sums that make a KLD, a block at a time.

Knows: numpy, codes, and how to keep a core busy with them.
Must not know: columns, files, or what the sums are for.

A kernel keeps buffers between blocks: one for each thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kldtui.rows import FullRows

LOG2E = math.log2(math.e)
LINE = 1.0615
"""2^n (1 + f) is at least 2^(n + f) and less than this many times it, for 0 <= f < 1."""
_COLUMNS = 2048
_FEW = 4 * _COLUMNS
_ONES = 8


@dataclass(frozen=True, slots=True)
class Sums:
    """Of k pairs of valid rows, float64[k] each.

    kld: over the tokens above the cut in the reference, nats. floored: the reference's
    probability of those of them that lie at the quant's floor. ref_mass: of all of them.
    quant_low, quant_high: the quant's mass lies between (of the same tokens, or of the whole row).
    """

    kld: NDArray[np.float64]
    floored: NDArray[np.float64]
    ref_mass: NDArray[np.float64]
    quant_low: NDArray[np.float64]
    quant_high: NDArray[np.float64]


class Kernels(Protocol):
    """The loops, however they are made; one object serves one thread."""

    @property
    def name(self) -> str: ...

    def tops(
        self, rows: FullRows
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
        """Lowest id of the best code, the best code, and the best of the others, [r] each."""

    def above(
        self, rows: FullRows, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """How many codes of row `which[k]` are above that of `ids[k]`, int64[k]."""

    def sums(
        self,
        ref: FullRows,
        quant: FullRows,
        least: NDArray[np.int64],
        best: NDArray[np.float32],
        where: NDArray[np.bool_],
    ) -> Sums:
        """The sums of the rows `where`, bool[r], all with a scale above 0 and a floor.

        least: the reference's lowest code that counts. best: log p of the quant's best (nats).
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
        self, rows: FullRows
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
        codes = rows.codes
        if rows.n_vocab < _FEW or not len(rows):
            return _tops_by_rows(codes)
        count, n_vocab = codes.shape
        deep = n_vocab // _COLUMNS
        body = np.lib.stride_tricks.as_strided(
            codes, (count, deep, _COLUMNS), (codes.strides[0], 2 * _COLUMNS, 2), writeable=False
        )
        # One pass down the columns finds the best of each; the rest is about a few thousand codes.
        spare = n_vocab - deep * _COLUMNS
        size = _COLUMNS + spare
        wide = self._buffer("wide", count * size, np.uint16).reshape(count, size)
        np.maximum.reduce(body, axis=1, out=wide[:, :_COLUMNS])
        wide[:, _COLUMNS:] = codes[:, deep * _COLUMNS :]
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
            ids[i] = codes[i].argmax()
        return ids, top, second

    def above(
        self, rows: FullRows, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        mask = self._buffer("mask", rows.n_vocab, np.bool_)
        out = np.empty(which.size, np.int64)
        for k, (i, token) in enumerate(zip(which.tolist(), ids.tolist(), strict=True)):
            row = rows.codes[i]
            out[k] = np.count_nonzero(np.greater(row, row[token], out=mask))
        return out

    def sums(
        self,
        ref: FullRows,
        quant: FullRows,
        least: NDArray[np.int64],
        best: NDArray[np.float32],
        where: NDArray[np.bool_],
    ) -> Sums:
        out = np.zeros((5, int(np.count_nonzero(where))))
        for k, i in enumerate(np.flatnonzero(where).tolist()):
            self._row(ref, quant, i, int(least[i]), out[:, k])
        lined = out[3]
        low, high = brackets(lined, best[where])
        return Sums(out[0], out[1], out[2], low, high)

    def _row(
        self, ref: FullRows, quant: FullRows, i: int, least: int, out: NDArray[np.float64]
    ) -> None:
        """KLD, floored, both masses of one pair of rows, into out[0:4]."""
        if least > 65535:
            return
        mine, theirs = ref.codes[i], quant.codes[i]
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
        scale, other = ref.scale[i], quant.scale[i]
        top = float(ref.base[i]) + 65535.0 * float(scale)
        other_top = float(quant.base[i]) + 65535.0 * float(other)
        x *= -scale
        y *= -other
        np.exp(x, out=p)
        x -= y  # equal rows differ by exactly nothing
        total = float(p.sum())
        share = math.exp(top)
        out[0] = share * ((top - other_top) * total + float(p.dot(x)))
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
