"""What several commands take: paths, amounts in nats, chunks, a floor, settings.

Knows: how such a word is read, and where it is from if it is not given.
Must not know: what it is for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kldtui.config import Config, load_config
from kldtui.errors import KldtuiError

Command = TypeVar("Command", bound=Callable[..., Any])

_EMPTY = "the path is empty; is a variable of the shell unset?"


class FilePath(click.Path):
    """A path, as a `Path`, that is not empty: `Path("")` would be the working directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if not os.fspath(value):
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Source(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A word that is not empty: `[NAME=]FILE`, or a path that may also be `-` or a URL."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail(_EMPTY, param, ctx)
        return str(value)


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A finite amount of at least 0, of what it is made for."""

    def __init__(self, unit: str) -> None:
        self.name = unit

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            self.fail(f"{value!r} is no amount of {self.name}: a number from 0 up", param, ctx)
        return number


class ChunkRange(click.ParamType):  # type: ignore[type-arg]
    """`0-9` or `c0-c9`, both ends included, or a single chunk: (first, last)."""

    name = "chunks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"c?(\d{1,9})(?:-c?(\d{1,9}))?", str(value).strip())
        if match is None:
            self.fail(
                f"{value!r} is no range of chunks; write chunks as 0-99, both ends included",
                param,
                ctx,
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            self.fail(f"{value!r} is no range of chunks: it ends before it begins", param, ctx)
        return first, last


def refuse_floor(floor: Path | None, ref: Path, quants: Sequence[tuple[str, Path]]) -> None:
    """Raises KldtuiError where the floor's file is that of another recording of the review."""
    for name, path in (("the reference", ref), *((f"the quant {name}", at) for name, at in quants)):
        if floor is not None and _same_file(floor, path):
            raise KldtuiError(
                f"--floor {floor}: is the file of {name}; a floor is the reference recorded again, "
                "with another micro-batch (-ub)"
            )


def _same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False


FILE = FilePath()
SOURCE = Source()
NATS = Amount("nats")
DAYS = Amount("days")
MEGABYTES = Amount("megabytes")
CHUNKS = ChunkRange()


def configured(setting: str, *words: str, **more: Any) -> Callable[[Command], Command]:
    """An option that goes above a setting of the config file, which is read where it is not given.

    words, more: as of click.option. Calling the command raises ConfigError.
    """
    return click.option(
        *words,
        default=lambda: getattr(load_config(), setting),
        show_default=f"{getattr(Config(), setting)}, or the config file's {setting}",
        **more,
    )
