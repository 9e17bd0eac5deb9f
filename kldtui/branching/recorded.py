"""A branch that need not be asked for: where the stream is the reference's own greedy rollout, what
follows a position in it is what the reference says there.

Knows: the stream's tokens, and the rules by which a branch ends.
Must not know: engines, labels, the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kldtui.branching.branch import Branch
from kldtui.branching.running import Ends
from kldtui.engines.base import Token

KIND = "recording"
"""What such a branch names as its engine's kind."""


def is_recorded(branch: Branch) -> bool:
    """Whether the branch is the stream itself, and no server made it."""
    return branch.engine.get("kind") == KIND


def follow_stream(
    branch: Branch,
    stream: Sequence[int],
    n: int,
    *,
    piece: Callable[[int], bytes | None],
    logp: Callable[[int], float | None],
    eog_ids: Collection[int] = (),
    before: str = "",
) -> int:
    """Continue the branch by up to `n` tokens of the rollout that it starts in.

    stream: the chunk's tokens; the branch starts with that at its position. logp: log p (nats) of
    the stream token at an index, None where unknown. `before` as in `run_branch`. Ends as a made
    branch does; with the chunk it is unfinished (`limit`), the rollout being cut there. The top-N
    stay in the recording. Gives how many tokens were added.
    """
    begin = branch.position.t + 1 + len(branch.tokens)
    taken = stream[begin : begin + n]
    ends = Ends(before, branch.data)
    for t, id in enumerate(taken, begin):
        token = Token(id, piece(id) or b"", logp(t), ())
        branch.tokens.append(token)
        stop = "eog" if id in eog_ids else ends.after(token)
        if stop is not None:
            branch.end(stop)
            return t - begin + 1
    branch.end("limit")
    return len(taken)
