"""The floor: how far the greedy answers of one model differ from run to run, and between engines.

Knows: the Engine protocol, how two runs of the same request are compared, and what many such
comparisons add up to.
Must not know: recordings, labels, the screen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from kldtui.engines.base import Engine, Reason, Token
from kldtui.proportions import Share, share

Against = Literal["off", "on", "other"]
"""What the first run, its cache off, is held against: the same again, the same with the cache on,
the same model in another engine."""

WORDS: dict[Against, str] = {
    "off": "cache off, off again",
    "on": "cache off, on",
    "other": "the other engine",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One greedy answer, and why it ended."""

    tokens: Sequence[Token]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Compared:
    """Two greedy runs of one request.

    positions: how many predictions were made after the same tokens, that where they part among
    them. parts_at: the first token that differs, or that only one of them has; None where none
    does. gaps: |Δ log p| (nats) of each token that both chose.
    """

    positions: int
    parts_at: int | None
    gaps: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.gaps, default=0.0)


def compare_runs(a: Run, b: Run) -> Compared:
    """Hold two runs against each other, token by token, up to where they part.

    A run that ended by itself said that nothing follows, which is a prediction like any other; of
    one that was cut (by its length, by the context) nothing is known from there on.
    """
    gaps: list[float] = []
    for k, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if one.id != other.id:
            return Compared(k + 1, k, tuple(gaps))
        if one.logp is not None and other.logp is not None:
            gaps.append(abs(one.logp - other.logp))
    shorter, longer = sorted((a, b), key=lambda run: len(run.tokens))
    end = len(shorter.tokens)
    if shorter.reason == "eog" and end < len(longer.tokens):
        return Compared(end + 1, end, tuple(gaps))
    return Compared(end, None, tuple(gaps))


@dataclass(frozen=True, slots=True)
class SelfRuns:
    """Three greedy runs of one request: cache off, cache off again, cache on.

    tokens: the shortest run's length. parts_off, parts_on: the first token at which the second
    and the third run part from the first; None where they do not. logp_off, logp_on: the largest
    |Δ log p| (nats) of one token before that. says: what the first run says at once, which is the
    engine's own argmax after the prefix; says_logp: its log p (nats); None where unknown.
    """

    tokens: int
    parts_off: int | None
    parts_on: int | None
    logp_off: float
    logp_on: float
    says: int | None = None
    says_logp: float | None = None

    @property
    def agrees(self) -> bool:
        return self.parts_off is None and self.parts_on is None

    @property
    def words(self) -> str:
        """One line for people."""
        if self.agrees:
            most = max(self.logp_off, self.logp_on)
            return (
                f"the reference agrees with itself over {self.tokens} tokens, cache off and on; "
                f"log p moves by at most {most:.2g} nat"
            )
        parts = [
            f"with the cache {name} it parts from itself at +{at}"
            for name, at in (("off", self.parts_off), ("on", self.parts_on))
            if at is not None
        ]
        return "the reference does not agree with itself: " + "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> SelfRuns | None:
        """The inverse; None where there is nothing, or nothing that this version can read."""
        known = cls.__dataclass_fields__
        try:
            return cls(**{k: v for k, v in data.items() if k in known}) if data else None
        except (TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Floor:
    """The runs after one prefix. compared: the first run against each other one.

    says, says_logp: as in SelfRuns. recorded: what the recording says there, and its log p.
    """

    compared: Mapping[Against, Compared]
    tokens: int
    says: int | None
    says_logp: float | None
    recorded: tuple[int, float] | None = None

    @property
    def self_runs(self) -> SelfRuns:
        off, on = self.compared["off"], self.compared["on"]
        return SelfRuns(
            self.tokens,
            off.parts_at,
            on.parts_at,
            off.largest,
            on.largest,
            self.says,
            self.says_logp,
        )


async def run_floor(
    engine: Engine,
    prefix: Sequence[int],
    n: int,
    top_n: int,
    *,
    other: tuple[Engine, Sequence[int]] | None = None,
    recorded: tuple[int, float] | None = None,
) -> Floor:
    """Ask for the same `n` tokens three times: cache off, off again, on.

    other: the same model in another engine, with the prefix as that one takes it; it is asked once,
    its cache off. Raises EngineError.
    """
    first, again, warm = [await _run(engine, prefix, n, top_n, c) for c in (False, False, True)]
    compared: dict[Against, Compared] = {
        "off": compare_runs(first, again),
        "on": compare_runs(first, warm),
    }
    if other is not None:
        compared["other"] = compare_runs(first, await _run(*other, n, top_n, False))
    tokens = min(len(run.tokens) for run in (first, again, warm))
    says = first.tokens[0] if first.tokens else None
    return Floor(
        compared,
        tokens,
        says.id if says is not None else None,
        says.logp if says is not None else None,
        recorded,
    )


async def _run(engine: Engine, prefix: Sequence[int], n: int, top_n: int, cache: bool) -> Run:
    tokens: list[Token] = []
    reason: Reason = "error"
    async for item in engine.generate(prefix, n, top_n, cache=cache):
        if isinstance(item, Token):
            tokens.append(item)
        else:
            reason = item.reason
    return Run(tokens, reason)


# ── many of them ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FloorLine:
    """What one kind of comparison adds up to.

    flips: of the predictions made after the same tokens, those that differ: the self-flip rate.
    parted: of the places, those from which the two runs part within their length. mean, p99, most:
    of |Δ log p| (nats) over the tokens that both chose; None where the engine gives none.
    """

    against: Against
    flips: Share
    parted: Share
    mean: float | None
    p99: float | None
    most: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "against": self.against,
            "self_flip_rate": share_json(self.flips),
            "parted": share_json(self.parted),
            "mean_abs_dlogp": self.mean,
            "p99_abs_dlogp": self.p99,
            "max_abs_dlogp": self.most,
        }


