"""What widgets tell the screen. Messages go up; the screen hands state down.

Knows: the messages.
Must not know: who sends or handles them.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from kldtui.index import Progress
from kldtui.position import Position


@dataclass
class CursorMoved(Message):
    """The person moved to another stream token. how: "hand" or "list"."""

    position: Position
    how: str = "hand"


@dataclass
class RootChosen(Message):
    """A row of the root list was chosen."""

    row: int


@dataclass
class PartMoved(Message):
    """The cursor of a branch pane moved, or the pane was left (None)."""

    side: str
    token: int | None


@dataclass
class ScanAdvanced(Message):
    """The background pass filled more of the index; `done` ends it, `failed` says why.

    roots: the first pass is done, no root is missing; what follows is KLD.
    """

    progress: Progress | None
    done: bool = False
    failed: str = ""
    roots: bool = False


@dataclass
class SearchAdvanced(Message):
    """The search found hits, or came to a chunk. failed: what kept it from going on; then it is
    done."""

    needle: str
    hits: list[Position]
    chunk: int
    done: bool = False
    failed: str = ""


@dataclass
class EnginesChanged(Message):
    """A server connected, failed, was verified, or is being waited for."""


@dataclass
class TextLearnt(Message):
    """A server gave the vocabulary that no file had."""


@dataclass
class EngineStarted(Message):
    """An engine that kldtui started itself answers at `url`."""

    role: str
    url: str
    program: str


@dataclass
class Preparing(Message):
    """What is being prepared in the background, in words; empty when it is done."""

    words: str


@dataclass
class DetailLeft(Message):
    """The top-N table lost the focus."""


@dataclass
class BranchesChanged(Message):
    """Branches of a root grew or ended."""

    position: Position
    quant: str

    def can_replace(self, message: Message) -> bool:
        """Of several that wait, one is enough."""
        return isinstance(message, BranchesChanged) and message == self


@dataclass
class Notice(Message):
    """Something to tell the person. severity: information, warning or error."""

    text: str
    severity: str = "information"
