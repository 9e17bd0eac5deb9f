"""A run that is begun, or goes on where it was stopped: the same header, else none.

Knows: the header that a recording has, and which ids still lack their text.
Must not know: engines' requests, or what is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kldtui.engines.base import Engine, EngineInfo
from kldtui.errors import RecordingError
from kldtui.position import Position
from kldtui.recordings.begun import difference, is_begun
from kldtui.recordings.run import open_run
from kldtui.recordings.run_lines import format_bos
from kldtui.recordings.run_writer import RunWriter


def begin_or_go_on(
    path: Path,
    *,
    kind: str,
    n_ctx: int,
    n_vocab: int,
    n_chunk: int,
    n_positions: int | None,
    top_n: int,
    engine: Mapping[str, Any],
    add_bos: bool | None,
    bos_id: int | None,
    fields: Mapping[str, Any],
    created: datetime | None = None,
) -> RunWriter:
    """The writer of a new run, or of the one that is there, if it was begun like this.

    Raises RecordingError that names the option or field that differs, or what else is there, and
    what RunWriter raises.
    """
    if not is_begun(path):
        return RunWriter.create(
            path,
            kind=kind,
            n_ctx=n_ctx,
            n_vocab=n_vocab,
            n_chunk=n_chunk,
            n_positions=n_positions,
            top_n=top_n,
            engine=engine,
            add_bos=add_bos,
            bos_id=bos_id,
            created=created,
            fields=fields,
        )
    writer = RunWriter.append(path)
    wanted = {
        "kind": kind,
        "n_ctx": n_ctx,
        "n_vocab": n_vocab,
        "engine": dict(engine),
        "bos": format_bos(add_bos, bos_id),
        "top_n": top_n,
        **fields,
        "n_chunk": n_chunk,
        "n_positions": n_positions,
    }
    found = difference(writer.header, wanted)
    if found:
        writer.close()
        raise RecordingError(f"{path}: {found}; give the same again, or choose another -o")
    return writer


def engine_fields(info: EngineInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The header's `engine`: what affects the numbers, and nothing that changes with a restart."""
    passing = ("model_path", "max_total_num_tokens")
    details = {name: value for name, value in info.details.items() if name not in passing}
    return {
        "name": info.kind,
        "build": info.build,
        "model": str(info.details.get("model_path") or info.model),
        "settings": {**settings, **details},
        "cache_prompt": False,
    }


async def settled_top_n(engine: Engine, top_n: int, id: int) -> int:
    """As many candidates as are asked for, or as the engine gives, which it learns by asking.

    id: any token of the model. Raises EngineError.
    """
    limit = engine.capabilities.top_n_limit if engine.capabilities else None
    if limit is not None and top_n > limit:
        await engine.next_top([id], top_n)
        limit = engine.capabilities.top_n_limit if engine.capabilities else None
    return top_n if limit is None else min(top_n, limit)


class Pieces:
    """Stores the text of the ids that occur, a line after each chunk."""

    def __init__(self, engine: Engine, writer: RunWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._done: set[int] = set()
        self._waiting: set[int] = set()

    def recall(self) -> None:
        """Take up the ids of the chunk that was recorded last, whose line may be missing."""
        if not self._writer.n_chunk:
            return
        run = open_run(self._writer.path)
        try:
            self._done = set(run.pieces)
            chunk = run.shape.n_chunk - 1
            self.add(run.tokens(chunk).tolist())
            rows = run.rows(chunk, 0, run.scored(chunk).size)
            self.add(int(id) for id in rows.ids.ravel() if id >= 0)
            for apart in rows.extra:
                self.add(apart)
        finally:
            run.close()

    def add(self, ids: Iterable[int]) -> None:
        self._waiting.update(ids)

    async def store(self) -> None:
        """Ask for the text that is missing. Raises EngineError and RecordingError."""
        new = sorted(self._waiting - self._done)
        self._waiting.clear()
        if new:
            self._writer.pieces(await self._engine.pieces(new))
            self._done.update(new)


def has_all(writer: RunWriter, chunk: int, ts: Iterable[int]) -> bool:
    """Whether these positions of a chunk are recorded."""
    return all(writer.has(Position(chunk, int(t))) for t in ts)
