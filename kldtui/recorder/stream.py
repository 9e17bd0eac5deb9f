"""What is to be scored: a stream of chunks, and which of their positions.

Knows: recordings as the source of a stream, and the reference's tokens in them.
Must not know: engines, or how a run is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import KldtuiError
from kldtui.recordings.base import Recording, prompt_length
from kldtui.rows import FullRows, Rows

_ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ToScore:
    """One chunk. ts: the positions to be scored, ascending, int32[k]. also: gives for each of them
    one other id whose log p is wanted, the reference's token; None: none is. It is called only
    where something is still to be scored. fields: further fields of its line."""

    tokens: NDArray[np.int32]
    ts: NDArray[np.int32]
    also: Callable[[], Sequence[int | None]] | None = None
    prompt_length: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def wanted(self) -> dict[int, int | None]:
        """t -> the other id."""
        others = self.also() if self.also is not None else [None] * self.ts.size
        return dict(zip(self.ts.tolist(), others, strict=True))


class Stream(Protocol):
    """Chunks that are read one at a time."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_chunk(self) -> int: ...

    @property
    def n_positions(self) -> int: ...

    @property
    def longest(self) -> int:
        """The most tokens that any request needs room for."""

    def chunk(self, number: int) -> ToScore: ...


class OfRecording:
    """The stream of a recording: its scored positions or all, of all its chunks or some."""

    def __init__(
        self, recording: Recording, chunks: tuple[int, int] | None = None, *, whole: bool = False
    ) -> None:
        """chunks: the first and the last that are scored. whole: every position from t1 on.

        Raises KldtuiError for chunks that the recording does not have.
        """
        held = recording.shape.n_chunk
        first, last = chunks if chunks is not None else (0, held - 1)
        if not 0 <= first <= last < held:
            name = recording.path.name
            has = f"has chunks 0 to {held - 1}" if held else "has no chunks"
            raise KldtuiError(f"--chunks {first}-{last}: {name} {has}")
        self._recording = recording
        self._first, self._last, self._whole = first, last, whole
        counts = [self._ts(chunk).size for chunk in range(last + 1)]
        self.n_positions = int(sum(counts))
        self.longest = max(
            (recording.tokens(chunk).size for chunk in range(first, last + 1)), default=0
        )

    @property
    def n_ctx(self) -> int:
        return self._recording.shape.n_ctx

    @property
    def n_vocab(self) -> int:
        return self._recording.shape.n_vocab

    @property
    def n_chunk(self) -> int:
        return self._last + 1

    def chunk(self, number: int) -> ToScore:
        """Raises RecordingChanged."""
        tokens = self._recording.tokens(number)
        ts = self._ts(number)
        return ToScore(
            tokens=tokens,
            ts=ts,
            also=partial(self._best, number, ts),
            prompt_length=prompt_length(self._recording, number),
            fields=self._recording.chunk_fields(number),
        )

    def _ts(self, chunk: int) -> NDArray[np.int32]:
        if chunk < self._first:
            return np.empty(0, np.int32)
        if self._whole:
            return np.arange(1, self._recording.tokens(chunk).size, dtype=np.int32)
        return self._recording.scored(chunk)

    def _best(self, chunk: int, ts: NDArray[np.int32]) -> tuple[int | None, ...]:
        """The reference's token at each position, None where it says none."""
        scored = self._recording.scored(chunk)
        best: dict[int, int] = {}
        if ts.size:
            for start in range(0, scored.size, _ROWS_AT_ONCE):
                stop = min(scored.size, start + _ROWS_AT_ONCE)
                rows = self._recording.rows(chunk, start, stop)
                for t, id, invalid in zip(
                    scored[start:stop], _first(rows), rows.invalid, strict=True
                ):
                    if not invalid and id >= 0:
                        best[int(t)] = int(id)
        return tuple(best.get(int(t)) for t in ts)


class OfChunks:
    """A stream that is held in memory; n_ctx is its longest chunk's length."""

    def __init__(self, chunks: Sequence[ToScore], n_vocab: int) -> None:
        self._chunks = chunks
        self.n_vocab = n_vocab
        self.n_chunk = len(chunks)
        self.n_positions = sum(chunk.ts.size for chunk in chunks)
        self.n_ctx = self.longest = max((chunk.tokens.size for chunk in chunks), default=1)

    def chunk(self, number: int) -> ToScore:
        return self._chunks[number]


def _first(rows: Rows) -> NDArray[np.integer[Any]]:
    """The best id of each row, the lowest where several are best; anything for invalid rows."""
    return rows.codes.argmax(axis=1) if isinstance(rows, FullRows) else rows.ids[:, 0]


def stretches(
    ts: NDArray[np.int32], most: Callable[[int], int], *, gap: int = 16
) -> list[tuple[int, int]]:
    """The positions as stretches `start:stop` of t, each for one request.

    most: from a stretch's start, how long it may be (`most_at_once`). Positions that are not
    wanted lie in between where skipping them would cost more than computing them. Where a stretch
    begins follows from `ts` alone, so that a recording that goes on asks the same questions.
    """
    out: list[tuple[int, int]] = []
    for t in ts.tolist():
        if out:
            start, stop = out[-1]
            if t - stop <= max(gap, start // 16) and t - start < most(start):
                out[-1] = (start, t + 1)
                continue
        out.append((t, t + 1))
    return out
