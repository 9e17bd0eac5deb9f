"""The demo: a packaged real pair that opens at once, and two engines that come up behind it.

Knows: in what order the pair, the model, its requantization and the servers are had, and where
they are kept.
Must not know: the screen; how recordings are read or branches run.

    with Demo() as demo:
        pair = demo.open()                  # under a second, without network
        for event in demo.serve():          # in a thread: Step, Step, …, Ready("ref"), …
            …
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from kldtui.demo.model import fetch_model, make_quant
from kldtui.demo.pair import DemoPair, demo_pair
from kldtui.demo.steps import Step, check_cancel
from kldtui.engines.supervise import MISSING, ServedModel, can_serve
from kldtui.errors import DemoError

__all__ = ["Demo", "DemoPair", "Ready", "Role", "Step", "default_cache"]

Role = Literal["ref", "quant"]

_POLL_SECONDS = 0.1
_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine of the demo answers at `url`; program: what serves it, with its version."""

    role: Role
    url: str
    program: str


def default_cache() -> Path:
    """Where the demo keeps its files, some 230 MB once both models are there."""
    return Path(platformdirs.user_cache_dir("kldtui")) / "demo"


class Demo:
    """The demo's pair and engines; `close` ends the engines and whatever still runs for them."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or default_cache()
        self.cancel = threading.Event()
        self.engines: dict[Role, ServedModel] = {}

    def open(self) -> DemoPair:
        """Unpack the recordings, or find them unpacked. Raises DemoError."""
        return demo_pair(self.cache)

    def missing(self) -> str | None:
        """What must be installed before branches can be live, in one line; None if nothing."""
        return None if can_serve() else MISSING

    def serve(self) -> Generator[Step | Ready, None, None]:
        """Fetch the model, requantize it, serve both; each engine as soon as its model is there.

        Raises DemoError (nothing to serve with, offline, no space, cancelled) and EngineError (an
        engine does not start), one line each. Engines that are ready by then stay so.
        """
        missing = self.missing()
        if missing is not None:
            raise DemoError(missing)
        model = yield from fetch_model(self.cache, self.cancel)
        yield from self._start("ref", model)
        quant = yield from make_quant(model, self.cache, self.cancel)
        yield from self._start("quant", quant)

    def close(self) -> None:
        """From any thread; again is harmless."""
        self.cancel.set()
        for engine in list(self.engines.values()):
            engine.stop()

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, role: Role, model: Path) -> Generator[Step | Ready, None, None]:
        check_cancel(self.cancel)
        # On the CPU alone, as the pair was recorded: another device computes other last digits.
        engine = ServedModel(model, n_ctx=_N_CTX, gpu_layers=0)
        self.engines[role] = engine
        engine.launch()
        if self.cancel.is_set():  # closed in between: `close` may not have seen this one
            engine.stop()
        while not engine.settled(_POLL_SECONDS):
            yield Step(role, f"starting the {role} engine ({engine.program})")
        yield Ready(role, engine.url, engine.program)
