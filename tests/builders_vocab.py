"""Tiny vocabulary files and recordings as the vocabulary sees them.

Knows: how to write a GGUF file of metadata alone and a tokenizer.json, and what a terminal obeys.
Must not know: how kldtui reads them.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import gguf

from kldtui.recordings.base import Recording, StreamShape
from kldtui.vocab import Vocabulary, from_pieces

OBEYED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
LLAMA_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def harmless(text: str) -> bool:
    """Whether a terminal only draws it: nothing obeyed, hidden, joined or a space in disguise."""
    return all(
        unicodedata.category(character) not in OBEYED
        and (character == " " or not character.isspace())
        and character not in "\u200d\ufe0f"
        for character in text
    )


def vocabulary_of(*pieces: bytes) -> Vocabulary:
    """A vocabulary of these pieces, numbered from 0."""
    return from_pieces(dict(enumerate(pieces)), "test")


def write_gguf(
    path: Path,
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    model: str = "gpt2",
    **keys: int | bool | str,
) -> Path:
    """A GGUF file without tensors; `keys` are `tokenizer.ggml.*` values."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("some.list", [1.5, 2.5])
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if types is not None:
        writer.add_token_types(list(types))
    writer.add_token_merges(["a b", "c d"])
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_tokenizer_json(
    path: Path,
    vocab: Mapping[str, int] | Sequence[Sequence[Any]],
    *,
    kind: str = "BPE",
    added: Sequence[tuple[int, str, bool]] = (),
    decoder: Mapping[str, Any] | None = None,
    pre_tokenizer: Mapping[str, Any] | None = None,
    post_processor: Mapping[str, Any] | None = None,
    **model: Any,
) -> Path:
    """A tokenizer.json; `added` are (id, content, special)."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    if kind == "BPE":
        model = {"merges": [], **model}
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": content, "special": special, **flags}
            for id, content, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {"type": kind, "vocab": vocab, **model},
    }
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@dataclass
class _Recording:
    path: Path
    shape: StreamShape
    engine: dict[str, Any] = field(default_factory=dict)
    pieces: dict[int, bytes] = field(default_factory=dict)


def recording_at(
    path: Path,
    n_vocab: int,
    *,
    model: str | None = None,
    pieces: Mapping[int, bytes] | None = None,
) -> Recording:
    """As much of a recording as the search for its vocabulary asks for."""
    engine = {} if model is None else {"model": model}
    return cast(Recording, _Recording(path, StreamShape(8, n_vocab, 1), engine, dict(pieces or {})))
