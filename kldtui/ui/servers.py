"""The servers of a review on its screen: connecting them, and verifying whether they fit.

Knows: the order of these steps, and how to run them beside the screen.
Must not know: how branches are made, how anything is drawn; it only posts messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from textual.screen import Screen
from textual.worker import Worker

from kldtui.branching import Place
from kldtui.errors import (
    ContextExceeded,
    EngineError,
    EngineRefused,
    InexactPrefix,
    KldtuiError,
    UnusableEngine,
)
from kldtui.position import Position
from kldtui.review.preparing import check, compare_pair, connect, doubts
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.ui.messages import EnginesChanged, Notice, TextLearnt
from kldtui.ui.text import duration

_STILL_GOOD = (ContextExceeded, EngineRefused, InexactPrefix, UnusableEngine)
"""Errors after which the server can be asked again as it is."""


class Servers:
    """All work runs in workers of their own groups, cancellable. top_n: candidates wanted."""

    def __init__(self, session: Session, screen: Screen[Any], top_n: int) -> None:
        self._session, self._screen, self.top_n = session, screen, top_n
        self._connecting: dict[str, Worker[None]] = {}
        self._activities: dict[str, str] = {}

    def _start(self, work: Coroutine[Any, Any, None], group: str) -> Worker[None]:
        return self._screen.run_worker(
            work, group=group, exclusive=True, exit_on_error=False, name=group
        )

    def _say(self, text: str, severity: str = "information") -> None:
        self._screen.post_message(Notice(text, severity))

    @property
    def activity(self) -> str:
        """What is under way, the latest of several; "" where nothing is."""
        return next(reversed(self._activities.values()), "")

    @property
    def prepares(self) -> bool:
        """Whether servers are on their way that the session does not know yet."""
        return "prepare" in self._activities

    def prepare(self, what: str) -> None:
        """Show how servers are brought up from outside; without words they are there."""
        self._doing("prepare", what)

    def _doing(self, who: str, what: str = "") -> None:
        """Show what one of those that work beside each other does; without words it is done."""
        self._activities.pop(who, None)
        if what:
            self._activities[who] = what
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
                self._doing(slot.role, f"asking the {slot.role} server for its vocabulary")
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
            self._doing(slot.role)

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
                continue
            if slot.verified is not None and slot.verified.passed:
                good.append(f"{slot.role} {slot.verified.own or 0:.2f}")
            elif slot.verified is not None:
                self._say(f"{slot.role}: {slot.verified.detail}", "error")
        if good:
            words = "verified against their recordings" if len(good) > 1 else "verified"
            self._say(f"{words}: mean |Δ log p| {', '.join(good)} nat; ? says more")

    async def _verify(self, slot: EngineSlot, position: Position | None, quant: int) -> None:
        self._doing(slot.role, f"verifying the {slot.role} server")
        try:
            await check(self._session, slot, position, quant)
        finally:
            self._doing(slot.role)

    async def _compare(self, quant: int) -> None:
        """Hold the two engines' dictionaries against each other, where they are of two kinds."""
        try:
            for line in await compare_pair(self._session, quant, partial(self._doing, "pair")):
                self._say(f"the two engines have two dictionaries: {line}", "warning")
        except EngineError as error:
            self._say(f"the engines' dictionaries cannot be compared: {error}", "warning")
        finally:
            self._doing("pair")

    async def _usable(self, place: Place, slots: Sequence[EngineSlot]) -> set[str]:
        """The roles of those servers that can be asked, once they are connected and verified."""
        each = {slot.role: slot for slot in slots}
        fit = await asyncio.gather(*(self._fit(slot, place) for slot in each.values()))
        usable = {role for role, good in zip(each, fit, strict=True) if good}
        if len(usable) > 1:
            await self._compare(place.quant)
        return usable
