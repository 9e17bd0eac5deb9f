"""The packaged pair: two real recordings of one text, unpacked bit for bit as they were recorded.

Knows: how they are packed (`scripts/make_demo_pair.py` packs them) and where they are unpacked.
Must not know: what recordings mean, models, engines, the screen.

The pack is a zip file, so that its parts have names and checksums. Log-probability codes of most
of a vocabulary are at the floor (0), the rest are noise in their low bits. So: one bit a code for
"above the floor"; the codes above it in two byte planes, high and low; the quant's codes as
differences from a straight line through the reference's, fitted a row, in integers, so that every
machine unpacks the same bits; codes above the floor in the quant alone as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.errors import DemoError

FORMAT = "kldtui-demo-pair"
VERSION = 1
SHIFT = 20
"""Binary places of a fitted line's slope and offset."""
REF, QUANT, TOKENIZER, FLOOR = "ref", "quant", "tokenizer", "floor"


@dataclass(frozen=True, slots=True)
class DemoPair:
    """Paths of what the demo opens.

    ref, quant: `.kld` recordings of one stream. tokenizer: pieces of the whole vocabulary (a
    tokenizer.json without merges). floor: the null recording, a run: the reference's model again,
    with another micro-batch. chunks: which chunks of the recorded text these are.
    """

    ref: Path
    quant: Path
    tokenizer: Path
    floor: Path
    chunks: tuple[int, ...]


def packaged() -> Path:
    """The pack inside this package."""
    with resources.as_file(resources.files("kldtui.demo") / "data" / "pair.zip") as path:
        return path


def demo_pair(cache: Path, pack: Path | None = None) -> DemoPair:
    """Unpack the pair into `cache`, or take what was unpacked there before, checked by hash.

    Raises DemoError if the pack is damaged or the cache cannot be written.
    """
    pack = pack or packaged()
    try:
        with zipfile.ZipFile(pack) as archive:
            manifest = _manifest(archive, pack)
            folder = cache / f"pair-{_identity(manifest)}"
            files = manifest["files"]
            paths = {role: folder / files[role]["name"] for role in files}
            if any(not _intact(paths[role], files[role]) for role in files):
                folder.mkdir(parents=True, exist_ok=True)
                for role, data in _unpack(archive, manifest).items():
                    _check(data, files[role], pack)
                    _write(paths[role], data)
    except (zipfile.BadZipFile, KeyError, ValueError, IndexError, TypeError) as error:
        raise DemoError(f"{pack.name}: the packaged demo is damaged; reinstall kldtui") from error
    except OSError as error:
        raise DemoError(f"the demo cannot be unpacked into {cache}: {error}") from error
    return DemoPair(
        paths[REF], paths[QUANT], paths[TOKENIZER], paths[FLOOR], tuple(manifest["chunks"])
    )


def predict(codes: NDArray[np.uint16], line: NDArray[np.int64]) -> NDArray[np.int64]:
    """The quant's codes as a line through the reference's gives them.

    codes: uint16[n]. line: int64[2], slope and offset times 2**SHIFT. Gives int64[n] in 0..65535.
    """
    scaled = codes.astype(np.int64) * int(line[0]) + int(line[1])
    near: NDArray[np.int64] = np.clip(scaled >> SHIFT, 0, 65535)
    return near


def _manifest(archive: zipfile.ZipFile, pack: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(archive.read("manifest.json"))
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise DemoError(f"{pack.name}: {manifest['format']} version {manifest['version']}")
    return manifest


def _identity(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]


def _unpack(archive: zipfile.ZipFile, manifest: dict[str, Any]) -> dict[str, bytes]:
    n, n_vocab = manifest["records"], manifest["n_vocab"]

    def bits(name: str) -> NDArray[np.bool_]:
        packed = np.frombuffer(archive.read(name), np.uint8)
        return np.unpackbits(packed, count=n * n_vocab).view(np.bool_)

    def words(name: str) -> NDArray[np.uint16]:
        high = np.frombuffer(archive.read(f"{name}.high"), np.uint8)
        low = np.frombuffer(archive.read(f"{name}.low"), np.uint8)
        joined = high.astype(np.uint16)
        joined <<= 8
        joined |= low
        return joined

    ref = np.zeros(n * n_vocab, np.uint16)
    quant = np.zeros(n * n_vocab, np.uint16)
    in_ref = bits("ref.mask")
    in_quant = in_ref ^ bits("quant.mask")
    ref[in_ref] = words("ref")
    quant[in_quant & ~in_ref] = words("quant-alone")
    lines = np.frombuffer(archive.read("lines"), "<i8").reshape(n, 2)
    both = (in_ref & in_quant).reshape(n, n_vocab)
    differences, start = words("difference"), 0
    for i, line in enumerate(lines):
        row = slice(i * n_vocab, (i + 1) * n_vocab)
        codes = ref[row][both[i]]
        stop = start + codes.size
        # Differences wrap around at 65536, as uint16 does.
        quant[row][both[i]] = predict(codes, line).astype(np.uint16) + differences[start:stop]
        start = stop
    header = archive.read("header")

    def recording(name: str, codes: NDArray[np.uint16]) -> bytes:
        records = np.empty((n, 4 + n_vocab), "<u2")
        records[:, :4] = np.frombuffer(archive.read(f"{name}.words"), "<u2").reshape(n, 4)
        records[:, 4:] = codes.reshape(n, n_vocab)
        return header + records.tobytes()

    return {
        REF: recording("ref", ref),
        QUANT: recording("quant", quant),
        TOKENIZER: archive.read("tokenizer.json"),
        FLOOR: archive.read("floor.gguf-run"),
    }


def _intact(path: Path, entry: dict[str, Any]) -> bool:
    try:
        if path.stat().st_size != entry["bytes"]:
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == str(entry["sha256"])
    except FileNotFoundError:
        return False


def _check(data: bytes, entry: dict[str, Any], pack: Path) -> None:
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise DemoError(
            f"{pack.name}: {entry['name']} does not unpack to what was recorded; reinstall kldtui"
        )


def _write(path: Path, data: bytes) -> None:
    """In one step, so that nobody ever opens half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
