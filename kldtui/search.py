"""Finding text in a token stream.

Knows: recordings' tokens and the vocabulary's bytes.
Must not know: rows, labels, screens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kldtui.position import Position
from kldtui.recordings import Recording
from kldtui.vocab import Vocabulary


def find_text(
    recording: Recording, vocab: Vocabulary, needle: str, start: int = 0
) -> Iterator[tuple[int, list[Position]]]:
    """Yields (chunk, hits in it) for every chunk from `start` on.

    Case is ignored unless the needle has capitals. A hit is the token its first byte lies in.
    """
    fold = needle == needle.lower()
    wanted = needle.encode("utf-8", "surrogatepass")
    for chunk in range(start, recording.shape.n_chunk):
        pieces = [vocab.piece(int(t)) or b"" for t in recording.tokens(chunk)]
        text = b"".join(pieces)
        if fold:
            text = _fold(text)
        ends = np.cumsum([len(piece) for piece in pieces])
        hits, at = [], text.find(wanted) if wanted else -1
        while at >= 0:
            hits.append(Position(chunk, int(np.searchsorted(ends, at, side="right"))))
            at = text.find(wanted, at + len(wanted))
        yield chunk, hits


def _fold(text: bytes) -> bytes:
    """Lower case without moving any byte: what would change its length stays as it is."""
    if text.isascii():
        return text.lower()
    whole = text.decode("utf-8", "surrogateescape")
    return b"".join(
        low if len(low) == len(raw) else raw
        for raw, low in (
            (c.encode("utf-8", "surrogateescape"), c.lower().encode("utf-8", "surrogateescape"))
            for c in whole
        )
    )
