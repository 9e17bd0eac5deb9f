"""Engines: the servers that continue a prefix.

Knows: which engines there are, where API keys come from.
Must not know: recordings, branches, the screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kldtui.engines.base import Engine, EngineInfo, Finish, Reason, Token, Top, wait_ready

__all__ = ["Engine", "EngineInfo", "Finish", "Reason", "Token", "Top", "open_engine", "wait_ready"]


def open_engine(
    url: str, role: Literal["ref", "quant"], *, api_key_file: Path | None = None
) -> Engine:
    """An engine for the server at `url`, not yet connected.

    The API key is read from `api_key_file`, else from KLDTUI_REF_API_KEY or
    KLDTUI_QUANT_API_KEY, else from KLDTUI_API_KEY. Raises EngineError for what is no URL.
    """
    raise NotImplementedError
