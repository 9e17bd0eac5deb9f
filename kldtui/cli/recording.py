"""`kldtui record`: how recordings come about. Its group, and `convert`, which needs no server.

Knows: options, and how progress is shown on a terminal.
Must not know: formats, servers, what a conversion does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, cast

import click

from kldtui.cli.lazy import LazyGroup
from kldtui.cli.progress import ProgressLine, duration
from kldtui.cli.values import CHUNKS, FILE, SOURCE
from kldtui.convert import Conversion, Full, Progress, Wanted
from kldtui.recordings import Recording, open_quant, open_recording
from kldtui.recordings.kld_stream import STDIN, KldStream, is_stream
from kldtui.vocab import Vocabulary, find_vocabulary
from kldtui.vocab.glyphs import safe

SUBCOMMANDS = {
    "score": (
        "kldtui.cli.record_live:score",
        "Record what a model says of a reference's tokens: a quant.",
    ),
    "rollout": (
        "kldtui.cli.record_live:rollout",
        "Let a model go on from prompts: a reference of its own.",
    ),
    "import": (
        "kldtui.cli.record_live:import_",
        "Make a reference of logged conversations.",
    ),
    "convert": (
        "kldtui.cli.recording:convert",
        "Make a run of a .kld file, a pipe, or a server's answers.",
    ),
}
"""name -> (module:attribute, one line of help)"""

_QUIET_SECONDS = 1.0


class _Record(LazyGroup):
    table = SUBCOMMANDS


@click.group(cls=_Record)
def record() -> None:
    """Make recordings: of what a model says of a stream, or of other files."""


class _Fulls(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A comma-separated choice of places where whole rows are kept."""

    name = "places"
    _known = ("roots", "tool-calls")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[Full]:
        if isinstance(value, frozenset):
            return value
        words = [word.strip() for word in str(value).split(",")]
        for word in words:
            if word not in self._known:
                self.fail(f"{word!r} is not one of {', '.join(self._known)}", param, ctx)
        return frozenset(cast(list[Full], words))


@click.command()
@click.argument("source", type=SOURCE, metavar="IN")
@click.option(
    "-o", "out", type=FILE, required=True, metavar="OUT", help="The run; it is gone on with."
)
@click.option(
    "--against",
    type=FILE,
    metavar="REF",
    help="The reference: exact KLD and the ref token's log p are kept at each position.",
)
@click.option(
    "--top-n",
    type=click.IntRange(1, 100_000),
    default=40,
    show_default=True,
    metavar="N",
    help="Tokens kept at each position.",
)
@click.option(
    "--full",
    type=_Fulls(),
    metavar="PLACES",
    help="Keep whole rows at roots, in tool-calls, or both: roots,tool-calls.",
)
@click.option("--chunks", type=CHUNKS, metavar="A-B", help="Only these chunks, both included.")
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="FILE",
    help="tokenizer.json, a GGUF file, or a folder with either (default: beside IN or REF).",
)
@click.option("--model", metavar="NAME", help="The model that IN is of, to be said in the run.")
@click.option("--gzip", "compress", is_flag=True, help="Compress (default where OUT is *.gz).")
def convert(
    source: str,
    out: Path,
    against: Path | None,
    top_n: int,
    full: frozenset[Full] | None,
    chunks: tuple[int, int] | None,
    tokenizer: Path | None,
    model: str | None,
    compress: bool,
) -> None:
    """Make a run of IN: a .kld file, a server's answers, or a .kld as it comes through a pipe.

    IN may be a named pipe that llama-perplexity writes to, or - for standard input. A conversion
    that was stopped goes on when the same command is given again.
    """
    wanted = Wanted(
        top_n=top_n,
        full=full or frozenset(),
        chunks=chunks,
        model=model,
        compress=compress or out.suffix == ".gz",
    )
    with ExitStack() as opened:
        ref = None if against is None else opened.enter_context(closing(open_recording(against)))

        def text() -> Vocabulary:
            return find_vocabulary([] if ref is None else [ref], tokenizer)

        given = opened.enter_context(closing(_open(source, ref, text)))
        vocab = find_vocabulary([given, *([ref] if ref else [])], tokenizer)
        job = Conversion(given, out, wanted, ref=ref, vocab=vocab)
        show_progress(job.run(), "converting")
    for line in _summary(job, out, wanted):
        click.echo(safe(line))


def _open(source: str, ref: Recording | None, text: Any) -> Recording:
    if is_stream(source):
        with _waiting("standard input" if source == STDIN else source):
            return KldStream(source)
    return open_recording(source) if ref is None else open_quant(source, ref, text)


@contextmanager
def _waiting(name: str) -> Iterator[None]:
    """Say so, where nothing comes for a while: a pipe is opened when its writer opens it."""
    words = f"{name}: waiting for a program that writes a .kld file to it; Ctrl-C ends this"
    timer = Timer(_QUIET_SECONDS, lambda: click.echo(f"kldtui: {safe(words)}", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _summary(job: Conversion, out: Path, wanted: Wanted) -> Iterator[str]:
    size = out.stat().st_size
    yield f"{out}: {size / 1e6:,.1f} MB; {job.positions:,} positions written this time"
    if job.exact:
        yield f"exact KLD at {job.exact:,} of them"
    if wanted.full:
        yield f"whole rows at {job.whole_rows:,} of them"


def show_progress(steps: Iterator[Progress], doing: str) -> None:
    """Go through the steps, and say how far they are."""
    try:
        with ProgressLine() as line:
            for step in steps:
                line(partial(_words, doing, step))
    except KeyboardInterrupt:
        click.echo("kldtui: stopped; the same command goes on from here", err=True)
        raise


def _words(doing: str, step: Progress) -> str:
    share = 100 * step.done / step.total if step.total else 100
    rate = f" at {step.bytes_per_s / 1e6:,.0f} MB/s" if step.bytes_per_s else ""
    left = "" if step.seconds_left is None else f", {duration(step.seconds_left)} left"
    return f"{doing}: {step.done:,} of {step.total:,} positions ({share:.0f} %){rate}{left}"
