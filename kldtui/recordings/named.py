"""The recordings of one review as they are named on a command line: `[NAME=]FILE`, and the floor.

Knows: how such a word is split, that names are unique, and that the floor is a file of its own.
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


def refuse_floor(floor: Path | None, ref: Path, quants: Sequence[tuple[str, Path]]) -> None:
    """Raises KldtuiError where the floor's file is that of another recording of the review."""
    for name, path in (("the reference", ref), *((f"the quant {name}", at) for name, at in quants)):
        if floor is not None and _same_file(floor, path):
            raise KldtuiError(
                f"--floor {floor}: is the file of {name}; a floor is the reference recorded again, "
                "with another micro-batch (-ub)"
            )


def _same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False


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
