"""What can go wrong, by name.

Knows: the exception tree. Every error a user can cause is a KldtuiError whose text is one line
that says what is wrong, where, and what to do; the command line prints it and exits with status 2.
Must not know: anything else of kldtui.
"""


class KldtuiError(Exception):
    """One line for the user: what, where, what to do."""


class RecordingError(KldtuiError):
    """A recording cannot be used."""


class NotARecording(RecordingError):
    """The file is of no kind that kldtui reads."""


class UnsupportedRecording(RecordingError):
    """A known kind or version of recording that kldtui does not read."""


class DamagedRecording(RecordingError):
    """The header is cut or contradicts itself; nothing can be read."""


class RecordingChanged(RecordingError):
    """The file was cut, replaced or unmounted while it was open."""


class StreamMismatch(RecordingError):
    """Two recordings are not of the same token stream."""


class VocabularyError(KldtuiError):
    """A vocabulary source cannot be used."""


class EngineError(KldtuiError):
    """An engine cannot do what was asked of it."""


class EngineUnreachable(EngineError):
    """Nothing answers at the URL."""


class EngineLoading(EngineError):
    """The server is still loading its model."""


class EngineRefused(EngineError):
    """The server answered with an error; the text holds the server's own words."""


class ContextExceeded(EngineRefused):
    """The prefix does not fit into the server's context."""


class EngineUnauthorized(EngineRefused):
    """The server asks for another API key."""


class EngineBroke(EngineError):
    """The server closed, died or sent nonsense in mid-answer."""


class UnusableEngine(EngineError):
    """The server works, but not in a way a judged branch can stand on."""


class InexactPrefix(UnusableEngine):
    """A server that takes text cannot be given these ids: their text encodes to others.

    at: the index of the first that does not come back. nearest: how many of the first ids make
    the longest prefix that does come back; None where none does.
    """

    def __init__(self, words: str, at: int, nearest: int | None) -> None:
        super().__init__(words)
        self.at = at
        self.nearest = nearest


class LabelFileError(KldtuiError):
    """A label file cannot be read or written; it has not been touched."""


class AnswerFileError(KldtuiError):
    """A file of benchmark answers cannot be read or compared."""


class ConfigError(KldtuiError):
    """The config file has a setting that kldtui does not know or cannot use."""


class DemoError(KldtuiError):
    """The demo's recordings, model or quantization cannot be had."""
