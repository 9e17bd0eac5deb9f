"""`python -m bench [NAME …] [--json]`: one table, a row a figure.

Knows: which groups of measurements there are.
Must not know: how they are made.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Sequence

import click

from bench.measure import Result, table

GROUPS = ("open", "scan", "screen", "memory", "labels")


@click.command()
@click.argument("groups", nargs=-1, type=click.Choice(GROUPS))
@click.option(
    "--json", "as_json", is_flag=True, help="A list of name, ours, theirs, ratio, goal, met."
)
def main(groups: Sequence[str], as_json: bool) -> None:
    """Measure speed and memory, each against something else in the same run."""
    # Whoever ends this early does not want gigabytes left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found: list[Result] = []
    for name in groups or GROUPS:
        click.echo(f"measuring: {name}", err=True)
        for each in importlib.import_module(f"bench.{name}").results():
            click.echo(f"  {each.name}: {each.ratio:.3g}", err=True)
            found.append(each)
    if as_json:
        json.dump([each.to_json() for each in found], sys.stdout, indent=2, ensure_ascii=False)
        click.echo()
    else:
        click.echo(table(found))


if __name__ == "__main__":
    main()
