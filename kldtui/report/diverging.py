"""Where a quant parts from the reference along its text, and how sure the reference was there.

Knows: the columns of an index, which stretches of positions belong together, and which figures are
defined on what: FDT and SDT on the reference's own greedy rollout alone, top-1 flips on any text.
Must not know: how the figures are reckoned, how numbers are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kldtui.divergence import (
    MARGIN_EDGES,
    P_EDGES,
    WITHIN,
    Bin,
    Judged,
    Stretch,
    Survival,
    by_bins,
    divergent_share,
    first_divergences,
    survival,
)
from kldtui.facts import is_rollout
from kldtui.index import Bound, Index, State
from kldtui.proportions import Interval
from kldtui.recordings import Recording
from kldtui.roots import blocks, is_root, pieces


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of flat indices that are one run each; `unit` is what one is called."""

    unit: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """What the flips of one quant say of its runs. KLD in nats, shares as fractions of 1.

    rollout: whether the stream is the reference's own greedy rollout; None while unknown. If it is,
    `first` is the FDT and `flips` the SDT; else they are the first flip and the top-1 flips.
    """

    rollout: bool | None
    unit: str
    first: Survival
    flips: Interval
    by_p: tuple[Bin, ...]
    by_margin: tuple[Bin, ...]
    kld_is_bound: bool

    def to_json(self) -> dict[str, Any]:
        """Stable names (docs/json.md)."""
        first, flips = self._first_json(), _interval(self.flips)
        own = bool(self.rollout)
        return {
            "rollout": self.rollout,
            "fdt": first if own else None,
            "sdt": flips if own else None,
            "first_flip": None if own else first,
            "top1_flips": None if own else flips,
            "by_p_top1": [self._bin_json(one) for one in self.by_p],
            "by_margin": [self._bin_json(one) for one in self.by_margin],
        }

    def _first_json(self) -> dict[str, Any]:
        curve = self.first
        known = not math.isnan(curve.median)
        return {
            "unit": self.unit,
            "runs": curve.runs,
            "diverged": curve.diverged,
            "seen": curve.seen,
            "median": curve.median if known else None,
            "median_at_least": None if known or not curve.runs else curve.seen,
            "none_within": {str(n): _interval(curve.at(n)) for n in WITHIN if n <= curve.seen},
            "survival": [
                {
                    "tokens": int(tokens),
                    "at_risk": int(at_risk),
                    "diverged": int(events),
                    "share": float(value),
                    "low": float(low),
                    "high": float(high),
                }
                for tokens, at_risk, events, value, low, high in zip(
                    curve.tokens,
                    curve.at_risk,
                    curve.events,
                    curve.value,
                    curve.low,
                    curve.high,
                    strict=True,
                )
            ],
        }

    def _bin_json(self, one: Bin) -> dict[str, Any]:
        suffix = "_lower_bound" if self.kld_is_bound else ""
        other = "" if self.kld_is_bound else "_lower_bound"
        return {
            "low": one.low,
            "high": one.high if math.isfinite(one.high) else None,
            "positions": one.flips.whole,
            "flips": one.flips.part,
            "flip_rate": _known(one.flips.value),
            "flip_rate_low": _known(one.flips.low),
            "flip_rate_high": _known(one.flips.high),
            f"mean_kld{suffix}": _known(one.mean_kld),
            f"median_kld{suffix}": _known(one.median_kld),
            f"mean_kld{other}": None,
            f"median_kld{other}": None,
        }


def _interval(value: Interval) -> dict[str, float | None]:
    return {"share": _known(value.value), "low": _known(value.low), "high": _known(value.high)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def runs_of(index: Index, ref: Recording | None = None) -> Runs:
    """The runs of a reference: its turns where the recording says them, else its chunks."""
    layout = index.layout
    slices = [layout.chunk_slice(chunk) for chunk in range(layout.n_chunk)]
    turns = [_turns(ref, chunk) for chunk in range(layout.n_chunk)]
    if not any(turns):
        return Runs("chunk", tuple((where.start, where.stop) for where in slices))
    out: list[Stretch] = []
    for where, spans in zip(slices, turns, strict=True):
        ts = layout.t(where)
        for start, stop in spans:
            first, last = np.searchsorted(ts, [start, stop])
            out.append((where.start + int(first), where.start + int(last)))
    return Runs("turn", tuple(out))


def _turns(ref: Recording | None, chunk: int) -> list[Stretch]:
    """`turns` of a run's chunk line (docs/run-format.md)."""
    listed = None if ref is None else ref.chunk_fields(chunk).get("turns")
    if not isinstance(listed, list):
        return []
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2]
    return [(int(a), int(b)) for a, b in pairs if type(a) is int and type(b) is int and a < b]


def divergence_of(
    index: Index,
    quant: int,
    runs: Runs | None = None,
    told: Callable[[float], None] = lambda share: None,
) -> Divergence:
    """The divergence of one quant, over what has been scanned.

    runs: by default the chunks. told: as `pair_stats` has it.
    """
    runs = runs or runs_of(index)
    rollout = is_rollout(index)
    unit = "rollout" if rollout and runs.unit == "chunk" else runs.unit
    first, flips, is_bound = _along(index, quant, runs)
    told(0.3)
    by_p = by_bins(lambda: _judged(index, quant, "ref_p_ref"), P_EDGES)
    told(0.7)
    by_margin = by_bins(lambda: _judged(index, quant, "margin"), MARGIN_EDGES)
    told(1.0)
    return Divergence(
        rollout=rollout,
        unit=unit,
        first=first,
        flips=flips,
        by_p=by_p,
        by_margin=by_margin,
        kld_is_bound=is_bound,
    )


def _along(index: Index, quant: int, runs: Runs) -> tuple[Survival, Interval, bool]:
    """First divergences, the share of flips, and whether any KLD is a bound."""
    pair, n = index.pairs[quant], index.layout.n
    known, flips, is_bound = np.zeros(n, bool), np.zeros(n, bool), False
    for where in blocks(index):
        known[where] = pair["state"][where] == State.SCORED
        flips[where] = is_root(index, quant, where)
        bounds = pair["bounds"][where][known[where]]
        is_bound |= bool((bounds & np.uint8(Bound.KLD)).any())
    first = survival(first_divergences(flips, known, runs.stretches))
    return first, divergent_share(flips, known, runs.stretches), is_bound


def _judged(index: Index, quant: int, name: str) -> Iterator[Judged]:
    """A column of the reference, flips and KLD, of what can be judged, piece by piece."""
    pair, column = index.pairs[quant], index.ref[name]
    for where in pieces(index):
        here = pair["state"][where] == State.SCORED
        kld, values = pair["kld"][where][here], column[where][here]
        if name == "ref_p_ref":
            # A row's probabilities may add up to a little more than 1.
            values = np.minimum(np.exp(values.astype(np.float64)), 1.0)
        kld = np.where(np.isfinite(kld), kld, np.float32(np.nan))
        yield values, is_root(index, quant, where)[here], kld
