"""Headless commands about the index: `scan` makes it, `cache` looks after what is kept of it.

Knows: options, progress on a terminal, and how an index becomes a file.
Must not know: Textual, engines, how a scan is done or a file laid out.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import click

from kldtui.cli.printing import print_json
from kldtui.cli.progress import show
from kldtui.cli.values import CHUNKS, DAYS, MEGABYTES, SOURCE, refuse_floor
from kldtui.cli.values import FILE as _FILE
from kldtui.errors import KldtuiError
from kldtui.index import Index, Progress, index_folder, keeper
from kldtui.index.cache import MAX_BYTES, MAX_DAYS, Saved, prune, saved_tables
from kldtui.index.merge import merge_scans
from kldtui.index.scan_writer import place_for, write_scan
from kldtui.index.scanfile import ScanFile, in_words
from kldtui.labels.identity import identity_of
from kldtui.recordings import Recording, name_files, open_quant, open_recording
from kldtui.vocab import find_vocabulary
from kldtui.vocab.glyphs import safe

_DAY = 86400


@click.command()
@click.argument("files", type=_FILE, nargs=-1, required=True, metavar="REF | FILE FILE…")
@click.option(
    "--quant",
    "quants",
    multiple=True,
    type=SOURCE,
    metavar="[NAME=]FILE",
    help="A quant's recording; may be given several times: one pass serves all.",
)
@click.option("--floor", type=_FILE, metavar="FILE", help="The null recording.")
@click.option(
    "-o", "--output", type=_FILE, metavar="FILE", help="Write an index file to carry away."
)
@click.option("--chunks", type=CHUNKS, metavar="A-B", help="Only these chunks, both included.")
@click.option("--merge", is_flag=True, help="Join index files of parts of one stream into -o FILE.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Processes that scan (threads, for small files). Default: one a core, at most 8.",
)
@click.option(
    "--dask", metavar="SCHEDULER", help="Scan on a dask cluster, such as tcp://host:8786."
)
@click.option(
    "--tokenizer", type=_FILE, metavar="FILE", help="For the text of the tokens, in -o FILE too."
)
def scan(
    files: tuple[Path, ...],
    quants: tuple[str, ...],
    floor: Path | None,
    output: Path | None,
    chunks: tuple[int, int] | None,
    merge: bool,
    workers: int | None,
    dask: str | None,
    tokenizer: Path | None,
) -> None:
    """Scan REF and its quants now, so that a review shows all roots at once.

    With -o the index goes into a file that `kldtui FILE` reviews where the recordings are not.
    A scan that was stopped goes on where it was.
    """
    if output is not None:
        place_for(output)  # not only after an hour of scanning
    if merge:
        if quants or floor or chunks or dask or workers or tokenizer:
            raise click.UsageError("--merge takes index files and -o FILE, nothing else")
        if output is None:
            raise click.UsageError("--merge: say where to, with -o FILE")
        _say_written(output, merge_scans(files, output))
        return
    if len(files) > 1:
        raise click.UsageError("give one REF, and quants with --quant; --merge joins index files")
    if not quants and floor is None:
        raise click.UsageError("give at least one quant: --quant FILE")
    if chunks is not None:
        chunks = chunks[0], chunks[1] + 1  # an index leaves out the last
    wanted = name_files(quants)
    refuse_floor(floor, files[0], wanted)
    wanted += [("floor", floor)] if floor is not None else []
    paths = [files[0], *(path for _, path in wanted)]
    with _opened(paths, tokenizer) as (ref, *others):
        held = ref.shape.n_chunk
        if chunks is not None and chunks[0] >= held:
            raise KldtuiError(
                f"{files[0]} has no {in_words(*chunks)}; it has {in_words(0, held)}: give others "
                "with --chunks"
            )
        named = [(name, other) for (name, _), other in zip(wanted, others, strict=True)]
        index = Index(ref, others, keeper())
        try:
            if output is None and not index.kept:
                raise KldtuiError(
                    f"{index_folder()}: no index can be kept there (is it full, or read-only?); "
                    "write one with -o FILE, or name another folder in KLDTUI_CACHE"
                )
            if dask is not None:
                from kldtui.index.cluster import scan_on_cluster

                there = [path.absolute() for path in paths]
                opened = partial(_opened, there, tokenizer and tokenizer.absolute())
                show(lambda _: scan_on_cluster(dask, index, opened, chunks), log=True)
            else:
                count = workers or min(8, os.cpu_count() or 1)
                show(lambda stop: _scan(index, stop, count, chunks), log=True)
            if output is not None:
                known = [identity_of(ref), *(identity_of(r, name) for name, r in named)]
                write_scan(
                    output,
                    index,
                    ref,
                    named,
                    floor=floor is not None,
                    chunks=chunks,
                    label_identities=known,
                    piece=find_vocabulary([ref, *others], tokenizer).piece,
                )
                _say_written(output, ScanFile.open(output))
        finally:
            index.close()


def _scan(
    index: Index, stop: threading.Event, count: int, chunks: tuple[int, int] | None
) -> Iterator[Progress]:
    crew = index.crew(count) if count > 1 else None
    with crew or nullcontext():
        yield from index.scan(stop, workers=count, chunks=chunks, crew=crew)


@contextmanager
def _opened(paths: Sequence[Path], tokenizer: Path | None) -> Iterator[list[Recording]]:
    """The reference and its quants, here or on a worker of a cluster."""
    opened = [open_recording(paths[0])]
    try:
        for path in paths[1:]:
            opened.append(
                open_quant(path, opened[0], lambda: find_vocabulary(opened[:1], tokenizer))
            )
        yield opened
    finally:
        for recording in opened:
            recording.close()


def _say_written(path: Path, file: ScanFile) -> None:
    first, last = file.positions
    size = path.stat().st_size
    words = (
        f"{in_words(*file.chunks)}, {last - first:,} positions, {', '.join(map(safe, file.names))}"
    )
    click.echo(f"wrote {safe(str(path))}: {words}, {size / 1e6:,.1f} MB")


# -- the cache ------------------------------------------------------------------------------------


@click.group()
def cache() -> None:
    """Look after saved indexes: they are found again by what the recordings are."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text (docs/json.md).")
