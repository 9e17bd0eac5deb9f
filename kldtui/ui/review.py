"""The review screen: what each action does.

Knows: the actions of the table, and what they do to the session and to what is shown.
Must not know: how panes draw, or how branches are made (the desk does).
"""

from __future__ import annotations

import bisect
from typing import Literal

from textual import work
from textual.worker import WorkerCancelled, get_current_worker

from kldtui.errors import KldtuiError
from kldtui.facts import RootFacts
from kldtui.index import State
from kldtui.label_report import write_report
from kldtui.labels import BY_KEY
from kldtui.position import Position
from kldtui.review.listing import HELP, ORDERS, parse_filter
from kldtui.ui import words
from kldtui.ui.actions import BY_ID
from kldtui.ui.bars import ClassesPanel, KeyBar
from kldtui.ui.branch_actions import BranchActions
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.detail_view import DetailView
from kldtui.ui.dialogs import PROMPTS, Help, Page, Prompt, Question
from kldtui.ui.messages import SearchAdvanced
from kldtui.ui.review_view import PANES
from kldtui.ui.root_list import RootList
from kldtui.ui.stream import StreamView
from kldtui.vocab import safe

HEATS = ("kld", "margin", "off")


class ReviewScreen(BranchActions):
    """What is shown, and what can be done with it."""

    async def on_key_bar_pressed(self, event: KeyBar.Pressed) -> None:
        await self.run_action(BY_ID[event.action_id].call)

    def on_classes_panel_chosen(self, event: ClassesPanel.Chosen) -> None:
        self.action_label(event.key)

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def action_move(self, where: str) -> None:
        """Move at once, so that a label typed right behind it is for where it led."""
        focused = self.focused
        if isinstance(focused, BranchPane | DetailView):
            focused.move(where)
        elif isinstance(focused, RootList):
            row = focused.after(where)
            if row is not None:
                self.choose(row)
        elif self.judging and not self.is_shown("stream"):
            self.query_one("#left").focus()  # a cursor that is nowhere to be seen is not moved
        else:
            position = self.query_one(StreamView).after(where)
            if position is not None:
                self.how = "hand"
                self.go(position)

    def action_chunk(self, step: int) -> None:
        chunk = self.cursor.chunk + step
        if not 0 <= chunk < self.session.ref.shape.n_chunk:
            self.say("this is the last chunk" if step > 0 else "this is the first chunk")
            return
        where = self.session.index.layout.chunk_slice(chunk)
        scored = where.stop > where.start
        self.how = "hand"
        self.go(self.session.position(where.start) if scored else Position(chunk, 0))

    def go(self, position: Position) -> None:
        self.moved_by_hand = True
        self.cursor = position

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def action_goto(self) -> None:
        def check(text: str) -> Position:
            position = Position.parse(text)
            chunks = self.session.ref.shape.n_chunk
            if position.chunk >= chunks:
                raise KldtuiError(f"there is no chunk {position.chunk}; the last is {chunks - 1}")
            length = len(self.session.chunk_tokens(position.chunk))
            if position.t >= length:
                raise KldtuiError(f"chunk {position.chunk} ends at t{length - 1}")
            return position

        text = await self.app.push_screen_wait(
            Prompt("go to", "a position, such as c3:t97 or 3:97", "", check)
        )
        if text:
            self.how = "hand"
            self.go(check(text))

    # ── roots ────────────────────────────────────────────────────────────────────────────────

    def action_root(self, step: int) -> None:
        """The next root of the list; from between roots, the nearest one that way."""
        if not self.rows.size:
            self.say("the list is empty: f changes the filter")
            return
        row = self.row_of_cursor()
        if row is None:
            row = self.places.next_to(self.session.scored_before(self.cursor), step)
            if row is None:
                self.say("no more roots that way")
                return
        else:
            facts = self.facts
            if (
                step > 0
                and facts is not None
                and facts.is_root
                and not self.session.class_of(facts.position, facts.quant)
            ):
                self.session.skip(facts)
            row += step
        if not 0 <= row < self.rows.size:
            self.say("this is the last root of the list" if step > 0 else "this is the first root")
            return
        self.choose(row)

    def action_next_unlabelled(self) -> None:
        if not self.advance():
            self.say("no other root of the list is without a label")

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def action_filter(self) -> None:
        names = self.session.names
        chunks = self.session.ref.shape.n_chunk

        def check(text: str) -> None:
            wanted = parse_filter(text, names)
            if wanted.chunk is not None and wanted.chunk >= chunks:
                raise KldtuiError(
                    f"filter: there is no chunk {wanted.chunk}; the last is {chunks - 1}"
                )
            if wanted.floor != "all" and self.session.floor_number is None:
                raise KldtuiError("filter: no floor was measured; start with --floor FILE")

        text = await self.app.push_screen_wait(
            Prompt("filter", HELP, self.filter.describe(), check)
        )
        if text is not None:
            self.filter = parse_filter(text, names)
            self.refresh_list(then=self._go_into_list)
            self.refresh_status()

    def _go_into_list(self) -> None:
        """To the nearest row, where the cursor is not on one."""
        if self.rows.size and self.row_of_cursor() is None:
            self.choose(self.places.next_to(self.session.scored_before(self.cursor), 1) or 0)

    def action_sort(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self.refresh_list()

    def action_quant(self) -> None:
        if len(self.session.quants) > 1:
            self.quant = (self.quant + 1) % len(self.session.quants)
        else:
            self.say("this review has one quant; add more with --quant")

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def action_heat(self) -> None:
        self.heat = HEATS[(HEATS.index(self.heat) + 1) % len(HEATS)]
        self.say(f"heat: {self.heat}")

    @work(thread=True, exclusive=True, group="statistics", exit_on_error=False)
    def action_statistics(self) -> None:
        """In a thread: a large index takes seconds to add up."""
        worker, call = get_current_worker(), self.app.call_from_thread
        if not self.session.quants:
            call(self.say, "no quant: start with --quant FILE")
            return

        def tell(share: float) -> None:
            if worker.is_cancelled:
                raise WorkerCancelled("no longer wanted")
            call(self.say, f"adding up… {share:.0%}")

        tell(0)
        title, text = words.statistics(self.session, self.quant, tell, self.app.size.width)
        call(self.say, "")
        call(self.app.push_screen, Page(title, text))

    def action_back(self) -> None:
        adding = [each for each in self.workers if each.group == "statistics" and each.is_running]
        for each in adding:
            each.cancel()
        if adding:
            self.say("the statistics are not wanted any more")
        else:
            super().action_back()

    def action_next_pane(self) -> None:
        self._focus_by(1)

    def action_previous_pane(self) -> None:
        self._focus_by(-1)

    def _focus_by(self, step: int) -> None:
        """The panes in turn; a narrow screen shows list or table only while it has the focus."""
        if self.has_class("zoomed"):
            self.action_zoom()
        beside = () if self.judging else ("roots", "stream", "detail")
        names = [n for n in PANES if n in beside or self.is_shown(n)]
        here = self.focused.id if self.focused is not None else None
        at = names.index(here) if here in names else 0
        name = names[(at + step) % len(names)]
        self.set_class(name == "roots", "-list")
        self.set_class(name == "detail", "-table")
        self.query_one(f"#{name}").focus()

    def action_copy(self) -> None:
        text = words.copied(self.session, self.cursor, self.quant, self.focused)
        self.app.copy_to_clipboard(text)
        self.say(f"copied {len(text)} characters")

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def action_search(self) -> None:
        needle = await self.app.push_screen_wait(
            Prompt(
                "search",
                "text of the stream; case matters only if you write capitals",
                self.needle,
                anew=True,
            )
        )
        if needle:
            self.start_search(needle)

    def on_search_advanced(self, event: SearchAdvanced) -> None:
        if event.needle != self.needle or self._cancel_search.is_set():
            return
        share = event.chunk / max(1, self.session.ref.shape.n_chunk)
        self.searching = "" if event.done else f"searching {share:.0%}"
        self.refresh_status()
        first = not self.hits
        self.hits += event.hits
        stream = self.query_one(StreamView)
        stream.hits = self.hits
        if any(hit.chunk == self.cursor.chunk for hit in event.hits):
            stream.load()
        if first and self.hits:
            self.action_hit(1)
        if event.failed:
            self.say(f"the search ended early: {event.failed}", "error")
        elif event.done:
            self.say(
                f"{len(self.hits)} hits for {event.needle!r}"
                if self.hits
                else f"no {event.needle!r} in this stream"
            )

    def action_hit(self, step: int) -> None:
        if not self.hits:
            self.say("no search yet: / searches" if not self.needle else "no hits")
            return
        self.how = "hand"
        if step > 0:
            at = bisect.bisect_right(self.hits, self.cursor)
        else:
            at = bisect.bisect_left(self.hits, self.cursor) - 1
        which = at % len(self.hits)
        self.go(self.hits[which])
        again = "" if which == at else ", from the other end again"
        self.say(f"hit {which + 1} of {len(self.hits)}{again}")

    # ── labels ───────────────────────────────────────────────────────────────────────────────

    def action_label(self, key: str) -> None:
        """Label what is under the cursor now, whatever is typed next."""
        facts, how = self.facts, self.how
        if facts is None or not facts.is_root:
            self.say(self.no_root())
            return
        if key == "3" and any(b is not None and not b.complete for b in self.branches().values()):
            self._ask_malformed(facts, how)
        else:
            self._label(facts, key, how)

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def _ask_malformed(self, facts: RootFacts, how: str) -> None:
        sure = await self.app.push_screen_wait(
            Question(
                "malformed?",
                "A branch here was cut before it ended: what looks malformed may only be "
                "unfinished (+ continues it). Label it malformed all the same?",
            )
        )
        if sure:
            self._label(facts, "3", how)

    def _label(self, facts: RootFacts, key: str, how: str) -> None:
        self.store(lambda: self.session.set_label(facts, key, how))
        self.desk.leave(facts)
        self.refresh_after_label()
        if not self.advance():
            self.say("every root of the list has a label")
        elif self.cursor == facts.position:
            names = self.session.names
            self.say(
                f"{BY_KEY[key].name}: {names[facts.quant]}. Now {names[self.quant]}, which flips "
                "here too"
            )

    def action_clear_label(self) -> None:
        facts = self.facts
        if facts is None or self.session.class_of(facts.position, facts.quant) is None:
            self.say("there is no label here")
            return
        self.store(lambda: self.session.set_label(facts, None, self.how))
        self.refresh_after_label()

    def action_note(self) -> None:
        facts = self.facts
        if facts is None or facts.state != State.SCORED:
            self.say("no scored position here")
        else:
            self._ask_note(facts, self.how)

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def _ask_note(self, facts: RootFacts, how: str) -> None:
        record = self.session.label(facts.position, facts.quant)
        shown = safe(record.note) if record is not None else ""  # it may come from a file
        text = await self.app.push_screen_wait(
            Prompt("note", f"on {facts.position}; empty takes it away", shown)
        )
        if text is not None and text != shown:
            self.store(lambda: self.session.set_note(facts, text, how))
            self.refresh_after_label()

    def action_undo(self) -> None:
        self._step("undo")

    def action_redo(self) -> None:
        self._step("redo")

    def _step(self, what: Literal["undo", "redo"]) -> None:
        labels = self.session.labels
        if labels is None:
            self.say("this review keeps no labels")
            return
        outcome: list[tuple[str, Position, int] | None] = []
        if not self.store(lambda: outcome.append(self.session.step(what))):
            return
        if not outcome or outcome[0] is None:
            self.say(f"nothing to {what}")
            return
        did, position, quant = outcome[0]
        self.go(position)
        self.quant = quant
        self.refresh_after_label()
        self.say(f"{what}: {did}")

    def action_export(self) -> None:
        labels = self.session.labels
        if labels is None:
            self.say("this review keeps no labels")
            return
        self.say(f"wrote {write_report(labels)}")

    def action_help(self) -> None:
        self.app.push_screen(
            Help(self.config.keys, words.help_facts(self.session, self.config.top_n_stored))
        )
