"""Engines: the servers that continue a prefix.

Knows: which engines there are, and where API keys come from.
Must not know: recordings, branches, the screen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from kldtui.engines.base import (
    Capabilities,
    Engine,
    EngineInfo,
    Finish,
    Reason,
    Token,
    Top,
    wait_ready,
)
from kldtui.engines.probe import Access, Probed

__all__ = [
    "Capabilities",
    "Engine",
    "EngineInfo",
    "Finish",
    "Reason",
    "Token",
    "Top",
    "open_engine",
    "wait_ready",
]

_VARIABLES = {"ref": "KLDTUI_REF_API_KEY", "quant": "KLDTUI_QUANT_API_KEY"}
_FOR_BOTH = "KLDTUI_API_KEY"


def open_engine(
    url: str,
    role: Literal["ref", "quant"],
    *,
    build: str = "",
    tokenizer: Path | None = None,
) -> Engine:
    """An engine for whatever server is at `url`, which is not contacted before `connect`.

    The API key is read from KLDTUI_REF_API_KEY or KLDTUI_QUANT_API_KEY, else from KLDTUI_API_KEY.
    `url` may hold `user:password@` (HTTP basic, sent in place of a key) and `?model=NAME` (a
    server with several models). `build` names the build of a server that does not know its own,
    as packaged ones do not; `tokenizer` is its model's, for a server that takes text. Raises
    EngineError for what is no URL.
    """
    variable = _VARIABLES[role]
    key = (os.environ.get(variable) or os.environ.get(_FOR_BOTH) or "").strip()
    hint = f"{variable} (or {_FOR_BOTH})"
    return Probed(Access(url, api_key=key or None, key_hint=hint, build=build, tokenizer=tokenizer))
