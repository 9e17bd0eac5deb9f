"""What is said of a pair in numbers: statistics, as text and JSON.

Knows: what its modules hand out: stats (PairStats), diverging (FDT, SDT, flips by confidence), text
(the printout), flips (the list).
Must not know: recordings, screens, label files.
"""

from kldtui.report.diverging import Divergence, Runs, divergence_of, runs_of
from kldtui.report.flips import FlipRow, flip_rows, format_flips
from kldtui.report.stats import PairStats, finite, pair_stats
from kldtui.report.text import NO_FLOOR, format_stats
from kldtui.report.totals import Estimate, Sample

__all__ = [
    "NO_FLOOR",
    "Divergence",
    "Estimate",
    "FlipRow",
    "PairStats",
    "Runs",
    "Sample",
    "divergence_of",
    "finite",
    "flip_rows",
    "format_flips",
    "format_stats",
    "pair_stats",
    "runs_of",
]
