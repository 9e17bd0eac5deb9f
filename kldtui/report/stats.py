"""The statistics of a pair, as llama-perplexity computes them, and counts of what it leaves out.

Knows: the columns of an index, and which of them go into which figure.
Must not know: how numbers are laid out, recordings, label files.

Columns are read a piece at a time, some more than once: of a long stream little is in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.index import Bound, Index, Kind, State, Table
from kldtui.report.diverging import Divergence, Runs, divergence_of
from kldtui.report.totals import Sample, Sums, Totals
from kldtui.roots import (
    Thresholds,
    costs_at,
    moved_threshold,
    near_ties,
    parts,
    pieces,
    roots_of,
)

COST_STEPS = (0.0, 0.1, 0.3, 1.0)
"""Roots are counted at a cost of at least each of these (nats)."""
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DP_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Clamp:
    """What the quant's floor may have kept from its KLDs, nats; NaN where they are bounds anyway.

    positions: where there is anything. floored: mean of `kld_floored`: what each nat adds to the
    mean KLD by which floored tokens truly lie below the floor. mean, most, total: of `kld_more`.
    """

    positions: int
    floored: float
    mean: float
    most: float
    total: float


@dataclass(frozen=True, slots=True)
class PairStats:
    """Everything `kldtui stats` says of one quant.

    `positions` are those scored in both recordings; all totals are over them alone, perplexities
    and Δp over those of them whose stream token's log p is known (`stream_positions`). Nats, and
    fractions of 1.
    """

    positions: int
    positions_ref: int
    chunks: int
    chunks_ref: int
    complete: bool
    invalid: int
    missing: int
    roots: int
    roots_by_cost: dict[float, int]
    near_ties: int
    near_tie: float
    near_tie_source: str
    ties: int
    moved: int
    moved_kld: float
    floored: int
    floored_ref: int
    floored_quant: int
    not_summing_ref: int
    not_summing_quant: int
    stream_positions: int
    kld: Sample
    kld_is_bound: bool
    kld_infinite: int
    clamp: Clamp
    divergence: Divergence
    dp: Sample
    totals: Totals
    by_chunk: Sequence[tuple[int, Totals]]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable names (docs/json.md); None where a value is unknown or not a finite number."""
        totals = self.totals
        out: dict[str, Any] = {
            "positions": self.positions,
            "positions_ref": self.positions_ref,
            "chunks": self.chunks,
            "chunks_ref": self.chunks_ref,
            "complete": self.complete,
            "invalid": self.invalid,
            "missing": self.missing,
            "roots": self.roots,
            "roots_by_cost": {f"{step:g}": n for step, n in self.roots_by_cost.items()},
            "near_ties": self.near_ties,
            "near_tie": self.near_tie,
            "near_tie_source": self.near_tie_source,
            "ties": self.ties,
            "moved": self.moved,
            "moved_kld": self.moved_kld,
            "floored": self.floored,
            "floored_ref": self.floored_ref,
            "floored_quant": self.floored_quant,
            "not_summing_ref": self.not_summing_ref,
            "not_summing_quant": self.not_summing_quant,
            "stream_positions": self.stream_positions,
            **self._kld_json(),
            "same_top": totals.same_top.value,
            "same_top_error": totals.same_top.error,
            "ppl_ref": totals.ppl_ref.value,
            "ppl_ref_error": totals.ppl_ref.error,
            "ppl_ref_is_bound": bool(self.floored_ref),
            "ppl_quant": totals.ppl_quant.value,
            "ppl_quant_error": totals.ppl_quant.error,
            "ppl_quant_is_bound": bool(self.floored_quant),
            "ln_ppl_ratio": totals.ln_ppl_ratio.value,
            "ln_ppl_ratio_error": totals.ln_ppl_ratio.error,
            "ppl_ratio": totals.ppl_ratio.value,
            "ppl_ratio_error": totals.ppl_ratio.error,
            "ppl_difference": totals.ppl_difference.value,
            "ppl_difference_error": totals.ppl_difference.error,
            "ln_ppl_correlation": totals.ln_ppl_correlation,
            "mean_dp": self.dp.mean.value,
            "mean_dp_error": self.dp.mean.error,
            "median_dp": self.dp.median,
            "max_dp": self.dp.maximum,
            "min_dp": self.dp.minimum,
            "dp_percentiles": {f"{p:g}": v for p, v in self.dp.percentiles.items()},
            "rms_dp": totals.rms_dp.value,
            "rms_dp_error": totals.rms_dp.error,
            "notes": list(self.notes),
            "kld_floored_positions": self.clamp.positions,
            "mean_kld_floored": self.clamp.floored,
            "mean_kld_more": self.clamp.mean,
            "max_kld_more": self.clamp.most,
            "total_kld_more": self.clamp.total,
            **self.divergence.to_json(),
        }
        return {name: finite(value) for name, value in out.items()}

    def _kld_json(self) -> dict[str, Any]:
        """The exact names and their `_lower_bound` twins; one of each two is None."""
        known: dict[str, Any] = {
            "mean_kld": self.kld.mean.value,
            "mean_kld_error": self.kld.mean.error,
            "median_kld": self.kld.median,
            "max_kld": self.kld.maximum,
            "min_kld": self.kld.minimum,
            "kld_percentiles": {f"{p:g}": v for p, v in self.kld.percentiles.items()},
        }
        out: dict[str, Any] = {}
        for name, value in known.items():
            stem, error, _ = name.partition("_error")
            out[name] = None if self.kld_is_bound else value
            out[f"{stem}_lower_bound{error}"] = value if self.kld_is_bound else None
        return out | {"kld_infinite": self.kld_infinite}


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return value


