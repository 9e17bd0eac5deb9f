"""Large files: what opening them reads, and where the memory of what is scanned is.

Times and memory are measured in bench; here is what makes them so.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui import roots
from kldtui.index import Index, Keeper
from kldtui.index.index import Progress
from kldtui.recordings import open_recording
from kldtui.report import pair_stats
from kldtui.review import figures, listing
from kldtui.review.listing import Filter, parse_filter
from kldtui.review.session import Session
from tests.builders_index import kept_index, mixed_pair, plain_pair, scan_all

N_CTX, N_VOCAB = 512, 100_000
MEGABYTE = 1 << 20


def sparse_pair(folder: Path, gigabytes: int) -> list[Path]:
    """Two files of holes behind their headers, of so many gigabytes each."""
    folder.mkdir()
    per_chunk = N_CTX - 1 - N_CTX // 2
    record = 2 * N_VOCAB + 8
    n_chunk = gigabytes * 10**9 // (per_chunk * record)
    size = 20 + 4 * N_CTX * n_chunk + per_chunk * n_chunk * record
    paths = [folder / "ref.kld", folder / "quant.kld"]
    for path in paths:
        path.write_bytes(b"_logits_" + struct.pack("<iii", N_CTX, N_VOCAB, n_chunk))
        os.truncate(path, size)
    return paths


def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each positioned read of a recording asks for, from here on."""
    read: list[int] = []
    real = os.preadv

    def counted(fd: int, buffers: Sequence[Any], offset: int) -> int:
        got = real(fd, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return read


@pytest.mark.parametrize("gigabytes", [20, 200])
def test_opening_a_review_of_any_size_reads_a_few_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: int
) -> None:
    ref, quant = sparse_pair(tmp_path / "files", gigabytes)
    read = bytes_read(monkeypatch)
    session = Session.open(ref, [("quant", quant)])
    session.keep_labels(tmp_path / "l.json", "me")
    session.chunk_tokens(0)
    session.detail(session.position(0), 0, 20)
    assert session.index.layout.n * N_VOCAB * 2 > 0.98 * gigabytes * 10**9
    assert sum(read) < 24 * MEGABYTE
    assert len(read) < 300
    session.close()


def test_a_label_file_names_all_tokens_of_a_stream_that_opening_has_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.labels.identity._TOKENS_AT_ONCE", 40)
    ref, quant = plain_pair(tmp_path / "pair")
    session = Session.open(ref.path, [("quant", quant.path)])
    session.keep_labels(tmp_path / "l.json", "me")
    scan_all(session.index)
    session.set_label(session.facts(3, 0), "1", "hand")
    session.close()
    n_ctx, n_vocab, n_chunk = struct.unpack("<iii", ref.path.read_bytes()[8:20])
    stream = ref.path.read_bytes()[20 : 20 + 4 * n_ctx * n_chunk]
    expected = "sha256:" + hashlib.sha256(struct.pack("<ii", n_ctx, n_vocab) + stream).hexdigest()
    kept = json.loads((tmp_path / "l.json").read_text())["recordings"]
    assert kept["ref"]["tokens"] == kept["quants"]["quant"]["tokens"] == expected


def test_a_label_is_kept_when_the_recording_has_gone(tmp_path: Path) -> None:
    ref, quant = plain_pair(tmp_path / "pair")
    session = Session.open(ref.path, [("quant", quant.path)])
    session.keep_labels(tmp_path / "l.json", "me")
    scan_all(session.index)
    facts, whole = session.facts(3, 0), ref.path.read_bytes()
    os.truncate(ref.path, 100)
    session.set_label(facts, "1", "hand")
    session.close()
    ref.path.write_bytes(whole)
    again = Session.open(ref.path, [("quant", quant.path)])
    again.keep_labels(tmp_path / "l.json", "me")
    assert again.class_of(facts.position, 0) is not None
    again.close()


def test_a_long_review_opens_without_counting_or_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("that takes a while")

    monkeypatch.setattr(figures, "LONG", 10)
    for module, name in ((figures, "count_pair"), (listing, "select"), (roots, "blocks")):
        monkeypatch.setattr(module, name, refused)
    ref, quant = plain_pair(tmp_path / "pair")
    session = Session.open(ref.path, [("quant", quant.path)])
    session.facts(3, 0)
    session.close()


# -- where the memory is ---------------------------------------------------------------------------


