"""What is said of a pair in numbers: statistics, as text and JSON.

Knows: what its modules hand out: stats (PairStats), text (the printout), flips (the list).
Must not know: recordings, screens, label files.
"""

from kldtui.report.flips import FlipRow, flip_rows, format_flips
from kldtui.report.stats import Estimate, PairStats, Sample, finite, pair_stats
from kldtui.report.text import NO_FLOOR, format_stats

__all__ = [
    "NO_FLOOR",
    "Estimate",
    "FlipRow",
    "PairStats",
    "Sample",
    "finite",
    "flip_rows",
    "format_flips",
    "format_stats",
    "pair_stats",
]
