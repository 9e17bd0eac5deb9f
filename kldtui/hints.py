"""Tool calls in raw text: where one closes, and whether it parses.

Knows: JSON calls (`{"name": …, "arguments": …}`), bare or between the tags that chat templates use.
Must not know: tokens, branches, labels. What it says is a guess: a hint, never a label.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["does_not_parse", "no_arguments", "arguments_do_not_parse"]

_TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<function_call>", "</function_call>"),
    ("<tool_calls>", "</tool_calls>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_BARE = re.compile(
    r"""(?:\[\s*)?\{\s*"(?:name|function|tool|tool_name|type|id|arguments|parameters)"\s*:"""
)
_LATER = re.compile(r"\n\s*" + _BARE.pattern)
"""An open call before another one on a line of its own was never going to close."""
_NAMES = ("name", "tool", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_NAMED = re.compile(r'"(?:name|tool|tool_name|function)"\s*:')
_ARGUED = re.compile(r'"(?:arguments|parameters)"\s*:')
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-")
_NUMBER = re.compile(r"-?\d*(?:\.\d*)?(?:[eE][+-]?\d*)?")


OPENERS = frozenset({b"[", b"{"} | {opening.encode()[:1] for opening, _ in _TAGS})
"""With one of these bytes every call begins."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a text; character offsets. end: just behind it; None while it is open.

    body: what should parse, without the tags.
    """

    start: int
    end: int | None
    body: str
    tagged: bool


@dataclass(frozen=True, slots=True)
class Hint:
    """The program's guess. words: one line for people."""

    kind: Kind
    words: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "words": self.words}


def find_calls(text: str) -> list[Call]:
    """The tool calls of a text in order, the last one perhaps still open."""
    calls: list[Call] = []
    at = 0
    while (call := _next_call(text, at)) is not None:
        calls.append(call)
        if call.end is None:
            break
        at = call.end
    return calls


def closes_at(text: str, after: int) -> int | None:
    """Where the first call that closes behind offset `after` ends; None if none does."""
    for call in find_calls(text):
        if call.end is not None and call.end > after:
            return call.end
    return None


def hint(before: str, text: str, *, complete: bool = True) -> Hint | None:
    """A guess at what is wrong with the first faulty tool call that reaches into `text`.

    before: what came before (prefix and start token), for a call that opened there.
    complete: whether `text` ended by itself; a call that is open where it was cut is only said
    not to parse so far.
    """
    whole = before + text
    for call in find_calls(whole):
        if call.end is not None and call.end <= len(before):
            continue
        found = _fault(call, complete)
        if found is not None:
            return found
    return None


def _next_call(text: str, at: int) -> Call | None:
    tagged = _tagged(text, at)
    while (bare := _BARE.search(text, at)) is not None:
        if tagged is not None and tagged.start < bare.start():
            break
        end = _balanced(text, bare.start())
        if end is None and (later := _LATER.search(text, bare.end())) is not None:
            at = later.start()
            continue
        body = text[bare.start() : end]
        if _NAMED.search(body) and (end is None or _ARGUED.search(body)):
            return Call(bare.start(), end, body, False)
        at = bare.end() if end is None else end
    return tagged


def _tagged(text: str, at: int) -> Call | None:
    """The first call between tags; of several openings before a closing the last one counts, the
    others being talk about the tag."""
    found: Call | None = None
    for opening, closing in _TAGS:
        start = text.find(opening, at)
        if start < 0 or (found is not None and found.start < start):
            continue
        end = text.find(closing, start)
        start = text.rfind(opening, start, end if end >= 0 else None)
        inner = text[start + len(opening) : end if end >= 0 else None]
        found = Call(start, end + len(closing) if end >= 0 else None, inner.strip(), True)
    return found


def _balanced(text: str, start: int) -> int | None:
    """Where the JSON value that opens at `start` closes, brackets in strings apart."""
    depth, in_string, escaped = 0, False, False
    for at in range(start, len(text)):
        c = text[at]
        if in_string:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == '"':
                in_string = False
        elif c == '"':
            in_string = True
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
            if depth <= 0:
                return at + 1
    return None


def _fault(call: Call, complete: bool) -> Hint | None:
    body = call.body
    if not body.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(body)
    except RecursionError:
        return Hint("does_not_parse", "does not parse: nested too deep")
    except json.JSONDecodeError as error:
        if call.end is None and _only_cut(body, error):
            if complete:
                return Hint("does_not_parse", "does not parse: the call is never closed")
            return Hint(
                "does_not_parse", "does not parse so far: the call is open where it was cut"
            )
        where = body[max(0, error.pos - 12) : error.pos + 12]
        return Hint("does_not_parse", f"does not parse: {error.msg} near {where!r}")
    for one in value if isinstance(value, list) else [value]:
        found = _arguments_fault(one)
        if found is not None:
            return found
    return None


def _only_cut(body: str, error: json.JSONDecodeError) -> bool:
    """Whether the text is the beginning of something that parses, as far as can be told."""
    if error.msg.startswith("Unterminated string"):
        return True
    rest = body[error.pos :].strip()
    if error.msg.startswith(("Invalid \\escape", "Invalid \\uXXXX")):
        return len(rest) < 6
    return (
        not rest
        or any(word.startswith(rest) for word in _LITERALS)
        or _NUMBER.fullmatch(rest) is not None
    )


def _arguments_fault(call: Any) -> Hint | None:
    """Arguments must be an object, or a string that holds one (as in OpenAI's format)."""
    if not isinstance(call, dict):
        return None
    inner = call.get("function")
    if isinstance(inner, dict):
        call = inner
    if not any(isinstance(call.get(name), str) for name in _NAMES):
        return None
    given = [call[name] for name in _ARGUMENTS if name in call]
    if not given:
        return Hint("no_arguments", "the call has no arguments")
    arguments, what = given[0], "no object"
    if isinstance(arguments, str):
        try:
            arguments, what = json.loads(arguments), "a string that is no object"
        except (json.JSONDecodeError, RecursionError):
            return Hint(
                "arguments_do_not_parse",
                f"does not parse: its arguments are a string that is no JSON: {arguments[:24]!r}",
            )
    if not isinstance(arguments, dict):
        return Hint("arguments_do_not_parse", f"its arguments are {what}")
    return None
