"""From any recording to a run: the best tokens of each position, and what a pair of files tells.

Knows: whole and top-N rows, in the order in which they come, and what a run keeps of them.
Must not know: command lines, screens, servers.

The input is read front to back and a block of rows is held at a time, so that a pipe will do. The
run is written as it goes. Where it is there already it is gone on with: what it holds is passed
over, and compared in its last chunk, so that it ends as it would have in one go.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kldtui.analysis import RefBlock, analyse_pair, analyse_ref
from kldtui.errors import DamagedRecording, RecordingError
from kldtui.index import Bound, Kind, State, check_streams
from kldtui.position import Position
from kldtui.recordings.base import Recording, Scratch, prompt_length
from kldtui.recordings.begun import difference, is_begun
from kldtui.recordings.kld_writer import record_of
from kldtui.recordings.run import RunRecording, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import FullRows, Rows, TopRows
from kldtui.spans import call_tokens
from kldtui.vocab import Vocabulary

Full = Literal["roots", "tool-calls"]

_OPTIONAL = ("against", "chunks", "rows")
"""Fields of the header that say how a run was made, where they are there."""
_BLOCK_BYTES = 1 << 22
_YIELD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the run is to hold. full: where whole rows are kept. chunks: first and last, or all.

    model: name or path of the model that made the input, where that does not say.
    """

    top_n: int = 40
    full: frozenset[Full] = frozenset()
    chunks: tuple[int, int] | None = None
    model: str | None = None
    compress: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Positions that were passed so far, of how many; the bytes of input a second, where known."""

    done: int
    total: int
    bytes_per_s: float
    seconds_left: float | None


class Conversion:
    """One input on its way into a run. `run` does it; the counts can be read at any time."""

    def __init__(
        self,
        source: Recording,
        out: Path,
        wanted: Wanted,
        *,
        ref: Recording | None = None,
        vocab: Vocabulary,
    ) -> None:
        """Check that it can be done; nothing is written yet.

        ref: the reference of the pair. vocab: whose text tells tool calls; its pieces go along.
        Raises StreamMismatch, and RecordingError for what cannot be had from this input.
        """
        self._source, self._out, self._wanted, self._ref = source, out, wanted, ref
        self._vocab = vocab
        self.positions = 0
        self.whole_rows = 0
        self.exact = 0
        """Positions whose KLD was measured."""
        if ref is not None:
            check_streams(ref, source)
        if "roots" in wanted.full and ref is None:
            raise RecordingError("roots are told by a pair: give the reference, --against REF")
        if "tool-calls" in wanted.full and not vocab:
            raise RecordingError("tool calls are told by their text: give --tokenizer FILE")
        if wanted.full and not source.full:
            raise RecordingError(f"{source.path}: holds no whole rows that could be kept")
        n_chunk = source.shape.n_chunk
        first, last = wanted.chunks or (0, n_chunk - 1)
        if wanted.chunks is not None and not 0 <= first <= last < n_chunk:
            raise RecordingError(
                f"{source.path}: has chunks 0 to {n_chunk - 1}, not all of {first} to {last}"
            )
        self._chunks = range(first, last + 1)
        self._total = sum(source.scored(chunk).size for chunk in self._chunks)

    def run(self, cancel: threading.Event | None = None) -> Iterator[Progress]:
        """Do it; stops after a block once `cancel` is set. What is written then is a run.

        Raises DamagedRecording where a stream ends early, RecordingError where the run cannot be
        written or is another's, and what reading raises.
        """
        with ExitStack() as opened:
            before: RunRecording | None = None
            if self._is_there():
                # Opened when the writer has taken off what was cut.
                writer = opened.enter_context(RunWriter.append(self._out))
                before = opened.enter_context(closing(open_run(self._out)))
            else:
                writer = opened.enter_context(self._create())
            yield from self._all(writer, before, cancel)
        if getattr(self._source, "ended", False):
            raise DamagedRecording(
                f"{self._source.path}: ended before the last of its records; {self._out} holds "
                "what came, and the same command goes on with it"
            )

    # -- the run ---------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Whether the run was begun. Raises RecordingError if something else is there."""
        if not is_begun(self._out):
            return False
        with closing(open_run(self._out)) as held:
            theirs = held.header
        mine = dict.fromkeys(_OPTIONAL) | self._header() | self._fields()
        found = difference(theirs, mine)
        if found:
            raise RecordingError(f"{self._out}: {found}; give another -o, or remove it")
        return True

    def _header(self) -> dict[str, Any]:
        """What RunWriter.create is told, by the names of its parameters that are header fields."""
        shape = self._source.shape
        n_vocab = shape.n_vocab or (self._ref.shape.n_vocab if self._ref else 0)
        n_vocab = n_vocab or self._vocab.n_vocab or 0
        if not n_vocab:
            raise RecordingError(
                f"{self._source.path}: does not say how large the vocabulary is: give --against "
                "REF, or --tokenizer FILE"
            )
        engine = dict(self._source.engine)
        if self._wanted.model:
            engine["model"] = self._wanted.model
        return {
            "kind": self._source.made.kind,
            "n_ctx": shape.n_ctx,
            "n_vocab": n_vocab,
            "n_chunk": shape.n_chunk,
            "n_positions": self._total,
            "top_n": self._wanted.top_n,
            "engine": engine or None,
        }

    def _fields(self) -> dict[str, Any]:
        """Further fields: where the run is from, and what its source says of how it was made."""
        made = self._source.made
        said = {"sampling": made.sampling, "tools": made.tools}
        out: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        out["source"] = _identity(self._source)
        if self._ref is not None:
            out["against"] = _identity(self._ref)
        if self._wanted.chunks is not None:
            out["chunks"] = list(self._wanted.chunks)
        if self._wanted.full:
            out["rows"] = {
                "encoding": "kld",
                "version": self._source.version,
                "at": sorted(self._wanted.full),
            }
        return out

    def _create(self) -> RunWriter:
        return RunWriter.create(
            self._out,
            add_bos=self._source.made.add_bos,
            bos_id=self._source.made.bos_id,
            fields=self._fields(),
            compress=self._wanted.compress,
            **self._header(),
        )

    # -- going through it --------------------------------------------------------------------------

    def _all(
        self, writer: RunWriter, before: RunRecording | None, cancel: threading.Event | None
    ) -> Iterator[Progress]:
        source = self._source
        for chunk in range(writer.n_chunk, source.shape.n_chunk):
            writer.chunk(
                source.tokens(chunk),
                prompt_length=prompt_length(source, chunk),
                fields=source.chunk_fields(chunk),
            )
        block = max(1, _BLOCK_BYTES // max(1, 2 * source.shape.n_vocab))
        row_bytes = 2 * source.shape.n_vocab if source.full else 0
        scratches = Scratch(), Scratch()
        began = told = time.monotonic()
        passed = done = 0
        for chunk in self._chunks:
            ts = source.scored(chunk)
            later = chunk + 1 < self._chunks.stop and _begun(writer, source, chunk + 1)
            if later and all(writer.has(Position(chunk, int(t))) for t in ts):
                passed = done = done + ts.size
                continue
            seen: set[int] = set(source.tokens(chunk).tolist())
            inside = self._inside(chunk)
            for start in range(0, ts.size, block):
                if cancel is not None and cancel.is_set():
                    return
                stop = min(ts.size, start + block)
                rows = source.rows(chunk, start, stop, scratches[0])
                here = ts[start : start + len(rows)]
                self._block(writer, before, chunk, here, rows, inside, seen, scratches[1])
                done += len(rows)
                now = time.monotonic()
                if now - told >= _YIELD_SECONDS:
                    told = now
                    yield self._progress(done, passed, now - began, row_bytes)
                if len(rows) < stop - start:
                    break
            if getattr(source, "ended", False):
                break  # its pieces come when it is whole, as they do in one go
            writer.pieces(self._pieces(seen))
        yield self._progress(done, passed, time.monotonic() - began, row_bytes)

    def _progress(self, done: int, passed: int, seconds: float, row_bytes: int) -> Progress:
        rate = (done - passed) / seconds if seconds > 0 else 0.0
        left = (self._total - done) / rate if rate else None
        return Progress(done, self._total, rate * row_bytes, left)

    def _inside(self, chunk: int) -> NDArray[np.bool_] | None:
        if "tool-calls" not in self._wanted.full:
            return None
        return call_tokens(self._vocab, self._source.tokens(chunk).tolist())

    def _pieces(self, ids: Collection[int]) -> dict[int, bytes]:
        known = ((id, self._vocab.piece(id) or self._source.pieces.get(id)) for id in ids)
        return {id: piece for id, piece in known if piece is not None}

    def _block(
        self,
        writer: RunWriter,
        before: RunRecording | None,
        chunk: int,
        ts: NDArray[np.int32],
        rows: Rows,
        inside: NDArray[np.bool_] | None,
        seen: set[int],
        scratch: Scratch,
    ) -> None:
        tokens = self._source.tokens(chunk)[ts]
        refs = self._reference(chunk, ts, tokens, scratch)
        pairs: list[Any] = [None] * len(ts)
        for first, block in refs:
            part = rows.part(slice(first, first + len(block.stream)))
            pairs[first : first + len(block.stream)] = zip(
                block.columns, analyse_pair(block, part), strict=True
            )
        for i, t in enumerate(ts.tolist()):
            position = Position(chunk, t)
            pair = pairs[i]
            said = _said(rows, i, int(tokens[i]), self._wanted.top_n, pair)
            seen.update(said.ids)
            if writer.has(position):
                self._check_same(before, position, said)
                continue
            root = pair is not None and pair[1]["state"] == State.SCORED
            root = root and pair[1]["kind"] == Kind.ROOT
            keep = "roots" in self._wanted.full and root
            keep = keep or (inside is not None and bool(inside[t]))
            self._write(writer, position, said, rows, i, pair, bool(keep))

    def _write(
        self,
        writer: RunWriter,
        position: Position,
        said: _Said,
        rows: Rows,
        i: int,
        pair: Any,
        keep: bool,
    ) -> None:
        measured: dict[str, Any] = {}
        if pair is not None and pair[0]["state"] == State.SCORED:
            measured["ref"] = (int(pair[0]["ref_id"]), float(pair[0]["ref_p_ref"]))
        if measured and pair[1]["state"] == State.SCORED and not pair[1]["bounds"] & Bound.KLD:
            measured["kld"] = float(pair[1]["kld"])
            if pair[1]["kld_floored"] > 0:
                measured["kld_floored"] = float(pair[1]["kld_floored"])
                measured["kld_more"] = float(pair[1]["kld_more"])
            self.exact += 1
        whole = keep and said.top is not None and isinstance(rows, FullRows)
        if whole and isinstance(rows, FullRows):
            measured["row"] = record_of(rows, i)
        writer.position(
            position, said.top, logp=said.logp, extra=said.extra, floor=said.floor, **measured
        )
        self.positions += 1
        self.whole_rows += whole

    def _reference(
        self, chunk: int, ts: NDArray[np.int32], tokens: NDArray[np.int32], scratch: Scratch
    ) -> Iterator[tuple[int, RefBlock]]:
        """The reference's rows of those positions that it has: where each run of them begins."""
        ref = self._ref
        if ref is None or chunk >= ref.shape.n_chunk:
            return
        held = ref.scored(chunk)
        _, mine, theirs = np.intersect1d(ts, held, assume_unique=True, return_indices=True)
        breaks = np.flatnonzero((np.diff(mine) != 1) | (np.diff(theirs) != 1)) + 1
        for run in np.split(np.arange(mine.size), breaks):
            if run.size:
                a, b = int(run[0]), int(run[-1]) + 1
                rows = ref.rows(chunk, int(theirs[a]), int(theirs[b - 1]) + 1, scratch)
                yield int(mine[a]), analyse_ref(rows, tokens[mine[a] : mine[b - 1] + 1])

    def _check_same(self, before: RunRecording | None, position: Position, said: _Said) -> None:
        """That what is recorded is what this input says. Raises RecordingError."""
        if before is None or before.shape.n_chunk <= position.chunk:
            return
        i = int(np.searchsorted(before.scored(position.chunk), position.t))
        theirs = before.rows(position.chunk, i, i + 1).row(0)
        mine = {id: np.float32(value) for id, value in said.top or ()}
        if mine != {id: np.float32(value) for id, value in theirs.known.items()}:
            raise RecordingError(
                f"{self._out}: was made from another recording than {self._source.path}: "
                f"{position} differs; give another -o, or remove it"
            )


@dataclass(frozen=True, slots=True)
class _Said:
    """What a run holds of one position; top None: invalid."""

    top: Sequence[tuple[int, float]] | None
    logp: float | None
    extra: Sequence[tuple[int, float]]
    floor: float | None

    @property
    def ids(self) -> list[int]:
        return [id for id, _ in (*(self.top or ()), *self.extra)]


def _said(rows: Rows, i: int, stream: int, top_n: int, pair: Any) -> _Said:
    """The best of a row, and the stream's and the reference's tokens wherever they are."""
    if rows.invalid[i]:
        return _Said(None, None, (), None)
    wanted = [] if pair is None or pair[0]["state"] != State.SCORED else [int(pair[0]["ref_id"])]
    if isinstance(rows, TopRows):
        return _said_of_top(rows, i, stream, top_n, wanted)
    ids = best_ids(rows, i, top_n)
    top = list(zip(ids.tolist(), rows.pick(i, ids).tolist(), strict=True))
    known = {id for id, _ in top}
    apart = np.array([stream, *wanted], np.int64)
    inside = (apart >= 0) & (apart < rows.n_vocab)
    values = rows.pick(i, np.where(inside, apart, 0)).tolist()
    floor = float(rows.floor[i])
    bounds = any(-np.inf < value <= floor for value in values)
    return _Said(
        top,
        values[0] if inside[0] else None,
        [(id, value) for id, value in zip(wanted, values[1:], strict=True) if id not in known],
        floor if bounds else None,
    )


def _said_of_top(rows: TopRows, i: int, stream: int, top_n: int, wanted: list[int]) -> _Said:
    row = rows.row(i)
    top = row.top(top_n)
    known = {id for id, _ in top}
    apart = {id: value for id, value in row.apart.items() if id not in known and id != stream}
    apart |= {id: row.known[id] for id in wanted if id in row.known and id not in known}
    logp = row.apart.get(stream, row.known.get(stream))
    floor = None if row.at_most == -np.inf else row.at_most
    return _Said(top, logp, sorted(apart.items()), floor)


def best_ids(rows: FullRows, i: int, n: int) -> NDArray[np.intp]:
    """The ids of the `n` best entries of a row, best first, ties by lowest id.

    Entries at the floor, and of probability zero, are none of them; all that tie for the best are.
    """
    codes = rows.codes[i]
    least = int(rows.zeros or bool(np.isfinite(rows.floor[i])))
    n = min(n, codes.size)
    kth = max(least, int(np.partition(codes, codes.size - n)[codes.size - n]))
    ids = np.flatnonzero(codes >= kth)
    ids = ids[np.lexsort((ids, -codes[ids].astype(np.int32)))]
    if ids.size > n:
        several = int(np.count_nonzero(codes[ids] == codes[ids[0]]))
        ids = ids[: max(n, several)]
    return ids


def _begun(writer: RunWriter, source: Recording, chunk: int) -> bool:
    return any(writer.has(Position(chunk, int(t))) for t in source.scored(chunk))


def _identity(recording: Recording) -> dict[str, Any]:
    """By what a recording is known again: its stream; the name is for people."""
    digest = hashlib.sha256()
    for chunk in range(recording.shape.n_chunk):
        digest.update(recording.tokens(chunk).astype("<i4").tobytes())
    return {
        "name": recording.path.name,
        "format": recording.format,
        "version": recording.version,
        "tokens": digest.hexdigest()[:32],
    }


__all__ = ["Conversion", "Full", "Progress", "Wanted", "best_ids"]
