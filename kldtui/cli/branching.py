"""`kldtui branch`: the continuations of one root, headless.

Knows: options, how branches become text on a terminal or JSON (docs/branch-json.md).
Must not know: Textual, HTTP, or how a branch is made.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kldtui.branching import (
    DEFAULT_LENGTH,
    DEFAULT_TOP_N,
    Arm,
    Branch,
    bos_warning,
    meeting,
    run_branch,
)
from kldtui.engines import Token, wait_ready
from kldtui.errors import EngineError, KldtuiError
from kldtui.facts import RootFacts
from kldtui.hints import hint
from kldtui.index import Kind, State
from kldtui.position import Position
from kldtui.recordings import name_files, split_named
from kldtui.session import EngineSlot, Session
from kldtui.verify import verify
from kldtui.vocab.glyphs import safe

_CONTEXT_SHOWN = 160


@click.command()
@click.argument("ref", type=click.Path(path_type=Path))
@click.option(
    "--quant", "quant_spec", required=True, metavar="[NAME=]FILE", help="The quant's recording."
)
@click.option("--root", required=True, metavar="c3:t97", help="Where to branch.")
@click.option("--ref-server", metavar="URL", help="The reference's llama-server.")
@click.option(
    "--quant-server",
    metavar="[NAME=]URL",
    help="The quant's llama-server. With one server, both arms are continued by it.",
)
@click.option(
    "-n",
    "length",
    type=click.IntRange(1),
    default=DEFAULT_LENGTH,
    show_default=True,
    metavar="N",
    help="Tokens of a branch, if it does not end before.",
)
@click.option(
    "--top",
    "top_n",
    type=click.IntRange(1),
    default=DEFAULT_TOP_N,
    show_default=True,
    metavar="N",
    help="Best tokens kept at each step.",
)
@click.option(
    "--arm",
    "arms",
    type=click.Choice(["Rr", "Qq", "Rq", "Qr"], case_sensitive=False),
    multiple=True,
    help="Which engine continues which token; may be given several times.  [default: Rr Qq]",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="tokenizer.json, a GGUF file, or a folder that holds either.",
)
@click.option("--no-verify", is_flag=True, help="Do not compare the servers with the recordings.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def branch(
    ref: Path,
    quant_spec: str,
    root: str,
    ref_server: str | None,
    quant_server: str | None,
    length: int,
    top_n: int,
    arms: tuple[str, ...],
    tokenizer: Path | None,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Continue from a root of REF: with its token, and with the quant's.

    Exits with 2 if a branch broke off; what arrived of it is printed all the same. API keys are
    read from KLDTUI_REF_API_KEY, KLDTUI_QUANT_API_KEY or KLDTUI_API_KEY.
    """
    if ref_server is None and quant_server is None:
        raise KldtuiError("branch: give --ref-server URL, --quant-server URL, or both")
    position = Position.parse(root)
    session = Session.open(ref, name_files([quant_spec]), tokenizer=tokenizer)
    try:
        if ref_server is not None:
            session.add_server("ref", ref_server)
        if quant_server is not None:
            name, url = split_named(quant_server)
            if name is not None and name not in session.names:
                raise KldtuiError(f"--quant-server {name}=…: the quant is {session.names[0]}")
            session.add_server(session.names[0], url)
        wanted = [Arm.parse(code) for code in arms or ("Rr", "Qq")]
        job = _Job(session, _facts(session, position), length, top_n, not no_verify)
        asyncio.run(job.run(list(dict.fromkeys(wanted)), as_json))
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
        self._warnings: list[str] = []

    async def run(self, arms: Sequence[Arm], as_json: bool) -> None:
        """Raises EngineError where a branch broke off, after all were printed."""
        facts = self._facts
        if not facts.is_root:
            why = "the two tie" if facts.kind == Kind.TIE else "both say the same"
            self._warn(f"{facts.position} is no root: {why}")
        try:
            slots = {arm: self._slot(arm) for arm in arms}
            for slot in {slot.role: slot for slot in slots.values()}.values():
                await self._prepare(slot)
            branches = [self._session.new_branch(self._facts, arm, slots[arm]) for arm in arms]
            if as_json:
                errors = await asyncio.gather(*(self._fill(b, slots[b.arm]) for b in branches))
                data = self._to_json(branches, slots)
                ascii_only = sys.stdout.isatty()  # JSON leaves C1 and bidi controls as they are
                click.echo(json.dumps(data, ensure_ascii=ascii_only, allow_nan=False))
            else:
                self._head()
                errors = [await self._print(b, slots[b.arm]) for b in branches]
                self._foot(branches)
        finally:
            for slot in self._session.slots.values():
                await slot.engine.close()
        failed = [error for error in errors if error is not None]
        if failed:
            raise failed[0]

    def _slot(self, arm: Arm) -> EngineSlot:
        slot = self._session.slot_for(arm.engine, 0)
        if slot is None:
            raise KldtuiError(f"arm {arm.code}: no server for it")
        return slot

    def _warn(self, words: str) -> None:
        self._warnings.append(words)
        click.echo(f"kldtui: {safe(words)}", err=True)

    async def _prepare(self, slot: EngineSlot) -> None:
        """Connect, ask for text where none is known, and verify."""
        told = False

        def waiting(_: float) -> None:
            nonlocal told
            if not told:
                click.echo(f"kldtui: {slot.engine.url} loads its model; waiting", err=True)
            told = True

        session, is_ref = self._session, slot.role == "ref"
        slot.info = await wait_ready(slot.engine, waiting)
        for warning in slot.info.warnings:
            self._warn(f"{slot.engine.url}: {warning}")
        own, other = session.ref, session.quants[0].recording
        if not is_ref:
            own, other = other, own
        words = bos_warning(own, slot.info.add_bos, slot.info.bos_id)
        if words is not None:
            self._warn(words)
        if not session.vocab:
            await session.learn_text(slot)
        if not self._verifies:
            return
        slot.verified = await verify(
            slot.engine,
            own,
            other,
            session.index,
            self._facts.position,
            "ref" if is_ref else "quant",
        )
        if not slot.verified.passed:
            self._warn(f"{slot.engine.url}: {slot.verified.detail}")

    async def _items(self, new: Branch, slot: EngineSlot) -> AsyncIterator[Token]:
        before = self._session.text_before(new)
        run = run_branch(slot.engine, new, self._length, self._top_n, before=before)
        async with contextlib.aclosing(run) as items:
            async for item in items:
                if isinstance(item, Token):
                    yield item

    async def _fill(self, new: Branch, slot: EngineSlot) -> EngineError | None:
        try:
            async for _ in self._items(new, slot):
                pass
        except EngineError as error:
            return error
        return None

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    def _head(self) -> None:
        facts, text = self._facts, self._session.vocab.text
        near = ", a near tie" if facts.is_root and facts.near_tie else ""
        ids = (facts.ref_id, facts.quant_id)
        ref, quant = (json.dumps(text([id]), ensure_ascii=False) for id in ids)
        click.echo(
            safe(
                f"{facts.position}  {ref} → {quant}  KLD {facts.kld:.3f}, margin "
                f"{facts.margin:.2f}, cost {facts.cost:.2f} nat{near}"
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
        if len(branches) == 2:
            click.echo(_meeting_words(*branches))

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
            "warnings": self._warnings,
        }
        for each in branches:
            stored = each.to_json()
            stored.update(engine=each.arm.engine, start=each.arm.start, server=each.engine)
            stored.update(served_by="ref" if slots[each.arm].role == "ref" else "quant")
            stored.update(hint=self._hint(each))
            data["arms"].append(stored)
        if len(branches) == 2:
            data["meeting"] = asdict(meeting(*branches))
        return data


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
