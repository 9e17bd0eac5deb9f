"""Token ids to bytes to visible text, from whatever source has the pieces.

Knows: what its modules hand out: glyphs (foreign text made visible), table (Vocabulary, Display),
sources (loading and finding).
Must not know: Textual, engines, the index.
"""

from kldtui.vocab.glyphs import safe
from kldtui.vocab.sources import find_vocabulary, from_pieces, from_server, load_vocabulary
from kldtui.vocab.table import NONE, Display, Vocabulary, compare, display_run, no_text

__all__ = [
    "NONE",
    "Display",
    "Vocabulary",
    "compare",
    "display_run",
    "find_vocabulary",
    "from_pieces",
    "from_server",
    "load_vocabulary",
    "no_text",
    "safe",
]
