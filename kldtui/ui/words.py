"""What the session's facts are called on screen.

Knows: the session's figures, and the words for them.
Must not know: widgets, keys' effects, where figures come from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from textual.widget import Widget

from kldtui.demo import Step
from kldtui.detail import Detail
from kldtui.facts import RootFacts
from kldtui.index import Bound, Kind, Progress, State
from kldtui.position import Position
from kldtui.recordings import Recording
from kldtui.report import format_stats, pair_stats
from kldtui.review.listing import Filter, Order
from kldtui.review.session import Session
from kldtui.roots import FLOOR_ROOTS
from kldtui.ui import marks
from kldtui.ui.bars import Part
from kldtui.ui.branch_pane import BranchPane
from kldtui.ui.branch_words import engine_lines
from kldtui.ui.detail_view import Shown
from kldtui.ui.text import duration, fit, many, nats
from kldtui.vocab import safe

_NOTE_CELLS = 14
"""So much of a note is shown in the status line; beside the classes there may be room for more."""


def scan_words(progress: Progress) -> str:
    """How far the background pass is."""
    share = progress.done / max(1, progress.total)
    left = f", {duration(progress.seconds_left)} left" if progress.seconds_left is not None else ""
    what = {"roots": "roots", "rest": "KLD", "waiting": "scan"}[progress.stage]
    rate = f" at {progress.bytes_per_s / 1e6:,.0f} MB/s" if progress.bytes_per_s else ""
    return f"{what} {share:.0%}{rate}{left}"


def step_words(step: Step) -> str:
    """How far a step of the demo's preparation is."""
    words = step.text
    if step.total:
        words += f" {step.done / step.total:.0%}"
    if step.rate:
        words += f", {step.rate / 1e6:.1f} MB/s"
    if step.remaining is not None:
        words += f", {duration(step.remaining)} left"
    return words


def list_title(wanted: Filter, order: Order, n: int) -> str:
    """The root list's title: how many, in what order, filtered how."""
    what = dataclasses.replace(wanted, kind="roots", text="").describe()
    if wanted.text:  # in quotes, so that a word that was mistyped is seen to be taken as text
        what = f'{what} "{safe(wanted.text)}"'.lstrip()
    kind = wanted.kind if n != 1 else wanted.kind.removesuffix("s")
    by = "review queue" if order == "queue" else f"by {order.upper() if order == 'kld' else order}"
    return f"{n} {kind}" + (f": {what}" if what else "") + f" ─ {by}"


def empty_words(session: Session, wanted: Filter, scanned: bool) -> str:
    """Why the root list is empty."""
    if not session.quants:
        return "no quant: start with --quant FILE"
    if not scanned:
        return "scanning…"
    if wanted.describe():
        return "none match: f changes the filter"
    compared = max((counts.positions for counts in session.counts), default=0)
    if not compared:
        return "nothing to compare: no position is scored and valid in both"
    return "no roots: every argmax is the same"


def status_parts(
    session: Session,
    quant: int,
    scan: str,
    activity: str,
    unsaved: bool,
    judged: RootFacts | None = None,
) -> tuple[list[Part], list[Part]]:
    """The status line: (left, right). judged: the position that is judged, and comes first then."""
    left: list[Part] = _judged_parts(session, judged) if judged is not None else []
    names = session.names
    ref = safe(session.ref.path.stem)
    if names:
        which = f" [{quant + 1}/{len(names)}]" if len(names) > 1 else ""
        if judged is None or not which:  # else it was named with the position
            left.append((f"{ref} → {safe(names[quant])}{which}", marks.TITLE))
        left += _cut_parts([session.ref, session.quants[quant].recording])
        if session.index.common_chunks[quant] < session.ref.shape.n_chunk:
            left.append((session.index.notes[quant][0], marks.WARN))
        counts = session.counts[quant]
        left.append((f"{many(counts.roots, 'root')} of {counts.positions:,}", marks.ROOT_STYLE))
        left.append((many(counts.near_ties, "near tie"), marks.NEAR_STYLE))
        for name in ("ties", "invalid", "missing"):
            if count := getattr(counts, name):
                left.append((f"{count} {name}", marks.TIE_STYLE))
        left.append(_floor_part(session))
    else:
        left.append((f"{ref}, no quant", marks.TITLE))
        left += _cut_parts([session.ref])
    if not session.vocab:
        left.append(("ids only: --tokenizer FILE gives text", marks.WARN))
    done, total = session.labelled()
    whole = " in all" if len(names) > 1 else ""  # a root of two quants is judged twice
    right: list[Part] = [(f"labelled {done}/{total}{whole}", marks.GOOD)]
    if unsaved:
        right.insert(0, ("NOT SAVED", marks.WARN))
    if scan:
        right.insert(0, (scan, marks.HIT))
    if activity:
        right.insert(0, (activity, marks.HIT))
    for role in dict.fromkeys(["ref", *(names[quant : quant + 1])]):
        slot = session.slots.get(role)
        if slot is not None:
            right.append(_engine_part(role, slot.state, slot.verified))
    if not session.slots:
        right.append(("no server", marks.DIM))
    return left, right


