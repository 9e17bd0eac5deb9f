"""The desk where branches are made: connecting, verifying, running, cancelling.

Knows: the order of these steps, and how to run them beside the screen.
Must not know: how anything is drawn; it only posts messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from textual.screen import Screen
from textual.worker import Worker

from kldtui.branching import Arm, Branch, Place, is_recorded, run_branch
from kldtui.errors import (
    ContextExceeded,
    EngineError,
    EngineRefused,
    InexactPrefix,
    KldtuiError,
    LabelFileError,
    UnusableEngine,
)
from kldtui.facts import RootFacts
from kldtui.floor import run_floor
from kldtui.position import Position
from kldtui.review.preparing import check, compare_pair, connect, doubts
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, one_server_each
from kldtui.ui.messages import BranchesChanged, EnginesChanged, Notice, TextLearnt
from kldtui.ui.text import duration

FLUSH_SECONDS = 0.08
BEAT_SECONDS = 1.0
SLICE_SECONDS = 0.002
"""The longest that tokens are taken in a row before keys and drawing get their turn, as long."""
_STILL_GOOD = (ContextExceeded, EngineRefused, InexactPrefix, UnusableEngine)
"""Errors after which the server can be asked again as it is."""


class Wanted(NamedTuple):
    """A branch that is generated, by `n` tokens more."""

    branch: Branch
    n: int


Job = tuple[EngineSlot, Wanted]


class Desk:
    """One a screen. All of its work runs in workers of their own groups, cancellable."""

    def __init__(self, session: Session, screen: Screen[Any], length: int, top_n: int) -> None:
        self._session, self._screen = session, screen
        self.length, self.top_n = length, top_n
        session.branch_tokens = length
        self._worker: Worker[None] | None = None
        self._connecting: dict[str, Worker[None]] = {}
        self._root: tuple[Position, int] | None = None
        self._next: list[tuple[Place, Sequence[Arm]]] = []
        self._begun: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._queued: set[str] = set()
        self.activity = ""

    @property
    def busy(self) -> bool:
        """Whether a branch or a verification is under way."""
        return self._worker is not None and not self._worker.is_finished

    def elapsed(self, branch: Branch) -> float | None:
        """For how many seconds a branch has been running by now; None if it is not."""
        begun = self._begun.get(branch.id)
        return None if begun is None else time.monotonic() - begun

    def silence(self, branch: Branch) -> float:
        """For how many seconds a running branch has had no token."""
        heard = self._heard.get(branch.id)
        return 0.0 if heard is None else time.monotonic() - heard

    def queued(self, branch: Branch) -> bool:
        """Whether a branch waits for another one of the same server."""
        return branch.id in self._queued

    def _start(self, work: Coroutine[Any, Any, None], group: str) -> Worker[None]:
        return self._screen.run_worker(
            work, group=group, exclusive=True, exit_on_error=False, name=group
        )

    def _say(self, text: str, severity: str = "information") -> None:
        self._screen.post_message(Notice(text, severity))

    def _doing(self, activity: str) -> None:
        self.activity = activity
        self._screen.post_message(EnginesChanged())

    # ── connecting ───────────────────────────────────────────────────────────────────────────

    def replace(self, role: str, url: str, build: str = "") -> None:
        """Connect another server in a role. Raises EngineError for an unusable URL."""
        before = self._session.slots.get(role)
        slot = self._session.add_server(role, url, build)
        self._connecting[role] = self._start(self._connect(slot, before), f"connect-{role}")

    def connect_all(self) -> None:
        """Connect every server that is not ready."""
        for slot in self._session.slots.values():
            if slot.state not in ("ready", "connecting", "loading"):
                self._connecting[slot.role] = self._start(
                    self._connect(slot, None), f"connect-{slot.role}"
                )

    def stop_connecting(self) -> bool:
        """Give up on servers that do not answer yet; false if none was waited for."""
        waiting = [worker for worker in self._connecting.values() if not worker.is_finished]
        for worker in waiting:
            worker.cancel()
        return bool(waiting)

    async def _connect(self, slot: EngineSlot, replaced: EngineSlot | None) -> None:
        if replaced is not None:
            await replaced.engine.close()
        slot.state, slot.words = "connecting", ""
        self._screen.post_message(EnginesChanged())

        def waiting(seconds: float) -> None:
            slot.state, slot.words = "loading", f"loading its model, {duration(seconds)}"
            self._screen.post_message(EnginesChanged())

        try:
            await connect(slot, waiting)
            slot.state, slot.words = "ready", ""
            if not self._session.vocab:
                self._doing(f"asking the {slot.role} server for its vocabulary")
                if await self._session.learn_text(slot):
                    self._screen.post_message(TextLearnt())
            for warning in doubts(self._session, slot):
                self._say(f"{slot.role} server: {warning}", "warning")
            if slot.falls_short(self.top_n):
                limits = "; ".join(slot.limits(self.top_n))
                self._say(f"{slot.role} server cannot do all: {limits}", "warning")
        except KldtuiError as error:
            slot.state, slot.words = "failed", str(error)
            self._say(f"{slot.role} server: {error}", "error")
        except asyncio.CancelledError:
            slot.state, slot.words = "waiting", "stopped; c connects"
            raise
        finally:
            self._doing("")

    async def _ready(self, slot: EngineSlot) -> None:
        """Connected, or an EngineError that has been said already."""
        while slot.state in ("connecting", "loading") and not self._idle(slot.role):  # noqa: ASYNC110 - cancelling this must not cancel that
            await asyncio.sleep(0.05)
        if slot.state != "ready" or slot.info is None:
            await self._connect(slot, None)
        if slot.info is None or slot.state != "ready":
            raise EngineError(f"{slot.role} server: {slot.words}")

    def _idle(self, role: str) -> bool:
        worker = self._connecting.get(role)
        return worker is None or worker.is_finished

    async def _fit(self, slot: EngineSlot, place: Place) -> bool:
        """Connect and verify a server; False where it is of no use, which has been said."""
        try:
            await self._ready(slot)
        except EngineError:
            return False
        try:
            if slot.verified is None:
                await self._verify(slot, place.position, place.quant)
                if slot.verified is not None and not slot.verified.passed:
                    self._say(f"{slot.role} server: {slot.verified.detail}", "error")
        except KldtuiError as error:
            self._broke(slot, error)
            self._say(f"{slot.role} server: {error}", "error")
            return False
        return True

    @staticmethod
    def _broke(slot: EngineSlot, error: KldtuiError) -> None:
        if not isinstance(error, _STILL_GOOD):
            slot.state, slot.words = "failed", str(error)

    # ── verifying ────────────────────────────────────────────────────────────────────────────

    def verify(self, position: Position | None, quant: int) -> None:
        """Check all servers against their recordings, anew."""
        self._root = None
        self._worker = self._start(self._verify_all(position, quant), "branch")

    async def _verify_all(self, position: Position | None, quant: int) -> None:
        found = (self._session.slot_for(side, quant) for side in ("ref", "quant"))
        slots = [slot for slot in found if slot is not None]
        if not slots:
            self._say("no server to verify: press c to connect one", "warning")
        good: list[str] = []
        for slot in slots:
            try:
                await self._ready(slot)
            except EngineError:
                continue
            try:
                await self._verify(slot, position, quant)
            except KldtuiError as error:
                self._broke(slot, error)
                self._say(f"{slot.role} server: {error}", "error")
            if slot.verified is not None and slot.verified.passed:
                good.append(f"{slot.role} {slot.verified.own or 0:.2f}")
            elif slot.verified is not None:
                self._say(f"{slot.role}: {slot.verified.detail}", "error")
        if good:
            words = "verified against their recordings" if len(good) > 1 else "verified"
            self._say(f"{words}: mean |Δ log p| {', '.join(good)} nat; ? says more")

    async def _verify(self, slot: EngineSlot, position: Position | None, quant: int) -> None:
        self._doing(f"verifying the {slot.role} server")
        try:
            await check(self._session, slot, position, quant)
        finally:
            self._doing("")

    async def _compare(self, quant: int) -> None:
        """Hold the two engines' dictionaries against each other, where they are of two kinds."""
        try:
            for line in await compare_pair(self._session, quant, self._doing):
                self._say(f"the two engines have two dictionaries: {line}", "warning")
        except EngineError as error:
            self._say(f"the engines' dictionaries cannot be compared: {error}", "warning")
        finally:
            self._doing("")

    # ── the floor ────────────────────────────────────────────────────────────────────────────

    def floor(self, facts: RootFacts) -> None:
        """Run the reference against itself at a root."""
        self._root = None
        self._worker = self._start(self._floor(facts), "branch")

    async def _floor(self, facts: RootFacts) -> None:
        slot = self._session.slots.get("ref")
        if slot is None:
            self._say("no reference server: press c to connect one", "warning")
            return
        try:
            await self._ready(slot)
        except EngineError:
            return
        self._doing("running the reference against itself")
        try:
            found = await run_floor(
                slot.engine,
                self._session.prefix(facts.position, slot),
                self.length,
                slot.top_n(self.top_n),
                recorded=(facts.ref_id, facts.ref_p_ref),
            )
            runs = found.self_runs
            self._session.keep_self_run(facts, runs)
            other = (
                "" if runs.says == facts.ref_id else "; live it says another token than recorded"
            )
            self._say(
                f"{facts.position}: {runs.words}{other}",
                "information" if runs.agrees and not other else "warning",
            )
        except LabelFileError as error:
            self._say(str(error), "error")
        except KldtuiError as error:
            self._broke(slot, error)
            self._say(str(error), "error")
        finally:
            self._doing("")
            name = self._session.quants[facts.quant].name
            self._screen.post_message(BranchesChanged(facts.position, name))

    # ── branching ────────────────────────────────────────────────────────────────────────────

    def branch(self, place: Place, arms: Sequence[Arm], *, anew: bool = False) -> None:
        """Make these arms' branches at a place, but those that are there; those that a person
        stopped go on, those that broke off begin anew, as all do with `anew`.

        What runs at the same root goes on, and these follow; what runs at another one is stopped.
        """
        root = (place.position, place.quant)
        if self.busy and self._root == root and not anew:
            self._next.append((place, arms))
            return
        self._begin(place, self._branch(place, arms, anew))

    def longer(self, place: Place, arms: Sequence[Arm]) -> None:
        """Continue these arms' branches by as many tokens again."""
        self._begin(place, self._longer(place, arms))

    def _begin(self, place: Place, work: Coroutine[Any, Any, None]) -> None:
        """Do this at a root, and then what else is asked for there meanwhile."""
        self._root, self._next = (place.position, place.quant), []
        self._worker = self._start(self._and_next(work), "branch")

    def cancel(self) -> bool:
        """Stop what runs; false if nothing did. What arrived is kept."""
        if not self.busy or self._worker is None:
            return False
        self._next = []
        self._worker.cancel()
        return True

    def leave(self, facts: RootFacts) -> None:
        """Stop what still runs for a root: it has been judged."""
        if self._root == (facts.position, facts.quant):
            self.cancel()

    async def _and_next(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        while self._next:
            await self._branch(*self._next.pop(0), False)

    async def _branch(self, place: Place, arms: Sequence[Arm], anew: bool) -> None:
        session = self._session
        held = session.recall(place.position, place.quant)
        wanted: list[tuple[EngineSlot, Arm, Branch | None]] = []
        for arm in arms:
            old = None if anew else held.get(place.key(arm))
            slot = session.slot_for(arm.engine, place.quant)
            if slot is None or (old is not None and (old.made or _is_long(old, self.length))):
                continue
            if old is not None and old.stop == "cancelled" and old.ids:
                wanted.append((slot, arm, old))
            elif anew or session.borrow(place, arm) is None:
                wanted.append((slot, arm, None))
        if not wanted:
            if not any(place.key(arm) in held for arm in arms):
                self._say("no server: press c to connect one", "warning")
            self._screen.post_message(EnginesChanged())
            return
        slots = {slot.role: slot for slot, _, _ in wanted}.values()
        fit = await asyncio.gather(*(self._fit(slot, place) for slot in slots))
        usable = {slot.role for slot, good in zip(slots, fit, strict=True) if good}
        if len(usable) > 1:
            await self._compare(place.quant)
        jobs: list[Job] = []
        for slot, arm, old in wanted:
            if slot.role not in usable:
                continue
            if old is not None:
                jobs.append((slot, Wanted(old, self.length - len(old.ids))))
                continue
            try:
                branch = session.new_branch(place, arm, slot)
            except KldtuiError as error:
                self._say(str(error), "error")
                continue
            session.shelf.drop(place.position, branch.quant, branch.key)
            session.remember(branch)
            jobs.append((slot, Wanted(branch, self.length)))
        await self._run(place, jobs)

    async def _longer(self, place: Place, arms: Sequence[Arm]) -> None:
        held = self._session.recall(place.position, place.quant)
        jobs: list[Job] = []
        grown = 0
        for arm in arms:
            branch = held.get(place.key(arm))
            slot = self._session.slot_for(arm.engine, place.quant)
            if branch is None or branch.stop == "eog":
                continue
            if is_recorded(branch):
                grown += self._session.lengthen(branch)
            elif slot is not None and await self._fit(slot, place):
                jobs.append((slot, Wanted(branch, self.length)))
        if not jobs and not grown:
            self._say(
                "nothing to continue here: the branches or the chunk ended, or no server is there"
            )
        await self._run(place, jobs)

    async def _run(self, place: Place, jobs: Sequence[Job]) -> None:
        """Both engines at once; the arms of one server after each other."""
        changed = self._flusher(place)
        self._queued |= {job.branch.id for _, job in jobs}
        beat = asyncio.ensure_future(self._beat(changed))
        try:
            await asyncio.gather(
                *(self._one_server(group, changed) for group in one_server_each(jobs))
            )
        finally:
            beat.cancel()
            for _, (branch, _) in jobs:
                self._queued.discard(branch.id)
                if branch.stop is None:
                    branch.end("cancelled")
                self._session.keep_grown(branch)
            changed(True)
            self._screen.post_message(EnginesChanged())

    async def _beat(self, changed: Callable[[bool], None]) -> None:
        """Show that time passes, also where no token comes for a minute."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            changed(True)

    def _flusher(self, place: Place) -> Callable[[bool], None]:
        quant = self._session.quants[place.quant].name
        last = 0.0

        def changed(now: bool = False) -> None:
            nonlocal last
            if now or time.monotonic() - last >= FLUSH_SECONDS:
                last = time.monotonic()
                self._screen.post_message(BranchesChanged(place.position, quant))

        return changed

    async def _one_server(self, jobs: Sequence[Job], changed: Callable[[bool], None]) -> None:
        for slot, (branch, n) in jobs:
            self._queued.discard(branch.id)
            self._begun[branch.id] = self._heard[branch.id] = time.monotonic()
            try:
                await self._one(slot, branch, n, changed)
            except EngineError as error:
                self._say(f"{branch.arm.code}: {error}{_offer(branch, error)}", "error")
                self._broke(slot, error)
            finally:
                self._begun.pop(branch.id, None)
                self._heard.pop(branch.id, None)
            changed(True)

    async def _one(
        self, slot: EngineSlot, branch: Branch, n: int, changed: Callable[[bool], None]
    ) -> None:
        before = self._session.text_before(branch)
        top_n = slot.top_n(self.top_n)
        run = run_branch(slot.engine, branch, n, top_n, before=before)
        async with contextlib.aclosing(run) as items:
            turn = time.monotonic()
            async for _ in items:
                self._heard[branch.id] = time.monotonic()
                changed(False)
                if time.monotonic() - turn > SLICE_SECONDS:
                    await asyncio.sleep(SLICE_SECONDS)
                    turn = time.monotonic()


def _is_long(branch: Branch, length: int) -> bool:
    """Whether it was stopped while it grew beyond what was asked for at first."""
    return branch.stop == "cancelled" and len(branch.ids) >= length


def _offer(branch: Branch, error: EngineError) -> str:
    """What may be tried after an error."""
    if not isinstance(error, InexactPrefix):
        return " (b tries again)"
    chunk, t = branch.position.chunk, error.nearest
    if t is None or not 0 < t <= branch.position.t:
        return ""
    return f" (: goes to {Position(chunk, t)}, the nearest place before that it can be asked at)"
