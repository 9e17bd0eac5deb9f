"""The list that `kldtui flips` prints: one row a position and quant.

Knows: the columns of an index, how a list is asked for, and the text of tokens.
Must not know: recordings, files, screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kldtui.facts import facts_at
from kldtui.index import Bound, Index, Kind, State
from kldtui.report.stats import finite
from kldtui.roots import RootQuery, Sort, Thresholds, select, stands_at
from kldtui.vocab import Vocabulary, safe

_FROM_FACTS = (
    *("stream_id", "ref_id", "quant_id", "kld", "kld_floored", "kld_more", "margin", "cost"),
    *("ref_p_ref", "ref_p_quant", "quant_p_ref", "quant_p_quant", "ref_stream", "quant_stream"),
    *("ref_rank_quant", "quant_rank_ref", "stream_rank", "bounds"),
)
_KINDS = {Kind.AGREE: "agree", Kind.ROOT: "root", Kind.TIE: "tie"}


@dataclass(frozen=True, slots=True)
class FlipRow:
    """One position and quant. log p, KLD, margin and cost in nats, NaN where unknown; rank 0
    where unknown; `*_text` None where no vocabulary has text for the id. floor_flips: whether the
    null recording flips there too; None where there is none, or it is not scored there."""

    quant: str
    chunk: int
    t: int
    kind: str
    stream_id: int
    ref_id: int
    quant_id: int
    stream_text: str | None
    ref_text: str | None
    quant_text: str | None
    kld: float
    kld_floored: float
    kld_more: float
    margin: float
    cost: float
    ref_p_ref: float
    ref_p_quant: float
    quant_p_ref: float
    quant_p_quant: float
    ref_stream: float
    quant_stream: float
    ref_rank_quant: int
    quant_rank_ref: int
    stream_rank: int
    near_tie: bool
    floor_flips: bool | None
    bounds: Bound

    def to_json(self) -> dict[str, Any]:
        """Stable names (docs/json.md); None where a value is unknown."""
        out = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("bounds", "kld")
        }
        partial = bool(self.bounds & Bound.KLD)
        out |= {
            "kld": None if partial else self.kld,
            "kld_lower_bound": self.kld if partial else None,
            "ref_p_quant_is_bound": bool(self.bounds & Bound.REF_P_QUANT),
            "quant_p_ref_is_bound": bool(self.bounds & Bound.QUANT_P_REF),
            "ref_stream_is_bound": bool(self.bounds & Bound.REF_STREAM),
            "quant_stream_is_bound": bool(self.bounds & Bound.QUANT_STREAM),
        }
        for rank in ("ref_rank_quant", "quant_rank_ref", "stream_rank"):
            out[rank] = out[rank] or None
        return {name: finite(value) for name, value in out.items()}


def flip_rows(
    index: Index,
    names: Sequence[str],
    stream_ids: Any,
    query: RootQuery,
    thresholds: Thresholds,
    vocab: Vocabulary,
    floor: int | None = None,
) -> list[FlipRow]:
    """The rows of the quants `names` (the index's first ones), in the query's order.

    floor: the number of the null recording, if there is one.
    stream_ids: a callable from Position to the stream token's id. Sorted row by row; with equal
    values, or by position, in the order of positions and then of the quants.
    """
    keyed = []
    for quant in range(len(names)):
        for i in select(index, replace(query, quants=(quant,), sort="position")):
            row = _row(index, int(i), quant, names[quant], stream_ids, thresholds, vocab, floor)
            keyed.append(((_descending(row, query.sort), int(i), quant), row))
    return [row for _, row in sorted(keyed, key=lambda pair: pair[0])]


def _descending(row: FlipRow, sort: Sort) -> float:
    if sort == "position":
        return 0.0
    value: float = getattr(row, sort)
    return math.inf if math.isnan(value) else -value


def _row(
    index: Index,
    i: int,
    quant: int,
    name: str,
    stream_ids: Any,
    thresholds: Thresholds,
    vocab: Vocabulary,
    floor: int | None,
) -> FlipRow:
    position = index.layout.position(i)
    facts = facts_at(index, i, quant, stream_ids(position), thresholds, ())
    scored = facts.state == State.SCORED
    return FlipRow(
        quant=name,
        chunk=position.chunk,
        t=position.t,
        kind=_KINDS[facts.kind] if scored else facts.state.name.lower(),
        stream_text=_text(vocab, facts.stream_id),
        ref_text=_text(vocab, facts.ref_id),
        quant_text=_text(vocab, facts.quant_id),
        near_tie=facts.near_tie,
        floor_flips=None if floor is None else stands_at(index, i)[floor],
        **{name: getattr(facts, name) for name in _FROM_FACTS},
    )


def _text(vocab: Vocabulary, token: int) -> str | None:
    piece = vocab.piece(token)
    return None if piece is None else vocab.text([token])


def format_flips(rows: Iterable[FlipRow], vocab: Vocabulary) -> list[str]:
    """A table, a line a row, with a head. KLD, margin and cost in nats, p as fractions of 1."""
    lines = [
        f"{'position':<12} {'ref → quant':<32} {'p(ref)':>7} {'p(qnt)':>7} "
        f"{'cost':>8} {'margin':>8} {'KLD':>9}  quant"
    ]
    for row in rows:
        tokens = f"{vocab.display(row.ref_id).table} → {vocab.display(row.quant_id).table}"
        pad = " " * max(0, 32 - _width(vocab, row))
        cost = ("≥" if row.bounds & Bound.REF_P_QUANT else "") + f"{row.cost:.4f}"
        kld = ("≥" if row.bounds & Bound.KLD else "") + f"{row.kld:.6f}"
        near = "  near tie" * row.near_tie + "  floor flips too" * bool(row.floor_flips)
        lines.append(
            f"{f'c{row.chunk}:t{row.t}':<12} {tokens}{pad} {np.exp(row.ref_p_ref):7.4f} "
            f"{np.exp(row.ref_p_quant):7.4f} {cost:>8} {row.margin:8.4f} {kld:>9}  "
            f"{safe(row.quant)}{near}"
        )
    return lines


def _width(vocab: Vocabulary, row: FlipRow) -> int:
    return vocab.display(row.ref_id).table_width + 3 + vocab.display(row.quant_id).table_width
