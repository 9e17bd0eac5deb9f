"""The loops over whole rows, compiled (`kldtui[fast]`). Import it only where a scan needs it.

Knows: numba, and loops without a branch that LLVM turns into vector instructions.
Must not know: columns, files, or what the sums are for.

exp(x) = 2^n 2^f: n by truncation, 2^f by a polynomial of degree 4 (relative error 2.7e-6, for
-1 < f <= 0), put together by adding n to the exponent's bits. KLD come within 1e-5 nats of
NumpyKernels'. The quant's mass is only bracketed, by a straight line in place of the polynomial.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kldtui.analysis.kernels import LOG2E, Sums, brackets
from kldtui.rows import FullRows

_LOOSE = {"nsz", "nnan", "ninf", "arcp", "contract", "reassoc"}
_C0 = np.float32(0.9999973320084207)
_C1 = np.float32(0.6930281531391964)
_C2 = np.float32(0.2393316993788984)
_C3 = np.float32(0.05305992078169017)
_C4 = np.float32(0.006760301598635502)
_MANTISSA = np.int32(23)
_ZERO = np.float32(0)
_TILE = 1024
_MANY = 1 << 14


@njit(cache=True, nogil=True)
def _most(codes):  # type: ignore[no-untyped-def]
    most = np.uint16(0)
    for j in range(codes.size):
        most = max(most, codes[j])
    return most


@njit(cache=True, nogil=True)
def _tops(codes, step, n, ids, top, second):  # type: ignore[no-untyped-def]
    """Per row the lowest id of the best code, that code, and the best of all others."""
    for i in range(ids.size):
        row = codes[i * step : i * step + n]
        best, other, found = -1, 0, 0
        for start in range(0, n, _TILE):
            most = int(_most(row[start : start + _TILE]))
            if most > best:
                other, best, found = max(best, 0), most, start
            elif most > other:
                other = most
        tile = row[found : found + _TILE]
        at = 0
        while tile[at] != best:
            at += 1
        inside = max(_most(tile[:at]), _most(tile[at + 1 :]))
        ids[i] = found + at
        top[i] = best
        second[i] = max(other, int(inside))


@njit(cache=True, nogil=True)
def _count(codes, code):  # type: ignore[no-untyped-def]
    """How many of at most 65,535 codes are above one: in 16 bits, as many at once as fit."""
    count = np.uint16(0)
    for j in range(codes.size):
        count = np.uint16(count + (np.uint16(1) if codes[j] > code else np.uint16(0)))
    return count


@njit(cache=True, nogil=True)
def _above(codes, step, n, rows, ids, out):  # type: ignore[no-untyped-def]
    for r in range(rows.size):
        row = codes[rows[r] * step : rows[r] * step + n]
        code, count = row[ids[r]], 0
        for start in range(0, n, _MANY):
            count += int(_count(row[start : start + _MANY], code))
        out[r] = count


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_LOOSE)
def _sums(ref, quant, ref_step, quant_step, n, rows, least, factors, out):  # type: ignore[no-untyped-def]
    """Per row of `rows`: sum of p (c + ratio k), of p where k is 0, of p, of the quant's lined p.

    factors: float32[k, 5]: log2 p = f0 c + f1 of the reference; the quant's, as the bits of a
    float, f2 k + f3; and the ratio f4 of the scales. They come from outside, so that the compiler
    cannot take the products apart again.
    """
    for r in range(rows.size):
        i = rows[r]
        mine = ref[i * ref_step : i * ref_step + n]
        theirs = quant[i * quant_step : i * quant_step + n]
        low = least[r]
        f0, f1, f2, f3, f4 = (
            factors[r, 0],
            factors[r, 1],
            factors[r, 2],
            factors[r, 3],
            factors[r, 4],
        )
        apart, floored, mass, lined = _ZERO, _ZERO, _ZERO, _ZERO
        for j in range(n):
            c = np.float32(mine[j])
            k = np.float32(theirs[j])
            power = c * f0 + f1
            whole = np.int32(power)
            f = power - np.float32(whole)
            p = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * _C4)))
            bits = np.float32(p).view(np.int32) + np.int32(whole << _MANTISSA)
            p = np.int32(bits).view(np.float32)
            p = p if mine[j] >= low else _ZERO
            apart += p * (c + k * f4)
            mass += p
            floored += p if theirs[j] == 0 else _ZERO
            lined += np.int32(k * f2 + f3).view(np.float32)
        out[r, 0] = apart
        out[r, 1] = floored
        out[r, 2] = mass
        out[r, 3] = lined


class NumbaKernels:
    """Compiled loops. The first of all compiles for some seconds; later ones read what it kept."""

    name = "numba"

    def __init__(self) -> None:
        codes = np.zeros((1, 4), np.uint16)
        one = np.ones(1, np.float32)
        rows = FullRows(codes, one, -one, -one, np.zeros(1, np.uint8))
        self.tops(rows)
        self.above(rows, np.zeros(1, np.int64), np.zeros(1, np.int32))
        self.sums(rows, rows, np.ones(1, np.int64), -one, np.ones(1, bool))

    def tops(
        self, rows: FullRows
    ) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.uint16]]:
        count = len(rows)
        codes, step = rows.flat()
        ids = np.empty(count, np.int64)
        top, second = np.empty(count, np.uint16), np.empty(count, np.uint16)
        _tops(codes, step, rows.n_vocab, ids, top, second)
        return ids, top, second

    def above(
        self, rows: FullRows, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        codes, step = rows.flat()
        out = np.empty(which.size, np.int64)
        _above(codes, step, rows.n_vocab, which, ids, out)
        return out

    def sums(
        self,
        ref: FullRows,
        quant: FullRows,
        least: NDArray[np.int64],
        best: NDArray[np.float32],
        where: NDArray[np.bool_],
    ) -> Sums:
        rows = np.flatnonzero(where & (least <= 65535))
        scale, base = (x[rows].astype(np.float64) for x in (ref.scale, ref.base))
        other, other_base = (x[rows].astype(np.float64) for x in (quant.scale, quant.base))
        factors = np.empty((rows.size, 5), np.float32)
        factors[:, 0], factors[:, 1] = scale * LOG2E, base * LOG2E
        factors[:, 2] = other * (LOG2E * 8388608)
        factors[:, 3] = (other_base * LOG2E + 127) * 8388608
        factors[:, 4] = -other / scale
        found = np.empty((rows.size, 4), np.float32)
        codes, step = ref.flat()
        others, other_step = quant.flat()
        low = least[rows].astype(np.uint16)
        _sums(codes, others, step, other_step, ref.n_vocab, rows, low, factors, found)
        out: NDArray[Any] = np.zeros((len(ref), 4))
        out[rows] = found
        out[rows, 0] = scale * out[rows, 0] + (base - other_base) * out[rows, 2]
        out = out[where]
        quant_low, quant_high = brackets(out[:, 3], best[where])
        return Sums(out[:, 0], out[:, 1], out[:, 2], quant_low, quant_high)
