"""Builds tiny `kldtui-run` files, whole and broken, and says what is in one.

Knows: the writer, and the lines as docs/run-format.md spells them.
Must not know: what a test wants to show.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kldtui.position import Position
from kldtui.recordings.base import Recording, Scratch, prompt_length
from kldtui.recordings.run import RunRecording, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import FullRow

HEADER: dict[str, Any] = {
    "format": "kldtui-run",
    "version": 1,
    "kind": "teacher_forced",
    "n_ctx": 4,
    "n_vocab": 20,
}
CHUNK: dict[str, Any] = {"chunk": 0, "tokens": [7, 8, 9, 10]}
POSITION: dict[str, Any] = {
    "chunk": 0,
    "t": 3,
    "token": 10,
    "logp": -1.5,
    "top": [[4, -0.5], [10, -1.5]],
}
AT = Position(0, 3)
"""Where POSITION is."""
Line = dict[str, Any] | str | bytes
any_run = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def raw_run(path: Path, lines: Iterable[Line], end: str = "\n") -> Path:
    """A file of these lines: objects are put into JSON, strings and bytes go in as they are."""
    data = b""
    for line in lines:
        text = json.dumps(line) if isinstance(line, dict) else line
        data += (text.encode() if isinstance(text, str) else text) + end.encode()
    path.write_bytes(data)
    return path


def small_run(path: Path, *position_lines: Line, **header: Any) -> Path:
    """HEADER (changed by `header`), CHUNK, and the lines given."""
    return raw_run(path, [{**HEADER, **header}, CHUNK, *position_lines])


def run_of(
    recording: Recording,
    path: Path,
    *,
    top_n: int = 40,
    chunks: int | None = None,
    reference: Recording | None = None,
    pieces: dict[int, bytes] | None = None,
    compress: bool = False,
) -> Path:
    """The run that a full-vocabulary recording shrinks to; `extra` has the reference's argmax."""
    shape = recording.shape
    chunks = shape.n_chunk if chunks is None else chunks
    writer = RunWriter.create(
        path,
        n_ctx=shape.n_ctx,
        n_vocab=shape.n_vocab,
        n_chunk=shape.n_chunk,
        top_n=top_n,
        compress=compress,
    )
    scratch = Scratch()
    with writer:
        for chunk in range(chunks):
            tokens = recording.tokens(chunk)
            writer.chunk(tokens)
            for i, t in enumerate(recording.scored(chunk).tolist()):
                row = recording.rows(chunk, i, i + 1, scratch).row(0)
                if not isinstance(row, FullRow):
                    raise TypeError("needs a full-vocabulary recording")
                position = Position(chunk, t)
                if row.invalid:
                    writer.position(position, None)
                    continue
                best = row.top(top_n)
                logp = float(row.logp_all[tokens[t]])
                apart = []
                other = None if reference is None else reference.row(position)
                if other is not None:
                    apart = [(i, float(row.logp_all[i])) for i, _ in other.top(1)]
                writer.position(position, best, logp=logp, extra=apart)
        writer.pieces(pieces or {})
    return path


# -- contents, to compare ------------------------------------------------------------------------


@dataclass
class At:
    """What is recorded at one position, in float32; NaN is spelt None, so that == compares."""

    top: dict[int, float] = field(default_factory=dict)
    logp: float | None = None
    extra: dict[int, float] = field(default_factory=dict)
    kld: float | None = None


@dataclass
class Contents:
    """All that a run says."""

    tokens: list[list[int]]
    prompts: list[int | None]
    positions: dict[Position, At]
    pieces: dict[int, bytes]


def contents(run: RunRecording) -> Contents:
    """Read all of it."""
    chunks = range(run.shape.n_chunk)
    positions = {}
    for chunk in chunks:
        scored = run.scored(chunk)
        rows = run.rows(chunk, 0, scored.size)
        klds = run.recorded_kld(chunk, 0, scored.size)
        for i, t in enumerate(scored.tolist()):
            row = rows.row(i)
            if row.invalid:
                positions[Position(chunk, t)] = At()
                continue
            positions[Position(chunk, t)] = At(
                top=dict(row.top(1000)),
                logp=_value(rows.stream_logp[i]),
                extra={key: _f32(value) for key, value in rows.extra[i].items()},
                kld=_value(klds[i]),
            )
    return Contents(
        tokens=[run.tokens(chunk).tolist() for chunk in chunks],
        prompts=[prompt_length(run, chunk) for chunk in chunks],
        positions=positions,
        pieces=run.pieces,
    )


