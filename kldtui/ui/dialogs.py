"""What opens over the screen: a one-line prompt, a question, and the help.

Knows: how to ask and how to show text.
Must not know: what the answers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import ScrollableContainer, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from kldtui.errors import KldtuiError
from kldtui.labels import TAXONOMY
from kldtui.ui import marks
from kldtui.ui.actions import ACTIONS, GROUPS, keys_of
from kldtui.ui.text import plain
from kldtui.vocab.glyphs import PART

PROMPTS = "prompt"
"""The group of the workers that wait for what a dialog is answered."""
Answer = TypeVar("Answer")


class Dialog(ModalScreen[Answer]):
    """What opens over the screen and is closed once, however many keys ask for it."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes keys."""
        return self.is_mounted

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """As of any screen; closed already, it leaves alone what lies under it."""
        return super().dismiss(result) if self.app.screen is self else AwaitComplete()


class Prompt(Dialog[str | None]):
    """One line of input. `check` raises KldtuiError for a text that cannot be used."""

    BINDINGS = [Binding("escape", "cancel", "Cancel", show=False)]  # noqa: RUF012

    def __init__(
        self,
        title: str,
        explain: str,
        value: str = "",
        check: Callable[[str], object] | None = None,
        *,
        anew: bool = False,
    ) -> None:
        """value: what stands there already; with `anew`, what is typed takes its place."""
        super().__init__()
        self._title, self._explain, self._value = title, explain, value
        self._check, self._anew = check, anew

    @property
    def is_ready(self) -> bool:
        return isinstance(self.focused, Input)

    def compose(self) -> ComposeResult:
        with Vertical(id="prompt") as box:
            box.border_title = plain(self._title)
            yield Input(self._value, id="prompt-input", select_on_focus=self._anew)
            yield Static(Text(self._explain, style=marks.DIM), id="prompt-explain", markup=False)
            yield Static(Text(""), id="prompt-error", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._check is not None:
            try:
                self._check(event.value)
            except KldtuiError as error:
                self.query_one("#prompt-error", Static).update(Text(str(error), style=marks.WARN))
                return
        self.dismiss(event.value)

    def action_cancel(self) -> None:
        self.dismiss(None)


class Question(Dialog[bool]):
    """Yes or no; Esc is no."""

    BINDINGS = [  # noqa: RUF012
        Binding("y,enter", "answer(True)", "Yes", show=False),
        Binding("n,escape,q", "answer(False)", "No", show=False),
    ]

    def __init__(self, title: str, words: str) -> None:
        super().__init__()
        self._title, self._words = title, words

    def compose(self) -> ComposeResult:
        with Vertical(id="prompt") as box:
            box.border_title = plain(self._title)
            yield Static(Text(self._words), markup=False)
            yield Static(Text("y  yes    n  no", style=marks.QUANT), markup=False)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Page(Dialog[None]):
    """Text to read, in as many columns as it needs."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape,q,S", "close", "Close", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("pagedown,space", "scroll(20)", show=False),
        Binding("pageup", "scroll(-20)", show=False),
        Binding("h,left", "scroll(0, -20)", show=False),
        Binding("l,right", "scroll(0, 20)", show=False),
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with ScrollableContainer(id="page") as box:
            box.border_title = plain(f"{self._title} ─ Esc closes")
            yield Static(Text(self._text, no_wrap=True), markup=False)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_scroll(self, down: int, right: int = 0) -> None:
        self.query_one("#page").scroll_relative(x=right, y=down, animate=False)


class Help(Dialog[None]):
    """All keys by group, the classes, and the marks, from the tables that define them."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape,q,question_mark", "close", "Close", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
    ]

    def __init__(self, keymap: Mapping[str, str], facts: Sequence[str]) -> None:
        super().__init__()
        self._keymap = keymap
        self._facts = facts

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as box:
            box.border_title = plain("help ─ Esc closes")
            yield Static(self._text(), markup=False)

    def _text(self) -> Text:
        text = Text()
        for group in GROUPS:
            text.append(f"{group}\n", marks.TITLE)
            for action in ACTIONS:
                if action.group == group and action.help:
                    text.append(f"  {keys_of(action, self._keymap):<12}", marks.QUANT)
                    text.append(action.help)
                    text.append(f" ({action.id})\n", marks.DIM)
            if group == "Label":
                for entry in TAXONOMY:
                    text.append(f"  {entry.key:<12}", marks.QUANT)
                    text.append(f"{entry.name}: {entry.definition}\n")
            text.append("\n")
        text.append("Marks\n", marks.TITLE)
        for mark, words in (
            (marks.ROOT, "root: the quant picks another token than the reference"),
            (marks.FIRST, "root that is the first of its turn, or of a greedy rollout (FDT)"),
            (marks.NEAR_TIE, "root at a near tie: it costs less than the threshold"),
            (marks.TIE, "tie: one of the two cannot rank its best tokens; not a root"),
            (marks.INVALID, "invalid: one of the rows cannot be used"),
            ("①", "labelled, with its class"),
            ("✎", "a note; in the list, one without a label"),
            (marks.FLOOR, "in the list: the reference flips here against itself too (floor)"),
            (
                " ".join(marks.FLIPS.values()),
                "of several quants: this one flips here, this one does not, of this one it is not "
                "known (not recorded, invalid, or not scanned yet)",
            ),
            (PART, "bytes of a character that a later token completes"),
            ("▁▅█", "under the stream: where in the whole of it the roots lie, and how many"),
            ("○ ● ✗", "a server: not verified yet, verified, failed or not the recorded model"),
        ):
            text.append(f"  {mark:<12}", marks.ROOT_STYLE)
            text.append(f"{words}\n")
        text.append("\nIn the frame of a branch, tokens counted from its start:\n")
        for mark, words in (
            ("≠ +3", "the two branches part at their token 3"),
            ("meet +7/+9 (5)", "from token 7 of one and 9 of the other, 5 are equal again"),
            (marks.FORK, "another branch begins here"),
            ("no token for", "a server that hides parts of characters is asked for the rest whole"),
            ("≠ itself +3", "run again, the reference parts from itself there (V)"),
        ):
            text.append(f"  {mark:<16}", marks.QUANT)
            text.append(f"{words}\n")
        text.append(
            "\nmoved: no flip, but a KLD as large as a root's median; f moved lists them.\n"
            "queue, an order of the list: of each turn (or chunk) the first root, those in tool "
            "calls before others, the dearest first; later roots after them, near ties last.\n"
            "FDT, SDT (statistics): on the reference's own rollout, the first token that differs, "
            "and the share of tokens that do.\n"
        )
        text.append("In the top-N table: r ref token, q quant token, · stream token, ")
        text.append("≤ at or below what the file can say (its clamp or its last entry).\n\n")
        for line in self._facts:
            text.append(f"{line}\n", marks.DIM)
        return text

    def action_close(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        self.query_one("#help").scroll_relative(y=by, animate=False)
