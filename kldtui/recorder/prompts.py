"""The prompts of a file: lines of text, or JSON lines of texts, ids, or messages.

Knows: the spellings of a prompt.
Must not know: engines, templates, or what becomes of a prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kldtui.errors import KldtuiError

PASSED_ON = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
"""What a conversation may have besides its messages, given to the template as it is."""


class PromptFileError(KldtuiError):
    """A file of prompts or conversations cannot be read; the text names the line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, or ids, or a conversation; the others are None. line: from 1."""

    line: int
    text: str | None = None
    ids: tuple[int, ...] | None = None
    conversation: dict[str, Any] | None = field(default=None)

    @property
    def tools(self) -> list[Any] | None:
        """The tool schemas of a conversation."""
        return None if self.conversation is None else self.conversation.get("tools")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order; blank lines are passed over.

    JSON lines where the first line is a JSON object or string, else each line is a text. Raises
    PromptFileError.
    """
    lines = [(k + 1, line) for k, line in enumerate(_lines(path)) if line.strip()]
    if not lines:
        raise PromptFileError(f"{path}: has no prompts")
    as_json = lines[0][1].lstrip()[:1] in ("{", '"')
    return [_of_json(path, k, line) if as_json else Prompt(k, text=line) for k, line in lines]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise PromptFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptFileError(f"{path}: is no UTF-8 text") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def _of_json(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}: line {number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where}: is no JSON ({error})") from None
    if isinstance(data, str):
        data = {"prompt": data}
    if not isinstance(data, dict):
        raise PromptFileError(f"{where}: is neither an object nor a text")
    ids = data.get("tokens")
    prompt = data.get("prompt")
    if ids is None and isinstance(prompt, list):
        ids = prompt
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise PromptFileError(f"{where}: its tokens are no list of token ids")
        return Prompt(number, ids=tuple(ids))
    if isinstance(prompt, str) and prompt:
        return Prompt(number, text=prompt)
    messages = data.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        passed = {name: data[name] for name in PASSED_ON if data.get(name) is not None}
        return Prompt(number, conversation={"messages": messages, **passed})
    raise PromptFileError(
        f"{where}: has no prompt: give `prompt` (a text), `tokens` (ids) or `messages`"
    )
