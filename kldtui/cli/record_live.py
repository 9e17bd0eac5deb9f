"""Recording from models that answer: `record score`, `record rollout`, `record import`.

Knows: options, how an engine is named or started for a recording, and progress on a terminal.
Must not know: what is asked of an engine, or what a run looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from kldtui.branching import bos_rule, bos_warning
from kldtui.cli.progress import ProgressLine, duration
from kldtui.cli.values import CHUNKS
from kldtui.cli.values import FILE as _FILE
from kldtui.engines import Engine, open_engine, wait_ready
from kldtui.engines.base import EngineInfo
from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.mlx_child import MlxChild
from kldtui.engines.prompting import renderer
from kldtui.engines.supervise import ServedModel
from kldtui.errors import KldtuiError
from kldtui.recorder.progress import Progress
from kldtui.recorder.prompts import read_prompts
from kldtui.recorder.rollout import RolloutJob, Sampling, prompt_ids
from kldtui.recorder.score import ScoreJob
from kldtui.recorder.stream import OfChunks, OfRecording
from kldtui.recorder.trace import read_trace
from kldtui.recorder.turns import Reader, to_score
from kldtui.recorder.whole_rows import WholeRowsJob
from kldtui.recordings import open_recording
from kldtui.vocab.glyphs import safe

Command = TypeVar("Command", bound=Callable[..., Any])

_TOP_N = 40
_CTX = 8192
_CTX_HELP = f"With --model: tokens of context (default {_CTX})."
_WARNINGS = 8
_KEPT = "{} keeps what was recorded: the same command goes on"


def _engine_options(command: Command) -> Command:
    for decorate in (
        click.option(
            "--top-n",
            type=click.IntRange(1),
            default=_TOP_N,
            show_default=True,
            metavar="N",
            help="Best tokens kept at each position; vLLM gives 20 unless started for more.",
        ),
        click.option(
            "--gpu-layers",
            type=click.IntRange(0),
            metavar="N",
            help="With --model: how many layers go to the GPU (default: llama.cpp decides).",
        ),
        click.option(
            "--threads",
            type=click.IntRange(1),
            metavar="N",
            help="With --model: CPU threads (default: half of the cores, 8 at most).",
        ),
        click.option(
            "-o", "--output", required=True, type=_FILE, metavar="FILE", help="The run to write."
        ),
        click.option(
            "--mlx-model",
            type=_FILE,
            metavar="FOLDER",
            help="An MLX folder, which is run here (kldtui[mlx]).",
        ),
        click.option(
            "--model", type=_FILE, metavar="FILE.gguf", help="A GGUF file, which is served here."
        ),
        click.option("--server", metavar="URL", help="A server of the model."),
    ):
        command = decorate(command)
    return command


@click.command()
@click.argument("ref", type=_FILE)
@_engine_options
@click.option(
    "--chunks",
    type=CHUNKS,
    metavar="A-B",
    help="Only these chunks, both included (default: all of REF).",
)
@click.option("--all", "whole", is_flag=True, help="Every position, not only those REF scores.")
@click.option(
    "--stepwise", is_flag=True, help="Ask llama-server for one token at a time, without grammars."
)
@click.option(
    "--kld", is_flag=True, help="With --mlx-model: whole rows, as a .kld file; everything is exact."
)
def score(
    ref: Path,
    output: Path,
    top_n: int,
    chunks: tuple[int, int] | None,
    whole: bool,
    stepwise: bool,
    kld: bool,
    **source: Any,
) -> None:
    """Record what a model says of REF's tokens: a quant of REF, to compare with it.

    REF is a .kld file or a run. Stopped at any point, the same command goes on. API keys are
    read from KLDTUI_QUANT_API_KEY or KLDTUI_API_KEY.
    """
    source_of = click.get_current_context().get_parameter_source
    said = [
        option
        for option, name in (("--top-n", "top_n"), ("--stepwise", "stepwise"))
        if source_of(name) is ParameterSource.COMMANDLINE
    ]
    if kld and said:
        raise KldtuiError(f"--kld: a .kld file holds whole rows; leave out {' and '.join(said)}")

    if kld and (whole or (chunks is not None and chunks[0])):
        raise KldtuiError("--kld: a .kld file holds the scored half of all chunks from 0 on")
    with contextlib.closing(open_recording(ref)) as recording:
        stream = OfRecording(recording, chunks, whole=whole)
        asked: dict[str, Any] = {"ref": ref.name, "positions": "all" if whole else "scored"}
        if chunks is not None:
            asked["chunks"] = list(chunks)

        async def work(engine: Engine, info: EngineInfo, show: _Show) -> Progress:
            warning = bos_warning(recording, info.add_bos, info.bos_id)
            if warning is not None:
                _say(warning)
            add_bos, bos_id = bos_rule(recording, info.add_bos, info.bos_id)
            if kld:
                last = None if chunks is None else chunks[1]
                rows = WholeRowsJob(
                    engine, recording, output, last=last, add_bos=add_bos, bos_id=bos_id
                )
                return await rows.run(show)
            job = ScoreJob(
                engine,
                stream,
                output,
                top_n=top_n,
                add_bos=add_bos,
                bos_id=bos_id,
                fields={"asked": asked},
            )
            return await _scored(job, engine, show, stepwise)

        _run(work, _Source(**source, n_ctx=stream.longest), output, "positions")


@click.command()
@_engine_options
@click.option(
    "--prompts",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="Lines of text, or JSON lines with `prompt`, `tokens`, or `messages` and `tools`.",
)
@click.option(
    "-n",
    "length",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of a rollout, if it does not end before.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    metavar="T",
    help="Draw tokens instead of taking the most likely ones.",
)
@click.option("--seed", type=click.IntRange(0), default=0, metavar="S", help="With --temperature.")
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="With --temperature: rollouts of each prompt, with seeds S, S+1 …",
)
@click.option("--ctx", type=click.IntRange(2), metavar="N", help=_CTX_HELP)
@click.option(
    "--n-vocab",
    type=click.IntRange(1),
    metavar="N",
    help="The model's vocab_size, for servers that do not say it (vLLM).",
)
def rollout(
    prompts: Path,
    output: Path,
    top_n: int,
    length: int,
    temperature: float | None,
    seed: int,
    repeat: int,
    ctx: int | None,
    n_vocab: int | None,
    **source: Any,
) -> None:
    """Let a model go on from prompts by itself: a reference made of its own rollouts.

    Greedy, unless --temperature is given. Stopped at any point, the same command goes on. API
    keys are read from KLDTUI_REF_API_KEY or KLDTUI_API_KEY.
    """
    sampling = None
    if temperature is not None:
        sampling = Sampling(temperature, seed, repeat)
    elif seed or repeat > 1:
        raise KldtuiError("--seed and --repeat are for rollouts that are drawn: give --temperature")
    read = read_prompts(prompts)

    async def work(engine: Engine, _: EngineInfo, show: _Show) -> Progress:
        ids = await prompt_ids(engine, read, _say)
        job = RolloutJob(
            engine, read, ids, output, n=length, top_n=top_n, n_vocab=n_vocab, sampling=sampling
        )
        return await job.run(show)

    _run(work, _Source(**source, n_ctx=ctx or _CTX, role="ref"), output, "rollouts")


@click.command("import")
@click.argument("trace", type=_FILE)
@_engine_options
@click.option("--ctx", type=click.IntRange(2), metavar="N", help=_CTX_HELP)
@click.option(
    "--stepwise", is_flag=True, help="Ask llama-server for one token at a time, without grammars."
)
def import_(
    trace: Path,
    output: Path,
    top_n: int,
    ctx: int | None,
    stepwise: bool,
    **source: Any,
) -> None:
    """Make a reference of logged conversations, as they happened.

    TRACE has OpenAI messages with tools and tool calls, a conversation a line, or one in all. The
    server's own chat template renders them, and only what the model wrote is scored. Stopped at
    any point, the same command goes on.
    """
    conversations = read_trace(trace)

    async def work(engine: Engine, info: EngineInfo, show: _Show) -> Progress:
        if info.n_vocab is None:
            raise KldtuiError(f"{engine.url}: it does not say how large its vocabulary is")
        by = renderer(engine)
        reader = Reader(by, await by.end_ids() or frozenset())
        found = [chunk for one in conversations for chunk in await reader.chunks(one)]
        for words in reader.warnings[:_WARNINGS]:
            _say(f"{trace.name}: {words}")
        if len(reader.warnings) > _WARNINGS:
            _say(f"{trace.name}: and {len(reader.warnings) - _WARNINGS} more like these")
        if not found:
            raise KldtuiError(f"{trace}: nothing in it can be scored")
        chunks, tools = to_score(found)
        fields: dict[str, Any] = {"asked": {"trace": trace.name}}
        if tools:
            fields["tools"] = tools
        job = ScoreJob(
            engine,
            OfChunks(chunks, info.n_vocab),
            output,
            top_n=top_n,
            add_bos=False,
            bos_id=info.bos_id,
            fields=fields,
        )
        return await _scored(job, engine, show, stepwise)

    _run(work, _Source(**source, n_ctx=ctx or _CTX, role="ref"), output, "positions")


async def _scored(job: ScoreJob, engine: Engine, show: _Show, stepwise: bool) -> Progress:
    """Run a job, and say where its numbers are not the same each time."""
    llama = job.by.scorer if isinstance(job.by, LlamaServer) else None
    if llama is not None:
        llama.grammar = not stepwise
    elif stepwise:
        raise KldtuiError(
            f"{engine.url}: --stepwise is for llama-server, which alone is asked with grammars; "
            "leave it out"
        )
    last = await job.run(show)
    if llama is not None and llama.recomputed:
        show.end()
        _say(
            f"{engine.url}: it did not keep what it had computed, and computed "
            f"{llama.recomputed} tokens again: last digits differ from run to run; serve nobody "
            "else meanwhile, with -np 1"
        )
    return last


# -- engines -------------------------------------------------------------------------------------


class _Source:
    """The engine that a command names: at a URL, or a GGUF file that is served meanwhile."""

    def __init__(
        self,
        server: str | None,
        model: Path | None,
        mlx_model: Path | None,
        threads: int | None,
        gpu_layers: int | None,
        *,
        n_ctx: int,
        role: Literal["ref", "quant"] = "quant",
    ) -> None:
        if sum(one is not None for one in (server, model, mlx_model)) != 1:
            raise KldtuiError(
                "give the model, once: --server URL, --model FILE.gguf or --mlx-model FOLDER"
            )
        self._server, self._model, self._mlx, self._role = server, model, mlx_model, role
        self._n_ctx, self._threads, self._gpu_layers = n_ctx, threads, gpu_layers

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[tuple[Engine, EngineInfo]]:
        """It, connected; what was started for it is ended."""
        async with contextlib.AsyncExitStack() as stack:
            url, build = self._server, ""
            if self._model is not None:
                _say(f"loading {self._model.name}")
                n_ctx = 256 * math.ceil((self._n_ctx + 1) / 256)
                served = ServedModel(
                    self._model,
                    n_ctx=n_ctx,
                    threads=self._threads,
                    gpu_layers=self._gpu_layers,
                )
                await stack.enter_async_context(served)
                url, build = served.url, served.program
            engine: Engine
            if self._mlx is not None:
                _say(f"loading {self._mlx.name}")
                engine = MlxChild(self._mlx)
            else:
                engine = open_engine(url or "", self._role, build=build)
            stack.push_async_callback(engine.close)
            told = False

            def waiting(_: float) -> None:
                nonlocal told
                if not told and self._mlx is None:
                    _say(f"{engine.url} loads its model; waiting")
                told = True

            info = await wait_ready(engine, waiting)
            for warning in info.warnings:
                _say(f"{engine.url}: {warning}")
            yield engine, info


# -- what is shown meanwhile ---------------------------------------------------------------------


def _run(
    work: Callable[[Engine, EngineInfo, _Show], Awaitable[Progress]],
    source: _Source,
    output: Path,
    what: str,
) -> None:
    """Run to the end, with progress; where it is interrupted, say that it can go on."""
    show = _Show(what)
    began = time.monotonic()

    async def whole() -> Progress:
        async with source.engine() as (engine, info):
            return await work(engine, info, show)

    try:
        last = asyncio.run(whole())
    except KeyboardInterrupt:
        show.end()
        _say(f"stopped; {_KEPT.format(output)}" if output.exists() else "stopped")
        raise
    except KldtuiError:
        show.end()
        if show.new:
            _say(_KEPT.format(output))
        raise
    show.end()
    new = last.done - last.before
    size = f"{output.stat().st_size / 1e6:.1f} MB"
    if new:
        took = duration(time.monotonic() - began)
        rate = f", {last.per_second:.1f}/s" if last.per_second else ""
        click.echo(f"{safe(str(output))}: {new} {what} in {took}{rate}; {size}")
    else:
        click.echo(f"{safe(str(output))}: is whole already ({last.done} {what}; {size})")


class _Show:
    """How far a recording is."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = ProgressLine()
        self.end = self._line.end
        self.new = 0
        """What was done since it began."""

    def __call__(self, progress: Progress) -> None:
        self.new = progress.done - progress.before
        self._line(lambda: self._words(progress))

    def _words(self, progress: Progress) -> str:
        share = 100 * progress.done / progress.total if progress.total else 100.0
        rate = f", {progress.per_second:.1f}/s" if progress.per_second else ""
        left = progress.seconds_left
        remaining = "" if left is None else f", {duration(left)} left"
        done = f"{progress.done} of {progress.total} {self._what}"
        return f"{done} ({share:.0f} %){rate}{remaining}"


def _say(words: str) -> None:
    click.echo(f"kldtui: {safe(words)}", err=True)
