"""Screenshots that tests compare: `pytest --snapshot-update` accepts what is drawn now."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ui.review import Driver

_FOLDER = Path(__file__).parents[2] / "snapshots"


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[Driver], None]:
    """Compare the screen with snapshots/<test module>/<test>.svg; look before you accept."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    path = _FOLDER / request.node.path.stem / f"{name}.svg"

    def compare(driver: Driver) -> None:
        svg = re.sub(r"terminal-\d+-", "terminal-", driver.app.export_screenshot(title="kldtui"))
        if request.config.getoption("--snapshot-update"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(svg, encoding="utf-8")
            return
        held = path.read_text(encoding="utf-8") if path.exists() else ""
        if svg != held:
            drawn = path.with_suffix(".drawn.svg")
            drawn.parent.mkdir(parents=True, exist_ok=True)
            drawn.write_text(svg, encoding="utf-8")
            pytest.fail(f"the screen differs from {path}: compare {drawn}, then --snapshot-update")

    return compare
