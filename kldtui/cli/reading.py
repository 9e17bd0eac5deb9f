"""Headless commands that only read recordings: stats, flips, inspect.

Knows: options, and how a result becomes lines or JSON on a terminal.
Must not know: Textual, engines, labels, or how any number is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from kldtui.cli.printing import print_json
from kldtui.cli.progress import scan_here
from kldtui.cli.values import FILE, NATS, SOURCE, refuse_floor
from kldtui.config import load_config
from kldtui.errors import KldtuiError
from kldtui.index import Index, keeper
from kldtui.index.scanfile import ScanFile, is_scan_file
from kldtui.position import Position
from kldtui.recordings import Recording, describe, name_files, open_quant, open_recording
from kldtui.report import flip_rows, format_flips, format_stats, pair_stats, runs_of
from kldtui.roots import RootQuery, Sort, Thresholds, near_tie_from_floor
from kldtui.vocab import Vocabulary, find_vocabulary
from kldtui.vocab.glyphs import safe

Command = TypeVar("Command", bound=Callable[..., Any])


def _pair_options(command: Command) -> Command:
    """REF, --quant and what decides on near ties."""
    for decorate in (
        click.option(
            "--json", "as_json", is_flag=True, help="JSON instead of text (docs/json.md)."
        ),
        click.option(
            "--tokenizer",
            type=FILE,
            metavar="FILE",
            help="tokenizer.json, a GGUF file, or a folder with either (default: beside REF).",
        ),
        click.option(
            "--near-tie",
            type=NATS,
            metavar="X",
            help="Roots that cost under X nat are near ties. Default: what --floor measures, else "
            "the config file's near_tie, else 0.3.",
        ),
        click.option(
            "--floor",
            type=FILE,
            metavar="FILE",
            help="The reference's own model recorded again with another micro-batch (-ub).",
        ),
        click.option(
            "--quant",
            "quants",
            multiple=True,
            type=SOURCE,
            metavar="[NAME=]FILE",
            help="A quant's recording (.kld, run, a server's answers); may be given several times.",
        ),
        click.argument("ref", type=FILE),
    ):
        command = decorate(command)
    return command


@click.command()
@_pair_options
def stats(
    ref: Path,
    quants: tuple[str, ...],
    floor: Path | None,
    near_tie: float | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Print what llama-perplexity prints for REF and each quant, and what it does not count."""
    with _opened(ref, quants, floor, tokenizer) as pair:
        thresholds = pair.scan(near_tie)
        runs = runs_of(pair.index, pair.recordings[0])
        null = None
        if pair.floor_number is not None:
            null = pair_stats(pair.index, pair.floor_number, thresholds, runs)
        found = [
            (name, pair_stats(pair.index, i, thresholds, runs)) for i, name in enumerate(pair.names)
        ]
    if as_json:
        beside = null.to_json() if null else None
        print_json([{"quant": name} | each.to_json() | {"floor": beside} for name, each in found])
        return
    for i, (name, each) in enumerate(found):
        if i:
            click.echo()
        click.echo(f"{safe(name)} against {safe(ref.name)}\n")
        click.echo(format_stats(each, null))


