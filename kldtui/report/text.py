"""A pair's statistics laid out as llama-perplexity lays them out, with what it does not say.

Knows: the lines of llama.cpp's printout, in their order, and how a floor is set beside them.
Must not know: how any number was computed.
"""

from __future__ import annotations

import math

from kldtui.report.diverging_text import format_divergence
from kldtui.report.stats import PairStats
from kldtui.report.totals import Estimate, Sample, Totals
from kldtui.vocab import safe

NO_FLOOR = (
    "not measured; record the reference's own model once more with another micro-batch "
    "(llama-perplexity … -ub 32) and give that file as --floor"
)
_FLOOR_COLUMN = 62
_FLOOR_WIDTH = 34
_SOURCES = {"floor": "the floor's 99th percentile"}


def format_stats(
    stats: PairStats,
    floor: PairStats | None = None,
    *,
    by_chunk: bool = True,
    width: int | None = None,
) -> str:
    """Lines of text, without an end of line. With `floor`, its numbers stand to the right, or,
    where `width` cells have no room for that, below."""
    if not stats.positions:
        nothing = "Nothing to compare: no position is scored and valid in both recordings."
        return "\n".join([nothing, "", *_counts(stats, floor)])
    lines = []
    if by_chunk and stats.by_chunk:
        lines += [*_chunk_table(stats), ""]
    ours = _totals_lines(stats)
    if floor is None:
        lines += ours
    else:
        laid = _beside if width is None or width >= _FLOOR_COLUMN + _FLOOR_WIDTH else _below
        lines += [laid(*both) for both in zip(ours, _totals_lines(floor), strict=True)]
    lines += ["", *_counts(stats, floor), "", *format_divergence(stats.divergence)]
    return "\n".join(lines)


def _beside(ours: str, theirs: str) -> str:
    value = theirs.partition(":")[2].strip()
    return f"{ours:<{_FLOOR_COLUMN}} floor {value}" if value else ours


def _below(ours: str, theirs: str) -> str:
    name, colon, value = theirs.partition(":")
    return f"{ours}\n{'floor':>{len(name)}}{colon}{value}" if value else ours


def _pm(estimate: Estimate, width: int, digits: int, factor: float = 1.0, error: int = 0) -> str:
    """`value ± error`; a width of its own for the error where llama.cpp has one."""
    value, wide = estimate.value * factor, error or width
    return f"{value:{width}.{digits}f} ± {estimate.error * factor:{wide}.{digits}f}"


def _chunk_table(stats: PairStats) -> list[str]:
    kld = "KLD, at least" if stats.kld_is_bound else "KL Divergence"
    lines = [
        f"chunk             PPL               ln(PPL(Q)/PPL(base))          {kld}"
        "              Δp RMS            Same top p"
    ]
    for number, totals in stats.by_chunk:
        lines.append(
            f"{number:4d}    {_pm(totals.ppl_quant, 9, 4)}    {_pm(totals.ln_ppl_ratio, 10, 5)}"
            f"    {_pm(totals.kld, 10, 5)}    {_pm(totals.rms_dp, 6, 3, 100)} %"
            f"    {_pm(totals.same_top, 6, 3, 100)} %"
        )
    return lines


def _totals_lines(stats: PairStats) -> list[str]:
    """llama-perplexity's summary, line by line."""
    totals = stats.totals
    return [
        "====== Perplexity statistics ======",
        *_perplexity(stats, totals),
        "",
        "====== KL divergence statistics ======",
        *_kld(stats),
        "",
        "====== Token probability statistics ======",
        *_token_probability(stats.dp),
        f"RMS Δp    : {_pm(totals.rms_dp, 6, 3, 100, 5)} %",
        f"Same top p: {_pm(totals.same_top, 6, 3, 100, 5)} %",
    ]


def _perplexity(stats: PairStats, totals: Totals) -> list[str]:
    quant = f"  lower bound, {stats.floored_quant} floored" if stats.floored_quant else ""
    ref = f"  lower bound, {stats.floored_ref} floored" if stats.floored_ref else ""
    ratio = f"  rests on {stats.floored} floored" if stats.floored else ""
    return [
        f"Mean PPL(Q)                   : {_pm(totals.ppl_quant, 10, 6)}{quant}",
        f"Mean PPL(base)                : {_pm(totals.ppl_ref, 10, 6)}{ref}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * totals.ln_ppl_correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {_pm(totals.ln_ppl_ratio, 10, 6)}{ratio}",
        f"Mean PPL(Q)/PPL(base)         : {_pm(totals.ppl_ratio, 10, 6)}{ratio}",
        f"Mean PPL(Q)-PPL(base)         : {_pm(totals.ppl_difference, 10, 6)}{ratio}",
    ]


