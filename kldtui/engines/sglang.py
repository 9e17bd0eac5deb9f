"""SGLang: greedy continuations by ids, and the log-probabilities of a given text.

Knows: `/generate`, `/model_info`, `/server_info` (older: `/get_…`), `/tokenize`, `/detokenize`.
Must not know: recordings, branches, the screen; the faults of HTTP (`http`).

Sources: SGLang's python/sglang/srt (entrypoints/http_server.py, managers/io_struct.py and
tokenizer_manager.py). Its streams say everything again with each event, or only what is new
(`--incremental-streaming-output`, older `--stream-output`), and builds differ in which fields
do: `completion_tokens` counts all so far, and tells for each list which of both it is.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

from kldtui.engines.base import Capabilities, EngineInfo, Reason, Token, Top
from kldtui.engines.id_server import Answer, IdServer, greedy, scored, whole_characters
from kldtui.engines.values import best_first, log_probability
from kldtui.errors import EngineBroke, EngineLoading, UnusableEngine

_GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
_MARGIN = 1
"""Builds before 2026 want a request to leave one token of the context free."""
_KEPT = ("dtype", "quantization", "kv_cache_dtype", "tp_size", "max_total_num_tokens")
_REASONS: dict[str, Reason] = {"stop": "eog", "length": "limit"}


class SglangServer(IdServer):
    """An engine over one SGLang server."""

    kind = "sglang"
    path = "/generate"
    context_option = "--context-length"

    _model: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            takes_ids=True,
            returns_ids=True,
            top_n_limit=None,
            streams_probabilities=True,
            cache_switch=True,
            notes=(
                "requests that share a batch change its last digits: serve nobody else "
                "meanwhile, or start it with --enable-deterministic-inference",
                "builds before late 2025 ignore extra_key and reuse their cache: a branch says "
                "so; start those with --disable-radix-cache",
                "a character split over several tokens is shown with the last of them",
            ),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a judged branch is asked with; `extra_key` is a new one for each."""
        return {"sampling_params": {**_GREEDY}, "extra_key": "a new one for each request"}

    async def _who(self) -> EngineInfo:
        model = await self._first("/model_info", "/get_model_info")
        if model is None:
            raise self._http.error(UnusableEngine, "this is no SGLang server (no /model_info)")
        if model.get("is_generation") is False:
            raise self._http.error(UnusableEngine, "its model does not generate text")
        health = await self._http.peek("/health")
        if health.status_code == 503:
            raise self._http.error(EngineLoading, "it is not ready yet (HTTP 503); wait for it")
        server = await self._first("/server_info", "/get_server_info") or {}
        _, models, _ = await self._http.get("/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        card = next((card for card in listed or () if isinstance(card, dict)), {})
        path = str(model.get("model_path") or "")
        self._model = str(card.get("id") or path)
        add_bos, bos_id, warnings = await self._bos()
        n_ctx = card.get("max_model_len") or server.get("context_length")
        n_vocab = model.get("vocab_size")
        return EngineInfo(
            kind=self.kind,
            url=self.url,
            model=self._model or "unnamed",
            build=str(server.get("version") or "unknown"),
            n_vocab=n_vocab if isinstance(n_vocab, int) and n_vocab > 0 else None,
            n_ctx=n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None,
            bos_id=bos_id,
            add_bos=add_bos,
            details={
                "model_path": path,
                **{name: server[name] for name in _KEPT if server.get(name) is not None},
            },
            warnings=(*warnings, *_warnings(server)),
        )

    async def _first(self, *paths: str) -> dict[str, Any] | None:
        """The object at the first of these paths that has one."""
        for path in paths:
            status, data, _ = await self._http.get(path)
            if status == 200 and isinstance(data, dict):
                return data
        return None

    def _room(self, n_prefix: int) -> int | None:
        room = super()._room(n_prefix)
        return None if room is None else room - _MARGIN

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _body(self, prefix: list[int], n: int, top_n: int, cache: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input_ids": prefix,
            "sampling_params": {**_GREEDY, "max_new_tokens": n},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": max(1, top_n),
            "return_text_in_logprobs": False,
        }
        if not cache:
            body["extra_key"] = uuid.uuid4().hex
        return body

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "stream": True}

    def _answer(self, prefix: Sequence[int], top_n: int, cache: bool) -> Answer:
        return SglangAnswer(len(prefix), max(1, top_n), cache)

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        answer = await self._http.post("/tokenize", body)
        with self._named():
            return [int(id) for id in answer["tokens"]]

    async def _decode(self, ids: Sequence[int]) -> str:
        body = {"model": self._model, "tokens": list(ids), "skip_special_tokens": False}
        answer = await self._http.post("/detokenize", body)
        with self._named():
            return str(answer["text"])

    # ── a given text ─────────────────────────────────────────────────────────────────────────

    async def score(
        self, prefix: Sequence[int], targets: Sequence[int], top_n: int
    ) -> tuple[Token, ...]:
        """What the model says of each of `targets` after `prefix`, in one request.

        Each Token has the target's log p (nats) and the `top_n` best; no bytes.
        Raises EngineError.
        """
        scored(targets, prefix)
        n = max(1, top_n)
        body = self._body([int(id) for id in (*prefix, *targets)], 1, n, False)
        body["logprob_start_len"] = max(0, len(prefix) - 2)
        async with self._turn:
            data = await self._ask(lambda: body)
        with self._named():
            meta = data["meta_info"]
            own = meta["input_token_logprobs"][-len(targets) :]
            tops = meta["input_top_logprobs"][-len(targets) :]
            if [int(entry[1]) for entry in own] != list(targets) or len(tops) != len(own):
                raise EngineBroke("it scored other tokens than were sent")
            if any(entry[0] is None for entry in own) or None in tops:
                raise EngineBroke("it scored fewer tokens than were sent")
            return tuple(
                Token(int(entry[1]), b"", log_probability(entry[0]), _top(top, n))
                for entry, top in zip(own, tops, strict=True)
            )


