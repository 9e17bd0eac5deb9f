"""One pass over the lines of a run: its header, chunks and pieces, and where positions lie.

Knows: the order that lines must come in, and what a cut end looks like.
Must not know: log-probabilities of positions, compression, or how a run is written.
"""

from __future__ import annotations

import re
import zlib
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DamagedRecording, NotARecording
from kldtui.recordings import run_lines
from kldtui.recordings.run_lines import Chunk, Header, LineError, NotJson
from kldtui.recordings.run_text import GZIP_MAGIC, Text

_BOM = b"\xef\xbb\xbf"
_IS_RUN = re.compile(rb'\s*\{[^\n]*?"format"\s*:\s*"kldtui-run"')
_NUMBER = rb": ?(0|[1-9]\d{0,8}), ?"
_USUAL_POSITION = re.compile(
    rb'\{"chunk"' + _NUMBER + rb'"t"' + _NUMBER + rb'"token"' + _NUMBER + rb"[^{}\n]*+\}\r?\n"
)
"""A position line as RunWriter and most others write it; any other is parsed whole."""
_MAX_LINE = 1 << 26


@dataclass(frozen=True, slots=True)
class Lines:
    """Where each position's line lies, by chunk and t.

    starts: int64[n_chunk + 1], the first of each chunk; the others have one entry a position:
    t int32, offset int64 and length int32 in the text (bytes), number int64 (line, from 1).
    """

    starts: NDArray[np.int64]
    t: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int32]
    number: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.t.size)

    def of_chunk(self, chunk: int) -> slice:
        return slice(int(self.starts[chunk]), int(self.starts[chunk + 1]))


@dataclass(frozen=True, slots=True)
class Found:
    """What the pass found. `problems` as in Recording."""

    header: Header
    chunks: list[Chunk]
    lines: Lines
    pieces: dict[int, bytes]
    problems: tuple[str, ...]
    whole: bool
    """Whether nothing is known to be missing."""
    kept: int
    """Bytes of text up to the end of the last whole line."""
    cut: int
    """Bytes of text after it: a line that was cut."""
    terminated: bool
    """Whether the last whole line ends with a newline."""


def is_run(head: bytes) -> bool:
    """Whether a file that starts with these bytes (some thousand will do) is a run."""
    if head.startswith(GZIP_MAGIC):
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1 << 16)
        except zlib.error:
            return False
    return _IS_RUN.match(head.removeprefix(_BOM)) is not None


def scan(text: Text) -> Found:
    """Go over all lines. A position's place and stream token are checked, the rest is not read.

    Raises NotARecording, UnsupportedRecording, DamagedRecording (naming the line) and
    RecordingChanged.
    """
    found = _Scan(text)
    try:
        found.all_lines()
    except LineError as error:
        raise error.at(text.file.path, found.number) from None
    return found.result()


