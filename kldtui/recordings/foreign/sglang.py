"""SGLang's `/generate`: `[log p, id, text]` of prompt and generated tokens.

Knows: the fields of `meta_info`.
Must not know: references.

`input_token_logprobs`, `output_token_logprobs`: `[[log p, id, text], …]` of the tokens that are
there; the first of the prompt has null. `input_top_logprobs`, `output_top_logprobs`: for each of
them the best, or null. With logprob_start_len the input lists begin later in the prompt.
"""

from __future__ import annotations

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
    step_of,
)

FORMAT = "sglang"

_ASK = "holds no log-probabilities: ask with return_logprob: true and top_logprobs_num: 20"
_LISTS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
)


def is_kind(answer: dict[str, Any]) -> bool:
    meta = answer.get("meta_info")
    return isinstance(meta, dict) and (
        "output_ids" in answer or any(name in meta for name in _LISTS)
    )


def read(
    answer: dict[str, Any], request: dict[str, Any], line: int, gathered: Gathered
) -> list[Answer]:
    """The one answer. Raises AnswerError, and Unusable where nothing can be compared."""
    meta = answer["meta_info"]
    gathered.engine.setdefault("name", "sglang")
    inputs = _triples(meta.get("input_token_logprobs"))
    outputs = _triples(meta.get("output_token_logprobs"))
    if not inputs and not outputs:
        raise Unusable(_ASK)
    given = meta.get("prompt_tokens")
    n_prompt = given if type(given) is int else len(inputs)
    prompt = ids_of(request.get("input_ids"))
    if prompt is None and inputs and len(inputs) == n_prompt:
        prompt = [entry.id for entry in inputs]
    if prompt is not None:
        n_prompt = len(prompt)
    start = n_prompt - len(inputs)
    if start < 0:
        raise AnswerError(f"{n_prompt} prompt tokens, but input_token_logprobs of {len(inputs)}")
    if prompt is not None and any(
        entry.id != id for entry, id in zip(inputs, prompt[start:], strict=True)
    ):
        raise AnswerError("input_token_logprobs are not those of the request's input_ids")
    steps = _steps(inputs, meta.get("input_top_logprobs"))
    scored = {start + i: step for i, step in enumerate(steps) if start + i}
    output = _steps(outputs, meta.get("output_top_logprobs"))
    if all(step.empty for step in (*scored.values(), *output)):
        raise Unusable(_ASK)
    text = request.get("text")
    return [Answer(line, n_prompt, output, prompt, text if isinstance(text, str) else None, scored)]


def _triples(listed: Any) -> list[Entry]:
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise AnswerError("a list of log-probabilities is no list")
    return [_triple(one) for one in listed]


def _triple(raw: Any) -> Entry:
    if not isinstance(raw, list) or len(raw) < 2:
        raise AnswerError("an entry is no [log p, id, text]")
    return Entry(id_of(raw[1]), data_of(raw[2]) if len(raw) > 2 else None, logp_of(raw[0]))


def _steps(own: list[Entry], tops: Any) -> list[Step]:
    if tops is None:
        tops = [None] * len(own)
    if not isinstance(tops, list) or len(tops) != len(own):
        raise AnswerError("token and top log-probabilities are not of one length")
    return [
        step_of(entry.id, None, entry.logp, _triples(listed))
        for entry, listed in zip(own, tops, strict=True)
    ]
