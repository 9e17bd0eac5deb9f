"""Shared fixtures: where the real recordings are, when they are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).parents[2] / "shared" / "data" / "smollm2"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of real SmolLM2 recordings; skips, saying so, where it is not there."""
    shared = os.environ.get("KLDTUI_SHARED")
    folder = Path(shared) / "data" / "smollm2" if shared else _DEFAULT
    if not (folder / "ref.kld").is_file():
        pytest.skip(f"needs the real recordings at {folder} (set KLDTUI_SHARED to their parent)")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--snapshot-update", action="store_true", help="accept the screens as drawn")
