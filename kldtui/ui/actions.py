"""One table of everything a person can do: keys, palette, help and footer all come from it.

Knows: ids, default keys and words of the actions.
Must not know: how any of them is done (the screen has an `action_<id>` for each).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from textual.binding import Binding
from textual.keys import _character_to_key, format_key

from kldtui.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Action:
    """`id` is the binding's name in the config file's [keys] table; `keys` as Textual spells them.

    `argument` is what the method gets; actions that share a method differ by it.
    """

    id: str
    keys: str
    title: str
    help: str
    group: str
    method: str = ""
    shown: str = ""
    priority: bool = False

    @property
    def call(self) -> str:
        return self.method or self.id.replace("-", "_")


MOVE, ROOTS, LOOK, BRANCH, LABEL, APP = (
    "Move",
    "Roots",
    "Look",
    "Branch",
    "Label",
    "Program",
)
GROUPS = (MOVE, ROOTS, LOOK, BRANCH, LABEL, APP)

CLASS_KEYS = tuple("1234567")

ACTIONS: tuple[Action, ...] = (
    Action("left", "left,h", "Token left", "Move one token back", MOVE, "move('left')", "← h"),
    Action("right", "right,l", "Token right", "Move one token on", MOVE, "move('right')", "→ l"),
    Action("up", "up,k", "Line up", "Move one line up", MOVE, "move('up')", "↑ k"),
    Action("down", "down,j", "Line down", "Move one line down", MOVE, "move('down')", "↓ j"),
    Action("page-up", "pageup", "Page up", "Move one page up", MOVE, "move('page_up')", "PgUp"),
    Action(
        "page-down",
        "pagedown",
        "Page down",
        "Move one page down",
        MOVE,
        "move('page_down')",
        "PgDn",
    ),
    Action("first", "g,home", "First", "To the start of the chunk or list", MOVE, "move('first')"),
    Action("last", "G,end", "Last", "To the end of the chunk or list", MOVE, "move('last')"),
    Action(
        "next-chunk", "greater_than_sign", "Next chunk", "To the next chunk", MOVE, "chunk(1)", ">"
    ),
    Action(
        "previous-chunk",
        "less_than_sign",
        "Previous chunk",
        "To the chunk before",
        MOVE,
        "chunk(-1)",
        "<",
    ),
    Action("goto", "colon", "Go to", "Go to a position such as c3:t97", MOVE, shown=":"),
    Action("search", "slash", "Search", "Search the stream's text", MOVE, shown="/"),
    Action("next-hit", "n", "Next hit", "To the next search hit", MOVE, "hit(1)"),
    Action("previous-hit", "N", "Previous hit", "To the search hit before", MOVE, "hit(-1)"),
    Action(
        "next-root",
        "full_stop",
        "Next root",
        "To the next root, in the list's order",
        ROOTS,
        "root(1)",
        ".",
    ),
    Action(
        "previous-root",
        "comma",
        "Previous root",
        "To the root before, in the list's order",
        ROOTS,
        "root(-1)",
        ",",
    ),
    Action("next-unlabelled", "U", "Next unlabelled", "To the next root without a label", ROOTS),
    Action("filter", "f", "Filter", "Say which roots the list shows", ROOTS),
    Action(
        "sort",
        "s",
        "Sort",
        "Order the list by position, cost, KLD, margin, or as a review queue",
        ROOTS,
    ),
    Action("quant", "Q", "Other quant", "Look at the next quant of this review", ROOTS),
    Action("heat", "H", "Heat", "Colour the stream by KLD, by margin, or not at all", LOOK),
    Action(
        "statistics",
        "S",
        "Statistics",
        "What llama-perplexity prints of this quant, counts, and the floor beside",
        LOOK,
    ),
    Action("zoom", "z", "Zoom", "Give the focused pane the whole screen, or give it back", LOOK),
    Action("next-pane", "tab", "Next pane", "Focus the next pane", LOOK, priority=True),
    Action(
        "previous-pane", "shift+tab", "Previous pane", "Focus the pane before", LOOK, priority=True
    ),
    Action("copy", "y", "Copy", "Copy what the cursor is on to the clipboard", LOOK),
    Action(
        "branch",
        "b",
        "Branch",
        "Let both models continue from here: root, picked token, or token of a branch",
        BRANCH,
    ),
    Action(
        "stream-token",
        "t",
        "Stream token",
        "Let both models continue from the stream token here",
        BRANCH,
    ),
    Action(
        "pick",
        "p",
        "Pick a token",
        "Go to the top-N list, to pick a token there and branch from it",
        BRANCH,
    ),
    Action(
        "longer",
        "plus",
        "Longer",
        "Continue the branches by as many tokens again",
        BRANCH,
        shown="+",
    ),
    Action(
        "arms",
        "a",
        "Other pair",
        "Show the next two arms side by side: R·r, Q·q, R·q and, once made, Q·r",
        BRANCH,
    ),
    Action(
        "fourth",
        "w",
        "Fourth arm",
        "Make Q·r too: the quant continues the reference's token",
        BRANCH,
    ),
    Action(
        "auto-branch",
        "A",
        "Branch by itself",
        "While judging, branch at each root by itself as it is reached",
        BRANCH,
    ),
    Action(
        "again", "B", "Branch anew", "Throw this root's branches away and make them again", BRANCH
    ),
    Action("verify", "v", "Verify", "Check that the servers hold the recorded models", BRANCH),
    Action("floor", "V", "Floor", "Run the reference against itself at this root", BRANCH),
    Action("connect", "c", "Connect", "Connect a server, or connect again", BRANCH),
    Action(
        "back",
        "escape",
        "Back",
        "Stop what runs, go back to the pair before, or leave the judging layout",
        BRANCH,
        shown="Esc",
    ),
    *(
        Action(f"label-{key}", key, f"Label {key}", "", LABEL, f"label('{key}')")
        for key in CLASS_KEYS
    ),
    Action("clear-label", "0", "Clear label", "Take this root's label away", LABEL),
    Action("note", "m", "Note", "Write a note on this root", LABEL),
    Action(
        "undo",
        "u",
        "Undo",
        "Undo the last label, note or clearing, or passing a root by (.)",
        LABEL,
    ),
    Action("redo", "ctrl+r", "Redo", "Do again what was undone", LABEL, shown="^r"),
    Action("export", "e", "Export", "Write a report of the labels beside the label file", LABEL),
    Action("help", "question_mark", "Help", "Show this help", APP, shown="?"),
    Action(
        "palette", "ctrl+p", "Palette", "Find an action by name", APP, "app.command_palette", "^p"
    ),
    Action(
        "suspend",
        "ctrl+z",
        "Suspend",
        "Back to the shell; fg returns",
        APP,
        "app.suspend_process",
        "^z",
    ),
    Action("quit", "q,ctrl+q", "Quit", "Leave; labels are on disk already", APP, "app.quit"),
)

BY_ID = {action.id: action for action in ACTIONS}


def bindings() -> list[Binding]:
    """The table as Textual bindings, each with its id, so that a keymap can change it."""
    return [
        Binding(
            action.keys,
            action.call,
            action.title,
            show=False,
            id=action.id,
            tooltip=action.help,
            priority=action.priority,
        )
        for action in ACTIONS
    ]


def check_clashes(keymap: Mapping[str, str]) -> None:
    """Raises ConfigError if a changed key is one that another action has."""
    owner: dict[str, str] = {}
    for action in ACTIONS:
        for key in keymap.get(action.id, action.keys).split(","):
            name = _character_to_key(key) if len(key) == 1 else key
            first = owner.setdefault(name, action.id)
            if first != action.id and (first in keymap or action.id in keymap):
                raise ConfigError(
                    f"config: [keys] gives {key!r} to both {first!r} and {action.id!r}; "
                    "change one of them"
                )


def keys_of(action: Action, keymap: Mapping[str, str] | None = None) -> str:
    """How the action's keys are shown to people, with the config file's changes."""
    if keymap and action.id in keymap:
        return " ".join(format_key(key) for key in keymap[action.id].split(","))
    return action.shown or action.keys.split(",")[0]
