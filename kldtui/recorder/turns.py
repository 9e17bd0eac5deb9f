"""Logged conversations as chunks of tokens: what each turn was given, and what the model wrote.

Knows: how spans are found: by rendering a conversation up to and after a message with the server's
own template, and comparing tokens; never by looking for words.
Must not know: any template, files, how a run is written.

For a turn, the prompt is the conversation before it, rendered for an answer. What the model wrote
is what comes on top of it where the message is rendered as a past one, with another message
behind, up to the token that ends a turn. A final assistant message is never rendered last, since
servers take that for an answer to be continued, and leave out its calls and its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kldtui.engines.prompting import Renderer, leaves_out_tools
from kldtui.errors import EngineRefused
from kldtui.recorder.stream import ToScore
from kldtui.recorder.trace import Conversation

_TAGS = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "tool",
    "function": "tool",
    "assistant": "assistant",
}
_STANDS_IN, _OTHERWISE = "Go on.", "Stop here."

Tag = tuple[str, int, int]
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model. message: its number. tags: of what was written, from 0."""

    message: int
    prompt: Ids
    written: Ids
    tags: tuple[Tag, ...]


@dataclass(slots=True)
class TurnChunk:
    """Turns of one conversation that lie in one history. tokens: the last turn's, to its end.

    turns: (start, stop) of what the model wrote. tags: (name, start, stop), in order.
    messages: numbers of the first and the last that it holds. line, tools: of the conversation.
    """

    line: int
    tools: list[Any] | None
    tokens: Ids
    turns: list[tuple[int, int]]
    tags: list[Tag]
    messages: tuple[int, int]


