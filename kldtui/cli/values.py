"""What several commands take: amounts in nats.

Knows: how such a word is read.
Must not know: what it is for.
"""

from __future__ import annotations

import math
from typing import Any

import click


class Nats(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A finite amount of at least 0."""

    name = "nats"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            self.fail(f"{value!r} is no amount of nats: a number from 0 up", param, ctx)
        return number


NATS = Nats()
