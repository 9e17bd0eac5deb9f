"""Answers as servers write them, from one model's log-probabilities.

Knows: the servers' field names and quirks (README and source of each), spelt out by hand.
Must not know: how kldtui reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.vocab import Vocabulary, from_pieces
from tests.builders import Stream, log_softmax, make_logits

Json = dict[str, Any]


def pieces_of(n_vocab: int) -> list[bytes]:
    """Text for each id: words, but for id 1 (a control token) and 2, 3 (halves of "é")."""
    out = [f" w{id}".encode() for id in range(n_vocab)]
    out[1], out[2], out[3] = b"", b"\xc3", b"\xa9"
    return out


def vocabulary(n_vocab: int) -> Vocabulary:
    return from_pieces(dict(enumerate(pieces_of(n_vocab))), "test")


@dataclass
class Model:
    """What a model says of a stream: log p [record, n_vocab], as `write_kld` takes its logits."""

    stream: Stream
    logits: NDArray[np.float32]

    @classmethod
    def of(cls, stream: Stream, seed: int) -> Model:
        """A model that says nothing likely of the ids whose text is no text (0 to 3)."""
        logits = make_logits(stream, seed)
        logits[:, :4] -= 12
        return cls(stream, logits)

    def logp(self, chunk: int, t: int) -> NDArray[np.float64]:
        row = chunk * self.stream.per_chunk + t - self.stream.first_t
        out: NDArray[np.float64] = log_softmax(self.logits[row : row + 1])[0]
        return out

    def greedy(self) -> Model:
        """The same, of a stream whose scored tokens are the model's own argmaxes."""
        tokens = self.stream.tokens.copy()
        for chunk in range(self.stream.n_chunk):
            for t in range(self.stream.first_t, self.stream.n_ctx):
                tokens[chunk, t] = int(self.logp(chunk, t).argmax())
        return Model(Stream(tokens, self.stream.n_vocab), self.logits)

    def tokens(self, chunk: int) -> list[int]:
        return [int(x) for x in self.stream.tokens[chunk]]

    def top(self, chunk: int, t: int, n: int) -> list[tuple[int, float]]:
        logp = self.logp(chunk, t)
        best = sorted(range(logp.size), key=lambda id: (-logp[id], id))[:n]
        return [(id, float(logp[id])) for id in best]


def write_lines(path: Path, objects: Iterable[Json]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects), encoding="utf-8")
    return path


def write_events(path: Path, objects: Iterable[Json]) -> Path:
    """As curl saves a stream."""
    text = "".join(f"data: {json.dumps(one)}\n\n" for one in objects)
    path.write_text(": ping\n\n" + text + "data: [DONE]\n\n", encoding="utf-8")
    return path


# -- llama-server ----------------------------------------------------------------------------------


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _llama_entry(id: int, logp: float, pieces: Sequence[bytes], post: bool = False) -> Json:
    data = pieces[id]
    value = {"prob": math.exp(logp)} if post else {"logprob": logp}
    return {"id": id, "token": _shown(data), "bytes": list(data), **value}


def llama(
    model: Model,
    chunk: int,
    *,
    n: int = 5,
    start: int | None = None,
    post_sampling: bool = False,
    output: Sequence[int] | None = None,
) -> Json:
    """A scored chunk (by the grammar route), or with `output` what went its own way."""
    start = model.stream.first_t if start is None else start
    pieces = pieces_of(model.stream.n_vocab)
    tokens = model.tokens(chunk)
    given = list(output) if output is not None else tokens[start:]
    entries = []
    for i, token in enumerate(given):
        logp = model.logp(chunk, start + i)
        top = [
            _llama_entry(id, value, pieces, post_sampling)
            for id, value in model.top(chunk, start + i, n)
        ]
        name = "top_probs" if post_sampling else "top_logprobs"
        entries.append(_llama_entry(token, float(logp[token]), pieces, post_sampling) | {name: top})
    return {
        "index": 0,
        "content": _shown(b"".join(pieces[t] for t in given)),
        "tokens": given,
        "id_slot": 0,
        "stop": True,
        "model": "tiny-q4.gguf",
        "tokens_predicted": len(given),
        "tokens_evaluated": start,
        "generation_settings": {"temperature": 0.0},
        "prompt": _shown(b"".join(pieces[t] for t in tokens[:start])),
        "truncated": False,
        "stop_type": "limit",
        "completion_probabilities": entries,
    }


