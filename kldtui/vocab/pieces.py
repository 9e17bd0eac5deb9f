"""How a vocabulary file spells bytes: the spellings and their decoding.

Knows: byte-level BPE's printable bytes, SentencePiece's ▁ and `<0xNN>`, WordPiece's ##, escapes.
Must not know: files, or which spelling a file uses.
"""

from __future__ import annotations

import re

SP_SPACE = "\u2581"
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, the other way round: printable Latin-1 is itself, the rest
    follows from U+0100 on in byte order (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTES = _byte_of_character()
_MAPPED = {ord(character): chr(byte) for character, byte in _BYTES.items()}
_ALL_MAPPED = frozenset(_BYTES)


def byte_level(spelling: str) -> bytes:
    """`Ġof` -> b" of". A spelling with a character outside the map is taken as it is, whole."""
    if _ALL_MAPPED.issuperset(spelling):
        return spelling.translate(_MAPPED).encode("latin-1")
    return verbatim(spelling)


def byte_token(spelling: bytes) -> bytes | None:
    """`<0x0A>` -> b"\\n"; None for any other spelling."""
    match = _BYTE.fullmatch(spelling)
    return bytes.fromhex(match[1].decode("ascii")) if match else None


def escaped(spelling: str) -> bytes:
    """RWKV's `\\xe6\\n` -> the bytes (llama.cpp, `llama_unescape_rwkv_token`)."""

    def plain(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return bytes.fromhex(match[1].decode("ascii"))
        return {b"t": b"\t", b"n": b"\n", b"r": b"\r"}.get(match[2], match[2])

    return _ESCAPE.sub(plain, verbatim(spelling))


def sentencepiece(spelling: str) -> bytes:
    """`▁of` -> b" of"."""
    return verbatim(spelling.replace(SP_SPACE, " "))


def wordpiece(spelling: str, prefix: str = "##") -> bytes:
    """`##ing` -> b"ing", `of` -> b" of"."""
    if spelling.startswith(prefix):
        return verbatim(spelling[len(prefix) :])
    return verbatim(" " + spelling)


def verbatim(spelling: str) -> bytes:
    """The text itself; a JSON file may hold lone surrogates, which no UTF-8 has."""
    return spelling.encode("utf-8", "surrogatepass")