@click.command()
@_pair_options
@click.option(
    "--sort",
    type=click.Choice(["position", "cost", "kld", "margin"]),
    default="position",
    show_default=True,
    help="Descending, but for position.",
)
@click.option(
    "--min-cost", type=NATS, default=0.0, metavar="X", help="Only roots of at least X nat."
)
@click.option("--chunk", type=click.IntRange(min=0), metavar="N", help="Only this chunk.")
@click.option("--moved", is_flag=True, help="Positions without a flip, with the KLD of a root.")
@click.option("--ties", is_flag=True, help="Ties instead of roots.")
def flips(
    ref: Path,
    quants: tuple[str, ...],
    floor: Path | None,
    near_tie: float | None,
    as_json: bool,
    sort: str,
    min_cost: float,
    chunk: int | None,
    moved: bool,
    ties: bool,
    tokenizer: Path | None,
) -> None:
    """List the flip roots: where a quant's argmax is not the reference's."""
    if moved and ties:
        raise click.UsageError("--moved and --ties are two lists; ask for one")
    if min_cost and (moved or ties):
        raise click.UsageError("--min-cost is for the roots, not for --moved or --ties")
    with _opened(ref, quants, floor, tokenizer) as pair:
        last = pair.recordings[0].shape.n_chunk - 1
        if chunk is not None and chunk > last:
            raise KldtuiError(f"there is no chunk {chunk}; the last of {ref} is {last}")
        vocab = find_vocabulary(pair.recordings, tokenizer)
        thresholds = pair.scan(near_tie)
        query = RootQuery(
            sort=cast(Sort, sort),
            chunk=chunk,
            min_cost=min_cost,
            kind="moved" if moved else "ties" if ties else "roots",
        )
        rows = flip_rows(
            pair.index, pair.names, pair.stream_id, query, thresholds, vocab, pair.floor_number
        )
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    for line in format_flips(rows, vocab):
        click.echo(line)
    if not vocab and vocab.hint:
        click.echo(f"kldtui: {safe(vocab.hint)}", err=True)


@click.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text (docs/json.md).")
def inspect(file: Path, as_json: bool) -> None:
    """Say what a recording holds and what is wrong with it."""
    found = describe(file).to_json()
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if name != "problems":
            click.echo(f"{name + ':':<18}{'unknown' if value is None else value}")
    for problem in found["problems"] or ["none"]:
        click.echo(f"{'problems:':<18}{safe(problem)}")


# -- what they share -----------------------------------------------------------------------------


class _Pair:
    """The recordings of one command, and the index over them."""

    def __init__(
        self, index: Index, recordings: Sequence[Recording], names: Sequence[str], floor: bool
    ) -> None:
        """recordings: the reference's, then the quants'; names: the quants'."""
        self.names = list(names[: len(names) - floor])
        self.recordings = list(recordings)
        self.index = index
        self.floor_number = len(self.names) if floor else None
        self._chunk: tuple[int, Any] = (-1, None)

    def scan(self, near_tie: float | None) -> Thresholds:
        """Scan to the end, with progress on a terminal, and settle what a near tie is."""
        scan_here(self.index)
        if near_tie is not None:
            return Thresholds(near_tie, "given")
        if self.floor_number is not None:
            measured = near_tie_from_floor(self.index, self.floor_number)
            if not math.isnan(measured):
                return Thresholds(measured, "floor")
        return Thresholds(load_config().near_tie)

    def stream_id(self, position: Position) -> int:
        if self._chunk[0] != position.chunk:
            self._chunk = (position.chunk, self.recordings[0].tokens(position.chunk))
        return int(self._chunk[1][position.t])


@contextmanager
def _opened(
    ref: Path, quants: tuple[str, ...], floor: Path | None, tokenizer: Path | None
) -> Iterator[_Pair]:
    opened: list[Recording] = []

    def text() -> Vocabulary:
        return find_vocabulary(opened[:1], tokenizer)

    try:
        if ref.is_file() and is_scan_file(ref):
            yield _absent(ref, quants, floor)
            return
        if not quants:
            raise click.UsageError("Missing option '--quant'.")
        files = name_files(quants)
        refuse_floor(floor, ref, files)
        opened.append(open_recording(ref))
        named = []
        for name, path in files:
            opened.append(open_quant(path, opened[0], text))
            named.append((name, opened[-1]))
        if floor is not None:
            opened.append(open_quant(floor, opened[0], text))
            named.append(("floor", opened[-1]))
        index = Index(opened[0], opened[1:], keeper())
        try:
            yield _Pair(index, opened, [name for name, _ in named], floor is not None)
        finally:
            index.close()
    finally:
        for recording in opened:
            recording.close()


def _absent(path: Path, quants: tuple[str, ...], floor: Path | None) -> _Pair:
    """An index file in place of the recordings."""
    if quants or floor is not None:
        raise click.UsageError(f"{path} is an index file, with quants of its own; name no others")
    file = ScanFile.open(path)
    index, recordings = file.index(keeper())
    return _Pair(index, recordings, file.names, file.floor)
