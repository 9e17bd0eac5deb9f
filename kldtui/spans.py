"""Which tokens of a stream lie inside tool calls.

Knows: the vocabulary's bytes, and where calls open and close in text.
Must not know: rows, roots, labels, screens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kldtui.hints import find_calls
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
