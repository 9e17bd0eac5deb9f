"""The commands that open a screen: `open` (the default) and `demo`.

Knows: which options a review takes, and how to set one up.
Must not know: anything of what happens on the screen.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
from pathlib import Path

import click

from kldtui.cli.engines import add_engines, quant_engine_options, ref_engine_options
from kldtui.cli.values import FILE, NATS, SOURCE, configured, refuse_floor
from kldtui.config import Config, load_config
from kldtui.demo import Demo
from kldtui.errors import KldtuiError
from kldtui.recordings import name_files
from kldtui.review.session import Session

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
_LARGE_BYTES = 2 << 20
"""More than any array of a scan, so that it is not slowed."""


@click.command("open")
@click.argument("ref", type=FILE)
@click.option(
    "--quant",
    "quants",
    multiple=True,
    type=SOURCE,
    metavar="[NAME=]FILE",
    help="A quant's recording; may be given several times.",
)
@click.option(
    "--floor",
    type=FILE,
    metavar="FILE",
    help="The reference recorded again with another micro-batch: the noise floor.",
)
@click.option(
    "--tokenizer",
    type=FILE,
    metavar="FILE",
    help="tokenizer.json, a GGUF file, or a folder that holds either.",
)
@ref_engine_options
@quant_engine_options
@click.option(
    "--branches",
    "branch_files",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="Branches made ahead with kldtui branch -o; may be given several times.",
)
@click.option(
    "--labels",
    type=FILE,
    metavar="FILE",
    help="The label file. Default: named after the recordings, in the working directory.",
)
@click.option(
    "--reviewer",
    metavar="NAME",
    help="Who labels. Default: the config file's, else your login name.",
)
@click.option(
    "--near-tie",
    type=NATS,
    metavar="NATS",
    help="A root that costs less is a near tie. Default: what --floor measures, else the config "
    "file's near_tie, else 0.3.",
)
@configured(
    "branch_tokens",
    "--branch-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="How many tokens a branch gets at a time.",
)
def open_(
    ref: Path,
    quants: tuple[str, ...],
    floor: Path | None,
    tokenizer: Path | None,
    ref_server: str | None,
    ref_model: Path | None,
    quant_servers: tuple[str, ...],
    quant_models: tuple[str, ...],
    branch_files: tuple[Path, ...],
    labels: Path | None,
    reviewer: str | None,
    near_tie: float | None,
    branch_tokens: int,
) -> None:
    """Review where quants depart from REF, a recording of the reference."""
    config = dataclasses.replace(_config(), branch_tokens=branch_tokens)
    files = name_files(quants)
    refuse_floor(floor, ref, files)
    session = Session.open(
        ref,
        files,
        floor=floor,
        tokenizer=tokenizer,
        near_tie=near_tie,
        default_near_tie=config.near_tie,
    )
    try:
        if session.quants:
            session.keep_labels(labels, reviewer or config.reviewer_name)
        session.branch_tokens = config.branch_tokens
        for path in branch_files:
            session.open_branches(path)
        add_engines(session, ref_server, ref_model, quant_servers, quant_models)
        _run(session, config)
    finally:
        session.close()


@click.command()
@click.option(
    "--labels",
    type=FILE,
    metavar="FILE",
    help="The label file. Default: demo.labels.json in the working directory.",
)
def demo(labels: Path | None) -> None:
    """Review a packaged pair; its small model is fetched and served here meanwhile."""
    config = _config()
    with Demo() as running:
        pair = running.open()
        session = Session.open(
            pair.ref,
            [("q5_0", pair.quant)],
            floor=pair.floor,
            tokenizer=pair.tokenizer,
            default_near_tie=config.near_tie,
        )
        try:
            session.keep_labels(labels or Path("demo.labels.json"), config.reviewer_name)
            _run(session, config, running)
        finally:
            session.close()


def _config() -> Config:
    """The settings, their keys checked against the actions there are. Raises ConfigError."""
    from kldtui.ui.actions import BY_ID, check_clashes
    from kldtui.ui.app import check_theme

    config = load_config()
    config.check_keys(BY_ID)
    check_clashes(config.keys)
    check_theme(config.theme)
    return config


def _give_back_memory() -> None:
    """Have freed arrays given back to the system at once, where the C library is glibc.

    It keeps blocks of up to 32 MB for later once it has seen some freed, for each thread its own: a
    few lists of a million roots, and half of the program's memory is kept for nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def _run(session: Session, config: Config, running: Demo | None = None) -> None:
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise KldtuiError(
            "a review needs a terminal; without one use: kldtui stats, flips, inspect, branch"
        )
    from kldtui.ui.app import KldtuiApp

    _give_back_memory()
    app = KldtuiApp(session, config, running)
    app.run()
    if app.return_code:
        raise click.exceptions.Exit(app.return_code)
