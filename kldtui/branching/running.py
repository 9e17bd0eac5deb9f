"""Making a branch: one engine continues it token by token, until it ends or is long enough.

Knows: the Engine protocol, and the rules by which a branch ends.
Must not know: any server, recordings, labels, files, or the screen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from kldtui.branching.branch import Branch
from kldtui.engines.base import Engine, Finish, Token
from kldtui.errors import EngineError
from kldtui.hints import closes_at
from kldtui.vocab.glyphs import raw_text

DEFAULT_LENGTH = 128
DEFAULT_TOP_N = 40

_TEXT_WATCHED = 20_000
_LOOP_TOKENS, _LOOP_ROUNDS, _LONGEST_PERIOD = 32, 4, 32


async def run_branch(
    engine: Engine,
    branch: Branch,
    n: int = DEFAULT_LENGTH,
    top_n: int = DEFAULT_TOP_N,
    *,
    before: str = "",
) -> AsyncGenerator[Token | Finish, None]:
    """Continue the branch by up to `n` tokens from where it stands, filling it as they arrive.

    Ends at the end of turn, a closed tool call, a loop, or `n`. `before` is the text up to and
    with the start token, for a call that opened there. An EngineError marks the branch
    (`stop`, `error`), keeps what arrived, and is raised on. Closing the iterator or cancelling
    the task marks it cancelled. Run it again to make it longer: it goes on from its last token,
    which another run in one go may not (`continued_at`), and which does nothing after an end of
    turn. A Finish comes last only where the engine ended the branch; `branch.stop` always says.
    """
    if branch.stop == "eog":
        yield Finish("eog", None, 0.0, branch.tokens_per_second, "it has ended its turn")
        return
    branch.stop, branch.complete, branch.error = None, False, None
    if engine.info is not None:
        branch.engine = engine.info.to_json()
    branch.settings = {**engine.settings, "n_probs": top_n}
    held = len(branch.tokens)
    if held:
        branch.continued_at.append(held)
    ends = Ends(before[-_TEXT_WATCHED:], branch.data)
    earlier, begun = branch.seconds, time.monotonic()
    prompt = [*branch.prefix_ids, branch.start_id, *branch.ids]
    try:
        async with contextlib.aclosing(engine.generate(prompt, n, top_n)) as items:
            async for item in items:
                if isinstance(item, Finish):
                    branch.end(item.reason)
                    branch.tokens_per_second = item.tokens_per_second
                else:
                    branch.tokens.append(item)
                    stop = ends.after(item)
                    if stop is not None:
                        branch.end(stop)
                        elapsed = max(time.monotonic() - begun, 1e-9)
                        branch.tokens_per_second = (len(branch.tokens) - held) / elapsed
                yield item
                if branch.stop is not None:
                    break
    except EngineError as error:
        branch.end("error")
        branch.error = str(error)
        raise
    finally:
        if branch.stop is None:
            branch.end("cancelled")
        branch.seconds = earlier + time.monotonic() - begun


class Ends:
    """Watches a branch for the ends that the model does not mark: a closed tool call, a loop.

    Only what is generated from now on ends it, so that a branch that ended can be made longer.
    """

    def __init__(self, before: str, data: bytes = b"") -> None:
        self._parts = [before + raw_text(data)]
        self._after = len(self._parts[0])
        self._pending = b""
        self._ids: list[int] = []

    def after(self, token: Token) -> Literal["tool_call", "loop"] | None:
        """What ends with this token, if anything."""
        self._ids.append(token.id)
        self._pending += token.data
        try:
            new = self._pending.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.end == len(self._pending) and len(self._pending) < 4:
                return self._loops()
            new = self._pending.decode("utf-8", "replace")
        self._pending = b""
        self._parts.append(new)
        if any(c in new for c in "}]>"):
            self._parts = ["".join(self._parts)]
            if closes_at(self._parts[0], self._after) is not None:
                return "tool_call"
        return self._loops()

    def _loops(self) -> Literal["loop"] | None:
        return "loop" if loop_period(self._ids) is not None else None


def loop_period(ids: Sequence[int]) -> int | None:
    """The period of a loop at the end of `ids`: at least 4 rounds over at least 32 tokens.

    None if there is none; periods up to 32 tokens are looked for.
    """
    n = len(ids)
    for period in range(1, _LONGEST_PERIOD + 1):
        span = max(_LOOP_TOKENS, _LOOP_ROUNDS * period)
        if span > n:
            return None
        if all(ids[k] == ids[k - period] for k in range(n - span + period, n)):
            return period
    return None
