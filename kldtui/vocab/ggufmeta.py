"""Reading the vocabulary of a GGUF file: its metadata alone, never a tensor.

Knows: GGUF's header and key-value section (ggml, docs/gguf.md), the `tokenizer.ggml.*` keys.
Must not know: how a file was found, recordings.

gguf.GGUFReader maps the file and makes an array of every string of every list: many times slower
on a vocabulary, and a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kldtui.errors import VocabularyError
from kldtui.vocab import pieces
from kldtui.vocab.glyphs import safe
from kldtui.vocab.special import ends_by_text
from kldtui.vocab.table import Vocabulary

MAGIC = b"GGUF"

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 24
_MAX_ITEMS = 1 << 24
_MAX_KEYS = 1 << 16
_MAX_DEPTH = 4

_PREFIX = "tokenizer.ggml."
_TOKENS = _PREFIX + "tokens"
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_WANTED = frozenset(
    _PREFIX + key
    for key in ("model", "pre", "tokens", "token_type", "add_bos_token", "bos_token_id")
) | {f"{_PREFIX}{name}_token_id" for name in _ENDS}


_Result = TypeVar("_Result")


class _Damaged(Exception):
    """What is wrong, in words."""


class _Metadata:
    """The key-value section, read front to back; what is not wanted is passed over."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._order = "<"

    def items(self) -> Iterator[tuple[str, Any]]:
        """The wanted keys with their values (strings as bytes) in the file's order."""
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
        if count > _MAX_KEYS:
            raise _Damaged(f"{count:,} keys in its metadata")
        for _ in range(count):
            key = self._string().decode("utf-8", "replace")
            (kind,) = self._scalars("I", 1)
            value = self._value(kind, keep=key in _WANTED)
            if key in _WANTED:
                yield key, value

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

    def _strings(self, count: int) -> list[bytes]:
        """As `_string`, for the lists of 100,000s that every vocabulary has."""
        read, size_of = self._file.read, struct.Struct(f"{self._order}Q").unpack
        strings: list[bytes] = []
        for _ in range(count):
            head = read(8)
            if len(head) != 8:
                break
            (size,) = size_of(head)
            if size > _MAX_STRING:
                raise _Damaged(f"a string of {size:,} bytes in its metadata")
            string = read(size)
            if len(string) != size:
                break
            strings.append(string)
        if len(strings) != count:
            raise _Damaged("the file ends in the middle of its metadata")
        return strings

    def _value(self, kind: int, keep: bool, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1)[0]
        if kind != _ARRAY or depth > _MAX_DEPTH:
            raise _Damaged(f"a value of unknown type {kind} in its metadata")
        kind, count = struct.unpack(f"{self._order}IQ", self._take(12))
        if count > _MAX_ITEMS:
            raise _Damaged(f"a list of {count:,} items in its metadata")
        if kind == _STRING:
            return self._strings(count)
        if kind in _SCALARS and keep:
            return list(self._scalars(_SCALARS[kind], count))
        if kind in _SCALARS:
            return self._take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        return [self._value(kind, keep, depth + 1) for _ in range(count)]


def read_gguf(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file (of its first part, if it is split). Raises VocabularyError."""
    return _reading(path, lambda metadata: _vocabulary(path.name, dict(metadata.items())))


def gguf_fingerprint(path: Path) -> tuple[int, bytes]:
    """How many tokens a GGUF file has, and a digest of them: files with the same digest spell the
    same vocabulary. Sooner read than the vocabulary. Raises VocabularyError.
    """

    def read(metadata: _Metadata) -> tuple[int, bytes]:
        tokens = _tokens(next((value for key, value in metadata.items() if key == _TOKENS), None))
        digest = hashlib.sha256()
        for token in tokens:
            digest.update(len(token).to_bytes(8, "little") + token)
        return len(tokens), digest.digest()

    return _reading(path, read)


def _reading(path: Path, read: Callable[[_Metadata], _Result]) -> _Result:
    name = safe(str(path))
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return read(_Metadata(file))
    except OSError as error:
        raise VocabularyError(f"{name}: cannot be read: {error.strerror}") from error
    except (_Damaged, TypeError, ValueError, AttributeError, struct.error) as error:
        raise VocabularyError(
            f"{name}: no vocabulary can be read: {safe(str(error))}; give the model's whole GGUF "
            "file (of a split one, the first part) or its tokenizer.json"
        ) from error


def _tokens(value: Any) -> list[bytes]:
    if not value:
        raise _Damaged("its metadata hold no tokens")
    if not isinstance(value, list) or not isinstance(value[0], bytes):
        raise _Damaged("its tokens are not strings")
    return value


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "gpt2": pieces.byte_level,
    "whitespace": pieces.byte_level,
    "llama": pieces.sentencepiece,
    "bert": pieces.sentencepiece,
    "t5": pieces.sentencepiece,
    "gemma4": pieces.sentencepiece,
    "plamo2": pieces.verbatim,
    "rwkv": pieces.escaped,
}
_SPACED_PRE = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""BPE with ▁ for spaces: llama.cpp, src/llama-vocab.cpp, `escape_whitespaces`."""


def _vocabulary(source: str, found: dict[str, Any]) -> Vocabulary:
    tokens = _tokens(found.get(_TOKENS))
    model = found.get(_PREFIX + "model", b"").decode("utf-8", "replace")
    pre = found.get(_PREFIX + "pre", b"").decode("utf-8", "replace")
    if model not in _SPELLINGS:
        raise _Damaged(f"its tokenizer is of a kind that kldtui does not know: {model!r}")
    normal = _SPELLINGS[model]
    if normal is pieces.byte_level and pre in _SPACED_PRE:
        normal = pieces.sentencepiece
    types = found.get(_PREFIX + "token_type")
    if types is None:
        types = [_NORMAL if pieces.byte_token(token) is None else _BYTE for token in tokens]
    if len(types) < len(tokens):
        raise _Damaged(f"{len(tokens):,} tokens, but only {len(types):,} token types")
    table = {
        id: piece
        for id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if (piece := _piece(token, kind, normal))
    }
    ends = {found.get(f"{_PREFIX}{name}_token_id") for name in _ENDS}
    add_bos = found.get(_PREFIX + "add_bos_token")
    return Vocabulary(
        table,
        source,
        n_vocab=len(tokens),
        bos_id=_id(found.get(_PREFIX + "bos_token_id"), len(tokens)),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eog_ids={id for end in ends if (id := _id(end, len(tokens))) is not None}
        | ends_by_text({token.decode("utf-8", "replace"): id for id, token in enumerate(tokens)}),
    )


def _piece(token: bytes, kind: int, normal: Callable[[str], bytes]) -> bytes | None:
    """The bytes of a token; None for padding (unused, and named so by the converter)."""
    if kind == _BYTE and (byte := pieces.byte_token(token)) is not None:
        return byte
    if kind in (_NORMAL, _BYTE) or normal is pieces.escaped:
        try:
            return normal(token.decode("utf-8"))
        except UnicodeDecodeError:
            return token
    return None if kind == _UNUSED and token.startswith(b"[PAD") else token


def _id(value: Any, n_vocab: int) -> int | None:
    """A special token's id; llama.cpp ignores those outside the vocabulary, and -1 is none."""
    return value if isinstance(value, int) and 0 <= value < n_vocab else None