def in_file(array: Any) -> bool:
    """Whether an array's memory is that of a mapped file."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array is not None


def test_columns_that_are_kept_take_no_memory_of_the_program(tmp_path: Path) -> None:
    index = kept_index(plain_pair(tmp_path / "pair"), tmp_path / "cache")
    for table in (index.ref, *index.pairs):
        assert table.kept
        assert all(in_file(table[name]) for name in table.names)
    assert not in_file(Index(*split(plain_pair(tmp_path / "other"))).ref["state"])


def split(recordings: list[Any]) -> tuple[Any, list[Any]]:
    return recordings[0], recordings[1:]


class Watched(np.ndarray[Any, Any]):
    """A column that notes how much of it is asked for at once."""

    sizes: list[int]

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(self)[key]
        self.sizes.append(int(np.size(found)))
        return found


def watched(index: Index) -> list[int]:
    """How many entries of its columns each look through the map asks for, from here on."""
    sizes: list[int] = []
    for table in (index.ref, *index.pairs):
        for name in table.names:
            column = table[name].view(Watched)
            column.sizes = sizes
            table._arrays[name] = column
    return sizes


def test_looking_at_an_entry_maps_nothing_of_its_columns(tmp_path: Path) -> None:
    index = kept_index(plain_pair(tmp_path / "pair"), tmp_path / "cache")
    n = index.layout.n
    whole = [{name: table[name].copy() for name in table.names} for table in index._tables]
    sizes = watched(index)
    for table, columns in zip(index._tables, whole, strict=True):
        for key in (0, n // 2, n - 1, -1, slice(0, 5), slice(n - 3, n + 9), slice(4, 4)):
            found = table[key]
            for name, column in columns.items():
                assert np.array_equal(found[name], column[key], equal_nan=True)
        assert table.mark("state", 3) == columns["state"][3]
        with pytest.raises(IndexError):
            table[n]
    assert roots.stands_at(index, 3) == (bool(whole[1]["kind"][3]),)
    assert not sizes


WANTED = ("", "kld>0.01 cost>0.01", "near", "moved", "unlabelled", "w1")


@pytest.mark.parametrize("words", WANTED)
def test_a_long_list_is_made_in_parts_and_gives_memory_back_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    ref, quant = plain_pair(tmp_path / "pair", n_chunk=40)
    session = Session.open(ref.path, [("quant", quant.path)])
    scan_all(session.index)
    wanted = parse_filter(words, session.names) if words else Filter()
    expected = session.listed(wanted, "cost").tolist()
    monkeypatch.setattr(roots, "_AT_ONCE", 20)
    monkeypatch.setattr(roots, "_BLOCK", 50)
    released: list[None] = []
    monkeypatch.setattr(session.index, "release", lambda: released.append(None))
    sizes = watched(session.index)
    assert session.listed(wanted, "cost").tolist() == expected
    assert len(released) >= session.index.layout.n // 50
    assert max(sizes) <= 50
    session.close()


def test_statistics_of_a_long_stream_are_reckoned_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = kept_index(mixed_pair(tmp_path / "pair"), tmp_path / "cache")
    n = index.layout.n
    expected = pair_stats(index, 0)
    by_chunk = list(expected.by_chunk)
    monkeypatch.setattr(roots, "_AT_ONCE", 7)
    monkeypatch.setattr(roots, "_BLOCK", 20)
    monkeypatch.setattr(roots, "_PIECE", 9)
    sizes = watched(index)
    found = pair_stats(index, 0)
    assert max(sizes) <= 20 < n
    assert flat(found.to_json()) == pytest.approx(
        flat(expected.to_json()), rel=1e-12, abs=1e-15, nan_ok=True
    )
    assert len(found.by_chunk) == len(by_chunk) > 1
    for (number, ours), (same, theirs) in zip(found.by_chunk, by_chunk, strict=True):
        assert number == same
        assert [ours.kld.value, ours.ppl_quant.error] == pytest.approx(
            [theirs.kld.value, theirs.ppl_quant.error], rel=1e-12, abs=1e-15, nan_ok=True
        )
    assert found.by_chunk[-1][1].kld == found.totals.kld


def flat(value: Any) -> list[float]:
    """All numbers in a JSON value, in order."""
    if isinstance(value, dict):
        return [number for inner in value.values() for number in flat(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in flat(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def test_statistics_during_the_first_pass_are_of_the_klds_that_are_there(tmp_path: Path) -> None:
    ref, *quants = plain_pair(tmp_path / "pair")
    index = scan_all(Index(ref, quants), stages=["roots"])
    assert pair_stats(index, 0).positions == index.layout.n
    assert math.isnan(pair_stats(index, 0).totals.kld.value)
    index.scan_position(index.layout.position(4))
    stats, kld = pair_stats(index, 0), float(index.pairs[0]["kld"][4])
    assert stats.kld.mean.value == stats.totals.kld.value == stats.kld.median == kld


def test_the_first_rows_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kldtui.index.index._BLOCK_BYTES", 1)
    monkeypatch.setattr("kldtui.index.index._YIELD_SECONDS", 1000)
    recordings = [open_recording(each.path) for each in plain_pair(tmp_path / "pair")]
    index = Index(recordings[0], recordings[1:], Keeper(tmp_path / "cache"))
    told: list[Progress] = list(index.scan(stages=["roots"]))
    assert (told[0].first, told[0].last) == (0, 1)
    assert told[-1].done == index.layout.n
