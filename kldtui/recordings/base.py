"""What every recording can do, whatever its format.

Knows: the shape of a stream, and the protocol that the formats implement.
Must not know: any format, or what is done with the rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kldtui.position import Position
from kldtui.rows import Codes, FullRows, Row, Rows

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StreamShape:
    """The numbers that two recordings must share before their tokens are compared.

    n_vocab: 0 where the file does not say (answers of a server).
    """

    n_ctx: int
    n_vocab: int
    n_chunk: int


@dataclass(frozen=True, slots=True)
class Made:
    """How a recording says that its tokens came about and were read; the defaults say nothing.

    kind: `teacher_forced` or `rollout`. add_bos: whether the model read `bos_id` in place of each
    chunk's first token; None: not said. sampling: how rollouts were drawn (temperature, seed,
    repeat); None where they were not. tools: schemas that prompts were rendered with; chunks say
    which.
    """

    kind: str = "teacher_forced"
    add_bos: bool | None = None
    bos_id: int | None = None
    sampling: dict[str, Any] | None = None
    tools: list[Any] | None = None


class Scratch:
    """Buffers that one thread reuses from read to read; rows made with them die at the next."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A C-contiguous array of this shape, its contents unspecified."""
        size = int(np.prod(shape))
        held = self._arrays.get(name)
        if held is None or held.size < size or held.dtype != np.dtype(dtype):
            held = self._arrays[name] = np.empty(size, dtype)
        return held[:size].reshape(shape)


class Recording(Protocol):
    """What one model said of a token stream. All reads are thread-safe (positioned)."""

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str:
        """`kld`, `kldtui-run`, or which server's answers they are (`vllm`, `openai-chat`, …)."""

    @property
    def version(self) -> int: ...

    @property
    def shape(self) -> StreamShape: ...

    @property
    def full(self) -> bool:
        """Whether rows hold the whole vocabulary (then `rows` gives FullRows)."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the file, in words, a line each; empty for a whole one."""

    @property
    def records(self) -> int:
        """Whole records on disk."""

    @property
    def records_expected(self) -> int:
        """Records that the header promises."""

    @property
    def pieces(self) -> dict[int, bytes]:
        """id -> bytes for the ids whose text the file stores; empty if it stores none."""

    @property
    def engine(self) -> dict[str, Any]:
        """What the file says of the engine that made it; empty if it says nothing."""

    @property
    def made(self) -> Made: ...

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        """What the file says of a chunk, as the fields of a run's chunk line without its tokens
        (docs/run-format.md); empty if it says nothing."""

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        """The chunk's tokens, int32[length]; length is n_ctx but for rollouts."""

    def scored(self, chunk: int) -> NDArray[np.int32]:
        """The t of the chunk's whole records, ascending, int32[k]."""

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> Rows:
        """Rows of the positions `scored(chunk)[start:stop]`.

        With `scratch` its buffers are used and the rows are valid until its next use.
        Raises RecordingChanged if the file no longer holds what it held at open.
        """

    def row(self, position: Position) -> Row | None:
        """One row, or None where nothing was recorded. Raises RecordingChanged as `rows`."""

    def close(self) -> None: ...


def prompt_length(recording: Recording, chunk: int) -> int | None:
    """How many of a chunk's tokens are its prompt; None where it is said to have none."""
    said: int | None = recording.chunk_fields(chunk).get("prompt_length")
    return said


class CodeReader(Protocol):
    """One thread's way to read many rows as codes, as quickly as can be: log p = scale * code +
    base, and code 0 is the floor. What it gave is gone with the next read."""

    def check(self) -> None:
        """Raises RecordingChanged if the file no longer holds what it held at open."""

    def read(self, first: int, count: int) -> tuple[Codes, Floats, Floats]:
        """Codes, scale and base of flat records. Raises RecordingChanged where they are gone."""

    def usual(self, scale: Floats, base: Floats) -> NDArray[np.bool_]:
        """For which rows the codes can be taken so; all others take `flat_rows`."""


class EvenRecording(Recording, Protocol):
    """A recording whose chunks all have as many records, one behind the other.

    Flat record number i is the prediction of token `first_t + i % per_chunk` of chunk
    `i // per_chunk`; there are `records` of them, and may be more later (`refresh`).
    """

    @property
    def first_t(self) -> int: ...

    @property
    def per_chunk(self) -> int: ...

    def flat_rows(self, first: int, last: int, scratch: Scratch | None = None) -> FullRows:
        """The rows of records `first:last`, across chunks; otherwise as `rows`."""

    def reader(self, rows: int) -> CodeReader | None:
        """A reader of at most so many rows at once; None where rows are not all laid out alike."""

    def flat_tokens(self, start: int, count: int) -> NDArray[np.int32]:
        """Tokens of the whole stream, counted through all chunks, int32[count]."""

    def examine(self, cancel: threading.Event | None = None) -> None:
        """Look at all that opening left out because it takes long; `problems` may grow.

        Raises DamagedRecording where the file turns out to contradict its header.
        """

    def refresh(self) -> bool:
        """Take in what has been written since; True if there are more records now.

        Raises RecordingChanged where what was there is there no more.
        """


def as_even(recording: Recording) -> EvenRecording | None:
    """The recording, if its records can be counted through."""
    return cast(EvenRecording, recording) if hasattr(recording, "flat_rows") else None


def chunk_tags(recording: Recording, chunk: int) -> list[tuple[str, int, int]]:
    """What a run says of a chunk's tokens: (name, first t, t behind the last), in their order.

    Empty for recordings that say nothing of it (docs/run-format.md, `tags`); what is no tag is
    passed over.
    """
    listed = recording.chunk_fields(chunk).get("tags")
    if not isinstance(listed, list):
        return []
    tags = [each for each in listed if isinstance(each, list) and len(each) == 3]
    return [(n, a, b) for n, a, b in tags if (type(n), type(a), type(b)) == (str, int, int)]
