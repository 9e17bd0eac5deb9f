"""The `kldtui-run` file: JSON Lines of the best tokens at each position, plain or gzip.

Knows: how lines make up a recording, and where each position's line lies.
Must not know: what is done with the rows, how a run is written, or any other format.

Specified in docs/run-format.md. One pass at open finds every line; the header, the chunks and
the pieces are checked whole then, a position's place and token too. Its log-probabilities are
read and checked when they are asked for, so that a long run opens at once and stays on disk.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import RecordingChanged
from kldtui.position import Position
from kldtui.recordings import run_lines
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.recordings.kld import decode
from kldtui.recordings.run_lines import Chunk, LineError, PositionLine
from kldtui.recordings.run_scan import is_run, scan
from kldtui.recordings.run_text import open_text
from kldtui.rows import FullRows, Invalid, Kept, Row, TopRows

__all__ = ["RunRecording", "is_run", "open_run"]

_READ_AT_ONCE = 1 << 22
_GAP = 1 << 12
_SURVEY_ROWS = 512


def open_run(path: Path | str) -> RunRecording:
    """Open a run, plain or gzip. It stays open; close it.

    Raises NotARecording, UnsupportedRecording (an unknown version or kind), DamagedRecording
    (naming the line) and RecordingError (cannot be opened).
    """
    return RunRecording(Path(path))


class RunRecording:
    """A run, opened: a `Recording` that gives TopRows. Reads are positioned and thread-safe."""

    format = "kldtui-run"
    full = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = open_text(path)
        try:
            found = scan(self._text)
        except BaseException:
            self.close()
            raise
        self._header = found.header
        self._chunks = found.chunks
        self._lines = found.lines
        self.pieces: dict[int, bytes] = found.pieces
        self.problems = found.problems
        self.whole = found.whole
        """Whether nothing is known to be missing: no cut end, all chunks and positions there."""

    # -- what the file says ----------------------------------------------------------------------

    @property
    def header(self) -> dict[str, Any]:
        """The header line, with the fields that kldtui does not know."""
        return dict(self._header.fields)

    @property
    def version(self) -> int:
        return run_lines.VERSION

    @property
    def made(self) -> Made:
        header = self._header
        sampling, tools = header.fields.get("sampling"), header.fields.get("tools")
        return Made(
            kind=header.kind,
            add_bos=header.add_bos,
            bos_id=header.bos_id,
            sampling=dict(sampling) if isinstance(sampling, dict) else None,
            tools=list(tools) if isinstance(tools, list) else None,
        )

    @property
    def shape(self) -> StreamShape:
        """n_chunk counts the chunks that are there; `header` has the planned number."""
        return StreamShape(self._header.n_ctx, self._header.n_vocab, len(self._chunks))

    @property
    def engine(self) -> dict[str, Any]:
        return dict(self._header.fields.get("engine") or {})

    @property
    def records(self) -> int:
        return len(self._lines)

    @property
    def records_expected(self) -> int:
        """The header's n_positions; where it has none, as many as there are (see `whole`)."""
        expected = self._header.n_positions
        return self.records if expected is None else expected

    # -- the stream ------------------------------------------------------------------------------

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[length], read-only; in a rollout with its prompt."""
        return self._chunk(chunk).tokens

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        """The chunk's line without its tokens, with the fields that kldtui does not know."""
        return dict(self._chunk(chunk).fields)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        self._chunk(chunk)
        return self._lines.t[self._lines.of_chunk(chunk)]

    def _chunk(self, chunk: int) -> Chunk:
        if not 0 <= chunk < len(self._chunks):
            raise IndexError(f"chunk {chunk} of {len(self._chunks)}")
        return self._chunks[chunk]

    # -- rows ------------------------------------------------------------------------------------

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> TopRows:
        """Rows of `scored(chunk)[start:stop]`; `scratch` is not needed and stays untouched.

        k is the header's top_n, or the longest list of these rows where that is longer.
        Raises RecordingChanged, and DamagedRecording naming the first line that is wrong.
        """
        lines = self._parse(chunk, start, stop)
        ids, logp = _padded(lines, self._header.top_n or 1)
        tokens = self._chunks[chunk].tokens[self.scored(chunk)[start:stop]]
        return TopRows(
            ids=ids,
            logp=logp,
            stream_ids=tokens,
            stream_logp=np.array([_stream_logp(line) for line in lines], np.float32),
            invalid=np.array([line.invalid for line in lines], np.uint8),
            extra=tuple(line.extra for line in lines),
            floor=np.array([line.floor for line in lines], np.float32),
            kept=self._kept(chunk, start, lines),
        )

    def _kept(self, chunk: int, start: int, lines: list[PositionLine]) -> Kept | None:
        """What the lines hold of whole rows; a KLD counts only with the reference it is to."""
        whole = tuple(self._whole(chunk, start + i, line) for i, line in enumerate(lines))
        if not any(whole) and all(line.ref is None for line in lines):
            return None

        def floats(name: str) -> NDArray[np.float32]:
            values = [getattr(line, name) if line.ref else math.nan for line in lines]
            return np.array(values, np.float32)

        refs = [line.ref or (-1, math.nan) for line in lines]
        return Kept(
            kld=floats("kld"),
            floored=np.nan_to_num(floats("kld_floored"), nan=0.0),
            more=np.nan_to_num(floats("kld_more"), nan=0.0),
            ref_id=np.array([id for id, _ in refs], np.int32),
            ref_logp=np.array([logp for _, logp in refs], np.float32),
            whole=whole,
        )

    def _whole(self, chunk: int, i: int, line: PositionLine) -> FullRows | None:
        if line.row is None or line.invalid:
            return None
        try:
            version = self._header.row_version
            if version is None:
                raise LineError("a whole row, but the header does not say how they are encoded")
            try:
                data = base64.b64decode(line.row, validate=True)
            except ValueError:
                raise LineError("its row is no base64") from None
            raw = np.frombuffer(bytearray(data), "<u2").reshape(1, -1)
            return decode(raw, self._header.n_vocab, version)
        except LineError as error:
            number = self._lines.number[self._lines.of_chunk(chunk).start + i]
            raise error.at(self.path, int(number)) from None

    def row(self, position: Position) -> Row | None:
        """One row, whole where it is stored whole."""
        if not 0 <= position.chunk < len(self._chunks):
            return None
        scored = self.scored(position.chunk)
        i = int(np.searchsorted(scored, position.t))
        if i == scored.size or scored[i] != position.t:
            return None
        rows = self.rows(position.chunk, i, i + 1)
        whole = None if rows.kept is None else rows.kept.whole[0]
        return rows.row(0) if whole is None else whole.row(0)

    def recorded_kld(self, chunk: int, start: int, stop: int) -> NDArray[np.float32]:
        """The KLD to its reference that the writer measured (nats), NaN where it stored none."""
        return np.array([line.kld for line in self._parse(chunk, start, stop)], np.float32)

    def survey(self) -> Counter[Invalid]:
        """How many positions cannot be used, by reason. Reads every line; raises as `rows`."""
        counts: Counter[Invalid] = Counter()
        for chunk in range(len(self._chunks)):
            held = self.scored(chunk).size
            for start in range(0, held, _SURVEY_ROWS):
                lines = self._parse(chunk, start, min(held, start + _SURVEY_ROWS))
                counts.update(line.invalid for line in lines if line.invalid)
        return counts

    def close(self) -> None:
        self._text.file.close()

    # -- reading positions -----------------------------------------------------------------------

    def _parse(self, chunk: int, start: int, stop: int) -> list[PositionLine]:
        self._chunk(chunk)
        place = self._lines.of_chunk(chunk)
        if not 0 <= start <= stop <= place.stop - place.start:
            held = place.stop - place.start
            raise IndexError(f"rows {start}:{stop} of {held} in chunk {chunk}")
        first = place.start + start
        offsets = self._lines.offset[first : place.start + stop]
        lengths = self._lines.length[first : place.start + stop]
        lines: list[PositionLine | None] = [None] * (stop - start)
        for group in _spans(offsets, lengths):
            base = int(offsets[group[0]])
            data = self._text.read(base, int(offsets[group[-1]] + lengths[group[-1]]) - base)
            for i in group:
                at = int(offsets[i]) - base
                lines[i] = self._parse_line(first + i, chunk, data[at : at + int(lengths[i])])
        return [line for line in lines if line is not None]

    def _parse_line(self, i: int, chunk: int, data: bytes) -> PositionLine:
        t = int(self._lines.t[i])
        try:
            line = run_lines.parse_position(run_lines.parse_object(data), self._header.n_vocab)
            if (line.chunk, line.t, line.token) != (chunk, t, int(self._chunks[chunk].tokens[t])):
                raise LineError("gives its chunk, t or token twice, differently")
        except LineError as error:
            if self._text.file.touched:
                raise RecordingChanged(
                    f"{self.path}: was rewritten while it was open (line "
                    f"{self._lines.number[i]} is another); open it again"
                ) from None
            raise error.at(self.path, int(self._lines.number[i])) from None
        return line


