"""llama.cpp's llama-server: greedy continuations by ids, every id exact.

Knows: `/completion`, `/tokenize`, `/detokenize`, and how a stream hides tokens.
Must not know: recordings, branches, the screen; the faults of HTTP (`http`), older shapes of
answers (`llama_shapes`).

A stream has no event for a token that ends in mid-character: the event that completes the
character carries the last id and the merged bytes. Where that happens, the rest of the answer is
held back, the same request is made again unstreamed, whose `tokens` has every id, and the top
lists that were lost are asked for one by one. `arriving` has the text meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Reason, Token, Top
from kldtui.engines.http import ANSWER_SECONDS, Address, Http
from kldtui.engines.llama_probe import probe
from kldtui.engines.llama_score import FORCED, LlamaScorer
from kldtui.engines.llama_shapes import Candidate, Entry, Part, align, read_part
from kldtui.engines.scoring import Scored, Seen
from kldtui.errors import EngineBroke, EngineRefused, UnusableEngine

_GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_k": 1,
    "samplers": ["top_k", "temperature"],
    "return_tokens": True,
    "post_sampling_probs": False,
}
_CAPABILITIES = Capabilities(
    takes_ids=True,
    returns_ids=True,
    top_n_limit=None,
    streams_probabilities=True,
    cache_switch=True,
    notes=(
        "a stream hides tokens that end in mid-character: from there on the answer is asked for "
        "again, and comes at its end",
    ),
)
_ONE_BY_ONE = 64
_WHOLE_VOCABULARY = 1 << 20


class LlamaServer:
    """An engine over one llama-server. One answer at a time: others wait for their turn, since
    requests that share a batch change each other's last digits.

    scorer: how given texts are scored, and whether what the server held was kept.
    """

    one_pass = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        key_hint: str = "KLDTUI_API_KEY",
        build: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Raises EngineError for what is no URL. `build` is named where the server does not know
        its own; `transport` replaces the network in tests."""
        self._build = build
        address = Address.parse(url)
        self._http = Http(
            address,
            api_key=api_key,
            key_hint=key_hint,
            transport=transport,
            answer_seconds=answer_seconds,
        )
        self._turn = asyncio.Lock()
        self._info: EngineInfo | None = None
        self._text_id: int | None = None
        self._sent: dict[int, bytes] = {}
        self._special: dict[int, bytes] = {}
        self._ids_of_text: dict[bytes, int | None] = {}
        self._arriving = bytearray()
        self.scorer = LlamaScorer(self)

    @property
    def url(self) -> str:
        return self._http.address.public

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def settings(self) -> dict[str, Any]:
        """What a judged branch is asked with, ids, length and `n_probs` apart."""
        return {**_GREEDY, "samplers": [*_GREEDY["samplers"]], "cache_prompt": False}

    @property
    def arriving(self) -> bytes:
        return bytes(self._arriving)

    async def connect(self) -> EngineInfo:
        """Who is there. Raises EngineUnreachable, EngineLoading, EngineUnauthorized,
        EngineRefused, or UnusableEngine for another kind of server."""
        found = await probe(self._http, self._build)
        self._info, self._text_id = found.info, found.text_id
        return found.info

    async def close(self) -> None:
        await self._http.close()

    # ── one answer ───────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """Continue `prefix` greedily by up to `n` tokens, each with its `top_n` best (nats).

        The last item is a Finish. Raises an EngineError after the tokens that arrived: for a
        server that dies in mid-answer, what it streamed after a token that ended in
        mid-character is lost, since its ids cannot be known.
        """
        body = self._body(prefix, self._fitting(len(prefix), n), top_n, cache)
        async with contextlib.aclosing(self._whole_answer(body, n)) as items:
            async for item in items:
                yield item

    async def sample(
        self, prefix: Sequence[int], n: int, top_n: int, *, temperature: float, seed: int
    ) -> AsyncGenerator[Token | Finish, None]:
        """As `generate`, but drawn at `temperature` from the whole vocabulary, and from nothing
        else; log p is still the model's own, at temperature 1."""
        body = self._body(prefix, self._fitting(len(prefix), n), top_n, False)
        body |= {"temperature": temperature, "seed": seed, "samplers": ["temperature"]}
        del body["top_k"]
        async with contextlib.aclosing(self._whole_answer(body, n)) as items:
            async for item in items:
                yield item

    async def _whole_answer(
        self, body: dict[str, Any], n: int
    ) -> AsyncGenerator[Token | Finish, None]:
        """The answer to `body`, which asks for `n` tokens or for as many as fit."""
        length = body["n_predict"]
        async with self._turn:
            try:
                async with contextlib.aclosing(self._answer(body)) as items:
                    async for item in items:
                        if isinstance(item, Finish) and item.reason == "limit" and length < n:
                            yield Finish(
                                "context",
                                item.n_prompt,
                                item.seconds,
                                item.tokens_per_second,
                                f"the server's context of {self._n_ctx} tokens is full",
                            )
                        else:
                            yield item
            finally:
                self._arriving.clear()

    @property
    def _n_ctx(self) -> int | None:
        return self._info.n_ctx if self._info else None

    def _fitting(self, n_prefix: int, n: int) -> int:
        """`n`, or less where the context is full before; 1 where nothing fits, so that the
        server says so in its own words (some builds shift the context instead, in silence)."""
        return n if not self._n_ctx else max(1, min(n, self._n_ctx - n_prefix))

    def _body(self, prefix: Sequence[int], n: int, top_n: int, cache: bool) -> dict[str, Any]:
        return {
            "prompt": [int(token) for token in prefix],
            "n_predict": n,
            **_GREEDY,
            "n_probs": top_n,
            "cache_prompt": cache,
        }

    async def _answer(self, body: dict[str, Any]) -> AsyncGenerator[Token | Finish, None]:
        started = time.monotonic()
        given: list[int] = []
        held = False
        last: Part | None = None
        events = self._http.stream("/completion", {**body, "stream": True})
        async with contextlib.aclosing(events):
            async for event in events:
                last = self._part(event, body)
                held = held or self._hides(last, len(given))
                if held:
                    self._arriving += b"".join(e.data for e in last.entries) or (
                        last.content.encode()
                    )
                    continue
                for token in await self._tokens(last):
                    given.append(token.id)
                    yield token
        if last is None or last.stop is None:
            lost = "; what came after a cut character is lost" if held else ""
            raise self._http.error(EngineBroke, f"it ended in mid-answer{lost}; is it alive?")
        seconds = time.monotonic() - started
        if held:
            async with contextlib.aclosing(self._again(body, given)) as rest:
                async for token in rest:
                    yield token
        yield _finish(last, seconds)

    def _part(self, event: dict[str, Any], body: dict[str, Any]) -> Part:
        with self._named():
            part = read_part(event)
        sent = len(body["prompt"])
        if part.evaluated is not None and part.evaluated != sent:
            raise self._http.error(
                UnusableEngine, f"it read {part.evaluated} tokens where {sent} were sent"
            )
        self._learn(part.entries)
        return part

    def _hides(self, part: Part, given: int) -> bool:
        """Whether this event shows that tokens before it, or its end, came without one."""
        if part.predicted is not None:
            new = len(part.entries) if part.tokens or part.entries else 0
            return part.predicted != given + new
        for entry in part.entries:
            own = None if entry.id is None else self._sent.get(entry.id)
            if own is not None and own != entry.data:
                return True
        return False

    async def _tokens(self, part: Part) -> list[Token]:
        """The tokens of an event that hides none."""
        if not part.entries:
            if part.tokens:
                raise self._http.error(
                    UnusableEngine, "it sends tokens without probabilities; use a newer build"
                )
            return []
        ids: Sequence[int | None] = part.tokens or [entry.id for entry in part.entries]
        if len(ids) != len(part.entries):
            raise self._http.error(EngineBroke, "its probabilities do not belong to its tokens")
        return [await self._token(i, e) for i, e in zip(ids, part.entries, strict=True)]

    async def _token(self, id: int | None, entry: Entry) -> Token:
        if id is None:
            raise self._http.error(
                UnusableEngine,
                "this llama-server is too old to say token ids; use a build from 2025 or later",
            )
        if entry.id is not None and entry.id != id:
            raise self._http.error(EngineBroke, "its probabilities do not belong to its tokens")
        top = await self._top(entry.top)
        logp = entry.logp
        if logp is None:
            logp = next((value for other, value in top if other == id), None)
        data = self._sent.get(id, entry.data) or await self._special_piece(id)
        return Token(id, data, logp, top)

    async def _top(self, candidates: Sequence[Candidate]) -> Top:
        """Keyed by id; old shapes know text only, of which the server is asked the id."""
        top: list[tuple[int, float]] = []
        for candidate in candidates:
            id = candidate.id
            if id is None:
                id = await self._id_of_text(candidate.data)
            if id is not None:
                top.append((id, candidate.logp))
        return tuple(top)

    async def _id_of_text(self, text: bytes) -> int | None:
        """The one token that spells `text`; None where it takes several, or an id is unclear."""
        if text not in self._ids_of_text:
            body = {"content": text.decode("utf-8", "replace"), "add_special": False}
            ids = (await self._http.post("/tokenize", body)).get("tokens") or []
            self._ids_of_text[text] = int(ids[0]) if len(ids) == 1 else None
        return self._ids_of_text[text]

    # ── what a stream hides ──────────────────────────────────────────────────────────────────

    async def _again(
        self, body: dict[str, Any], given: Sequence[int]
    ) -> AsyncGenerator[Token, None]:
        """The tokens after `given`, from the same request unstreamed."""
        # Asked now, since afterwards it would push out what the server holds of the answer.
        await self._learn_all(range(self._info.n_vocab or 0) if self._info else ())
        part = self._part(await self._http.post("/completion", body, patient=True), body)
        ids = part.tokens
        if list(ids[: len(given)]) != list(given):
            raise self._http.error(
                UnusableEngine,
                "it answers the same request differently, so that tokens which end in "
                "mid-character cannot be told; start it with -np 1",
            )
        await self._learn_all(ids)
        with self._named():
            entries = align(ids, part.entries, lambda id: self._sent.get(id, b""))
        # From the last to the first: then each is one token on top of what the server still
        # holds, computed as it was, and not a new batch with other last digits.
        lost: dict[int, Top] = {}
        for at in reversed(range(len(given), len(ids))):
            if entries[at] is None:
                before = [*body["prompt"], *ids[:at]]
                lost[at] = await self._next_top(before, body["n_probs"], True)
        for at in range(len(given), len(ids)):
            entry = entries[at]
            if entry is not None:
                yield await self._token(ids[at], entry)
                continue
            top = lost[at]
            logp = next((value for id, value in top if id == ids[at]), None)
            data = self._sent.get(ids[at]) or await self._special_piece(ids[at])
            yield Token(ids[at], data, logp, top)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """The `top_n` best continuations of `prefix`, best first, ties by lowest id; nats."""
        async with self._turn:
            return await self._next_top(prefix, top_n, cache)

    async def _next_top(self, prefix: Sequence[int], top_n: int, cache: bool) -> Top:
        """Forces a token of whole characters, without which a best token that ends in
        mid-character would have no entry; the list is of the logits before that."""
        body = self._body(prefix, 1, top_n, cache)
        if self._text_id is not None:
            body["logit_bias"] = [[self._text_id, FORCED]]
        part = self._part(await self._http.post("/completion", body, patient=True), body)
        if not part.entries:
            raise self._http.error(UnusableEngine, "it gives no probabilities (n_probs)")
        return (await self._top(part.entries[0].top))[:top_n]

    async def score_also(
        self,
        prefix: Sequence[int],
        targets: Sequence[int],
        also: Sequence[int | None],
        top_n: int,
        seen: Seen | None = None,
    ) -> list[Scored]:
        """What it says of each of `targets` after `prefix`, and of one other id at each; nats.

        Raises EngineError.
        """
        async with self._turn:
            return await self.scorer.score(prefix, targets, also, top_n, seen)

    # ── prompts ──────────────────────────────────────────────────────────────────────────────

    async def render(self, conversation: Mapping[str, Any]) -> str:
        """A conversation (`messages`, `tools` …) as the server's chat template writes it, ready
        for an answer unless `add_generation_prompt` is false. Raises EngineError."""
        answer = await self._http.post("/apply-template", dict(conversation))
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise self._http.error(EngineBroke, "it rendered no prompt (/apply-template)")
        return text

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, as those of a prompt in words: special tokens in it are read as
        such, and `special` adds BOS where the model has it added. Raises EngineError."""
        body = {"content": text, "add_special": special, "parse_special": True}
        answer = await self._http.post("/tokenize", body, patient=True)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or not all(isinstance(id, int) for id in ids):
            raise self._http.error(EngineBroke, "it gave no token ids (/tokenize)")
        return ids

    async def end_ids(self) -> frozenset[int] | None:
        """The ids that end an answer; None where it does not say. Raises EngineError."""
        async with self._turn:
            return await self.scorer.end_ids()

    # ── bytes ────────────────────────────────────────────────────────────────────────────────

    def _learn(self, entries: Sequence[Entry]) -> None:
        """Keep the bytes of every token of the top lists: there, each has its own."""
        for entry in entries:
            for candidate in entry.top:
                if candidate.id is not None:
                    self._sent[candidate.id] = candidate.data

    async def _learn_all(self, ids: Sequence[int]) -> None:
        """Bytes as sent of all these ids: a top list as long as the vocabulary has them all."""
        if self._text_id is None or all(id in self._sent for id in ids):
            return
        n = (self._info.n_vocab if self._info else None) or _WHOLE_VOCABULARY
        await self._next_top([self._text_id], n, False)

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The exact bytes of tokens, special ones included; ids without any are left out."""
        missing = [id for id in dict.fromkeys(ids) if not self._sent.get(id)]
        if len(missing) > _ONE_BY_ONE or not all([await self._spelled(id) for id in missing]):
            async with self._turn:
                await self._learn_all(missing)
            for id in missing:
                if not self._sent.get(id):
                    await self._spelled(id)
        found = {id: self._sent.get(id) or self._special.get(id, b"") for id in ids}
        return {id: data for id, data in found.items() if data}

    async def _spelled(self, id: int) -> bool:
        """Learn one token's text; False where it may be part of a character."""
        if id not in self._special:
            try:
                answer = await self._http.post("/detokenize", {"tokens": [id]})
            except EngineRefused:
                self._special[id] = b""
                return True
            self._special[id] = str(answer.get("content", "")).encode()
        return "�".encode() not in self._special[id]

    async def _special_piece(self, id: int) -> bytes:
        """The text of a token that has none in answers, such as `<|im_end|>`."""
        await self._spelled(id)
        return self._special[id]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the server's name before what was found wrong with its answer."""
        try:
            yield
        except (UnusableEngine, EngineBroke) as error:
            raise self._http.error(type(error), str(error)) from None


_REASONS: dict[str | None, Reason] = {"eos": "eog", "limit": "limit", "word": "eog"}


def _finish(part: Part, seconds: float) -> Finish:
    reason = _REASONS.get(part.stop, "limit")
    detail = "at a stop string of the server's" if part.stop == "word" else ""
    if reason == "limit" and part.truncated:
        reason, detail = "context", "the server's context is full"
    return Finish(reason, part.evaluated, seconds, part.tokens_per_second, detail)
