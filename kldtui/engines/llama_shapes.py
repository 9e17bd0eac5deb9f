"""The shapes in which llama-server has answered over the years, read into one.

Knows: the fields of `/completion`, and what makes an answer unusable.
Must not know: sockets, events, requests, or what the tokens are for.

Sources: llama.cpp tools/server (README and server-task.cpp), builds 11434 and 11549; the shapes
before December 2024 from its README of that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kldtui.engines.values import ROUNDING, log_probability
from kldtui.errors import EngineBroke, UnusableEngine

SPECULATIVE = (
    "it gives no probabilities, as with speculative decoding; start it without a draft model or MTP"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry of a top list. id is None, and data a guess, in shapes that know text only."""

    id: int | None
    data: bytes
    logp: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What was said of one generated token.

    data: the bytes as sent: those of several tokens, where the earlier ended in mid-character.
    logp: nats; None where it is not among the values sent.
    """

    id: int | None
    data: bytes
    logp: float | None
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One event of a stream, or a whole unstreamed answer.

    tokens: the ids it brings; entries: what is said of them, perhaps of fewer.
    predicted: generated tokens so far, those without an event included; None if not said.
    evaluated: tokens of the prompt. stop: `eos`, `limit`, `word`, or None while it goes on.
    """

    tokens: tuple[int, ...]
    entries: tuple[Entry, ...]
    content: str
    predicted: int | None
    evaluated: int | None
    stop: str | None
    truncated: bool
    tokens_per_second: float | None


def read_part(data: dict[str, Any]) -> Part:
    """Read an event or answer of `/completion`.

    Raises UnusableEngine where the numbers cannot be what they are called, EngineBroke where
    the fields have types that no build ever sent.
    """
    try:
        raw = data.get("completion_probabilities") or data.get("probs") or ()
        timings = data.get("timings") or {}
        speed = timings.get("predicted_per_second")
        return Part(
            tokens=tuple(int(token) for token in data.get("tokens") or ()),
            entries=tuple(_entry(entry) for entry in raw),
            content=str(data.get("content") or ""),
            predicted=_count(data.get("tokens_predicted")),
            evaluated=_count(data.get("tokens_evaluated")),
            stop=_stop(data),
            truncated=bool(data.get("truncated")),
            tokens_per_second=float(speed) if speed else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineBroke(f"it sent an answer of no known shape ({error!r:.80})") from error


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _stop(data: dict[str, Any]) -> str | None:
    if not data.get("stop", "stop_type" in data):
        return None
    kind = data.get("stop_type")
    if kind in ("eos", "limit", "word"):
        return str(kind)
    for old, name in (("stopped_eos", "eos"), ("stopped_limit", "limit"), ("stopped_word", "word")):
        if data.get(old):
            return name
    return "limit"


def _entry(raw: dict[str, Any]) -> Entry:
    if "probs" in raw:
        return _old_entry(raw)
    listed = raw.get("top_logprobs")
    if listed is None:
        listed = raw.get("top_probs")
    if listed is None:
        raise KeyError("top_logprobs")
    top = [_candidate(item) for item in listed]
    logp = _own_logp(raw)
    if not top:
        raise UnusableEngine(SPECULATIVE)
    return Entry(int(raw["id"]), _data(raw), logp, _sorted(top))


def _old_entry(raw: dict[str, Any]) -> Entry:
    """`{content, probs: [{tok_str, prob}]}`: no ids, and the sampled token only by its text."""
    top = [
        Candidate(None, str(item["tok_str"]).encode(), _log(item["prob"])) for item in raw["probs"]
    ]
    if not top:
        raise UnusableEngine(SPECULATIVE)
    data = str(raw.get("content", "")).encode()
    logp = next((candidate.logp for candidate in top if candidate.data == data), None)
    return Entry(None, data, logp, _sorted(top))


def _candidate(raw: dict[str, Any]) -> Candidate:
    logp = _own_logp(raw)
    return Candidate(int(raw["id"]), _data(raw), -math.inf if logp is None else logp)


def _own_logp(raw: dict[str, Any]) -> float | None:
    if "logprob" in raw:
        value = raw["logprob"]
        return None if value is None else log_probability(value)
    if "prob" in raw:
        return _log(raw["prob"])
    raise KeyError("logprob")


def _log(prob: Any) -> float:
    value = float(prob)
    if math.isnan(value) or value < 0 or value > 1 + ROUNDING:
        raise UnusableEngine(f"it gives {value:.4g} as a probability; use a newer build")
    return math.log(min(value, 1.0)) if value > 0 else -math.inf


def _data(raw: dict[str, Any]) -> bytes:
    listed = raw.get("bytes")
    if listed is not None:
        return bytes(listed)
    return str(raw.get("token", "")).encode()


def _sorted(top: list[Candidate]) -> tuple[Candidate, ...]:
    """Best first, ties by lowest id, whatever order the server used."""
    return tuple(sorted(top, key=lambda c: (-c.logp, -1 if c.id is None else c.id)))


def align(
    tokens: Sequence[int], entries: Sequence[Entry], piece: Callable[[int], bytes]
) -> list[Entry | None]:
    """For each token its entry, or None where it ended in mid-character and so has none.

    An entry carries the id of the token that completed the character and the bytes of all since
    the last entry; `piece` gives one token's bytes as the server sends them (none for a control
    token). Raises EngineBroke where they cannot be brought together.
    """
    out: list[Entry | None] = []
    waiting = iter(entries)
    entry = next(waiting, None)
    gathered = b""
    for token in tokens:
        gathered += piece(token)
        if entry is not None and entry.id == token and entry.data == gathered:
            out.append(entry)
            entry, gathered = next(waiting, None), b""
        else:
            out.append(None)
    if entry is not None:
        raise EngineBroke("its probabilities do not belong to its tokens")
    return out
