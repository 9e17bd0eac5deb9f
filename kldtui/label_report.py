"""A label file in figures: how many roots of each quant were given which class.

Knows: label records and the taxonomy.
Must not know: the screen, recordings, engines.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kldtui.errors import LabelFileError
from kldtui.labels import TAXONOMY, LabelRecord, LabelStore
from kldtui.vocab import safe


def summary(records: Sequence[LabelRecord]) -> list[dict[str, Any]]:
    """One object a quant: `quant, labelled, near_ties, classes` (class id -> count), `notes`."""
    out = []
    for quant in sorted({record.quant for record in records}):
        mine = [record for record in records if record.quant == quant]
        labelled = [record for record in mine if record.class_id is not None]
        out.append(
            {
                "quant": quant,
                "labelled": len(labelled),
                "near_ties": sum(bool(record.evidence.get("near_tie")) for record in labelled),
                "classes": {
                    entry.id: sum(record.class_id == entry.id for record in labelled)
                    for entry in TAXONOMY
                },
                "notes": sum(bool(record.note) for record in mine),
            }
        )
    return out


_MARKS = re.compile(r"[\\`*<>\[\]|#~]|(?<!\w)_|_(?!\w)")


def _cell(text: str) -> str:
    """Text in a table of Markdown: none of it is markup."""
    return _MARKS.sub(r"\\\g<0>", safe(text))


def _code(text: str) -> str:
    """A token's text, quoted, as code: between more backticks than it has in a row itself."""
    shown = safe(repr(text)).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence}{shown}{fence}"


def markdown(records: Sequence[LabelRecord], title: str) -> str:
    """The same as a Markdown document, with a row for each label."""
    lines = [f"# Labels of {_cell(title)}", ""]
    for entry in summary(records):
        near = f", {entry['near_ties']} of them near ties" if entry["near_ties"] else ""
        lines += [f"## {_cell(entry['quant'])}: {entry['labelled']} labelled{near}", ""]
        lines += ["| class | roots | share |", "| --- | ---: | ---: |"]
        for label in TAXONOMY:
            count = entry["classes"][label.id]
            share = count / entry["labelled"] if entry["labelled"] else 0.0
            lines.append(f"| {label.name} | {count} | {share:.1%} |")
        lines += ["", "| position | reference → quant | cost | KLD | class | note |"]
        lines += ["| --- | --- | ---: | ---: | --- | --- |"]
        for record in records:
            if record.quant == entry["quant"]:
                lines.append(_row(record))
        lines.append("")
    if len(lines) == 2:
        lines += ["No labels yet.", ""]
    return "\n".join(lines)


def _row(record: LabelRecord) -> str:
    evidence = record.evidence
    ref = _code(str(evidence.get("ref_text", "")))
    quant = _code(str(evidence.get("quant_text", "")))
    figures = [
        f"{'≥ ' if evidence.get(bound) else ''}{value:.3f}"
        if isinstance(value := evidence.get(name), float)
        else "–"
        for name, bound in (("cost", "ref_p_quant_is_bound"), ("kld", "kld_is_lower_bound"))
    ]
    name = record.label_class.name if record.label_class is not None else "–"
    cells = [str(record.position), f"{ref} → {quant}", *figures, name, _cell(record.note)]
    return "| " + " | ".join(cells) + " |"


def write_report(labels: LabelStore) -> Path:
    """Write the Markdown beside the label file. Raises LabelFileError."""
    name = labels.path.name.removesuffix(".json")
    path = labels.path.with_name(f"{name}.md")
    text = markdown(list(labels.records()), labels.path.name)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise LabelFileError(f"{path}: cannot be written: {error.strerror}") from error
    return path
