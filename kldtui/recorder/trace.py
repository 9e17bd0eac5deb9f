"""Logged conversations of a file: OpenAI messages with tools and tool calls.

Knows: the shapes in which conversations are logged.
Must not know: templates, tokens, engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kldtui.recorder.prompts import PASSED_ON, PromptFileError


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation. line: where it is in the file, from 1. passed: what the template gets
    besides the messages (`tools` …)."""

    line: int
    messages: tuple[dict[str, Any], ...]
    passed: dict[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> list[Any] | None:
        return self.passed.get("tools")


def read_trace(path: Path) -> list[Conversation]:
    """The conversations of a file, one a line (JSONL) or one in all (JSON), in order.

    Each is `{"messages": […], "tools": […]}`, or a list of messages, or a request with its
    response (`{"request": {…}, "response": {"choices": [{"message": …}]}}`, or both in one
    object). Raises PromptFileError, naming the line.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptFileError(f"{path}: is no UTF-8 text") from None
    found = [_conversation(path, line, value) for line, value in _values(path, text)]
    if not found:
        raise PromptFileError(f"{path}: has no conversations")
    return found


def _values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each JSON value with its line: the whole file as one, else a line each."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    words = f"{path}: line {number}: is no JSON ({error})"
                    raise PromptFileError(words) from None
        return
    if isinstance(whole, list) and whole and not _is_message(whole[0]):
        for value in whole:
            yield 1, value
    else:
        yield 1, whole


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _conversation(path: Path, line: int, value: Any) -> Conversation:
    where = f"{path}: line {line}"
    asked = value
    answer: Any = None
    if isinstance(value, dict):
        asked = value.get("request", value)
        answer = value.get("response", value)
    messages = asked if isinstance(asked, list) else None
    if isinstance(asked, dict):
        messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise PromptFileError(f"{where}: has no messages, each with its role")
    messages = [*messages, *_answered(answer)]
    passed: dict[str, Any] = {}
    if isinstance(asked, dict):
        passed = {name: asked[name] for name in PASSED_ON if asked.get(name) is not None}
    cleaned = tuple(_cleaned(where, message) for message in messages)
    if not any(message["role"] == "assistant" for message in cleaned):
        raise PromptFileError(f"{where}: nothing in it was written by a model (assistant)")
    return Conversation(line, cleaned, passed)


def _answered(answer: Any) -> list[Any]:
    """The message of a logged response, if there is one."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return [message] if _is_message(message) else []


def _cleaned(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as a template takes it: arguments as text, reasoning under its usual name."""
    out = dict(message)
    if "reasoning" in out and "reasoning_content" not in out:
        out["reasoning_content"] = out.pop("reasoning")
    for name in ("reasoning_content", "tool_calls"):
        if not out.get(name):
            out.pop(name, None)
    calls = out.get("tool_calls")
    if calls is None:
        return out
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise PromptFileError(f"{where}: its tool_calls are no list of calls")
    out["tool_calls"] = [_call(call) for call in calls]
    return out


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
