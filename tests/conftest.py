"""Shared fixtures: where the real recordings are, when they are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).parents[2] / "shared" / "data" / "smollm2"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of real SmolLM2 recordings; skips, saying so, where they are not there, or where
    something else lies in the place of one."""
    shared = os.environ.get("KLDTUI_SHARED")
    folder = Path(shared) / "data" / "smollm2" if shared else _DEFAULT
    if not (folder / "ref.kld").is_file():
        pytest.skip(f"needs the real recordings at {folder} (set KLDTUI_SHARED to their parent)")
    for path in sorted(folder.glob("*.kld")):
        with path.open("rb") as file:
            if file.read(8) != b"_logits_":
                pytest.skip(f"needs the real recordings, but {path} is none: put it back")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees what another run, or a person, has scanned."""
    folder = tmp_path_factory.mktemp("cache")
    held = os.environ.get("KLDTUI_CACHE")
    os.environ["KLDTUI_CACHE"] = str(folder)
    yield
    if held is None:
        del os.environ["KLDTUI_CACHE"]
    else:
        os.environ["KLDTUI_CACHE"] = held


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--snapshot-update", action="store_true", help="accept the screens as drawn")


@pytest.hookimpl(tryfirst=True)  # the plugin that spreads them reads the groups in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share real servers go to one process, where tests are spread over several."""
    for item in items:
        if item.get_closest_marker("live") is not None:
            item.add_marker(pytest.mark.xdist_group("live"))
