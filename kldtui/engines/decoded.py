"""The text of single tokens, from a server that only turns lists of ids into text.

Knows: what decoding loses: leading spaces, parts of characters, spaces before punctuation.
Must not know: any server, or what the pieces are for.

A token is decoded between two separators, so that no space is lost at an end, and many tokens at
once, so that a vocabulary takes hundreds of requests and not a hundred thousand. Where the text
does not fall apart into as many parts as tokens, the batch is halved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

from kldtui.errors import EngineRefused

_SEPARATORS = "|~^@#"
_BATCH = 256
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CLEANED = (".", "?", "!", ",", "'", "n't")
"""What Hugging Face's `clean_up_tokenization_spaces` takes a space from before."""


class Decoder:
    """Pieces of tokens, kept as they are learnt.

    encode: the ids of a text, nothing added. decode: the text of ids, special tokens included.
    """

    def __init__(
        self,
        encode: Callable[[str], Awaitable[list[int]]],
        decode: Callable[[Sequence[int]], Awaitable[str]],
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._separator: tuple[int, str] | None = None
        self._cleans = False
        self._prepared = False
        self._known: dict[int, bytes] = {}

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The bytes of tokens; those whose text does not tell their bytes are left out.

        None at all from a server that neither encodes nor decodes. Raises EngineError where it
        fails.
        """
        if not self._prepared:
            with contextlib.suppress(EngineRefused):
                await self._prepare()
        if self._separator is None:
            return {}
        missing = [id for id in dict.fromkeys(ids) if id not in self._known]
        for at in range(0, len(missing), _BATCH):
            await self._learn(missing[at : at + _BATCH], *self._separator)
        return {id: self._known[id] for id in ids if self._known.get(id)}

    async def _prepare(self) -> None:
        """Find a token that decodes to one character wherever it stands."""
        for sign in _SEPARATORS:
            ids = await self._encode(sign)
            if ids and await self._decode([ids[-1], ids[-1]]) == sign * 2:
                self._separator = (ids[-1], sign)
                spaced = await self._decode([ids[-1], *await self._encode(" ."), ids[-1]])
                self._cleans = " ." not in spaced
                break
        self._prepared = True

    async def _learn(self, ids: Sequence[int], separator: int, sign: str) -> None:
        between = [separator]
        for id in ids:
            between += (id, separator)
        try:
            text = await self._decode(between)
        except EngineRefused:  # an id that it does not know
            text = ""
        parts = text.split(sign)
        if len(parts) == len(ids) + 2 and parts[0] == parts[-1] == "":
            for id, part in zip(ids, parts[1:-1], strict=True):
                self._known[id] = self._bytes(part)
        elif len(ids) > 1:
            half = len(ids) // 2
            await self._learn(ids[:half], separator, sign)
            await self._learn(ids[half:], separator, sign)
        else:
            whole = len(text) > 1 and text.startswith(sign) and text.endswith(sign)
            self._known[ids[0]] = self._bytes(text[1:-1]) if whole else b""

    def _bytes(self, text: str) -> bytes:
        """Empty where the text may stand for other bytes."""
        if _UNKNOWN in text or (self._cleans and text.startswith(_CLEANED)):
            return b""
        return text.encode()
