"""Ids through text and back: what text gives exactly these ids, where a server takes only text.

Knows: a model's own tokenizer, both ways; what it puts around a text; where ids are lost.
Must not know: servers, recordings, branches, the screen.

Measured with SmolLM2: 45 of 248 positions of a recording fail, all 31 of a chunk that begins in
mid-character; after a chosen start token 401 of 3,478 places in generated text, mostly for a token
or two, in JSON calls for good. An equal number of tokens proves nothing: ids are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kldtui.errors import KldtuiError, VocabularyError
from kldtui.vocab import Vocabulary, load_vocabulary, safe

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

SAMPLE = (
    "the end.\n\n  if x:\n\n    return (name, .value) # WE'LL pay 2024\r\n"
    "\N{CJK UNIFIED IDEOGRAPH-6F22}e\N{COMBINING ACUTE ACCENT}"
)
"""Tokenizers that differ mostly give it another number of tokens: they part words, digits, spaces
and line feeds in other ways, or compose accents. Short, since it is computed."""

_NEAR_END, _NEAR_BREAK, _LOOKED_AT = 16, 16, 512


@dataclass(frozen=True, slots=True)
class Parity:
    """Whether ids come back from their own text.

    text: encodes to exactly these ids; None where no text is known to. at: the index of the first
    id that does not come back; None where all do. nearest: the length of the longest shorter
    prefix that comes back, None where none does or it was not looked for.
    """

    text: str | None
    at: int | None = None
    nearest: int | None = None


class OwnTokenizer:
    """A model's own tokenizer.

    encode: the ids of a text, nothing added, special tokens read as such. decode: the text of
    ids, special tokens included. before, after: the ids that the model's tokenizer puts around
    every text (`adds` sets them). vocabulary: the exact bytes of tokens. source: for people.
    """

    def __init__(
        self,
        encode: Encode,
        decode: Decode,
        vocabulary: Vocabulary,
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        self._encode = encode
        self._decode = decode
        self.vocabulary = vocabulary
        self.before = tuple(before)
        self.after = tuple(after)

    @classmethod
    def load(cls, path: Path) -> OwnTokenizer:
        """From a tokenizer.json, or a folder that holds it. Raises VocabularyError."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        name = safe(str(file))
        give = "give the tokenizer.json of the model that the server serves"
        vocabulary = load_vocabulary(file) if file.is_file() else None
        if vocabulary is None:
            raise VocabularyError(f"{name}: no such file; {give}")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise VocabularyError(
                f"{name}: it tells what tokens spell, but cannot encode a text "
                f"({safe(str(error))[:80]}); {give}"
            ) from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if _merges(file) == []:
            raise VocabularyError(f"{name}: it has no merges, so that no text encodes; {give}")
        bare = list(tokenizer.encode("a", add_special_tokens=False).ids)
        whole = list(tokenizer.encode("a").ids)
        at = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        return cls(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            vocabulary,
            before=whole[:at],
            after=whole[at + len(bare) :],
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text as a server reads it: with what is put around it."""
        return [*self.before, *self._encode(text), *self.after]

    def settle(self, n_sample: int) -> None:
        """Learn what the server's tokenizer puts around a text from how many tokens it counts
        in `SAMPLE`. Raises KldtuiError, in words for after a server's name, where it is
        another tokenizer."""
        bare = len(self._encode(SAMPLE))
        bos = self.vocabulary.bos_id
        if n_sample == bare:
            self.before = self.after = ()
        elif n_sample == bare + 1 and not (self.before or self.after) and bos is not None:
            self.before = (bos,)
        elif n_sample != bare + len(self.before) + len(self.after):
            raise KldtuiError(
                f"its tokenizer makes {n_sample} tokens of a text of which "
                f"{self.vocabulary.source} makes {bare + len(self.before) + len(self.after)}"
            )

    def text(self, ids: Sequence[int]) -> str | None:
        """A text that encodes to exactly these ids; None where none is known to."""
        body = self._body(ids)
        if body is None:
            return None
        for text in self._spellings(body):
            if list(self._encode(text)) == body:
                return text
        return None

    def check(self, ids: Sequence[int]) -> Parity:
        """Whether ids come back from their text; where not, from which on, and what prefix does.

        Takes milliseconds for a few hundred ids, a second for tens of thousands that fail.
        """
        ids = [int(id) for id in ids]
        text = self.text(ids)
        if text is not None:
            return Parity(text)
        at = self._first_lost(ids)
        near_end = range(len(ids) - 1, max(0, len(ids) - 1 - _NEAR_END), -1)
        from_break = min(at + _NEAR_BREAK, len(ids) - 1 - len(near_end))
        near_break = range(from_break, max(0, from_break - _LOOKED_AT), -1)
        lengths = (n for part in (near_end, near_break) for n in part)
        nearest = next((n for n in lengths if self.text(ids[:n]) is not None), None)
        return Parity(None, at, nearest)

    def _body(self, ids: Sequence[int]) -> list[int] | None:
        """The ids without what is put before every text; None where that is not so here."""
        n = len(self.before)
        if not ids or self.after or tuple(ids[:n]) != self.before:
            return None
        return [int(id) for id in ids[n:]]

    def _spellings(self, body: Sequence[int]) -> Iterator[str]:
        """The library's text, which SentencePiece's extra space needs, then the exact bytes."""
        yield self._decode(body)
        pieces = [self.vocabulary.piece(id) for id in body]
        joined = b"".join(piece for piece in pieces if piece is not None)
        if None not in pieces:
            try:
                yield joined.decode("utf-8")
            except UnicodeDecodeError:
                return

    def _first_lost(self, ids: Sequence[int]) -> int:
        body = self._body(ids)
        if body is None:
            return 0
        back = self._encode(self._decode(body))
        pairs = enumerate(zip(body, back, strict=False))
        lost = next((k for k, (sent, got) in pairs if sent != got), len(back))
        return len(self.before) + min(lost, len(body) - 1)


def _merges(file: Path) -> object:
    """The merges of a tokenizer.json, without which byte-level BPE encodes to single bytes."""
    return json.loads(file.read_bytes())["model"].get("merges")