def _judged_parts(session: Session, facts: RootFacts) -> list[Part]:
    """Where one is and what it weighs, the most telling first: not all may find room."""
    text, style = _kind_words(facts)
    of = f" of {safe(session.names[facts.quant])}" if len(session.names) > 1 else ""
    parts: list[Part] = [(f"{facts.position}{of}", marks.TITLE), (text, style)]
    parts += [(figure, marks.PLAIN) for figure in _figure_words(facts)]
    if session.floor_flips(facts.index):
        parts.append(("floor flips too", marks.NEAR_STYLE))
    runs = session.self_run(facts.position, facts.quant)
    if runs is not None and runs.says is not None and runs.says != facts.ref_id:
        live = session.vocab.display(runs.says).table
        parts.insert(2, (f"live the reference says {live}", marks.WARN))
    elif runs is not None and not runs.agrees:
        parts.insert(2, ("≠ itself", marks.WARN))
    record = session.label(facts.position, facts.quant)
    if record is not None and record.note:
        parts.insert(3, (f"✎ {fit(safe(record.note), _NOTE_CELLS).rstrip()}", marks.GOOD))
    return parts


def _kind_words(facts: RootFacts) -> Part:
    return {
        Kind.ROOT: ("near tie", marks.QUIET) if facts.near_tie else ("root", marks.TITLE),
        Kind.TIE: ("tie, not a root", marks.TIE_STYLE),
        Kind.AGREE: ("no flip", marks.DIM),
    }[facts.kind]


def _figure_words(facts: RootFacts) -> list[str]:
    """Cost, margin, KLD and rank, bounds as such."""
    bound = "≥" if facts.bounds & Bound.REF_P_QUANT else ""
    at_least = "≥" if facts.bounds & Bound.KLD else ""
    out = [f"cost {nats(facts.cost, bound)}"] if facts.is_root else []
    out += [f"margin {nats(facts.margin)}", f"KLD {nats(facts.kld, at_least)}"]
    if facts.is_root and facts.ref_rank_quant:
        out.append(f"rank {facts.ref_rank_quant}")
    return out


def _cut_parts(recordings: Sequence[Recording]) -> list[Part]:
    """What is missing of a file, or that something else is wrong with it (the help says what)."""
    out = []
    for recording in recordings:
        name, held = safe(recording.path.name), recording.records
        if held < recording.records_expected:
            words = f"{name}: {held:,} of {recording.records_expected:,} records"
            out.append((words, marks.WARN))
        elif recording.problems:
            out.append((f"{name} has a note, see ?", marks.WARN))
    return out


def _floor_part(session: Session) -> Part:
    if session.floor_number is None:
        return ("floor not measured", marks.DIM)
    return (f"floor {many(session.counts[session.floor_number].roots, 'root')}", marks.DIM)


def _engine_part(role: str, state: str, verified: object) -> Part:
    name = "ref" if role == "ref" else safe(role)
    if state == "ready":
        if verified is None:
            return (f"{name} ○", marks.PLAIN)
        good = getattr(verified, "passed", False)
        return (f"{name} ●", marks.GOOD) if good else (f"{name} ✗ unverified", marks.WARN)
    if state == "failed":
        return (f"{name} ✗", marks.WARN)
    return (f"{name} {state}…", marks.DIM)


def position_detail(session: Session, position: Position, quant: int, n: int) -> Shown:
    """The top-N table of a stream position, its heading and the figures under it."""
    detail = session.detail(position, quant, n)
    before = ""
    if position.t:
        token = int(session.chunk_tokens(position.chunk)[position.t - 1])
        before = f' after "{session.vocab.display(token).table}"'
    names = ("ref", safe(session.names[quant]) if session.names else "quant")
    tag = session.tag(position)
    heading = f"{position}{f' {safe(tag)}' if tag else ''}{before}"
    i = session.flat(position)
    if i is None:
        return None, heading, [("context only: not scored", marks.DIM)], names
    figures: list[Part] = []
    if session.quants:
        figures += _figures(session, session.facts(i, quant), detail)
    for which, said in (("reference", detail.ref_words), (names[1], detail.quant_words)):
        if said and session.quants:
            figures.append((f"{which}: {said}", marks.INVALID_STYLE))
    return detail, heading, figures, names


