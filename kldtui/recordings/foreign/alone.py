"""A file of answers by itself: each answer is a chunk, its prompt's ids and what was generated.

Knows: that a chunk needs ids of all its tokens.
Must not know: servers, references.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kldtui.errors import UnsupportedRecording
from kldtui.recordings.foreign.answer import Answer
from kldtui.recordings.foreign.kinds import ForeignFile
from kldtui.recordings.foreign.recording import ForeignChunk, ForeignRecording, spoken

NO_PROMPT = (
    "an answer holds no ids of its prompt, so it is no stream by itself: give it as --quant beside "
    'a reference, or keep the request with it: {"request": …, "response": …}, prompt as ids'
)
NO_IDS = (
    "its tokens are given as text, not as ids, so it is no stream by itself: give it as --quant "
    "beside a reference that has ids"
)


def alone(file: ForeignFile) -> ForeignRecording:
    """The recording that the file is by itself, for a reference.

    Raises UnsupportedRecording where no answer carries the ids of all its tokens.
    """
    counts: Counter[str] = Counter()
    chunks = []
    for answer in file.answers:
        chunk = _chunk(answer, counts)
        if chunk is not None and chunk.said:
            chunks.append(chunk)
    left_out = [f"{count:,} {words}" for words, count in counts.items() if count]
    if not chunks:
        words = NO_IDS if counts[_NO_IDS] >= counts[_NO_PROMPT] else NO_PROMPT
        raise UnsupportedRecording(f"{file.path}: {words}")
    return ForeignRecording(
        file.path,
        file.format,
        0,
        max(chunk.tokens.size for chunk in chunks),
        chunks,
        kind="rollout" if any(answer.output for answer in file.answers) else "teacher_forced",
        pieces=file.gathered.pieces,
        engine=file.gathered.engine,
        problems=[*file.problems, *left_out],
    )


_NO_PROMPT = "answers left out: they hold no ids of their prompt"
_NO_IDS = "answers left out: their tokens are given as text"
_NOT_SAID = "positions left out: only the log p of the text's own token is there"


def _chunk(answer: Answer, counts: Counter[str]) -> ForeignChunk | None:
    steps = [*answer.scored.values(), *answer.output]
    if any(step.token is None or step.ids is None for step in steps):
        counts[_NO_IDS] += 1
        return None
    ids = answer.ids
    if ids is None or answer.prompt is None or not ids or any(id is None for id in ids):
        counts[_NO_PROMPT] += 1
        return None
    tokens = np.array(ids, np.int32)
    n_prompt = len(answer.prompt)
    chunk = ForeignChunk(tokens, n_prompt)
    said = answer.scored | {n_prompt + i: step for i, step in enumerate(answer.output)}
    for t, step in said.items():
        if t < 1:
            continue
        if step.empty:
            counts[_NOT_SAID] += 1
            continue
        chunk.said[t] = spoken(step, int(tokens[t]))
    return chunk
