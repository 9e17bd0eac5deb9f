"""Let a model go on from prompts, and record it: a run of rollouts, a reference of its own.

Knows: prompts, engines that generate, and the order of a run's lines.
Must not know: what any server is asked, the command line.

A rollout is recorded when it is done, so that one that was broken off is made again. Greedy ones
come out the same then; those that were drawn do as far as the server's seed tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kldtui.engines.base import Engine, EngineInfo, Finish, Token
from kldtui.engines.prompting import encoder, leaves_out_tools, renderer, sampler
from kldtui.errors import ContextExceeded, EngineBroke, EngineError, RecordingError, UnusableEngine
from kldtui.position import Position
from kldtui.recorder.files import Pieces, begin_or_go_on, engine_fields, has_all, settled_top_n
from kldtui.recorder.progress import Meter, Progress
from kldtui.recorder.prompts import Prompt
from kldtui.recordings.run_writer import RunWriter


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. repeat: rollouts of each prompt, with seeds seed, seed + 1 …"""

    temperature: float
    seed: int = 0
    repeat: int = 1

    def to_json(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "repeat": self.repeat}


async def prompt_ids(
    engine: Engine, prompts: Sequence[Prompt], warn: Callable[[str], None] | None = None
) -> list[list[int]]:
    """The ids of prompts, as the server would read them: conversations rendered by its own
    template. `warn` gets a line where that leaves something out. Raises EngineError."""
    out = []
    for prompt in prompts:
        if prompt.ids is not None:
            out.append(list(prompt.ids))
        elif prompt.text is not None:
            out.append(await encoder(engine).encode(prompt.text))
        else:
            by = renderer(engine)
            conversation = prompt.conversation or {}
            out.append(await by.encode(await by.render(conversation)))
            if warn is not None and await leaves_out_tools(by, conversation):
                words = "the template leaves out the tools: the model is never shown them"
                warn(f"line {prompt.line}: {words}")
        if not out[-1]:
            raise EngineError(f"{engine.url}: the prompt of line {prompt.line} has no tokens")
    return out


