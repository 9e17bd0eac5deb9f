"""A fake mlx_lm.server on a real loopback socket, and a child that speaks as kldtui's own does.

It behaves as mlx_lm 0.32.2 does (`older`: 0.30.5), prompt cache included: a prompt that equals an
earlier prompt with its answer leaves nothing to compute; with a seed the connection drops, without
one the generation thread ends for good. Its model is the tiny one, which has a character in two
halves and whole, so that text does not always give back its ids.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kldtui.engines.parity import SAMPLE, OwnTokenizer
from kldtui.vocab import Vocabulary
from tests import tiny_model as model
from tests.fake_http import Died, Events, FakeHttp, Reply, Request

COMPLETIONS = "/v1/completions"


def tiny_tokenizer(*, adds_bos: bool = False, ends: Sequence[int] = (model.EOS,)) -> OwnTokenizer:
    """The tiny model's own tokenizer."""
    vocabulary = Vocabulary(
        dict(enumerate(model.PIECES)),
        "tokenizer.json",
        n_vocab=model.N_VOCAB,
        bos_id=model.BOS,
        eog_ids=ends,
    )
    before = (model.BOS,) if adds_bos else ()
    return OwnTokenizer(model.encode, model.decode, vocabulary, before=before)


class FakeMlx(FakeHttp):
    """What it says is the tiny model's; after `base` it is `script`, as far as that goes.

    held: prompts with their answers, as in its cache. drops: how often a prompt left nothing to
    compute. dies_at: the completion (counted from 0) at which the connection is torn down. slips:
    a token that is said in place of the right one after these ids, or None.
    """

    def __init__(self, script: Sequence[int] = (), base: Sequence[int] = (), **more: Any) -> None:
        super().__init__()
        self.script, self.base = list(script), list(base)
        self.adds_bos = False
        self.older = False
        self.models: Any = {"object": "list", "data": []}
        self.cache_size = 10
        self.held: list[list[int]] = []
        self.drops = 0
        self.thread_died = False
        self.dies_at: int | None = None
        self.miscounts = 0
        self.loading = asyncio.Event()
        self.loading.set()
        self.replies: dict[str, Reply] = {}
        self.rewrite: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data
        self.slips: Callable[[list[int]], int | None] = lambda seen: None
        self.api_key: str | None = None
        self.headers = {"Server": "BaseHTTP/0.6 Python/3.11.7"}
        for name, value in more.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    def truth(self, prefix: Sequence[int], n: int) -> list[int]:
        """What its model says after a prefix, up to an end."""
        said: list[int] = []
        while len(said) < n and said[-1:] != [model.EOS]:
            said.append(model.best(self._values([*prefix, *said]), 1)[0][0])
        return said

    def asked_for(self) -> list[dict[str, Any]]:
        """The bodies of all completions but those that ask who is there."""
        return [body for body in self.bodies(COMPLETIONS) if body["prompt"] != SAMPLE]

    async def answer(self, request: Request) -> Reply | Events:
        path = request.path
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return Reply(401, {"error": "who are you?"})
        if path in self.replies:
            return self.replies[path]
        if path == "/health":
            words = {"status": "unavailable" if self.thread_died else "ok"}
            return Reply(503 if self.thread_died else 200, words)
        if path.startswith("/v1/models"):
            return Reply(200, b"" if self.models is None else self.models)
        if path != COMPLETIONS or request.method != "POST":
            return Reply(404, b"Not Found")
        await self.loading.wait()
        if self.dies_at is not None and len(self.bodies(COMPLETIONS)) > self.dies_at:
            raise Died
        return self._complete(request.body)

    def _complete(self, body: dict[str, Any]) -> Reply:
        if self.thread_died:
            return Reply(404, {"error": "generation thread died"})
        wrong = self._wrong(body)
        if wrong:
            return Reply(400, {"error": wrong})
        if not isinstance(body["prompt"], str):
            self.thread_died = any(isinstance(item, str) for item in body["prompt"])
            return Reply(404, {"error": "text input must be of type `str`"})
        if body.get("model", "default_model") != "default_model":
            return Reply(404, {"error": f"Repo not found: {body['model']}"})
        ids = model.encode(body["prompt"], special=True, add_bos=self.adds_bos)
        if not ids or ids in self.held:
            self.drops += 1
            self.thread_died = body.get("seed") is None
            raise Died
        said = list(ids)
        entries: list[tuple[int, tuple[float, ...]]] = []
        while len(entries) < body["max_tokens"]:
            slip = self.slips(said)
            values = self._values(said) if slip is None else model.logprobs(tuple(said), slip)
            id = model.best(values, 1)[0][0]
            said.append(id)
            entries.append((id, values))
            if id == model.EOS:
                break
        cached = max((_common(ids[:-1], held) for held in self.held), default=0)
        self.held = [held for held in self.held if said[: len(held)] != held]
        self.held = [*self.held, said][-self.cache_size :] if self.cache_size else []
        return Reply(200, self.rewrite(self._shaped(body, len(ids), entries, cached)))

    def _wrong(self, body: dict[str, Any]) -> str:
        logprobs, top = body.get("logprobs", False), body.get("top_logprobs", -1)
        if self.older:
            return "" if logprobs is True or logprobs in range(1, 11) else "logprobs must be 1-10"
        if not isinstance(logprobs, bool):
            return "logprobs must be of type bool"
        return "" if top == -1 or 0 < top <= 10 else "top_logprobs must be at most 10"

    def _values(self, seen: list[int]) -> tuple[float, ...]:
        at = len(seen) - len(self.base)
        scripted = 0 <= at < len(self.script) and seen == [*self.base, *self.script[:at]]
        return model.logprobs(tuple(seen), self.script[at] if scripted else None)

    def _shaped(
        self,
        body: dict[str, Any],
        n_prompt: int,
        entries: list[tuple[int, tuple[float, ...]]],
        cached: int,
    ) -> dict[str, Any]:
        ended = entries[-1][0] == model.EOS
        n = int(body["logprobs"]) if self.older else body.get("top_logprobs", -1)
        tops = [model.best(values, n)[::-1] if n > 0 else [] for _, values in entries]
        text = model.decode([id for id, _ in entries]).removeprefix(" ")
        usage: dict[str, Any] = {
            "prompt_tokens": n_prompt + self.miscounts,
            "completion_tokens": len(entries),
        }
        if self.older:
            said: Any = {
                "token_logprobs": [values[id] for id, values in entries],
                "top_logprobs": tops,
                "tokens": [id for id, _ in entries],
            }
        elif n > 0:
            listed = [
                [{"id": i, "token": repr(model.PIECES[i]), "logprob": p} for i, p in top]
                for top in tops
            ]
            said = {"content": [{**top[0], "top_logprobs": top} for top in listed]}
        else:
            said = {"content": [{"id": id, "logprob": values[id]} for id, values in entries]}
        if not self.older:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {
            "id": "cmpl-1",
            "system_fingerprint": "0.32.2-0.32.4-Linux-6.1-x86_64-with-glibc2.36-x86_64",
            "object": "text_completion",
            "model": "default_model",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop" if ended else "length",
                    "logprobs": said,
                    "text": text,
                }
            ],
            "usage": usage,
        }


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