def _kld(stats: PairStats) -> list[str]:
    kld, bound = stats.kld, "  lower bound" if stats.kld_is_bound else ""
    high = [(99.9, "99.9%"), (99.0, "99.0%"), (95.0, "95.0%"), (90.0, "90.0%")]
    low = [(10.0, "10.0%"), (5.0, " 5.0%"), (1.0, " 1.0%"), (0.1, " 0.1%")]
    return [
        f"Mean    KLD: {_pm(kld.mean, 10, 6)}{bound}",
        f"Maximum KLD: {kld.maximum:10.6f}{bound}",
        *(f"{name}   KLD: {kld.percentiles[p]:10.6f}{bound}" for p, name in high),
        f"Median  KLD: {kld.median:10.6f}{bound}",
        *(f"{name}   KLD: {kld.percentiles[p]:10.6f}{bound}" for p, name in low),
        f"Minimum KLD: {kld.minimum:10.6f}{bound}",
    ]


def _token_probability(dp: Sample) -> list[str]:
    high = [(99.9, "99.9%"), (99.0, "99.0%"), (95.0, "95.0%"), (90.0, "90.0%"), (75.0, "75.0%")]
    low = [(25.0, "25.0%"), (10.0, "10.0%"), (5.0, " 5.0%"), (1.0, " 1.0%"), (0.1, " 0.1%")]
    return [
        f"Mean    Δp: {_pm(dp.mean, 6, 3, 100, 5)} %",
        f"Maximum Δp: {100 * dp.maximum:6.3f}%",
        *(f"{name}   Δp: {100 * dp.percentiles[p]:6.3f}%" for p, name in high),
        f"Median  Δp: {100 * dp.median:6.3f}%",
        *(f"{name}   Δp: {100 * dp.percentiles[p]:6.3f}%" for p, name in low),
        f"Minimum Δp: {100 * dp.minimum:6.3f}%",
    ]


def _counts(stats: PairStats, floor: PairStats | None) -> list[str]:
    """What was counted, what was left out, and what the floor is."""
    steps = "  ".join(f"≥ {step:g}: {n}" for step, n in stats.roots_by_cost.items())
    moved = "no roots to measure it by"
    if not math.isnan(stats.moved_kld):
        kld = "KLD's bound" if stats.kld_is_bound else "KLD"
        moved = f"no flip, but {kld} ≥ {stats.moved_kld:.6f}, the roots' median"
    scope = f"{stats.positions_ref:,} of the reference, {stats.chunks} of {stats.chunks_ref} chunks"
    lines = [
        "====== Positions ======",
        f"Compared  : {stats.positions:,} of {scope}",
        f"Roots     : {stats.roots:,}  {_share(stats.roots, stats.positions)} by cost {steps}",
        f"Near ties : {stats.near_ties:,}  of the roots: cost < {stats.near_tie:.3g} nat "
        f"({_SOURCES.get(stats.near_tie_source, stats.near_tie_source)})",
        f"Ties      : {stats.ties:,}  not roots: one of the models cannot rank its best",
        f"Moved     : {stats.moved:,}  {moved}",
        f"Invalid   : {stats.invalid:,}",
        f"Missing   : {stats.missing:,}",
        f"Floored   : {stats.floored:,}  stream tokens at or below the clamp "
        f"(ref {stats.floored_ref}, quant {stats.floored_quant})",
    ]
    if stats.stream_positions != stats.positions:
        lines.append(
            f"Perplexity: over {stats.stream_positions:,} positions, where the stream token's "
            "log p is known"
        )
    if stats.not_summing_ref or stats.not_summing_quant:
        lines.append(
            f"Not sum 1 : ref {stats.not_summing_ref}, quant {stats.not_summing_quant}  rows whose "
            "probabilities do not sum to 1: the file may be damaged there"
        )
    if stats.clamp.mean > 0:
        lines += _clamp(stats)
    if stats.kld_infinite:
        lines.append(f"Infinite  : {stats.kld_infinite:,}  KLDs: the quant has an exact zero there")
    if floor is None:
        lines.append(f"Floor     : {NO_FLOOR}")
    else:
        least = "mean KLD at least " if floor.kld_is_bound else "mean KLD "
        lines.append(
            f"Floor     : {floor.roots:,} roots of {floor.positions:,} positions, "
            f"{least}{floor.kld.mean.value:.6f}: what arithmetic alone does"
        )
    lines += [f"Note      : {safe(note)}" for note in stats.notes]
    if floor is not None:
        lines += [f"Note      : the floor: {safe(note)}" for note in floor.notes]
    if not stats.complete:
        lines.append("Note      : the scan is not complete")
    return lines


def _clamp(stats: PairStats) -> list[str]:
    clamp = stats.clamp
    most = f"{clamp.mean:.6f} ({clamp.total:.4f} in all, {clamp.most:.4f} at one position)"
    return [
        f"KLD clamp : {clamp.positions:,} KLDs count tokens at the quant's clamp; the mean is too "
        "low by at most",
        f"            {most}, if none of them has less",
        f"            than 2^-149. Nothing bounds it else: {clamp.floored:.2g} for each nat below",
    ]


def _share(part: int, whole: int) -> str:
    return f"({100 * part / whole:.2f} %)" if whole else ""
