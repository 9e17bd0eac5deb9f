"""Distributions as a recording hands them out and analysis takes them.

Knows: numpy arrays of log-probabilities (nats), their floor and validity.
Must not know: files, formats, tokens' text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Invalid(IntEnum):
    """Why a row cannot be used."""

    NO = 0
    UNWRITTEN = 1
    """All zero: the record was reserved but never written."""
    NOT_A_NUMBER = 2
    """NaN in scale or minimum: the model gave NaN logits."""
    INFINITE = 3
    """An infinite scale or minimum."""
    CONTRADICTORY = 4
    """A scale below 0, or scale 0 with a minimum that is not -ln(n_vocab)."""

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Invalid.NO: "valid",
    Invalid.UNWRITTEN: "never written (all zero)",
    Invalid.NOT_A_NUMBER: "NaN logits",
    Invalid.INFINITE: "infinite log-probabilities",
    Invalid.CONTRADICTORY: "scale and minimum contradict each other",
}


class Logp(NamedTuple):
    """A log-probability in nats; `bound` means that the true value is at most this."""

    value: float
    bound: bool


_AROUND = np.arange(-2, 3)
_COLUMNS = 1024


class Codes:
    """Codes of some rows in one run of memory, with words between the rows that are no codes.

    grid: uint16[r, n]. flat: uint16[…], contiguous, begins with the first row's first code; the
    next row's lies `step` further on.
    """

    __slots__ = ("flat", "grid", "n", "step")

    def __init__(self, raw: NDArray[np.uint16], skip: int, n: int) -> None:
        """raw: uint16[r, words], C-contiguous; a row's `n` codes begin `skip` words in."""
        self.grid = raw[:, skip : skip + n]
        self.flat = raw.reshape(-1)[skip:]
        self.step = raw.shape[1]
        self.n = n

    def __len__(self) -> int:
        return int(self.grid.shape[0])


def least_codes(
    scale: NDArray[np.float32], base: NDArray[np.float32], cut: float
) -> NDArray[np.int64]:
    """The lowest code whose log p is above `cut` nats, int64[r]; 65536 where none is.

    Found in the arithmetic that decoding uses, so that both agree to the last code.
    """
    out = np.zeros(scale.shape, np.int64)
    if cut > -np.inf:
        with np.errstate(all="ignore"):
            near = np.ceil((cut - base.astype(np.float64)) / scale)
            near = np.clip(np.nan_to_num(near), 2, 65533).astype(np.int64)
            tried = near[:, None] + _AROUND
            over = scale[:, None] * tried.astype(np.float32) + base[:, None] > np.float32(cut)
        first = np.where(over.any(axis=1), near - 2 + over.argmax(axis=1), near + 3)
        out = np.where(scale > 0, first, out)
    return np.where((scale > 0) | (base > cut), out, 65536)


