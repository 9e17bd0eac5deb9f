"""`kldtui branch`: the continuations of one root, headless, and the options for many.

Knows: options, how branches become text on a terminal or JSON (docs/branch-json.md).
Must not know: Textual, HTTP, or how a branch is made.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kldtui.branching import (
    Arm,
    Branch,
    meeting,
    run_branch,
)
from kldtui.cli.batching import Batch, Roots, chosen_roots, parse_arms, scan
from kldtui.cli.engines import Preparation, add_engines, quant_engine_options, ref_engine_options
from kldtui.cli.printing import print_json
from kldtui.cli.values import FILE, SOURCE, configured
from kldtui.config import load_config
from kldtui.engines import Token
from kldtui.errors import EngineError, KldtuiError
from kldtui.facts import RootFacts
from kldtui.hints import hint
from kldtui.index import Bound, Kind, State
from kldtui.position import Position
from kldtui.recordings import name_files
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot, one_server_each
from kldtui.vocab.glyphs import safe

_CONTEXT_SHOWN = 160


@click.command()
@click.argument("ref", type=FILE)
@click.option(
    "--quant",
    "quant_spec",
    required=True,
    type=SOURCE,
    metavar="[NAME=]FILE",
    help="The quant's recording.",
)
@click.option("--root", metavar="c3:t97", help="Where to branch.")
@click.option(
    "--roots",
    type=Roots(),
    metavar="all|N|FILE",
    help="Where to branch, into -o FILE: all roots, N of them (the same each time), or those of a "
    "file with a position a line, as kldtui flips prints them.",
)
@ref_engine_options
@quant_engine_options
@click.option(
    "--arms",
    "--arm",
    "arms",
    multiple=True,
    metavar="R.r,Q.q,R.q,Q.r",
    help="Which engine (R, Q) continues whose token (r, q).  [default: R.r, Q.q and R.q, as far "
    "as their engines are there]",
)
@configured(
    "branch_tokens",
    "-n",
    "length",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a branch, if it does not end before.",
)
@configured(
    "top_n_stored",
    "--top-n",
    type=click.IntRange(1),
    metavar="N",
    help="Best tokens kept at each step, or as many as the server gives.",
)
@click.option(
    "-o",
    "--output",
    "out",
    type=FILE,
    metavar="FILE",
    help="Add the branches to this file, for kldtui --branches FILE; what it has stays.",
)
@click.option("--yes", is_flag=True, help="Do not ask before making the branches of --roots.")
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="FILE",
    help="tokenizer.json, a GGUF file, or a folder that holds either.",
)
@click.option("--no-verify", is_flag=True, help="Do not compare the engines with the recordings.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text; of one root.")
def branch(
    ref: Path,
    quant_spec: str,
    root: str | None,
    roots: str | None,
    ref_server: str | None,
    ref_model: Path | None,
    quant_servers: tuple[str, ...],
    quant_models: tuple[str, ...],
    arms: tuple[str, ...],
    length: int,
    top_n: int,
    out: Path | None,
    yes: bool,
    tokenizer: Path | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Continue from a root of REF, or from many: with its token, and with the quant's.

    Exits with 2 if a branch broke off; what arrived of it is kept all the same. API keys are
    read from KLDTUI_REF_API_KEY, KLDTUI_QUANT_API_KEY or KLDTUI_API_KEY.
    """
    if not (ref_server or ref_model or quant_servers or quant_models):
        raise KldtuiError("branch: give --ref-server URL, --quant-server URL, or both")
    if (root is None) == (roots is None):
        raise KldtuiError("branch: give --root c3:t97, or --roots all|N|FILE with -o FILE")
    if roots is not None and (out is None or as_json):
        raise KldtuiError("branch: --roots goes with -o FILE, and without --json")
    wanted = parse_arms(arms)
    position = Position.parse(root) if root is not None else None
    session = Session.open(
        ref,
        name_files([quant_spec]),
        tokenizer=tokenizer,
        default_near_tie=load_config().near_tie,
    )
    session.branch_tokens = length
    try:
        add_engines(session, ref_server, ref_model, quant_servers, quant_models)
        if out is None and position is not None:
            facts = _facts(session, position)
            job = _Job(session, facts, length, top_n, not no_verify)
            asyncio.run(job.run(wanted or session.arms(0), as_json))
            return
        scan(session)
        positions = chosen_roots(session, roots) if roots is not None else []
        if position is not None and not _facts(session, position).is_root:
            raise KldtuiError(f"{position} is no root; without -o it is branched from all the same")
        if position is not None:
            positions = [position]
        if out is not None:
            batch = Batch(
                session,
                positions,
                wanted,
                out,
                length=length,
                top_n=top_n,
                verifies=not no_verify,
                yes=yes,
            )
            asyncio.run(batch.run())
    finally:
        session.close()


