"""Writes `kldtui-run` files, line by line, and goes on with those that were stopped.

Knows: the fields of the lines (docs/run-format.md) and how numbers are spelt in them.
Must not know: models, where log-probabilities come from, or how lines reach the disk.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import RecordingError
from kldtui.position import Position
from kldtui.recordings import run_lines
from kldtui.recordings.run_lines import Chunk, Header, LineError
from kldtui.recordings.run_sink import Sink

Tokens = Sequence[int] | NDArray[np.integer[Any]]


class RunWriter:
    """A run that is being recorded. Made by `create` and `append`; close it, or use `with`.

    A plain run reaches the system with every line, a gzip run with every member; `flush` ends a
    member at once. The reader's own checks are run on each line before it is written: what they
    refuse is a RecordingError, and nothing is written.
    """

    def __init__(self, sink: Sink, header: Header) -> None:
        self.path = sink.path
        self._sink = sink
        self._header = header
        self._chunks: list[Chunk] = []
        self._recorded: list[set[int]] = []
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        n_ctx: int,
        n_vocab: int,
        kind: str = "teacher_forced",
        n_chunk: int | None = None,
        n_positions: int | None = None,
        top_n: int | None = None,
        engine: Mapping[str, Any] | None = None,
        add_bos: bool | None = None,
        bos_id: int | None = None,
        created: datetime | None = None,
        fields: Mapping[str, Any] | None = None,
        compress: bool = False,
    ) -> RunWriter:
        """Start a run where no file is yet.

        n_chunk, n_positions: how many the whole recording will have, where that is known.
        add_bos: whether the model reads bos_id in place of each chunk's first token; None: unknown.
        created: now where not given. fields: further header fields.
        Raises RecordingError, also where the file exists.
        """
        path = Path(path)
        line = {
            "format": run_lines.FORMAT,
            "version": run_lines.VERSION,
            "kind": kind,
            "n_ctx": n_ctx,
            "n_vocab": n_vocab,
            "n_chunk": n_chunk,
            "n_positions": n_positions,
            "top_n": top_n,
            "bos": run_lines.format_bos(add_bos, bos_id),
            "engine": None if engine is None else dict(engine),
            "created": (created or datetime.now(UTC)).isoformat(timespec="seconds"),
        }
        with _refused(f"{path}: header"):
            data = _dump(line, fields)
            header = run_lines.parse_header(run_lines.parse_object(data))
        sink = Sink.create(path, compress)
        try:
            sink.write(data)
            sink.flush()
        except BaseException:
            sink.close()
            raise
        return cls(sink, header)

    @classmethod
    def append(cls, path: Path | str) -> RunWriter:
        """Go on with a run where it was stopped; a cut last line is taken off first.

        Raises what `open_run` raises, and RecordingError where it cannot be written to or
        another program is recording to it.
        """
        sink, found = Sink.append(Path(path))
        writer = cls(sink, found.header)
        writer._chunks = found.chunks
        places = map(found.lines.of_chunk, range(len(found.chunks)))
        writer._recorded = [set(found.lines.t[place].tolist()) for place in places]
        writer._pieces = found.pieces
        return writer

    # -- what is there ---------------------------------------------------------------------------

    @property
    def header(self) -> dict[str, Any]:
        """The header line as it is in the file."""
        return dict(self._header.fields)

    @property
    def n_chunk(self) -> int:
        """Chunks declared so far; the next one gets this number."""
        return len(self._chunks)

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The tokens of a declared chunk, int32[length]."""
        return self._chunks[chunk].tokens

    def has(self, position: Position) -> bool:
        """Whether the position is recorded."""
        declared = 0 <= position.chunk < len(self._recorded)
        return declared and position.t in self._recorded[position.chunk]

    # -- adding to it ----------------------------------------------------------------------------

    def chunk(
        self,
        tokens: Tokens,
        *,
        prompt_length: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> int:
        """Declare the next chunk and return its number; a rollout has a `prompt_length`.

        fields: further fields of the line. Raises RecordingError.
        """
        line = {
            "chunk": len(self._chunks),
            "prompt_length": prompt_length,
            "tokens": [int(token) for token in tokens],
        }
        with _refused(f"{self.path}: chunk {len(self._chunks)}"):
            data = _dump(line, fields)
            chunk = run_lines.parse_chunk(run_lines.parse_object(data), self._header)
        self._sink.write(data)
        self._chunks.append(chunk)
        self._recorded.append(set())
        return chunk.number

    def position(
        self,
        position: Position,
        top: Iterable[tuple[int, float]] | None,
        *,
        logp: float | None = None,
        extra: Iterable[tuple[int, float]] = (),
        kld: float | None = None,
        kld_floored: float | None = None,
        kld_more: float | None = None,
        ref: tuple[int, float] | None = None,
        floor: float | None = None,
        row: NDArray[np.uint16] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a position of a declared chunk. All numbers in nats.

        top: the best (id, log p), in any order; None, or a NaN among them: an invalid position.
        logp: of the stream token; where it is not given, it is taken from `top` if it is there.
        extra: (id, log p) of ids outside `top`, such as the reference's token.
        kld: the KLD to the reference, where the writer measured it; ref: that one's best (id,
        log p), without which a `kld` does not count; kld_floored, kld_more: as in PAIR_DTYPE.
        floor: values up to it are bounds. row: the whole row, a `.kld` record uint16[words]; the
        header must have `rows`.
        fields: further fields of the line.
        A position that is recorded already gets a second line, which counts from then on.
        Raises RecordingError.
        """
        with _refused(f"{self.path}: {position}"):
            token = self._stream_token(position)
            best = None if top is None else _best_first(top)
            if logp is None and best is not None:
                logp = dict(best).get(token)
            line = {
                "chunk": int(position.chunk),
                "t": int(position.t),
                "token": token,
                "logp": _spelt(logp),
                "top": best,
                "extra": [[int(i), _spelt(v)] for i, v in extra] or None,
                "kld": _spelt_kld(kld),
                "kld_floored": _spelt(kld_floored),
                "kld_more": _spelt(kld_more),
                "ref": None if ref is None else [int(ref[0]), _spelt(ref[1])],
                "floor": _spelt(floor),
                "row": None if row is None else base64.b64encode(row.tobytes()).decode("ascii"),
            }
            data = _dump(line, fields, keep=("top",))
            run_lines.parse_position(run_lines.parse_object(data), self._header.n_vocab)
        self._sink.write(data)
        self._recorded[position.chunk].add(position.t)

    def _stream_token(self, position: Position) -> int:
        if not 0 <= position.chunk < len(self._chunks):
            raise LineError("its chunk is not declared yet")
        tokens = self._chunks[position.chunk].tokens
        if not 0 < position.t < tokens.size:
            raise LineError(f"t is not from 1 to {tokens.size - 1}, the last of the chunk")
        return int(tokens[position.t])

    def pieces(self, pieces: Mapping[int, bytes]) -> None:
        """Store the exact bytes of ids; ids that are stored already are passed over.

        Raises RecordingError, also where an id had other bytes before.
        """
        new = {int(i): data for i, data in pieces.items() if self._pieces.get(int(i)) != data}
        if not new:
            return
        with _refused(f"{self.path}: pieces"):
            clash = new.keys() & self._pieces.keys()
            if clash:
                raise LineError(f"id {min(clash)} is stored with other bytes already")
            data = _dump(run_lines.format_pieces(new))
            run_lines.parse_pieces(run_lines.parse_object(data), self._header.n_vocab)
        self._sink.write(data)
        self._pieces.update(new)

    def flush(self) -> None:
        """Write what a gzip run holds back. Raises RecordingError."""
        self._sink.flush()

    def close(self) -> None:
        """Write everything and close; again is harmless. Raises RecordingError."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """Say of what a caller gave what the reader would say of the line."""
    try:
        yield
    except LineError as error:
        raise RecordingError(f"{where}: {error}; nothing was written") from None


def _dump(
    line: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
    keep: tuple[str, ...] = (),
) -> bytes:
    """A line with its newline; of `line`, what is None is left out but for `keep`."""
    said = {name: value for name, value in line.items() if value is not None or name in keep}
    added = {name: value for name, value in (fields or {}).items() if name not in line}
    try:
        text = json.dumps(said | added, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        raise LineError(f"cannot be put into JSON ({error})") from None


def _best_first(top: Iterable[tuple[int, float]]) -> list[tuple[int, float]] | None:
    """As they are written: sorted, without probabilities of zero; None with NaN among them."""
    pairs = []
    for token, value in top:
        spelt = _spelt(value)
        if spelt is None:
            return None
        if spelt > run_lines.ZERO_LOGP:
            pairs.append((int(token), spelt))
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0])) or None


def _spelt_kld(value: float | None) -> float | None:
    infinite = value is not None and value >= run_lines.INFINITE
    return -run_lines.ZERO_WRITTEN if infinite else _spelt(value)


def _spelt(value: float | None) -> float | None:
    """The number with the fewest digits that is the same float32; None for NaN."""
    if value is None or math.isnan(value):
        return None
    if value <= run_lines.ZERO_LOGP:
        return run_lines.ZERO_WRITTEN
    return float(str(np.float32(value)))
