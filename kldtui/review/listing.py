"""The root list as a person asked for it: the filter language and the orders.

Knows: roots and labels, and the few words that narrow them down.
Must not know: how a list is drawn, or where labels are kept.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import KldtuiError
from kldtui.index import Index
from kldtui.labels import BY_KEY
from kldtui.roots import (
    RootQuery,
    Thresholds,
    cost,
    is_root,
    klds_at,
    near_ties,
    parts,
    select,
)

Order = Literal["position", "cost", "kld", "margin", "queue"]
ListKind = Literal["roots", "ties", "moved", "invalid"]
ORDERS: tuple[Order, ...] = get_args(Order)
KINDS: tuple[ListKind, ...] = get_args(ListKind)

HELP = (
    "words that all hold: roots ties moved invalid · cost>0.3 kld>0.1 · near  far (near "
    "ties only, or none) · floor  nofloor (where the floor flips too, or not) · labelled  "
    "unlabelled  label:2 · branched · chunk:3 · quant:NAME · other words: the tokens' text"
)

_COMPARISON = re.compile(r"\b(cost|kld)\s*>=?\s*(\S+)", re.IGNORECASE)

_MOST_DIGITS = 12
_COMPARED = re.compile(r"(cost|kld|margin)[<>=]")


@dataclass(frozen=True, slots=True)
class Filter:
    """What the list shows. Thresholds in nats; `text` is matched against the tokens' text."""

    kind: ListKind = "roots"
    chunk: int | None = None
    min_cost: float = 0.0
    min_kld: float | None = None
    near_ties: Literal["all", "near", "far"] = "all"
    floor: Literal["all", "floor", "nofloor"] = "all"
    """Only where the reference recorded again flips too, or only where it does not."""
    branched: bool = False
    label: str | None = None
    """None: any; "labelled", "unlabelled", or a class key such as "2"."""
    quant: str | None = None
    text: str = ""

    def describe(self) -> str:
        """The filter in its own language; empty for the default one."""
        words: list[str] = [] if self.kind == "roots" else [self.kind]
        if self.chunk is not None:
            words.append(f"chunk:{self.chunk}")
        if self.min_cost > 0:
            words.append(f"cost>{self.min_cost:g}")
        if self.min_kld is not None:
            words.append(f"kld>{self.min_kld:g}")
        words += [word for word in (self.near_ties, self.floor) if word != "all"]
        if self.branched:
            words.append("branched")
        if self.label is not None:
            bare = self.label in ("labelled", "unlabelled")
            words.append(self.label if bare else f"label:{self.label}")
        if self.quant is not None:
            words.append(f"quant:{self.quant}")
        if self.text:
            words.append(self.text)
        return " ".join(words)


def parse_filter(text: str, quants: tuple[str, ...] = ()) -> Filter:
    """Read the filter language of HELP. Raises KldtuiError that names the word it cannot use."""
    out, given, rest = Filter(), dict[str, str](), list[str]()

    def take(name: str, word: str, value: object) -> None:
        nonlocal out
        if name in given and getattr(out, name) != value:
            raise KldtuiError(f"filter: {given[name]} and {word} cannot both hold; give one")
        given[name] = word
        out = dataclasses.replace(out, **{name: value})  # type: ignore[arg-type]

    for name in sorted(
        quants, key=len, reverse=True
    ):  # a name may hold spaces, or begin as another
        text, found = re.subn(rf"(?i:(?<!\S)quant:){re.escape(name)}(?!\S)", "", text)
        if found:
            take("quant", f"quant:{name}", name)
    spaced = _COMPARISON.sub(lambda m: f"{m[1]}>{m[2]}", text)
    for word in spaced.split():
        low = word.lower()
        if low in KINDS:
            take("kind", word, low)
        elif low in ("near", "far"):
            take("near_ties", word, low)
        elif low in ("floor", "nofloor"):
            take("floor", word, low)
        elif low == "branched":
            take("branched", word, True)
        elif low in ("labelled", "unlabelled"):
            take("label", word, low)
        elif low.startswith("label:"):
            if low[6:] not in BY_KEY:
                raise KldtuiError(f"filter: {word!r} is no class; write label:1 to label:7")
            take("label", word, low[6:])
        elif low.startswith("chunk:"):
            digits = low[6:].removeprefix("c")
            if not digits.isdecimal() or len(digits) > _MOST_DIGITS:
                raise KldtuiError(f"filter: {word!r} is not a chunk; write chunk:3")
            take("chunk", word, int(digits))
        elif low.startswith("quant:"):
            if quants and word[6:] not in quants:
                raise KldtuiError(f"filter: no quant {word[6:]!r}; there are {', '.join(quants)}")
            take("quant", word, word[6:])
        elif match := _COMPARISON.fullmatch(low):
            value = _nats(match[2])
            take("min_cost" if match[1] == "cost" else "min_kld", word, value)
        elif _COMPARED.match(low):
            raise KldtuiError(f"filter: cannot use {word!r}; write cost>0.3 or kld>0.1 (nats)")
        else:
            rest.append(word)
    return dataclasses.replace(out, text=" ".join(rest))