CHILD = """
import json, os, socket, sys, time
from kldtui.engines._mlx_child import serve
from tests import tiny_model as model
mode, settings = sys.argv[1], json.loads(sys.argv[2])
if mode == "fails":
    print("error: no safetensors found", file=sys.stderr)
    sys.exit(1)
if mode == "loads":
    time.sleep(600)
class Fake:
    def answer(self, request):
        speaker = model.Speaker(request["ids"])
        if max(request["ids"]) >= model.N_VOCAB:
            yield {"error": "the prompt contains invalid tokens"}
            return
        request["progress"](0, len(request["ids"]))
        end = "limit"
        for at in range(request["n"]):
            if mode == "dies" and at == 2:
                print("error: out of memory", file=sys.stderr, flush=True)
                os._exit(9)
            if mode == "silent" and at == 2:
                time.sleep(600)
            id, values = speaker.next()
            logp = 0.5 if mode == "positive" else values[id]
            yield {"id": id, "logp": logp, "top": model.best(values, request["top_n"])}
            if mode == "slow":
                time.sleep(0.05)
            if id == model.EOS:
                end = "eog"
                break
        yield {"end": end, "cached": 0}
listener = socket.socket(socket.AF_UNIX)
listener.bind(settings["socket"])
listener.listen()
said = {"n_vocab": model.N_VOCAB, "mlx_lm": "9.9", "mlx": "8.8", "ends": settings["ends"]}
os.write(int(os.environ["KLDTUI_REPORT_FD"]), json.dumps(said).encode() + b"\\n")
serve(Fake(), listener)
"""
"""Modes: well, fails, loads (for ever), dies and silent (after two tokens), positive, slow."""


def child_command(folder: Path, mode: str) -> tuple[str, ...]:
    """What to run in place of mlx_lm's child."""
    script = folder / "child.py"
    script.write_text(CHILD)
    return (sys.executable, str(script), mode)


def bare_folder(folder: Path) -> Path:
    """As much of an MLX folder as is looked at without mlx_lm."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "vocab_size": model.N_VOCAB,
        "quantization": {"bits": 4, "group_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder
