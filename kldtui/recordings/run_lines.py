"""The lines of a `kldtui-run` file, one by one, and what makes a line wrong.

Knows: JSON, the fields of each kind of line (docs/run-format.md) and their ranges.
Must not know: files, offsets, compression, or rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DamagedRecording, RecordingError, UnsupportedRecording
from kldtui.rows import Invalid

FORMAT = "kldtui-run"
VERSION = 1
KINDS = ("teacher_forced", "rollout")
ROW_ENCODINGS = {"kld": (1, 2)}
"""How whole rows may be encoded, and the versions of it: `.kld` records (see kld.py)."""
BOS_RULES = {"replaces_first": True, "none": False}

ZERO_LOGP = -1e30
"""At or below it a log-probability stands for a probability of zero (JSON has no -Infinity)."""
ZERO_WRITTEN = -3.4e38
"""How a probability of zero is written, in `logp` and `extra`; llama-server sends it as well."""
ROUNDING = 1e-3
"""How far above 0 a log-probability may lie, in nats, and count as 0."""
INFINITE = 1e30
"""From it on a KLD stands for an infinite one, written as `-ZERO_WRITTEN`."""
MAX_SUM = 1.1
"""What the probabilities of `top` may add up to: 1, and 16-bit rounding of each."""

_MAX_INT = 2**31 - 1


class LineError(Exception):
    """What is wrong with a line; the reader adds where it is."""

    def __init__(self, text: str, error: type[RecordingError] = DamagedRecording) -> None:
        super().__init__(text)
        self._error = error

    def at(self, path: Path, number: int) -> RecordingError:
        """The error for the user, with where the line is."""
        advice = "; mend the line, or record again" if self._error is DamagedRecording else ""
        return self._error(f"{path}: line {number}: {self}{advice}")


class NotJson(LineError):
    """The line is no JSON; at the end of a file that means that it is cut."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line. `fields` is all of it, unknown fields too; None = it does not say."""

    kind: str
    n_ctx: int
    n_vocab: int
    n_chunk: int | None
    n_positions: int | None
    top_n: int | None
    add_bos: bool | None
    bos_id: int | None
    row_version: int | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk line; tokens int32[length], read-only; `fields` is the line without them."""

    number: int
    tokens: NDArray[np.int32]
    prompt_length: int | None
    fields: dict[str, Any]


class PositionLine(NamedTuple):
    """A position line; log-probabilities in nats, in the line's order; NaN = not recorded.

    Those of `extra` are rounded to float32, as those of rows are; the others come as they are.
    floor: values up to it are bounds. ref: the reference's best (id, log p), with the `kld` to it.
    row: the whole row, in base64; of the right length, but not decoded.
    """

    chunk: int
    t: int
    token: int
    logp: float
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    extra: dict[int, float]
    kld: float
    invalid: Invalid
    floor: float = -math.inf
    ref: tuple[int, float] | None = None
    kld_floored: float = math.nan
    kld_more: float = math.nan
    row: str | None = None


def parse_object(line: bytes) -> dict[str, Any]:
    """A line as a JSON object. Raises NotJson, or LineError where it is another JSON value."""
    try:
        value = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise NotJson(f"is no JSON ({error.msg.lower()} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise NotJson(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError):
        raise NotJson(
            "is no JSON that can be read (a number too long or nested too deep)"
        ) from None
    if not isinstance(value, dict):
        raise LineError("is not a JSON object")
    return value


def shown(value: object) -> str:
    """A value from a file for an error: short, and ASCII alone."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return "something unreadable"
    return text if len(text) <= 40 else text[:37] + "..."


