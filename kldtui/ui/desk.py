"""The desk where branches are made: connecting, verifying, running, cancelling.

Knows: the order of these steps, and how to run them beside the screen.
Must not know: how anything is drawn; it only posts messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from textual.screen import Screen
from textual.worker import Worker

from kldtui.branching import Arm, Branch, bos_warning, run_branch
from kldtui.engines.base import wait_ready
from kldtui.errors import EngineError, KldtuiError
from kldtui.facts import RootFacts
from kldtui.floor import run_against_itself
from kldtui.position import Position
from kldtui.session import EngineSlot, Session
from kldtui.ui.messages import BranchesChanged, EnginesChanged, Notice, TextLearnt
from kldtui.ui.text import duration
from kldtui.verify import verify

FLUSH_SECONDS = 0.08
MAIN_ARMS = (Arm("ref", "ref"), Arm("quant", "quant"))
OTHER_ARMS = (Arm("ref", "quant"), Arm("quant", "ref"))


class Desk:
    """One a screen. All of its work runs in workers of their own groups, cancellable."""

    def __init__(self, session: Session, screen: Screen[Any], length: int, top_n: int) -> None:
        self._session, self._screen = session, screen
        self.length, self.top_n = length, top_n
        self._worker: Worker[None] | None = None
        self._wanted: tuple[Position, int, tuple[str, ...]] | None = None
        self.activity = ""

    @property
    def busy(self) -> bool:
        """Whether a branch or a verification is under way."""
        return self._worker is not None and not self._worker.is_finished

    def _start(self, work: Coroutine[Any, Any, None], group: str) -> Worker[None]:
        return self._screen.run_worker(
            work, group=group, exclusive=True, exit_on_error=False, name=group
        )

    def _say(self, text: str, severity: str = "information") -> None:
        self._screen.post_message(Notice(text, severity))

    # ── connecting ───────────────────────────────────────────────────────────────────────────

    def replace(self, role: str, url: str, build: str = "") -> None:
        """Connect another server in a role. Raises EngineError for an unusable URL."""
        before = self._session.slots.get(role)
        slot = self._session.add_server(role, url, build)
        self._start(self._connect(slot, before), f"connect-{role}")

    def connect_all(self) -> None:
        """Connect every server that is not ready."""
        for slot in self._session.slots.values():
            if slot.state not in ("ready", "connecting", "loading"):
                self._start(self._connect(slot, None), f"connect-{slot.role}")

    async def _connect(self, slot: EngineSlot, replaced: EngineSlot | None) -> None:
        if replaced is not None:
            await replaced.engine.close()
        slot.state, slot.words, slot.verified = "connecting", "", None
        self._screen.post_message(EnginesChanged())

        def waiting(seconds: float) -> None:
            slot.state, slot.words = "loading", f"loading its model, {duration(seconds)}"
            self._screen.post_message(EnginesChanged())

        try:
            slot.info = await wait_ready(slot.engine, waiting)
            slot.state, slot.words = "ready", ""
            if not self._session.vocab:
                self.activity = f"asking the {slot.role} server for its vocabulary"
                self._screen.post_message(EnginesChanged())
                if await self._session.learn_text(slot):
                    self._screen.post_message(TextLearnt())
            doubt = bos_warning(self._session.ref, slot.info.add_bos, slot.info.bos_id)
            for warning in (*slot.info.warnings, *([doubt] if doubt else [])):
                self._say(f"{slot.role} server: {warning}", "warning")
        except KldtuiError as error:
            slot.state, slot.words = "failed", str(error)
            self._say(f"{slot.role} server: {error}", "error")
        except asyncio.CancelledError:
            slot.state = "waiting"
            raise
        finally:
            self.activity = ""
            self._screen.post_message(EnginesChanged())

    async def _ready(self, slot: EngineSlot) -> None:
        if slot.state != "ready" or slot.info is None:
            await self._connect(slot, None)
        if slot.info is None or slot.state != "ready":
            raise EngineError(f"{slot.role} server: {slot.words}")

    # ── verifying ────────────────────────────────────────────────────────────────────────────

    def verify(self, facts: RootFacts | None, quant: int) -> None:
        """Check all servers against their recordings, anew."""
        self._worker = self._start(self._verify_all(facts, quant), "branch")

    async def _verify_all(self, facts: RootFacts | None, quant: int) -> None:
        slots = self._slots(quant)
        if not slots:
            self._say("no server to verify: press c to connect one", "warning")
            return
        try:
            for slot in slots:
                await self._ready(slot)
                await self._verify(slot, facts, quant)
                if slot.verified is not None:
                    self._say(
                        f"{slot.role}: {slot.verified.detail}",
                        "information" if slot.verified.passed else "error",
                    )
        except KldtuiError as error:
            self._say(str(error), "error")

    def _slots(self, quant: int) -> list[EngineSlot]:
        found = (self._session.slot_for(side, quant) for side in ("ref", "quant"))
        return list({slot.role: slot for slot in found if slot is not None}.values())

    async def _verify(self, slot: EngineSlot, facts: RootFacts | None, quant: int) -> None:
        session = self._session
        own, other = session.ref, None
        if session.quants:
            other = session.quants[quant].recording
        if slot.role != "ref" and session.quants:
            number = session.names.index(slot.role)
            own, other = session.quants[number].recording, session.ref
        self.activity = f"verifying the {slot.role} server"
        self._screen.post_message(EnginesChanged())
        try:
            slot.verified = await verify(
                slot.engine,
                own,
                other,
                session.index,
                facts.position if facts is not None else None,
                "ref" if slot.role == "ref" else "quant",
            )
        finally:
            self.activity = ""
            self._screen.post_message(EnginesChanged())

    def floor(self, facts: RootFacts) -> None:
        """Run the reference against itself at a root."""
        self._worker = self._start(self._floor(facts), "branch")

    async def _floor(self, facts: RootFacts) -> None:
        slot = self._session.slots.get("ref")
        if slot is None:
            self._say("no reference server: press c to connect one", "warning")
            return
        self.activity = "running the reference against itself"
        try:
            await self._ready(slot)
            branch = self._session.new_branch(facts, MAIN_ARMS[0], slot)
            prefix = [*branch.prefix_ids, branch.start_id]
            runs = await run_against_itself(slot.engine, prefix, self.length, self.top_n)
            self._session.self_runs[facts.position] = runs
            self._say(
                f"{facts.position}: {runs.words}", "information" if runs.agrees else "warning"
            )
        except KldtuiError as error:
            self._say(str(error), "error")
        finally:
            self.activity = ""
            self._screen.post_message(EnginesChanged())

    # ── branching ────────────────────────────────────────────────────────────────────────────

    def branch(self, facts: RootFacts, arms: Sequence[Arm], *, anew: bool = False) -> None:
        """Make these arms' branches at a root, but those that are there and were not stopped."""
        wanted = (facts.position, facts.quant, tuple(arm.code for arm in arms))
        if self.busy and wanted == self._wanted and not anew:
            return
        self._wanted = wanted
        self._worker = self._start(self._branch(facts, arms, anew), "branch")

    def longer(self, facts: RootFacts, arms: Sequence[Arm]) -> None:
        """Continue these arms' branches by as many tokens again."""
        self._worker = self._start(self._longer(facts, arms), "branch")

    def cancel(self) -> bool:
        """Stop what runs; false if nothing did. What arrived is kept."""
        if not self.busy or self._worker is None:
            return False
        self._worker.cancel()
        return True

    async def _branch(self, facts: RootFacts, arms: Sequence[Arm], anew: bool) -> None:
        session = self._session
        jobs: list[tuple[EngineSlot, Branch]] = []
        try:
            for arm in arms:
                held = session.recall(facts.position, facts.quant).get(arm.code)
                if held is not None and not anew and held.stop not in (None, "error", "cancelled"):
                    continue
                slot = session.slot_for(arm.engine, facts.quant)
                if slot is None:
                    continue
                await self._ready(slot)
                if slot.verified is None:
                    await self._verify(slot, facts, facts.quant)
                    if slot.verified is not None and not slot.verified.passed:
                        self._say(f"{slot.role} server: {slot.verified.detail}", "error")
                branch = session.new_branch(facts, arm, slot)
                session.remember(branch)
                jobs.append((slot, branch))
        except KldtuiError as error:
            self._say(str(error), "error")
            self._screen.post_message(EnginesChanged())
            return
        if not jobs and not session.recall(facts.position, facts.quant):
            self._say("no server: press c to connect one", "warning")
            return
        await self._run(facts, jobs)

    async def _longer(self, facts: RootFacts, arms: Sequence[Arm]) -> None:
        held = self._session.recall(facts.position, facts.quant)
        jobs: list[tuple[EngineSlot, Branch]] = []
        try:
            for arm in arms:
                branch = held.get(arm.code)
                slot = self._session.slot_for(arm.engine, facts.quant)
                if branch is None or slot is None or branch.stop == "eog":
                    continue
                await self._ready(slot)
                jobs.append((slot, branch))
        except KldtuiError as error:
            self._say(str(error), "error")
            return
        if not jobs:
            self._say("nothing to continue here: both branches ended, or no server is connected")
            return
        await self._run(facts, jobs)

    async def _run(self, facts: RootFacts, jobs: Sequence[tuple[EngineSlot, Branch]]) -> None:
        """Both engines at once; the arms of one engine after each other, since requests that
        share a batch move each other's last digits."""
        by_engine: dict[int, list[tuple[EngineSlot, Branch]]] = {}
        for slot, branch in jobs:
            branch.stop, branch.error = None, None
            by_engine.setdefault(id(slot.engine), []).append((slot, branch))
        changed = self._flusher(facts)
        try:
            await asyncio.gather(
                *(self._one_engine(group, changed) for group in by_engine.values())
            )
        finally:
            changed(True)
            self._screen.post_message(EnginesChanged())

    def _flusher(self, facts: RootFacts) -> Callable[[bool], None]:
        quant = self._session.quants[facts.quant].name
        last = 0.0

        def changed(now: bool = False) -> None:
            nonlocal last
            if now or time.monotonic() - last >= FLUSH_SECONDS:
                last = time.monotonic()
                self._screen.post_message(BranchesChanged(facts.position, quant))

        return changed

    async def _one_engine(
        self, jobs: Sequence[tuple[EngineSlot, Branch]], changed: Callable[[bool], None]
    ) -> None:
        for slot, branch in jobs:
            try:
                before = self._session.text_before(branch)
                run = run_branch(slot.engine, branch, self.length, self.top_n, before=before)
                async with contextlib.aclosing(run) as items:
                    async for _ in items:
                        changed(False)
            except EngineError as error:
                self._say(f"{branch.arm.code}: {error} (b tries again)", "error")
                slot.state, slot.words = "failed", str(error)
            changed(True)