def _figures(session: Session, facts: RootFacts, detail: Detail) -> list[Part]:
    out: list[Part] = []
    if facts.state == State.SCORED:
        kind, style = _kind_words(facts)
        out.append(("  ".join([kind, *_figure_words(facts)]), style))
        if session.floor_flips(facts.index):
            out.append(("the reference flips here against itself too (floor)", marks.NEAR_STYLE))
        runs = session.self_run(facts.position, facts.quant)
        if runs is not None:
            out.append((runs.words, marks.DIM if runs.agrees else marks.NEAR_STYLE))
            if runs.says is not None and runs.says != facts.ref_id:
                live = session.vocab.display(runs.says).table
                out.append((f"live, the reference says {live} here", marks.NEAR_STYLE))
        if len(session.quants) > 1:
            strip = "  ".join(
                f"{marks.FLIPS[stands]} {safe(name)}"
                for stands, name in zip(session.stands(facts.index), session.names, strict=True)
            )
            out.append((strip, marks.QUANT))
        stream = session.vocab.display(facts.stream_id).table
        bounds = (Bound.REF_STREAM, Bound.QUANT_STREAM)
        values = [
            f"{'≤ ' if facts.bounds & bound else ''}{nats(value)}"
            for value, bound in zip((facts.ref_stream, facts.quant_stream), bounds, strict=True)
        ]
        out.append((f"stream token {stream}: log p {values[0]} / {values[1]}", marks.STREAM))
    elif facts.state == State.PENDING:
        out.append(("not scanned yet", marks.DIM))
    floors = [
        f"{name} ≤ {math.exp(value):.0e}"
        for name, value in (("ref", detail.ref_floor), ("quant", detail.quant_floor))
        if value is not None
    ]
    if facts.state == State.SCORED and facts.kld_more >= 0.0005:
        most = f"what the clamp hides adds at most {facts.kld_more:.3f} to the KLD"
        out.append((most, marks.DIM))
    if floors:
        out.append((f"⊥ clamp: {', '.join(floors)}", marks.DIM))
    record = session.label(facts.position, facts.quant)
    if record is not None and record.note:
        out.append((f"note: {safe(record.note)}", marks.GOOD))
    return out


def statistics(
    session: Session, quant: int, told: Callable[[float], None], width: int
) -> tuple[str, str]:
    """Title and text of the statistics, as `kldtui stats` prints them, in `width` cells where
    they have room. told: see `pair_stats`."""
    numbers = [quant] if session.floor_number is None else [quant, session.floor_number]
    found = []
    for k, number in enumerate(numbers):

        def tell(share: float, before: int = k) -> None:
            told((before + share) / len(numbers))

        found.append(pair_stats(session.index, number, session.thresholds, session.runs, tell))
    stats, floor = found[0], found[1] if len(found) > 1 else None
    whole = "" if session.index.complete else " ─ as far as scanned"
    text = format_stats(stats, floor, by_chunk=False, width=width)
    return f"{safe(session.names[quant])} against {safe(session.ref.path.name)}{whole}", text


def copied(session: Session, position: Position, quant: int, focused: Widget | None) -> str:
    """What `y` copies: the branch in focus, or the position with its tokens."""
    if isinstance(focused, BranchPane) and focused.branch is not None:
        branch = focused.branch
        return session.vocab.text([branch.start_id, *branch.ids])
    i = session.flat(position)
    if i is None or not session.quants:
        token = int(session.chunk_tokens(position.chunk)[position.t])
        return f"{position} {session.vocab.text([token])!r}"
    facts = session.facts(i, quant)
    ref, other = session.vocab.text([facts.ref_id]), session.vocab.text([facts.quant_id])
    return " ".join([f"{position} {ref!r} → {other!r}", *_figure_words(facts)])


def help_facts(session: Session, top_n: int) -> list[str]:
    """What the help says of this review: files, vocabulary, thresholds, engines."""
    lines = [f"reference {safe(str(session.ref.path))}"]
    for quant, notes in zip(session.quants, session.index.notes, strict=False):
        lines.append(f"quant {safe(quant.name)}: {safe(str(quant.recording.path))}")
        lines += [safe(note) for note in notes if safe(note) not in lines]  # of ref only once
    if not session.quants:
        lines += [safe(problem) for problem in session.ref.problems]
    lines.append(f"text from {safe(session.vocab.source)}. {session.vocab.hint}")
    near = session.thresholds
    source = near.near_tie_source
    if source == "default" and session.floor is not None and session.index.complete:
        source = f"the default: a floor of fewer than {FLOOR_ROOTS} roots sets none"
    lines.append(f"near tie: cost under {near.near_tie:.3g} nat ({source})")
    if session.floor is None:
        lines.append(
            "floor not measured: record the reference again with another -ub, --floor FILE"
        )
    if session.labels is not None:
        lines.append(f"labels in {safe(str(session.labels.path))}")
        lines += [safe(warning) for warning in session.labels.warnings]
    for slot in session.slots.values():
        lines += engine_lines(slot, top_n)
    lines += [safe(warning) for warning in session.shelf.warnings]
    for log in session.shelf.logs:
        lines.append(f"{len(log)} branches made ahead, in {safe(str(log.path))}")
        lines += [safe(warning) for warning in log.warnings]
    return lines
