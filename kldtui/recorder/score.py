"""Score a model, teacher-forced, on a stream: one run, that goes on where it was stopped.

Knows: streams, engines that score, the rule of BOS, and the order of a run's lines.
Must not know: what any server is asked, the command line.

Positions are asked for in stretches whose ends follow from the stream alone, and each stretch
begins with nothing held by the server. So a recording that was stopped anywhere and goes on asks
the same questions again from the stretch that was not whole, and becomes the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.engines.base import Engine, EngineInfo
from kldtui.engines.scoring import AnyScorer, Scored, Scorer, most_at_once, score, scorer
from kldtui.errors import ContextExceeded, EngineError, RecordingError, UnusableEngine
from kldtui.position import Position
from kldtui.recorder.files import Pieces, begin_or_go_on, engine_fields, has_all, settled_top_n
from kldtui.recorder.progress import Meter, Progress
from kldtui.recorder.stream import Stream, ToScore, stretches
from kldtui.recordings.run_writer import RunWriter

Tell = Callable[[Progress], None]


class ScoreJob:
    """One run of what an engine says of a stream.

    add_bos, bos_id: whether the model reads BOS in place of each chunk's first token. fields:
    further header fields, which say what was asked for and must be the same to go on.
    """

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        path: Path,
        *,
        top_n: int,
        add_bos: bool | None,
        bos_id: int | None,
        fields: Mapping[str, Any],
        created: datetime | None = None,
    ) -> None:
        """Of a connected engine. Raises UnusableEngine where it cannot score this stream, or
        ContextExceeded where its context is too short."""
        if engine.info is None:
            raise EngineError(f"{engine.url}: not connected yet")
        self._engine, self._stream, self._path = engine, stream, path
        self._by = scorer(engine)
        _check(engine, engine.info, stream, self._by)
        self._top_n = top_n
        self._add_bos, self._bos_id = add_bos, bos_id
        self._header: dict[str, Any] = {
            "kind": "teacher_forced",
            "n_ctx": stream.n_ctx,
            "n_vocab": stream.n_vocab,
            "n_chunk": stream.n_chunk,
            "n_positions": stream.n_positions,
            "engine": engine_fields(engine.info, engine.settings),
            "add_bos": add_bos,
            "bos_id": bos_id,
            "fields": fields,
            "created": created,
        }

    @property
    def by(self) -> AnyScorer:
        """The engine's scoring part."""
        return self._by

    async def run(self, tell: Tell | None = None) -> Progress:
        """Record what is not recorded yet; with a file that is whole already it asks nothing.

        Raises RecordingError for a file that was begun otherwise, EngineError where the engine
        fails: what was recorded stays, and running it again goes on from there.
        """
        any_id = int(self._stream.chunk(0).tokens[0]) if self._stream.n_chunk else 0
        self._top_n = await settled_top_n(self._engine, self._top_n, any_id)
        with begin_or_go_on(self._path, top_n=self._top_n, **self._header) as writer:
            pieces = Pieces(self._engine, writer)
            pieces.recall()
            meter = Meter(0, self._stream.n_positions)
            done = 0
            fresh = True
            for number in range(self._stream.n_chunk):
                chunk = self._stream.chunk(number)
                _declare(writer, number, chunk)
                if has_all(writer, number, chunk.ts):
                    done += chunk.ts.size
                    if number < writer.n_chunk - 1:
                        continue
                else:
                    if fresh:
                        held = sum(writer.has(Position(number, int(t))) for t in chunk.ts)
                        meter = Meter(done + held, self._stream.n_positions, tell)
                        fresh = False
                    done = await self._score(writer, number, chunk, pieces, meter, done)
                pieces.add(chunk.tokens.tolist())
                await pieces.store()
            if fresh:
                meter = Meter(done, self._stream.n_positions, tell)
            meter.at(done, now=True)
            return meter.progress

    async def _score(
        self,
        writer: RunWriter,
        number: int,
        chunk: ToScore,
        pieces: Pieces,
        meter: Meter,
        done: int,
    ) -> int:
        """Score what is missing of a chunk; returns how many positions are done then."""
        wanted = chunk.wanted
        for start, stop in stretches(chunk.ts, partial(most_at_once, self._by)):
            ts = [t for t in range(start, stop) if t in wanted]
            if not has_all(writer, number, ts):
                prefix = chunk.tokens[:start].tolist()
                if self._add_bos and self._bos_id is not None:
                    prefix[0] = self._bos_id
                seen = partial(_seen, meter, done, start, ts)
                found = await score(
                    self._by,
                    prefix,
                    chunk.tokens[start:stop].tolist(),
                    [wanted.get(t) for t in range(start, stop)],
                    self._top_n,
                    seen,
                )
                for t in ts:
                    if not writer.has(Position(number, t)):
                        _write(writer, Position(number, t), found[t - start], wanted[t], pieces)
            done += len(ts)
            meter.at(done)
        return done


def _check(engine: Engine, info: EngineInfo, stream: Stream, by: AnyScorer) -> None:
    if info.n_vocab is not None and info.n_vocab != stream.n_vocab:
        raise UnusableEngine(
            f"{engine.url}: its model has {info.n_vocab} tokens, the stream's had "
            f"{stream.n_vocab}: it is no quant of that model"
        )
    needed = stream.longest + isinstance(by, Scorer)  # which generates a token besides
    if info.n_ctx is not None and info.n_ctx < needed:
        raise ContextExceeded(
            f"{engine.url}: its context has {info.n_ctx} tokens, and {needed} are needed; start "
            "it with a larger one"
        )


def _declare(writer: RunWriter, number: int, chunk: ToScore) -> None:
    if number == writer.n_chunk:
        writer.chunk(chunk.tokens, prompt_length=chunk.prompt_length, fields=chunk.fields)
    elif not np.array_equal(writer.tokens(number), chunk.tokens):
        raise RecordingError(
            f"{writer.path}: chunk {number} is of another stream; record to another path"
        )


def _seen(meter: Meter, done: int, start: int, ts: list[int], count: int) -> None:
    meter.at(done + sum(t < start + count for t in ts))


def _write(
    writer: RunWriter, position: Position, found: Scored, other: int | None, pieces: Pieces
) -> None:
    """A line with the stream token's log p, and the other's, also outside the top list."""
    known = dict(found.top)
    extra = []
    if other is not None and found.also is not None and other not in known | {found.id: 0.0}:
        extra.append((other, found.also))
    writer.position(position, found.top, logp=found.logp, extra=extra)
    pieces.add(known)
    pieces.add(id for id, _ in extra)
