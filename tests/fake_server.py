"""A fake llama-server on a real loopback socket, for faults that a real one does not make to order.

It behaves as builds 11434 and 11549 do, incomplete characters included: a token that ends in
mid-character has no stream event and no entry, and the next entry carries the merged bytes.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from tests.fake_http import InThread

EOG = 2
BOS = 1
TEXT = 97
VOCABULARY: dict[int, bytes] = {0: b"", BOS: b"", EOG: b""}
VOCABULARY |= {id: bytes([id]) for id in range(3, 256)}
VOCABULARY |= {id: b" w%d" % id for id in range(256, 300)}
VOCABULARY |= {
    300: "美".encode(),
    301: "美".encode()[:2],
    302: "😀".encode()[:3],
    303: " héllo".encode(),
    304: b'"}}',
    305: b"</tool_call>",
}
SPECIAL = {0: b"<unk>", BOS: b"<s>", EOG: b"</s>"}


@dataclass
class FakeLlama(InThread):
    """A server whose model says `script`, whatever it is asked, from the end of `prompt_length`.

    Fields switch faults on. `requests` has (path, body, headers) of all that was asked.
    """

    script: list[int] = field(default_factory=list)
    prompt_length: int | None = None
    n_ctx: int = 64
    n_vocab: int = 306
    add_bos: bool = False
    shape: str = "new"
    loading: int = 0
    api_key: str | None = None
    echoes_key: bool = False
    dies_after: int | None = None
    fails_after: int | None = None
    no_end: bool = False
    evaluates: int = 0
    predicted: bool = True
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    script_again: list[int] | None = None
    pieces_cut: int = 7
    replies: dict[str, tuple[int, Any]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    model_path: str = "/models/fake-q4.gguf"
    params: dict[str, Any] = field(default_factory=dict)
    total_slots: int = 1
    grammars: str = "ids"
    """`ids`: takes token ids in a grammar; `none`: refuses them; `loose`: does not keep to them"""
    lists_ends: bool = True
    keeps_cache: bool = True
    killed_by: list[str] = field(default_factory=list)
    """Grammars that a real server would not have outlived"""
    next_top: Callable[[list[int]], list[tuple[int, float]]] | None = None
    pause: float = 0.0
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    closed_early: int = 0
    url: str = ""
    drift: float = 0.0
    """Nats by which numbers move with how the tokens before were computed, alone or in batches"""
    template: Callable[[dict[str, Any]], str] | None = None
    """What `/apply-template` makes of a conversation; ValueError is its refusal"""
    _held: list[tuple[int, int]] = field(default_factory=list)
    """Tokens, each with the size of the batch in which it was computed"""
    _computed: int = 0
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def bodies(self, path: str = "/completion") -> list[dict[str, Any]]:
        return [body for asked, body, _ in self.requests if asked == path]

    # ── sockets ──────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._serving):  # one that is silent would be waited for, from 3.12 on
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request, *lines = head.split("\r\n")
            path = request.split(" ")[1]
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            data = json.loads(body) if body else None
            self.requests.append((path.split("?")[0], data, headers))
            await self._reply(path, data, headers, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed_early += 1
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _reply(
        self, path: str, data: Any, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        path = path.split("?")[0]
        status, answer = self._answer(path, data, headers)
        if status == 200 and path == "/completion" and data.get("stream"):
            await self._stream(data, writer)
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        writer.write(
            f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\n{more}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    async def _stream(self, data: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for event in self._events(data):
                text = b": ping\n\ndata: " + json.dumps(event, ensure_ascii=False).encode()
                text += b"\n\n"
                for at in range(0, len(text), self.pieces_cut):
                    part = text[at : at + self.pieces_cut]
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
                await asyncio.sleep(self.pause)
                if writer.is_closing():
                    raise ConnectionResetError
        except _DiedError:
            await writer.drain()
            writer.transport.abort()
            return
        finally:
            self.running -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    # ── llama-server ─────────────────────────────────────────────────────────────────────────

    def _answer(self, path: str, data: Any, headers: dict[str, str]) -> tuple[int, Any]:
        if path in self.replies:
            return self.replies[path]
        if self.loading > 0 and path == "/health":
            self.loading -= 1
            return 503, _error(503, "Loading model", "unavailable_error")
        public = path in ("/health", "/v1/models")
        if self.api_key and not public and headers.get("authorization") != f"Bearer {self.api_key}":
            words = "Invalid API Key"
            if self.echoes_key:
                words += ": " + headers.get("authorization", "")
            return 401, _error(401, words, "authentication_error")
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/v1/models":
            meta = {"n_vocab": self.n_vocab, "n_ctx": self.n_ctx, "n_params": 1000, "size": 9}
            return 200, {"data": [{"id": "fake", "owned_by": "llamacpp", "meta": meta}]}
        if path == "/props":
            return 200, {
                "default_generation_settings": {"n_ctx": self.n_ctx, "params": self.params},
                "model_path": self.model_path,
                "total_slots": self.total_slots,
                "build_info": "b11549-abc",
                "bos_token": "<s>",
            }
        if path == "/apply-template" and self.template is not None:
            try:
                return 200, {"prompt": self.template(data)}
            except ValueError as error:
                return 500, _error(500, f"Jinja: {error}", "server_error")
        if path == "/tokenize":
            return 200, {"tokens": self._tokenize(data)}
        if path == "/detokenize":
            ids = data["tokens"]
            if any(id not in VOCABULARY for id in ids):
                return 500, _error(500, "invalid token", "server_error")
            text = b"".join(SPECIAL.get(id, VOCABULARY[id]) for id in ids)
            return 200, {"content": text.decode("utf-8", "replace")}
        if path == "/completion":
            return self._complete(data)
        return 404, _error(404, "File Not Found", "not_found_error")

    def _tokenize(self, data: dict[str, Any]) -> list[int]:
        text = data["content"].encode()
        ids = [BOS] if self.add_bos and data.get("add_special") else []
        specials = {piece: id for id, piece in SPECIAL.items()}
        whole = {piece: id for id, piece in VOCABULARY.items() if piece}
        if text in whole:
            return [*ids, whole[text]]
        for part in re.split(b"(" + b"|".join(map(re.escape, specials)) + b")", text):
            ids += [specials[part]] if part in specials else list(part)
        return ids

    def _complete(self, data: dict[str, Any]) -> tuple[int, Any]:
        n = len(data["prompt"])
        if n >= self.n_ctx:
            words = f"request ({n} tokens) exceeds the available context size"
            error = _error(400, words, "exceed_context_size_error")
            error["error"] |= {"n_prompt_tokens": n, "n_ctx": self.n_ctx}
            return 400, error
        if any(id not in VOCABULARY for id in data["prompt"]):
            return 400, _error(400, "Prompt contains invalid tokens", "invalid_request_error")
        if data.get("grammar") and self.grammars == "none":
            words = "Failed to initialize samplers: failed to parse grammar"
            return 400, _error(400, words, "invalid_request_error")
        if any(id >= self.n_vocab or not _whole(id) for id in _grammar(data)):
            self.killed_by.append(data["grammar"])
            return 500, _error(500, "it is dead", "server_error")
        if data.get("stream"):
            return 200, None
        tokens, entries, content = [], [], b""
        for id, entry, text in self._steps(data, again=True):
            tokens.append(id)
            entries += [entry] if entry is not None else []
            content += text
        answer = self._final(data, tokens) | {
            "tokens": tokens,
            "content": content.decode("utf-8", "replace"),
            "completion_probabilities": entries,
        }
        return 200, self.rewrite(answer) if self.rewrite else answer

    async def _events(self, data: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        given = []
        for at, (id, entry, text) in enumerate(self._steps(data)):
            if self.dies_after == at:
                raise _DiedError
            if self.fails_after == at:
                yield _error(500, "slot unavailable", "server_error")
                return
            given.append(id)
            if entry is None:
                continue
            event = {
                "content": text.decode("utf-8", "replace"),
                "tokens": [id],
                "stop": False,
                "tokens_evaluated": len(data["prompt"]) + self.evaluates,
                "completion_probabilities": [entry],
            }
            if self.predicted:
                event["tokens_predicted"] = len(given)
            yield self.rewrite(event) if self.rewrite else event
        if not self.no_end:
            yield self._final(data, given) | {"tokens": [], "content": ""}

    def _final(self, data: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        full = len(data["prompt"]) + len(tokens) >= self.n_ctx
        return {
            "stop": True,
            "stop_type": "eos" if tokens and tokens[-1] == EOG else "limit",
            "truncated": full,
            "tokens_predicted": len(tokens),
            "tokens_evaluated": len(data["prompt"]) + self.evaluates,
            "timings": {"predicted_per_second": 40.0, "prompt_n": self._computed},
            "generation_settings": {
                "logit_bias": [{"bias": None, "token": id} for id in (0, EOG)]
                if data.get("ignore_eos") and self.lists_ends
                else []
            },
        }

    def _take(self, data: dict[str, Any]) -> None:
        """Compute the prompt, as far as it is not held: in one batch, and its last token alone."""
        prompt = data["prompt"]
        kept = 0
        if data.get("cache_prompt") and self.keeps_cache:
            held = [id for id, _ in self._held]
            while kept < min(len(prompt) - 1, len(held)) and prompt[kept] == held[kept]:
                kept += 1
        self._computed = len(prompt) - kept
        batch = [(id, self._computed - 1) for id in prompt[kept:-1]]
        self._held = [*self._held[:kept], *batch, (prompt[-1], 1)]

    def _drifted(self, top: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """The list as the way in which what is held was computed moves it."""
        if not self.drift:
            return top
        way = random.Random(repr([batch for _, batch in self._held]))  # noqa: S311
        moved = [(id, min(0.0, p + self.drift * way.uniform(-1, 1))) for id, p in top]
        return sorted(moved, key=lambda one: (-one[1], one[0]))

    def _next(self, prompt: list[int], again: bool) -> list[tuple[int, float]]:
        """The best list after `prompt`, best first."""
        if self.next_top is not None:
            return self.next_top(prompt)
        if self.prompt_length is None:
            self.prompt_length = len(prompt)
        script = self.script_again if again and self.script_again is not None else self.script
        at = len(prompt) - self.prompt_length
        best = script[at] if 0 <= at < len(script) else EOG
        rest = [id for id in VOCABULARY if id != best]
        return [(best, -0.1), *((id, -2.5 - 0.01 * k) for k, id in enumerate(rest))]

    def _steps(
        self, data: dict[str, Any], again: bool = False
    ) -> Iterator[tuple[int, dict[str, Any] | None, bytes]]:
        """(id, its entry or None, text) for each generated token."""
        prompt, pending = list(data["prompt"]), b""
        allowed = _grammar(data) if self.grammars == "ids" else []
        forced = {id for id, bias in data.get("logit_bias", ()) if bias >= 1e6}
        room = self.n_ctx - len(prompt)
        self._take(data)
        for k in range(min(data["n_predict"], room)):
            if k:
                self._held.append((prompt[-1], 1))
            top = self._drifted(self._next(prompt, again))
            id = next(iter(forced), top[0][0])
            if allowed:
                id = allowed.pop(0)
            prompt.append(id)
            pending += VOCABULARY[id]
            if _ends_inside(pending):
                yield id, None, b""
                continue
            yield id, self._entry(id, pending, top, data["n_probs"]), pending
            pending = b""
            if id == EOG:
                return

    def _entry(self, id: int, data: bytes, top: list[tuple[int, float]], n: int) -> dict[str, Any]:
        text = data.decode("utf-8", "replace")
        own = dict(top)[id]
        if self.shape == "old":
            probs = [
                {"tok_str": VOCABULARY[i].decode("utf-8", "replace"), "prob": math.exp(p)}
                for i, p in top[:n]
            ]
            return {"content": text, "probs": probs}
        name, listed = (
            ("prob", "top_probs")
            if self.shape == "post"
            else (
                "logprob",
                "top_logprobs",
            )
        )
        value = math.exp if self.shape == "post" else float
        return {
            "id": id,
            "token": text,
            "bytes": list(data),
            name: value(own),
            listed: [
                {
                    "id": i,
                    "token": VOCABULARY[i].decode("utf-8", "replace"),
                    "bytes": list(VOCABULARY[i]),
                    name: value(p),
                }
                for i, p in top[:n]
            ],
        }


class _DiedError(Exception):
    pass


def _error(code: int, words: str, kind: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": words, "type": kind}}


def _grammar(data: dict[str, Any]) -> list[int]:
    """The ids of a grammar that is a sequence of them."""
    return [int(id) for id in re.findall(r"<\[(\d+)\]>", data.get("grammar") or "")]


def _whole(id: int) -> bool:
    """Whether a real server outlives the id in a grammar."""
    try:
        return id != EOG and bool(VOCABULARY[id].decode())
    except UnicodeDecodeError:
        return False


def _ends_inside(data: bytes) -> bool:
    """Whether `data` ends with the beginning of a character (llama.cpp's validate_utf8)."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return need > back
    return False
