"""Reading the vocabulary of a GGUF file: its metadata alone, never a tensor.

Knows: GGUF's header and key-value section (ggml, docs/gguf.md), the `tokenizer.ggml.*` keys.
Must not know: how a file was found, recordings.

gguf.GGUFReader maps the file and makes an array of every string of every list: 20 times slower on a
vocabulary, and a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from kldtui.errors import VocabularyError
from kldtui.vocab import pieces
from kldtui.vocab.glyphs import safe
from kldtui.vocab.table import Vocabulary

MAGIC = b"GGUF"

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 24
_MAX_ITEMS = 1 << 26


class _Damaged(Exception):
    """What is wrong, in words."""


class _Metadata:
    """The key-value section, read front to back; only wanted keys are kept."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._order = "<"

    def read(self, wanted: str) -> dict[str, Any]:
        head = self._take(8)
        if head[:4] != MAGIC:
            raise _Damaged("not a GGUF file")
        version = struct.unpack("<I", head[4:])[0]
        if version & 0xFFFF == 0:
            self._order = ">"
            version = struct.unpack(">I", head[4:])[0]
        if version not in (2, 3):
            raise _Damaged(f"GGUF version {version}, of which kldtui reads 2 and 3")
        _tensors, count = self._scalars("Q", 2)
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._string().decode("utf-8", "replace")
            (kind,) = self._scalars("I", 1)
            if key.startswith(wanted):
                found[key] = self._value(kind)
            else:
                self._skip(kind)
        return found

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise _Damaged("the file ends in the middle of its metadata")
        return data

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"{self._order}{count}{code}")
        return layout.unpack(self._take(layout.size))

    def _string(self) -> bytes:
        (size,) = self._scalars("Q", 1)
        if size > _MAX_STRING:
            raise _Damaged(f"a string of {size:,} bytes in its metadata")
        return self._take(size)

    def _array(self) -> tuple[int, int]:
        kind, count = struct.unpack(f"{self._order}IQ", self._take(12))
        if count > _MAX_ITEMS:
            raise _Damaged(f"a list of {count:,} items in its metadata")
        return kind, count

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._array()
            if kind in _SCALARS:
                return list(self._scalars(_SCALARS[kind], count))
            return [self._value(kind) for _ in range(count)]
        return self._scalars(self._code(kind), 1)[0]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            kind, count = self._array()
            if kind in _SCALARS:
                self._take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
            else:
                for _ in range(count):
                    self._skip(kind)
        else:
            self._take(struct.calcsize(f"<{self._code(kind)}"))

    @staticmethod
    def _code(kind: int) -> str:
        if kind not in _SCALARS:
            raise _Damaged(f"a value of unknown type {kind} in its metadata")
        return _SCALARS[kind]


def read_gguf(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file (of its first part, if it is split). Raises VocabularyError."""
    name = safe(str(path))
    try:
        with path.open("rb", buffering=1 << 20) as file:
            found = _Metadata(file).read("tokenizer.ggml.")
        return _vocabulary(path, found)
    except OSError as error:
        raise VocabularyError(f"{name}: cannot be read: {error.strerror}") from error
    except (_Damaged, TypeError, ValueError, RecursionError) as error:
        raise VocabularyError(
            f"{name}: no vocabulary can be read: {safe(str(error))}; "
            "give the model's whole GGUF file or its tokenizer.json"
        ) from error


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_SPELLINGS = {
    "gpt2": pieces.byte_level,
    "llama": pieces.sentencepiece,
    "bert": pieces.sentencepiece,
    "t5": pieces.sentencepiece,
    "gemma4": pieces.sentencepiece,
}


def _vocabulary(path: Path, found: dict[str, Any]) -> Vocabulary:
    model = found.get("tokenizer.ggml.model", b"").decode("utf-8", "replace")
    tokens = found.get("tokenizer.ggml.tokens")
    if not tokens:
        raise _Damaged("its metadata hold no tokens")
    if model not in _SPELLINGS:
        raise _Damaged(f"its tokenizer is of a kind that kldtui does not know: {model!r}")
    normal = _SPELLINGS[model]
    types = found.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _Damaged(f"{len(tokens):,} tokens, but {len(types):,} token types")
    table: dict[int, bytes] = {}
    control: set[int] = set()
    for id, (spelling, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _NORMAL:
            table[id] = normal(spelling.decode("utf-8"))
        elif kind == _BYTE:
            byte = pieces.byte_token(spelling.decode("utf-8"))
            table[id] = spelling if byte is None else byte
        elif kind == _UNUSED and (not spelling or spelling.startswith(b"[PAD")):
            continue
        else:
            table[id] = spelling
        if kind in (_UNKNOWN, _CONTROL):
            control.add(id)
    add_bos = found.get("tokenizer.ggml.add_bos_token")
    return Vocabulary(
        table,
        path.name,
        n_vocab=len(tokens),
        control=control,
        bos_id=found.get("tokenizer.ggml.bos_token_id"),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eog_ids={
            found[key]
            for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
            if key in found
        },
    )
