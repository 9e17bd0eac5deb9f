"""Where a vocabulary comes from: files, folders, recordings, a server.

Knows: which reader a file needs (by content), and where to look beside a recording.
Must not know: the formats themselves, engines, Textual.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from kldtui.errors import VocabularyError
from kldtui.recordings.base import Recording
from kldtui.vocab.ggufmeta import MAGIC, gguf_fingerprint, read_gguf
from kldtui.vocab.glyphs import safe
from kldtui.vocab.table import Vocabulary, no_text
from kldtui.vocab.tokenizer_json import read_tokenizer_json

_GIVE = "give a tokenizer.json, a GGUF file, or a folder that holds either"


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json, a GGUF file, or a folder that holds either.

    By content, never by extension. Raises VocabularyError.
    """
    name = safe(str(path))
    try:
        if path.is_dir():
            return _load_folder(path)
        if path.exists() and not path.is_file():
            raise VocabularyError(f"{name}: is no regular file; {_GIVE}")
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
    models = _Models(folder)
    chosen, why_not = models.agreeing(lambda n: True)
    if chosen is not None:
        return load_vocabulary(chosen)
    raise VocabularyError(f"{safe(str(folder))}: the folder holds {why_not}; {_GIVE}")


class _Models:
    """The GGUF files of a folder. Parts of split ones but the first hold no tokens: not counted."""

    def __init__(self, folder: Path) -> None:
        self._prints: dict[Path, tuple[int, bytes]] = {}
        self._fault = "neither tokenizer.json nor a GGUF file"
        for path in sorted(filter(Path.is_file, folder.glob("*.gguf"))):
            try:
                self._prints[path] = gguf_fingerprint(path)
            except VocabularyError as error:
                self._fault = f"no GGUF file that can be read ({error})"

    def agreeing(self, fits: Callable[[int], bool]) -> tuple[Path | None, str]:
        """The one file whose vocabulary fits, or the first of several that agree; else why not.

        Quants of one model stand side by side and hold the same tokens: any of them will do.
        """
        fitting = [path for path, (n, _) in self._prints.items() if fits(n)]
        if not fitting:
            return None, "GGUF files of other vocabularies" if self._prints else self._fault
        if len({self._prints[path] for path in fitting}) > 1:
            return None, f"{len(fitting)} GGUF files whose vocabularies differ"
        return fitting[0], ""


def find_vocabulary(recordings: Sequence[Recording], explicit: Path | None = None) -> Vocabulary:
    """The vocabulary for these recordings (of one stream), from the first source that has it.

    `explicit` if given (then a fault raises VocabularyError; one that does not fit is taken, and
    its `hint` says so); else tokenizer.json, or the one GGUF file whose vocabulary fits, beside a
    recording; else the model that a run names; else the pieces stored in runs; else `no_text()`,
    whose `hint` says how to get text and what was passed over.
    """
    n_vocab = max((recording.shape.n_vocab for recording in recordings), default=0)
    stored = _stored(recordings)
    if explicit is not None:
        vocabulary = load_vocabulary(explicit)
        if recordings:
            vocabulary.hint = _doubt(vocabulary, n_vocab, stored)
        return vocabulary
    passed_over: list[str] = []
    for candidate in _candidates(recordings, n_vocab, passed_over):
        try:
            vocabulary = load_vocabulary(candidate)
        except VocabularyError as error:
            passed_over.append(str(error))
            continue
        doubt = _doubt(vocabulary, n_vocab, stored)
        if not doubt:
            return vocabulary
        passed_over.append(doubt)
    return stored or no_text(f" (passed over: {passed_over[0]})" if passed_over else "")


def _fits(n: int | None, n_vocab: int) -> bool:
    """Whether a tokenizer of `n` ids may serve logits of `n_vocab` (0: unknown): these are padded,
    but little (Qwen 267, Phi 53, DeepSeek 465)."""
    return n is not None and (not n_vocab or 0 <= n_vocab - n <= max(1024, n_vocab // 50))


def _doubt(vocabulary: Vocabulary, n_vocab: int, stored: Vocabulary | None) -> str:
    """Why the vocabulary may be another model's than that of the recordings; empty if it fits."""
    name = vocabulary.source
    if not _fits(vocabulary.n_vocab, n_vocab):
        return (
            f"{name} has {vocabulary.n_vocab or 0:,} tokens, the recordings {n_vocab:,}: "
            "its text may be another model's"
        )
    ids = list(stored.ids()) if stored else []
    other = [id for id in ids if stored and vocabulary.piece(id) != stored.piece(id)]
    # Writers may store text in place of bytes, so a few pieces may differ.
    if len(other) * 5 > len(ids):
        return (
            f"{name} gives other text than the recordings for {len(other):,} of {len(ids):,} "
            "tokens: it may be another model's"
        )
    return ""


def _candidates(
    recordings: Sequence[Recording], n_vocab: int, passed_over: list[str]
) -> Iterator[Path]:
    """Files that may hold the vocabulary, the likeliest first; each folder is looked into once."""
    folders = dict.fromkeys(recording.path.parent for recording in recordings)
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            yield folder / "tokenizer.json"
    for folder in folders:
        models = _Models(folder)
        # llama.cpp's logits are as many as its tokens; those of others may be padded.
        chosen, why_not = models.agreeing(lambda n: n == n_vocab)
        if chosen is None:
            chosen, why_not = models.agreeing(lambda n: _fits(n, n_vocab))
        if chosen is not None:
            yield chosen
        elif "differ" in why_not:
            passed_over.append(f"{safe(str(folder))}: {why_not}")
    for recording in recordings:
        yield from _named(recording)


def _named(recording: Recording) -> Iterator[Path]:
    """The model that a run's header names, where it exists on this machine."""
    model = recording.engine.get("model")
    if not isinstance(model, str) or not model:
        return
    path = recording.path.parent / model  # `model` itself where it is absolute
    try:
        if path.is_file() or (path.is_dir() and path != recording.path.parent):
            yield path
    except (OSError, ValueError):
        return


def _stored(recordings: Sequence[Recording]) -> Vocabulary | None:
    pieces: dict[int, bytes] = {}
    names: list[str] = []
    for recording in recordings:
        if recording.pieces:
            pieces = {**recording.pieces, **pieces}
            names.append(safe(recording.path.name))
    if not pieces:
        return None
    vocabulary = from_pieces(pieces, f"pieces in {', '.join(names)}")
    vocabulary.hint = (
        f"text is known for {len(pieces):,} tokens only; --tokenizer FILE gives it for all"
    )
    return vocabulary


def from_pieces(pieces: Mapping[int, bytes], source: str) -> Vocabulary:
    """A vocabulary of the ids whose bytes are known."""
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
