"""Where two continuations part, and where they meet again.

Knows: lists of ids.
Must not know: engines, text, the screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kldtui.branching.branch import Branch

_MEET_TOKENS = 4
_REACH = 1024


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where two branches part and meet again, as indices into their ids; None: they do not.

    meet_length: how many equal tokens follow where they meet.
    """

    parts_at: int | None
    meet_a: int | None
    meet_b: int | None
    meet_length: int


def meeting(a: Branch, b: Branch) -> Meeting:
    """Where two branches part and meet again, as `divergence` of their ids has it."""
    ended = all(each.stop in ("eog", "tool_call") for each in (a, b))
    return divergence(a.ids, b.ids, ended=ended)


def divergence(a: Sequence[int], b: Sequence[int], *, ended: bool = False) -> Meeting:
    """Compare two continuations token by token.

    They meet again at the earliest pair of places (least sum of the two indices, then least
    shift) from which at least 4 tokens are equal. With `ended`, both having come to their own
    end, a shorter common end counts too. Linear but for repeated text.
    """
    parts = _common(a, b, 0, 0)
    if parts == len(a) == len(b):
        return Meeting(None, None, None, 0)
    best = _meeting_place(a, b, parts)
    if best is not None:
        i, j = best[2], best[3]
        return Meeting(parts, i, j, _common(a, b, i, j))
    if ended:
        k = 0
        while k < min(len(a), len(b)) - parts and a[-1 - k] == b[-1 - k]:
            k += 1
        if k:
            return Meeting(parts, len(a) - k, len(b) - k, k)
    return Meeting(parts, None, None, 0)


def _meeting_place(
    a: Sequence[int], b: Sequence[int], parts: int
) -> tuple[int, int, int, int] | None:
    """(sum, shift, i, j) of the earliest places from which enough tokens are equal.

    Most meet soon: only the first tokens are looked at, then four times as many, and so on.
    """
    reach, longest = parts + _REACH, max(len(a), len(b))
    while True:
        best = _within(a, b, parts, reach)
        # What lies farther out has at least this sum.
        if reach >= longest or (best is not None and best[0] < parts + reach):
            return best
        reach = parts + 4 * (reach - parts)


def _within(
    a: Sequence[int], b: Sequence[int], parts: int, reach: int
) -> tuple[int, int, int, int] | None:
    """The best pair of places that are both before `reach`."""
    places: dict[tuple[int, ...], list[int]] = {}
    for j in range(parts, min(reach, len(b) - _MEET_TOKENS + 1)):
        places.setdefault(tuple(b[j : j + _MEET_TOKENS]), []).append(j)
    best: tuple[int, int, int, int] | None = None
    for i in range(parts, min(reach, len(a) - _MEET_TOKENS + 1)):
        if best is not None and i + parts > best[0]:
            break
        for j in places.get(tuple(a[i : i + _MEET_TOKENS]), ()):
            found = (i + j, abs(i - j), i, j)
            best = found if best is None else min(best, found)
    return best


def _common(a: Sequence[int], b: Sequence[int], i: int, j: int) -> int:
    k = 0
    while i + k < len(a) and j + k < len(b) and a[i + k] == b[j + k]:
        k += 1
    return k
