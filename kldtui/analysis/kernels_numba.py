"""The loops over whole rows, compiled (`kldtui[fast]`). Import it only where a scan needs it.

Knows: numba, and loops without a branch that LLVM turns into vector instructions.
Must not know: columns, files, or what the sums are for.

p = 2^n 2^f: log2 p in fixed point is the bits of a float, of which the high ones are 2^n and the
low ones m = 1 + f, for which a polynomial of degree 4 gives 2^f (relative error 2.7e-6): a KLD
comes within a few millionths of NumpyKernels'. Where a processor pushes the
codes that count together in one step (AVX-512 VBMI2), only those are decoded: they are few and
scattered, and anything that branches on them is no quicker than decoding all. The quant's mass,
which is only to be bracketed, is summed on the way to the best codes, with the straight line 1 + f
in place of the polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kldtui.analysis.kernels import KLD_CUT, LOG2E, Head, Summed, TopCodes
from kldtui.rows import Codes

_LOOSE = {"nsz", "nnan", "ninf", "arcp", "contract", "reassoc"}
_C0 = np.float32(0.5099642228155058)
_C1 = np.float32(0.3120160314011855)
_C2 = np.float32(0.1666133822490163)
_C3 = np.float32(-0.0021252110328311)
_C4 = np.float32(0.01353416793231213)
_BITS = 8388608  # 2^23, of a float's mantissa
_LOW = np.int32(_BITS - 1)
_HIGH = np.int32(-_BITS)
_ONE = np.int32(127 * _BITS)
_ZERO = np.float32(0)
_CUT = np.float32(KLD_CUT)
_TILE = 1024
_MANY = 1 << 14
_LANES = 32


def _can_squeeze() -> bool:
    """Whether code is made for this processor, and it pushes codes together in one step."""
    if config.CPU_NAME or binding.llvm_version_info < (20,):  # type: ignore[attr-defined]
        return False
    try:
        return bool(binding.get_host_cpu_features().get("avx512vbmi2"))
    except RuntimeError:  # LLVM does not know what this processor can do
        return False


_NO_HEAD = Head(np.zeros(0, np.float32), np.zeros(0, np.float32))


@njit(cache=True, nogil=True)
def _most(codes):  # type: ignore[no-untyped-def]
    most = np.uint16(0)
    for j in range(codes.size):
        most = max(most, codes[j])
    return most


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_LOOSE)
def _lined(codes, f0, f1):  # type: ignore[no-untyped-def]
    """Sum of p by the straight line: f0 c + f1 are, as an integer, the bits of a float."""
    mass = _ZERO
    for j in range(codes.size):
        mass += np.int32(np.float32(codes[j]) * f0 + f1).view(np.float32)
    return mass


@njit(cache=True, nogil=True, error_model="numpy")
def _tops(codes, step, n, weigh, scale, base, ids, top, second, mass):  # type: ignore[no-untyped-def]
    """Per row the lowest id of the best code, that code, the best of all others, and the mass."""
    for i in range(ids.size):
        row = codes[i * step : i * step + n]
        best, other, found = -1, 0, 0
        f0 = f1 = _ZERO
        if weigh:
            f0 = np.float32(np.float64(scale[i]) * (LOG2E * _BITS))
            f1 = np.float32((np.float64(base[i]) * LOG2E + 127) * _BITS)
        for start in range(0, n, _TILE):
            tile = row[start : start + _TILE]
            most = int(_most(tile))
            if most > best:
                other, best, found = max(best, 0), most, start
            elif most > other:
                other = most
            if weigh:
                mass[i] += _lined(tile, f0, f1)
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


@njit(cache=True, nogil=True, error_model="numpy")
def _least(scale, base):  # type: ignore[no-untyped-def]
    """As `least_codes`, in the same arithmetic: nothing is contracted here."""
    near = (KLD_CUT - np.float64(base)) / np.float64(scale)
    code = math.ceil(near) - 2 if 2.0 < near < 65533.0 else (0 if near < 3.0 else 65531)
    while code < 65536 and not scale * np.float32(code) + base > _CUT:
        code += 1
    return code


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_LOOSE)
def _row(mine, theirs, low, f0, f1, f2):  # type: ignore[no-untyped-def]
    """Sum of p (c + ratio k), of p where k is 0, and of p.

    f0 c + f1 are, as an integer, the bits of a float near p in the reference; f2 is the ratio of
    the scales. All come rounded from outside, so that the compiler cannot take the products apart
    again.
    """
    apart, floored, mass = _ZERO, _ZERO, _ZERO
    for j in range(mine.size):
        c = np.float32(mine[j])
        k = np.float32(theirs[j])
        power = np.int32(c * f0 + f1)
        m = np.int32((power & _LOW) | _ONE).view(np.float32)
        p = _C0 + m * (_C1 + m * (_C2 + m * (_C3 + m * _C4)))
        p = p * np.int32(power & _HIGH).view(np.float32)
        p = p if mine[j] >= low else _ZERO
        apart += p * (c + k * f2)
        mass += p
        floored += p if theirs[j] == 0 else _ZERO
    return apart, floored, mass


@intrinsic
def _keep(context, mine, theirs, at, low, kept, others, count):  # type: ignore[no-untyped-def]
    """Append those of 32 pairs of codes from `at` on whose first is `low` or more to `kept` and
    `others`, of which `count` are filled and room for 32 is left; gives how many are then."""
    del context, at, low, count

    def generate(target: Any, build: Any, signature: Any, args: Any) -> Any:
        word, integer = ir.IntType(16), ir.IntType(32)
        codes, mask = ir.VectorType(word, _LANES), ir.VectorType(ir.IntType(1), _LANES)

        def place(k: int, index: int) -> Any:
            data = target.make_array(signature.args[k])(target, build, args[k]).data
            return build.bitcast(build.gep(data, [args[index]]), codes.as_pointer())

        def known(name: str, kind: Any) -> Any:
            return build.module.globals.get(name) or ir.Function(build.module, kind, name)

        squeeze = known(
            f"llvm.experimental.vector.compress.v{_LANES}i16",
            ir.FunctionType(codes, [codes, mask, codes]),
        )
        ones = known(f"llvm.ctpop.i{_LANES}", ir.FunctionType(integer, [integer]))
        nothing = ir.Constant(codes, ir.Undefined)
        low = build.insert_element(nothing, args[3], integer(0))
        low = build.shuffle_vector(low, nothing, ir.Constant(ir.VectorType(integer, _LANES), None))
        first, second = build.load(place(0, 2), align=2), build.load(place(1, 2), align=2)
        counts = build.icmp_unsigned(">=", first, low)
        for k, values in ((4, first), (5, second)):
            build.store(build.call(squeeze, [values, counts, nothing]), place(k, 6), align=2)
        more = build.call(ones, [build.bitcast(counts, integer)])
        return build.add(args[6], build.zext(more, ir.IntType(64)))

    return types.int64(mine, theirs, types.int64, types.uint16, kept, others, types.int64), generate


if _can_squeeze():

    @njit(cache=True, nogil=True, error_model="numpy")
    def _counted(mine, theirs, low, room):  # type: ignore[no-untyped-def]
        """Pairs of codes, all whose first is `low` or more among them."""
        kept, others = room
        count, whole = 0, mine.size // _LANES * _LANES
        for at in range(0, whole, _LANES):
            count = _keep(mine, theirs, at, low, kept, others, count)  # type: ignore[call-arg]
        for j in range(whole, mine.size):
            kept[count] = mine[j]
            others[count] = theirs[j]
            count += 1 if mine[j] >= low else 0
        return kept[:count], others[:count]

else:

    @njit(cache=True, nogil=True, error_model="numpy")
    def _counted(mine, theirs, low, room):  # type: ignore[no-untyped-def]
        return mine, theirs


@njit(cache=True, nogil=True, error_model="numpy")
def _sums(ref, quant, step, other_step, n, which, scale, base, other_scale, other_base, out, room):  # type: ignore[no-untyped-def]
    for r in range(which.size):
        i = which[r]
        out[i, 3] = np.nan
        low = _least(scale[i], base[i])
        if low > 65535:
            out[i, :3] = 0.0
            continue
        s, b = np.float64(scale[i]), np.float64(base[i])
        t, d = np.float64(other_scale[i]), np.float64(other_base[i])
        mine = ref[i * step : i * step + n]
        theirs = quant[i * other_step : i * other_step + n]
        mine, theirs = _counted(mine, theirs, np.uint16(low), (room[0], room[1]))
        apart, floored, mass = _row(
            mine,
            theirs,
            np.uint16(low),
            np.float32(s * (LOG2E * _BITS)),
            np.float32((b * LOG2E + 127) * _BITS),
            np.float32(-t / s),
        )
        out[i, 0] = s * apart + (b - d) * mass
        out[i, 1] = floored
        out[i, 2] = mass


class NumbaKernels:
    """Compiled loops. The first of all compiles for some seconds; later ones read what it kept."""

    name = "numba"

    def __init__(self) -> None:
        self._room = np.empty((2, 0), np.uint16)
        codes = Codes(np.zeros((1, 4), np.uint16), 0, 4)
        one, first = np.ones(1, np.float32), np.zeros(1, np.int64)
        self.tops(codes)
        self.above(codes, first, np.zeros(1, np.int32))
        head = Head(one, -one)
        self.sums(codes, head, [Summed(codes, head, first, np.zeros((1, 4)))])
        self.has_compiled = any(loop.stats.cache_misses for loop in (_tops, _above, _sums))

    def tops(self, codes: Codes, head: Head | None = None) -> TopCodes:
        count = len(codes)
        ids = np.empty(count, np.int64)
        top, second = np.empty(count, np.uint16), np.empty(count, np.uint16)
        mass = np.zeros(count if head is not None else 0)
        scale, base = head or _NO_HEAD
        _tops(
            codes.flat, codes.step, codes.n, head is not None, scale, base, ids, top, second, mass
        )
        return TopCodes(ids, top, second, mass if head is not None else None)

    def above(
        self, codes: Codes, which: NDArray[np.int64], ids: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        out = np.empty(which.size, np.int64)
        _above(codes.flat, codes.step, codes.n, which, ids, out)
        return out

    def sums(self, ref: Codes, head: Head, quants: Sequence[Summed]) -> None:
        if self._room.shape[1] < ref.n + _LANES:
            self._room = np.empty((2, ref.n + _LANES), np.uint16)
        for codes, other, which, out in quants:
            steps = ref.step, codes.step, ref.n
            _sums(ref.flat, codes.flat, *steps, which, *head, *other, out, self._room)
