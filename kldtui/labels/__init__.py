"""Labels: what a person says of a root, kept so that nothing loses it.

Knows: its own modules. Import from here.
Must not know: the screen, engines, the network.
"""

from kldtui.labels.branch_file import branch_path
from kldtui.labels.identity import ReviewIdentity, default_path, identity_of
from kldtui.labels.reading import read_labels
from kldtui.labels.record import Key, LabelRecord, summarise
from kldtui.labels.store import Action, LabelStore
from kldtui.labels.taxonomy import BY_ID, BY_KEY, TAXONOMY, LabelClass

__all__ = [
    "BY_ID",
    "BY_KEY",
    "TAXONOMY",
    "Action",
    "Key",
    "LabelClass",
    "LabelRecord",
    "LabelStore",
    "ReviewIdentity",
    "branch_path",
    "default_path",
    "identity_of",
    "read_labels",
    "summarise",
]
