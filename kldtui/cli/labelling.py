"""The command that reads label files: `labels`.

Knows: how a label file's summary is printed.
Must not know: recordings, engines, the screen.
"""

from __future__ import annotations

from pathlib import Path

import click

from kldtui.cli.printing import print_json
from kldtui.cli.values import FILE
from kldtui.label_report import markdown, summary
from kldtui.labels import read_labels


@click.command()
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="A list, one object a quant (docs/json.md).")
def labels(file: Path, as_json: bool) -> None:
    """Summarise a label FILE: how many roots of each quant got which class."""
    records = read_labels(file)
    if as_json:
        print_json(summary(records))
    else:
        click.echo(markdown(records, file.name))
