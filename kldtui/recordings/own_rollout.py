"""A quant's own rollouts from the prompts of the reference's: compared as far as both say the same.

Knows: runs of rollouts, and where two of them part.
Must not know: what is done with the rows, engines.

Up to and with the first token that differs, both models were given the same tokens, so that there
the quant's rollout is what scoring it on the reference's would have given. Behind it they are two
texts: nothing is compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import StreamMismatch
from kldtui.position import Position
from kldtui.recordings.base import Made, Scratch, StreamShape, prompt_length
from kldtui.recordings.run import RunRecording
from kldtui.rows import Row, TopRows


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rollouts of one prompt. ref, quant: their chunks. prompt_length: tokens of the prompt.

    parts_at: the t of the first token that differs, or of the first that only one of them has;
    None where they are the same.
    """

    ref: int
    quant: int
    prompt_length: int
    parts_at: int | None

    @property
    def agreed(self) -> int | None:
        """How many generated tokens come before the first that differs; None where none does."""
        return None if self.parts_at is None else self.parts_at - self.prompt_length


def pair_rollouts(ref: RunRecording, quant: RunRecording) -> list[Pair]:
    """The rollouts of two runs that have the same prompts, in the reference's order.

    Of several from one prompt the first belongs to the first, and so on. Raises StreamMismatch
    for what are no rollouts of one vocabulary, and where no prompt is in both.
    """
    names = f"{quant.path.name} is not of the prompts of {ref.path.name}"
    for run in (ref, quant):
        if run.made.kind != "rollout":
            raise StreamMismatch(f"{names}: {run.path.name} is no run of rollouts")
    if ref.shape.n_vocab != quant.shape.n_vocab:
        numbers = f"{quant.shape.n_vocab}, not {ref.shape.n_vocab}"
        raise StreamMismatch(f"{names}: n_vocab is {numbers}")
    waiting: dict[bytes, list[int]] = defaultdict(list)
    for chunk in range(quant.shape.n_chunk):
        waiting[_prompt(quant, chunk)].append(chunk)
    pairs = []
    for chunk in range(ref.shape.n_chunk):
        fitting = waiting.get(_prompt(ref, chunk))
        if fitting:
            other = fitting.pop(0)
            parts_at = _parts(ref.tokens(chunk), quant.tokens(other))
            pairs.append(Pair(chunk, other, prompt_length(ref, chunk) or 1, parts_at))
    if not pairs:
        raise StreamMismatch(f"{names}: no prompt is in both")
    return pairs


def _prompt(run: RunRecording, chunk: int) -> bytes:
    return run.tokens(chunk)[: prompt_length(run, chunk) or 1].tobytes()


def _parts(a: NDArray[np.int32], b: NDArray[np.int32]) -> int | None:
    both = min(a.size, b.size)
    different = np.flatnonzero(a[:both] != b[:both])
    if different.size:
        return int(different[0])
    return None if a.size == b.size else both


class OwnRollouts:
    """A `Recording` over the reference's stream that a quant's own rollouts make."""

    format = "kldtui-run"
    full = False

    def __init__(self, run: RunRecording, ref: RunRecording) -> None:
        """Takes over `run`, and reads the tokens of `ref`. Raises StreamMismatch."""
        self.run = run
        self._ref = ref
        self.pairs = {pair.ref: pair for pair in pair_rollouts(ref, run)}
        parted = sum(pair.parts_at is not None for pair in self.pairs.values())
        self.problems: tuple[str, ...] = (
            *run.problems,
            f"holds rollouts of its own: {len(self.pairs)} of {ref.shape.n_chunk} have the "
            f"reference's prompts, {parted} of them part, and are compared up to there",
        )

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def version(self) -> int:
        return self.run.version

    @property
    def shape(self) -> StreamShape:
        return self._ref.shape

    @property
    def records(self) -> int:
        return sum(self.scored(chunk).size for chunk in range(self._ref.shape.n_chunk))

    @property
    def records_expected(self) -> int:
        return self.records

    @property
    def pieces(self) -> dict[int, bytes]:
        return self.run.pieces

    @property
    def engine(self) -> dict[str, Any]:
        return self.run.engine

    @property
    def made(self) -> Made:
        """What is said of the reference's tokens, on which this model is compared, and its own
        BOS rule."""
        own = self.run.made
        return replace(
            self._ref.made, kind="teacher_forced", add_bos=own.add_bos, bos_id=own.bos_id
        )

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        """The reference's."""
        return self._ref.chunk_fields(chunk)

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The reference's."""
        return self._ref.tokens(chunk)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        pair = self.pairs.get(chunk)
        if pair is None:
            return np.empty(0, np.int32)
        ts = self.run.scored(pair.quant)
        last = self.tokens(chunk).size - 1
        if pair.parts_at is not None:
            last = min(last, pair.parts_at)
        return ts[ts <= last]

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> TopRows:
        """As RunRecording's, their stream tokens the reference's. Raises as that."""
        ts = self.scored(chunk)
        if not 0 <= start <= stop <= ts.size:
            raise IndexError(f"rows {start}:{stop} of {ts.size} in chunk {chunk}")
        pair = self.pairs.get(chunk)
        rows = self.run.rows(pair.quant if pair is not None else 0, start, stop)
        mine = self.tokens(chunk)[ts[start:stop]]
        logp = rows.stream_logp.copy()
        for i in np.flatnonzero(rows.stream_ids != mine):
            found = np.flatnonzero(rows.ids[i] == mine[i])
            logp[i] = rows.logp[i, found[0]] if found.size else np.nan
        return replace(rows, stream_ids=mine, stream_logp=logp)

    def row(self, position: Position) -> Row | None:
        if not 0 <= position.chunk < self.shape.n_chunk:
            return None
        ts = self.scored(position.chunk)
        i = int(np.searchsorted(ts, position.t))
        if i == ts.size or ts[i] != position.t:
            return None
        return self.rows(position.chunk, i, i + 1).row(0)

    def close(self) -> None:
        self.run.close()


def own_rollouts(quant: object, ref: object) -> OwnRollouts | None:
    """A quant's run over the stream of a reference, if both hold rollouts and the quant's are its
    own; None where it is to be taken as it is. Closes what it refuses: raises StreamMismatch."""
    if not isinstance(ref, RunRecording) or not isinstance(quant, RunRecording):
        return None
    if not ref.made.kind == quant.made.kind == "rollout":
        return None
    common = min(ref.shape.n_chunk, quant.shape.n_chunk)
    same = all(np.array_equal(ref.tokens(c), quant.tokens(c)) for c in range(common))
    if same and ref.shape.n_ctx == quant.shape.n_ctx:
        return None
    try:
        return OwnRollouts(quant, ref)
    except StreamMismatch:
        quant.close()
        raise
