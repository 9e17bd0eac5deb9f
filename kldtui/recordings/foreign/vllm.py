"""vLLM's `prompt_logprobs`: what was said of the tokens of a prompt, by id.

Knows: the field, in `/v1/completions`, `/v1/chat/completions` and in a saved RequestOutput.
Must not know: references.

`[null, {"123": {"logprob": x, "rank": 5, "decoded_token": " a"}, …}, …]`: an entry a prompt token,
the first null. Each holds the N best, and the token that is there also where it is not among
them: N or N + 1. vLLM puts that one first; -9999 stands for a probability of zero.
"""

from __future__ import annotations

from typing import Any

from kldtui.recordings.foreign import openai
from kldtui.recordings.foreign.answer import (
    Answer,
    AnswerError,
    Entry,
    Gathered,
    Step,
    Unusable,
    id_of,
    ids_of,
    logp_of,
    step_of,
)

FORMAT = "vllm"


def is_kind(answer: dict[str, Any]) -> bool:
    return any(isinstance(one.get("prompt_logprobs"), list) for one in _places(answer))


def _places(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    listed = choices if isinstance(choices, list) else []
    return [answer, *(one for one in listed if isinstance(one, dict))]


def read(
    answer: dict[str, Any], request: dict[str, Any], line: int, gathered: Gathered
) -> list[Answer]:
    """An answer for each choice, with what was generated after the prompt where that has
    log-probabilities too. Raises AnswerError and Unusable."""
    gathered.engine.setdefault("name", "vllm")
    if isinstance(answer.get("model"), str):
        gathered.engine.setdefault("model", answer["model"])
    out = []
    for place in _places(answer):
        listed = place.get("prompt_logprobs")
        if not isinstance(listed, list):
            continue
        prompt = (
            ids_of(place.get("prompt_token_ids"))
            or ids_of(answer.get("prompt_token_ids"))
            or ids_of(request.get("prompt"))
        )
        if prompt is None:
            prompt = [None, *(_first_id(one) for one in listed[1:])]
        if len(prompt) != len(listed):
            raise AnswerError(f"{len(prompt)} prompt tokens, but prompt_logprobs of {len(listed)}")
        scored = {t: _step(one, prompt[t]) for t, one in enumerate(listed) if t and one}
        if scored and all(step.empty for step in scored.values()):
            raise Unusable(
                "has the log p of the text's own tokens alone: ask with prompt_logprobs: 20"
            )
        out.append(
            Answer(line, len(prompt), _generated(place, answer, gathered), prompt, None, scored)
        )
    return out


def _first_id(listed: Any) -> int | None:
    """The id of the token that is there, where the prompt's ids were not saved: the first key."""
    if not isinstance(listed, dict) or not listed:
        return None
    return id_of(next(iter(listed)))


def _step(listed: Any, token: int | None) -> Step:
    if not isinstance(listed, dict):
        raise AnswerError("prompt_logprobs is no list of objects")
    entries, rank = [], None
    for key, raw in listed.items():
        value = raw.get("logprob") if isinstance(raw, dict) else raw
        entry = Entry(id_of(key), None, logp_of(value))
        entries.append(entry)
        if entry.id == token and isinstance(raw, dict):
            rank = raw.get("rank")
    own = next((entry.logp for entry in entries if entry.id == token), None)
    if own is None:
        raise AnswerError(f"prompt_logprobs without token {token}, which is there")
    # With a rank beyond the list's length the token is no part of the best; without a rank, the
    # last of the list is not known to be.
    apart = rank > len(entries) if type(rank) is int else True
    if apart and len(entries) == 1:
        entries = []
    return step_of(token, None, own, entries, with_own=apart)


def _generated(place: dict[str, Any], answer: dict[str, Any], gathered: Gathered) -> list[Step]:
    """What was said of generated tokens, where it was asked for and ids are there."""
    outputs = answer.get("outputs")
    if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict):
        ids, listed = ids_of(outputs[0].get("token_ids")), outputs[0].get("logprobs")
        if ids is None or not isinstance(listed, list) or len(listed) != len(ids):
            return []
        return [_step(one, id) for id, one in zip(ids, listed, strict=True)]
    if not isinstance(place.get("logprobs"), dict):
        return []
    try:
        (found,) = openai.read({"choices": [place]}, {}, 0, gathered)
    except (Unusable, ValueError):
        return []
    return [] if found.scored else found.output
