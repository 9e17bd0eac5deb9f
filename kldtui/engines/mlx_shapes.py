"""The shapes in which mlx_lm.server has answered, read into one.

Knows: `/v1/completions` unstreamed, with log-probabilities, and what makes an answer unusable.
Must not know: sockets, requests, text, or what the tokens are for.

Sources: mlx_lm/server.py of 0.24.0, 0.29.1, 0.30.5 (older shape), 0.30.6 and 0.32.2 (newer).
Top lists are unsorted: `argpartition` makes them. In the newer shape, an entry's own `id` is only
the first of its list, where there is one; the sampled token is the greatest, ties by lowest id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kldtui.engines.base import Reason, Top
from kldtui.engines.values import best_first, log_probability
from kldtui.errors import EngineBroke, UnusableEngine

_VERSIONS = re.compile(r"(\d+\.\d+[^-]*)-(\d+\.\d+[^-]*)-")


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated token: its id, log p (nats), and the top list, best first."""

    id: int
    logp: float
    top: Top


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    n_prompt: tokens of the prompt as the server counted them. reason: `eog` or `limit`.
    older: it is of the shape before 0.30.6. build: the versions that it names, or empty. cached:
    tokens of the prompt that were not computed anew; None where it does not say.
    """

    choices: tuple[Choice, ...]
    n_prompt: int
    reason: Reason
    older: bool
    build: str
    cached: int | None


def read_answer(data: Any) -> Answer:
    """Read an answer. Raises UnusableEngine where the numbers cannot be what they are called,
    EngineBroke where the fields have types that no version ever sent."""
    try:
        choice = data["choices"][0]
        said = choice.get("logprobs")
        if not said:
            raise UnusableEngine("it gives no log-probabilities; use mlx-lm 0.30.6 or later")
        older = "tokens" in said
        choices = tuple(_older(said) if older else _newer(said))
        if len(choices) != int(data["usage"]["completion_tokens"]):
            raise EngineBroke("its log-probabilities do not belong to its tokens")
        return Answer(
            choices,
            int(data["usage"]["prompt_tokens"]),
            "limit" if choice["finish_reason"] == "length" else "eog",
            older,
            _build(str(data.get("system_fingerprint") or "")),
            _cached(data["usage"].get("prompt_tokens_details")),
        )
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise EngineBroke(f"it sent an answer of no known shape ({error!r:.80})") from error


def _newer(said: dict[str, Any]) -> Iterator[Choice]:
    for entry in said["content"]:
        listed = entry.get("top_logprobs")
        if listed:
            yield _best(_top((each["id"], each["logprob"]) for each in listed))
        else:
            yield Choice(int(entry["id"]), log_probability(entry["logprob"]), ())


def _older(said: dict[str, Any]) -> Iterator[Choice]:
    """`{tokens, token_logprobs, top_logprobs: [[[id, lp], …], …]}`."""
    tops = said["top_logprobs"] or [()] * len(said["tokens"])
    for id, logp, listed in zip(said["tokens"], said["token_logprobs"], tops, strict=True):
        yield Choice(int(id), log_probability(logp), _top((i, p) for i, p in listed))


def _top(listed: Any) -> Top:
    return best_first((int(id), log_probability(logp)) for id, logp in listed)


def _best(top: Top) -> Choice:
    return Choice(*top[0], top)


def _cached(details: Any) -> int | None:
    said = details.get("cached_tokens") if isinstance(details, dict) else None
    return None if said is None else int(said)


def _build(fingerprint: str) -> str:
    """`0.32.2-0.32.4-Linux-…`: mlx_lm's version and mlx's."""
    found = _VERSIONS.match(fingerprint)
    return f"mlx-lm {found[1]}, mlx {found[2]}" if found else ""
