"""llama-server, made to say given tokens: what it says of each, token by token.

Knows: the grammar route and the stepwise one, which tokens a grammar must not hold, and how to
learn log p of a token outside the top list.
Must not know: recordings, files, the screen; how an answer is read (`llama_shapes`).

Grammar: one request for a stretch of tokens, with a grammar of their ids (`<[123]>`). An id
outside the vocabulary, an end-of-generation token or a token that is not whole characters in it
ends the server's process, so that none is ever sent: those go stepwise. Stepwise: a request a
token, which is forced by its bias; what is listed is of the logits before that.

Both compute each token after the first alone, on top of what the server still holds of the
tokens before, so that they give the same numbers (measured: to the last bit). So does asking once
more for an earlier place: that goes from the last place to the first, since the server then drops
only what it does not need, and computes one token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kldtui.engines.base import Top
from kldtui.engines.llama_shapes import Entry, read_part
from kldtui.engines.scoring import Scored, Seen
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineRefused,
    UnusableEngine,
)

if TYPE_CHECKING:
    from kldtui.engines.llama_server import LlamaServer

FORCED = 1e6
"""The bias that makes a token the only one."""
_LONGEST = 512
"""Tokens of one grammar."""
_SHORTEST = 2
_WIDER = 1024


class LlamaScorer:
    """Scores texts with one llama-server, whose turn the caller holds.

    grammar: whether to try the grammar route at all. recomputed: tokens that the server computed
    again because it had not kept them; there, last digits differ from run to run.
    """

    def __init__(self, server: LlamaServer, *, grammar: bool = True) -> None:
        self._server = server
        self.grammar = grammar
        self.recomputed = 0
        self._unsafe: dict[int, bool] = {}
        self._ends: frozenset[int] | None = None
        self._asked_ends = False

    async def score(
        self,
        prefix: Sequence[int],
        targets: Sequence[int],
        also: Sequence[int | None],
        top_n: int,
        seen: Seen | None = None,
    ) -> list[Scored]:
        """As `AlsoScorer.score_also`. Raises EngineError."""
        self._check(prefix, targets, also)
        await self._learn(targets)
        try:
            found = await self._all(prefix, targets, top_n, seen)
        except _NoGrammarError:
            self.grammar = False
            found = await self._all(prefix, targets, top_n, seen)
        out: list[Scored | None] = [None] * len(targets)
        for k in reversed(range(len(targets))):
            logp, top = found[k]
            ids = [*prefix, *targets[:k]]
            if logp is None:
                logp = await self._apart(ids, targets[k], top, top_n)
            other = also[k]
            apart = None
            if other is not None:
                apart = logp if other == targets[k] else await self._apart(ids, other, top, top_n)
            out[k] = Scored(targets[k], logp, top, apart)
        return [one for one in out if one is not None]

    # ── beforehand ───────────────────────────────────────────────────────────────────────────

    def _check(
        self, prefix: Sequence[int], targets: Sequence[int], also: Sequence[int | None]
    ) -> None:
        if not prefix or not targets or len(also) != len(targets):
            raise EngineError("scoring takes a prefix of at least one token, and one to score")
        info = self._server.info
        if info is None:
            raise self._error(EngineError, "not connected yet")
        wanted = len(prefix) + len(targets)
        if info.n_ctx is not None and wanted > info.n_ctx:
            raise self._error(
                ContextExceeded,
                f"its context has {info.n_ctx} tokens where {wanted} are needed; start it with "
                f"-c {wanted} or more",
            )
        most = max(*prefix, *targets, *(id for id in also if id is not None), 0)
        if info.n_vocab is not None and most >= info.n_vocab:
            raise self._error(
                UnusableEngine, f"its vocabulary has {info.n_vocab} tokens; there is no id {most}"
            )

    async def _learn(self, targets: Sequence[int]) -> None:
        """Find out which of these ids no grammar may hold."""
        if not self.grammar or all(id in self._unsafe for id in targets):
            return
        if not self._asked_ends:
            self._ends = await self.end_ids()
            self._asked_ends = True
        if self._ends is None or self._server.info is None or self._server.info.n_vocab is None:
            self.grammar = False
            return
        await self._server._learn_all(targets)
        for id in targets:
            self._unsafe[id] = id in self._ends or not _whole(self._server._sent.get(id, b""))

    async def end_ids(self) -> frozenset[int] | None:
        """The ids that end an answer: those that the server takes out if told to ignore them.

        None where it does not list what it takes out.
        """
        if self._server._text_id is None:
            return None
        body = self._server._body([self._server._text_id], 1, 1, False)
        answer = await self._server._http.post(
            "/completion", {**body, "ignore_eos": True}, patient=True
        )
        settings = answer.get("generation_settings") if isinstance(answer, dict) else None
        listed = settings.get("logit_bias") if isinstance(settings, dict) else None
        if not isinstance(listed, list) or not listed:
            return None
        ids = [one.get("token") for one in listed if isinstance(one, dict)]
        return frozenset(id for id in ids if isinstance(id, int)) or None

    # ── the targets ──────────────────────────────────────────────────────────────────────────

    async def _all(
        self, prefix: Sequence[int], targets: Sequence[int], top_n: int, seen: Seen | None
    ) -> list[tuple[float | None, Top]]:
        """(log p of the target, the top list) of each; None where the target has no entry."""
        found: list[tuple[float | None, Top]] = []
        while len(found) < len(targets):
            at = len(found)
            ids = [*prefix, *targets[:at]]
            stop = self._stretch(targets, at)
            if stop - at >= _SHORTEST:
                found += await self._by_grammar(ids, targets[at:stop], top_n, at, seen)
            else:
                found.append(await self._step(ids, targets[at], top_n, at > 0))
            if seen is not None:
                seen(len(found))
        return found

    def _stretch(self, targets: Sequence[int], at: int) -> int:
        """Where the tokens end, from `at` on, that one grammar may hold."""
        stop = at
        while (
            self.grammar
            and stop < min(len(targets), at + _LONGEST)
            and not self._unsafe.get(targets[stop], True)
        ):
            stop += 1
        return stop

    async def _by_grammar(
        self, ids: list[int], targets: Sequence[int], top_n: int, at: int, seen: Seen | None
    ) -> list[tuple[float | None, Top]]:
        """Raises _NoGrammarError where the server cannot, or does not keep to it."""
        body = self._server._body(ids, len(targets), top_n, at > 0)
        body["grammar"] = "root ::= " + " ".join(f"<[{id}]>" for id in targets)
        entries: list[Entry] = []
        try:
            events = self._server._http.stream("/completion", {**body, "stream": True})
            async with contextlib.aclosing(events):
                async for event in events:
                    entries += self._read(event, len(ids), alone=at > 0)
                    if seen is not None:
                        seen(at + len(entries))
        except EngineRefused as error:
            if "grammar" in str(error):
                raise _NoGrammarError from None
            raise
        if [entry.id for entry in entries] != list(targets):
            raise _NoGrammarError
        return [(entry.logp, await self._server._top(entry.top[:top_n])) for entry in entries]

    async def _step(
        self, ids: list[int], target: int, top_n: int, cache: bool
    ) -> tuple[float | None, Top]:
        """One token. A target that ends in mid-character has no entry: then another is forced,
        whose list is the same, and the target's own log p is None unless it is in it."""
        entry = await self._force(ids, target, top_n, cache)
        if entry is not None:
            return entry.logp, await self._server._top(entry.top[:top_n])
        if self._server._text_id is None:
            raise self._error(UnusableEngine, f"it says nothing of token {target}")
        entry = await self._force(ids, self._server._text_id, top_n, True)
        if entry is None:
            raise self._error(EngineBroke, "it gives no probabilities (n_probs)")
        top = await self._server._top(entry.top[:top_n])
        return dict(top).get(target), top

    async def _force(
        self, ids: Sequence[int], target: int, top_n: int, cache: bool
    ) -> Entry | None:
        """What it says where it is made to say `target`; None where that has no entry."""
        body = self._server._body(ids, 1, top_n, cache)
        body["logit_bias"] = [[int(target), FORCED]]
        answer = await self._server._http.post("/completion", body, patient=True)
        entries = self._read(answer, len(ids), alone=cache)
        if not entries:
            return None
        if entries[0].id != target:
            words = f"it was made to say token {target} and said {entries[0].id}"
            raise self._error(UnusableEngine, f"{words}; start it without a grammar or sampling")
        return entries[0]

    async def _apart(self, ids: Sequence[int], id: int, top: Top, top_n: int) -> float | None:
        """log p of any id after `ids`, whose top list is known.

        It is the log p of a token that is made to be said. One that ends in mid-character has no
        entry: it is looked up in longer lists, whose values move in the last digits with their
        length (the server adds up what it lists first), which the best token's tell.
        """
        listed = dict(top)
        if id in listed:
            return listed[id]
        entry = await self._force(ids, id, top_n, True)
        if entry is not None:
            return entry.logp
        info, text_id = self._server.info, self._server._text_id
        if text_id is None or info is None or info.n_vocab is None or not top:
            return None
        for n in (_WIDER, info.n_vocab):
            wide = await self._force(ids, text_id, n, True)
            values = {one.id: one.logp for one in wide.top} if wide is not None else {}
            if id in values and top[0][0] in values:
                return min(0.0, values[id] + top[0][1] - values[top[0][0]])
        return None

    def _read(self, event: dict[str, Any], sent: int, *, alone: bool) -> tuple[Entry, ...]:
        """The entries of an answer. alone: only its last token should have been computed."""
        with self._server._named():
            part = read_part(event)
        if part.evaluated is not None and part.evaluated != sent:
            words = f"it read {part.evaluated} tokens where {sent} were sent"
            raise self._error(UnusableEngine, words)
        timings = event.get("timings")
        computed = timings.get("prompt_n") if isinstance(timings, dict) else None
        if alone and part.stop is not None and isinstance(computed, int) and computed > 1:
            self.recomputed += computed - 1
        return part.entries

    def _error(self, kind: type[EngineError], words: str) -> EngineError:
        return self._server._http.error(kind, words)


class _NoGrammarError(Exception):
    """The server takes no grammar of token ids, or does not keep to it."""


def _whole(data: bytes) -> bool:
    """Whether a token is text of whole characters; special tokens have none."""
    try:
        return bool(data.decode("utf-8"))
    except UnicodeDecodeError:
        return False
