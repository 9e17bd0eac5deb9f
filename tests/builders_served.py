"""A pair of recordings, and fake llama-servers that hold its models.

Knows: how to make a server agree with a recording, and say what it is told after a root.
Must not know: what is tested with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.builders import Stream, log_softmax, write_kld
from tests.fake_server import EOG, FakeLlama

N_VOCAB, N_CTX = 306, 24
STREAM = Stream(np.random.default_rng(1).integers(97, 122, (2, N_CTX)).astype(np.int32), N_VOCAB)
T = STREAM.first_t + 3
ROOT = f"c1:t{T}"


def logits(seed: int, best: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Like every other seed's, but for noise; at ROOT `best` is the best token."""
    base = np.random.default_rng(9).normal(0, 2, (STREAM.records, N_VOCAB))
    made = base + np.random.default_rng(seed).normal(0, 0.8, base.shape)
    made[STREAM.per_chunk + 3, best] = 12
    return made.astype(np.float32)


REF, QUANT = logits(1, 98), logits(2, 99)


def write_served(folder: Path) -> tuple[Path, Path]:
    """ref.kld and q4.kld; ROOT is one of their roots, where they say 98 and 99."""
    ref = write_kld(folder / "ref.kld", STREAM, REF)
    return ref, write_kld(folder / "q4.kld", STREAM, QUANT)


def server(made: np.ndarray[Any, Any], said: list[int], **more: Any) -> FakeLlama:
    """A server that agrees with the recording of `made`, and says `said` after ROOT."""
    logp = log_softmax(made)

    def next_top(prompt: list[int]) -> list[tuple[int, float]]:
        after = len(prompt) - T - 1
        chunk = STREAM.tokens[1].tolist()
        if after >= 0 and prompt[1:T] == chunk[1:T] and prompt[T] != chunk[T]:
            best = said[after] if after < len(said) else EOG
            return [(best, -0.1), *((id, -3.0) for id in range(306) if id != best)]
        row = logp[0]
        for c in (0, 1):
            if len(prompt) >= STREAM.first_t and prompt[1] == STREAM.tokens[c][1]:
                t = min(len(prompt), N_CTX - 1)
                row = logp[c * STREAM.per_chunk + t - STREAM.first_t]
        return [(int(id), float(row[id])) for id in np.argsort(-row, kind="stable")]

    return FakeLlama(next_top=next_top, n_vocab=N_VOCAB, **more)