def _warnings(server: dict[str, Any]) -> list[str]:
    """What the server was started with that greedy requests do not keep out."""
    found = []
    if server.get("speculative_algorithm"):
        found.append("it decodes speculatively, which changes last digits: start it without")
    return found


class SglangAnswer:
    """Reads the events of a streamed generation, or a whole one."""

    def __init__(self, n_prefix: int, top_n: int, cache: bool) -> None:
        self.n_prompt: int | None = None
        self.reason: Reason | None = None
        self.detail = ""
        self.greedy = True
        self._n_prefix = n_prefix
        self._top_n = top_n
        self._cache = cache
        self._given: list[int] = []
        self._text = ""

    def feed(self, event: dict[str, Any]) -> list[Token]:
        meta = event["meta_info"]
        if meta.get("prompt_tokens") is not None:
            self.n_prompt = int(meta["prompt_tokens"])
            if self.n_prompt != self._n_prefix:
                raise UnusableEngine(
                    f"it read {self.n_prompt} tokens where {self._n_prefix} were sent"
                )
        ended = meta.get("finish_reason")
        tokens = self._tokens(event, meta, ended is not None)
        if ended is not None:
            self._end(ended, meta)
        return tokens

    def _end(self, ended: Any, meta: dict[str, Any]) -> None:
        said = ended if isinstance(ended, dict) else {"type": ended}
        kind = str(said.get("type"))
        if kind == "abort":
            raise EngineBroke(f"it gave the answer up: {said.get('message') or 'see its log'}")
        self.reason = _REASONS.get(kind, "limit")
        notes = []
        if isinstance(said.get("matched"), str):
            notes.append("at a stop string of the server's")
        if kind not in _REASONS:
            notes.append(f"it stopped for {kind!r}")
        cached = meta.get("cached_tokens")
        if cached and not self._cache:
            notes.append(f"{cached} tokens of the prompt came from its cache")
        self.detail = "; ".join(notes)

    def _tokens(self, event: dict[str, Any], meta: dict[str, Any], ends: bool) -> list[Token]:
        own = meta.get("output_token_logprobs")
        if own is None:
            raise UnusableEngine("it sends tokens without log-probabilities")
        total = meta.get("completion_tokens")
        told = event.get("output_ids")
        named = [int(entry[1]) for entry in own]
        if total is None:
            total = max(len(named if told is None else told), len(self._given))
        values = self._new(own, total)
        ids = [int(entry[1]) for entry in values]
        if told is not None and [int(id) for id in self._new(told, total)] != ids:
            raise EngineBroke("its probabilities do not belong to its tokens")
        tops = self._new(meta.get("output_top_logprobs") or [], total)
        again = len(own) == total  # builds that repeat these repeat the text
        text = self._delta(str(event.get("text") or ""), again)
        data = whole_characters(text, ends)
        tokens = []
        for k, (logp, id, *_) in enumerate(values):
            value = None if logp is None else log_probability(logp)
            piece = data if k == len(values) - 1 else b""
            tokens.append(greedy(int(id), piece, value, _top(tops[k] or [], self._top_n)))
        self._given += ids
        return tokens

    def _new(self, items: Sequence[Any], total: int) -> Sequence[Any]:
        """What this event adds to a list of which it has all so far, or only that."""
        given = len(self._given)
        if len(items) == total:
            return items[given:]
        if len(items) == total - given:
            return items
        raise EngineBroke(
            f"it counts {total} tokens, {given} of them sent before, but sends {len(items)}"
        )

    def _delta(self, text: str, again: bool) -> str:
        """What this event adds to the text; with `again` it says all of it, less what is not
        certain yet."""
        if not again:
            return text
        if not text.startswith(self._text):
            return ""
        new, self._text = text[len(self._text) :], text
        return new


def _top(raw: Sequence[Any], n: int) -> Top:
    """`[[log p, id, text], …]` best first; JSON has no infinity: null is a log p of -inf."""
    return best_first(
        (int(id), -math.inf if logp is None else log_probability(logp)) for logp, id, *_ in raw
    )[:n]