class RolloutJob:
    """A run of rollouts of up to `n` tokens from each prompt, greedy unless `sampling` is given."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        ids: Sequence[Sequence[int]],
        path: Path,
        *,
        n: int,
        top_n: int,
        n_vocab: int | None = None,
        sampling: Sampling | None = None,
        created: datetime | None = None,
    ) -> None:
        """Of a connected engine; `ids` are the prompts' (`prompt_ids`). n_vocab: where the
        server does not say it. Raises EngineError where it cannot do this."""
        info = engine.info
        if info is None:
            raise EngineError(f"{engine.url}: not connected yet")
        size = info.n_vocab or n_vocab
        if size is None:
            raise UnusableEngine(
                f"{engine.url}: it does not say how large its vocabulary is; give --n-vocab N, "
                "the model's vocab_size"
            )
        _check(engine, info, prompts, ids, size)
        if sampling is not None:
            sampler(engine)
        self._engine, self._prompts, self._ids, self._path = engine, prompts, ids, path
        self._n, self._sampling = n, sampling
        self._repeat = sampling.repeat if sampling is not None else 1
        self._top_n = top_n
        self._tools = _distinct(prompt.tools for prompt in prompts)
        digest = hashlib.sha256(json.dumps([list(one) for one in ids]).encode()).hexdigest()
        fields: dict[str, Any] = {"asked": {"prompts": digest, "n": n}}
        if sampling is not None:
            fields["sampling"] = sampling.to_json()
        if self._tools:
            fields["tools"] = self._tools
        settings = engine.settings
        if sampling is not None:
            settings = {**settings, "temperature": sampling.temperature, "seed": sampling.seed}
        self._header: dict[str, Any] = {
            "kind": "rollout",
            "n_ctx": max(map(len, ids)) + n,
            "n_vocab": size,
            "n_chunk": len(ids) * self._repeat,
            "n_positions": None,
            "engine": engine_fields(info, settings),
            "add_bos": False,
            "bos_id": info.bos_id,
            "fields": fields,
            "created": created,
        }

    async def run(self, tell: Callable[[Progress], None] | None = None) -> Progress:
        """Record the rollouts that are missing; progress is counted in rollouts.

        Raises RecordingError for a file that was begun otherwise, EngineError where the engine
        fails: what was recorded stays, and running it again goes on from there.
        """
        total = len(self._ids) * self._repeat
        self._top_n = await settled_top_n(self._engine, self._top_n, int(self._ids[0][0]))
        with begin_or_go_on(self._path, top_n=self._top_n, **self._header) as writer:
            pieces = Pieces(self._engine, writer)
            pieces.recall()
            whole = max(0, writer.n_chunk - 1)
            meter = Meter(whole, total, tell)
            for number in range(whole, total):
                await self._one(writer, number, pieces)
                await pieces.store()
                meter.at(number + 1)
            meter.at(total, now=True)
            return meter.progress

    async def _one(self, writer: RunWriter, number: int, pieces: Pieces) -> None:
        which, sample = divmod(number, self._repeat)
        prompt = [int(id) for id in self._ids[which]]
        start = len(prompt)
        if number < writer.n_chunk:
            held = writer.tokens(number).tolist()
            if held[:start] != prompt:
                raise RecordingError(
                    f"{writer.path}: chunk {number} is of another prompt; record to another path"
                )
            if has_all(writer, number, range(start, len(held))):
                return
        tokens, finish = await self._generated(prompt, sample)
        ids = [*prompt, *(token.id for token in tokens)]
        if number == writer.n_chunk:
            writer.chunk(ids, prompt_length=start, fields=self._told(which, sample, finish, ids))
        elif writer.tokens(number).tolist() != ids:
            raise RecordingError(
                f"{writer.path}: the server goes on otherwise from the prompt of line "
                f"{self._prompts[which].line} than when it was stopped; record to another path, "
                "with the server started with -np 1"
            )
        for k, token in enumerate(tokens):
            if not writer.has(Position(number, start + k)):
                writer.position(Position(number, start + k), token.top, logp=token.logp)
            pieces.add(id for id, _ in token.top)
        pieces.add(ids)

    def _told(self, which: int, sample: int, finish: Finish, ids: Sequence[int]) -> dict[str, Any]:
        prompt = self._prompts[which]
        told: dict[str, Any] = {
            "stop": finish.reason,
            "turns": [[len(self._ids[which]), len(ids)]],
            "source": {"line": prompt.line},
        }
        if prompt.tools:
            told["tools"] = self._tools.index(prompt.tools)
        if self._sampling is not None:
            told |= {"sample": sample, "seed": self._sampling.seed + sample}
        return told

    async def _generated(self, prompt: Sequence[int], sample: int) -> tuple[list[Token], Finish]:
        """A whole rollout. Raises EngineError, also for one without a token."""
        tokens: list[Token] = []
        finish: Finish | None = None
        async with contextlib.aclosing(self._asked(prompt, sample)) as items:
            async for item in items:
                if isinstance(item, Finish):
                    finish = item
                else:
                    tokens.append(item)
        if finish is None or not tokens:
            raise EngineBroke(f"{self._engine.url}: it generated nothing")
        return tokens, finish

    def _asked(self, prompt: Sequence[int], sample: int) -> AsyncGenerator[Token | Finish, None]:
        if self._sampling is None:
            return self._engine.generate(prompt, self._n, self._top_n)
        return sampler(self._engine).sample(
            prompt,
            self._n,
            self._top_n,
            temperature=self._sampling.temperature,
            seed=self._sampling.seed + sample,
        )


def _check(
    engine: Engine,
    info: EngineInfo,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    n_vocab: int,
) -> None:
    for prompt, one in zip(prompts, ids, strict=True):
        if max(one) >= n_vocab:
            raise EngineError(
                f"{engine.url}: the prompt of line {prompt.line} has id {max(one)}, and the model "
                f"{n_vocab} tokens"
            )
        if info.n_ctx is not None and len(one) >= info.n_ctx:
            raise ContextExceeded(
                f"{engine.url}: the prompt of line {prompt.line} has {len(one)} tokens, its "
                f"context {info.n_ctx}; start it with a larger one (-c)"
            )


def _distinct(lists: Any) -> list[Any]:
    out: list[Any] = []
    for one in lists:
        if one and one not in out:
            out.append(one)
    return out
