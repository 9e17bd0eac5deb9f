"""Which two branches are side by side, and the way back from those inside another.

Knows: arms, places, which branches are held.
Must not know: widgets, keys, engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kldtui.branching import QQ, QR, RQ, RR, Arm, Branch, Place, both

Pair = tuple[Arm, Arm]

PAIRS: tuple[Pair, ...] = ((RR, QQ), (RR, RQ), (RQ, QQ), (RR, QR), (QQ, QR), (RQ, QR))
"""The pairs of a root, in the order in which they are looked at: each model's own; whether the
reference recovers; the same quant token continued by both; then those with the fourth arm."""


@dataclass(frozen=True, slots=True)
class View:
    """A place that was gone to, the pair that is shown of it, and where the person came from.

    pane, token: the pane and its token that had the focus; the pane is empty outside the pair.
    """

    place: Place
    pair: Pair
    pane: str = ""
    token: int | None = None


def root_pairs(place: Place, held: Collection[str], made: Collection[Arm]) -> list[Pair]:
    """The pairs of a root: of branches that are held, or are made by default."""
    there = {arm for pair in PAIRS for arm in pair if arm in made or place.key(arm) in held}
    return [pair for pair in PAIRS if set(pair) <= there] or [PAIRS[0]]


def other_pairs(view: View, held: Mapping[str, Branch]) -> list[Pair]:
    """The pairs of a stream or picked token: its own, then each engine's with its own token."""
    own = both(view.pair[0].start if view.pair[0].start == view.pair[1].start else "stream")
    pairs = [own]
    if view.place.parent is None:
        for base, arm in ((RR, own[0]), (QQ, own[1])):
            if base != arm and view.place.key(base) in held:
                pairs.append((base, arm))
    return pairs


def following(pairs: list[Pair], now: Pair) -> Pair:
    """The pair after this one, in turn."""
    return pairs[(pairs.index(now) + 1) % len(pairs)] if now in pairs else pairs[0]