def _nats(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KldtuiError(f"filter: {text!r} is not a number of nats")
    return value


@dataclass(frozen=True, slots=True)
class Lookups:
    """What a list needs to know of labels and text."""

    labels: Callable[[int], Mapping[int, str]]
    """Of a quant, by its number: the class key of each label, by flat index."""
    text: Callable[[int], str]
    """Of a token, by its id."""
    in_call: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
    """For flat indices: which lie inside a tool call of the stream."""
    run: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """For flat indices, ascending: the number of the run (turn, else chunk) each lies in."""
    branched: Callable[[int], Collection[int]]
    """Of a quant, by its number: the flat indices at which branches are kept."""
    floor: int | None
    """The number of the null recording, if there is one."""


def list_roots(
    index: Index,
    wanted: Filter,
    order: Order,
    thresholds: Thresholds,
    quants: tuple[str, ...],
    lookups: Lookups,
) -> NDArray[np.int64]:
    """Flat indices of the positions to list, in order. int64[k].

    The union over the quants (or the one of the filter). `queue`: the first root of each run
    (turn, else chunk), before the later ones that follow from it; of each, those in tool calls
    first; then by cost; near ties after all others.
    """
    chosen = (quants.index(wanted.quant),) if wanted.quant else tuple(range(len(quants)))
    found = select(
        index,
        RootQuery(
            sort="position" if order == "queue" else order,
            quants=chosen,
            chunk=wanted.chunk,
            min_cost=wanted.min_cost,
            kind=wanted.kind,
        ),
    )
    if found.size == 0:
        return found
    if wanted.min_kld is not None:
        most = np.full(found.size, -np.inf, np.float32)
        for k in chosen:
            most = np.fmax(most, klds_at(index, k, found))
        found = found[most >= wanted.min_kld]
    if wanted.near_ties != "all" or order == "queue":
        near = _all_near(index, found, chosen, thresholds)
        if order == "queue":
            costs = root_costs(index, found, chosen)
            runs = lookups.run(found)
            later = np.zeros(found.size, bool)
            later[1:] = runs[1:] == runs[:-1]
            del runs  # a million of anything is worth giving back
            calls = lookups.in_call(found)
            np.nan_to_num(costs, copy=False, nan=-1.0)
            np.negative(costs, out=costs)
            ranks = np.lexsort((costs, ~calls, later, near))  # equals stay in their order
            found, near = found[ranks], near[ranks]
        if wanted.near_ties != "all":
            found = found[near if wanted.near_ties == "near" else ~near]
    if wanted.floor != "all" and lookups.floor is not None:
        flips = np.zeros(found.size, bool)
        for part in parts(index, found):
            flips[part] = is_root(index, lookups.floor, found[part])
        found = found[flips if wanted.floor == "floor" else ~flips]
    if wanted.label is not None or wanted.text or wanted.branched:
        found = found[_matching(index, found, wanted, chosen, lookups)]
    return found


def root_costs(
    index: Index, found: NDArray[np.int64], quants: tuple[int, ...]
) -> NDArray[np.float32]:
    """The dearest root of each position among `quants`, nats, float32[k]; NaN where none flips."""
    out = np.full(found.size, np.nan, np.float32)
    for part in parts(index, found):
        at, values = found[part], out[part]
        for k in quants:
            flips = is_root(index, k, at)
            values[flips] = np.fmax(values[flips], cost(index, k, at[flips]))
    return out


def _all_near(
    index: Index, found: NDArray[np.int64], quants: tuple[int, ...], thresholds: Thresholds
) -> NDArray[np.bool_]:
    """Which positions have roots of `quants`, all of them near ties, bool[k]."""
    out = np.zeros(found.size, bool)
    for part in parts(index, found):
        at = found[part]
        far, near = np.zeros(at.size, bool), np.zeros(at.size, bool)
        for k in quants:
            cheap = near_ties(index, k, thresholds, at)
            near |= cheap
            far |= is_root(index, k, at) & ~cheap
        out[part] = near & ~far
    return out


def _matching(
    index: Index,
    found: NDArray[np.int64],
    wanted: Filter,
    chosen: tuple[int, ...],
    lookups: Lookups,
) -> NDArray[np.bool_]:
    """Which positions have the text, the label and the branches that are asked for, bool[k]; each
    at one of the quants that flip there, or at any where none does."""
    out = np.zeros(found.size, bool)
    says = _Says(lookups.text, wanted.text)
    labelled = {k: _with_label(lookups.labels(k), wanted.label) for k in chosen}
    kept = {k: np.array([*lookups.branched(k)] * wanted.branched, np.int64) for k in chosen}
    for where in parts(index, found):
        part = found[where]
        flips = {k: is_root(index, k, part) for k in chosen}
        nobody = ~np.logical_or.reduce([*flips.values()])
        text, label, branches = (
            np.full(part.size, not asked) for asked in (wanted.text, wanted.label, wanted.branched)
        )
        for k in chosen:
            owns = flips[k] | nobody
            if wanted.text:
                text |= owns & (
                    says.of(index.ref["ref_id"][part]) | says.of(index.pairs[k]["quant_id"][part])
                )
            if wanted.label is not None:
                has = np.isin(part, labelled[k])
                label |= owns & (~has if wanted.label == "unlabelled" else has)
            if wanted.branched:
                branches |= owns & np.isin(part, kept[k])
        out[where] = text & label & branches
    return out


def _with_label(labels: Mapping[int, str], wanted: str | None) -> NDArray[np.int64]:
    """Flat indices of the labels that count: all, or those of one class."""
    every = wanted in (None, "labelled", "unlabelled")
    return np.array([i for i, key in labels.items() if every or key == wanted], np.int64)


class _Says:
    """Which tokens have a text in theirs; each is looked at once."""

    def __init__(self, text: Callable[[int], str], needle: str) -> None:
        self._text, self._needle = text, needle.casefold()
        self._known: dict[int, bool] = {}

    def of(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        few, which = np.unique(ids, return_inverse=True)
        for token in few.tolist():
            if token not in self._known:
                self._known[token] = self._needle in self._text(token).casefold()
        return np.array([self._known[token] for token in few.tolist()], bool)[which]
