"""What branches and their engines are called on screen.

Knows: the session's branches and engines, and the words for them.
Must not know: widgets, keys' effects, how branches are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kldtui.branching import RR, Arm, Branch, Meeting, Place, is_recorded, meeting
from kldtui.detail import align
from kldtui.position import Position
from kldtui.review.session import Session
from kldtui.review.slots import EngineSlot
from kldtui.rows import Invalid, Row, TopRow
from kldtui.ui import marks
from kldtui.ui.actions import BY_ID, keys_of
from kldtui.ui.bars import Part
from kldtui.ui.desk import Desk
from kldtui.ui.detail_view import Shown
from kldtui.ui.text import duration
from kldtui.vocab import safe

SILENCE_SECONDS = 3.0
"""After so long without a token it is said that none comes."""
STOPS = {
    "eog": "end of turn",
    "tool_call": "tool call closed",
    "loop": "loops",
    "limit": "limit",
    "context": "context full",
    "cancelled": "stopped",
    "error": "failed",
}


def branch_detail(
    session: Session, pair: Mapping[str, Branch | None], side: str, token: int
) -> Shown:
    """The top-N of a generated token, beside the other branch's as long as both have the same text
    before it."""
    own, other = pair[side], pair["right" if side == "left" else "left"]
    beside = own is not None and other is not None and _same_until(own, other, token)
    rows = [
        _row(session, pair[name], token) if name == side or beside else None
        for name in ("left", "right")
    ]
    stream = own.tokens[token].id if own is not None and token < len(own.tokens) else None
    detail = align(rows[0], rows[1], stream, 10)
    codes = [
        branch.arm.code if branch is not None and (name == side or beside) else "–"
        for name, branch in pair.items()
    ]
    figures: list[Part] = [("· the generated token of the focused branch", marks.DIM)]
    if other is not None and not beside:
        figures.append((f"{other.arm.code} has another text before this token", marks.DIM))
    return detail, f"branch +{token}", figures, (codes[0], codes[1])


def _same_until(a: Branch, b: Branch, token: int) -> bool:
    """Whether two branches of one root have the same tokens before one of this number."""
    alike = (a.parent, a.start_id) == (b.parent, b.start_id)
    return alike and min(len(a.ids), len(b.ids)) >= token and a.ids[:token] == b.ids[:token]


def _row(session: Session, branch: Branch | None, token: int) -> Row | None:
    if branch is None or token >= len(branch.tokens):
        return None
    if is_recorded(branch):
        t = branch.position.t + 1 + token
        return session.ref.row(Position(branch.position.chunk, t))
    known = dict(branch.tokens[token].top)
    return TopRow(known, {}, Invalid.NO) if known else None


def meeting_of(left: Branch | None, right: Branch | None) -> Meeting | None:
    """Where the pair parts and meets again."""
    if left is None or right is None or not left.tokens or not right.tokens:
        return None
    return meeting(left, right)


def branch_words(
    session: Session, desk: Desk, branch: Branch, meeting: Meeting | None, side: str
) -> tuple[str, str]:
    """Title and status line of a branch pane."""
    engine = "reference" if branch.arm.engine == "ref" else safe(branch.quant)
    start = session.vocab.display(branch.start_id).table
    title = f"{branch.arm.code} {engine} ◂ {start}{_inside(session, branch)}{_doubt(branch)}"
    elapsed = desk.elapsed(branch)
    if branch.error:
        parts = [safe(branch.error)]
    elif branch.stop is not None:
        parts = [_stop_words(session, branch)]
    elif desk.queued(branch):
        parts = ["waits for the other arm of its engine"]
    elif branch.tokens and (silence := desk.silence(branch)) >= SILENCE_SECONDS:
        parts = [f"no token for {duration(silence)}: the rest may come at once"]
    else:
        parts = ["running…" if branch.tokens or not elapsed else "reading the prefix…"]
    if is_recorded(branch):
        parts.insert(0, "the recorded stream itself, no server")
    elif _from_file(branch):
        parts.insert(0, "its own recorded rollout, no server")
    if side == "right" and meeting is not None:
        parts.append(_meeting_words(meeting))
    if branch.arm == RR and branch.parent is None:
        parts += _floor_words(session, branch)
    n = len(branch.tokens)
    parts.append(f"{n} token{'s' * (n != 1)}")
    if branch.tokens_per_second and branch.stop is not None:
        parts.append(f"{branch.tokens_per_second:.0f} tok/s")
    if branch.seconds and branch.stop is not None:
        parts.append(f"{branch.seconds:.1f} s")
    elif elapsed is not None and elapsed >= 1:
        parts.append(duration(elapsed))
    return title, " · ".join(parts)


def _stop_words(session: Session, branch: Branch) -> str:
    if branch.stop == "limit" and is_recorded(branch) and not goes_on(session, branch):
        return "the chunk ends here"
    words = STOPS.get(branch.stop or "", branch.stop or "")
    offered = branch.stop in ("limit", "cancelled") and goes_on(session, branch)
    return f"{words}, + goes on" if offered else words


def goes_on(session: Session, branch: Branch) -> bool:
    """Whether a branch can be made longer: there is more of the stream, or an engine for it."""
    if branch.stop == "eog":
        return False
    if is_recorded(branch):
        end = branch.position.t + 1 + len(branch.tokens)
        return end < session.chunk_tokens(branch.position.chunk).size
    quant = session.names.index(branch.quant) if branch.quant in session.names else 0
    return session.slot_for(branch.arm.engine, quant) is not None


def _floor_words(session: Session, branch: Branch) -> list[str]:
    """What the reference says of itself at this root, where it was asked."""
    quant = session.names.index(branch.quant) if branch.quant in session.names else 0
    runs = session.self_run(branch.position, quant)
    if runs is None:
        return []
    parts = [at for at in (runs.parts_off, runs.parts_on) if at is not None]
    return [f"≠ itself +{min(parts)}" if parts else f"= itself over {runs.tokens}"]


def _from_file(branch: Branch) -> bool:
    """Whether a recording is where the branch comes from, and no server."""
    details = branch.engine.get("details")
    return is_recorded(branch) or (isinstance(details, Mapping) and "recorded" in details)


def _doubt(branch: Branch) -> str:
    checked = branch.verify or {}
    if _from_file(branch):
        return ""
    if checked.get("verdict") != "ok":
        return " ─ NOT VERIFIED"
    return " ─ other dictionary" if checked.get("dictionary") else ""


def _inside(session: Session, branch: Branch) -> str:
    """Where a branch begins, if inside another one."""
    if branch.parent is None:
        return ""
    quant = session.names.index(branch.quant) if branch.quant in session.names else 0
    held = session.recall(branch.position, quant).values()
    outer = next((each for each in held if each.id == branch.parent.branch), None)
    return f" in {outer.arm.code if outer else 'a branch'} +{branch.parent.offset}"


def _meeting_words(meeting: Meeting) -> str:
    if meeting.parts_at is None:
        return "no difference so far"
    words = f"≠ +{meeting.parts_at}"
    if meeting.meet_a is not None and meeting.meet_b is not None:
        words += f", meet +{meeting.meet_a}/+{meeting.meet_b} ({meeting.meet_length})"
    return words


def no_branch_words(session: Session, desk: Desk, arm: Arm, place: Place) -> tuple[str, str]:
    """Title and words of a branch pane without a branch."""
    quant = safe(session.names[place.quant]) if session.names else "quant"
    side = "reference" if arm.engine == "ref" else quant
    title = f"{arm.code} {side}"
    root = place.starts.get("ref") != place.starts.get("quant")
    if not place.has(arm) or (arm.start in ("ref", "quant") and not root):
        return title, "no root here: . goes to the next one; t branches from the stream token"
    start = session.vocab.display(place.starts[arm.start]).table
    slot = session.slot_for(arm.engine, place.quant)
    if slot is None and desk.prepares:
        return title, f"{start} … follows when the {side} server is there"
    if slot is None:
        return title, f"{start} … no {side} server: c connects one, or start with {_option(arm)}"
    if slot.state == "failed":
        return title, f"{slot.role} server: {safe(slot.words)} ─ c or b tries again"
    if slot.state in ("connecting", "loading"):
        return title, f"{slot.role} server: {safe(slot.words) or slot.state}"
    if desk.awaits(place, arm):
        return title, f"{start} … begins soon: {safe(desk.activity) or 'others come first'}"
    return title, f"b branches here: {start} …"


def _option(arm: Arm) -> str:
    name = "ref" if arm.engine == "ref" else "quant"
    return f"--{name}-server URL or --{name}-model FILE"


def hint_words(session: Session, position: Position, quant: int) -> str:
    """The program's guess about a root; never a label."""
    if not session.names:
        return ""
    hint = session.hint(position, quant)
    return safe(hint.words) if hint is not None else ""


