"""llama-server's `/completion`: an answer, or the events of a streamed one.

Knows: the fields of every shape it has had, and its gap where a token ends in mid-character.
Must not know: other servers, references.

Shapes: `completion_probabilities` (or `probs`) of `{id, token, bytes, logprob, top_logprobs}`, with
`prob` and `top_probs` where post_sampling_probs was set; before December 2024 of `{content, probs:
[{tok_str, prob}]}`, text alone. `tokens` has the generated ids where return_tokens was set. A
token that ends in mid-character is in `tokens`, but has no entry; the entry that completes the
character has the last id and the bytes of all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kldtui.recordings.foreign.answer import (
    Answer,
    AnswerError,
    Entry,
    Gathered,
    Step,
    Unusable,
    data_of,
    id_of,
    ids_of,
    log_of,
    logp_of,
    step_of,
)

FORMAT = "llama-completion"

_SPECULATIVE = (
    "gives no probabilities, as with speculative decoding: start the server without a draft model "
    "or MTP"
)
_AFTER_SAMPLING = (
    "positions hold probabilities after sampling (post_sampling_probs): not what the model said; "
    "ask again without it"
)
_OLD = "positions hold probabilities of a server before December 2024, as its sampler saw them"


def is_kind(answer: dict[str, Any]) -> bool:
    listed = answer.get("completion_probabilities", answer.get("probs"))
    if isinstance(listed, list):
        return True
    ended = "stop" in answer and ("tokens_evaluated" in answer or "generation_settings" in answer)
    return ended and "content" in answer


def is_part(answer: dict[str, Any]) -> bool:
    """Whether it is an event with more to come."""
    return answer.get("stop") is False


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer of a stream's events: the last one, with the lists of all."""
    out = dict(parts[-1])
    probabilities: list[Any] = []
    tokens: list[Any] = []
    for part in parts:
        probabilities += part.get("completion_probabilities") or part.get("probs") or []
        tokens += part.get("tokens") or []
    return out | {"completion_probabilities": probabilities, "tokens": tokens}


def read(
    answer: dict[str, Any], request: dict[str, Any], line: int, gathered: Gathered
) -> list[Answer]:
    """The one answer. Raises AnswerError, and Unusable where it has no probabilities."""
    listed = answer.get("completion_probabilities") or answer.get("probs") or []
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise AnswerError("completion_probabilities is no list of objects")
    if not listed:
        raise Unusable("holds no probabilities: ask with n_probs")
    if answer.get("truncated"):
        raise Unusable("was made from a prompt that the server cut: give it a larger context (-c)")
    gathered.engine.setdefault("name", "llama-server")
    if isinstance(answer.get("model"), str):
        gathered.engine.setdefault("model", answer["model"])
    ids = ids_of(answer.get("tokens"))
    for one in listed:
        _learn(one, gathered)
    steps = [_step(one, gathered) for one in listed]
    if all(step.empty for step in steps):
        raise Unusable(_SPECULATIVE)
    if ids is not None:
        steps = _with_lost(ids, steps)
    prompt = ids_of(request.get("prompt")) or ids_of(answer.get("prompt"))
    texts = (answer.get("prompt"), request.get("prompt"))
    n_prompt = answer.get("tokens_evaluated")
    return [
        Answer(
            line,
            len(prompt) if prompt is not None else n_prompt if type(n_prompt) is int else None,
            steps,
            prompt,
            next((text for text in texts if isinstance(text, str)), None),
        )
    ]


def _learn(raw: dict[str, Any], gathered: Gathered) -> None:
    """Bytes of ids, from the lists alone: a token's own entry may have those of several."""
    for one in raw.get("top_logprobs") or raw.get("top_probs") or ():
        if isinstance(one, dict) and "id" in one:
            gathered.piece(
                Entry(id_of(one["id"]), data_of(one.get("token"), one.get("bytes")), 0.0)
            )


def _step(raw: dict[str, Any], gathered: Gathered) -> Step:
    if isinstance(raw.get("probs"), list):
        gathered.counts[_OLD] += 1
        data = data_of(raw.get("content"))
        entries = [
            Entry(None, data_of(p.get("tok_str")), log_of(p.get("prob"))) for p in raw["probs"]
        ]
        return step_of(None, data, math.nan, entries)
    after = "top_probs" in raw or ("prob" in raw and "logprob" not in raw)
    gathered.counts[_AFTER_SAMPLING] += after
    listed = raw.get("top_probs") if "top_probs" in raw else raw.get("top_logprobs")
    entries = [
        Entry(
            id_of(one["id"]) if "id" in one else None,
            data_of(one.get("token", one.get("tok_str")), one.get("bytes")),
            _own(one),
        )
        for one in listed or ()
        if isinstance(one, dict)
    ]
    token = id_of(raw["id"]) if "id" in raw else None
    data = data_of(raw.get("token", raw.get("content")), raw.get("bytes"))
    return step_of(token, data, _own(raw) if entries else math.nan, entries)


def _own(raw: dict[str, Any]) -> float:
    return logp_of(raw["logprob"]) if "logprob" in raw else log_of(raw.get("prob"))


def _with_lost(ids: list[int | None], steps: list[Step]) -> list[Step]:
    """A step for each token. A token without an entry, or whose entry cannot be told from its
    neighbour's, gets an empty one."""
    if len(steps) > len(ids):
        raise AnswerError(f"{len(ids)} tokens, but probabilities of {len(steps)}")
    if len(steps) == len(ids):
        if any(step.token not in (None, token) for token, step in zip(ids, steps, strict=True)):
            raise AnswerError("the probabilities are not those of its tokens")
        return [
            step if step.token is not None else _named(step, token)
            for token, step in zip(ids, steps, strict=True)
        ]
    first, last = _leftmost(ids, steps), _leftmost(ids[::-1], steps[::-1])
    if first is None or last is None:
        raise AnswerError("the probabilities are not those of its tokens")
    out: list[Step] = [_lost(token) for token in ids]
    for i, step in enumerate(steps):
        if first[i] == len(ids) - 1 - last[len(steps) - 1 - i]:
            out[first[i]] = step
    return out


def _leftmost(ids: list[int | None], steps: list[Step]) -> list[int] | None:
    """The earliest place of each step among the ids, in order; None if there is none."""
    out, at = [], 0
    for step in steps:
        while at < len(ids) and ids[at] != step.token:
            at += 1
        if at == len(ids):
            return None
        out.append(at)
        at += 1
    return out


def _lost(token: int | None) -> Step:
    return Step(token, None, math.nan, np.empty(0, np.int32), (), np.empty(0, np.float32))


def _named(step: Step, token: int | None) -> Step:
    return Step(token, step.data, step.logp, step.ids, step.texts, step.logps, step.invalid)
