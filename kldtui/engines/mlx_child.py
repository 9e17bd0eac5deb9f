"""An MLX folder run by mlx_lm in a child process of kldtui: on ids, exact, streamed.

Knows: how the child is started (`_mlx_child.py`, under the supervisor), and what it is told and
says over its socket.
Must not know: mlx, recordings, branches, the screen.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Reason, Token, Top
from kldtui.engines.mlx_folder import folder_facts, is_mlx_folder
from kldtui.engines.parity import OwnTokenizer
from kldtui.engines.scoring import Scored, Seen
from kldtui.engines.supervise import Child, last_words
from kldtui.engines.values import best_first, log_probability
from kldtui.errors import (
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    UnusableEngine,
    VocabularyError,
)
from kldtui.vocab import NONE, Vocabulary, load_vocabulary, safe

MISSING = "mlx_lm is not installed: pip install 'kldtui[mlx]'"
_HERE = Path(__file__).parent
_LINE_BYTES = 1 << 26
"""A line may hold a whole vocabulary's log-probabilities."""
_SILENCE_SECONDS = 600.0
_CAPABILITIES = Capabilities(
    takes_ids=True,
    returns_ids=True,
    top_n_limit=None,
    streams_probabilities=True,
    cache_switch=True,
)


def can_run_mlx() -> bool:
    """Whether mlx_lm is installed, found out without importing it."""
    return importlib.util.find_spec("mlx_lm") is not None


