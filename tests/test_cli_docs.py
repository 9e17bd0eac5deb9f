"""docs/cli.md: every command and option there is, in the words of `--help`; README's words, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kldtui.cli import cli

FOLDER = Path(__file__).parents[1]
DOCS = FOLDER / "docs" / "cli.md"


def commands(group: click.Group, above: click.Context) -> Iterator[tuple[click.Command, str, str]]:
    """Each command that does something, with its words and its usage."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        assert command is not None
        here = click.Context(command, info_name=name, parent=above)
        if isinstance(command, click.Group):
            yield from commands(command, here)
        else:
            usage = " ".join([here.command_path, *command.collect_usage_pieces(here)])
            yield command, here.command_path, usage


COMMANDS = list(commands(cli, click.Context(cli, info_name="kldtui")))


def table_of(command: click.Command) -> list[str]:
    """Its options as rows, as `--help` has them."""
    context = click.Context(command)
    found = (param.get_help_record(context) for param in command.params)
    cells = (
        [" ".join(cell.replace("|", "\\|").split()) for cell in record]
        for record in found
        if record is not None and record[1]  # arguments have no words
    )
    return [f"| `{names}` | {words} |" for names, words in cells]


def section(name: str) -> str:
    """What docs/cli.md says of a command."""
    return DOCS.read_text("utf-8").split(f"\n### {name}\n")[1].split("\n#")[0]


@pytest.mark.parametrize(("command", "name", "usage"), COMMANDS, ids=[c[1] for c in COMMANDS])
def test_a_command_is_documented_as_its_help_has_it(
    command: click.Command, name: str, usage: str
) -> None:
    lines = section(name).splitlines()
    assert f"`{usage}`" in lines
    assert [line for line in lines if line.startswith("| `")] == table_of(command)


def test_no_other_command_is_documented() -> None:
    heads = [line[4:] for line in DOCS.read_text("utf-8").splitlines() if line.startswith("### ")]
    assert heads == [name for _, name, _ in COMMANDS]


def test_it_says_which_commands_print_json() -> None:
    (line,) = (x for x in DOCS.read_text("utf-8").splitlines() if x.startswith("`--json`"))
    able = [
        name.removeprefix("kldtui ")
        for command, name, _ in COMMANDS
        if any("--json" in param.opts for param in command.params)
    ]
    assert line == f"`--json` is an option of {', '.join(f'`{name}`' for name in able)}."


def test_every_variable_of_the_environment_is_documented() -> None:
    read = {
        found
        for path in (FOLDER / "kldtui").rglob("*.py")
        for found in re.findall(r"\bKLDTUI_[A-Z_]+\b", path.read_text("utf-8"))
    }
    internal = {"KLDTUI_REPORT_FD"}
    assert read - internal == set(re.findall(r"\bKLDTUI_[A-Z_]+\b", DOCS.read_text("utf-8")))
