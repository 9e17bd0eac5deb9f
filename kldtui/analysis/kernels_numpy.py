"""The loops over whole rows in plain numpy: what moves many codes at once is called seldom.

Knows: numpy, codes, and how to keep a core busy with them.
Must not know: columns, files, or what the sums are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis.kernels import KLD_CUT, Head, Summed, TopCodes
from kldtui.rows import Codes, least_codes

_COLUMNS = 4096
_FEW = 2 * _COLUMNS
_BATCH = 8192
"""Tokens that are decoded together: more do not stay in a core's own cache."""
_EIGHT = np.dtype("V16")
"""Eight codes, moved as one."""


class _Found(NamedTuple):
    """Tokens of a row. eights: which eights of codes hold them; ids: where, among the codes of
    these eights; or in the row, where `eights` is None."""

    eights: NDArray[np.intp] | None
    ids: NDArray[np.intp]


class _Part(NamedTuple):
    """A row of a batch, by its number there: where its tokens lie, and the numbers of the quants
    that it is summed for."""

    number: int
    row: int
    where: slice
    numbers: Sequence[int]


class NumpyKernels:
    """Plain numpy: maxima down columns, and only tokens above the cut decoded."""

    name = "numpy"
    has_compiled = False

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

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
        least = least_codes(head.scale, head.base, KLD_CUT).tolist()
        wanted: dict[int, list[int]] = {}
        for k, quant in enumerate(quants):
            quant.out[quant.which] = 0
            for i in quant.which.tolist():
                if least[i] <= 65535:
                    wanted.setdefault(i, []).append(k)
        room = _BATCH + ref.n
        codes = self._buffer("codes", (1 + len(quants)) * room, np.uint16).reshape(-1, room)
        batch: list[_Part] = []
        at = 0
        for i, numbers in wanted.items():
            found = self._find(ref.grid[i], least[i])
            part = _Part(len(batch), i, slice(at, at + found.ids.size), numbers)
            self._take(ref.grid[i], found, codes[0, part.where])
            for k, quant in enumerate(quants):
                if k in numbers:
                    self._take(quant.codes.grid[i], found, codes[1 + k, part.where])
                else:
                    codes[1 + k, part.where] = 65535
            batch.append(part)
            at = part.where.stop
            if at >= _BATCH:
                self._add(batch, codes[:, :at], head, quants)
                batch, at = [], 0
        if batch:
            self._add(batch, codes[:, :at], head, quants)

    def _find(self, row: NDArray[np.uint16], low: int) -> _Found:
        """Where a row's codes are at least `low`: first the eights of them that have one."""
        n = row.size
        mask = self._buffer("mask", n, np.bool_)
        np.greater_equal(row, low, out=mask)
        whole = n // 8 * 8
        eights = mask[:whole].view(np.uint64)
        hit = np.not_equal(eights, 0, out=self._buffer("hit", eights.size, np.bool_))
        if 2 * np.count_nonzero(hit) > hit.size or mask[whole:].any():
            return _Found(None, mask.nonzero()[0])
        at = hit.nonzero()[0]
        held = self._buffer("held", eights.size, np.uint64)[: at.size]
        eights.take(at, out=held, mode="clip")
        return _Found(at, held.view(np.bool_).nonzero()[0])

    def _take(self, row: NDArray[np.uint16], found: _Found, out: NDArray[np.uint16]) -> None:
        """The codes of a row that were found in another."""
        if found.eights is not None:
            held = self._buffer("taken", row.size, np.uint16)[: 8 * found.eights.size]
            eights = row[: row.size // 8 * 8].view(_EIGHT)
            eights.take(found.eights, out=held.view(_EIGHT), mode="clip")
            row = held
        row.take(found.ids, out=out, mode="clip")  # quicker than with "raise": all are inside

    def _add(
        self,
        batch: Sequence[_Part],
        codes: NDArray[np.uint16],
        head: Head,
        quants: Sequence[Summed],
    ) -> None:
        """`sums`, over the tokens of some rows: few enough that all that is made is cached."""
        size = codes.shape[1]
        x, y, p, apart, floored = self._buffer("floats", 5 * size, np.float32).reshape(5, size)
        each = self._ones(size)
        tops = _count_down(codes[0], head, batch, x)
        np.exp(x, out=p)
        totals = [float(p[part.where].dot(each[part.where])) for part in batch]
        for k, quant in enumerate(quants):
            mine = [part for part in batch if k in part.numbers]
            np.equal(codes[1 + k], 0, out=floored)
            others = _count_down(codes[1 + k], quant.head, mine, y)
            np.subtract(x, y, out=apart)  # equal rows differ by exactly nothing
            np.exp(y, out=y)
            for part, other in zip(mine, others, strict=True):
                here, top, total = part.where, tops[part.number], totals[part.number]
                share, weight = math.exp(top), p[here]
                quant.out[part.row] = (
                    share * ((top - other) * total + float(weight.dot(apart[here]))),
                    share * float(weight.dot(floored[here])),
                    share * total,
                    math.exp(other) * float(y[here].dot(each[here])),
                )

    def _ones(self, size: int) -> NDArray[np.float32]:
        ones = self._buffers.get("ones")
        if ones is None or ones.size < size:
            ones = self._buffers["ones"] = np.ones(size + size // 4, np.float32)
        return ones


def _count_down(
    codes: NDArray[np.uint16], head: Head, batch: Sequence[_Part], out: NDArray[np.float32]
) -> list[float]:
    """Decode codes into `out`, less the log p of code 65535, which is given for each row.

    The tokens with the most probability have the fewest steps then, and float32 sums stay exact
    where it matters. codes: are inverted in place.
    """
    np.invert(codes, out=codes)
    np.copyto(out, codes)
    tops = []
    for part in batch:
        scale, base = float(head.scale[part.row]), float(head.base[part.row])
        out[part.where] *= np.float32(-scale)
        tops.append(base + 65535.0 * scale)
    return tops


def _tops_by_rows(codes: NDArray[np.uint16]) -> TopCodes:
    ids = codes.argmax(axis=1)
    top = codes[np.arange(len(codes)), ids]
    second = np.zeros(len(codes), np.uint16)
    for i, best in enumerate(ids.tolist()):
        row = codes[i]
        before = row[:best].max() if best else 0
        second[i] = max(before, row[best + 1 :].max() if best + 1 < row.size else 0)
    return TopCodes(ids, top, second)