def _whole(value: object, name: str, low: int, high: int = _MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise LineError(f"{name} is {shown(value)}, not a whole number from {low} to {high}")
    return value


def _whole_or_none(value: object, name: str, low: int) -> int | None:
    return None if value is None else _whole(value, name, low)


# -- header ------------------------------------------------------------------------------------


def parse_header(fields: dict[str, Any]) -> Header:
    """Check the first line. Raises LineError, with UnsupportedRecording for what is newer."""
    if fields.get("format") != FORMAT:
        raise LineError(f"format is {shown(fields.get('format'))}, not {shown(FORMAT)}")
    version = fields.get("version")
    if type(version) is not int or version != VERSION:
        raise LineError(
            f"{FORMAT} version {shown(version)}; this kldtui reads version {VERSION}: update it",
            UnsupportedRecording,
        )
    kind = fields.get("kind")
    if kind not in KINDS:
        raise LineError(
            f"a {FORMAT} of kind {shown(kind)}; this kldtui reads {' and '.join(KINDS)}",
            UnsupportedRecording,
        )
    if not isinstance(fields.get("engine") or {}, dict):
        raise LineError(f"engine is {shown(fields['engine'])}, not an object")
    n_vocab = _whole(fields.get("n_vocab"), "n_vocab", 1)
    add_bos, bos_id = _parse_bos(fields.get("bos"), n_vocab)
    return Header(
        kind=kind,
        n_ctx=_whole(fields.get("n_ctx"), "n_ctx", 1),
        n_vocab=n_vocab,
        n_chunk=_whole_or_none(fields.get("n_chunk"), "n_chunk", 0),
        n_positions=_whole_or_none(fields.get("n_positions"), "n_positions", 0),
        top_n=_whole_or_none(fields.get("top_n"), "top_n", 1),
        add_bos=add_bos,
        bos_id=bos_id,
        row_version=_parse_rows(fields.get("rows")),
        fields=fields,
    )


def _parse_rows(rows: object) -> int | None:
    """The version of the encoding of whole rows; None where the header does not speak of them."""
    if rows is None:
        return None
    if not isinstance(rows, dict):
        raise LineError(f"rows is {shown(rows)}, not an object")
    encoding, version = rows.get("encoding"), rows.get("version")
    known = isinstance(encoding, str) and version in ROW_ENCODINGS.get(encoding, ())
    if not known or type(version) is not int:
        raise LineError(
            f"whole rows encoded as {shown(encoding)} version {shown(version)}; this kldtui reads "
            "kld, versions 1 and 2",
            UnsupportedRecording,
        )
    return version


def _parse_bos(bos: object, n_vocab: int) -> tuple[bool | None, int | None]:
    if bos is None:
        return None, None
    if not isinstance(bos, dict):
        raise LineError(f"bos is {shown(bos)}, not an object")
    rule = bos.get("rule")
    if not isinstance(rule, str) or rule not in BOS_RULES:
        raise LineError(
            f"a BOS rule {shown(rule)}; this kldtui reads {' and '.join(BOS_RULES)}",
            UnsupportedRecording,
        )
    bos_id = bos.get("id")
    if bos_id is not None or BOS_RULES[rule]:
        bos_id = _whole(bos_id, "bos.id", 0, n_vocab - 1)
    return BOS_RULES[rule], bos_id


def format_bos(add_bos: bool | None, bos_id: int | None) -> dict[str, Any] | None:
    """The header's `bos`; None where the rule is not known."""
    if add_bos is None:
        return None
    rule = next(name for name, added in BOS_RULES.items() if added is bool(add_bos))
    return {"rule": rule} if bos_id is None else {"rule": rule, "id": bos_id}


# -- chunks and pieces ---------------------------------------------------------------------------


def parse_chunk(fields: dict[str, Any], header: Header) -> Chunk:
    """Check a chunk line against the header. Raises LineError."""
    number = _whole(fields.get("chunk"), "chunk", 0)
    listed = fields.get("tokens")
    if not isinstance(listed, list) or not listed or set(map(type, listed)) != {int}:
        raise LineError(f"the tokens of chunk {number} are not a list of token ids")
    if min(listed) < 0 or max(listed) >= header.n_vocab:
        raise LineError(
            f"the tokens of chunk {number} are not all from 0 to {header.n_vocab - 1} (n_vocab)"
        )
    prompt_length = None
    if header.kind == "rollout" or fields.get("prompt_length") is not None:
        prompt_length = _whole(fields.get("prompt_length"), "prompt_length", 1, len(listed))
    if len(listed) > header.n_ctx:
        raise LineError(f"chunk {number} has {len(listed)} tokens, more than n_ctx {header.n_ctx}")
    tokens = np.array(listed, np.int32)
    tokens.flags.writeable = False
    rest = {name: value for name, value in fields.items() if name != "tokens"}
    return Chunk(number, tokens, prompt_length, rest)


def parse_pieces(fields: dict[str, Any], n_vocab: int) -> dict[int, bytes]:
    """id -> exact bytes of a pieces line. Raises LineError."""
    listed = fields.get("pieces")
    if not isinstance(listed, dict):
        raise LineError("pieces is not an object of id and text")
    pieces = {}
    for key, value in listed.items():
        if not (key.isascii() and key.isdecimal() and str(int(key[:10])) == key):
            raise LineError(f"pieces has {shown(key)} in the place of a token id")
        if int(key) >= n_vocab:
            raise LineError(f"pieces has id {key}, not below n_vocab {n_vocab}")
        pieces[int(key)] = _parse_piece(key, value)
    return pieces


def _parse_piece(key: str, value: object) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode("utf-8")
        if isinstance(value, dict) and isinstance(value.get("hex"), str):
            return bytes.fromhex(value["hex"])
    except ValueError:
        pass
    raise LineError(f'the piece of id {key} is {shown(value)}, neither text nor {{"hex": ...}}')


def format_pieces(pieces: dict[int, bytes]) -> dict[str, Any]:
    """A pieces line: text where the bytes are UTF-8, hex where they are not."""
    listed: dict[str, Any] = {}
    for token, data in sorted(pieces.items()):
        try:
            listed[str(token)] = data.decode("utf-8")
        except UnicodeDecodeError:
            listed[str(token)] = {"hex": data.hex()}
    return {"pieces": listed}


# -- positions -----------------------------------------------------------------------------------


def parse_position(fields: dict[str, Any], n_vocab: int) -> PositionLine:
    """Check a position line by itself: ids, log-probabilities (nats). Raises LineError."""
    if "top" not in fields:
        raise LineError("a position without top (null is the top of an invalid one)")
    ids, logps, invalid = _parse_top(fields["top"], n_vocab)
    return PositionLine(
        chunk=_whole(fields.get("chunk"), "chunk", 0),
        t=_whole(fields.get("t"), "t", 0),
        token=_whole(fields.get("token"), "token", 0, n_vocab - 1),
        logp=_logp(fields.get("logp"), "logp"),
        ids=ids,
        logps=logps,
        extra=_parse_extra(fields.get("extra"), n_vocab),
        kld=_parse_kld(fields.get("kld")),
        invalid=invalid,
        floor=_parse_floor(fields.get("floor")),
        ref=_parse_ref(fields.get("ref"), n_vocab),
        kld_floored=_number(fields.get("kld_floored"), "kld_floored"),
        kld_more=_number(fields.get("kld_more"), "kld_more"),
        row=_parse_row(fields.get("row"), n_vocab),
    )


def _parse_kld(value: object) -> float:
    number = _number(value, "kld")
    return math.inf if number >= INFINITE else number


def _parse_floor(value: object) -> float:
    floor = _logp(value, "floor")
    return -math.inf if math.isnan(floor) else float(np.float32(floor))


def _parse_ref(value: object, n_vocab: int) -> tuple[int, float] | None:
    if value is None:
        return None
    ids, logps = _parse_pairs([value], "ref", n_vocab)
    logp = _logp(logps[0], "ref")
    return None if math.isnan(logp) else (ids[0], float(np.float32(logp)))


def record_words(n_vocab: int) -> int:
    """Length of a `.kld` record in uint16."""
    return 2 * ((n_vocab + 1) // 2) + 4


def _parse_row(value: object, n_vocab: int) -> str | None:
    if value is None:
        return None
    expected = 4 * ((2 * record_words(n_vocab) + 2) // 3)
    if not isinstance(value, str) or len(value) != expected:
        raise LineError(
            f"row is {shown(value)}, not the {expected} characters in base64 of a record of "
            f"{n_vocab} entries"
        )
    return value


def _number(value: object, name: str) -> float:
    """A number; NaN for null."""
    if value is None:
        return math.nan
    if type(value) is not float and type(value) is not int:
        raise LineError(f"{name} is {shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise LineError(f"{name} is {shown(value)}, out of range") from None


def _logp(value: object, name: str) -> float:
    """A log-probability, nats: at most 0, -inf for a probability of zero, NaN for null."""
    number = _number(value, name)
    if number > ROUNDING:
        raise LineError(f"{name} has a log-probability above 0: {shown(value)}")
    if number <= ZERO_LOGP:
        return -math.inf
    return min(number, 0.0) if number == number else number


def _parse_pairs(
    value: object, name: str, n_vocab: int
) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """`[[id, log p], …]` as ids (distinct, in the vocabulary) and what stands for log p."""
    if not isinstance(value, list):
        raise LineError(f"{name} is {shown(value)}, not a list of [id, log p]")
    if not value:
        return (), ()
    try:
        ids, logps = zip(*value, strict=True)
    except (TypeError, ValueError):
        raise LineError(f"{name} is not a list of [id, log p]") from None
    if set(map(type, ids)) != {int}:
        raise LineError(f"{name} has something else in the place of a token id")
    if min(ids) < 0 or max(ids) >= n_vocab:
        raise LineError(f"{name} has an id that is not from 0 to {n_vocab - 1} (n_vocab)")
    if len(set(ids)) != len(ids):
        raise LineError(f"{name} has an id twice")
    return ids, logps


def _parse_top(value: object, n_vocab: int) -> tuple[tuple[int, ...], tuple[float, ...], Invalid]:
    if value is None:
        return (), (), Invalid.NOT_A_NUMBER
    ids, listed = _parse_pairs(value, "top", n_vocab)
    if not ids:
        raise LineError("top is empty (null is the top of an invalid position)")
    logps: tuple[float, ...] = listed  # type: ignore[assignment]  # what is no number fails below
    try:
        total = sum(map(math.exp, logps))
    except (TypeError, OverflowError):
        total = math.nan
    plain = total <= MAX_SUM and set(map(type, logps)) <= {float, int}
    if not (plain and max(logps) <= 0 and min(logps) > ZERO_LOGP):
        cleaned = [_logp(v, "top") for v in listed]
        if any(map(math.isnan, cleaned)):
            return (), (), Invalid.NOT_A_NUMBER
        kept = [(i, v) for i, v in zip(ids, cleaned, strict=True) if v > -math.inf]
        if not kept:
            return (), (), Invalid.INFINITE
        ids, logps = zip(*kept, strict=True)
        total = sum(map(math.exp, logps))
    if total > MAX_SUM:
        raise LineError(f"the probabilities of top add up to {total:.3g}: not natural logarithms?")
    return ids, logps, Invalid.NO


def _parse_extra(value: object, n_vocab: int) -> dict[int, float]:
    if value is None:
        return {}
    ids, logps = _parse_pairs(value, "extra", n_vocab)
    cleaned = {i: float(np.float32(_logp(v, "extra"))) for i, v in zip(ids, logps, strict=True)}
    return {i: v for i, v in cleaned.items() if not math.isnan(v)}