def list_(as_json: bool) -> None:
    """List saved indexes, the last used first."""
    found = saved_tables(index_folder())
    if as_json:
        print_json([_to_json(each) for each in found])
        return
    for each in found:
        click.echo(_line(each))
    total = sum(each.bytes for each in found)
    click.echo(f"{len(found)} tables, {total / 1e6:,.1f} MB in {safe(str(index_folder()))}")


@cache.command("clear")
def clear() -> None:
    """Remove all saved indexes but those that a program is filling."""
    _say_removed(prune(index_folder(), -math.inf))


@cache.command("prune")
@click.option(
    "--days",
    type=DAYS,
    default=MAX_DAYS,
    show_default=True,
    help="Remove what was not used for so long.",
)
@click.option(
    "--megabytes",
    type=MEGABYTES,
    default=MAX_BYTES / 1e6,
    show_default="2147",
    help="Then the longest unused beyond so much in all.",
)
def prune_(days: float, megabytes: float) -> None:
    """Remove saved indexes that are old, or too many. Every scan does so with the defaults.

    The last used stays, whatever its size, and what a program is filling.
    """
    _say_removed(prune(index_folder(), days, int(megabytes * 1e6)))


def _to_json(each: Saved) -> dict[str, object]:
    return {
        "path": str(each.path),
        "recordings": list(each.names),
        "positions": each.positions,
        "bytes": each.bytes,
        "used": each.used,
        "busy": each.busy,
    }


def _line(each: Saved) -> str:
    names = " → ".join(safe(Path(name).name) for name in each.names) or "damaged"
    days = (time.time() - each.used) / _DAY
    used = "today" if days < 1 else f"{days:.0f} days ago"
    busy = "  being filled" if each.busy else ""
    return f"{each.bytes / 1e6:>8.1f} MB {each.positions:>12,} positions  {used:<12} {names}{busy}"


def _say_removed(removed: list[Saved]) -> None:
    freed = sum(each.bytes for each in removed)
    click.echo(f"removed {len(removed)} tables, {freed / 1e6:,.1f} MB")