def key_entries(
    judging: bool, busy: bool, begun: bool, grows: bool, keymap: Mapping[str, str]
) -> Sequence[tuple[str, str, str]]:
    """The key line: what is most useful now, first. begun: whether there is a branch, grows:
    whether one can be longer."""
    shown = {
        "branch": "branch",
        "next-root": "next root",
        "help": "help",
        "filter": "filter",
        "sort": "sort",
        "goto": "go to",
        "search": "search",
        "verify": "verify",
        "zoom": "zoom",
        "next-pane": "pane",
        "undo": "undo",
        "quit": "quit",
    }
    if judging:
        shown = {
            "back": "stop" if busy else "back",
            **({} if begun or busy else {"branch": "branch"}),
            **({"longer": "longer"} if grows else {}),
            **({"arms": "other pair"} if begun else {}),
            "next-root": "next root",
            "help": "help",
            **({"fourth": "Q·r"} if begun else {}),
            "pick": "pick",
            "note": "note",
            "undo": "undo",
            "zoom": "zoom",
            "next-pane": "pane",
        }
    return [(name, keys_of(BY_ID[name], keymap), words) for name, words in shown.items()]


def engine_lines(slot: EngineSlot, top_n: int) -> list[str]:
    """What the help says of an engine: who it is, what verification said, what it cannot do."""
    model = safe(slot.info.model) if slot.info else ""
    build = safe(slot.info.build) if slot.info else ""
    said = f" {safe(slot.verified.detail)}" if slot.verified else ""
    state = slot.state if not slot.words else f"{slot.state}, {safe(slot.words)}"
    kind = f"{slot.kind} " if slot.kind else ""
    lines = [f"{slot.role} server {kind}{safe(slot.engine.url)}: {state} {model} {build}{said}"]
    lines += [f"  {safe(line)}" for line in slot.limits(top_n)]
    if slot.dictionary:
        lines += [f"  its dictionary differs: {safe(line)}" for line in slot.dictionary]
    return lines