def _facts(session: Session, position: Position) -> RootFacts:
    i = session.flat(position)
    if i is None:
        chunks = session.ref.shape.n_chunk
        if not 0 <= position.chunk < chunks:
            raise KldtuiError(f"{position}: {session.ref.path.name} has chunks 0 to {chunks - 1}")
        scored = session.ref.scored(position.chunk)
        which = f"t{scored[0]} to t{scored[-1]}" if scored.size else "none"
        raise KldtuiError(f"{position} is not recorded; of chunk {position.chunk}: {which}")
    session.index.scan_position(position)
    facts = session.facts(i, 0)
    if facts.state != State.SCORED:
        raise KldtuiError(f"{position} is {facts.state.name.lower()} in one of the recordings")
    return facts


class _Job:
    """Servers made ready and verified, then one branch after the other."""

    def __init__(
        self, session: Session, facts: RootFacts, length: int, top_n: int, verifies: bool
    ) -> None:
        self._session = session
        self._facts = facts
        self._length = length
        self._top_n = top_n
        self._verifies = verifies
        self._preparation = Preparation(session, top_n)

    async def run(self, arms: Sequence[Arm], as_json: bool) -> None:
        """Raises EngineError where a branch broke off, after all were printed."""
        facts, session = self._facts, self._session
        if not facts.is_root:
            why = "the two tie" if facts.kind == Kind.TIE else "both say the same"
            self._preparation.warn(f"{facts.position} is no root: {why}")
        try:
            slots = {arm: self._slot(arm) for arm in arms}
            for slot in {slot.role: slot for slot in slots.values()}.values():
                await self._preparation.ready(slot)
                if self._verifies:
                    await self._preparation.verified(slot, facts.position)
            await self._preparation.compared()
            place = session.place(facts.position, facts.quant)
            jobs = [(slots[arm], session.new_branch(place, arm, slots[arm])) for arm in arms]
            branches = [each for _, each in jobs]
            if as_json:
                groups = one_server_each(jobs)
                filled = await asyncio.gather(*(self._fill(group) for group in groups))
                errors = [error for group in filled for error in group]
                print_json(self._to_json(branches, slots), indent=None)
            else:
                self._head()
                errors = [await self._print(each, slot) for slot, each in jobs]
                self._foot(branches)
        finally:
            await session.close_engines()
        failed = [error for error in errors if error is not None]
        if failed:
            raise failed[0]

    def _slot(self, arm: Arm) -> EngineSlot:
        slot = self._session.slot_for(arm.engine, 0)
        if slot is None:
            side = "ref" if arm.engine == "ref" else "quant"
            raise KldtuiError(f"arm {arm.code}: no engine for it; give --{side}-server URL")
        return slot

    async def _items(self, new: Branch, slot: EngineSlot) -> AsyncIterator[Token]:
        before, top_n = self._session.text_before(new), slot.top_n(self._top_n)
        run = run_branch(slot.engine, new, self._length, top_n, before=before)
        async with contextlib.aclosing(run) as items:
            async for item in items:
                if isinstance(item, Token):
                    yield item

    async def _fill(self, jobs: Sequence[tuple[EngineSlot, Branch]]) -> list[EngineError | None]:
        """The branches of one server, after each other."""
        errors: list[EngineError | None] = []
        for slot, new in jobs:
            try:
                async for _ in self._items(new, slot):
                    pass
                errors.append(None)
            except EngineError as error:
                errors.append(error)
        return errors

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    def _head(self) -> None:
        facts, text = self._facts, self._session.vocab.text
        near = ", a near tie" if facts.is_root and facts.near_tie else ""
        ids = (facts.ref_id, facts.quant_id)
        ref, quant = (json.dumps(text([id]), ensure_ascii=False) for id in ids)
        at_least = "≥" if facts.bounds & Bound.KLD else ""
        bound = "≥" if facts.bounds & Bound.REF_P_QUANT else ""
        click.echo(
            safe(
                f"{facts.position}  {ref} → {quant}  KLD {at_least}{facts.kld:.3f}, margin "
                f"{facts.margin:.2f}, cost {bound}{facts.cost:.2f} nat{near}"
            )
        )
        for slot in self._session.slots.values():
            if slot.verified is not None and slot.verified.passed:
                click.echo(safe(f"{slot.engine.url}: {slot.verified.detail}"))

    async def _print(self, new: Branch, slot: EngineSlot) -> EngineError | None:
        engine, start = (
            "reference" if side == "ref" else "quant" for side in (new.arm.engine, new.arm.start)
        )
        click.echo(f"\n── {new.arm.code}: the {engine} engine continues the {start} token ──")
        before = self._session.text_before(new)
        click.echo("…" + _visible(before[-_CONTEXT_SHOWN:]), nl=False)
        reader = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        try:
            async for token in self._items(new, slot):
                click.echo(_visible(reader.decode(token.data)), nl=False)
        except EngineError as error:
            return error
        finally:
            click.echo(_visible(reader.decode(b"", True)))
            click.echo(f"[{_ending(new)}]")
        return None

    def _foot(self, branches: Sequence[Branch]) -> None:
        for each in branches:
            found = self._hint(each)
            if found is not None:
                click.echo(safe(f"{each.arm.code}: hint: {found['words']}"))
        for a, b in _pairs(branches):
            click.echo(f"{a.arm.code} and {b.arm.code}: {_meeting_words(a, b)}")

    def _hint(self, new: Branch) -> dict[str, Any] | None:
        found = hint(self._session.text_before(new), new.text, complete=new.complete)
        return found.to_json() if found is not None else None

    # ── JSON ─────────────────────────────────────────────────────────────────────────────────

    def _to_json(self, branches: Sequence[Branch], slots: dict[Arm, EngineSlot]) -> dict[str, Any]:
        facts, session = self._facts, self._session
        data: dict[str, Any] = {
            "position": str(facts.position),
            "chunk": facts.position.chunk,
            "t": facts.position.t,
            "ref": session.ref.path.name,
            "quant": session.names[0],
            "root": facts.is_root,
            **session.evidence(facts),
            "arms": [],
            "verify": {
                "ref" if slot.role == "ref" else "quant": slot.verified.to_json()
                for slot in session.slots.values()
                if slot.verified is not None
            },
            "warnings": self._preparation.warnings,
        }
        for each in branches:
            stored = each.to_json()
            stored.update(engine=each.arm.engine, start=each.arm.start, server=each.engine)
            stored.update(served_by="ref" if slots[each.arm].role == "ref" else "quant")
            stored.update(hint=self._hint(each))
            data["arms"].append(stored)
        pairs = _pairs(branches)
        if pairs:
            data["meeting"] = asdict(meeting(*pairs[0]))
        data["meetings"] = [
            {"arms": [a.arm.code, b.arm.code], **asdict(meeting(a, b))} for a, b in pairs
        ]
        return data


def _pairs(branches: Sequence[Branch]) -> list[tuple[Branch, Branch]]:
    """The branches two by two, as the review shows them."""
    return list(itertools.combinations(branches, 2))


def _visible(text: str) -> str:
    """A model's text for a terminal: glyphs for what would steer it, but lines as lines."""
    return "\n".join(safe(line) for line in text.split("\n"))


def _ending(new: Branch) -> str:
    speed = f" · {new.tokens_per_second:.0f} tok/s" if new.tokens_per_second else ""
    left = "" if new.complete else ", unfinished"
    return f"{len(new.tokens)} tokens{speed} · {new.stop}{left}"


def _meeting_words(a: Branch, b: Branch) -> str:
    found = meeting(a, b)
    if found.parts_at is None:
        return "the two branches go on alike"
    words = f"they part at +{found.parts_at}"
    if found.meet_a is None:
        return words + " and do not meet again"
    return f"{words} and meet again at +{found.meet_a}/+{found.meet_b} for {found.meet_length}"
