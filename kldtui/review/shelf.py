"""The branches of a review by root: made now, stored with labels, made ahead.

Knows: where branches are kept, and which of several of one key counts.
Must not know: engines, how branches are made or shown.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kldtui.branching import Arm, Branch, Place
from kldtui.errors import KldtuiError
from kldtui.position import Position
from kldtui.review.branch_log import BranchLog

Root = tuple[Position, str]


class Shelf:
    """Branches by root and key. What was made now counts before what a label has, and that before
    what was made ahead; of several files the last one given."""

    def __init__(self) -> None:
        self.logs: list[BranchLog] = []
        self.warnings: list[str] = []
        self._held: dict[Root, dict[str, Branch]] = {}
        self._loaded: set[Root] = set()

    def put(self, branch: Branch) -> None:
        """Keep a branch, in place of one of the same key."""
        self._held.setdefault((branch.position, branch.quant), {})[branch.key] = branch

    def of(
        self, position: Position, quant: str, stored: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> dict[str, Branch]:
        """The branches of a root, by key; `stored` gives those of its label, as JSON."""
        root = (position, quant)
        if root not in self._loaded:
            self._loaded.add(root)
            found: dict[str, Branch] = {}
            for log in self.logs:
                found.update(self._read(partial(_of_log, log, position, quant)))
            found.update(self._read(lambda: [Branch.from_json(data) for data in stored()]))
            if found:
                self._held[root] = {**found, **self._held.get(root, {})}
        return self._held.get(root, {})

    def _read(self, read: Callable[[], Iterable[Branch]]) -> dict[str, Branch]:
        """What cannot be read is said once, and the review goes on without it."""
        try:
            return {branch.key: branch for branch in read()}
        except KldtuiError as error:
            self.warnings.append(str(error))
            return {}

    def positions(self, quant: str) -> set[Position]:
        """Where a quant has branches that were made now, or ahead."""
        made = {position for (position, name), held in self._held.items() if held and name == quant}
        return made | {
            entry.position for log in self.logs for entry in log.entries if entry.quant == quant
        }

    def drop(self, position: Position, quant: str, key: str) -> None:
        """Forget a branch, and those that begin inside it."""
        held = self._held.get((position, quant), {})
        branch = held.pop(key, None)
        if branch is None:
            return
        for name, other in list(held.items()):
            if other.parent is not None and other.parent.branch == branch.id:
                self.drop(position, quant, name)

    def find(self, position: Position, quant: str, branch_id: str) -> Branch | None:
        """A branch of a root by its id."""
        held = self._held.get((position, quant), {})
        return next((branch for branch in held.values() if branch.id == branch_id), None)

    def borrowed(self, place: Place, arm: Arm, quant: str) -> Branch | None:
        """The same branch of another quant's root: what the reference says depends on no quant."""
        start = place.starts.get(arm.start)
        if arm.engine != "ref" or place.parent is not None or start is None:
            return None
        for name, branch in self._at(place.position):
            same = branch.arm.engine == "ref" and branch.parent is None and branch.start_id == start
            if same and name != quant and branch.made:
                return replace(branch, quant=quant, arm=arm, id=uuid.uuid4().hex)
        return None

    def _at(self, position: Position) -> Iterator[tuple[str, Branch]]:
        for (where, name), held in self._held.items():
            if where == position:
                for branch in held.values():
                    yield name, branch


def _of_log(log: BranchLog, position: Position, quant: str) -> Iterable[Branch]:
    return log.of(position, quant).values()