def _stream_logp(line: PositionLine) -> float:
    """log p of the stream token: as recorded, or from the lists where it is in them."""
    if not math.isnan(line.logp):
        return line.logp
    if line.token in line.ids:
        return line.logps[line.ids.index(line.token)]
    return line.extra.get(line.token, math.nan)


def _padded(lines: list[PositionLine], least: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """ids int32[r, k] and log p float32[r, k], best first, ties by lowest id."""
    k = max([least, *(len(line.ids) for line in lines)])
    ids = np.full((len(lines), k), -1, np.int32)
    logp = np.full((len(lines), k), np.nan, np.float32)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = line.ids
        logp[row, : len(line.ids)] = line.logps
    order = np.lexsort((ids, -logp), axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(logp, order, -1)


def _spans(offsets: NDArray[np.int64], lengths: NDArray[np.int32]) -> Iterator[list[int]]:
    """Lines in file order, grouped to be read at once where they lie close together."""
    group: list[int] = []
    for i in np.argsort(offsets, kind="stable").tolist():
        if group:
            end = offsets[group[-1]] + lengths[group[-1]]
            far = offsets[i] - end > _GAP
            if far or offsets[i] + lengths[i] - offsets[group[0]] > _READ_AT_ONCE:
                yield group
                group = []
        group.append(i)
    if group:
        yield group
