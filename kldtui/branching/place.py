"""A place that branches start from: a position of the stream, or a token inside a branch.

Knows: whose tokens may come there, and what comes before them.
Must not know: engines, recordings, how a branch is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kldtui.branching.arms import Arm, Start
from kldtui.branching.branch import Branch, Parent, key_of
from kldtui.errors import KldtuiError
from kldtui.position import Position


@dataclass(frozen=True, slots=True)
class Place:
    """Where branches start.

    position: of the root; quant: its number. starts: the token of each start that is known here.
    tail: ids between the position's prefix and the start token, inside a branch. parent: that
    branch, and how far inside.
    """

    position: Position
    quant: int
    starts: Mapping[Start, int] = field(default_factory=dict)
    tail: tuple[int, ...] = ()
    parent: Parent | None = None

    def has(self, arm: Arm) -> bool:
        return arm.start in self.starts

    def key(self, arm: Arm) -> str:
        """The name of this arm's branch among those of the root; empty where it cannot be."""
        start = self.starts.get(arm.start)
        return "" if start is None else key_of(arm, start, self.parent)

    def picking(self, token: int) -> tuple[Place, Start]:
        """The place with this token picked, and by what name that starts: a token that is there
        for a reason keeps that."""
        for start, id in self.starts.items():
            if id == token:
                return self, start
        return replace(self, starts={**self.starts, "picked": token}), "picked"


def inside(branch: Branch, offset: int, quant: int) -> Place:
    """The place of the branch's generated token number `offset`; it may be one that is to come.

    Raises KldtuiError for one beyond that.
    """
    if not 0 <= offset <= len(branch.tokens):
        raise KldtuiError(f"the branch has {len(branch.tokens)} tokens, and no +{offset}")
    starts: dict[Start, int] = {}
    if offset < len(branch.tokens):
        starts["stream"] = branch.tokens[offset].id
    own = (*branch.prefix_ids[branch.position.t :], branch.start_id, *branch.ids[:offset])
    return Place(branch.position, quant, starts, own, Parent(branch.id, offset))
