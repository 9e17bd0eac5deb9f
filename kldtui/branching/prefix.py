"""The exact ids that a recording's model saw, and the BOS rule behind them.

Knows: recordings, and what a server says of BOS.
Must not know: any server, branches, labels, the screen.
"""

from __future__ import annotations

from kldtui.errors import KldtuiError
from kldtui.position import Position
from kldtui.recordings.base import Recording


def prefix_of(
    recording: Recording,
    position: Position,
    add_bos: bool | None,
    bos_id: int | None,
    *,
    own_rule: bool = True,
) -> list[int]:
    """The exact ids that the recording's model saw before `position`, from the chunk's start.

    A model that adds BOS was evaluated with BOS in place of each chunk's first token, though the
    file keeps that token (llama.cpp tools/perplexity): `[BOS] + tokens[1:t]`, else
    `tokens[0:t]`. `add_bos` and `bos_id` are the server's; the rule that the recording itself
    states goes before, unless `own_rule` is false. Raises KldtuiError for a position outside the
    recording, or a BOS without id.
    """
    chunks = recording.shape.n_chunk
    if not 0 <= position.chunk < chunks:
        raise KldtuiError(f"{position}: the recording has chunks 0 to {chunks - 1}")
    tokens = recording.tokens(position.chunk)
    if not 1 <= position.t < tokens.size:
        raise KldtuiError(
            f"{position}: chunk {position.chunk} has predictions of t1 to t{tokens.size - 1}"
        )
    if own_rule:
        add_bos, bos_id = bos_rule(recording, add_bos, bos_id)
    ids = [int(token) for token in tokens[: position.t]]
    if add_bos:
        if bos_id is None:
            raise KldtuiError("the model adds BOS, but the server does not say which id it has")
        ids[0] = bos_id
    return ids


def bos_rule(
    recording: Recording, add_bos: bool | None, bos_id: int | None
) -> tuple[bool | None, int | None]:
    """The rule that the recording states (a run's header may), else the server's."""
    made = recording.made
    if made.add_bos is None:
        return add_bos, bos_id
    return made.add_bos, bos_id if made.bos_id is None else made.bos_id


def bos_warning(recording: Recording, add_bos: bool | None, bos_id: int | None) -> str | None:
    """One line where recording and server disagree about BOS, else None.

    A text as a whole is tokenized with BOS too, so that the very first token of a `.kld` file
    written with a model that adds BOS is BOS; a run states its rule.
    """
    name = recording.path.name
    stated, _ = bos_rule(recording, None, None)
    if stated is not None:
        if add_bos is None or stated == add_bos:
            return None
        return (
            f"{name} was made with{'' if stated else 'out'} BOS, but the server's model "
            f"{'adds it' if add_bos else 'adds none'}; prefixes are sent as {name} has it"
        )
    if bos_id is None or recording.format != "kld" or recording.shape.n_chunk == 0:
        return None
    begins = int(recording.tokens(0)[0]) == bos_id
    if begins == add_bos:
        return None
    seen = f"{name} begins with{'' if begins else 'out'} BOS (id {bos_id})"
    if add_bos is None:
        return f"the server does not say whether it adds BOS; {seen}"
    return (
        f"{seen}, but the server's model {'adds it' if add_bos else 'adds none'}; "
        "verification tells which is right, and prefixes follow it"
    )