class MlxChild:
    """An engine over one MLX folder. One answer at a time. It scores a text in one pass.

    `connect` starts the child and raises EngineLoading while it loads; it starts a new one where
    the last has died. `close` ends it; it ends with this process too, however that ends.
    """

    one_pass = True

    def __init__(
        self,
        folder: Path,
        *,
        log_dir: Path | None = None,
        command: Sequence[str] | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """`command` runs in place of mlx_lm's child, its settings appended. silence_seconds: the
        longest that an answer may say nothing. Raises EngineError for what is no MLX folder, or
        where mlx_lm is not installed."""
        self._folder = folder
        name = safe(str(folder))
        if not is_mlx_folder(folder):
            raise EngineError(
                f"{name}: no MLX folder (config.json and model*.safetensors); make one with "
                "mlx_lm.convert"
            )
        if command is None and not can_run_mlx():
            raise EngineError(f"{name}: {MISSING}")
        self._command = tuple(command or (sys.executable, "-P", str(_HERE / "_mlx_child.py")))
        self._log_dir = log_dir
        self._silence = silence_seconds
        self._turn = asyncio.Lock()
        self._child: Child | None = None
        self._work: Path | None = None
        self._log: Path | None = None
        self._facts: dict[str, Any] = {}
        self._failed = False
        self._ready = threading.Event()
        self._vocabulary: Vocabulary = NONE
        self._add_bos: bool | None = None
        self._info: EngineInfo | None = None

    @property
    def url(self) -> str:
        """`mlx:` and the folder."""
        return f"mlx:{self._folder}"

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def settings(self) -> dict[str, Any]:
        """What a judged branch is computed with, ids and length apart."""
        return {"temperature": 0, "prompt_cache": "new"}

    @property
    def arriving(self) -> bytes:
        return b""

    @property
    def vocabulary(self) -> Vocabulary:
        """That of the folder's tokenizer.json; without text before `connect`, or without one."""
        return self._vocabulary

    @property
    def log_path(self) -> Path | None:
        """The child's output; None before `connect`. Kept after a failure, else removed."""
        return self._log

    @property
    def pid(self) -> int | None:
        """The child's process, which leads a group of its own; None before it runs."""
        return self._child.pid if self._child else None

    # ── the child ────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> EngineInfo:
        """Load the model, and say what it is.

        Raises EngineLoading while it loads, EngineError with the child's own last words where it
        could not.
        """
        if self._child is not None and self._child.done.is_set():
            failed = not self._ready.is_set()
            words = self._death()
            await self._end()
            if failed:
                raise EngineError(words)
        if self._child is None:
            await asyncio.to_thread(self._start)
        await asyncio.to_thread(self._ready.wait, 0.1)
        if not self._ready.is_set():
            if self._child is not None and self._child.done.is_set():
                words = self._death()
                await self._end()
                raise EngineError(words)
            raise EngineLoading(f"{self.url}: it is loading the model; wait for it")
        self._info = self._describe()
        return self._info

    def _start(self) -> None:
        with contextlib.suppress(VocabularyError):
            self._vocabulary = load_vocabulary(self._folder / "tokenizer.json")
            self._add_bos = self._vocabulary.add_bos
            if self._add_bos is None:
                before = OwnTokenizer.load(self._folder).before
                self._add_bos = self._vocabulary.bos_id in before
        self._ready.clear()
        self._facts, self._failed = {}, False
        self._work = Path(tempfile.mkdtemp(prefix="kldtui-"))
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".log", f"kldtui-{self._folder.name}-", self._log_dir)
        os.close(handle)
        self._log = Path(name)
        settings = {
            "folder": str(self._folder.resolve()),
            "socket": str(self._work / "s"),
            "ends": sorted(self._vocabulary.eog_ids),
        }
        command = [*self._command, json.dumps(settings)]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._child = Child(
            command,
            self._log,
            self._heard,
            env={**os.environ, **offline},
            temporary=[self._work, self._log],
        )

    def _heard(self, said: dict[str, Any]) -> None:
        self._facts = said
        self._ready.set()

    def _death(self) -> str:
        """How the child ended, in one line with its own last words."""
        self._failed = True
        code = self._child.exit_code if self._child else None
        how = "was killed" if code is None or code < 0 else f"ended with status {code}"
        words = last_words(self._log)
        quoted = f"; its last words: {words}" if words else ""
        return f"{self.url}: mlx_lm {how}{quoted} (log: {self._log})"

    async def close(self) -> None:
        """End the child, and wait until it is gone."""
        await asyncio.shield(self._end())
        if self._log is not None and not self._failed:
            self._log.unlink(missing_ok=True)

    async def _end(self) -> None:
        child, self._child = self._child, None
        work, self._work = self._work, None
        if child is not None:
            await asyncio.to_thread(child.stop)
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        self._ready.clear()

    def _describe(self) -> EngineInfo:
        facts = folder_facts(self._folder)
        facts.pop("vocab_size", None)
        said = self._facts
        bos = self._vocabulary.bos_id
        return EngineInfo(
            kind="mlx_lm",
            url=self.url,
            model=self._folder.resolve().name,
            build=f"mlx-lm {said.get('mlx_lm', 'unknown')}, mlx {said.get('mlx', 'unknown')}",
            n_vocab=said.get("n_vocab"),
            n_ctx=None,
            bos_id=bos,
            add_bos=self._add_bos,
            details={
                **facts,
                "model_path": str(self._folder.resolve()),
                **{name: said[name] for name in ("dtype", "device", "ends") if name in said},
            },
        )

    # ── one answer ───────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """Continue `prefix` greedily by up to `n` tokens, each with its `top_n` best (nats).

        `cache` takes over what the last answer computed of the prefix. The last item is a Finish.
        Raises an EngineError after the tokens that arrived.
        """
        started = time.monotonic()
        times: list[float] = []
        reason: Reason = "limit"
        lines = self._lines(prefix, n, top_n, cache)
        async with self._turn, contextlib.aclosing(lines):
            async for line in lines:
                if "id" in line:
                    times.append(time.monotonic())
                    yield self._token(line)
                elif line.get("end") == "eog":
                    reason = "eog"
        speed = None
        if len(times) > 1 and times[-1] > times[0]:
            speed = (len(times) - 1) / (times[-1] - times[0])
        yield Finish(reason, len(prefix), time.monotonic() - started, speed)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """The `top_n` best continuations of `prefix`, best first, ties by lowest id; nats."""
        lines = self._lines(prefix, 1, top_n, cache)
        async with self._turn, contextlib.aclosing(lines):
            async for line in lines:
                if "id" in line:
                    return self._token(line).top
        raise EngineBroke(f"{self.url}: it generated nothing")

    # ── a given text ─────────────────────────────────────────────────────────────────────────

    async def score_also(
        self,
        prefix: Sequence[int],
        targets: Sequence[int],
        also: Sequence[int | None],
        top_n: int,
        seen: Seen | None = None,
    ) -> list[Scored]:
        """What it says of each of `targets` after `prefix`, and of one other id at each; nats.

        In one forward pass. Raises EngineError.
        """
        request = {
            "ids": [int(id) for id in (*prefix, *targets)],
            "score": len(prefix),
            "top_n": top_n,
            "also": list(also),
        }
        found: list[Scored] = []
        async with self._turn, contextlib.aclosing(self._asked(request)) as lines:
            async for line in lines:
                if "id" in line:
                    token = self._token(line)
                    other = line.get("also")
                    found.append(Scored(token.id, token.logp, token.top, other))
                    if seen is not None:
                        seen(len(found))
        if [one.id for one in found] != list(targets):
            raise EngineBroke(f"{self.url}: it scored other tokens than were sent")
        return found

    async def rows(
        self, prefix: Sequence[int], targets: Sequence[int]
    ) -> AsyncGenerator[NDArray[np.float32], None]:
        """The logits that predict `targets` after `prefix`, float32[r, n_vocab], some at a time.

        In one forward pass. Raises EngineError.
        """
        if self._work is None:
            raise EngineError(f"{self.url}: not connected yet")
        n_vocab = int(self._facts["n_vocab"])
        request = {
            "ids": [int(id) for id in (*prefix, *targets)],
            "score": len(prefix),
            "rows": str(self._work / "rows"),
        }
        async with self._turn, contextlib.aclosing(self._asked(request)) as lines:
            async for line in lines:
                if "rows" in line:
                    file = self._work / Path(line["file"]).name
                    logits = await asyncio.to_thread(np.fromfile, file, np.float32)
                    file.unlink()
                    yield logits.reshape(int(line["rows"]), n_vocab)

    # ── lines ────────────────────────────────────────────────────────────────────────────────

    def _lines(
        self, prefix: Sequence[int], n: int, top_n: int, cache: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What the child says of a continuation."""
        ids = [int(id) for id in prefix]
        return self._asked({"ids": ids, "n": n, "top_n": top_n, "cache": cache})

    async def _asked(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What the child says, up to its `end`; closing this cancels the answer."""
        if self._child is None or self._work is None or not self._ready.is_set():
            raise EngineError(f"{self.url}: not connected yet")
        try:
            reader, writer = await asyncio.open_unix_connection(self._work / "s", limit=_LINE_BYTES)
        except OSError:
            raise await self._broke() from None
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            while True:
                async with asyncio.timeout(self._silence):
                    raw = await reader.readline()
                if not raw.endswith(b"\n"):
                    raise await self._broke()
                line = json.loads(raw)
                if "error" in line:
                    words = safe(str(line["error"]))
                    raise EngineRefused(f"{self.url}: it says {words!r}")
                yield line
                if "end" in line:
                    return
                if "rows" in line:
                    writer.write(b"\n")
        except TimeoutError:
            raise EngineBroke(f"{self.url}: it has stopped answering") from None
        except (OSError, ValueError):
            raise await self._broke() from None
        finally:
            writer.close()

    async def _broke(self) -> EngineError:
        child = self._child
        if child is not None and await asyncio.to_thread(child.done.wait, 2):
            return EngineBroke(self._death())
        return EngineBroke(f"{self.url}: it ended in mid-answer")

    def _token(self, line: dict[str, Any]) -> Token:
        try:
            top = best_first((int(id), log_probability(p)) for id, p in line["top"])
            logp = log_probability(line["logp"])
        except UnusableEngine as error:
            raise UnusableEngine(f"{self.url}: {error}") from None
        id = int(line["id"])
        return Token(id, self._vocabulary.piece(id) or b"", logp, top)

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The exact bytes of tokens, from the folder's tokenizer.json; none without one."""
        pieces = {id: self._vocabulary.piece(id) for id in ids}
        return {id: piece for id, piece in pieces.items() if piece}
