"""Groups of commands that are imported when they are called.

Knows: how a table of names becomes a group.
Must not know: any command.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import click

Commands = Mapping[str, tuple[str, str]]
"""name -> (module:attribute, one line of help)"""


class LazyGroup(click.Group):
    """A group over `table`; a subclass sets it."""

    table: ClassVar[Commands] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, name = self.table[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{name} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in self.table.items()])
