"""What recordings say of each other, position by position: scanned once, kept, and looked up.

Knows: recordings and analysis; tables, and where they are kept.
Must not know: how rows are decoded, text, screens, or what is done with the columns.
"""

from pathlib import Path

from kldtui.analysis import PAIR_DTYPE, REF_DTYPE, Bound, Kind, State
from kldtui.index.cache import Keeper, cache_folder, index_folder
from kldtui.index.index import Index, Progress, Stage
from kldtui.index.layout import Layout
from kldtui.index.streams import check_streams
from kldtui.index.table import Table

__all__ = [
    "PAIR_DTYPE",
    "REF_DTYPE",
    "Bound",
    "Index",
    "Keeper",
    "Kind",
    "Layout",
    "Progress",
    "Stage",
    "State",
    "Table",
    "cache_folder",
    "check_streams",
    "index_folder",
    "keeper",
]


def keeper(folder: Path | None = None) -> Keeper:
    """What gives an index saved tables: from kldtui's own folder, or another."""
    return Keeper(folder or index_folder())
