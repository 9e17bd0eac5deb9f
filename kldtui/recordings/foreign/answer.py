"""What every server's answer comes down to: a prompt, and what was said of each token after it.

Knows: log-probabilities and their stand-ins, ids, the bytes of tokens given as text.
Must not know: any server's field names, references, or where an answer belongs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.recordings.run_lines import MAX_SUM, ROUNDING, shown

_ESCAPED = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)")
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_MAX_ID = 2**31 - 2
_ZERO = -9999.0
"""No probability above 0 has a log this low: JSON has no infinity, and vLLM writes this for it,
llama-server the least float."""


class AnswerError(Exception):
    """What is wrong with an answer, in words; the reader adds where it stands."""


class Unusable(Exception):
    """The answer is what it should be, but nothing can be compared with it: why, and what to do."""


class Entry(NamedTuple):
    """One token of a list. id None: only its bytes are known; data None: only its id is."""

    id: int | None
    data: bytes | None
    logp: float


@dataclass(frozen=True, slots=True)
class Step:
    """What was said of one token: the one that is there, and the best, best first (nats).

    token: its id, None where only its bytes are known; data: None where only its id is.
    logp: of that token; NaN where not given.
    ids: int32[k] of the best, or None where only their bytes (`texts`) are known; logps float32[k].
    invalid: the model gave NaN.
    """

    token: int | None
    data: bytes | None
    logp: float
    ids: NDArray[np.int32] | None
    texts: tuple[bytes, ...]
    logps: NDArray[np.float32]
    invalid: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing was said of the best: it cannot be compared."""
        return not self.invalid and not self.logps.size


@dataclass(slots=True)
class Answer:
    """One answer. Token `t` of its chunk is `prompt[t]`, then `output[t - n_prompt]`.

    line: where in the file. n_prompt: None where it is not said.
    prompt: the ids, None for one that is not known; None as a whole where there are none.
    prompt_text: as text, where the file has it. scored: what was said of prompt tokens, by t.
    output: of each generated token.
    """

    line: int
    n_prompt: int | None
    output: list[Step]
    prompt: list[int | None] | None = None
    prompt_text: str | None = None
    scored: dict[int, Step] = field(default_factory=dict)

    @property
    def ids(self) -> list[int | None] | None:
        """All tokens as ids, as far as they are known; None where the prompt's are not there."""
        if self.prompt is None:
            return None
        return [*self.prompt, *(step.token for step in self.output)]


@dataclass
class Gathered:
    """What a file's answers bring along with them."""

    pieces: dict[int, bytes] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """Things to report, by a sentence that follows their number."""

    def piece(self, entry: Entry) -> None:
        """Learn the bytes of an id; an empty text (of a control token) says nothing."""
        if entry.id is not None and entry.data:
            self.pieces.setdefault(entry.id, entry.data)


def number(value: Any, what: str = "a log-probability") -> float:
    """A number; NaN for null. Raises AnswerError."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AnswerError(f"{what} is {shown(value)}, not a number")
    return float(value)


def logp_of(value: Any) -> float:
    """A log-probability in nats: NaN for null or NaN, -inf for a probability of zero.

    Raises AnswerError for one above 0: it is a plain probability, or nonsense.
    """
    found = number(value)
    if found > ROUNDING:
        raise AnswerError(
            f"a log-probability of {shown(value)}, which cannot be above 0: these may be plain "
            "probabilities under that name"
        )
    if found <= _ZERO:
        return -math.inf
    return min(found, 0.0) if found == found else found


def log_of(value: Any) -> float:
    """The log of a probability (nats). Raises AnswerError for what is none."""
    found = number(value, "a probability")
    if found != found:
        return found
    if not 0 <= found <= 1 + ROUNDING:
        raise AnswerError(f"a probability of {shown(value)}")
    return math.log(min(found, 1.0)) if found > 0 else -math.inf


def id_of(value: Any) -> int:
    """A token id. Raises AnswerError."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:12])
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise AnswerError(f"{shown(value)} in the place of a token id")
    return value


def ids_of(value: Any) -> list[int | None] | None:
    """A list of token ids; None where it is no such list (a text, a list of texts)."""
    if not isinstance(value, list) or not value or not all(type(x) is int for x in value):
        return None
    return [id_of(x) for x in value]


def data_of(text: Any, listed: Any = None) -> bytes | None:
    """The bytes of a token: as listed, else of its text; None where the text has lost them."""
    if isinstance(listed, list):
        try:
            return bytes(listed)
        except (TypeError, ValueError):
            raise AnswerError(f"bytes are {shown(listed)}") from None
    if not isinstance(text, str):
        return None
    escaped = _ESCAPED.fullmatch(text)
    if escaped is not None:
        return bytes.fromhex(escaped[1].replace("\\x", ""))
    return None if "�" in text else text.encode("utf-8", "surrogatepass")


def named_id(text: Any) -> int | None:
    """The id in `token_id:123`, as vLLM writes tokens when it is asked to."""
    match = _TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else int(match[1])


def step_of(
    token: int | None,
    data: bytes | None,
    logp: float,
    entries: Iterable[Entry],
    *,
    with_own: bool = False,
) -> Step:
    """A step from a list in any order. Zero probabilities are left out of it.

    with_own: whether the list holds the token that is there even if it is not among the best: then
    it is taken off the end, as what lies between is not known.
    Where only some entries have an id, the list goes by their bytes. Raises AnswerError where the
    probabilities add up to more than one, or an id is there twice.
    """
    listed = list(entries)
    if any(math.isnan(entry.logp) for entry in listed):
        return Step(token, data, logp, np.empty(0, np.int32), (), _floats([]), invalid=True)
    by_id = all(entry.id is not None for entry in listed)
    best = sorted(
        (entry for entry in listed if entry.logp > -math.inf),
        key=lambda e: (-e.logp, -1 if e.id is None else e.id, e.data or b""),
    )
    if math.isnan(logp):
        logp = next((e.logp for e in best if _is_token(e, token, data)), logp)
    total = sum(math.exp(entry.logp) for entry in best)
    if total > MAX_SUM:
        raise AnswerError(
            f"probabilities of one position that add up to {total:.3g}: not natural logarithms?"
        )
    if by_id and len({entry.id for entry in best}) != len(best):
        raise AnswerError("an id twice in one list")
    if with_own and len(best) > 1 and _is_token(best[-1], token, data):
        best.pop()
    if by_id:
        ids = np.array([entry.id for entry in best], np.int32)
        return Step(token, data, logp, ids, (), _floats(best))
    texts = tuple(entry.data if entry.data is not None else b"" for entry in best)
    return Step(token, data, logp, None, texts, _floats(best))


def _is_token(entry: Entry, token: int | None, data: bytes | None) -> bool:
    if token is not None and entry.id is not None:
        return entry.id == token
    return data is not None and entry.data == data


def _floats(entries: Iterable[Entry]) -> NDArray[np.float32]:
    return np.array([entry.logp for entry in entries], np.float32)
