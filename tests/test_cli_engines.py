"""Which server or model is for which quant, as the command line takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kldtui.cli.engines import add_engines
from kldtui.errors import KldtuiError
from tests.ui.review import open_review


@pytest.mark.parametrize(
    ("servers", "models", "words"),
    [
        (("http://127.0.0.1:1",), (), "--quant-server: say which quant it serves, as NAME=URL"),
        ((), ("q4.gguf",), "--quant-model: say which quant it serves, as NAME=FILE"),
        (("q9=http://127.0.0.1:1",), (), "there is no such quant; there are: q4, q8"),
    ],
)
def test_with_several_quants_an_engine_has_to_name_its_own(
    tmp_path: Path, servers: tuple[str, ...], models: tuple[str, ...], words: str
) -> None:
    session = open_review(tmp_path, ("q4", "q8"))
    with pytest.raises(KldtuiError, match=words):
        add_engines(session, None, None, servers, models)
    assert session.slots == {}
    session.close()
