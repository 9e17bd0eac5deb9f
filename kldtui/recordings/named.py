"""Names for the recordings of one review: `[NAME=]FILE`.

Knows: how such a word is split, and that names are unique.
Must not know: what is in the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kldtui.errors import KldtuiError


def split_named(spec: str) -> tuple[str | None, str]:
    """Split `NAME=REST`; a name has no slash or colon, so paths and URLs with `=` stay whole."""
    name, sep, rest = spec.partition("=")
    if sep and name and rest and "/" not in name and ":" not in name:
        return name, rest
    return None, spec


def name_files(specs: Sequence[str]) -> list[tuple[str, Path]]:
    """Names and paths of `[NAME=]FILE` words, in their order.

    A file without a name gets its stem, numbered where it is taken. Raises KldtuiError where two
    are given the same name.
    """
    split = [(None, s) if Path(s).exists() else split_named(s) for s in specs]
    given = [name for name, _ in split if name is not None]
    for one in given:
        if given.count(one) > 1:
            raise KldtuiError(f"two quants are named {one!r}; give each its own NAME=FILE")
    taken = set(given)
    out = []
    for name, rest in split:
        unique = name
        if unique is None:
            stem = Path(rest).name.removesuffix(".gz")
            stem = stem.rpartition(".")[0] or stem or rest
            unique, number = stem, 2
            while unique in taken:
                unique, number = f"{stem}-{number}", number + 1
            taken.add(unique)
        out.append((unique, Path(rest)))
    return out
