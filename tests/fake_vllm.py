"""A fake vLLM on a real loopback socket: its shapes, and faults that a real one makes by chance.

Shapes as in vLLM's vllm/entrypoints/openai/completion: `token_ids` and `prompt_token_ids` in the
choice, candidates keyed `token_id:123` with the sampled token first, -9999 for a log p of -inf,
N or N+1 candidates, a usage chunk without choices at the end, and `[DONE]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests import tiny_model as model
from tests.fake_http import Events, FakeHttp, Reply, Request, event_bytes

OPEN = ("/health", "/version", "/tokenize", "/detokenize", "/metrics")


class FakeVllm(FakeHttp):
    """What it says is the tiny model's, after `script`.

    interval: tokens a chunk. ids: whether it knows `return_token_ids` (0.10.2). named: whether it
    knows `return_tokens_as_token_ids`. salts: whether it takes `cache_salt` (0.9).
    fault: what to stream in place of the chunk with this number.
    """

    def __init__(self, script: Sequence[int] = (), **more: Any) -> None:
        super().__init__()
        self.script = list(script)
        self.max_logprobs = 20
        self.max_model_len = 128
        self.add_bos = True
        self.interval = 1
        self.ids = True
        self.named = True
        self.salts = True
        self.api_key: str | None = None
        self.dead = False
        self.no_end = False
        self.finish: str | None = None
        self.fault: dict[int, list[Any] | Exception] = {}
        self.rewrite: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data
        self.replies: dict[str, Reply] = {}
        self.cards = [{"id": "org/tiny", "root": "/models/tiny", "parent": None}]
        self.headers = {"Server": "uvicorn"}
        for name, value in more.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    async def answer(self, request: Request) -> Reply | Events:
        path, data = request.path, request.body
        if path in self.replies:
            return self.replies[path]
        key = request.headers.get("authorization")
        if self.api_key and path not in OPEN and key != f"Bearer {self.api_key}":
            return Reply(401, {"error": "Unauthorized"})
        if path == "/health":
            return Reply(503 if self.dead else 200)
        if path == "/version":
            return Reply(200, {"version": "0.11.0"})
        if path == "/v1/models":
            cards = [
                {"object": "model", "created": 1, "owned_by": "vllm", **card}
                | ({} if card.get("parent") else {"max_model_len": self.max_model_len})
                for card in self.cards
            ]
            return Reply(200, {"object": "list", "data": cards})
        if path == "/tokenize":
            ids = model.encode(
                data["prompt"], special=data["add_special_tokens"], add_bos=self.add_bos
            )
            return Reply(200, {"count": len(ids), "max_model_len": 128, "tokens": ids})
        if path == "/detokenize":
            if any(id >= model.N_VOCAB for id in data["tokens"]):
                return refused(f"token id {max(data['tokens'])} is out of vocabulary")
            return Reply(200, {"prompt": model.decode(data["tokens"])})
        if path == "/v1/completions":
            return self._complete(data)
        return Reply(404, {"detail": "Not Found"})

    def _complete(self, data: dict[str, Any]) -> Reply | Events:
        prompt = data["prompt"]
        if data.get("model") not in (None, *(card["id"] for card in self.cards)):
            return refused(f"The model `{data['model']}` does not exist.", 404)
        if "cache_salt" in data and not self.salts:
            return refused("Parameter 'cache_salt' is not supported with engine V0.")
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            if (data.get(name) or 0) > self.max_logprobs:
                return refused(
                    f"Requested {kind} logprobs of {data[name]}, which is greater than max "
                    f"allowed: {self.max_logprobs}"
                )
        if len(prompt) + data["max_tokens"] > self.max_model_len:
            total = len(prompt) + data["max_tokens"]
            return refused(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {total} tokens ({len(prompt)} in the messages, "
                f"{data['max_tokens']} in the completion)."
            )
        if any(id >= model.N_VOCAB for id in prompt):
            return refused(f"Token id {max(prompt)} is out of vocabulary")
        if data.get("stream"):
            return self._chunks(data)
        if data.get("prompt_logprobs") is not None:
            return Reply(200, self.rewrite(self._scored(data)))
        choice, _ = self._choice(data, model.Speaker(prompt, self.script), data["max_tokens"])
        choice |= {"prompt_token_ids": prompt} if self.ids else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        return Reply(200, self.rewrite({"choices": [choice], "usage": usage}))

    async def _chunks(self, data: dict[str, Any]) -> Events:
        speaker = model.Speaker(data["prompt"], self.script)
        ended, number = False, 0
        while not ended:
            if number in self.fault:
                fault = self.fault[number]
                if isinstance(fault, Exception):
                    raise fault
                for part in fault:
                    yield part
                return
            left = data["max_tokens"] - len(speaker.ids)
            choice, ended = self._choice(data, speaker, min(self.interval, left))
            if self.no_end:
                choice["finish_reason"], ended = None, len(speaker.ids) >= data["max_tokens"]
            if number == 0 and self.ids:
                choice["prompt_token_ids"] = data["prompt"]
            number += 1
            yield event_bytes(self.rewrite({"object": "text_completion", "choices": [choice]}))
        if data.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(data["prompt"]), "completion_tokens": len(speaker.ids)}
            yield event_bytes({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _choice(
        self, data: dict[str, Any], speaker: model.Speaker, n: int
    ) -> tuple[dict[str, Any], bool]:
        """The next `n` tokens, and whether they are the last."""
        ids, names, own, tops, text = [], [], [], [], ""
        reason: str | None = None
        for _ in range(n):
            id, values = speaker.next()
            if data["temperature"]:  # drawn: it always hits on the second best
                id = speaker.ids[-1] = model.best(values, 2)[1][0]
            ids.append(id)
            names.append(self._name(id))
            own.append(max(values[id], -9999.0))
            listed = {id: values[id]} | dict(model.best(values, data["logprobs"]))
            tops.append({self._name(i): max(value, -9999.0) for i, value in listed.items()})
            text += speaker.text()
            if id == model.EOS:
                reason = "stop"
            elif len(speaker.ids) >= data["max_tokens"]:
                reason = "length"
            if reason:
                break
        reason = self.finish if reason and self.finish else reason
        logprobs = {"tokens": names, "token_logprobs": own, "top_logprobs": tops}
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self.ids and data.get("return_token_ids"):
            choice["token_ids"] = ids
        return choice | {"stop_reason": None}, reason is not None

    def _name(self, id: int) -> str:
        return f"token_id:{id}" if self.named else model.decode([id])

    def _scored(self, data: dict[str, Any]) -> dict[str, Any]:
        entries: list[dict[str, Any] | None] = [None]
        prompt, n = data["prompt"], data["prompt_logprobs"]
        for at in range(1, len(prompt)):
            values = model.logprobs(tuple(prompt[:at]))
            ranks = {id: k + 1 for k, (id, _) in enumerate(model.best(values, model.N_VOCAB))}
            listed = [prompt[at], *(id for id, _ in model.best(values, n))]
            entries.append(
                {
                    str(id): {
                        "logprob": -9999.0 if math.isinf(values[id]) else values[id],
                        "rank": ranks[id],
                        "decoded_token": model.decode([id]),
                    }
                    for id in dict.fromkeys(listed)
                }
            )
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": entries}]}


def refused(words: str, code: int = 400) -> Reply:
    kind = "BadRequestError" if code == 400 else "NotFoundError"
    return Reply(code, {"error": {"message": words, "type": kind, "param": None, "code": code}})
