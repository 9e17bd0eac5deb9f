"""What servers have in common that take ids, give ids, and stream each token's probabilities.

Knows: the Engine protocol, how an answer is asked for, timed, cut by the context and finished.
Must not know: the requests and answers of any one server; recordings, branches, the screen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import httpx

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Reason, Token, Top
from kldtui.engines.decoded import Decoder
from kldtui.engines.http import ANSWER_SECONDS, Address, Http
from kldtui.errors import EngineBroke, EngineError, EngineRefused, UnusableEngine

_SLACK = 0.01
"""Nats by which a greedy choice may lie under the best candidate, by rounding."""


class Answer(Protocol):
    """Reads the events of one answer, or a whole unstreamed one, as they come.

    n_prompt: tokens of the prompt as the server counted them. reason: why it ended, None while
    it goes on. detail: what else is to be said of it. greedy: whether each token is to be the
    most likely one.
    """

    n_prompt: int | None
    reason: Reason | None
    detail: str
    greedy: bool

    def feed(self, event: dict[str, Any]) -> list[Token]:
        """The tokens that came with an event.

        Raises UnusableEngine where the numbers cannot be what they are called or the answer is
        not to what was asked, EngineBroke for fields of no known shape.
        """


class IdServer(ABC):
    """An engine over one server. One answer at a time: requests that share a batch change each
    other's last digits."""

    kind: ClassVar[str]
    path: ClassVar[str]
    context_option: ClassVar[str]

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        key_hint: str = "KLDTUI_API_KEY",
        transport: httpx.AsyncBaseTransport | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Raises EngineError for what is no URL. `transport` replaces the network in tests."""
        self._http = Http(
            Address.parse(url),
            api_key=api_key,
            key_hint=key_hint,
            transport=transport,
            answer_seconds=answer_seconds,
            context_option=self.context_option,
        )
        self._turn = asyncio.Lock()
        self._info: EngineInfo | None = None
        self._decoder = Decoder(lambda text: self._encode(text, special=False), self._decode)

    @property
    def url(self) -> str:
        return self._http.address.public

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]: ...

    @property
    def arriving(self) -> bytes:
        return b""

    async def connect(self) -> EngineInfo:
        """Who is there. Raises EngineUnreachable, EngineLoading, EngineUnauthorized,
        EngineRefused, or UnusableEngine for a model that cannot be branched from."""
        self._info = await self._who()
        return self._info

    async def close(self) -> None:
        await self._http.close()

    # ── what each server has of its own ──────────────────────────────────────────────────────

    @abstractmethod
    async def _who(self) -> EngineInfo:
        """Ask who is there."""

    @abstractmethod
    def _body(self, prefix: list[int], n: int, top_n: int, cache: bool) -> dict[str, Any]:
        """What asks for `n` tokens after `prefix`, unstreamed."""

    @abstractmethod
    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same, streamed."""

    @abstractmethod
    def _answer(self, prefix: Sequence[int], top_n: int, cache: bool) -> Answer: ...

    @abstractmethod
    async def _encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text, with what the tokenizer adds if `special`."""

    @abstractmethod
    async def _decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""

    def _learn(self, refusal: EngineRefused) -> bool:
        """Whether a refusal taught something that makes asking again worth while."""
        return False

    def _room(self, n_prefix: int) -> int | None:
        """How many tokens fit after a prefix, as far as is known; perhaps negative."""
        n_ctx = self._info.n_ctx if self._info else None
        return None if n_ctx is None else n_ctx - n_prefix

    # ── one answer ───────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """Continue `prefix` greedily by up to `n` tokens, each with its `top_n` best (nats).

        The last item is a Finish. Raises an EngineError after the tokens that arrived. Where a
        character is split, the token that completes it carries all of its bytes, and those
        before it none: the server says no more.
        """
        async with contextlib.aclosing(self._going_on(prefix, n, top_n, cache)) as items:
            async for item in items:
                yield item

    async def _going_on(
        self,
        prefix: Sequence[int],
        n: int,
        top_n: int,
        cache: bool,
        drawn: dict[str, Any] | None = None,
    ) -> AsyncGenerator[Token | Finish, None]:
        """As `generate`; with `drawn` in place of what asks for the most likely token."""
        ids = [int(token) for token in prefix]
        room = self._room(len(ids))
        length = n if room is None else max(1, min(n, room))
        started = time.monotonic()
        times: list[float] = []
        async with self._turn:
            while True:
                answer = self._answer(ids, top_n, cache)
                answer.greedy = drawn is None
                body = self._streamed(self._body(ids, length, top_n, cache) | (drawn or {}))
                try:
                    async with contextlib.aclosing(self._http.stream(self.path, body)) as events:
                        async for event in events:
                            with self._named():
                                tokens = answer.feed(event)
                            for token in tokens:
                                times.append(time.monotonic())
                                yield token
                    break
                except EngineRefused as error:
                    if times or not self._learn(error):
                        raise self._clear(error) from None
        if answer.reason is None:
            raise self._http.error(EngineBroke, "it ended in mid-answer; is it alive?")
        reason, detail = answer.reason, answer.detail
        if reason == "limit" and length < n:
            full = f"the server's context of {self._info.n_ctx if self._info else 0} tokens is full"
            reason, detail = "context", f"{full}; {detail}" if detail else full
        yield Finish(reason, answer.n_prompt, time.monotonic() - started, _speed(times), detail)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """The `top_n` best continuations of `prefix`, best first, ties by lowest id; nats.

        Fewer where the server gives fewer. Raises EngineError.
        """
        ids = [int(token) for token in prefix]
        async with self._turn:
            data = await self._ask(lambda: self._body(ids, 1, top_n, cache))
        with self._named():
            tokens = self._answer(ids, top_n, cache).feed(data)
        if not tokens:
            raise self._http.error(EngineBroke, "it generated nothing")
        return tokens[0].top

    async def _ask(self, body: Any) -> dict[str, Any]:
        """The answer to `body()`, which is made anew where a refusal taught something."""
        while True:
            try:
                data = await self._http.post(self.path, body(), patient=True)
            except EngineRefused as error:
                if not self._learn(error):
                    raise self._clear(error) from None
            else:
                if not isinstance(data, dict):
                    raise self._http.error(EngineBroke, "it sent an answer of no known shape")
                return data

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, special tokens in it read as such. Raises EngineError."""
        return await self._encode(text, special=special)

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The bytes of tokens; those whose bytes its text does not tell are left out.

        Raises EngineError.
        """
        return await self._decoder.pieces(ids)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────

    async def _bos(self) -> tuple[bool | None, int | None, list[str]]:
        """(add_bos, bos_id, warnings), learnt by tokenizing a text with and without."""
        try:
            bare = await self._encode("a", special=False)
            whole = await self._encode("a", special=True)
        except EngineRefused as error:
            return None, None, [f"it does not say whether it adds BOS ({error})"]
        added = len(whole) - len(bare)
        if added <= 0 or not bare:
            return False, None, []
        if whole[1 : 1 + len(bare)] != bare:
            return None, None, ["it does not say whether it adds BOS"]
        more = ["its tokenizer adds more than BOS"] if added > 1 else []
        return True, whole[0], more

    def _clear(self, error: EngineRefused) -> EngineRefused:
        """The same refusal, where it is for ids that the model does not have in known words."""
        words = str(error)
        if "vocab" not in words:
            return error
        return type(error)(f"{words}: invalid tokens for its model")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the server's name before what was found wrong with its answer."""
        try:
            yield
        except (UnusableEngine, EngineBroke) as error:
            raise self._http.error(type(error), str(error)) from None
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
            words = f"it sent an answer of no known shape ({error!r:.80})"
            raise self._http.error(EngineBroke, words) from None


def greedy(id: int, data: bytes, logp: float | None, top: Top) -> Token:
    """A token that was to be the most likely one.

    Raises UnusableEngine where it was not: something else than the model chose it.
    """
    if top and logp is not None and logp < top[0][1] - _SLACK:
        raise UnusableEngine(
            "it does not take its most likely token though it is asked to: start it without "
            "penalties, logit processors or sampling overrides"
        )
    return Token(id, data, logp, top)


def whole_characters(text: str, ends: bool) -> bytes:
    """The bytes of a piece of an answer; half a character at the answer's end has none."""
    return (text.rstrip("\N{REPLACEMENT CHARACTER}") if ends else text).encode()


def scored(targets: Sequence[int], prefix: Sequence[int]) -> None:
    """Raise EngineError where there is nothing that the first target could follow."""
    if not prefix or not targets:
        raise EngineError("scoring takes a prefix of at least one token, and one to score")


def _speed(times: Sequence[float]) -> float | None:
    """Tokens a second after the first, whose wait is the prompt's."""
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (len(times) - 1) / (times[-1] - times[0])