def llama_events(answer: Json) -> list[Json]:
    """The same, streamed: an event a token, then one without."""
    events: list[Json] = [
        {
            "content": entry["token"],
            "tokens": [entry["id"]],
            "stop": False,
            "completion_probabilities": [entry],
        }
        for entry in answer["completion_probabilities"]
    ]
    last = {name: value for name, value in answer.items() if name != "completion_probabilities"}
    return [*events, last | {"content": "", "tokens": []}]


def llama_old(model: Model, chunk: int, n: int = 5) -> Json:
    """Before December 2024: text and probabilities alone."""
    start, pieces = model.stream.first_t, pieces_of(model.stream.n_vocab)
    entries = []
    for t in range(start, model.stream.n_ctx):
        entries.append(
            {
                "content": _shown(pieces[model.tokens(chunk)[t]]),
                "probs": [
                    {"tok_str": _shown(pieces[id]), "prob": math.exp(value)}
                    for id, value in model.top(chunk, t, n)
                ],
            }
        )
    return {
        "content": "",
        "stop": True,
        "stopped_limit": True,
        "tokens_evaluated": start,
        "prompt": _shown(b"".join(pieces[t] for t in model.tokens(chunk)[:start])),
        "generation_settings": {},
        "completion_probabilities": entries,
    }


# -- vLLM and SGLang -------------------------------------------------------------------------------


def vllm(model: Model, chunk: int, *, n: int = 5, ids: bool = True, ranks: bool = True) -> Json:
    """`/v1/completions` with prompt_logprobs over a whole chunk; the first half says little."""
    tokens = model.tokens(chunk)
    listed: list[Json | None] = [None]
    for t in range(1, len(tokens)):
        if t < model.stream.first_t:
            logp = np.full(model.stream.n_vocab, -math.log(model.stream.n_vocab))
        else:
            logp = model.logp(chunk, t)
        best = sorted(range(logp.size), key=lambda id: (-logp[id], id))
        entry = {}
        for id in dict.fromkeys([tokens[t], *best[:n]]):
            value = max(float(logp[id]), -9999.0)
            entry[str(id)] = {"logprob": value, "decoded_token": f" w{id}"}
            if ranks:
                entry[str(id)]["rank"] = 1 + best.index(id)
        listed.append(entry)
    choice: Json = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    choice |= {"prompt_logprobs": listed, "token_ids": None}
    if ids:
        choice["prompt_token_ids"] = tokens
    return {
        "id": f"cmpl-{chunk}",
        "object": "text_completion",
        "model": "org/tiny",
        "choices": [choice],
        "usage": {"prompt_tokens": len(tokens), "completion_tokens": 1},
    }


def sglang(model: Model, chunk: int, *, n: int = 5, start: int = 0, tops: bool = True) -> Json:
    """`/generate` over a whole chunk, from `start` on (logprob_start_len)."""
    tokens = model.tokens(chunk)

    def triple(t: int) -> list[Any]:
        known = t >= model.stream.first_t
        value = float(model.logp(chunk, t)[tokens[t]]) if known else (-1.0 if t else None)
        return [value, tokens[t], None]

    def listed(t: int) -> list[list[Any]] | None:
        if t < model.stream.first_t:
            return [[-1.0, tokens[t], None]] if t else None
        return [[value, id, None] for id, value in model.top(chunk, t, n)]

    where = range(start, len(tokens))
    return {
        "text": " w1",
        "output_ids": [7],
        "meta_info": {
            "id": "x",
            "prompt_tokens": len(tokens),
            "completion_tokens": 1,
            "input_token_logprobs": [triple(t) for t in where],
            "input_top_logprobs": [listed(t) for t in where] if tops else None,
            "output_token_logprobs": [[-0.5, 7, None]],
            "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 8, None]]] if tops else None,
        },
    }


