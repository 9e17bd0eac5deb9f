"""Where a vocabulary comes from: files, folders, recordings, a server.

Knows: which reader a file needs (by content), and where to look beside a recording.
Must not know: the formats themselves, engines, Textual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kldtui.errors import VocabularyError
from kldtui.recordings.base import Recording
from kldtui.vocab.ggufmeta import MAGIC, read_gguf
from kldtui.vocab.glyphs import safe
from kldtui.vocab.table import NONE, Vocabulary
from kldtui.vocab.tokenizer_json import read_tokenizer_json

_GIVE = "give a tokenizer.json, a GGUF file, or a folder that holds either"


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json, a GGUF file, or a folder that holds either.

    By content, never by extension. Raises VocabularyError.
    """
    name = safe(str(path))
    if path.is_dir():
        return _load_folder(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise VocabularyError(f"{name}: cannot be read: {error.strerror}; {_GIVE}") from error
    if head.startswith(MAGIC):
        return read_gguf(path)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return read_tokenizer_json(path)
    raise VocabularyError(f"{name}: neither a tokenizer.json nor a GGUF file; {_GIVE}")


def _load_folder(folder: Path) -> Vocabulary:
    json_file = folder / "tokenizer.json"
    if json_file.is_file():
        return load_vocabulary(json_file)
    models = list(_models(folder))
    if len(models) == 1:
        return load_vocabulary(models[0])
    found = f"{len(models)} GGUF files" if models else "neither tokenizer.json nor a GGUF file"
    raise VocabularyError(f"{safe(str(folder))}: the folder holds {found}; {_GIVE}")


def _models(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("*.gguf")):
        if path.is_file():
            yield path


def find_vocabulary(recordings: Sequence[Recording], explicit: Path | None = None) -> Vocabulary:
    """The vocabulary for these recordings (of one stream), from the first source that has it.

    `explicit` if given (then a fault raises VocabularyError); else tokenizer.json, or the one GGUF
    file whose vocabulary fits, beside a recording; else the model that a run names; else the
    pieces stored in runs; else NONE, whose `hint` says how to get text.
    """
    if explicit is not None:
        return load_vocabulary(explicit)
    n_vocab = max((recording.shape.n_vocab for recording in recordings), default=0)
    for find in (_beside, _named):
        for recording in recordings:
            vocabulary = find(recording, n_vocab)
            if vocabulary is not None:
                return vocabulary
    return _stored(recordings) or NONE


def _fits(vocabulary: Vocabulary, n_vocab: int) -> bool:
    return vocabulary.n_vocab is not None and vocabulary.n_vocab <= n_vocab


def _try(path: Path, n_vocab: int) -> Vocabulary | None:
    try:
        vocabulary = load_vocabulary(path)
    except VocabularyError:
        return None
    return vocabulary if _fits(vocabulary, n_vocab) else None


def _beside(recording: Recording, n_vocab: int) -> Vocabulary | None:
    folder = recording.path.parent
    json_file = folder / "tokenizer.json"
    if json_file.is_file():
        vocabulary = _try(json_file, n_vocab)
        if vocabulary is not None:
            return vocabulary
    fitting = [found for path in _models(folder) if (found := _try(path, n_vocab)) is not None]
    return fitting[0] if len(fitting) == 1 else None


def _named(recording: Recording, n_vocab: int) -> Vocabulary | None:
    model = recording.engine.get("model")
    if not isinstance(model, str) or not model:
        return None
    try:
        path = Path(model)
        return _try(path, n_vocab) if path.exists() else None
    except (OSError, ValueError):
        return None


def _stored(recordings: Sequence[Recording]) -> Vocabulary | None:
    pieces: dict[int, bytes] = {}
    names: list[str] = []
    for recording in recordings:
        if recording.pieces:
            pieces = {**recording.pieces, **pieces}
            names.append(safe(recording.path.name))
    return from_pieces(pieces, f"pieces in {', '.join(names)}") if pieces else None


def from_pieces(pieces: Mapping[int, bytes], source: str) -> Vocabulary:
    """A vocabulary of the ids whose bytes are known; `extend` adds more."""
    return Vocabulary(pieces, source)


async def from_server(
    pieces: Callable[[Sequence[int]], Awaitable[Mapping[int, bytes]]],
    ids: Iterable[int],
    source: str,
    *,
    n_vocab: int | None = None,
    bos_id: int | None = None,
    add_bos: bool | None = None,
) -> Vocabulary:
    """The vocabulary of the ids that occur, asked of a server by `pieces` (an engine's method)."""
    known = await pieces(sorted(set(ids)))
    return Vocabulary(known, source, n_vocab=n_vocab, bos_id=bos_id, add_bos=add_bos)
