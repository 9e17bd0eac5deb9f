"""What one position says of a pair: argmaxes, ties, KLD, margins, ranks, and what is a bound.

Knows: numpy (and numba, where it is installed), and rows of log-probabilities, full or top-N.
Must not know: files, formats, chunks, text, or which position a row belongs to.

A *top set* is every id that shares the best log p of a row; the argmax is its lowest id, as in
llama.cpp. Two rows agree, tie or flip by their top sets: disjoint sets are a root, sets that meet
are a tie where one of them has several members.
"""

from kldtui.analysis.blocks import (
    RefBlock,
    RefRows,
    analyse_pair,
    analyse_ref,
    doubtful,
    first_pair,
    first_ref,
    is_clear,
    put_sums,
    second_pair,
    second_ref,
    settle,
)
from kldtui.analysis.columns import (
    PAIR_DTYPE,
    PAIR_REST,
    REF_DTYPE,
    REF_REST,
    SMALLEST_LOGP,
    Bound,
    Columns,
    Kind,
    State,
    missing_pair,
)
from kldtui.analysis.kernels import KLD_CUT, Head, Kernels, Summed, load_fast
from kldtui.analysis.kernels_numpy import NumpyKernels
from kldtui.analysis.quick import Best, quick_pair, quick_ref
from kldtui.analysis.reading import MASS_TOLERANCE, mass_is_strange

__all__ = [
    "KLD_CUT",
    "MASS_TOLERANCE",
    "PAIR_DTYPE",
    "PAIR_REST",
    "REF_DTYPE",
    "REF_REST",
    "SMALLEST_LOGP",
    "Best",
    "Bound",
    "Columns",
    "Head",
    "Kernels",
    "Kind",
    "NumpyKernels",
    "RefBlock",
    "RefRows",
    "State",
    "Summed",
    "analyse_pair",
    "analyse_ref",
    "doubtful",
    "first_pair",
    "first_ref",
    "is_clear",
    "load_fast",
    "mass_is_strange",
    "missing_pair",
    "put_sums",
    "quick_pair",
    "quick_ref",
    "second_pair",
    "second_ref",
    "settle",
]
