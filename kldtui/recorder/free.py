"""A quant's own rollouts: where one parts from the reference's, as a branch.

Knows: runs of rollouts, and what a branch is made of.
Must not know: engines at work, how a review keeps branches.
"""

from __future__ import annotations

from typing import Any

from kldtui.branching import QQ, Branch, Stop
from kldtui.engines.base import Token
from kldtui.position import Position
from kldtui.recordings.own_rollout import OwnRollouts, Pair
from kldtui.recordings.run import RunRecording
from kldtui.rows import TopRow

_ENDS: dict[str, Stop] = {"eog": "eog", "limit": "limit", "context": "context"}


def own_branch(recording: object, position: Position, name: str) -> Branch | None:
    """Q·q at a place where a quant's own rollout parts from the reference's; None elsewhere, and
    of any other recording. Raises RecordingChanged and DamagedRecording."""
    if not isinstance(recording, OwnRollouts):
        return None
    pair = recording.pairs.get(position.chunk)
    if pair is None or pair.parts_at != position.t:
        return None
    if pair.parts_at >= recording.run.tokens(pair.quant).size:
        return None
    return _branch(recording.run, pair, pair.parts_at, name)


def _branch(run: RunRecording, pair: Pair, at: int, name: str) -> Branch:
    chunk = pair.quant
    ids = run.tokens(chunk).tolist()
    told = run.chunk_fields(chunk)
    tokens = []
    for t in range(at + 1, len(ids)):
        row = run.row(Position(chunk, t))
        known = row if isinstance(row, TopRow) else None
        value = known.logp(ids[t]) if known is not None else None
        tokens.append(
            Token(
                ids[t],
                run.pieces.get(ids[t], b""),
                None if value is None or value.bound else value.value,
                tuple(known.top(len(known.known))) if known is not None else (),
            )
        )
    branch = Branch(
        position=Position(pair.ref, at),
        arm=QQ,
        quant=name,
        start_id=ids[at],
        prefix_ids=ids[:at],
        start_data=run.pieces.get(ids[at], b""),
        tokens=tokens,
        engine=_engine(run),
        settings=dict(run.engine.get("settings") or {}),
        created=str(run.header.get("created") or ""),
    )
    branch.end(_ENDS.get(str(told.get("stop")), "limit"))
    return branch


def _engine(run: RunRecording) -> dict[str, Any]:
    """The run's engine in the fields of a branch's."""
    said = run.engine
    return {
        "kind": str(said.get("name") or "unknown"),
        "url": "",
        "model": str(said.get("model") or "unknown"),
        "build": str(said.get("build") or "unknown"),
        "n_vocab": run.shape.n_vocab,
        "n_ctx": None,
        "bos_id": run.made.bos_id,
        "add_bos": None,
        "details": {"recorded": run.path.name},
    }
