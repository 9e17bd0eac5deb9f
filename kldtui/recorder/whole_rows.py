"""Score a model on a stream with whole rows: a `.kld` file, as llama-perplexity would write it.

Knows: streams, engines that give whole rows, and where the rows of a chunk go.
Must not know: how rows are computed or encoded, the command line.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kldtui.engines.base import Engine
from kldtui.errors import EngineBroke, EngineError, KldtuiError, UnusableEngine
from kldtui.recorder.progress import Meter, Progress
from kldtui.recordings.base import Recording
from kldtui.recordings.kld_writer import KldWriter


@runtime_checkable
class WholeRows(Protocol):
    """An engine that gives all logits of a text."""

    def rows(
        self, prefix: Sequence[int], targets: Sequence[int]
    ) -> AsyncGenerator[NDArray[np.float32], None]:
        """The logits that predict `targets`, float32[r, n_vocab], some at a time."""


class WholeRowsJob:
    """A `.kld` file of what an engine says of a recording's stream, its first chunks up to `last`.

    add_bos, bos_id: whether the model reads BOS in place of each chunk's first token.
    """

    def __init__(
        self,
        engine: Engine,
        recording: Recording,
        path: Path,
        *,
        last: int | None,
        add_bos: bool | None,
        bos_id: int | None,
    ) -> None:
        """Of a connected engine. Raises UnusableEngine where it gives no rows or is of another
        vocabulary, KldtuiError where such a file cannot hold the stream."""
        info, shape = engine.info, recording.shape
        if info is None:
            raise EngineError(f"{engine.url}: not connected yet")
        if not isinstance(engine, WholeRows):
            raise UnusableEngine(f"{engine.url}: {info.kind} gives no whole rows; leave out --kld")
        if info.n_vocab != shape.n_vocab:
            raise UnusableEngine(
                f"{engine.url}: its model has {info.n_vocab} tokens, the stream's had "
                f"{shape.n_vocab}: it is no quant of that model"
            )
        chunks = shape.n_chunk if last is None else last + 1
        if not 0 < chunks <= shape.n_chunk:
            raise KldtuiError(f"{recording.path.name} has chunks 0 to {shape.n_chunk - 1}")
        tokens = [recording.tokens(chunk) for chunk in range(chunks)]
        if any(one.size != shape.n_ctx for one in tokens) or shape.n_ctx < 3:
            raise KldtuiError(
                f"{recording.path.name}: its chunks differ in length, which a .kld file cannot "
                "hold; leave out --kld"
            )
        self._engine, self._path = engine, path
        self._tokens = np.stack(tokens)
        self._n_vocab = shape.n_vocab
        self._add_bos, self._bos_id = add_bos, bos_id

    async def run(self, tell: Callable[[Progress], None] | None = None) -> Progress:
        """Record the chunks that are missing.

        Raises RecordingError for a file of another stream, EngineError where the engine fails:
        whole chunks stay, and running it again goes on from there.
        """
        n_chunk, n_ctx = self._tokens.shape
        first = n_ctx // 2 + 1
        total = n_chunk * (n_ctx - first)
        started = self._path.exists() and self._path.stat().st_size > 0
        make = KldWriter.go_on if started else KldWriter
        with make(self._path, self._tokens, self._n_vocab) as writer:
            done = total - writer.records_left
            meter = Meter(done, total, tell)
            for chunk in range(done // (n_ctx - first), n_chunk):
                ids = self._tokens[chunk].tolist()
                prefix = ids[:first]
                if self._add_bos and self._bos_id is not None:
                    prefix[0] = self._bos_id
                before = writer.records_left
                async with aclosing(self._engine.rows(prefix, ids[first:])) as blocks:
                    async for rows in blocks:
                        writer.write(rows)
                        done += len(rows)
                        meter.at(done)
                if before - writer.records_left != n_ctx - first:
                    raise EngineBroke(f"{self._engine.url}: it gave fewer rows than were asked for")
            meter.at(done, now=True)
            return meter.progress
