"""Branches of many roots with the engines that are there: what is to be made, at what cost, and
making it.

Knows: which branches a file lacks, what an engine's speed says of the time they take.
Must not know: the screen or the terminal; how a branch is made, or a file written.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kldtui.branching import QQ, RQ, RR, Arm, Branch, Place, prefix_of, run_branch
from kldtui.engines import Finish, Token
from kldtui.errors import ContextExceeded, EngineError, InexactPrefix, KldtuiError
from kldtui.position import Position
from kldtui.review.branch_log import BranchLog
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, one_server_each

_MEASURED_TOKENS = 12
_ITS_OWN_FAULT = (ContextExceeded, InexactPrefix)
"""Errors of one prefix, after which the next one can be asked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One branch to make. prefix: how many tokens are read before its first one."""

    place: Place
    arm: Arm
    prefix: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be made. held: branches that the file has. streams: R·r that are the recorded
    stream itself, and need no server. roots: how many there are."""

    jobs: tuple[tuple[EngineSlot, Job], ...]
    roots: int
    held: int
    streams: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second, as measured: of a prefix that is read, and generated."""

    read: float
    generate: float

    def seconds(self, job: Job, length: int) -> float:
        """The most that a branch of `length` tokens takes."""
        return job.prefix / self.read + length / self.generate


@dataclass(slots=True)
class Progress:
    """How far the making is. seconds_left: as the speeds so far tell; None at first."""

    total: int
    made: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    seconds_left: float | None = None

    @property
    def rate(self) -> float | None:
        """Generated tokens a second, prefixes included in the time."""
        return self.tokens / self.seconds if self.seconds else None


def batch_arms(session: Session) -> tuple[Arm, ...]:
    """What each engine that is there contributes to the three default arms."""
    ref, quant = (session.slot_for(side, 0) is not None for side in ("ref", "quant"))
    return (*((RR, RQ) if ref else ()), *((QQ,) if quant else ()))


def make_plan(
    session: Session,
    positions: Sequence[Position],
    arms: Sequence[Arm],
    log: BranchLog,
    length: int,
) -> Plan:
    """What `log` lacks of these arms at these roots of the first quant.

    Raises KldtuiError where an arm has no engine, or `log` cannot be read.
    """
    slots: dict[Arm, EngineSlot] = {}
    for arm in arms:
        slot = session.slot_for(arm.engine, 0)
        if slot is None:
            side = "ref" if arm.engine == "ref" else "quant"
            raise KldtuiError(f"arm {arm.code}: no engine for it; give --{side}-server URL")
        slots[arm] = slot
    jobs: list[tuple[EngineSlot, Job]] = []
    held = streams = 0
    name = session.names[0]
    for position in positions:
        place = session.place(position, 0)
        prefix = len(prefix_of(session.ref, position, None, None, own_rule=False)) + 1
        for arm in arms:
            if arm == RR and session.rollout and place.starts["ref"] == place.starts["stream"]:
                streams += 1
            elif _is_made(log, place, name, arm, length):
                held += 1
            else:
                jobs.append((slots[arm], Job(place, arm, prefix)))
    return Plan(tuple(jobs), len(positions), held, streams)


def _is_made(log: BranchLog, place: Place, quant: str, arm: Arm, length: int) -> bool:
    entry = log.entry(place.position, quant, place.key(arm))
    if entry is None:
        return False
    branch = log.read(entry)
    long_enough = branch.complete or branch.stop == "context" or len(branch.tokens) >= length
    return branch.made and long_enough and branch.start_id == place.starts[arm.start]


async def measure(session: Session, plan: Plan, top_n: int) -> dict[str, Speeds]:
    """The speeds of the plan's engines, by role, on a prefix of middle length.

    Raises EngineError.
    """
    speeds: dict[str, Speeds] = {}
    for group in one_server_each(plan.jobs):
        slot = group[0][0]
        jobs = sorted((job for _, job in group), key=lambda job: job.prefix)
        for at in (len(jobs) // 2, len(jobs) // 4, 0):
            branch = session.new_branch(jobs[at].place, jobs[at].arm, slot)
            try:
                found = await _measure(slot, [*branch.prefix_ids, branch.start_id], top_n)
            except _ITS_OWN_FAULT:
                if at == 0:
                    raise
                continue
            speeds.update({each.role: found for each, _ in group})
            break
    return speeds


async def _measure(slot: EngineSlot, prompt: Sequence[int], top_n: int) -> Speeds:
    begun = time.monotonic()
    times: list[float] = []
    said: float | None = None
    async for item in slot.engine.generate(prompt, _MEASURED_TOKENS, slot.top_n(top_n)):
        if isinstance(item, Token):
            times.append(time.monotonic())
        elif isinstance(item, Finish):
            said = item.tokens_per_second
    gaps = [b - a for a, b in itertools.pairwise(times)]
    step = statistics.fmean(gaps) if gaps else 0.0
    if said:
        step = max(step, 1 / said)
    read = max((times[0] if times else time.monotonic()) - begun, 1e-6)
    return Speeds(len(prompt) / read, 1 / step if step else 1 / read)


def cost(plan: Plan, speeds: dict[str, Speeds], length: int) -> float:
    """The most seconds that the plan takes: that of the slowest server, all at once."""
    return max(
        (
            sum(speeds[slot.role].seconds(job, length) for slot, job in group)
            for group in one_server_each(plan.jobs)
        ),
        default=0.0,
    )


async def make(
    session: Session,
    plan: Plan,
    log: BranchLog,
    length: int,
    top_n: int,
    speeds: dict[str, Speeds],
    on_progress: Callable[[Progress], None],
) -> Progress:
    """Make the branches of a plan; each is in `log` once it is made.

    The jobs of one server run after each other, in stream order. Prefixes that a server cannot be
    asked for are left out, and named in `failed`. Any other error is raised after it broke one
    branch off, what arrived of which is kept; the same plan made anew goes on there.
    """
    progress = Progress(len(plan.jobs))
    begun = time.monotonic()
    total = left = sum(speeds[slot.role].seconds(job, length) for slot, job in plan.jobs)

    def tell(done: float = 0.0) -> None:
        nonlocal left
        left = max(0.0, left - done)
        progress.seconds = time.monotonic() - begun
        if total > left:
            progress.seconds_left = progress.seconds * left / (total - left)
        on_progress(progress)

    async def one_server(group: Sequence[tuple[EngineSlot, Job]]) -> None:
        for slot, job in group:
            branch = session.new_branch(job.place, job.arm, slot)
            try:
                await _fill(session, slot, branch, length, top_n, progress, tell)
            except _ITS_OWN_FAULT as error:
                progress.failed.append(f"{job.place.position} {job.arm.code}: {error}")
            except EngineError:
                if branch.tokens:
                    log.add(branch)
                raise
            else:
                log.add(branch)
                progress.made += 1
            tell(speeds[slot.role].seconds(job, length))

    tasks = [asyncio.ensure_future(one_server(group)) for group in one_server_each(plan.jobs)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return progress


async def _fill(
    session: Session,
    slot: EngineSlot,
    branch: Branch,
    length: int,
    top_n: int,
    progress: Progress,
    tell: Callable[[], None],
) -> None:
    before = session.text_before(branch)
    run = run_branch(slot.engine, branch, length, slot.top_n(top_n), before=before)
    async with contextlib.aclosing(run) as items:
        async for item in items:
            if isinstance(item, Token):
                progress.tokens += 1
                tell()
