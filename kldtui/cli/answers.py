"""`kldtui answers`: what a benchmark's answers do when the model is quantized.

Knows: options, and how a comparison becomes lines or JSON on a terminal.
Must not know: sample files, or how any figure is computed.
"""

from __future__ import annotations

from pathlib import Path

import click

from kldtui.answers import Comparison, Report, compare_answers
from kldtui.cli.printing import print_json
from kldtui.cli.values import FILE
from kldtui.proportions import Share
from kldtui.vocab.glyphs import safe


@click.command()
@click.argument("base", type=FILE)
@click.argument("quant", type=FILE)
@click.option("--metric", metavar="NAME", help="Only this metric (acc, acc_norm, exact_match, …).")
@click.option("--list", "listed", is_flag=True, help="Also list the documents that changed.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text (docs/json.md).")
def answers(base: Path, quant: Path, metric: str | None, listed: bool, as_json: bool) -> None:
    """Count the answers that flip between two sample files of lm-evaluation-harness.

    BASE and QUANT are samples_*.jsonl files of one task, or folders of them (lm_eval writes them
    with --log_samples). Flips of answers are another thing than flips of tokens (kldtui stats).
    """
    report = compare_answers(base, quant, metric)
    if as_json:
        print_json(report.to_json(with_changes=listed))
        return
    for line in _lines(report, base, quant, listed):
        click.echo(safe(line))


def _lines(report: Report, base: Path, quant: Path, listed: bool) -> list[str]:
    lines = [f"Answers of {quant} (quant) against {base} (base)"]
    both = [*report.comparisons, *([report.total] if report.total else [])]
    for one in both:
        lines += ["", *_comparison(one)]
        if listed:
            lines += [
                f"  doc {change.doc_id}: {change.kind.replace('_', ' ')}"
                f"  {_shown(change.base)} → {_shown(change.quant)}"
                for change in one.changes
            ]
    if report.notes:
        lines += ["", *(f"Note: {note}" for note in report.notes)]
    return lines


def _comparison(one: Comparison) -> list[str]:
    flips = one.all_flips
    known = "" if flips.whole == one.documents else f" of {flips.whole:,} with known answers"
    return [
        f"{one.task}  ({one.metric}, filter {one.filter}): {one.documents:,} documents",
        f"  accuracy, base         {_percent(one.base_accuracy)}",
        f"  accuracy, quant        {_percent(one.quant_accuracy)}",
        f"  difference             {100 * one.difference:+7.2f} %   "
        f"(95 %: {100 * one.difference_low:+.2f} to {100 * one.difference_high:+.2f})   "
        f"McNemar p = {one.p_value:.3g}",
        f"  correct → incorrect    {one.correct_to_incorrect:7,}",
        f"  incorrect → correct    {one.incorrect_to_correct:7,}",
        f"  flips                  {_percent(one.flips)}",
        f"  incorrect → incorrect  {one.incorrect_to_incorrect:7,}   another wrong answer",
        f"  all flips              {_percent(flips)}{known}",
    ]


def _percent(value: Share) -> str:
    if not value.whole:
        return "unknown"
    return (
        f"{100 * value.value:7.2f} %   (95 %: {100 * value.low:.2f} to {100 * value.high:.2f})"
        f"   {value.part:,} of {value.whole:,}"
    )


def _shown(answer: str | None) -> str:
    if answer is None:
        return "?"
    return repr(answer if len(answer) <= 60 else answer[:59] + "…")
