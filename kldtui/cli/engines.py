"""What the commands that need engines share: their options, and making engines ready headless.

Knows: options, and what of connecting and verifying is told on stderr.
Must not know: Textual, HTTP, what engines are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kldtui.cli.values import FILE, SOURCE
from kldtui.engines.embedded import open_model
from kldtui.errors import EngineError, KldtuiError
from kldtui.position import Position
from kldtui.recordings import split_named
from kldtui.review.preparing import check, compare_pair, connect, doubts
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.vocab.glyphs import safe

Command = TypeVar("Command", bound=Callable[..., Any])


def ref_engine_options(command: Command) -> Command:
    """--ref-server and --ref-model."""
    for decorate in (
        click.option(
            "--ref-model",
            type=FILE,
            metavar="FILE",
            help="The reference's GGUF file, or MLX folder: run here, no server to start.",
        ),
        click.option("--ref-server", metavar="URL", help="The reference's server."),
    ):
        command = decorate(command)
    return command


def quant_engine_options(command: Command) -> Command:
    """--quant-server and --quant-model."""
    for decorate in (
        click.option(
            "--quant-model",
            "quant_models",
            multiple=True,
            type=SOURCE,
            metavar="[NAME=]FILE",
            help="A quant's GGUF file, or MLX folder: run here, no server to start.",
        ),
        click.option(
            "--quant-server",
            "quant_servers",
            multiple=True,
            metavar="[NAME=]URL",
            help="A quant's server; NAME is the quant's.",
        ),
    ):
        command = decorate(command)
    return command


def add_engines(
    session: Session,
    ref_server: str | None,
    ref_model: Path | None,
    quant_servers: Sequence[str] = (),
    quant_models: Sequence[str] = (),
) -> None:
    """Give the session its engines; none is contacted or started yet.

    Raises KldtuiError for a quant that is not there, or two engines for one role.
    """
    if ref_server is not None and ref_model is not None:
        raise KldtuiError("--ref-server and --ref-model: the reference has one engine; give one")
    alone = (ref_model is not None) + len(quant_models) == 1
    if ref_server is not None:
        session.add_server("ref", ref_server)
    if ref_model is not None:
        session.add_engine("ref", open_model(ref_model, session.context_needed, alone=alone))
    for option, specs in (("--quant-server", quant_servers), ("--quant-model", quant_models)):
        for spec in specs:
            name, value = split_named(spec)
            role = _quant_named(session, name, option)
            if role in session.slots:
                raise KldtuiError(f"{option}: quant {role!r} has an engine already; give it one")
            if option == "--quant-server":
                session.add_server(role, value)
            else:
                engine = open_model(Path(value), session.context_needed, alone=alone)
                session.add_engine(role, engine)


def _quant_named(session: Session, name: str | None, option: str) -> str:
    if name is not None:
        if name not in session.names:
            known = ", ".join(session.names) or "none"
            raise KldtuiError(f"{option} {name}=…: there is no such quant; there are: {known}")
        return name
    if len(session.names) != 1:
        what = "URL" if option.endswith("server") else "FILE"
        raise KldtuiError(f"{option}: say which quant it serves, as NAME={what}")
    return session.names[0]


class Preparation:
    """Engines made ready, with what there is to say of them on stderr; `warnings` keeps that."""

    def __init__(self, session: Session, top_n: int) -> None:
        self._session = session
        self._top_n = top_n
        self.warnings: list[str] = []

    def warn(self, words: str) -> None:
        self.warnings.append(words)
        tell(words)

    async def ready(self, slot: EngineSlot) -> None:
        """Connect an engine, and ask it for text where none is known. Raises EngineError."""
        told = False

        def waiting(_: float) -> None:
            nonlocal told
            if not told:
                tell(f"{slot.engine.url} loads its model; waiting")
            told = True

        await connect(slot, waiting)
        for words in doubts(self._session, slot):
            self.warn(f"{slot.engine.url}: {words}")
        for words in slot.limits(self._top_n) if slot.falls_short(self._top_n) else ():
            tell(f"{slot.engine.url}: {words}")
        if not self._session.vocab:
            await self._session.learn_text(slot)

    async def verified(
        self, slot: EngineSlot, position: Position | None, *, insist: bool = False
    ) -> None:
        """Compare an engine with its recording; with `insist` one that is another is refused.

        Raises EngineError.
        """
        found = await check(self._session, slot, position, 0)
        if found.passed:
            return
        words = f"{slot.engine.url}: {found.detail}"
        if insist and found.verdict != "unchecked":
            raise EngineError(f"{words}; --no-verify goes on all the same")
        self.warn(words)

    async def compared(self) -> None:
        """Hold the two engines' dictionaries against each other, where they are of two kinds."""
        for words in await compare_pair(self._session, 0):
            self.warn(f"the two engines have two dictionaries: {words}")


def tell(words: str) -> None:
    """A line on stderr, safe for a terminal."""
    click.echo(f"kldtui: {safe(words)}", err=True)