@dataclass(frozen=True, slots=True)
class FullRows:
    """Rows over the whole vocabulary, as codes: log p = scale * code + base, nats, in float32.

    codes: uint16[r, n_vocab]; within a row a higher code is a higher log p and equal codes are
        equal, so argmaxes, ties and ranks are read off the codes, without decoding or rounding.
    scale, base: float32[r]; what an invalid row holds is unspecified.
    floor: float32[r]; an entry `<= floor` is known to be at most `floor`, no more. -inf where
        every entry is a value.
    invalid: uint8[r], an `Invalid` each.
    zeros: whether code 0 stands for a probability of exactly zero, log p -inf.
    raw: uint16[r, words], C-contiguous, of which `codes` is `raw[:, skip : skip + n_vocab]`; None
        where the codes lie alone.
    """

    codes: NDArray[np.uint16]
    scale: NDArray[np.float32]
    base: NDArray[np.float32]
    floor: NDArray[np.float32]
    invalid: NDArray[np.uint8]
    zeros: bool = False
    raw: NDArray[np.uint16] | None = None
    skip: int = 0

    def __len__(self) -> int:
        return int(self.codes.shape[0])

    @property
    def n_vocab(self) -> int:
        return int(self.codes.shape[1])

    @property
    def logp(self) -> NDArray[np.float32]:
        """float32[r, n_vocab], nats, decoded anew at every call."""
        with np.errstate(all="ignore"):
            out = np.multiply(self.codes, self.scale[:, None], dtype=np.float32)
            out += self.base[:, None]
        if self.zeros:
            out[self.codes == 0] = -np.inf
        return out

    def pick(self, i: int, ids: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """log p of some ids of row `i`, float32, nats."""
        codes = self.codes[i].take(ids)
        out: NDArray[np.float32] = self.scale[i] * codes + self.base[i]
        if self.zeros:
            out[codes == 0] = -np.inf
        return out

    def at(self, codes: NDArray[np.uint16]) -> NDArray[np.float32]:
        """log p of one code a row, float32[r], nats."""
        with np.errstate(all="ignore"):
            out: NDArray[np.float32] = self.scale * codes + self.base
        if self.zeros:
            out[codes == 0] = -np.inf
        return out

    def least(self, cut: float) -> NDArray[np.int64]:
        """The lowest code of each row whose log p is above `cut` nats, int64[r].

        0 where all are; 65536 where none is.
        """
        return np.maximum(least_codes(self.scale, self.base, cut), int(self.zeros))

    def above(self, i: int, cut: float) -> NDArray[np.intp]:
        """The ids of row `i` whose log p is above `cut` nats, ascending."""
        least = int(self.part(slice(i, i + 1)).least(cut)[0])
        if least > 65535:
            return np.empty(0, np.intp)
        return np.flatnonzero(self.codes[i] >= np.uint16(least))

    def run(self) -> Codes:
        """The codes in one run of memory."""
        if self.raw is not None:
            return Codes(self.raw, self.skip, self.n_vocab)
        return Codes(np.ascontiguousarray(self.codes), 0, self.n_vocab)

    def part(self, cut: slice) -> FullRows:
        """Some of the rows, sharing their memory."""
        return FullRows(
            self.codes[cut],
            self.scale[cut],
            self.base[cut],
            self.floor[cut],
            self.invalid[cut],
            self.zeros,
            None if self.raw is None else self.raw[cut],
            self.skip,
        )

    def row(self, i: int) -> FullRow:
        alone = self.part(slice(i, i + 1))
        return FullRow(alone.logp[0], float(self.floor[i]), Invalid(int(self.invalid[i])))


@dataclass(frozen=True, slots=True)
class Kept:
    """What the writer of a top-N recording kept of the whole rows that it had.

    kld: float32[r], the KLD to its reference, nats; NaN where it had none.
    floored, more: float32[r], what the floor may have kept from that KLD, as in PAIR_DTYPE.
    ref_id, ref_logp: int32[r], float32[r], the best of that reference, by which another is told.
    whole: for each row the whole of it (one row), or None.
    """

    kld: NDArray[np.float32]
    floored: NDArray[np.float32]
    more: NDArray[np.float32]
    ref_id: NDArray[np.int32]
    ref_logp: NDArray[np.float32]
    whole: tuple[FullRows | None, ...]

    def part(self, cut: slice) -> Kept:
        """Some of the rows, sharing their memory."""
        return Kept(
            self.kld[cut],
            self.floored[cut],
            self.more[cut],
            self.ref_id[cut],
            self.ref_logp[cut],
            self.whole[cut],
        )


@dataclass(frozen=True, slots=True)
class TopRows:
    """Rows of which the best `k` entries are known, and a few more.

    ids: int32[r, k], best first, ties by lowest id; -1 pads rows with fewer entries (at the end).
    logp: float32[r, k], nats, NaN where padded.
    stream_logp: float32[r]; log p of the stream token, NaN where not recorded.
    invalid: uint8[r], an `Invalid` each.
    extra: for each row, log p of further ids that were recorded apart (such as the ref token).
    floor: float32[r]; an entry `<= floor` is known to be at most `floor`; None: all are values.
    kept: None where the writer had no whole rows.
    """

    ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    stream_ids: NDArray[np.int32]
    stream_logp: NDArray[np.float32]
    invalid: NDArray[np.uint8]
    extra: tuple[dict[int, float], ...] = ()
    floor: NDArray[np.float32] | None = None
    kept: Kept | None = None

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def part(self, cut: slice) -> TopRows:
        """Some of the rows, sharing their memory."""
        return TopRows(
            self.ids[cut],
            self.logp[cut],
            self.stream_ids[cut],
            self.stream_logp[cut],
            self.invalid[cut],
            self.extra[cut],
            None if self.floor is None else self.floor[cut],
            None if self.kept is None else self.kept.part(cut),
        )

    def row(self, i: int) -> TopRow:
        known = {int(t): float(v) for t, v in zip(self.ids[i], self.logp[i], strict=True) if t >= 0}
        apart = dict(self.extra[i]) if self.extra else {}
        if self.stream_ids[i] >= 0 and not np.isnan(self.stream_logp[i]):
            apart[int(self.stream_ids[i])] = float(self.stream_logp[i])
        at_most = -np.inf if self.floor is None else float(self.floor[i])
        return TopRow(known, apart, Invalid(int(self.invalid[i])), at_most)


def _nth_largest(values: NDArray[np.float32], n: int) -> float:
    """The n-th largest of many values, without ordering them all."""
    deep = values.size // _COLUMNS
    if n < _COLUMNS and deep > 2 * n:
        # n columns have a maximum of at least `least`: it is no larger than the n-th largest.
        most = values[: deep * _COLUMNS].reshape(deep, _COLUMNS).max(axis=0)
        least = np.partition(most, -n)[-n]
        values = values[values >= least]
    return float(np.partition(values, -n)[-n])


@dataclass(frozen=True, slots=True)
class FullRow:
    """One distribution over the whole vocabulary; logp float32[n_vocab], nats."""

    logp_all: NDArray[np.float32]
    floor: float
    invalid: Invalid

    def top(self, n: int) -> list[tuple[int, float]]:
        """The `n` best (id, log p), best first, ties by lowest id. Empty for an invalid row."""
        if self.invalid:
            return []
        n = min(n, self.logp_all.shape[0])
        if n <= 0:
            return []
        kth = _nth_largest(self.logp_all, n)
        best = np.flatnonzero(self.logp_all > kth)
        ties = np.flatnonzero(self.logp_all == kth)[: n - best.size]
        ids = np.concatenate([best, ties])
        ids = ids[np.lexsort((ids, -self.logp_all[ids]))]
        return [(int(t), float(self.logp_all[t])) for t in ids]

    def logp(self, token: int) -> Logp | None:
        """log p of a token; None for an invalid row, and for what is no id of the vocabulary."""
        if not self._has(token):
            return None
        value = float(self.logp_all[token])
        return Logp(value, value <= self.floor and np.isfinite(self.floor).item())

    def rank(self, token: int) -> int | None:
        """1 for the best; tokens that tie share the better rank. None as for `logp`."""
        if not self._has(token):
            return None
        return 1 + int(np.count_nonzero(self.logp_all > self.logp_all[token]))

    def _has(self, token: int) -> bool:
        return not self.invalid and 0 <= token < self.logp_all.size


@dataclass(frozen=True, slots=True)
class TopRow:
    """One distribution of which only the best entries (and some apart) are known; nats.

    at_most: entries up to this value are bounds.
    """

    known: dict[int, float]
    apart: dict[int, float]
    invalid: Invalid
    at_most: float = -np.inf

    def top(self, n: int) -> list[tuple[int, float]]:
        """The `n` best (id, log p), best first, ties by lowest id."""
        return sorted(self.known.items(), key=lambda item: (-item[1], item[0]))[:n]

    def logp(self, token: int) -> Logp | None:
        """log p of a token, or the bound that the last known entry sets; None if invalid."""
        if self.invalid:
            return None
        value = self.known.get(token, self.apart.get(token))
        if value is not None:
            return Logp(value, -np.inf < value <= self.at_most)
        return Logp(min(self.known.values()), True) if self.known else None

    def rank(self, token: int) -> int | None:
        """1 for the best; None where it lies outside the known entries."""
        if self.invalid or token not in self.known:
            return None
        return 1 + sum(v > self.known[token] for v in self.known.values())


Row = FullRow | TopRow
Rows = FullRows | TopRows