@dataclass
class Reader:
    """Renders conversations with one server. ends: the ids that end an answer.

    warnings: what could not be had of a conversation, a line each.
    """

    by: Renderer
    ends: frozenset[int]
    warnings: list[str] = field(default_factory=list)
    _known: dict[str, Ids] = field(default_factory=dict)

    async def chunks(self, conversation: Conversation) -> list[TurnChunk]:
        """The conversation's turns in as few chunks as its renderings allow.

        A turn goes on in a chunk where its prompt begins with all that is there; where a later
        rendering rewrites what was before (thinking that is dropped), it begins its own. Raises
        EngineError where the server fails.
        """
        out: list[TurnChunk] = []
        await self._look_for_tools(conversation)
        for k, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            self._known.clear()
            turn = await self._turn(conversation, k)
            if turn is None:
                continue
            last = out[-1] if out else None
            start = len(turn.prompt)
            if last is None or turn.prompt[: len(last.tokens)] != last.tokens:
                last = TurnChunk(conversation.line, conversation.tools, [], [], [], (0, k))
                out.append(last)
            seen = last.messages[1] + 1 if last.turns else 0
            held = len(last.tokens)
            last.tags += await self._context(conversation, seen, k, turn.prompt, held)
            last.tags += [(name, start + a, start + b) for name, a, b in turn.tags]
            last.tokens = [*turn.prompt, *turn.written]
            last.turns.append((start, len(last.tokens)))
            last.messages = (0, k)
        return out

    async def _look_for_tools(self, conversation: Conversation) -> None:
        asked = [m for m in conversation.messages if m["role"] == "user"][:1]
        body = {**conversation.passed, "messages": asked, "add_generation_prompt": True}
        try:
            if asked and await leaves_out_tools(self.by, body):
                words = "the template leaves out the tools: the model is never shown them"
                self.warnings.append(f"line {conversation.line}: {words}")
        except EngineRefused:
            return

    # ── what was written ─────────────────────────────────────────────────────────────────────

    async def _turn(self, conversation: Conversation, k: int) -> Turn | None:
        """The turn of message `k`; None, with a warning, where it cannot be told apart."""
        messages = conversation.messages
        where = f"line {conversation.line}, message {k}"
        if k == 0 or messages[k - 1]["role"] == "assistant":
            what = "nothing comes before it" if k == 0 else "it goes on from another of its own"
            self.warnings.append(f"{where} is not scored: {what}")
            return None
        before = await self._render(conversation, messages[:k], answer=True)
        if before is None:
            self.warnings.append(f"{where} is not scored: the template refuses what comes before")
            return None
        prompt = await self._ids(before)
        message = messages[k]
        first: tuple[int, Ids, dict[str, Any]] | None = None
        for follower in self._followers(conversation, k):
            placed = await self._placed(conversation, k, message, follower, before, prompt)
            if placed is None:
                continue
            if first is None:
                first = (*placed, follower)
            plain = {n: v for n, v in message.items() if n != "reasoning_content"}
            if plain == message:
                break
            bare = await self._placed(conversation, k, plain, follower, before, prompt)
            if bare is None or bare[1] != placed[1]:
                first = (*placed, follower)
                break
        if first is None:
            self.warnings.append(
                f"{where} is not scored: the template writes it in no place of its own"
            )
            return None
        begin, written, follower = first
        if begin < len(prompt) - 1:
            self.warnings.append(
                f"{where}: its prompt ends in {len(prompt) - begin} tokens that its rendering has "
                "not; if they open the model's thinking, the log has lost that"
            )
        tags = await self._parts(conversation, k, follower, before, prompt, written)
        return Turn(k, prompt, written, tags) if written else None

    def _followers(self, conversation: Conversation, k: int) -> Iterator[dict[str, Any]]:
        """Messages that may come behind message `k`: the one that does, and stand-ins.

        Templates drop thinking from what lies before the last user message, so that where there
        is some, a tool's answer is tried first.
        """
        messages = conversation.messages
        calls = messages[k].get("tool_calls") or [{}]
        tool = {
            "role": "tool",
            "tool_call_id": str(calls[0].get("id") or "0"),
            "name": str((calls[0].get("function") or {}).get("name") or "tool"),
            "content": _STANDS_IN,
        }
        own = messages[k + 1] if k + 1 < len(messages) else None
        if own is not None and own["role"] == "assistant":
            own = None
        user = {"role": "user", "content": _STANDS_IN}
        thinks = "reasoning_content" in messages[k]
        order = (tool, own, user) if thinks else (own, user, tool)
        return (one for one in order if one is not None)

    async def _placed(
        self,
        conversation: Conversation,
        k: int,
        message: dict[str, Any],
        follower: dict[str, Any],
        before: str,
        prompt: Ids,
    ) -> tuple[int, Ids] | None:
        """Where message `k` begins among the tokens of its rendering, and the tokens it has
        there up to the end of the turn; None where they cannot be told from what is around."""
        past = conversation.messages[:k]
        text = await self._render(conversation, [*past, message, follower])
        other = {**follower, "content": _OTHERWISE}
        again = await self._render(conversation, [*past, message, other])
        if text is None or again is None:
            return None
        ids = await self._ids(text)
        behind = _common(ids, await self._ids(again))
        begin = _common(ids, prompt)
        history = await self._render(conversation, past)
        if history is None or begin < len(await self._ids(history)) - 1:
            return None
        if begin < len(prompt) and text.startswith(before):
            # Its first token took in the prompt's last: as the model wrote it, it stood alone.
            rest = await self.by.encode(text[len(before) :], special=False)
            behind = begin + max(0, len(rest) - (len(ids) - behind))
        else:
            rest = ids[begin:]
        written = rest[: behind - begin]
        stop = next((i for i, id in enumerate(written) if id in self.ends), None)
        if stop is not None:
            return begin, written[: stop + 1]
        alone = await self._render(conversation, [*past, follower])
        tail = None
        if alone is not None and alone.startswith(history):
            tail = alone[len(history) :]
        if not tail or not text.endswith(tail) or not text.startswith(before):
            return None
        return begin, await self.by.encode(text[len(before) : -len(tail)], special=False)

    async def _parts(
        self,
        conversation: Conversation,
        k: int,
        follower: dict[str, Any],
        before: str,
        prompt: Ids,
        written: Ids,
    ) -> tuple[Tag, ...]:
        """Which of the written tokens are thinking, answer, and calls: by leaving out what comes
        behind them, and seeing from where on the tokens differ."""
        message = conversation.messages[k]
        where = f"line {conversation.line}, message {k}"
        thinking, calls = 0, len(written)
        if "reasoning_content" in message:
            found = await self._placed(
                conversation, k, _without(message, "reasoning_content"), follower, before, prompt
            )
            if found is not None and found[1] == written:
                self.warnings.append(f"{where}: the template leaves out what the model thought")
            else:
                bare = {**_without(message, "tool_calls"), "content": ""}
                found = await self._placed(conversation, k, bare, follower, before, prompt)
                thinking = 0 if found is None else _common(found[1], written)
        if "tool_calls" in message:
            bare = _without(message, "tool_calls")
            bare["content"] = bare.get("content") or ""
            found = await self._placed(conversation, k, bare, follower, before, prompt)
            if found is not None and found[1] == written:
                self.warnings.append(f"{where}: the template leaves out the model's calls")
            elif found is not None:
                calls = _common(found[1], written)
        calls = max(thinking, calls)
        spans = (
            ("thinking", 0, thinking),
            ("assistant", thinking, calls),
            ("call", calls, len(written)),
        )
        return tuple(span for span in spans if span[1] < span[2])

    # ── what it was given ────────────────────────────────────────────────────────────────────

    async def _context(
        self, conversation: Conversation, first: int, k: int, prompt: Ids, held: int
    ) -> list[Tag]:
        """Tags of the messages `first` to `k - 1` within a prompt, from token `held` on."""
        ends: list[tuple[int, int]] = []
        for j in range(first, k):
            if conversation.messages[j]["role"] == "assistant":
                continue
            text = await self._render(conversation, conversation.messages[: j + 1])
            if text is None:
                continue
            ids = await self._ids(text)
            end = _common(ids, prompt)
            if end < len(ids) - 1:  # what came before is written otherwise by now
                found = await self._end_within(conversation, j, k, prompt)
                if found is None:
                    continue
                end = found
            ends.append((j, end))
        tags: list[Tag] = []
        at, done = held, first
        for j, end in ends:
            for i in range(done, j + 1):
                name = _TAGS.get(conversation.messages[i]["role"], "user")
                stop = max(at, end)
                if i < j:
                    if name != "assistant":
                        continue
                    closing = (t + 1 for t in range(at, end) if prompt[t] in self.ends)
                    stop = next(closing, at)
                if stop > at:
                    tags.append((name, at, stop))
                    at = stop
            done = j + 1
        return tags

    async def _end_within(
        self, conversation: Conversation, j: int, k: int, prompt: Ids
    ) -> int | None:
        """Where message `j` ends in the prompt of turn `k`: by changing its content, and seeing
        from where on the tokens differ; with the token that ends it, if there is one."""
        stop = await self._differs(conversation, j, k, prompt, front=False)
        if stop is None:
            return None
        closing = next((t + 1 for t in range(stop, len(prompt)) if prompt[t] in self.ends), stop)
        if j + 1 < k:
            begin = await self._differs(conversation, j + 1, k, prompt, front=True)
            if begin is not None and begin < closing:
                return stop
        return closing

    async def _differs(
        self, conversation: Conversation, j: int, k: int, prompt: Ids, *, front: bool
    ) -> int | None:
        """From which token on the prompt of turn `k` differs, if message `j` says more."""
        content = conversation.messages[j].get("content")
        if not isinstance(content, str):
            return None
        more = _OTHERWISE + content if front else content + _OTHERWISE
        messages = list(conversation.messages[:k])
        messages[j] = {**messages[j], "content": more}
        text = await self._render(conversation, messages, answer=True)
        return None if text is None else _common(await self.by.encode(text), prompt)

    async def _ids(self, text: str) -> Ids:
        """The ids of a rendering."""
        if text not in self._known:
            self._known[text] = await self.by.encode(text)
        return self._known[text]

    async def _render(
        self,
        conversation: Conversation,
        messages: Sequence[dict[str, Any]],
        *,
        answer: bool = False,
    ) -> str | None:
        """The text of messages, `answer`: ready for one; None where the template refuses them."""
        body = {
            **conversation.passed,
            "messages": list(messages),
            "add_generation_prompt": answer,
        }
        try:
            return await self.by.render(body)
        except EngineRefused:
            return None


def _without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first items are the same."""
    both = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:both]) != np.asarray(b[:both]))
    return int(different[0]) if different.size else both


def to_score(chunks: Sequence[TurnChunk]) -> tuple[list[ToScore], list[list[Any]]]:
    """The chunks as a stream has them, what the model wrote being scored, and the distinct lists
    of tool schemas, in the order of their first use."""
    tools: list[list[Any]] = []
    out = []
    for chunk in chunks:
        fields: dict[str, Any] = {
            "turns": [list(turn) for turn in chunk.turns],
            "tags": [list(tag) for tag in chunk.tags],
            "source": {"line": chunk.line, "messages": list(chunk.messages)},
        }
        if chunk.tools:
            if chunk.tools not in tools:
                tools.append(chunk.tools)
            fields["tools"] = tools.index(chunk.tools)
        ts = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in chunk.turns])
        tokens = np.array(chunk.tokens, np.int32)
        out.append(ToScore(tokens, ts, None, chunk.turns[0][0], fields))
    return out, tools
