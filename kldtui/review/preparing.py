"""Making an engine fit to branch from: connected, its text known, refused or verified, compared.

Knows: the order of these steps.
Must not know: the screen or the terminal; how any step is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kldtui.branching import bos_warning
from kldtui.engines import wait_ready
from kldtui.errors import UnusableEngine
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, compare_dictionaries
from kldtui.verify import VerifyResult, verify


async def connect(slot: EngineSlot, on_wait: Callable[[float], None] | None = None) -> None:
    """Connect an engine, waiting while it loads its model.

    `on_wait` gets the seconds waited, each time. Raises EngineError, and UnusableEngine for a
    server that no branch can be judged on.
    """
    slot.verified = slot.dictionary = None
    slot.info = await wait_ready(slot.engine, on_wait)
    if slot.refusal:
        raise UnusableEngine(f"{slot.engine.url}: {slot.refusal}")


def doubts(session: Session, slot: EngineSlot) -> list[str]:
    """What may spoil the branches of a connected engine, a line each."""
    if slot.info is None:
        return []
    doubt = bos_warning(session.ref, slot.info.add_bos, slot.info.bos_id)
    return [*slot.info.warnings, *([doubt] if doubt is not None else [])]


async def check(
    session: Session, slot: EngineSlot, position: Position | None, quant: int
) -> VerifyResult:
    """Verify a connected engine against its recording: a quant's own, else the reference's. The
    slot keeps what came out.

    quant: the number of that beside which the reference is told apart. Raises EngineError.
    """
    own, other = session.ref, None
    if session.quants:
        other = session.quants[quant].recording
    which: Literal["ref", "quant"] = "ref"
    if slot.role in session.names:
        own, other = session.quants[session.names.index(slot.role)].recording, session.ref
        which = "quant"
    slot.verified = await verify(slot.engine, own, other, session.index, position, which)
    return slot.verified


async def compare_pair(
    session: Session, quant: int, on_step: Callable[[str], None] | None = None
) -> list[str]:
    """What differs between the two engines' dictionaries, a line each, where they are of two kinds.

    Engines of one kind read one file format and are told apart by verification. Asked once for a
    pair of connections; empty also where there is nothing to compare. Raises EngineError.
    """
    a, b = (session.slot_for(side, quant) for side in ("ref", "quant"))
    if a is None or b is None or not a.kind or not b.kind or a.kind == b.kind:
        return []
    if a.dictionary is not None and b.dictionary is not None:
        return []
    return await compare_dictionaries(a, b, on_step)