def pair_stats(
    index: Index,
    quant: int,
    thresholds: Thresholds | None = None,
    runs: Runs | None = None,
    told: Callable[[float], None] = lambda share: None,
) -> PairStats:
    """Statistics of one quant over what has been scanned; invalid rows reach no total.

    runs: the stretches that first flips are counted in, by default the chunks.
    told: is told between steps what share of the work is done; what it raises ends it.

    A KLD that is infinite (an exact zero in a `_logits2` file) makes the mean infinite, as it is.
    """
    thresholds = thresholds or Thresholds()
    moved_kld = moved_threshold(index, quant)
    roots = roots_of(index, quant)
    costs = costs_at(index, quant, roots)
    near = sum(
        np.count_nonzero(near_ties(index, quant, thresholds, roots[part]))
        for part in parts(index, roots)
    )
    told(0.02)
    ends = [index.layout.chunk_slice(chunk).stop for chunk in range(index.layout.n_chunk)]
    sums, counts, clamp = Sums(np.array(ends, np.int64)), _Counts(), _ClampSums()
    for where in pieces(index):
        piece = _Piece(index, quant, where)
        counts.add(piece, moved_kld)
        clamp.add(piece)
        with np.errstate(invalid="ignore"):
            sums.add(piece.log_ref, piece.log_quant, piece.kld, piece.same, piece.scored * 1.0)
    found, by_chunk = counts.found, sums.by_chunk()
    told(0.25)
    kld = Sample.of(lambda: _klds(index, quant), KLD_PERCENTILES)
    told(0.3)
    dp = Sample.of(lambda: _dps(index, quant), DP_PERCENTILES)
    told(0.4)
    divergence = divergence_of(index, quant, runs, lambda share: told(0.4 + 0.6 * share))
    return PairStats(
        positions=found["scored"],
        positions_ref=index.layout.n,
        chunks=len(by_chunk),
        chunks_ref=index.layout.n_chunk,
        complete=not found["unfinished"],
        invalid=found["invalid"],
        missing=found["missing"],
        roots=costs.size,
        roots_by_cost={step: int((costs >= step).sum()) for step in COST_STEPS},
        near_ties=int(near),
        near_tie=thresholds.near_tie,
        near_tie_source=thresholds.near_tie_source,
        ties=found["ties"],
        moved=found["moved"],
        moved_kld=moved_kld,
        floored=found["floored"],
        floored_ref=found["floored_ref"],
        floored_quant=found["floored_quant"],
        not_summing_ref=found["not_summing_ref"],
        not_summing_quant=found["not_summing_quant"],
        stream_positions=found["known"],
        kld=kld,
        kld_is_bound=bool(found["bounds"]),
        kld_infinite=found["infinite"],
        clamp=clamp.clamp(),
        divergence=divergence,
        dp=dp,
        totals=sums.totals(),
        by_chunk=by_chunk,
        notes=tuple(index.notes[quant]),
    )


