"""JSON on standard output.

Knows: what standard output can take.
Must not know: what is printed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON; with `indent=None` on one line.

    Text is as it is where standard output is UTF-8 and no terminal, else in escapes: a terminal
    would obey controls, and no other encoding has all characters. Raises ValueError for NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    if sys.stdout.isatty() or not _has_all(text):
        text = json.dumps(value, allow_nan=False, indent=indent).replace("\x7f", "\\u007f")
    click.echo(text)


def _has_all(text: str) -> bool:
    """Whether standard output is UTF-8, and there are no halves of surrogate pairs in the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
