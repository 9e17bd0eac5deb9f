"""Is this server the model that made this recording?

Knows: recordings, the index's columns (to choose chunks), the Engine protocol.
Must not know: any server, branches beyond their prefix, labels, or the screen.

Measured with SmolLM2 Q4_1 and Q5_0 on CPUs, live against recorded: the same model is 0.13 nat
away in the mean over the top 20, and up to 0.38 over those 8 positions of 62 where two recordings
differ most, since these also move most with the shape of a batch. With 16 positions spread evenly
beside them it is 0.14 to 0.24 away, and the other model 0.85 to 1.45.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kldtui.branching import bos_rule, prefix_of
from kldtui.engines.base import Engine, Top
from kldtui.errors import ContextExceeded, EngineRefused, InexactPrefix
from kldtui.index import Index, State
from kldtui.position import Position
from kldtui.recordings.base import Recording
from kldtui.rows import Row

Verdict = Literal["ok", "swapped", "bos", "other_model", "vocabulary", "context", "unchecked"]
Which = Literal["ref", "quant"]

THRESHOLD = 0.3
"""Nats: below it a server may be the recording's own model."""
TOP = 20
DIFFERING = 8
SPREAD = 16

_ASKED = 500
_CANDIDATES = 64
_OF_A_CHUNK = 32
_CHUNKS_WEIGHED = 64
_SURE = 2.0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a comparison of a server with the recordings says.

    own, other: mean |Δ log p| (nats) over the top 20 of its own and of the other recording;
    None where not compared. positions: how many were compared. add_bos: the BOS rule under which
    `own` was found, which for the verdict `bos` is not the server's. detail: one line for people.
    """

    verdict: Verdict
    own: float | None
    other: float | None
    positions: int
    detail: str
    add_bos: bool | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"

    def to_json(self) -> dict[str, Any]:
        """The same, as it is stored with a branch."""
        return {
            "verdict": self.verdict,
            "own": self.own,
            "other": self.other,
            "positions": self.positions,
            "add_bos": self.add_bos,
            "detail": self.detail,
        }


async def verify(
    engine: Engine,
    own: Recording,
    other: Recording | None = None,
    index: Index | None = None,
    root: Position | None = None,
    which: Which = "ref",
) -> VerifyResult:
    """Compare a connected server with the recording it should have made.

    Positions: 8 of short prefix where `own` and `other` differ most, 16 spread over such, and
    `root`. It passes under 0.3 nat if it is not nearer to `other`; both BOS rules are tried where
    it fails or where file and server disagree about BOS. `index` (perhaps half scanned) helps to
    choose chunks. Raises EngineError where the server fails at answering.
    """
    info = engine.info or await engine.connect()
    name = own.path.name
    if info.n_vocab is not None and own.shape.n_vocab not in (0, info.n_vocab):
        return _refused(
            "vocabulary",
            f"{info.model} has a vocabulary of {info.n_vocab}, {name} one of "
            f"{own.shape.n_vocab}: serve the model that made {name}",
        )
    longest = (root.t if root is not None else own.shape.n_ctx - 1) + 1
    if info.n_ctx is not None and info.n_ctx <= longest:
        return _refused(
            "context",
            f"its context of {info.n_ctx} tokens is too small for prefixes of "
            f"{longest - 1}: start it with -c {_round_up(own.shape.n_ctx + 256)} or more",
        )
    compared = await asyncio.to_thread(_choose, own, other, index, root)
    if not compared:
        return _refused("unchecked", f"{name} has no recorded position to compare with")
    add_bos, bos_id = bos_rule(own, info.add_bos, info.bos_id)
    try:
        first = await _measure(engine, own, compared, add_bos, bos_id)
        doubted = add_bos is not None and _begins_with(own, bos_id) != add_bos
        rules = [first]
        if bos_id is not None and (doubted or add_bos is None or first.own >= THRESHOLD):
            rules.append(await _measure(engine, own, compared, not add_bos, bos_id))
    except ContextExceeded as error:
        return _refused("context", str(error))
    except EngineRefused as error:
        if "invalid tokens" not in str(error):
            raise
        return _refused("vocabulary", f"it knows not all tokens of {name} ({error})")
    return _judge(rules, own, other, which, info.add_bos)


def _refused(verdict: Verdict, detail: str) -> VerifyResult:
    return VerifyResult(verdict, None, None, 0, detail)


def _round_up(n: int) -> int:
    return -(-n // 256) * 256


def _begins_with(recording: Recording, bos_id: int | None) -> bool:
    tokens = recording.tokens(0)
    return bos_id is not None and len(tokens) > 0 and int(tokens[0]) == bos_id


# ── which positions ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Compared:
    position: Position
    own: Row
    other: Row | None


def _choose(
    own: Recording, other: Recording | None, index: Index | None, root: Position | None
) -> list[_Compared]:
    """Ordered by position, so that the server computes each prefix from the one before."""
    candidates: list[_Compared] = []
    for chunk in _chunks(own, index, root):
        ts = own.scored(chunk)[:_OF_A_CHUNK]
        candidates += _rows(own, other, (Position(chunk, int(t)) for t in ts))
        if len(candidates) >= _CANDIDATES:
            break
    spread = SPREAD if other is not None else SPREAD + DIFFERING
    chosen = {c.position: c for c in _spread(candidates, spread)}
    if other is not None:
        rest = [c for c in candidates if c.position not in chosen]
        rest.sort(key=lambda c: -_apart(c))
        chosen.update({c.position: c for c in rest[:DIFFERING]})
    if root is not None:
        chosen.update({c.position: c for c in _rows(own, other, [root])})
    return [chosen[position] for position in sorted(chosen)]


def _chunks(own: Recording, index: Index | None, root: Position | None) -> Iterator[int]:
    """The root's chunk, then those in which the recordings differ most as far as is known."""
    n = own.shape.n_chunk
    known = {} if index is None else _differences(index, min(n, _CHUNKS_WEIGHED))
    order = sorted(range(n), key=lambda chunk: (-known.get(chunk, -math.inf), chunk))
    if root is not None and 0 <= root.chunk < n:
        yield root.chunk
        order.remove(root.chunk)
    yield from order