class _Scan:
    def __init__(self, text: Text) -> None:
        self.number = 0
        self._text = text
        self._kept = 0
        self._terminated = True
        self._cut = 0
        self._header: Header | None = None
        self._chunks: list[Chunk] = []
        self._pieces: dict[int, bytes] = {}
        self._unknown: list[int] = []
        self._chunk_of = array("i")
        self._t = array("i")
        self._offset = array("q")
        self._length = array("i")
        self._line = array("q")

    # -- lines ---------------------------------------------------------------------------------

    def all_lines(self) -> None:
        rest = b""
        for block in self._text.blocks():
            rest = self._whole_lines(rest + block)
            if len(rest) > _MAX_LINE:
                self.number += 1
                raise LineError(f"is longer than {_MAX_LINE >> 20} MiB")
        if rest:
            self.number += 1
            try:
                self._any_line(rest)
            except NotJson:
                self._cut = len(rest)
                if self._header is None and not is_run(rest):
                    raise self._not_a_run() from None
            else:
                self._kept += len(rest)
                self._terminated = False

    def _whole_lines(self, data: bytes) -> bytes:
        """Take the lines of `data`, which starts at `_kept`, and return the rest of it."""
        at, base = 0, self._kept
        while True:
            usual = _USUAL_POSITION.match(data, at) if self._header is not None else None
            end = usual.end() if usual is not None else data.find(b"\n", at) + 1
            if not end:
                return data[at:]
            self.number += 1
            if usual is not None:
                chunk, t, token = usual.groups()
                self._place(int(chunk), int(t), int(token), end - at)
            else:
                self._any_line(data[at:end])
            at = end
            self._kept = base + at

    def _any_line(self, line: bytes) -> None:
        length = len(line)
        if self.number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            return
        fields = run_lines.parse_object(line)
        if self._header is None:
            if fields.get("format") != run_lines.FORMAT:
                raise self._not_a_run()
            self._header = run_lines.parse_header(fields)
        elif "format" in fields:
            raise LineError("is a second header: two recordings in one file")
        elif "t" in fields:
            position = run_lines.parse_position(fields, self._header.n_vocab)
            self._place(position.chunk, position.t, position.token, length)
        elif "chunk" in fields:
            self._declare(run_lines.parse_chunk(fields, self._header))
        elif "pieces" in fields:
            for token, piece in run_lines.parse_pieces(fields, self._header.n_vocab).items():
                if self._pieces.setdefault(token, piece) != piece:
                    raise LineError(f"gives id {token} another piece than a line before")
        else:
            self._unknown.append(self.number)

    def _declare(self, chunk: Chunk) -> None:
        if chunk.number > len(self._chunks):
            raise LineError(f"declares chunk {chunk.number} where {len(self._chunks)} is the next")
        if chunk.number == len(self._chunks):
            self._chunks.append(chunk)
            return
        before = self._chunks[chunk.number]
        same = np.array_equal(before.tokens, chunk.tokens)
        if not same or before.prompt_length != chunk.prompt_length:
            raise LineError(f"declares chunk {chunk.number} again, differently")

    def _place(self, chunk: int, t: int, token: int, length: int) -> None:
        if chunk >= len(self._chunks):
            raise LineError(f"a position of chunk {chunk}, which no line before declares")
        tokens = self._chunks[chunk].tokens
        if not 0 < t < tokens.size:
            raise LineError(f"t {t} is not from 1 to {tokens.size - 1}, the last of chunk {chunk}")
        if tokens[t] != token:
            raise LineError(f"token {token} at c{chunk}:t{t}, where the chunk has {tokens[t]}")
        self._chunk_of.append(chunk)
        self._t.append(t)
        self._offset.append(self._kept)
        self._length.append(length)
        self._line.append(self.number)

    # -- what came of it -----------------------------------------------------------------------

    def result(self) -> Found:
        path = self._text.file.path
        if self._header is None:
            if self._cut or self._text.cut:
                raise DamagedRecording(f"{path}: its header line is cut; record it again")
            raise NotARecording(f"{path}: is empty")
        lines = self._by_position()
        problems = tuple(self._problems(self._header, lines))
        return Found(
            header=self._header,
            chunks=self._chunks,
            lines=lines,
            pieces=self._pieces,
            problems=problems,
            whole=not (
                self._cut
                or self._text.cut
                or len(self._chunks) < (self._header.n_chunk or 0)
                or len(lines) < (self._header.n_positions or 0)
            ),
            kept=self._kept,
            cut=self._cut,
            terminated=self._terminated,
        )

    def _not_a_run(self) -> NotARecording:
        return NotARecording(f"{self._text.file.path}: is no {run_lines.FORMAT}")

    def _by_position(self) -> Lines:
        """The positions by chunk and t; of one that is there twice, the later line."""
        chunk = np.array(self._chunk_of, np.int32)
        t = np.array(self._t, np.int32)
        order = np.lexsort((np.arange(t.size), t, chunk))
        chunk, t = chunk[order], t[order]
        last = np.ones(t.size, bool)
        last[:-1] = (chunk[1:] != chunk[:-1]) | (t[1:] != t[:-1])
        order = order[last]
        t = t[last]
        t.flags.writeable = False
        return Lines(
            starts=np.searchsorted(chunk[last], np.arange(len(self._chunks) + 1)).astype(np.int64),
            t=t,
            offset=np.array(self._offset, np.int64)[order],
            length=np.array(self._length, np.int32)[order],
            number=np.array(self._line, np.int64)[order],
        )

    def _problems(self, header: Header, lines: Lines) -> list[str]:
        problems = []
        if self._text.cut:
            problems.append("the gzip data is cut: what is whole of it is read")
        if self._cut:
            problems.append(f"the last line ({self.number}) is cut: {self._cut} bytes left out")
        if header.n_chunk is not None and header.n_chunk != len(self._chunks):
            problems.append(f"holds {len(self._chunks)} of {header.n_chunk} chunks")
        if header.n_positions is not None and header.n_positions != len(lines):
            problems.append(f"holds {len(lines)} of {header.n_positions} positions")
        again = len(self._t) - len(lines)
        if again:
            problems.append(f"{again} positions are recorded again; the last line counts")
        if self._unknown:
            problems.append(
                f"{len(self._unknown)} lines of an unknown kind were skipped, the first is line "
                f"{self._unknown[0]}"
            )
        return problems
