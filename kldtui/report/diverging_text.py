"""Divergence as lines of text.

Knows: how its figures are laid out, and what each is called on a rollout and on other text.
Must not know: how any number was reckoned.
"""

from __future__ import annotations

import math

from kldtui.divergence import WITHIN, Bin
from kldtui.proportions import Interval
from kldtui.report.diverging import Divergence


def format_divergence(found: Divergence) -> list[str]:
    """FDT and SDT on a rollout, flips under their own name elsewhere; then by confidence."""
    lines = [*_runs(found), ""]
    kld = "mean KLD, at least" if found.kld_is_bound else "mean KLD"
    for name, unit, bins in (
        ("p(top-1)", "", found.by_p),
        ("margin", " nat", found.by_margin),
    ):
        head = f"by the reference's {name}"
        lines.append(f"{head:<28} positions   flips       rate   {kld}")
        lines += [_bin(one, unit) for one in bins]
        lines.append("")
    return lines[:-1]


def _runs(found: Divergence) -> list[str]:
    curve = found.first
    if found.rollout:
        head = "====== Rollouts: the text is the reference's own ======"
        first, share = "FDT", "SDT"
    else:
        head = "====== Top-1 flips ======"
        first, share = "First flip", "Flips"
    lines = [head]
    if not found.rollout:
        lines.append("Text      : not the reference's own rollout, so there is no FDT and no SDT")
    plural = f"{found.unit}s"
    median = f"median {curve.median:g} tokens agree before the first that does not"
    if math.isnan(curve.median):
        median = f"median unknown, at least {curve.seen:,}" if curve.runs else "no positions"
    lines += [
        f"{first:<10}: {median}; {curve.diverged:,} of {curve.runs:,} {plural} have one",
        f"{share:<10}: {_percent(found.flips)} of positions",
    ]
    for n in WITHIN:
        if n <= curve.seen:
            lines.append(f"Without   : {_percent(curve.at(n))} of {plural} within {n:,} tokens")
    return lines


def _percent(value: Interval) -> str:
    if math.isnan(value.value):
        return "unknown"
    known = not math.isnan(value.low)
    between = f" (95 %: {100 * value.low:.2f} to {100 * value.high:.2f})" if known else ""
    return f"{100 * value.value:.2f} %{between}"


def _bin(one: Bin, unit: str) -> str:
    name = f"from {one.low:g}" if math.isinf(one.high) else f"{one.low:g} to {one.high:g}"
    rate = f"{100 * one.flips.value:8.2f} %" if one.flips.whole else f"{'–':>10}"
    kld = f"{one.mean_kld:10.6f}" if not math.isnan(one.mean_kld) else f"{'–':>10}"
    return f"  {name + unit:<26} {one.flips.whole:9,} {one.flips.part:7,} {rate} {kld}"