class _Piece:
    """Columns of a stretch of positions, as the sums take them."""

    def __init__(self, index: Index, quant: int, where: slice) -> None:
        ref, pair = index.ref, index.pairs[quant]
        self.ref, self.pair, self.where = ref, pair, where
        self.state = pair["state"][where]
        self.scored = self.state == State.SCORED
        log_ref, log_quant = ref["ref_stream"][where], pair["quant_stream"][where]
        self.known = self.scored & ~np.isnan(log_ref) & ~np.isnan(log_quant)
        self.log_ref, self.log_quant = log_ref.astype(np.float64), log_quant.astype(np.float64)
        self.log_ref[~self.known] = self.log_quant[~self.known] = np.nan
        self.kld = pair["kld"][where].astype(np.float64)
        self.same = (ref["ref_id"][where] == pair["quant_id"][where]).astype(np.float64)

    def has(self, table: Table, flag: Bound) -> NDArray[np.bool_]:
        return np.asarray((table["bounds"][self.where] & np.uint8(flag)) != 0)


class _Counts:
    """How many positions are what."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def add(self, piece: _Piece, moved_kld: float) -> None:
        state, scored, known, kind = piece.state, piece.scored, piece.known, piece.pair["kind"]
        kind = kind[piece.where]
        floored_ref = known & piece.has(piece.ref, Bound.REF_STREAM)
        floored_quant = known & piece.has(piece.pair, Bound.QUANT_STREAM)
        for name, here in (
            ("scored", scored),
            ("unfinished", (state == State.PENDING) | (piece.pair["rest"][piece.where] == 0)),
            ("invalid", state == State.INVALID),
            ("missing", state == State.MISSING),
            ("known", known),
            ("ties", scored & (kind == Kind.TIE)),
            ("moved", scored & (kind != Kind.ROOT) & (piece.kld >= moved_kld)),
            ("floored", floored_ref | floored_quant),
            ("floored_ref", floored_ref),
            ("floored_quant", floored_quant),
            ("not_summing_ref", scored & piece.has(piece.ref, Bound.MASS)),
            ("not_summing_quant", scored & piece.has(piece.pair, Bound.MASS)),
            ("bounds", scored & piece.has(piece.pair, Bound.KLD)),
            ("infinite", scored & np.isinf(piece.kld)),
        ):
            self.found[name] += int(np.count_nonzero(here))


class _ClampSums:
    """What a `Clamp` is made of."""

    def __init__(self) -> None:
        self._scored = self._known = self._positions = 0
        self._floored = self._more = 0.0
        self._most = -math.inf

    def add(self, piece: _Piece) -> None:
        floored = piece.pair["kld_floored"][piece.where][piece.scored].astype(np.float64)
        more = piece.pair["kld_more"][piece.where][piece.scored].astype(np.float64)
        self._scored += floored.size
        self._known += int(np.count_nonzero(~np.isnan(floored)))
        self._positions += int(np.count_nonzero(floored > 0))
        self._floored += float(floored.sum())
        self._more += float(more.sum())
        self._most = max(self._most, float(more.max(initial=-math.inf)))

    def clamp(self) -> Clamp:
        n = self._known
        if not n or n < self._scored:
            return Clamp(self._positions, *([math.nan] * 4))
        return Clamp(self._positions, self._floored / n, self._more / n, self._most, self._more)


def _klds(index: Index, quant: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.intp]]]:
    pair = index.pairs[quant]
    for where in pieces(index):
        kld = pair["kld"][where][pair["state"][where] == State.SCORED]
        kld = kld[~np.isnan(kld)]
        yield kld, np.zeros(kld.size, np.intp)


def _dps(index: Index, quant: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.intp]]]:
    for where in pieces(index):
        piece = _Piece(index, quant, where)
        dp = np.exp(piece.log_quant[piece.known]) - np.exp(piece.log_ref[piece.known])
        yield dp.astype(np.float32), np.zeros(dp.size, np.intp)
