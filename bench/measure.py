"""A figure, what it is held against, and how both are timed.

Knows: clocks, medians, and how a result is printed.
Must not know: what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table: `ours` and `theirs` in `unit`, and the goal for ours / theirs.

    goal: least or most ratio, as `at_least` says; None where the row only informs.
    """

    name: str
    what: str
    ours: float
    other: str
    theirs: float
    unit: str
    goal: float | None = None
    at_least: bool = True

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    @property
    def goal_words(self) -> str:
        return "" if self.goal is None else f"{'≥' if self.at_least else '≤'} {self.goal:g}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "goal": self.goal_words,
            "met": self.met,
        }


def seconds(act: Callable[[], object]) -> float:
    """How long an act takes: what it says itself, if it gives a float."""
    start = time.perf_counter()
    said = act()
    return said if type(said) is float else time.perf_counter() - start


def in_turn(*acts: Callable[[], object], repeats: int = 5) -> list[float]:
    """The median seconds of each act, all timed in turn, so that a busy machine slows all alike."""
    for act in acts:
        act()
    times: list[list[float]] = [[] for _ in acts]
    for _ in range(repeats):
        for act, held in zip(acts, times, strict=True):
            held.append(seconds(act))
    return [statistics.median(held) for held in times]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(results: Sequence[Result]) -> str:
    """The results in columns."""
    head = ("what", "this", "the other", "ratio", "goal", "")
    rows = [head]
    for each in results:
        mark = {True: "met", False: "MISSED", None: ""}[each.met]
        rows.append(
            (
                each.what,
                f"{each.ours:,.4g} {each.unit}",
                f"{each.theirs:,.4g} {each.unit}  {each.other}",
                f"{each.ratio:.3g}",
                each.goal_words,
                mark,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])
