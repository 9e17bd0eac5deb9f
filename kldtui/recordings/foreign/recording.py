"""A recording made of a server's answers, in memory: top-N rows of chunks.

Knows: rows by position, and what a recording must offer.
Must not know: servers, files' contents, how answers were placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.position import Position
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.recordings.foreign.answer import Step
from kldtui.rows import Invalid, TopRow, TopRows


@dataclass(slots=True)
class Spoken:
    """What was said of one position, in ids. logp: of the stream token, NaN where unknown."""

    ids: NDArray[np.int32]
    logps: NDArray[np.float32]
    logp: float
    extra: dict[int, float]
    invalid: bool


@dataclass(slots=True)
class ForeignChunk:
    """A chunk: its tokens int32[length], how many are prompt, and what was said, by t."""

    tokens: NDArray[np.int32]
    prompt_length: int
    said: dict[int, Spoken] = field(default_factory=dict)
    t: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def close(self) -> None:
        """Call it when all is said."""
        self.t = np.array(sorted(self.said), np.int32)
        for array in (self.t, self.tokens):
            array.flags.writeable = False


def spoken(step: Step, stream: int) -> Spoken:
    """A step in ids, seen from the token of the stream, which may be another than its own."""
    if step.ids is None:
        raise ValueError("a step whose ids are not known")
    logp, extra = np.nan, {}
    at = np.flatnonzero(step.ids == stream)
    if step.token == stream and not np.isnan(step.logp):
        logp = step.logp
    elif at.size:
        logp = float(step.logps[at[0]])
    own = step.token
    if own is not None and own != stream and not np.isnan(step.logp) and own not in step.ids:
        extra[own] = float(np.float32(step.logp))
    return Spoken(step.ids, step.logps, float(logp), extra, step.invalid)


class ForeignRecording:
    """A `Recording` of answers; it is all in memory, and reads nothing later."""

    full = False
    version = 1

    def __init__(
        self,
        path: Path,
        format: str,
        n_vocab: int,
        n_ctx: int,
        chunks: Sequence[ForeignChunk],
        *,
        kind: str,
        pieces: Mapping[int, bytes],
        engine: Mapping[str, Any],
        problems: Sequence[str],
    ) -> None:
        """n_vocab: 0 where it is not known. kind: `teacher_forced` or `rollout`, as of runs."""
        for chunk in chunks:
            chunk.close()
        self.path = path
        self.format = format
        self.made = Made(kind)
        self.shape = StreamShape(n_ctx, n_vocab, len(chunks))
        self.pieces = dict(pieces)
        self.engine = dict(engine)
        self.problems = tuple(problems)
        self.records = self.records_expected = sum(chunk.t.size for chunk in chunks)
        self._chunks = list(chunks)

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        return self._chunk(chunk).tokens

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        """How many of a rollout's tokens are its prompt; nothing of what is teacher-forced."""
        length = self._chunk(chunk).prompt_length
        return {"prompt_length": length} if self.made.kind == "rollout" else {}

    def scored(self, chunk: int) -> NDArray[np.int32]:
        return self._chunk(chunk).t

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> TopRows:
        """Rows of `scored(chunk)[start:stop]`; `scratch` is not needed and stays untouched."""
        held = self._chunk(chunk)
        if not 0 <= start <= stop <= held.t.size:
            raise IndexError(f"rows {start}:{stop} of {held.t.size} in chunk {chunk}")
        ts = held.t[start:stop]
        said = [held.said[int(t)] for t in ts]
        k = max([1, *(one.ids.size for one in said)])
        ids = np.full((len(said), k), -1, np.int32)
        logp = np.full((len(said), k), np.nan, np.float32)
        for i, one in enumerate(said):
            ids[i, : one.ids.size] = one.ids
            logp[i, : one.logps.size] = one.logps
        return TopRows(
            ids=ids,
            logp=logp,
            stream_ids=held.tokens[ts],
            stream_logp=np.array([one.logp for one in said], np.float32),
            invalid=np.array(
                [Invalid.NOT_A_NUMBER if one.invalid else Invalid.NO for one in said], np.uint8
            ),
            extra=tuple(one.extra for one in said),
        )

    def row(self, position: Position) -> TopRow | None:
        if not 0 <= position.chunk < len(self._chunks):
            return None
        scored = self.scored(position.chunk)
        i = int(np.searchsorted(scored, position.t))
        if i == scored.size or scored[i] != position.t:
            return None
        return self.rows(position.chunk, i, i + 1).row(0)

    def close(self) -> None:
        """Nothing is open."""

    def _chunk(self, chunk: int) -> ForeignChunk:
        if not 0 <= chunk < len(self._chunks):
            raise IndexError(f"chunk {chunk} of {len(self._chunks)}")
        return self._chunks[chunk]
