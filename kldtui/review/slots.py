"""The engine of one role in a review: who it is, how far it is, and what it cannot do.

Knows: the Engine protocol, what verification said, which engines a review can stand on.
Must not know: recordings, branches, the screen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kldtui.engines import Capabilities, Engine, EngineInfo
from kldtui.verify import VerifyResult
from kldtui.vocab import Vocabulary, compare, from_server

T = TypeVar("T")

_PADDING = re.compile(rb"\[PAD\d*\]")
"""How converters to GGUF name ids that the model has logits for, and its tokenizer no token."""


@dataclass(slots=True)
class EngineSlot:
    """A server of this review: `role` is "ref", or the name of the quant it serves."""

    role: str
    engine: Engine
    info: EngineInfo | None = None
    state: str = "waiting"
    """waiting, connecting, loading, ready, failed"""
    words: str = ""
    verified: VerifyResult | None = None
    dictionary: list[str] | None = None
    """What its dictionary has other than that of the engine beside it, a line each; None where
    they were not compared."""

    @property
    def capabilities(self) -> Capabilities | None:
        return self.engine.capabilities

    @property
    def kind(self) -> str:
        return self.info.kind if self.info is not None else ""

    @property
    def refusal(self) -> str:
        """Why no judged branch can stand on this engine; empty where one can."""
        can = self.capabilities
        if can is None:
            return ""
        why = ""
        if not can.returns_ids:
            why = "it does not say which ids it generates"
        elif not can.exact:
            why = "it takes text, which may become other ids than those of the recording"
        return "; ".join([f"no branch can be judged on it: {why}", *can.notes]) if why else ""

    def top_n(self, wanted: int) -> int:
        """How many candidates to ask for at each token."""
        limit = self.capabilities.top_n_limit if self.capabilities is not None else None
        return wanted if limit is None else min(wanted, limit)

    def falls_short(self, wanted: int) -> bool:
        """Whether it cannot do something that other servers can, and that changes a branch."""
        can = self.capabilities
        if can is None:
            return False
        able = can.takes_ids and can.streams_probabilities and can.cache_switch
        return not able or self.top_n(wanted) < wanted

    def limits(self, wanted: int) -> list[str]:
        """What this server cannot do, and why, a line each; `wanted` candidates are asked for."""
        can = self.capabilities
        if can is None:
            return []
        lines = list(can.notes)
        if self.top_n(wanted) < wanted:
            lines.append(
                f"it gives at most {can.top_n_limit} candidates for a token; that many are kept, "
                f"not {wanted}"
            )
        if not can.cache_switch and not any("cache" in note for note in can.notes):
            lines.append("a request cannot keep it from using its cache, which moves last digits")
        return lines


def one_server_each(jobs: Iterable[tuple[EngineSlot, T]]) -> list[list[tuple[EngineSlot, T]]]:
    """The jobs of each server, in order: those of one server run after each other, since requests
    that share a batch move each other's last digits."""
    groups: dict[str, list[tuple[EngineSlot, T]]] = {}
    for slot, job in jobs:
        groups.setdefault(slot.engine.url, []).append((slot, job))
    return list(groups.values())


async def compare_dictionaries(
    a: EngineSlot, b: EngineSlot, on_step: Callable[[str], None] | None = None
) -> list[str]:
    """What differs between two connected engines' dictionaries, a line each: n_vocab, and every
    id's bytes. Both slots keep it. Padding is tolerated, and an engine that does not say how many
    tokens it has is asked for those of the other. Raises EngineError."""
    sizes = [slot.info.n_vocab if slot.info is not None else None for slot in (a, b)]
    known = max((size for size in sizes if size is not None), default=0)
    lines: list[str] = []
    if not known:
        lines.append("neither engine says how many tokens its dictionary has")
    else:
        tables = []
        for slot, size in zip((a, b), sizes, strict=True):
            if on_step is not None:
                on_step(f"asking the {slot.role} engine for its dictionary")
            tables.append(await _table(slot, size, known))
        one, other = tables
        lines += [*_silent(a, one), *_silent(b, other), *compare(one, other)]
        if not (one and other) and None not in sizes and sizes[0] != sizes[1]:
            lines.append(f"they have {sizes[0]:,} and {sizes[1]:,} tokens")
    a.dictionary = b.dictionary = lines
    return lines


async def _table(slot: EngineSlot, n_vocab: int | None, asked: int) -> Vocabulary:
    async def pieces(ids: Sequence[int]) -> dict[int, bytes]:
        found = await slot.engine.pieces(ids)
        return {id: data for id, data in found.items() if not _PADDING.fullmatch(data)}

    name = f"the {slot.role} engine"
    return await from_server(pieces, range(n_vocab or asked), name, n_vocab=n_vocab)


def _silent(slot: EngineSlot, table: Vocabulary) -> list[str]:
    spelled = f"the {slot.role} engine does not say what its tokens are spelled"
    return [] if table else [spelled]
