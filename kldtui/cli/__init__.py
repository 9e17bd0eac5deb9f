"""The command line: which commands there are, and how it ends when something goes wrong.

Knows: the names of the commands and where each is; that `open` is meant where none is named.
Must not know: what a command does. Commands are imported when they are called, so that the
headless ones never load the user interface.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from kldtui import __version__
from kldtui.cli.lazy import LazyGroup
from kldtui.errors import KldtuiError
from kldtui.vocab.glyphs import safe

COMMANDS = {
    "open": (
        "kldtui.cli.reviewing:open_",
        "Review a reference and its quants on screen (default).",
    ),
    "demo": ("kldtui.cli.reviewing:demo", "Review a packaged pair, with its model served here."),
    "stats": ("kldtui.cli.reading:stats", "Print what llama-perplexity prints, and counts."),
    "flips": ("kldtui.cli.reading:flips", "List where a quant picks another token."),
    "inspect": (
        "kldtui.cli.reading:inspect",
        "Say what a recording holds and what is wrong with it.",
    ),
    "scan": ("kldtui.cli.scanning:scan", "Scan now, or make an index file to carry away."),
    "cache": ("kldtui.cli.scanning:cache", "List, clear or prune saved indexes."),
    "labels": ("kldtui.cli.labelling:labels", "Summarise a label file."),
    "record": ("kldtui.cli.recording:record", "Make recordings, and runs of other files."),
    "answers": ("kldtui.cli.answers:answers", "Count the benchmark answers that flip."),
    "branch": ("kldtui.cli.branching:branch", "Continue from roots with both tokens, headless."),
    "floor": ("kldtui.cli.floor:floor", "Run the reference's model against itself."),
}
"""name -> (module:attribute, one line of help)"""

_INTERRUPTED = 130


class _Failure(click.ClickException):
    """A KldtuiError as the command line shows it."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"kldtui: {safe(self.message)}", err=True)


def _usage(error: click.UsageError) -> _Failure:
    words = error.format_message()
    stop = "" if words.endswith((".", "?", "!")) else "."
    where = error.ctx.command_path if error.ctx is not None else "kldtui"
    return _Failure(f"{words}{stop} See {where} --help")


def _os_words(error: OSError) -> str:
    """What the system refused, where it is not known better: a full disk, mostly."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


class DefaultGroup(LazyGroup):
    """A group whose first word may be left out: then it is `open`."""

    table = COMMANDS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            if args and args[0] not in COMMANDS and args[0] not in ("--help", "-h", "--version"):
                self._refuse_typo(ctx, args[0])
                args = ["open", *args]
            return super().parse_args(ctx, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _usage(error) from None

    def _refuse_typo(self, ctx: click.Context, word: str) -> None:
        near = difflib.get_close_matches(word, COMMANDS, 1, 0.75)
        if near and not Path(word).exists():
            raise click.UsageError(f"no file and no command {word!r}; did you mean {near[0]}?", ctx)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KldtuiError as error:
            raise _Failure(str(error)) from None
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _usage(error) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise _Failure(_os_words(error)) from None
        except (KeyboardInterrupt, click.Abort):  # the latter at a question
            raise click.exceptions.Exit(_INTERRUPTED) from None


@click.group(
    cls=DefaultGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kldtui")
def cli() -> None:
    """Review where quantized models depart from a reference.

    \b
    kldtui REF.kld --quant QUANT.kld     open both, see every flip root
    kldtui COMMAND --help                what a command takes
    """


def main() -> None:
    """The `kldtui` command. Exits with 2 on an error that one line can explain."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without our glyphs
    try:
        cli(prog_name="kldtui")
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from complaining at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
