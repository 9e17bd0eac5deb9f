"""From a root, what the models go on to say: prefixes, arms, branches, and where two of them meet.

Knows: recordings (for the prefix), the Engine protocol, the rules by which a branch ends.
Must not know: any server, labels, files, or the screen.
"""

from kldtui.branching.arms import (
    QQ,
    QR,
    RQ,
    RR,
    Arm,
    Side,
    Start,
    both,
    default_arms,
)
from kldtui.branching.branch import COMPLETE, Branch, Parent, Stop, key_of
from kldtui.branching.meeting import Meeting, divergence, meeting
from kldtui.branching.place import Place, inside
from kldtui.branching.prefix import bos_rule, bos_warning, prefix_of
from kldtui.branching.recorded import KIND as RECORDED
from kldtui.branching.recorded import follow_stream, is_recorded
from kldtui.branching.running import (
    DEFAULT_LENGTH,
    DEFAULT_TOP_N,
    Ends,
    loop_period,
    run_branch,
)

__all__ = [
    "COMPLETE",
    "DEFAULT_LENGTH",
    "DEFAULT_TOP_N",
    "QQ",
    "QR",
    "RECORDED",
    "RQ",
    "RR",
    "Arm",
    "Branch",
    "Ends",
    "Meeting",
    "Parent",
    "Place",
    "Side",
    "Start",
    "Stop",
    "bos_rule",
    "bos_warning",
    "both",
    "default_arms",
    "divergence",
    "follow_stream",
    "inside",
    "is_recorded",
    "key_of",
    "loop_period",
    "meeting",
    "prefix_of",
    "run_branch",
]
