"""What commands print: JSON, whatever text is in it and wherever it goes; progress in a log."""

from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kldtui.cli
from kldtui.cli.printing import print_json
from kldtui.cli.progress import ProgressLine

PLACES = [("utf-8", False), ("utf-8", True), ("latin-1", False), ("latin-1", True)]
BIDI = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


class Out(io.TextIOWrapper):
    """Standard output as `main` sets it up."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, errors="backslashreplace")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def printed(value: Any, encoding: str, terminal: bool) -> str:
    out = Out(encoding, terminal)
    with patch("sys.stdout", out):
        print_json(value)
    out.flush()
    return out.bytes.getvalue().decode(encoding)


def steers(char: str) -> bool:
    """Whether a terminal would obey it."""
    return unicodedata.category(char) == "Cc" or unicodedata.bidirectional(char) in BIDI


@pytest.mark.parametrize(("encoding", "terminal"), PLACES)
@given(text=st.text(st.characters() | st.characters(categories=["Cs", "Cc", "Cf"])))
def test_any_text_is_valid_json_and_comes_back(text: str, encoding: str, terminal: bool) -> None:
    shown = printed({"text": [text]}, encoding, terminal)
    back = json.loads(shown)["text"][0]
    assert json.dumps(back) == json.dumps(json.loads(json.dumps(text)))
    if terminal:
        assert not any(steers(char) for char in shown.replace("\n", ""))


def test_a_pipe_gets_text_as_it_is() -> None:
    assert '"é😀"' in printed("é😀", "utf-8", False)
    assert '"\\u00e9\\ud83d\\ude00"' in printed("é😀", "utf-8", True)


def test_no_command_prints_json_by_itself() -> None:
    for path in Path(kldtui.cli.__file__).parent.glob("*.py"):
        if path.name != "printing.py":
            assert "echo(json.dumps" not in path.read_text(), path


def test_in_a_log_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 15.0, 16.0, 31.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with ProgressLine() as line:
        for done in range(4):
            line(lambda done=done: f"{done} of 4")  # type: ignore[misc]
    assert capsys.readouterr().err == "kldtui: 1 of 4\nkldtui: 3 of 4\n"
