"""`kldtui floor`: how far one model's answers differ from run to run, and between engines.

Knows: options, how a floor becomes lines or JSON on a terminal.
Must not know: Textual, HTTP, how runs are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from kldtui.cli.batching import scan
from kldtui.cli.engines import Preparation, add_engines, ref_engine_options
from kldtui.cli.printing import print_json
from kldtui.cli.progress import ProgressLine, duration
from kldtui.cli.values import FILE as _FILE
from kldtui.cli.values import SOURCE
from kldtui.config import load_config
from kldtui.errors import KldtuiError
from kldtui.floor import (
    WORDS,
    Floor,
    FloorLine,
    LiveLine,
    floor_lines,
    live_line,
    run_floor,
    self_flips,
    share_json,
)
from kldtui.position import Position
from kldtui.proportions import Share
from kldtui.recordings import name_files
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, compare_dictionaries
from kldtui.roots import RootQuery, select
from kldtui.sampling import sample
from kldtui.vocab.glyphs import safe

AGAINST = "the other engine"


@click.command()
@click.argument("ref", type=_FILE)
@ref_engine_options
@click.option(
    "--against",
    type=SOURCE,
    metavar="URL|FILE",
    help="The same model in another engine: a server, a GGUF file, or an MLX folder.",
)
@click.option(
    "--quant",
    "quants",
    multiple=True,
    type=SOURCE,
    metavar="[NAME=]FILE",
    help="At roots of this quant; may be given several times. Without, at any scored position.",
)
@click.option(
    "--roots",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="At how many; the same ones each time, and those of a smaller N among them.",
)
@click.option(
    "-n",
    "length",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="Tokens of a run.",
)
@click.option("--tokenizer", type=_FILE, metavar="FILE", help="tokenizer.json, or GGUF file.")
@click.option("--no-verify", is_flag=True, help="Do not compare the engines with the recording.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text (docs/json.md).")
def floor(
    ref: Path,
    ref_server: str | None,
    ref_model: Path | None,
    against: str | None,
    quants: tuple[str, ...],
    roots: int,
    length: int,
    tokenizer: Path | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Run the model of REF against itself: a quant's flips mean nothing below this floor.

    Each prefix is continued three times by the same engine: cache off, off again, on; with
    --against once more by the other one.
    """
    if ref_server is None and ref_model is None:
        raise KldtuiError("floor: give --ref-server URL or --ref-model FILE")
    session = Session.open(ref, name_files(quants), tokenizer=tokenizer)
    session.branch_tokens = length
    try:
        add_engines(session, ref_server, ref_model)
        other = _other(session, against) if against is not None else None
        positions = _positions(session, roots)
        job = _Job(session, other, length, load_config().top_n_stored, not no_verify)
        asyncio.run(job.run(positions, as_json))
    finally:
        session.close()


def _other(session: Session, against: str) -> EngineSlot:
    """The other engine of the same model, under a role of its own."""
    path = Path(against)
    if path.exists():
        from kldtui.engines.embedded import open_model

        return session.add_engine(AGAINST, open_model(path, session.context_needed))
    return session.add_server(AGAINST, against)


def _positions(session: Session, n: int) -> list[Position]:
    """The roots that are run, or without a quant the positions. Raises KldtuiError for none."""
    if session.quants:
        scan(session)
        quants = tuple(range(len(session.quants)))
        found = select(session.index, RootQuery(quants=quants)).tolist()
    else:
        found = range(session.index.layout.n)
    positions = sample((session.position(int(i)) for i in found), n)
    if not positions:
        what = "root" if session.quants else "scored position"
        raise KldtuiError(f"{session.ref.path.name} has no {what} to run at")
    return positions