def contents_of(path: Path) -> Contents:
    run = open_run(path)
    try:
        return contents(run)
    finally:
        run.close()


def _f32(value: float) -> float:
    return float(np.float32(value))


def _value(value: float) -> float | None:
    return None if np.isnan(value) else _f32(value)


# -- any run ---------------------------------------------------------------------------------------


@dataclass
class Plan:
    """A run to be written: lines in the order of the calls that write them."""

    kind: str
    n_ctx: int
    n_vocab: int
    chunks: list[tuple[list[int], int | None]]
    positions: list[tuple[Position, At | None]]
    pieces: dict[int, bytes]

    def create(self, path: Path, compress: bool = False) -> RunWriter:
        return RunWriter.create(
            path,
            kind=self.kind,
            n_ctx=self.n_ctx,
            n_vocab=self.n_vocab,
            n_chunk=len(self.chunks),
            created=datetime(2026, 11, 30, tzinfo=UTC),
            compress=compress,
        )

    def write(self, writer: RunWriter, flush: bool = False) -> RunWriter:
        """Write what is not there yet: pieces, then chunk by chunk."""
        writer.pieces(self.pieces)
        for number, (tokens, prompt) in enumerate(self.chunks):
            if number >= writer.n_chunk:
                writer.chunk(tokens, prompt_length=prompt)
            for position, at in self.positions:
                if position.chunk == number and not writer.has(position):
                    write_position(writer, position, at)
            if flush:
                writer.flush()
        return writer

    def expected(self) -> Contents:
        return Contents(
            tokens=[tokens for tokens, _ in self.chunks],
            prompts=[prompt for _, prompt in self.chunks],
            positions={p: self._read(p, at) for p, at in self.positions},
            pieces=self.pieces,
        )

    def _read(self, position: Position, at: At | None) -> At:
        if at is None:
            return At()
        token = self.chunks[position.chunk][0][position.t]
        logp = at.logp if at.logp is not None else at.top.get(token, at.extra.get(token))
        return At(at.top, logp, at.extra, at.kld)


def write_position(writer: RunWriter, position: Position, at: At | None) -> None:
    if at is None:
        writer.position(position, None)
    else:
        writer.position(position, at.top.items(), logp=at.logp, extra=at.extra.items(), kld=at.kld)


def _logps(low: float = -60.0, high: float = 0.0) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any run: both kinds, invalid positions, whatever text."""
    kind = draw(st.sampled_from(["teacher_forced", "rollout"]))
    n_ctx = draw(st.integers(2, 6))
    n_vocab = draw(st.integers(1, 30))
    ids = st.integers(0, n_vocab - 1)
    chunks: list[tuple[list[int], int | None]] = []
    positions: list[tuple[Position, At | None]] = []
    ats = st.none() | st.builds(
        At,
        # Five of exp(-2) at most cannot add up to more than 1.
        top=st.dictionaries(ids, _logps(high=-2.0), min_size=1, max_size=5),
        logp=st.none() | _logps(),
        extra=st.dictionaries(ids, _logps(), max_size=2),
        kld=st.none() | st.floats(-0.125, 20, width=32),
    )
    for number in range(draw(st.integers(0, 3))):
        length = n_ctx if kind == "teacher_forced" else draw(st.integers(1, n_ctx))
        tokens = draw(st.lists(ids, min_size=length, max_size=length))
        prompt = None if kind == "teacher_forced" else draw(st.integers(1, length))
        chunks.append((tokens, prompt))
        scored: Sequence[int] = (
            draw(st.lists(st.integers(1, length - 1), unique=True)) if length > 1 else []
        )
        positions += [(Position(number, t), draw(ats)) for t in scored]
    pieces = draw(
        st.dictionaries(
            ids, st.binary(max_size=4) | st.text(max_size=3).map(lambda s: s.encode()), max_size=4
        )
    )
    return Plan(kind, n_ctx, n_vocab, chunks, positions, pieces)


@contextmanager
def opened(path: Path) -> Iterator[RunRecording]:
    run = open_run(path)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder for each example; tmp_path is one for all of a test's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def edited(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A line with other values, or more."""
    return {**line, **changes}


def written(tmp: Path, plan: Plan, compress: bool = False) -> Path:
    """A run with all that a plan has."""
    path = tmp / "whole"
    with plan.create(path, compress) as writer:
        plan.write(writer, flush=True)
    return path


def first_member(data: bytes) -> int:
    """Where the first gzip member ends."""
    inflate = zlib.decompressobj(31)
    inflate.decompress(data)
    return len(data) - len(inflate.unused_data)
