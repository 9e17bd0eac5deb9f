"""Where the next request of a branch may begin, for mlx_lm.server.

Knows: which prompts its prompt cache cannot answer, and from where on ids are its own.
Must not know: sockets, shapes of answers, the screen.

Sources: mlx_lm/server.py and models/cache.py (LRUPromptCache) of 0.32.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kldtui.engines.mlx_shapes import Choice
from kldtui.engines.parity import OwnTokenizer

_BACK = 4
"""How many tokens back a prefix is looked for that can be sent in place of one that cannot, before
it is looked for where the text breaks; most that fail do so for a token or two."""
_PROMPTS_KEPT, _RUNS_KEPT = 256, 64


@dataclass(slots=True)
class Run:
    """A branch while it grows.

    ids: the prefix and what came after. own: from where on they are the server's own. cut: where
    the last step began; None before the first.
    """

    ids: list[int]
    own: int
    cut: int | None = None

    @property
    def lowest(self) -> int:
        """The earliest place from which the server may say these ids again."""
        if self.cut is not None:
            return self.cut
        return min(self.own, max(1, len(self.ids) - _BACK))


@dataclass(frozen=True, slots=True)
class Step:
    """cut: where it began. choices: the new tokens. ended: whether the server says that the last
    is an end. cached: prompt tokens that it had computed before, None where it does not say."""

    cut: int
    choices: Sequence[Choice]
    ended: bool
    cached: int | None


class Runs:
    """The last branches, as far as they came."""

    def __init__(self) -> None:
        self._held: deque[Run] = deque(maxlen=_RUNS_KEPT)

    def begin(self, ids: list[int]) -> Run:
        """The run that `ids` begins, kept while it grows; its tokens are the server's own from
        where they are in an earlier run that `ids` goes on with."""
        earlier = (run.own for run in self._held if run.ids[: len(ids)] == ids)
        run = Run(ids, min(earlier, default=len(ids)))
        self._held.append(run)
        return run


class Asked:
    """Prompts with their answers, as the server's prompt cache holds them (the last ones)."""

    def __init__(self) -> None:
        self._held: deque[list[int]] = deque(maxlen=_PROMPTS_KEPT)

    def add(self, ids: list[int]) -> None:
        """A longer entry takes the place of those that it begins with, as in the server."""
        kept = [held for held in self._held if ids[: len(held)] != held]
        self._held = deque([*kept, ids], maxlen=_PROMPTS_KEPT)

    def holds(self, ids: list[int]) -> bool:
        return ids in self._held

    def place(self, tokenizer: OwnTokenizer, run: Run, highest: int) -> tuple[int, str] | None:
        """The last place up to `highest` where the run can be asked for, and the text up to there.

        A prefix that has no text of its own is asked for from the longest one that has, in the
        hope that the model goes on with just its ids. None where there is none.
        """
        places = range(highest, run.lowest - 1, -1)
        cut = next((cut for cut in places if self._can_begin(tokenizer, run.ids[:cut])), None)
        if cut is None and run.cut is None:
            cut = tokenizer.check(run.ids).nearest
            if cut is None or cut >= run.lowest or self.holds(run.ids[:cut]):
                return None
        text = None if cut is None else tokenizer.text(run.ids[:cut])
        return None if cut is None or text is None else (cut, text)

    def _can_begin(self, tokenizer: OwnTokenizer, ids: list[int]) -> bool:
        return not self.holds(ids) and tokenizer.text(ids) is not None
