"""vLLM: greedy continuations by ids, and the log-probabilities of a given text.

Knows: `/v1/completions` with vLLM's own fields, `/v1/models`, `/version`, `/tokenize`.
Must not know: recordings, branches, the screen; the faults of HTTP (`http`).

Sources: vLLM's vllm/entrypoints/openai/completion (protocol.py, serving.py) and its
vllm/entrypoints/serve/tokenize. vLLM's defaults come from the model's generation_config.json, so
that every penalty is sent although it is neutral; with temperature 0 it ignores top-k and top-p.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Reason, Token, Top
from kldtui.engines.id_server import Answer, IdServer, greedy, scored, whole_characters
from kldtui.engines.values import best_first, log_probability
from kldtui.errors import EngineBroke, EngineRefused, UnusableEngine

_GREEDY: dict[str, Any] = {
    "temperature": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
_NAMED = "token_id:"
DEFAULT_LIMIT = 20
_ALLOWED = re.compile(r"logprobs.{0,80}?max(?:imum)? allowed:? (\d+)", re.DOTALL)
_REASONS: dict[str, Reason] = {"stop": "eog", "length": "limit"}


class VllmServer(IdServer):
    """An engine over one vLLM server."""

    kind = "vllm"
    path = "/v1/completions"
    context_option = "--max-model-len"

    _model: str | None = None
    _limit = DEFAULT_LIMIT
    _limit_told = False
    _salts = True
    _others: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        notes = [
            f"it gives at most {self._limit} candidates a position"
            + ("" if self._limit_told else " unless started with more")
            + " (--max-logprobs)",
            "requests that share a batch change its last digits: serve nobody else meanwhile, "
            "or start it with VLLM_BATCH_INVARIANT=1",
            "a character split over several tokens is shown with the last of them",
        ]
        if not self._salts:
            notes.append(
                "it refuses cache_salt, so that its prefix cache cannot be avoided: "
                "start it with --no-enable-prefix-caching"
            )
        if self._others:
            notes.append(f"?model=NAME in the URL chooses another: {', '.join(self._others)}")
        return Capabilities(
            takes_ids=True,
            returns_ids=True,
            top_n_limit=self._limit,
            streams_probabilities=True,
            cache_switch=self._salts,
            notes=tuple(notes),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a judged branch is asked with; `cache_salt` is a new one for each."""
        salt = {"cache_salt": "a new one for each request"} if self._salts else {}
        return {**_GREEDY, **salt, "top_n_limit": self._limit}

    async def _who(self) -> EngineInfo:
        health = await self._http.peek("/health")
        if health.status_code == 503:
            raise self._http.error(EngineBroke, "its engine has died (HTTP 503); start it again")
        _, models, _ = await self._http.get("/v1/models")
        listed = models.get("data") if isinstance(models, dict) else None
        cards = [card for card in listed or () if isinstance(card, dict) and card.get("id")]
        if not cards:
            raise self._http.error(UnusableEngine, "it lists no model (/v1/models)")
        card = self._chosen(cards)
        base = next((c for c in cards if c.get("id") == card.get("parent")), card)
        status, version, _ = await self._http.get("/version")
        build = version.get("version") if isinstance(version, dict) and status == 200 else None
        self._model = str(card["id"])
        add_bos, bos_id, warnings = await self._bos()
        n_ctx = card.get("max_model_len") or base.get("max_model_len")
        return EngineInfo(
            kind=self.kind,
            url=self.url,
            model=self._model,
            build=str(build or "unknown"),
            n_vocab=None,
            n_ctx=n_ctx if isinstance(n_ctx, int) else None,
            bos_id=bos_id,
            add_bos=add_bos,
            details={"model_path": str(card.get("root") or "")},
            warnings=tuple(warnings),
        )

    def _chosen(self, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The card of `?model=NAME`, else the first base model's."""
        names = [str(card["id"]) for card in cards]
        wanted = self._http.address.query.get("model")
        if wanted is not None and wanted not in names:
            raise self._http.error(
                UnusableEngine, f"it serves no model {wanted!r}, only {', '.join(names[:8])}"
            )
        chosen = names.index(wanted) if wanted is not None else 0
        self._others = tuple(name for name in names[:8] if name != names[chosen])
        return cards[chosen]

    async def sample(
        self, prefix: Sequence[int], n: int, top_n: int, *, temperature: float, seed: int
    ) -> AsyncGenerator[Token | Finish, None]:
        """As `generate`, but drawn at `temperature` from the whole vocabulary; log p is still the
        model's own, at temperature 1, unless the server was started with another logprobs mode."""
        drawn = {"temperature": temperature, "seed": seed, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        items = self._going_on(prefix, n, top_n, False, drawn)
        async with contextlib.aclosing(items) as answer:
            async for item in answer:
                yield item

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _body(self, prefix: list[int], n: int, top_n: int, cache: bool) -> dict[str, Any]:
        body = {
            **self._named_model(),
            "prompt": prefix,
            "max_tokens": n,
            **_GREEDY,
            "logprobs": self._allowed(top_n),
        }
        if self._salts and not cache:
            body["cache_salt"] = uuid.uuid4().hex
        return body

    def _named_model(self) -> dict[str, Any]:
        return {} if self._model is None else {"model": self._model}

    def _allowed(self, top_n: int) -> int:
        """As many candidates as are asked for, or as the server is known to give."""
        return max(1, min(top_n, self._limit) if self._limit_told else top_n)

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "stream": True, "stream_options": {"include_usage": True}}

    def _answer(self, prefix: Sequence[int], top_n: int, cache: bool) -> Answer:
        return VllmAnswer(prefix, self._allowed(top_n), self._took)

    def _took(self, top_n: int) -> None:
        self._limit = max(self._limit, top_n)

    def _learn(self, refusal: EngineRefused) -> bool:
        words = str(refusal)
        if self._salts and "cache_salt" in words:
            self._salts = False
            return True
        allowed = _ALLOWED.search(words)
        if allowed is None or (self._limit_told and int(allowed[1]) >= self._limit):
            return False
        self._limit, self._limit_told = int(allowed[1]), True
        return True

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        body = {**self._named_model(), "prompt": text, "add_special_tokens": special}
        answer = await self._http.post("/tokenize", body)
        with self._named():
            return [int(id) for id in answer["tokens"]]

    async def _decode(self, ids: Sequence[int]) -> str:
        body = {**self._named_model(), "tokens": list(ids)}
        answer = await self._http.post("/detokenize", body)
        with self._named():
            return str(answer["prompt"])

    # ── a given text ─────────────────────────────────────────────────────────────────────────

    async def score(
        self, prefix: Sequence[int], targets: Sequence[int], top_n: int
    ) -> tuple[Token, ...]:
        """What the model says of each of `targets` after `prefix`, in one request.

        Each Token has the target's log p (nats) and the `top_n` best, or as many as the server
        gives; no bytes. vLLM computes prompts whose log-probabilities it is asked for without
        its prefix cache. Raises EngineError.
        """
        scored(targets, prefix)
        ids = [int(token) for token in (*prefix, *targets)]

        def body() -> dict[str, Any]:
            asked = {**self._named_model(), "prompt": ids, "max_tokens": 1, **_GREEDY}
            return {**asked, "prompt_logprobs": self._allowed(top_n)}

        async with self._turn:
            data = await self._ask(body)
        with self._named():
            entries = data["choices"][0]["prompt_logprobs"]
            if len(entries) != len(ids):
                raise EngineBroke(f"it scored {len(entries)} tokens where {len(ids)} were sent")
            n = self._allowed(top_n)
            return tuple(
                _scored(target, entry, n)
                for target, entry in zip(targets, entries[len(prefix) :], strict=True)
            )


class VllmAnswer:
    """Reads the chunks of a streamed completion, or a whole one.

    took: told once, with `top_n`, that the server gave as many candidates as were asked for.
    """

    def __init__(
        self, prefix: Sequence[int], top_n: int, took: Callable[[int], None] | None = None
    ) -> None:
        self.n_prompt: int | None = None
        self.reason: Reason | None = None
        self.detail = ""
        self.greedy = True
        self._prefix = list(prefix)
        self._top_n = top_n
        self._took = took

    def feed(self, event: dict[str, Any]) -> list[Token]:
        usage = event.get("usage")
        if usage and usage.get("prompt_tokens") is not None:
            self.n_prompt = int(usage["prompt_tokens"])
            self._same(self.n_prompt == len(self._prefix))
        tokens: list[Token] = []
        for choice in event.get("choices") or ():
            read = choice.get("prompt_token_ids")
            if read is not None:
                self._same(list(read) == self._prefix)
            ended = choice.get("finish_reason")
            tokens += self._tokens(choice, ended is not None)
            if ended is not None:
                self._end(str(ended), choice.get("stop_reason"))
        return tokens

    def _same(self, same: bool) -> None:
        if not same:
            raise UnusableEngine("it read other tokens than were sent")

    def _end(self, reason: str, stop: Any) -> None:
        if reason in ("abort", "error"):
            raise EngineBroke(f"it gave the answer up ({reason}); see its log")
        self.reason = _REASONS.get(reason, "limit")
        if isinstance(stop, str):
            self.detail = "at a stop string of the server's"
        elif reason not in _REASONS:
            self.detail = f"it stopped for {reason!r}"

    def _tokens(self, choice: dict[str, Any], ends: bool) -> list[Token]:
        values = choice.get("logprobs") or {}
        named = [_id(name) for name in values.get("tokens") or ()]
        ids = choice.get("token_ids")
        if ids is None:
            ids = named
        if not ids and (not choice.get("text") or choice.get("token_ids") is not None):
            return []
        if not ids or None in named:
            raise UnusableEngine("it does not say token ids: use vLLM 0.6.4 or later")
        own, tops = values.get("token_logprobs") or (), values.get("top_logprobs") or ()
        if not own:
            raise UnusableEngine("it sends tokens without log-probabilities")
        if not len(ids) == len(named) == len(own) == len(tops) or list(ids) != named:
            raise EngineBroke("its probabilities do not belong to its tokens")
        data = whole_characters(str(choice.get("text") or ""), ends)
        tokens = []
        for k, id in enumerate(ids):
            logp = None if own[k] is None else log_probability(own[k])
            piece = data if k == len(ids) - 1 else b""
            top = self._top(tops[k] or {})
            tokens.append(
                greedy(int(id), piece, logp, top)
                if self.greedy
                else Token(int(id), piece, logp, top)
            )
        return tokens

    def _top(self, raw: dict[str, Any]) -> Top:
        """The N best: where the token itself is not among them, N+1 are sent."""
        if self._took is not None and len(raw) >= self._top_n:
            self._took(self._top_n)
            self._took = None
        listed = []
        for name, value in raw.items():
            id = _id(name)
            if id is None:
                raise UnusableEngine("it names candidates by text, which is ambiguous")
            listed.append((id, log_probability(value)))
        return best_first(listed)[: self._top_n]


def _id(name: str) -> int | None:
    """The id in `token_id:123`."""
    number = name.removeprefix(_NAMED)
    return int(number) if name.startswith(_NAMED) and number.isdecimal() else None


def _scored(target: int, entry: dict[str, Any] | None, n: int) -> Token:
    """`{"123": {"logprob", "rank", …}, …}`: the target by its id, and the rest by rank."""
    own = (entry or {}).get(str(target))
    if entry is None or own is None:
        raise EngineBroke(f"it scored another token than {target}")
    top = best_first(
        (int(id), log_probability(said["logprob"]))
        for id, said in entry.items()
        if said.get("rank") is None or int(said["rank"]) <= n
    )[:n]
    return Token(target, b"", log_probability(own["logprob"]), top)
