"""A language model of a hundred tokens, with a tokenizer, for fakes to serve.

Its next-token distribution is a fixed function of the prefix, so that what an engine brings back
can be held against what the model says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache

BOS, EOS = 0, 1
SPECIAL = {BOS: b"<s>", EOS: b"<|im_end|>"}
FIRST_HALF, SECOND_HALF, WHOLE = 97, 98, 99
PIECES: list[bytes] = [
    b"<s>",
    b"<|im_end|>",
    *(bytes([byte]) for byte in range(32, 127)),
    "美".encode()[:2],
    "美".encode()[2:],
    "美".encode(),
    b" foo",
    b"foo",
    b" .",
    b"n't",
    b"||",
    b"|x",
    b"\n",
    "\N{GRINNING FACE}".encode(),
    b"never",
]
N_VOCAB = len(PIECES)
NEVER = N_VOCAB - 1
"""A token of probability zero, always."""

_BY_PIECE = {piece: id for id, piece in enumerate(PIECES) if id not in SPECIAL}
_LONGEST = max(map(len, PIECES))


@lru_cache(maxsize=4096)
def logprobs(prefix: tuple[int, ...], forced: int | None = None) -> tuple[float, ...]:
    """log p of each token after `prefix`, nats; `forced` is made the most likely one."""
    dice = random.Random(repr(prefix))  # noqa: S311 - it only has to be the same each time
    logits = [dice.gauss(0.0, 2.0) for _ in range(N_VOCAB)]
    logits[EOS] -= 3.0
    if forced is not None:
        logits[forced] = max(logits) + 1.0
    logits[NEVER] = -math.inf
    total = math.log(sum(math.exp(logit) for logit in logits))
    return tuple(logit - total for logit in logits)


def best(values: Sequence[float], n: int) -> list[tuple[int, float]]:
    """The `n` best (id, log p), ties by lowest id."""
    return sorted(enumerate(values), key=lambda one: (-one[1], one[0]))[:n]


def encode(text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
    """Longest piece first."""
    data, ids = text.encode(), [BOS] if special and add_bos else []
    while data:
        for length in range(min(_LONGEST, len(data)), 0, -1):
            if data[:length] in _BY_PIECE:
                ids.append(_BY_PIECE[data[:length]])
                data = data[length:]
                break
        else:
            data = data[1:]
    return ids


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[id] for id in ids).decode("utf-8", "replace")


class Speaker:
    """The greedy continuation of a prefix, and its text as servers stream it.

    script: the tokens it is made to say first.
    """

    def __init__(self, prefix: Sequence[int], script: Sequence[int] = ()) -> None:
        self.prefix = tuple(prefix)
        self.ids: list[int] = []
        self.script = list(script)
        self._pending = b""

    def next(self) -> tuple[int, tuple[float, ...]]:
        """The next token, and log p of every token there."""
        at = len(self.ids)
        forced = self.script[at] if at < len(self.script) else None
        values = logprobs((*self.prefix, *self.ids), forced)
        id = best(values, 1)[0][0]
        self.ids.append(id)
        return id, values

    def text(self) -> str:
        """The text that the last token completed; none while a character is open."""
        self._pending += PIECES[self.ids[-1]]
        try:
            text = self._pending.decode()
        except UnicodeDecodeError:
            return ""
        self._pending = b""
        return text

    def rest(self) -> str:
        """What some servers send at the end for a character that was not completed."""
        return self._pending.decode("utf-8", "replace")
