"""A fake SGLang on a real loopback socket: its shapes, and faults that a real one makes by chance.

Shapes as in SGLang's python/sglang/srt: `text`, `output_ids` and `meta_info` with lists of
`[log p, id, text]`, said again with each event or only what is new, null for a log p of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests import tiny_model as model
from tests.fake_http import Events, FakeHttp, Reply, Request, event_bytes


class FakeSglang(FakeHttp):
    """What it says is the tiny model's, after `script`.

    repeats: which fields say everything again: `all`, `none` (`--incremental-streaming-output`),
    or `but_ids` (`--stream-output` of old builds). interval: tokens an event. old: only the
    `/get_…` paths, no `/tokenize`. cached: what it says came from its cache.
    fault: what to stream in place of the event with this number.
    """

    def __init__(self, script: Sequence[int] = (), **more: Any) -> None:
        super().__init__()
        self.script = list(script)
        self.context_len = 128
        self.add_bos = True
        self.interval = 1
        self.repeats = "all"
        self.old = False
        self.ids = True
        self.counts = True
        self.cached = 0
        self.starting = 0
        self.api_key: str | None = None
        self.no_end = False
        self.finish: Any = None
        self.server: dict[str, Any] = {}
        self.fault: dict[int, list[Any] | Exception] = {}
        self.rewrite: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data
        self.replies: dict[str, Reply] = {}
        self.headers = {"Server": "uvicorn"}
        for name, value in more.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    async def answer(self, request: Request) -> Reply | Events:
        path, data = request.path, request.body
        if path in self.replies:
            return self.replies[path]
        key = request.headers.get("authorization")
        if self.api_key and path != "/health" and key != f"Bearer {self.api_key}":
            return Reply(401, {"error": "Unauthorized"})
        if path == "/health":
            self.starting -= 1
            return Reply(503 if self.starting >= 0 else 200)
        prefix = "/get_" if self.old else "/"
        if path == f"{prefix}model_info":
            return Reply(200, {"model_path": "/models/tiny", "is_generation": True})
        if path == f"{prefix}server_info":
            secret = {"api_key": self.api_key, "context_length": None, "version": "0.5.5"}
            return Reply(200, secret | {"dtype": "auto", "tp_size": 2} | self.server)
        if path == "/v1/models":
            card = {"id": "org/tiny", "object": "model", "created": 1, "owned_by": "sglang"}
            return Reply(200, {"data": [card | {"max_model_len": self.context_len}]})
        if path == "/tokenize" and not self.old:
            ids = model.encode(
                data["prompt"], special=data["add_special_tokens"], add_bos=self.add_bos
            )
            return Reply(200, {"tokens": ids, "count": len(ids), "max_model_len": -1})
        if path == "/detokenize" and not self.old:
            if any(id >= model.N_VOCAB for id in data["tokens"]):
                return Reply(400, {"object": "error", "message": "Error decoding tokens"})
            return Reply(200, {"text": model.decode(data["tokens"])})
        if path == "/generate":
            return self._generate(data)
        return Reply(404, {"detail": "Not Found"})

    def _generate(self, data: dict[str, Any]) -> Reply | Events:
        prompt, n = data["input_ids"], data["sampling_params"]["max_new_tokens"]
        words = ""
        if any(id >= model.N_VOCAB for id in prompt):
            words = f"The input_ids contains values greater than the vocab size ({model.N_VOCAB})."
        elif len(prompt) >= self.context_len:
            words = (
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.context_len} tokens)."
            )
        elif len(prompt) + n >= self.context_len:
            words = (
                "Requested token count exceeds the model's maximum context length of "
                f"{self.context_len} tokens. You requested a total of {len(prompt) + n} tokens"
            )
        if data.get("stream"):
            return self._events(data, words)
        if words:
            return Reply(400, {"error": {"message": words}})
        speaker = model.Speaker(prompt, self.script)
        state = _State()
        answer = self._step(data, speaker, state, n)
        if data["logprob_start_len"] >= 0:
            answer["meta_info"] |= _scored(data)
        return Reply(200, self.rewrite(answer))

    async def _events(self, data: dict[str, Any], words: str) -> Events:
        if words:
            yield event_bytes({"error": {"message": words}})
            yield b"data: [DONE]\n\n"
            return
        n = data["sampling_params"]["max_new_tokens"]
        speaker, state, number = model.Speaker(data["input_ids"], self.script), _State(), 0
        while not state.ended:
            if number in self.fault:
                fault = self.fault[number]
                if isinstance(fault, Exception):
                    raise fault
                for part in fault:
                    yield part
                return
            number += 1
            event = self._step(data, speaker, state, min(self.interval, n - len(speaker.ids)))
            yield event_bytes(self.rewrite(event))
        yield b"data: [DONE]\n\n"

    def _step(
        self, data: dict[str, Any], speaker: model.Speaker, state: _State, n: int
    ) -> dict[str, Any]:
        most = data["sampling_params"]["max_new_tokens"]
        before = len(speaker.ids)
        text, reason = "", None
        for _ in range(n):
            id, values = speaker.next()
            state.own.append([_json(values[id]), id, None])
            state.tops.append(
                [[_json(v), i, None] for i, v in model.best(values, data["top_logprobs_num"])]
            )
            text += speaker.text()
            if id == model.EOS:
                reason = {"type": "stop", "matched": id}
            elif len(speaker.ids) >= most:
                reason = {"type": "length", "length": most}
            if reason:
                text += speaker.rest()
                break
        state.text += text
        state.ended = reason is not None
        reason = self.finish if reason and self.finish else reason
        start = before if self.repeats == "none" else 0
        meta: dict[str, Any] = {
            "id": "x",
            "finish_reason": None if self.no_end else reason,
            "prompt_tokens": len(data["input_ids"]),
            "cached_tokens": self.cached,
            "output_token_logprobs": state.own[start:],
            "output_top_logprobs": state.tops[start:],
        }
        if self.counts:
            meta["completion_tokens"] = len(speaker.ids)
        event: dict[str, Any] = {"meta_info": meta}
        event["text"] = text if self.repeats == "none" else state.text
        if self.ids:
            event["output_ids"] = speaker.ids[0 if self.repeats == "all" else before :]
        return event


class _State:
    """What was said so far."""

    def __init__(self) -> None:
        self.own: list[list[Any]] = []
        self.tops: list[list[list[Any]]] = []
        self.text = ""
        self.ended = False


def _json(logp: float) -> float | None:
    return None if math.isinf(logp) else logp


def _scored(data: dict[str, Any]) -> dict[str, Any]:
    """Of the prompt from `logprob_start_len` on: the first has no log p."""
    prompt, start = data["input_ids"], data["logprob_start_len"]
    own: list[list[Any]] = [[None, prompt[start], None]]
    tops: list[Any] = [None]
    for at in range(start + 1, len(prompt)):
        values = model.logprobs(tuple(prompt[:at]))
        own.append([_json(values[prompt[at]]), prompt[at], None])
        tops.append([[_json(v), i, None] for i, v in model.best(values, data["top_logprobs_num"])])
    return {"input_token_logprobs": own, "input_top_logprobs": tops}
