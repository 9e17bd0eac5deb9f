"""Reading `tokenizer.json` (Hugging Face tokenizers) and the files beside it.

Knows: its JSON: model, added_tokens, decoder, pre_tokenizer, post_processor; of the files beside it
tokenizer_config.json and generation_config.json, for what ends or begins a text.
Must not know: how a file was found, recordings.

The JSON is read directly: the library gives text, not bytes, and builds merges that nobody needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kldtui.errors import VocabularyError
from kldtui.vocab import pieces
from kldtui.vocab.glyphs import safe
from kldtui.vocab.special import ends_by_text
from kldtui.vocab.table import Vocabulary

_MAX_BYTES = 1 << 28


def read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises VocabularyError."""
    name = safe(str(path))
    data = _load(path)
    model = data.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise VocabularyError(
            f"{name}: JSON, but not a tokenizer.json (no model.vocab); "
            "give a tokenizer.json, a GGUF file, or a folder that holds either"
        )
    try:
        return _vocabulary(path, data, model)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise VocabularyError(
            f"{name}: damaged tokenizer.json ({safe(str(error))}); fetch the file again"
        ) from error


def _load(path: Path) -> dict[str, Any]:
    name = safe(str(path))
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise VocabularyError(f"{name}: too large for a tokenizer.json")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise VocabularyError(f"{name}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise VocabularyError(
            f"{name}: not whole JSON ({safe(str(error))}); fetch the file again"
        ) from error
    return data if isinstance(data, dict) else {}


def _vocabulary(path: Path, data: dict[str, Any], model: dict[str, Any]) -> Vocabulary:
    decode, added_decode = _decoding(data, model)
    table: dict[int, bytes] = {}
    for spelling, id in _entries(model["vocab"]):
        table[id] = decode(spelling)
    ids: dict[str, int] = {}
    for token in data.get("added_tokens") or ():
        id, content = int(token["id"]), str(token["content"])
        ids[content] = id
        if token.get("special"):
            table[id] = pieces.verbatim(content)
        else:
            table[id] = added_decode(content)
    if not table:
        raise ValueError("an empty vocabulary")
    bos_id, add_bos = _bos_rule(data.get("post_processor"))
    beside = _Beside(path.parent, ids)
    if bos_id is None:
        bos_id = beside.bos_id()
    if add_bos is None:
        add_bos = beside.add_bos()
    return Vocabulary(
        table,
        path.name,
        n_vocab=max(table) + 1,
        bos_id=bos_id,
        add_bos=add_bos,
        eog_ids=beside.eog_ids() | ends_by_text(ids),
    )


def _entries(vocab: Any) -> Iterator[tuple[str, int]]:
    """BPE, WordPiece and WordLevel map piece -> id; Unigram lists [piece, score]."""
    if isinstance(vocab, dict):
        for spelling, id in vocab.items():
            yield str(spelling), int(id)
    else:
        for id, entry in enumerate(vocab):
            yield str(entry[0]), id


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A decoder, pre_tokenizer or post_processor and the members of a Sequence, flat."""
    if not isinstance(part, dict):
        return
    yield part
    for key in ("decoders", "pretokenizers", "processors"):
        for member in part.get(key) or ():
            yield from _steps(member)


_Decode = Callable[[str], bytes]


def _decoding(data: dict[str, Any], model: dict[str, Any]) -> tuple[_Decode, _Decode]:
    """How the model's pieces and how non-special added tokens are spelled."""
    decoder = list(_steps(data.get("decoder")))
    kinds = {step.get("type") for step in decoder}
    pre_kinds = {step.get("type") for step in _steps(data.get("pre_tokenizer"))}
    if "ByteLevel" in kinds or (not kinds and "ByteLevel" in pre_kinds):
        return pieces.byte_level, pieces.verbatim
    wordpiece = next((step for step in decoder if step.get("type") == "WordPiece"), None)
    if wordpiece is not None or model.get("type") == "WordPiece":
        prefix = str(
            (wordpiece or {}).get("prefix") or model.get("continuing_subword_prefix") or "##"
        )
        return (lambda spelling: pieces.wordpiece(spelling, prefix)), pieces.verbatim
    spaced = bool({"Metaspace", "Replace"} & kinds) or (not kinds and "Metaspace" in pre_kinds)
    plain = pieces.sentencepiece if spaced else pieces.verbatim
    if not (model.get("byte_fallback") or "ByteFallback" in kinds):
        return plain, plain

    def with_bytes(spelling: str) -> bytes:
        byte = pieces.byte_token(pieces.verbatim(spelling))
        return plain(spelling) if byte is None else byte

    return with_bytes, plain


def _bos_rule(post_processor: Any) -> tuple[int | None, bool | None]:
    """(bos_id, add_bos) where a post-processor states what goes before a single text."""
    for step in _steps(post_processor):
        if step.get("type") == "TemplateProcessing":
            single = step.get("single") or []
            first = single[0].get("SpecialToken") if single else None
            if first is None:
                return None, False
            special = step["special_tokens"][first["id"]]
            return int(special["ids"][0]), True
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return int(step["cls"][1]), True
    return None, None


class _Beside:
    """What the files beside a tokenizer.json say; all of them may be absent or broken."""

    def __init__(self, folder: Path, ids: dict[str, int]) -> None:
        self._ids = ids
        self._tokenizer = self._read(folder / "tokenizer_config.json")
        self._generation = self._read(folder / "generation_config.json")

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        try:
            return _load(path)
        except VocabularyError:
            return {}

    def _id(self, key: str) -> int | None:
        value = self._tokenizer.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return self._ids.get(value) if isinstance(value, str) else None

    def bos_id(self) -> int | None:
        return self._id("bos_token")

    def add_bos(self) -> bool | None:
        value = self._tokenizer.get("add_bos_token")
        return value if isinstance(value, bool) else None

    def eog_ids(self) -> set[int]:
        said = self._generation.get("eos_token_id")
        listed = said if isinstance(said, list) else [said]
        ids = {id for id in listed if isinstance(id, int)}
        eos = self._id("eos_token")
        return ids if eos is None else ids | {eos}
