"""Log-probabilities that people saved from servers, as recordings.

Knows: what its modules hand out: kinds (which server, and its answers), alone (a file as a stream
by itself), place (a file beside a reference). One module a server.
Must not know: the index, vocabularies' sources, screens.
"""

from kldtui.recordings.foreign.alone import alone
from kldtui.recordings.foreign.kinds import READ, ForeignFile, read_file
from kldtui.recordings.foreign.objects import may_be_json
from kldtui.recordings.foreign.place import Pieces, beside
from kldtui.recordings.foreign.recording import ForeignRecording

__all__ = [
    "READ",
    "ForeignFile",
    "ForeignRecording",
    "Pieces",
    "alone",
    "beside",
    "may_be_json",
    "read_file",
]
