"""One prediction, seen by both models: the aligned top-N table.

Knows: rows (distributions), and how two of them line up by token.
Must not know: files, tokens' text, or how the table is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kldtui.rows import Logp, Row


@dataclass(frozen=True, slots=True)
class DetailRow:
    """One token in both distributions; None where a model's row says nothing of it."""

    token: int
    ref: Logp | None
    quant: Logp | None


@dataclass(frozen=True, slots=True)
class Detail:
    """The `n` best tokens of both rows, best of the reference first, then what only the quant has.

    `stream` is listed too, last, where it lies in neither top. Log-probabilities in nats.
    """

    rows: tuple[DetailRow, ...]
    ref_id: int | None
    quant_id: int | None
    stream_id: int | None
    ref_words: str
    quant_words: str
    ref_floor: float | None
    quant_floor: float | None


def _words(row: Row | None) -> str:
    if row is None:
        return "not recorded"
    return row.invalid.words if row.invalid else ""


def _floor(row: Row | None) -> float | None:
    if row is None or row.invalid:
        return None
    floor = getattr(row, "floor", None)
    if floor is not None:
        return float(floor) if math.isfinite(floor) else None
    top = row.top(1 << 30)
    return top[-1][1] if top else None


def align(ref: Row | None, quant: Row | None, stream_id: int | None, n: int) -> Detail:
    """Line up two rows by token: the union of both top-`n`, ordered as `Detail` says."""
    tops = [row.top(n) if row is not None else [] for row in (ref, quant)]
    order: dict[int, None] = dict.fromkeys(token for top in tops for token, _ in top)
    if stream_id is not None and (ref is not None or quant is not None):
        order.setdefault(stream_id)
    rows = []
    for token in order:
        rows.append(
            DetailRow(
                token,
                ref.logp(token) if ref is not None else None,
                quant.logp(token) if quant is not None else None,
            )
        )
    return Detail(
        tuple(rows),
        tops[0][0][0] if tops[0] else None,
        tops[1][0][0] if tops[1] else None,
        stream_id,
        _words(ref),
        _words(quant),
        _floor(ref),
        _floor(quant),
    )
