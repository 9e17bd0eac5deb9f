"""What label tests need: evidence, branches, a recording without a file, and disks that fail.

Knows: the shapes that a review hands to the label store.
Must not know: how the store keeps them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import LabelFileError
from kldtui.labels import LabelStore, ReviewIdentity, branch_path
from kldtui.labels.disk import Files
from kldtui.labels.store import utc_now as utc
from kldtui.position import Position
from kldtui.recordings.base import Made, Scratch, StreamShape
from kldtui.rows import Invalid, Row, Rows, TopRow

__all__ = ["utc"]

P = ParamSpec("P")
R = TypeVar("R")


def evidence(**changes: Any) -> dict[str, Any]:
    """What a session says of a root."""
    return {
        "stream_id": 11,
        "stream_text": " next",
        "ref_id": 12,
        "ref_text": " three",
        "quant_id": 13,
        "quant_text": " week",
        "kld": 2.5712344646453857,
        "kld_is_lower_bound": False,
        "margin": 1.9,
        "cost": 1.91,
        "ref_p_ref": -0.49,
        "ref_p_quant": -2.4,
        "ref_p_quant_is_bound": False,
        "quant_p_ref": -1.77,
        "quant_p_ref_is_bound": False,
        "quant_p_quant": -0.81,
        "near_tie": False,
        "near_tie_threshold": 0.3,
        "near_tie_source": "default",
        "floor_flips": None,
        **changes,
    }


def branch(number: int = 1, arm: str = "R·r", length: int = 3, **changes: Any) -> dict[str, Any]:
    """A `Branch.to_json()` of `length` tokens with two alternatives each."""
    return {
        "id": f"{number:032x}",
        "position": "c1:t41",
        "chunk": 1,
        "t": 41,
        "arm": arm,
        "quant": "q5_0",
        "prefix_ids": [5, 6, 7],
        "start_id": 12,
        "start_text": " three",
        "tokens": [100 + i for i in range(length)],
        "logp": [-0.1 - i for i in range(length)],
        "top": [[[100 + i, -0.1 - i], [7, -3.5]] for i in range(length)],
        "text": " days" * length,
        "stop": "limit",
        "complete": False,
        "error": None,
        "engine": {
            "kind": "llama-server",
            "url": "http://127.0.0.1:8080",
            "model": "SmolLM2.Q4_1.gguf",
            "build": "b11549",
        },
        "settings": {"n_predict": length, "temperature": 0},
        "verify": {"verdict": "ok"},
        "seconds": 0.5,
        "tokens_per_second": 41.0,
        "created": "2026-01-02T03:04:05+00:00",
        **changes,
    }


@dataclass
class FakeRecording:
    """A recording in memory: tokens[chunk][t], best ids by chunk and t."""

    chunks: list[list[int]]
    best: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    n_vocab: int = 64
    path: Path = Path("ref.kld")
    format: str = "kld"
    version: int = 1
    full: bool = False
    problems: tuple[str, ...] = ()
    records: int = 0
    records_expected: int = 0
    pieces: dict[int, bytes] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    made: Made = field(default_factory=Made)

    @property
    def shape(self) -> StreamShape:
        return StreamShape(
            len(self.chunks[0]) if self.chunks else 8, self.n_vocab, len(self.chunks)
        )

    def chunk_fields(self, chunk: int) -> dict[str, Any]:
        return {}

    def tokens(self, chunk: int) -> NDArray[np.int32]:
        return np.array(self.chunks[chunk], np.int32)

    def scored(self, chunk: int) -> NDArray[np.int32]:
        return np.array(sorted(t for c, t in self.best if c == chunk), np.int32)

    def rows(self, chunk: int, start: int, stop: int, scratch: Scratch | None = None) -> Rows:
        raise NotImplementedError

    def row(self, position: Position) -> Row | None:
        best = self.best.get((position.chunk, position.t))
        if best is None:
            return None
        return TopRow({token: -float(i) for i, token in enumerate(best)}, {}, Invalid.NO)

    def close(self) -> None:
        pass


def recording(seed: int = 0, n_chunk: int = 2, model: int = 0) -> FakeRecording:
    """Chunks of 8 random tokens (by `seed`), scored from t 5 on (best ids by `model`)."""
    words = np.random.default_rng(seed).integers(0, 64, (8, 8))
    best = np.random.default_rng(1000 + model).permuted(np.tile(np.arange(64), (64, 1)), axis=1)
    return FakeRecording(
        words[:n_chunk].tolist(),
        {(c, t): best[8 * c + t, :12].tolist() for c in range(n_chunk) for t in (5, 6, 7)},
    )


def review(*quants: str) -> ReviewIdentity:
    """A reference and quants of these names (default q5_0)."""
    names = quants or ("q5_0",)
    return ReviewIdentity.of(
        recording(), {name: recording(model=1 + i) for i, name in enumerate(names)}
    )


class Clock:
    """Times that never stand still: a second a call, from `start` on."""

    def __init__(self, start: int = 0) -> None:
        self.seconds = start

    def __call__(self) -> str:
        self.seconds += 1
        minutes, seconds = divmod(self.seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"2026-01-01T{hours:02}:{minutes:02}:{seconds:02}.000000Z"


def open_store(
    path: Path,
    *,
    identity: ReviewIdentity | None = None,
    reviewer: str = "ann",
    files: Files | None = None,
    now: Callable[[], str] | None = None,
) -> LabelStore:
    clock = now if now is not None else Clock()
    return LabelStore.open(path, identity or review(), reviewer, files=files, now=clock)


def said(path: Path) -> dict[str, str | None]:
    """What a fresh program reads."""
    return {f"{r.position} {r.quant}": r.class_id for r in open_store(path).records()}


def refusal(act: Callable[[], object]) -> str | None:
    """The one line of a LabelFileError, or None if all went well."""
    try:
        act()
    except LabelFileError as error:
        words = str(error)
    else:
        return None
    assert "\n" not in words
    return words


def left_overs(path: Path) -> list[str]:
    """Names in the folder that are not of the two label files."""
    known = {path.name, branch_path(path).name}
    return [p.name for p in path.parent.iterdir() if p.name not in known]


class Killed(BaseException):
    """The program died here."""


class FailingFiles(Files):
    """The calls number `fail` and on (counted from 1) fail; `calls` lists their names.

    error: an errno that they raise, once (`lasting` False) or ever after; None kills the program
    instead: nothing happens to the disk any more. Half of a failing write reaches the disk.
    """

    def __init__(
        self,
        fail: int = 0,
        code: int | None = errno.ENOSPC,
        *,
        only: Sequence[str] = (),
        lasting: bool = True,
    ) -> None:
        self.fail, self.code, self.only, self.lasting = fail, code, tuple(only), lasting
        self.calls: list[str] = []

    def call(self, name: str, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if name == "close" or (self.only and name not in self.only):
            return do(*args, **kwargs)
        self.calls.append(name)
        number = len(self.calls)
        if self.fail and (number == self.fail or (self.lasting and number > self.fail)):
            if name == "write" and number == self.fail:
                fd, data = args
                if isinstance(fd, int) and isinstance(data, memoryview):
                    os.write(fd, data[: len(data) // 2])
            if self.code is None:
                raise Killed
            raise OSError(self.code, os.strerror(self.code))
        return do(*args, **kwargs)
