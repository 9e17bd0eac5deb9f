"""OpenAI's chat and completions answers, from OpenAI itself and from the many servers alike.

Knows: both shapes of `logprobs`, and which fields servers add to them (ids, above all).
Must not know: a tokenizer, references.

- chat, and llama-server's and mlx_lm.server's completions: `choices[i].logprobs.content[j] =
  {token, bytes, logprob, top_logprobs: [{token, bytes, logprob}]}`; llama.cpp and mlx_lm add `id`.
- completions: `choices[i].logprobs = {tokens, token_logprobs, top_logprobs: [{text: logprob}]}`,
  keyed by text, so tokens of equal text fall together; vLLM with return_tokens_as_token_ids writes
  `token_id:123`; mlx_lm before 0.30.6 has ids as numbers and `top_logprobs: [[[id, logprob], …]]`.
"""

from __future__ import annotations

import math
from typing import Any

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
    logp_of,
    named_id,
    step_of,
)

CHAT = "openai-chat"
COMPLETIONS = "openai-completions"

_ASK_CHAT = "holds no log-probabilities: ask with logprobs: true and top_logprobs"
_ASK_TEXT = "holds no log-probabilities: ask with logprobs: 20"


def is_kind(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices")
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(one, dict) for one in choices)
        and any("message" in one or "delta" in one or "text" in one for one in choices)
    )


def format_of(answer: dict[str, Any]) -> str:
    """`openai-chat` or `openai-completions`, by where the log-probabilities are."""
    chat = any("message" in one or "delta" in one for one in answer["choices"])
    return CHAT if chat else COMPLETIONS


def is_part(answer: dict[str, Any]) -> bool:
    """Whether it is an event of a stream."""
    return answer.get("object") == "chat.completion.chunk" or all(
        "finish_reason" in one and one["finish_reason"] is None for one in answer["choices"]
    )


def ends(parts: list[dict[str, Any]]) -> bool:
    """Whether the events of a stream are all there."""
    return any(one.get("finish_reason") is not None for part in parts for one in part["choices"])


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer of a stream's events: for each choice the lists of all."""
    out: dict[str, Any] = {}
    choices: dict[Any, dict[str, Any]] = {}
    for part in parts:
        out |= {name: value for name, value in part.items() if value is not None}
        for one in part["choices"]:
            held = choices.setdefault(one.get("index"), {**one, "logprobs": {}, "token_ids": []})
            held["token_ids"] += one.get("token_ids") or []
            for name, value in (one.get("logprobs") or {}).items():
                if isinstance(value, list):
                    held["logprobs"].setdefault(name, []).extend(value)
    return out | {"choices": list(choices.values())}


def read(
    answer: dict[str, Any], request: dict[str, Any], line: int, gathered: Gathered
) -> list[Answer]:
    """An answer for each choice. Raises AnswerError, and Unusable where nothing can be compared."""
    usage = answer.get("usage")
    n_prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    for name, value in (
        ("model", answer.get("model")),
        ("build", answer.get("system_fingerprint")),
    ):
        if isinstance(value, str):
            gathered.engine.setdefault(name, value)
    texts = request.get("prompt")
    out = []
    for choice in answer["choices"]:
        steps, echoed = _steps(choice, gathered)
        prompt = (
            ids_of(choice.get("prompt_token_ids"))
            or ids_of(answer.get("prompt_token_ids"))
            or ids_of(request.get("prompt"))
        )
        one = Answer(
            line,
            len(prompt) if prompt else n_prompt if type(n_prompt) is int else None,
            steps,
            prompt,
            texts if isinstance(texts, str) else None,
        )
        if echoed:
            one = _split_echo(one, request)
        _with_ids(one, ids_of(choice.get("token_ids")))
        out.append(one)
    return out