@dataclass(frozen=True, slots=True)
class LiveLine:
    """The live engine against the recording that the same model made: argmaxes that differ, and
    the mean and largest |Δ log p| (nats) of that token where they are the same."""

    flips: Share
    mean: float | None
    most: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "flip_rate": share_json(self.flips),
            "mean_abs_dlogp": self.mean,
            "max_abs_dlogp": self.most,
        }


def floor_lines(floors: Sequence[Floor]) -> list[FloorLine]:
    """A line for each kind of comparison that was made; intervals are Wilson's, 95 %."""
    kinds: tuple[Against, ...] = ("off", "on", "other")
    lines = []
    for kind in kinds:
        made = [floor.compared[kind] for floor in floors if kind in floor.compared]
        if not made:
            continue
        parted = sum(each.parts_at is not None for each in made)
        gaps = [gap for each in made for gap in each.gaps]
        lines.append(
            FloorLine(
                kind,
                share(parted, sum(each.positions for each in made)),
                share(parted, len(made)),
                float(np.mean(gaps)) if gaps else None,
                float(np.percentile(gaps, 99)) if gaps else None,
                max(gaps, default=None),
            )
        )
    return lines


def self_flips(floors: Sequence[Floor]) -> Share:
    """The self-flip rate in one number: over both comparisons of an engine with itself."""
    lines = [line for line in floor_lines(floors) if line.against != "other"]
    return share(sum(line.flips.part for line in lines), sum(line.flips.whole for line in lines))


def live_line(floors: Sequence[Floor]) -> LiveLine:
    """The first run's first token against the recorded one."""
    pairs = [(f, f.recorded) for f in floors if f.recorded is not None and f.says is not None]
    gaps = [
        abs(floor.says_logp - recorded[1])
        for floor, recorded in pairs
        if floor.says == recorded[0] and floor.says_logp is not None
    ]
    flips = sum(floor.says != recorded[0] for floor, recorded in pairs)
    return LiveLine(
        share(flips, len(pairs)),
        float(np.mean(gaps)) if gaps else None,
        max(gaps, default=None),
    )


def share_json(found: Share) -> dict[str, Any]:
    """A share with its interval; null of nothing."""
    known = found.whole > 0
    return {
        "count": found.part,
        "of": found.whole,
        "value": found.value if known else None,
        "low": found.low if known else None,
        "high": found.high if known else None,
    }
