"""The token stream of one chunk, roots marked by colour and symbol.

Knows: how index columns of a chunk become marks, heat and dimmed context.
Must not know: files, engines, or what the screen does with the cursor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from rich.style import Style
from textual.reactive import reactive

from kldtui.index import Kind, State
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.roots import is_root, near_ties
from kldtui.ui import marks
from kldtui.ui.messages import CursorMoved
from kldtui.ui.text import many
from kldtui.ui.token_pane import Cells, TokenPane
from kldtui.vocab import Display, display_run


class StreamView(TokenPane):
    """One chunk at a time; `cursor`, `quant` and `heat` come from the screen."""

    cursor: reactive[Position] = reactive(Position(0, 0), init=False, repaint=False)
    quant: reactive[int] = reactive(0, init=False, repaint=False)
    heat: reactive[str] = reactive("kld", init=False, repaint=False)

    def __init__(self, session: Session, heat_range: tuple[float, float], *, id: str) -> None:
        super().__init__(id=id)
        self._session = session
        self._heat_range = heat_range
        self._chunk = -1
        self._displays: list[Display] = []
        self._hits: set[int] = set()
        self.hits: Sequence[Position] = ()
        """What a search has found, ascending."""

    def on_mount(self) -> None:
        self.load()

    def load(self) -> None:
        """Lay out the cursor's chunk again: after the chunk, the labels or the index changed."""
        chunk = self.cursor.chunk
        tokens = self._session.chunk_tokens(chunk)
        if chunk != self._chunk:
            self._chunk = chunk
            self._displays = display_run(self._session.vocab, [int(t) for t in tokens])
        first, last = (bisect_left(self.hits, Position(c, 0)) for c in (chunk, chunk + 1))
        self._hits = {hit.t for hit in self.hits[first:last]}
        self.show(self._cells(chunk, len(tokens)), self.cursor.t)
        self._title()

    def forget_text(self) -> None:
        """The vocabulary changed: every piece looks different."""
        self._chunk = -1
        self.load()

    def _title(self) -> None:
        session = self._session
        where = session.index.layout.chunk_slice(self._chunk)
        roots = 0
        if session.quants:
            roots = int(is_root(session.index, self.quant, where).sum())
        last = session.ref.shape.n_chunk - 1
        badge = {True: "greedy rollout", False: "text, not a rollout", None: ""}[session.rollout]
        if not session.vocab:
            badge = "ids only: --tokenizer FILE gives text"
        self.head(f"chunk {self._chunk} of 0–{last} ─ {many(roots, 'root')}", badge)

    def _cells(self, chunk: int, length: int) -> Cells:
        """Marks and styles from the chunk's columns; what is not scored is context, dimmed."""
        session = self._session
        styles: list[Style] = [marks.DIM] * length
        symbols: dict[int, tuple[str, Style]] = {}
        where = session.index.layout.chunk_slice(chunk)
        ts = session.index.layout.t(where).tolist()
        low, high = self._heat_range
        if not session.quants:
            for t in ts:
                styles[t] = marks.PLAIN
        else:
            index, pair = session.index, session.index.pairs[self.quant]
            states, kinds = pair["state"][where], pair["kind"][where]
            scored, invalid = states == State.SCORED, states == State.INVALID
            levels = np.zeros(len(ts), np.int64)
            if self.heat != "off":
                column = pair["kld"] if self.heat == "kld" else index.ref["margin"]
                levels[scored] = marks.heat_levels(column[where][scored], low, high)
            for t, level in zip(ts, levels.tolist(), strict=True):
                styles[t] = marks.heat_style(level)
            near = near_ties(index, self.quant, session.thresholds, where)
            firsts = session.first_flips(chunk, self.quant)
            for k in np.flatnonzero(invalid | (scored & (kinds != Kind.AGREE))).tolist():
                t = ts[k]
                if invalid[k]:
                    styles[t] = marks.INVALID_STYLE
                    symbols[t] = (marks.INVALID, marks.WARN)
                elif kinds[k] == Kind.ROOT:
                    is_near = bool(near[k])
                    styles[t] += marks.NEAR_STYLE if is_near else marks.ROOT_STYLE
                    first = where.start + k in firsts
                    symbols[t] = self._root_mark(Position(chunk, t), is_near, first)
                else:
                    styles[t] += marks.TIE_STYLE
                    symbols[t] = (marks.TIE, marks.TIE_STYLE)
        for t in self._hits:
            if t < length:
                styles[t] = marks.HIT
        return Cells(self._displays, styles, symbols)

    def _root_mark(self, position: Position, near: bool, first: bool) -> tuple[str, Style]:
        record = self._session.label(position, self.quant)
        if record is not None and record.key in marks.LABELS:
            return marks.LABELS[record.key], marks.GOOD
        if first:
            return marks.FIRST, marks.NEAR_STYLE if near else marks.ROOT_STYLE
        return (marks.NEAR_TIE, marks.NEAR_STYLE) if near else (marks.ROOT, marks.ROOT_STYLE)

    # ── state from above ─────────────────────────────────────────────────────────────────────

    def watch_cursor(self, before: Position, now: Position) -> None:
        if now.chunk != before.chunk or now.chunk != self._chunk:
            self.load()
        else:
            self.place_cursor(now.t)

    def watch_quant(self) -> None:
        self.load()

    def watch_heat(self) -> None:
        self.load()

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def after(self, where: str) -> Position | None:
        """Where a move leads; beyond either end of the chunk lies the next one."""
        to = self.target(where)
        if to is not None:
            return Position(self._chunk, to)
        chunks = self._session.ref.shape.n_chunk
        if where in ("right", "down", "page_down") and self._chunk + 1 < chunks:
            return Position(self._chunk + 1, 0)
        if where in ("left", "up", "page_up") and self._chunk > 0:
            return Position(self._chunk - 1, len(self._session.chunk_tokens(self._chunk - 1)) - 1)
        return None

    def picked(self, token: int) -> None:
        self.post_message(CursorMoved(Position(self._chunk, token)))