def _steps(choice: dict[str, Any], gathered: Gathered) -> tuple[list[Step], bool]:
    """The steps of a choice, and whether they begin with the prompt's own tokens (echo)."""
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        raise Unusable(_ASK_TEXT if "text" in choice else _ASK_CHAT)
    content = found.get("content")
    if isinstance(content, list):
        if not content:
            raise Unusable(_ASK_CHAT)
        return [_content_step(one, gathered) for one in content], False
    tokens, values = found.get("tokens"), found.get("token_logprobs")
    if not isinstance(tokens, list) or not tokens:
        raise Unusable(_ASK_TEXT)
    if not isinstance(values, list) or len(values) != len(tokens):
        raise AnswerError("tokens and token_logprobs are not of one length")
    tops = found.get("top_logprobs") or [None] * len(tokens)
    if len(tops) != len(tokens):
        raise AnswerError("tokens and top_logprobs are not of one length")
    steps = [_listed_step(*each, gathered) for each in zip(tokens, values, tops, strict=True)]
    return steps, values[0] is None


def _content_step(raw: Any, gathered: Gathered) -> Step:
    if not isinstance(raw, dict):
        raise AnswerError("logprobs.content is no list of objects")
    listed = raw.get("top_logprobs") or ()
    entries = [_content_entry(one) for one in listed]
    own = _content_entry(raw)
    for entry in (own, *entries):
        gathered.piece(entry)
    if own.id is not None and "bytes" not in raw and entries:
        # mlx_lm names the first of an unsorted list; what it takes is the best, ties by lowest id.
        best = min(entries, key=lambda e: (-e.logp, -1 if e.id is None else e.id))
        own = best
    return step_of(own.id, own.data, _known(own.logp), entries)


def _known(logp: float) -> float:
    """Log p of the token that is there. OpenAI writes what elsewhere is a probability of zero for
    any token outside the best 20: it is not known."""
    return math.nan if logp == -math.inf else logp


def _content_entry(raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise AnswerError("top_logprobs is no list of objects")
    token = raw.get("token")
    id = id_of(raw["id"]) if raw.get("id") is not None else named_id(token)
    logp = logp_of(raw.get("logprob"))
    if id is not None and "bytes" not in raw:
        return Entry(id, None, logp)  # mlx_lm's text is a raw piece of its vocabulary (Ġof)
    return Entry(id, data_of(token, raw.get("bytes")), logp)


def _listed_step(token: Any, value: Any, top: Any, gathered: Gathered) -> Step:
    logp = _known(logp_of(value))
    id = token if type(token) is int else named_id(token)
    data = None if id is not None else data_of(token)
    pairs: list[Any] = []
    if isinstance(top, dict):
        pairs = list(top.items())
    elif isinstance(top, list):
        pairs = [pair for pair in top if isinstance(pair, list) and len(pair) == 2]
    entries = []
    for key, of in pairs:
        key_id = named_id(key)
        if type(token) is int or type(key) is int:
            key_id = id_of(key)
        entries.append(Entry(key_id, None if key_id is not None else data_of(key), logp_of(of)))
    return step_of(id, data, logp, entries, with_own=True)


def _split_echo(one: Answer, request: dict[str, Any]) -> Answer:
    """Part the prompt's own tokens, which echo puts in front, from what was generated."""
    steps = one.output
    n_prompt = one.n_prompt
    if n_prompt is None or n_prompt > len(steps):
        n_prompt = len(steps)
    ids = [step.token for step in steps[:n_prompt]]
    prompt: list[int | None] | None = one.prompt
    if prompt is None and all(id is not None for id in ids[1:]):
        prompt = ids
    return Answer(
        one.line,
        n_prompt,
        steps[n_prompt:],
        prompt,
        one.prompt_text,
        {t: step for t, step in enumerate(steps[:n_prompt]) if t},
    )


def _with_ids(one: Answer, ids: list[int | None] | None) -> None:
    """Take the ids that a server lists beside its texts."""
    if ids is None or len(ids) != len(one.output):
        return
    one.output = [
        Step(id, step.data, step.logp, step.ids, step.texts, step.logps, step.invalid)
        for id, step in zip(ids, one.output, strict=True)
    ]
