"""The loops over whole rows: best two codes, and the sums that make a KLD, a block at a time.

Knows: what such loops are given and give, however they are made, and what their masses say.
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

from kldtui.rows import Codes

KLD_CUT = -16.0
"""llama.cpp sums the KLD over tokens whose reference log p is above this (`log_softmax`)."""
LOG2E = math.log2(math.e)
LINE = 1.0615
"""2^n (1 + f) is at least 2^(n + f) and less than this many times it, for 0 <= f < 1."""


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
