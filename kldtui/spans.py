"""Which tokens of a stream lie inside tool calls.

Knows: the vocabulary's bytes, and where calls open and close in text.
Must not know: rows, roots, labels, screens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kldtui.hints import OPENERS, find_calls
from kldtui.vocab import Vocabulary


def call_tokens(vocab: Vocabulary, ids: Sequence[int]) -> NDArray[np.bool_]:
    """bool[len(ids)]: whether a token has a byte inside a tool call, by its text alone."""
    pieces = [vocab.piece(int(token)) or b"" for token in ids]
    inside = np.zeros(len(pieces), bool)
    # One character a byte, so that offsets in the text are offsets in the bytes.
    calls = find_calls(b"".join(pieces).decode("latin-1"))
    if calls:
        ends = np.cumsum([len(piece) for piece in pieces])
        for call in calls:
            stop = call.end if call.end is not None else int(ends[-1])
            first = int(np.searchsorted(ends, call.start, side="right"))
            last = int(np.searchsorted(ends, stop, side="left"))
            inside[first : last + 1] = True
    return inside


class CallFinder:
    """`call_tokens` over many chunks of one vocabulary: most are seen at once to hold no call."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._opening: dict[int, bool] = {}

    def inside(self, ids: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """As `call_tokens`; None where no token is inside a call."""
        known = self._opening
        for token in np.unique(ids).tolist():
            opens = known.get(token)
            if opens is None:
                piece = self._vocab.piece(token) or b""
                opens = known[token] = any(byte in piece for byte in OPENERS)
            if opens:
                found = call_tokens(self._vocab, ids.tolist())
                return found if found.any() else None
        return None
