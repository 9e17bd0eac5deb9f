"""The desk where branches are made: running them on servers that fit, going on, cancelling.

Knows: the order of these steps, and how to run them beside the screen.
Must not know: how anything is drawn; it only posts messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from textual.screen import Screen
from textual.worker import Worker

from kldtui.branching import Arm, Branch, Place, is_recorded, run_branch
from kldtui.errors import (
    EngineError,
    InexactPrefix,
    KldtuiError,
    LabelFileError,
)
from kldtui.facts import RootFacts
from kldtui.floor import run_floor
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, one_server_each
from kldtui.ui.messages import BranchesChanged, EnginesChanged
from kldtui.ui.servers import Servers

FLUSH_SECONDS = 0.08
BEAT_SECONDS = 1.0
SLICE_SECONDS = 0.002
"""The longest that tokens are taken in a row before keys and drawing get their turn, as long."""


class Wanted(NamedTuple):
    """A branch that is generated, by `n` tokens more."""

    branch: Branch
    n: int


Job = tuple[EngineSlot, Wanted]


class Desk(Servers):
    """One a screen: its servers, and what is made with them."""

    def __init__(self, session: Session, screen: Screen[Any], length: int, top_n: int) -> None:
        super().__init__(session, screen, top_n)
        self.length = length
        session.branch_tokens = length
        self._worker: Worker[None] | None = None
        self._root: tuple[Position, int] | None = None
        self._next: list[tuple[Place, Sequence[Arm]]] = []
        self._preparing: tuple[Place, Sequence[Arm]] | None = None
        self._begun: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._queued: set[str] = set()

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

    def awaits(self, place: Place, arm: Arm) -> bool:
        """Whether an arm's branch was asked for, and has not begun: its server is looked at, or
        others come first."""
        asked = self._next if self._preparing is None else [self._preparing, *self._next]
        return self.busy and any(
            (where.position, where.quant) == (place.position, place.quant)
            and place.key(arm) in {where.key(each) for each in arms}
            for where, arms in asked
        )

    def verify(self, position: Position | None, quant: int) -> None:
        """Check all servers against their recordings, anew."""
        self._root = None
        self._worker = self._start(self._verify_all(position, quant), "branch")

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
        self._doing("floor", "running the reference against itself")
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
            self._doing("floor")
            name = self._session.quants[facts.quant].name
            self._screen.post_message(BranchesChanged(facts.position, name))

    # ── branching ────────────────────────────────────────────────────────────────────────────

    def branch(self, place: Place, arms: Sequence[Arm], *, anew: bool = False) -> None:
        """Make these arms' branches at a place, but those that are there; those that a person
        stopped go on, those that broke off begin anew, unless others begin inside them; with `anew`
        all begin anew.

        What runs at the same root goes on, and these follow; what runs at another one is stopped.
        """
        root = (place.position, place.quant)
        if self.busy and self._root == root and not anew:
            self._next.append((place, arms))
            self._screen.post_message(EnginesChanged())
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
        borrowed = False
        for arm in arms:
            old = None if anew else held.get(place.key(arm))
            slot = session.slot_for(arm.engine, place.quant)
            if slot is None or (old is not None and (old.made or _is_long(old, self.length))):
                continue
            if old is not None and old.ids and _is_held(old, held):
                wanted.append((slot, arm, old))
            elif anew or session.borrow(place, arm) is None:
                wanted.append((slot, arm, None))
            else:
                borrowed = True
        if not wanted:
            if not borrowed and not any(place.key(arm) in held for arm in arms):
                self._say(
                    "a server is being prepared: the branches follow when it is there"
                    if self.prepares
                    else "no server: press c to connect one"
                )
            self._screen.post_message(EnginesChanged())
            return
        self._preparing = (place, [arm for _, arm, _ in wanted])
        try:
            usable = await self._usable(place, [slot for slot, _, _ in wanted])
        finally:
            self._preparing = None
            self._screen.post_message(EnginesChanged())
        jobs: list[Job] = []
        for slot, arm, old in wanted:
            if slot.role not in usable:
                continue
            if old is not None:
                if self._goes_on(slot, old):
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
        whys: dict[str, None] = {}
        for arm in arms:
            branch = held.get(place.key(arm))
            slot = self._session.slot_for(arm.engine, place.quant)
            if branch is None:
                continue
            if branch.stop == "eog":
                whys[f"{arm.code} came to its end"] = None
            elif is_recorded(branch):
                grown += (by := self._session.lengthen(branch))
                if not by:
                    whys[f"{arm.code} is recorded no further"] = None
            elif slot is None:
                whys[f"{arm.code} has no server (c connects one)"] = None
            elif await self._fit(slot, place) and self._goes_on(slot, branch):
                jobs.append((slot, Wanted(branch, self.length)))
        if not jobs and not grown:
            self._say(f"nothing to continue: {', '.join(whys) or 'b makes branches first'}")
        await self._run(place, jobs)

    def _goes_on(self, slot: EngineSlot, branch: Branch) -> bool:
        """Whether a server may continue a branch, which is one model's: where that was verified,
        any server that is, else one with a model of the same name. If not, it says so."""
        if branch.verify is not None and branch.verify.get("verdict") == "ok":
            good = slot.verified is not None and slot.verified.passed
            why = f"was verified, and the {slot.role} server is not"
        else:
            good = slot.info is not None and branch.engine.get("model") == slot.info.model
            why = f"was made by another model than the {slot.role} server has"
        if not good:
            self._say(f"{branch.arm.code} {why}: B begins it anew", "warning")
        return good

    async def _run(self, place: Place, jobs: Sequence[Job]) -> None:
        """Both engines at once; the arms of one server after each other."""
        changed = self._flusher(place)
        self._queued |= {job.branch.id for _, job in jobs}
        beat = asyncio.ensure_future(self._beat(changed))
        tasks = [
            asyncio.ensure_future(self._one_server(group, changed))
            for group in one_server_each(jobs)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:  # none goes on unseen, whatever the other one met
            beat.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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


def _is_held(branch: Branch, beside: Mapping[str, Branch]) -> bool:
    """Whether what there is of a branch must stay: a person stopped it, or others begin inside."""
    inside = (
        each.parent is not None and each.parent.branch == branch.id for each in beside.values()
    )
    return branch.stop == "cancelled" or any(inside)


def _is_long(branch: Branch, length: int) -> bool:
    """Whether it ended, in whatever way, beyond what was asked for at first."""
    return len(branch.ids) >= length


def _offer(branch: Branch, error: EngineError) -> str:
    """What may be tried after an error."""
    if not isinstance(error, InexactPrefix):
        return " (+ goes on)" if branch.ids else " (b tries again)"
    chunk, t = branch.position.chunk, error.nearest
    if t is None or not 0 < t <= branch.position.t:
        return ""
    return f" (: goes to {Position(chunk, t)}, the nearest place before that it can be asked at)"