def _differences(index: Index, chunks: int) -> dict[int, float]:
    """For chunks that are scanned: the KLD (nats) of their first positions, largest pair's sum."""
    known: dict[int, float] = {}
    for chunk in range(chunks):
        where = index.layout.chunk_slice(chunk)
        where = slice(where.start, min(where.stop, where.start + _OF_A_CHUNK))
        sums = []
        for pair in index.pairs:
            part = pair[where]
            done = part["state"] == State.SCORED
            if part.size and bool(np.all(part["state"] != State.PENDING)):
                sums.append(float(np.nansum(part["kld"][done])))
        if sums:
            known[chunk] = max(sums)
    return known


def _rows(
    own: Recording, other: Recording | None, positions: Iterable[Position]
) -> Iterator[_Compared]:
    for position in positions:
        mine = own.row(position)
        if mine is None or mine.invalid:
            continue
        theirs = None
        if other is not None:
            in_range = position.chunk < other.shape.n_chunk
            theirs = other.row(position) if in_range else None
            if theirs is None or theirs.invalid:
                continue
        yield _Compared(position, mine, theirs)


def _spread(candidates: Sequence[_Compared], n: int) -> list[_Compared]:
    if len(candidates) <= n:
        return list(candidates)
    return [candidates[k * len(candidates) // n] for k in range(n)]


def _apart(compared: _Compared) -> float:
    """How far the two recordings are apart here: mean |Δ log p|, bounds left out; nats."""
    if compared.other is None:
        return 0.0
    gaps = []
    for token, logp in compared.own.top(TOP):
        mine, theirs = compared.own.logp(token), compared.other.logp(token)
        if mine is None or theirs is None or mine.bound or theirs.bound:
            continue
        gaps.append(abs(logp - theirs.value))
    return sum(gaps) / len(gaps) if gaps else 0.0


# ── how far apart ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Measured:
    """Under one BOS rule, for each position the gap to both recordings; float64[positions], NaN
    where a server that takes text cannot be sent the prefix."""

    add_bos: bool
    owns: np.ndarray[Any, np.dtype[np.float64]]
    others: np.ndarray[Any, np.dtype[np.float64]] | None

    @property
    def positions(self) -> int:
        return int(np.isfinite(self.owns).sum())

    @property
    def own(self) -> float:
        return float(np.nanmean(self.owns)) if self.positions else math.inf

    @property
    def other(self) -> float | None:
        return None if self.others is None or not self.positions else float(np.nanmean(self.others))


async def _measure(
    engine: Engine,
    own: Recording,
    compared: Sequence[_Compared],
    add_bos: bool | None,
    bos_id: int | None,
) -> _Measured:
    owns, others = [], []
    can = engine.capabilities
    asked = _ASKED if can is None or can.top_n_limit is None else min(_ASKED, can.top_n_limit)
    for one in compared:
        prefix = prefix_of(own, one.position, bool(add_bos), bos_id, own_rule=False)
        try:
            top = await engine.next_top(prefix, asked)
        except InexactPrefix:
            owns.append(math.nan)
            others.append(math.nan)
            continue
        owns.append(gap(one.own, top))
        others.append(gap(one.other, top) if one.other is not None else math.nan)
    both = all(one.other is not None for one in compared)
    return _Measured(bool(add_bos), np.array(owns), np.array(others) if both else None)


def gap(row: Row, top: Top) -> float:
    """Mean |Δ log p| (nats) over the row's top 20, between it and a server's top list.

    Entries that are bounds are left out; one that the server's list lacks counts as far as the
    list's end tells.
    """
    known = dict(top)
    end = min((logp for _, logp in top if math.isfinite(logp)), default=0.0)
    gaps = []
    for token, logp in row.top(TOP):
        said = row.logp(token)
        if said is None or said.bound or not math.isfinite(logp):
            continue
        live = max(known.get(token, -math.inf), end)
        if token in known or logp > end:
            gaps.append(abs(logp - live))
    return sum(gaps) / len(gaps) if gaps else 0.0


def _nearer(
    a: np.ndarray[Any, np.dtype[np.float64]], b: np.ndarray[Any, np.dtype[np.float64]]
) -> bool:
    """Whether `a` is the smaller over the same positions, beyond what chance does."""
    differences = (b - a)[np.isfinite(a) & np.isfinite(b)]
    if not differences.size:
        return False
    mean = float(differences.mean())
    if len(differences) < 2:
        return mean > 0
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return mean > 0 and mean > _SURE * error


def _judge(
    rules: Sequence[_Measured],
    own: Recording,
    other: Recording | None,
    which: Which,
    server_bos: bool | None,
) -> VerifyResult:
    first, name = rules[0], own.path.name
    others_name = other.path.name if other is not None else ""
    best = first
    for rule in rules[1:]:
        if rule.own < THRESHOLD and _nearer(rule.owns, best.owns):
            best = rule
    positions = best.positions
    if not positions:
        return _refused("unchecked", f"none of the prefixes of {name} can be sent to it exactly")

    def result(verdict: Verdict, detail: str, rule: _Measured = best) -> VerifyResult:
        return VerifyResult(verdict, rule.own, rule.other, positions, detail, rule.add_bos)

    for rule in [best, *rules]:
        if rule.others is None or rule.other is None or rule.other >= THRESHOLD:
            continue
        if _nearer(rule.others, rule.owns):
            role = "reference" if which == "ref" else "quant"
            return result(
                "swapped",
                f"as the {role} server it holds the model of {others_name} ({rule.other:.2f} "
                f"nat), not that of {name} ({rule.own:.2f}): are the two servers exchanged?",
                rule,
            )
    if best.own >= THRESHOLD:
        near = f", {best.other:.2f} from {others_name}" if best.other is not None else ""
        tried = ", with BOS and without" if len(rules) > 1 else ""
        return result(
            "other_model",
            f"it is another model: {best.own:.2f} nat from {name}{near}{tried}; "
            f"serve the file that made {name}",
        )
    if best.add_bos != bool(server_bos):
        says, does = ("with", "adds none") if best.add_bos else ("without", "adds it")
        worse = next((f", {r.own:.2f} otherwise" for r in rules if r is not best), "")
        return result(
            "bos",
            f"it agrees with {name} only {says} BOS ({best.own:.2f} nat{worse}), but its model "
            f"{does}: start it with --override-kv tokenizer.ggml.add_bos_token=bool:"
            f"{'true' if best.add_bos else 'false'}",
        )
    detail = f"it agrees with {name}: {best.own:.2f} nat over {positions} positions"
    if best.others is not None and best.other is not None:
        detail += f" ({best.other:.2f} from {others_name})"
        if not _nearer(best.owns, best.others):
            detail += "; the two recordings are too alike to be told apart"
    return result("ok", detail)