# -- OpenAI ----------------------------------------------------------------------------------------


def chat(
    model: Model, chunk: int, *, n: int = 5, ids: bool = False, output: Sequence[int] | None = None
) -> Json:
    """A chat answer; with `ids` as llama-server gives it."""
    start, pieces = model.stream.first_t, pieces_of(model.stream.n_vocab)
    given = model.tokens(chunk)[start:] if output is None else list(output)

    def entry(id: int, value: float) -> Json:
        out: Json = {"token": _shown(pieces[id]), "bytes": list(pieces[id]), "logprob": value}
        return {"id": id, **out} if ids else out

    content = [
        entry(token, float(model.logp(chunk, start + i)[token]))
        | {"top_logprobs": [entry(*pair) for pair in model.top(chunk, start + i, n)]}
        for i, token in enumerate(given)
    ]
    message = {"role": "assistant", "content": _shown(b"".join(pieces[t] for t in given))}
    return {
        "id": f"chatcmpl-{chunk}",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "length",
                "logprobs": {"content": content, "refusal": None},
            }
        ],
        "usage": {"prompt_tokens": start, "completion_tokens": len(given)},
    }


def chat_chunks(answer: Json) -> list[Json]:
    """The same, streamed."""
    (choice,) = answer["choices"]
    head = {"id": answer["id"], "object": "chat.completion.chunk", "model": answer["model"]}
    events = [
        head
        | {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": one["token"]},
                    "logprobs": {"content": [one]},
                    "finish_reason": None,
                }
            ]
        }
        for one in choice["logprobs"]["content"]
    ]
    end = head | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    return [*events, end, head | {"choices": [], "usage": answer["usage"]}]


def completions(
    model: Model, chunk: int, *, n: int = 5, token_ids: bool = False, echo: bool = False
) -> Json:
    """A legacy completion: keyed by text, or by `token_id:…` as vLLM does when it is asked to."""
    start, pieces = model.stream.first_t, pieces_of(model.stream.n_vocab)
    tokens = model.tokens(chunk)

    def name(id: int) -> str:
        if token_ids:
            return f"token_id:{id}"
        data = pieces[id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    shown, values, tops = [], [], []
    for t in range(0 if echo else start, len(tokens)):
        shown.append(name(tokens[t]))
        if t < start:
            values.append(-1.0 if t else None)
            tops.append({name(tokens[t]): -1.0} if t else None)
            continue
        logp = model.logp(chunk, t)
        values.append(float(logp[tokens[t]]))
        pairs = dict(model.top(chunk, t, n))
        pairs[tokens[t]] = float(logp[tokens[t]])
        tops.append({name(id): value for id, value in pairs.items()})
    return {
        "id": f"cmpl-{chunk}",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": "length",
                "logprobs": {
                    "tokens": shown,
                    "token_logprobs": values,
                    "top_logprobs": tops,
                    "text_offset": [0] * len(shown),
                },
            }
        ],
        "usage": {"prompt_tokens": start, "completion_tokens": len(tokens) - start},
    }


def mlx(model: Model, chunk: int, n: int = 5) -> Json:
    """mlx_lm.server: ids, no bytes, raw pieces, and an unsorted list whose first entry it names."""
    answer = chat(model, chunk, n=n, ids=True)
    for one in answer["choices"][0]["logprobs"]["content"]:
        top = one["top_logprobs"]
        top.reverse()
        for entry in (*top, one):
            del entry["bytes"]
            entry["token"] = entry["token"].replace(" ", "Ġ")
        one |= {name: top[0][name] for name in ("id", "token", "logprob")}
    return answer
