"""Imports point downward, only the user interface knows Textual, analysis knows only numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_headless_commands_do_not_load_the_user_interface() -> None:
    code = (
        "import sys, kldtui.cli, kldtui.cli.reading\n"
        "print([m for m in ('textual', 'httpx', 'tokenizers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
