"""`kldtui branch --roots … -o FILE`: the branches of many roots, one engine at a time.

Knows: how roots are named, what is asked before it starts and shown while it runs.
Must not know: Textual, HTTP, or how a branch is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from kldtui.branching import Arm
from kldtui.cli.engines import Preparation, tell
from kldtui.cli.progress import ProgressLine, duration, scan_here
from kldtui.errors import EngineError, KldtuiError
from kldtui.position import Position
from kldtui.review.batch import (
    Plan,
    Progress,
    Speeds,
    batch_arms,
    cost,
    make,
    make_plan,
    measure,
)
from kldtui.review.branch_log import BranchLog
from kldtui.review.session import Session
from kldtui.review.slots import one_server_each
from kldtui.roots import RootQuery, select
from kldtui.sampling import sample

_NAMED = 3


class Roots(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """`all`, a number from 1 up, or a file that is there."""

    name = "roots"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        words = str(value)
        counts = words.isdecimal() and int(words) > 0
        if not (words == "all" or counts or (words and Path(words).exists())):
            self.fail(
                f"{words!r} is neither `all`, a number from 1 up nor a file of positions that is "
                "there.",
                param,
                ctx,
            )
        return words


def chosen_roots(session: Session, roots: str) -> list[Position]:
    """`all`, a number, or a file with a position a line (what `kldtui flips` prints will do).

    The session is scanned to its end. Raises KldtuiError, also where a file has no root.
    """
    found = [session.position(int(i)) for i in select(session.index, RootQuery(quants=(0,)))]
    if roots == "all":
        return found
    if roots.isdecimal() and not Path(roots).exists():
        return sample(found, int(roots))
    named = _named_positions(Path(roots))
    known = set(found)
    strangers = [position for position in named if position not in known]
    first = ", ".join(map(str, strangers[:_NAMED]))
    if len(strangers) == len(named):
        raise KldtuiError(
            f"--roots {roots}: none of its {len(named)} positions is a root ({first}); give what "
            "kldtui flips prints of this reference and quant"
        )
    if strangers:
        tell(f"{roots}: {len(strangers)} of its positions are no roots ({first}); left out")
    return sorted(known & set(named))


def _named_positions(path: Path) -> list[Position]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise KldtuiError(
            f"--roots {path}: {reason}; give `all`, a number, or a file of positions"
        ) from None
    json_ = text.lstrip().startswith(("[", "{"))
    positions = _from_json(path, text) if json_ else _from_lines(path, text)
    if not positions:
        raise KldtuiError(
            f"--roots {path}: holds no position; give one a line, as kldtui flips prints them"
        )
    return positions


def _from_lines(path: Path, text: str) -> list[Position]:
    positions = []
    for line in text.splitlines():
        word = line.split()[0] if line.split() else "#"
        if word.startswith("#"):
            continue
        try:
            positions.append(Position.parse(word))
        except KldtuiError:
            if positions:
                raise KldtuiError(f"--roots {path}: not a position: {word!r}") from None
    return positions


def _from_json(path: Path, text: str) -> list[Position]:
    """What `kldtui flips --json` prints."""
    try:
        return [Position(int(row["chunk"]), int(row["t"])) for row in json.loads(text)]
    except (ValueError, KeyError, TypeError):
        raise KldtuiError(f"--roots {path}: JSON, but no list of positions") from None


class Batch:
    """One run of the command."""

    def __init__(
        self,
        session: Session,
        positions: Sequence[Position],
        arms: Sequence[Arm],
        out: Path,
        *,
        length: int,
        top_n: int,
        verifies: bool,
        yes: bool,
    ) -> None:
        self._session, self._positions = session, positions
        self._length, self._top_n = length, top_n
        self._verifies, self._yes = verifies, yes
        self._arms = arms or batch_arms(session)
        self._log = BranchLog.open(out, session.ref, session.names, missing_ok=True)
        for warning in self._log.warnings:
            tell(warning)

    async def run(self) -> None:
        """Raises KldtuiError; what was made until then is in the file."""
        session = self._session
        plan = make_plan(session, self._positions, self._arms, self._log, self._length)
        codes = " ".join(arm.code for arm in self._arms)
        parts = [f"{plan.roots} roots, arms {codes}: {len(plan.jobs)} branches to make"]
        if plan.held:
            parts.append(f"{plan.held} are in {self._log.path.name} already")
        if plan.streams:
            parts.append(f"{plan.streams} are the recorded stream itself and need no server")
        tell("; ".join(parts))
        if not plan.jobs:
            return
        try:
            speeds = await self._prepare(plan)
            if not self._agreed(plan, speeds):
                raise KldtuiError("nothing was made")
            await self._make(plan, speeds)
        finally:
            await session.close_engines()

    async def _prepare(self, plan: Plan) -> dict[str, Speeds]:
        preparation = Preparation(self._session, self._top_n)
        slots = {slot.role: slot for slot, _ in plan.jobs}
        for slot in slots.values():
            await preparation.ready(slot)
            if self._verifies:
                await preparation.verified(slot, None, insist=True)
        await preparation.compared()
        return await measure(self._session, plan, self._top_n)

    def _agreed(self, plan: Plan, speeds: dict[str, Speeds]) -> bool:
        """Say what it costs, and ask where somebody is there to answer."""
        for group in one_server_each(plan.jobs):
            slot, found = group[0][0], speeds[group[0][0].role]
            prefix = sum(job.prefix for _, job in group)
            most = len(group) * self._length
            tell(
                f"{slot.role}: {prefix:,} tokens of prefixes to read at {found.read:,.0f}/s, "
                f"{duration(prefix / found.read)}; at most {most:,} tokens to generate at "
                f"{found.generate:,.1f}/s, {duration(most / found.generate)}"
            )
        whole = duration(cost(plan, speeds, self._length))
        tell(
            f"about {whole} in all if each runs to its full length, more where servers share cores"
        )
        if self._yes or not _at_terminal():
            return True
        return bool(click.confirm("kldtui: make them?", default=True, err=True))

    async def _make(self, plan: Plan, speeds: dict[str, Speeds]) -> None:
        out = self._log.path
        last: list[Progress] = []

        with ProgressLine() as line:

            def on_progress(progress: Progress) -> None:
                last[:] = [progress]
                line(partial(_words, progress))

            try:
                done = await make(
                    self._session, plan, self._log, self._length, self._top_n, speeds, on_progress
                )
            except EngineError as error:
                made = last[0].made if last else 0
                raise EngineError(
                    f"{error}; {made} of {len(plan.jobs)} branches are in {out}, and the same "
                    "command makes the rest"
                ) from None
        tell(
            f"{done.made} branches added to {out}: {done.tokens:,} tokens, {duration(done.seconds)}"
        )
        if done.failed:
            for words in done.failed[:_NAMED]:
                tell(words)
            raise KldtuiError(f"{len(done.failed)} branches cannot be made with this engine")


def _at_terminal() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _words(progress: Progress) -> str:
    rate = f", {progress.rate:,.1f} tok/s" if progress.rate else ""
    left = progress.seconds_left
    remaining = f", {duration(left)} left" if left is not None else ""
    return f"{progress.made} of {progress.total} branches{rate}{remaining}"


def scan(session: Session) -> None:
    """Scan to the end, with progress on a terminal."""
    scan_here(session.index)
    session.settle_thresholds()
    session.count_anew()


def parse_arms(given: Sequence[str]) -> list[Arm]:
    """`R.r,R.q`, perhaps several times. Raises KldtuiError."""
    codes = [code for one in given for code in one.split(",") if code.strip()]
    arms = list(dict.fromkeys(Arm.parse(code) for code in codes))
    for arm in arms:
        if arm.start not in ("ref", "quant"):
            raise KldtuiError(
                f"arm {arm.code}: of a root there are R.r, Q.q, R.q and Q.r; others are made on "
                "screen"
            )
    return arms
