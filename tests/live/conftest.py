"""Real llama.cpp servers for the live tests: SmolLM2 Q4_1 and its Q5_0 requantization."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from kldtui.demo.model import fetch_model, make_quant
from kldtui.demo.steps import finish
from kldtui.engines.supervise import MISSING, ServedModel, can_serve
from kldtui.errors import DemoError

_CACHE = Path(platformdirs.user_cache_dir("kldtui")) / "demo"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.live)


@pytest.fixture(scope="session")
def ref_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1, as recorded in ref.kld."""
    if not can_serve():
        pytest.skip(MISSING)
    try:
        return finish(fetch_model(_CACHE))
    except DemoError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def quant_model(ref_model: Path) -> Path:
    """Its requantization to Q5_0, as recorded in q5_0.kld."""
    return finish(make_quant(ref_model, _CACHE))


@pytest.fixture(scope="session")
def ref_server(ref_model: Path) -> Iterator[str]:
    """The URL of a server of `ref_model`."""
    with ServedModel(ref_model, threads=1, gpu_layers=0) as served:
        yield served.url


@pytest.fixture(scope="session")
def quant_server(quant_model: Path) -> Iterator[str]:
    """The URL of a server of `quant_model`."""
    with ServedModel(quant_model, threads=1, gpu_layers=0) as served:
        yield served.url
