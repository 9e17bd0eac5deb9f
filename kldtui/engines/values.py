"""Numbers as servers send them, made into log-probabilities that can be trusted.

Knows: what a log-probability may be, and in what order candidates are listed.
Must not know: the fields of any server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kldtui.engines.base import Top
from kldtui.errors import UnusableEngine

ROUNDING = 1e-6
_ZERO = -9999.0
"""No probability above 0 has a log this low: JSON has no infinity, and vLLM sends this for it,
llama-server the least float."""


def log_probability(value: float) -> float:
    """A log-probability in nats, as it must be: at most 0; of a probability of zero, -inf.

    Raises UnusableEngine for NaN, and for what is above 0 by more than rounding.
    """
    logp = float(value)
    if math.isnan(logp):
        raise UnusableEngine("it gives NaN as a log-probability; the model's output is broken")
    if logp > ROUNDING:
        raise UnusableEngine(
            f"it gives {logp:.4g} as a log-probability, which cannot be above 0 (some builds "
            "and settings send probabilities or logits under that name); use a newer build or "
            "its defaults"
        )
    return -math.inf if logp <= _ZERO else min(logp, 0.0)


def best_first(candidates: Iterable[tuple[int, float]]) -> Top:
    """(id, log p) best first, ties by lowest id, whatever order the server used."""
    return tuple(sorted(candidates, key=lambda one: (-one[1], one[0])))
