"""`kldtui scan` and `kldtui cache`: index files by the command, stopped scans, saved indexes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kldtui.cli import cli
from kldtui.index import Index, Keeper, State
from kldtui.index.merge import merge_scans
from kldtui.index.scan_writer import write_scan
from kldtui.index.scanfile import is_scan_file
from kldtui.labels import LabelStore, ReviewIdentity
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.review.session import Session
from tests.builders import Stream, write_kld
from tests.builders_index import plain_pair, scan_all


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_scanned_in_two_parts_and_reviewed_without_the_recordings(tmp_path: Path) -> None:
    plain_pair(tmp_path)
    ref, quant = tmp_path / "ref.kld", tmp_path / "quant.kld"
    for name, chunks in (("a", "0-3"), ("b", "4-5")):
        done = run("scan", ref, "--quant", quant, "-o", tmp_path / name, "--chunks", chunks)
        assert done.exit_code == 0, done.output
        assert f"chunks {chunks}" in done.stdout
    done = run("scan", "--merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "ab.scan")
    assert done.exit_code == 0, done.output
    expected = run("flips", ref, "--quant", quant, "--json").stdout
    (tmp_path / "away").mkdir()
    for path in (ref, quant):
        path.rename(tmp_path / "away" / path.name)
    assert run("flips", tmp_path / "ab.scan", "--json").stdout == expected
    session = Session.open(tmp_path / "ab.scan", [])
    assert session.names == ("quant",)
    assert session.counts[0].roots == len(json.loads(expected))
    detail = session.detail(session.position(3), 0, 5)
    assert detail.rows == ()
    assert "only their index" in detail.ref_words
    session.close()


def test_labels_made_with_the_recordings_fit_the_index_file(tmp_path: Path) -> None:
    ref, quant = plain_pair(tmp_path)
    run("scan", ref.path, "--quant", quant.path, "-o", tmp_path / "x.scan")
    named = {"quant": quant}
    store = LabelStore.open(tmp_path / "l.json", ReviewIdentity.of(ref, named), "me")
    store.set(Position(0, 20), "quant", "recovers", {})
    store.close()
    session = Session.open(tmp_path / "x.scan", [])
    labels = session.keep_labels(tmp_path / "l.json", "me")
    assert labels.class_of(Position(0, 20), "quant") == "recovers"
    assert not labels.warnings
    session.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{ref}"], "at least one quant"),
        (["{ref}", "{quant}", "--quant", "{quant}"], "one REF"),
        (["--merge", "{ref}"], "-o FILE"),
        (["--merge", "{ref}", "-o", "{out}"], "ref.kld: is no index file"),
        (["{ref}", "--quant", "{quant}", "-o", "."], "is a folder"),
        (["{ref}", "--quant", "{quant}", "-o", ""], "the path is empty"),
        (["--merge", "{ref}", "-o", "{out}", "--chunks", "1-2"], "nothing else"),
        (["--merge", "{ref}", "-o", "{out}", "--tokenizer", "{ref}"], "nothing else"),
        (["{ref}", "--quant", "{quant}", "--chunks", "2-1"], "ends before it begins"),
        (["{ref}", "--quant", "{quant}", "--chunks", "two"], "write chunks as 0-99"),
        (["{ref}", "--quant", "{quant}", "--chunks", "7-9", "-o", "{out}"], "no chunks 7"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    tmp_path: Path, words: list[str], said: str
) -> None:
    plain_pair(tmp_path)
    paths = {name: str(tmp_path / f"{name}.kld") for name in ("ref", "quant")}
    done = run("scan", *(word.format(**paths, out=tmp_path / "out") for word in words))
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_scan_that_is_interrupted_goes_on_from_there(tmp_path: Path) -> None:
    # Unwritten records: a scan of many seconds in a file that takes no space.
    stream = Stream(np.zeros((200, 512), np.int32), 150_000)
    path = write_kld(tmp_path / "long.kld", stream)
    os.truncate(path, stream.size)
    command: list[str | Path] = [sys.executable, "-m", "kldtui", "scan", path, "--quant", path]
    command += ["-o", tmp_path / "o"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folder = Path(os.environ["KLDTUI_CACHE"]) / "index"
    before = set(folder.glob("*.columns")) if folder.exists() else set()
    end = time.monotonic() + 30
    while time.monotonic() < end and not (set(folder.glob("*.columns")) - before):
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command goes on from here" in said
    assert "Traceback" not in said
    assert not (tmp_path / "o").exists()
    recording = open_recording(path)
    index = Index(recording, [recording], Keeper(folder))
    assert (index.pairs[0]["state"] != State.PENDING).any()
    index.close()


def test_saved_indexes_are_listed_pruned_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KLDTUI_CACHE", str(tmp_path / "cache"))
    plain_pair(tmp_path)
    run("scan", tmp_path / "ref.kld", "--quant", tmp_path / "quant.kld")
    listed = run("cache", "list").stdout
    assert "ref.kld → quant.kld" in listed
    assert "2 tables" in listed
    found = json.loads(run("cache", "list", "--json").stdout)
    assert {len(each["recordings"]) for each in found} == {1, 2}
    assert {each["positions"] for each in found} == {90}
    old = time.time() - 100 * 86400
    os.utime(found[0]["path"], (old, old))
    assert "removed 1 tables" in run("cache", "prune").stdout
    assert "removed 1 tables" in run("cache", "clear").stdout
    assert json.loads(run("cache", "list", "--json").stdout) == []


def test_a_scan_that_nothing_would_be_left_of_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, quant = (recording.path for recording in plain_pair(tmp_path)[:2])
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("KLDTUI_CACHE", str(blocked))
    result = run("scan", ref, "--quant", quant)
    assert result.exit_code == 2
    assert "no index can be kept there" in result.output
    assert str(blocked) in result.output
    assert run("scan", ref, "--quant", quant, "-o", tmp_path / "index").exit_code == 0


def test_where_no_index_file_can_be_written_it_is_named_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, quant = (recording.path for recording in plain_pair(tmp_path / "data")[:2])
    out = tmp_path / "out" / "x.scan"
    result = run("scan", ref, "--quant", quant, "-o", out)
    assert result.exit_code == 2
    assert result.output.startswith(f"kldtui: {out}: there is no folder {out.parent}")
    out.parent.mkdir()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", full)
        result = run("scan", ref, "--quant", quant, "-o", out)
    assert result.exit_code == 2
    assert f"kldtui: {out}: cannot be written: No space left on device" in result.output
    assert not list(out.parent.iterdir())


def test_text_is_read_where_no_tokenizer_is_of_parts_and_of_the_whole(tmp_path: Path) -> None:
    recordings = plain_pair(tmp_path / "data")
    words = {token: b" w%d" % token for token in range(0, recordings[0].shape.n_vocab, 2)}
    words[4] = b"\xe6\x97"
    index = scan_all(Index(recordings[0], recordings[1:]))
    named = [(recording.path.stem, recording) for recording in recordings[1:]]
    paths = []
    for chunks in ((0, 1), (1, recordings[0].shape.n_chunk)):
        paths.append(tmp_path / f"{chunks[0]}.scan")
        write_scan(paths[-1], index, recordings[0], named, chunks=chunks, piece=words.get)
    whole = merge_scans(paths, tmp_path / "whole.scan")
    occurring = {int(t) for c in range(index.layout.n_chunk) for t in recordings[0].tokens(c)}
    for table, name in ((index.ref, "ref_id"), *((pair, "quant_id") for pair in index.pairs)):
        occurring |= {int(token) for token in table[name]}
    assert whole.pieces() == {t: data for t, data in words.items() if t in occurring}
    session = Session.open(whole.path, [])
    assert session.vocab.source == "pieces in ref.kld"
    assert session.vocab.piece(4) == (b"\xe6\x97" if 4 in occurring else None)
    session.close()


def put_file(path: Path) -> None:
    path.write_text("notes")


def put_link(path: Path) -> None:
    path.with_name("notes").write_text("notes")
    path.symlink_to("notes")


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("put", [put_file, put_link, put_pipe])
@pytest.mark.parametrize("merge", [False, True])
def test_an_index_file_is_written_over_nothing_but_another(
    put: Callable[[Path], None], merge: bool, tmp_path: Path
) -> None:
    ref, quant = (recording.path for recording in plain_pair(tmp_path)[:2])
    out, one = tmp_path / "out", tmp_path / "one"
    assert run("scan", ref, "--quant", quant, "-o", one).exit_code == 0
    put(out)
    before = os.lstat(out)
    words: list[str | Path] = ["--merge", one] if merge else [ref, "--quant", quant]
    for path in (out, *(() if merge else (ref, quant))):
        data = path.read_bytes() if path.is_file() else b""
        done = run("scan", *words, "-o", path)
        assert done.exit_code == 2
        assert done.output.startswith(f"kldtui: {path}: ")
        assert done.output.endswith("name another file with -o FILE\n")
        assert not path.is_file() or path.read_bytes() == data
    after = os.lstat(out)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    link = tmp_path / "link"
    link.symlink_to("one")
    assert run("scan", *words, "-o", link).exit_code == 0
    assert link.is_symlink()
    assert is_scan_file(one)
    one.chmod(0o444)
    assert "read-only" in run("scan", *words, "-o", one).output