class _Job:
    """Engines made ready, then one position after the other."""

    def __init__(
        self, session: Session, other: EngineSlot | None, length: int, top_n: int, verifies: bool
    ) -> None:
        self._session, self._other = session, other
        self._slot = session.slots["ref"]
        self._length, self._top_n, self._verifies = length, top_n, verifies
        self._preparation = Preparation(session, top_n)

    async def run(self, positions: Sequence[Position], as_json: bool) -> None:
        try:
            for slot in [self._slot, *([self._other] if self._other is not None else [])]:
                await self._preparation.ready(slot)
                if self._verifies:
                    await self._preparation.verified(slot, None)
            if self._other is not None and self._other.kind != self._slot.kind:
                for words in await compare_dictionaries(self._slot, self._other):
                    self._preparation.warn(f"the two engines have two dictionaries: {words}")
            floors = await self._floors(positions)
        finally:
            await self._session.close_engines()
        lines, live, rate = floor_lines(floors), live_line(floors), self_flips(floors)
        if as_json:
            print_json(self._to_json(positions, rate, lines, live))
        else:
            for text in self._text(len(positions), rate, lines, live):
                click.echo(safe(text))

    async def _floors(self, positions: Sequence[Position]) -> list[Floor]:
        floors: list[Floor] = []
        begun = time.monotonic()
        with ProgressLine() as line:
            for k, position in enumerate(positions):
                line(partial(_done, k, len(positions), time.monotonic() - begun))
                floors.append(await self._floor(position))
        return floors

    async def _floor(self, position: Position) -> Floor:
        session = self._session
        row = session.ref.row(position)
        best = row.top(1) if row is not None else []
        other = None
        if self._other is not None:
            other = (self._other.engine, session.prefix(position, self._other))
        return await run_floor(
            self._slot.engine,
            session.prefix(position, self._slot),
            self._length,
            self._slot.top_n(self._top_n),
            other=other,
            recorded=best[0] if best else None,
        )

    def _text(self, n: int, rate: Share, lines: Sequence[FloorLine], live: LiveLine) -> list[str]:
        session, what = self._session, "roots" if self._session.quants else "positions"
        info = self._slot.info
        served = f" ({info.kind} {info.model} {info.build})" if info is not None else ""
        out = [f"{session.ref.path.name}: {n} {what}, {self._length} tokens from each{served}"]
        out.append(f"self-flip rate           {_share(rate)} predictions")
        for line in lines:
            out.append("")
            out.append(f"the reference against itself: {WORDS[line.against]}")
            if line.against == "other" and self._other is not None and self._other.info:
                other = self._other.info
                out[-1] = f"the reference in another engine: {other.kind} {other.model}"
            out.append(f"  self-flip rate         {_share(line.flips)} predictions")
            out.append(f"  parts from itself      {_share(line.parted)} {what}")
            out.append(f"  |Δ log p| of a token   {_gaps(line.mean, line.p99, line.most)}")
        if live.flips.whole:
            out += ["", "live against the recording"]
            out.append(f"  argmax differs         {_share(live.flips)} {what}")
            out.append(f"  |Δ log p| of a token   {_gaps(live.mean, None, live.most)}")
        return out

    def _to_json(
        self,
        positions: Sequence[Position],
        rate: Share,
        lines: Sequence[FloorLine],
        live: LiveLine,
    ) -> dict[str, Any]:
        def engine(slot: EngineSlot | None) -> dict[str, Any] | None:
            if slot is None or slot.info is None:
                return None
            verify = slot.verified.to_json() if slot.verified is not None else None
            return {**slot.info.to_json(), "verify": verify, "dictionary": slot.dictionary}

        return {
            "ref": self._session.ref.path.name,
            "quants": list(self._session.names),
            "at": "roots" if self._session.quants else "positions",
            "positions": [str(position) for position in positions],
            "tokens": self._length,
            "self_flip_rate": share_json(rate),
            "comparisons": [line.to_json() for line in lines],
            "recording": live.to_json(),
            "engine": engine(self._slot),
            "against": engine(self._other),
            "warnings": self._preparation.warnings,
        }


def _done(k: int, n: int, seconds: float) -> str:
    left = f", {duration(seconds / k * (n - k))} left" if k else ""
    return f"{k} of {n} positions{left}"


def _share(found: Share) -> str:
    return (
        f"{found.value:7.2%}  95 % [{found.low:.2%}, {found.high:.2%}]  {found.part} of "
        f"{found.whole}"
    )


def _gaps(mean: float | None, p99: float | None, most: float | None) -> str:
    if mean is None or most is None:
        return "not known: the engine gives no log-probabilities"
    percentile = f", 99 % {p99:.2g}" if p99 is not None else ""
    return f"mean {mean:.2g}{percentile}, max {most:.2g} nat"
