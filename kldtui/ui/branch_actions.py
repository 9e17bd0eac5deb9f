"""What the keys about branches and engines do.

Knows: places to branch from, pairs and the way back, the desk's services.
Must not know: how branches are made or drawn; labels, lists, searching.
"""

from __future__ import annotations

from textual import work
from textual.widget import Widget

from kldtui.branching import QR, RR, Place, Start, both, inside
from kldtui.errors import KldtuiError
from kldtui.recordings import split_named
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.detail_view import DetailView
from kldtui.ui.dialogs import PROMPTS, Prompt
from kldtui.ui.messages import EnginesChanged
from kldtui.ui.pairs import View, following
from kldtui.ui.review_view import ReviewView
from kldtui.ui.stream import StreamView

_BUSY = "branches are being made: Esc stops them first"


class BranchActions(ReviewView):
    """The actions of the group Branch."""

    _later: Place | None = None
    """Where branches were asked for before an engine that is being prepared was there."""

    # ── making ───────────────────────────────────────────────────────────────────────────────

    def action_branch(self) -> None:
        """From the picked token, from the token under a branch's cursor, else from the root."""
        focused = self.focused
        if isinstance(focused, DetailView) and focused.token is not None:
            self._branch_from_picked(focused.token)
        elif isinstance(focused, BranchPane) and focused.branch and focused.token is not None:
            place = inside(focused.branch, focused.token, self.quant)
            self._go_to(place, "stream", focused.side, focused.token)
        elif self.views:
            self.desk.branch(self.place, self.pair)
        else:
            self._branch_root()

    def no_root(self) -> str:
        """Why nothing is to be judged or branched here."""
        i = self.flat
        if i is not None and self.session.flips(i):
            return (
                f"{self.session.names[self.quant]} does not flip here: Q goes to a quant that does"
            )
        return "no root here: . goes to the next one"

    def _branch_root(self, *, anew: bool = False) -> None:
        facts = self.facts
        if facts is None or not facts.is_root:
            self.say(f"{self.no_root()}; t branches from the stream token")
            return
        self._judge()
        self.desk.branch(self.place, self.session.arms(self.quant), anew=anew)
        self._later = self.place if self.desk.prepares else None

    def on_engines_changed(self, _event: EnginesChanged) -> None:
        """Make what was asked for before its engine was there."""
        slot = self.session.slots.get(self.session.names[self.quant]) if self._later else None
        if slot is None or slot.state != "ready" or self.desk.busy:
            return
        place, self._later = self._later, None
        if self.judging and place == self.place:
            self.desk.branch(self.place, self.session.arms(self.quant))

    def _branch_from_picked(self, token: int) -> None:
        side, at = self._part
        branch = self.branches().get(side)
        came_from = side if at is not None and branch is not None else ""
        if at is not None and branch is not None:
            place = inside(branch, at, self.quant)
        else:
            place = self.session.place(self.cursor, self.quant)
        self._go_to(*place.picking(token), came_from, at)

    def action_stream_token(self) -> None:
        place = self.session.place(self.cursor, self.quant)
        if not self.session.quants:
            self.say("no quant: start with --quant FILE")
        elif "stream" not in place.starts:
            self.say("nothing comes before this token: there is no prefix to continue")
        else:
            self._go_to(*place.picking(place.starts["stream"]), "", None)

    def action_pick(self) -> None:
        self._part = self._part if isinstance(self.focused, BranchPane) else ("left", None)
        self.set_class(False, "-list")
        self.set_class(True, "-part")
        self.query_one(DetailView).focus()
        self.say("pick a token with the arrows; b branches from it")

    def _go_to(self, place: Place, start: Start, pane: str, token: int | None) -> None:
        """Show the pair of a place, and make what is not there yet; Esc comes back."""
        self._judge()
        pair = both(start)
        now = self.views[-1] if self.views else None
        if now is None or (now.place, now.pair) != (place, pair):
            self.views.append(View(place, pair, pane, token))
        self._part = (pane or "left", None)
        self.refresh_pair()
        if not pane:
            self.query_one(StreamView).focus()
        elif isinstance(self.focused, DetailView):
            self.pane(pane).focus()
        self.refresh_detail()
        self.desk.branch(place, pair)

    def _judge(self) -> None:
        self.judging = True
        self.set_class(False, "-list")

    def action_longer(self) -> None:
        if self.session.quants and not self.desk.busy:
            self.desk.longer(self.place, self.pair)

    def action_auto_branch(self) -> None:
        self.auto_branch = not self.auto_branch
        self.say(f"branching by itself while judging: {'on' if self.auto_branch else 'off'}")
        if self.auto_branch and self.judging:
            self.action_branch()

    def action_again(self) -> None:
        if self.views:
            self.desk.branch(self.place, self.pair, anew=True)
        elif self.facts is not None and self.facts.is_root:
            self._branch_root(anew=True)

    # ── which pair ───────────────────────────────────────────────────────────────────────────

    def action_arms(self) -> None:
        pairs = self.pairs
        self.show_pair(following(pairs, self.pair))
        if len(pairs) == 1:
            self.say("there is one pair here; w makes the fourth arm of a root")
        elif self.judging and not self.desk.busy:
            self.desk.branch(self.place, [arm for arm in self.pair if self.place.has(arm)])

    def action_fourth(self) -> None:
        facts = self.facts
        if facts is None or not facts.is_root:
            self.say(self.no_root())
            return
        held = self.session.recall(facts.position, facts.quant)
        if QR.code not in held and self.session.slot_for("quant", facts.quant) is None:
            self.say("Q·r needs the quant's engine: c connects it")
            return
        self._judge()
        self.views = []
        self.show_pair((RR, QR))
        self.desk.branch(self.place, [QR])

    def action_back(self) -> None:
        if self.desk.cancel() or self.stop_search():
            self.say("stopped; what came is kept")
        elif self.has_class("zoomed"):
            self.action_zoom()
        elif isinstance(self.focused, DetailView) and self._beside_table().region.area:
            self._beside_table().focus()
        elif self.views:
            self._back_to_parent(self.views.pop())
        elif self.judging:
            self.judging = False
            self.query_one(StreamView).focus()
        elif self.desk.stop_connecting():
            self.say("no longer waiting for a server; c connects")
        else:
            self.query_one(StreamView).focus()

    def _beside_table(self) -> Widget:
        """Where the focus goes from the top-N list: to what it shows a token of."""
        side, token = self._part
        return self.pane(side) if token is not None else self.query_one(StreamView)

    def _back_to_parent(self, left: View) -> None:
        """The pair before, with the cursor where it was left."""
        self.refresh_pair()
        if left.pane:
            pane = self.pane(left.pane)
            pane.focus()
            if left.token is not None:
                pane.place_token(left.token)
        self.refresh_detail()

    # ── engines ──────────────────────────────────────────────────────────────────────────────

    def action_verify(self) -> None:
        if self.desk.busy:
            self.say(_BUSY)
            return
        facts = self.facts
        root = facts.position if facts is not None and facts.is_root else None
        self.desk.verify(root, self.quant)

    def action_floor(self) -> None:
        if self.facts is None or not self.facts.is_root:
            self.say(self.no_root())
        elif self.desk.busy:
            self.say(_BUSY)
        else:
            self.desk.floor(self.facts)

    @work(exclusive=True, group=PROMPTS, exit_on_error=False)
    async def action_connect(self) -> None:
        roles = ("ref", *self.session.names)
        missing = [role for role in roles if role not in self.session.slots]
        failed = [role for role, slot in self.session.slots.items() if slot.state != "ready"]

        def check(text: str) -> None:
            role, url = split_named(text.strip())
            if role is not None and role not in roles:
                raise KldtuiError(f"no {role!r} here; write one of {', '.join(roles)}, then =URL")
            if not url or url.endswith("="):
                raise KldtuiError("write a URL, such as http://127.0.0.1:8080")

        role = (failed or missing or ["ref"])[0]
        held = self.session.slots.get(role)
        text = await self.app.push_screen_wait(
            Prompt(
                "connect a server",
                f"{'  '.join(f'{name}=URL' for name in roles)} ─ only this address is contacted",
                f"{role}={held.engine.url if held else 'http://127.0.0.1:'}",
                check,
            )
        )
        if text:
            named, url = split_named(text.strip())
            role = named or "ref"
            held = self.session.slots.get(role)
            try:
                if held is not None and held.engine.url == url:
                    self.desk.connect_all()
                else:
                    self.desk.replace(role, url)
            except KldtuiError as error:
                self.say(str(error), "error")
