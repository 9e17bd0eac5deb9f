"""An MLX model folder: whether it is one, and what its config.json says of the model.

Knows: config.json and the names of the files beside it, as mlx_lm reads them.
Must not know: mlx, tokenizers, servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 24
_KEPT = ("model_type", "torch_dtype", "max_position_embeddings")
_OF_QUANTIZATION = ("bits", "group_size", "mode")


def is_mlx_folder(path: Path) -> bool:
    """Whether mlx_lm could load the folder: config.json, and weights as safetensors."""
    try:
        return (path / "config.json").is_file() and any(path.glob("model*.safetensors"))
    except OSError:
        return False


def folder_facts(folder: Path | None) -> dict[str, Any]:
    """What identifies the model, for EngineInfo: JSON-able, empty where nothing is to be read.

    vocab_size: how many logits it gives (an int where present). quantization: bits and such.
    """
    data = {} if folder is None else _config(folder)
    text = data.get("text_config")
    layers = [data, text if isinstance(text, dict) else {}]
    facts: dict[str, Any] = {}
    for layer in layers:
        for name in _KEPT:
            if isinstance(layer.get(name), str | int):
                facts.setdefault(name, layer[name])
        size = layer.get("vocab_size")
        if isinstance(size, int) and size > 0:
            facts["vocab_size"] = size
    how = data.get("quantization")
    if isinstance(how, dict):
        facts["quantization"] = {name: how[name] for name in _OF_QUANTIZATION if name in how}
    return facts


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
