"""Index files: made where the recordings are, joined, and reviewed where they are not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.branching.prefix import bos_warning, prefix_of
from kldtui.cli import cli
from kldtui.errors import DamagedRecording, KldtuiError, RecordingError, UnsupportedRecording
from kldtui.index import Index, Keeper, State
from kldtui.index.merge import merge_scans
from kldtui.index.scan_writer import write_scan
from kldtui.index.scanfile import ScanFile, is_scan_file
from kldtui.position import Position
from kldtui.recordings import Recording, open_recording
from kldtui.recordings.base import Made
from kldtui.recordings.run_writer import RunWriter
from kldtui.report import runs_of
from kldtui.report.diverging import divergence_of
from tests.builders import make_logits, make_stream, write_kld
from tests.builders_index import mixed_pair, open_files, plain_pair, same, scan_all
from tests.builders_run import run_of


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def whole(folder: Path, recordings: list[Recording], **options: object) -> tuple[Path, Index]:
    """An index file of all that recordings say, and the index."""
    index = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    path = folder / "x.scan"
    named = [(recording.path.stem, recording) for recording in recordings[1:]]
    write_scan(path, index, recordings[0], named, **options)  # type: ignore[arg-type]
    return path, index


def test_a_file_holds_what_the_index_does(tmp_path: Path) -> None:
    recordings = mixed_pair(tmp_path / "data")
    path, index = whole(tmp_path, recordings)
    assert is_scan_file(path)
    for keeper in (None, Keeper(tmp_path / "cache"), Keeper(tmp_path / "cache")):
        again, absent = ScanFile.open(path).index(keeper)
        tables = zip([index.ref, *index.pairs], [again.ref, *again.pairs], strict=True)
        assert all(same(a, b) for a, b in tables)
        assert again.common_chunks == index.common_chunks
        assert again.layout.position(17) == index.layout.position(17)
        assert again.notes[1][0].startswith("the recordings are not here")
        assert again.notes[1][1:] == index.notes[1]
        for mine, theirs in zip(absent, recordings, strict=True):
            assert mine.shape == theirs.shape
            for chunk in range(theirs.shape.n_chunk):
                assert np.array_equal(mine.tokens(chunk), theirs.tokens(chunk))
        assert list(again.scan()) == []
        again.close()


def test_runs_with_gaps_come_through_too(tmp_path: Path) -> None:
    ref, quant = plain_pair(tmp_path / "data")
    run_file = open_recording(run_of(ref, tmp_path / "ref.gguf-run", top_n=5))
    path, index = whole(tmp_path, [run_file, quant])
    again, absent = ScanFile.open(path).index()
    assert same(again.pairs[0], index.pairs[0])
    assert again.layout.index(Position(3, 20)) == index.layout.index(Position(3, 20))
    assert np.array_equal(absent[0].tokens(5), ref.tokens(5))


def told_run(ref: Recording, path: Path) -> Recording:
    """A run of a reference's stream that states its BOS rule, its turns and its tags."""
    with RunWriter.create(
        path,
        kind="rollout",
        n_ctx=ref.shape.n_ctx,
        n_vocab=ref.shape.n_vocab,
        add_bos=False,
        bos_id=1,
        fields={"tools": [["f"]]},
    ) as writer:
        for chunk in range(ref.shape.n_chunk):
            turns = [[4, 9 + chunk], [12, 32]]
            said = {"turns": turns, "tags": [["user", 0, 4]], "stop": "eog"}
            writer.chunk(ref.tokens(chunk), prompt_length=4, fields=said)
            for t in range(4, ref.shape.n_ctx):
                token = int(ref.tokens(chunk)[t])
                writer.position(Position(chunk, t), [(token, -0.1), ((token + 1) % 40, -4.0)])
    return open_recording(path)


@pytest.mark.parametrize("parts", [[(0, 6)], [(0, 2), (2, 6)], [(1, 6), (0, 3)]])
def test_what_a_run_says_of_its_text_is_in_its_index_file(
    tmp_path: Path, parts: list[tuple[int, int]]
) -> None:
    """Else the same review would send other prefixes to the server, and count by other runs."""
    ref = told_run(plain_pair(tmp_path / "data")[0], tmp_path / "ref.run")
    index = scan_all(Index(ref, [ref]), compiled=False)
    paths = [tmp_path / f"{a}-{b}.scan" for a, b in parts]
    for path, chunks in zip(paths, parts, strict=True):
        write_scan(path, index, ref, [("q", ref)], chunks=chunks)
    file = ScanFile.open(paths[0]) if len(parts) == 1 else merge_scans(paths, tmp_path / "j.scan")
    again, (absent, *_) = file.index()
    assert absent.made == ref.made
    assert [absent.chunk_fields(c) for c in range(6)] == [ref.chunk_fields(c) for c in range(6)]
    at = Position(1, 6)
    assert prefix_of(absent, at, True, 9) == prefix_of(ref, at, True, 9)
    assert bos_warning(absent, True, 9) == bos_warning(ref, True, 9)
    assert runs_of(again, absent) == runs_of(index, ref)
    assert divergence_of(again, 0, runs_of(again, absent)).unit == "turn"


def test_a_part_says_nothing_of_the_chunks_that_it_does_not_hold(tmp_path: Path) -> None:
    ref = told_run(plain_pair(tmp_path / "data")[0], tmp_path / "ref.run")
    index = scan_all(Index(ref, [ref]), compiled=False)
    write_scan(tmp_path / "x.scan", index, ref, [("q", ref)], chunks=(2, 4))
    absent = ScanFile.open(tmp_path / "x.scan").recordings()[0]
    assert [bool(absent.chunk_fields(chunk)) for chunk in range(6)] == [0, 0, 1, 1, 0, 0]
    assert absent.chunk_fields(3) == ref.chunk_fields(3)


def test_a_file_from_before_what_is_said_of_the_text_was_kept_is_read(tmp_path: Path) -> None:
    path, _ = whole(tmp_path, plain_pair(tmp_path / "data"))
    data = path.read_bytes()
    end = data.index(b"\0") - 9
    start = data.index(b"{")
    head = json.loads(data[start:end])
    for about in head["recordings"]:
        for name in ("kind", "add_bos", "bos_id", "tools"):
            del about[name]
        about["sampling"] = {"temperature": 0.7}
    text = json.dumps(head).encode()
    begin = data[: start - 17] + f"{len(text):016x}\n".encode() + text
    path.write_bytes(begin.ljust(len(data[: data.index(b"\0")]), b"\0") + data[end + 9 :])
    index, (ref, _) = ScanFile.open(path).index()
    assert index.drawn
    assert ref.made == Made(sampling={"temperature": 0.7})


def test_rows_that_are_not_here_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    path, _ = whole(tmp_path, plain_pair(tmp_path / "data"))
    ref = ScanFile.open(path).recordings()[0]
    assert ref.row(Position(0, 20)) is None
    with pytest.raises(RecordingError, match="not here, only their index"):
        ref.rows(0, 0, 1)


# -- parts ----------------------------------------------------------------------------------------


def parts_of(tmp_path: Path, *ranges: tuple[int, int]) -> list[Path]:
    recordings = mixed_pair(tmp_path / "data")
    named = [(recording.path.stem, recording) for recording in recordings[1:]]
    paths = []
    for a, b in ranges:
        index = Index(recordings[0], recordings[1:])
        scan_all(index, chunks=(a, b), compiled=False)
        paths.append(tmp_path / f"{a}-{b}.scan")
        write_scan(paths[-1], index, recordings[0], named, chunks=(a, b))
    return paths


@pytest.mark.parametrize(
    "ranges", [((0, 2), (2, 6)), ((3, 6), (0, 3)), ((0, 4), (2, 6)), ((0, 1), (1, 5), (5, 6))]
)
def test_parts_joined_are_the_whole(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    joined = merge_scans(parts_of(tmp_path, *ranges), tmp_path / "joined.scan")
    recordings = mixed_pair(tmp_path / "data")
    path, _ = whole(tmp_path, recordings)
    one, two = joined.index()[0], ScanFile.open(path).index()[0]
    tables = zip([one.ref, *one.pairs], [two.ref, *two.pairs], strict=True)
    assert all(same(a, b) for a, b in tables)
    assert np.array_equal(joined.array("tokens"), ScanFile.open(path).array("tokens"))


def test_a_part_alone_says_which_it_is_and_leaves_the_rest_pending(tmp_path: Path) -> None:
    joined = merge_scans(parts_of(tmp_path, (1, 2), (2, 4)), tmp_path / "joined.scan")
    index, (ref, *_) = joined.index()
    assert index.notes[0][0] == "holds chunks 1-3 of 6"
    per = index.layout.n // 6
    done = np.flatnonzero(index.ref["state"] != State.PENDING)
    assert sorted({int(i) // per for i in done}) == [1, 2, 3]
    assert ref.tokens(3).min() >= 0
    assert (ref.tokens(4) == -1).all(), "tokens of a chunk that the file does not hold are unknown"


def test_parts_with_a_gap_between_them_are_not_joined(tmp_path: Path) -> None:
    """The joined file would claim the chunks of the gap, and never be complete."""
    out = tmp_path / "joined.scan"
    parts = parts_of(tmp_path, (5, 6), (0, 1), (2, 3))
    with pytest.raises(KldtuiError, match=r"no file holds chunk 1, chunks 3-4; scan them") as error:
        merge_scans(parts, out)
    assert "\n" not in str(error.value)
    done = run("scan", "--merge", *parts[1:], "-o", out)
    assert (done.exit_code, out.exists()) == (2, False)
    assert "no file holds chunk 1;" in done.stderr


def test_a_joined_stream_may_begin_with_an_unknown_token(tmp_path: Path) -> None:
    parts = []
    stream = make_stream(2, 32, 40)
    stream.tokens[1, 0] = -1
    ref, quant = (
        open_recording(write_kld(tmp_path / f"{name}.kld", stream, make_logits(stream, seed)))
        for seed, name in enumerate(("ref", "quant"))
    )
    for chunk in (0, 1):
        index = scan_all(Index(ref, [quant]), chunks=(chunk, chunk + 1), compiled=False)
        parts.append(tmp_path / f"{chunk}.scan")
        write_scan(parts[-1], index, ref, [("quant", quant)], chunks=(chunk, chunk + 1))
    joined = merge_scans(parts, tmp_path / "joined.scan")
    assert np.array_equal(joined.array("tokens"), stream.tokens.ravel())


@pytest.mark.parametrize("first", ["whole", "half"])
def test_of_parts_that_overlap_what_was_scanned_to_the_end_is_taken(
    tmp_path: Path, first: str
) -> None:
    """A file of the first pass alone takes no KLD from one that has it, whichever comes first."""
    ref, quant = plain_pair(tmp_path / "data")
    files = {}
    for name, stages, chunks in (
        ("whole", ("roots", "rest"), (0, 4)),
        ("half", ("roots",), (2, 6)),
    ):
        index = scan_all(Index(ref, [quant]), chunks=chunks, stages=stages, compiled=False)
        files[name] = tmp_path / f"{name}.scan"
        write_unfinished(files[name], index, ref, quant, chunks)
    names = [first, *(files.keys() - {first})]
    joined, _ = merge_scans([files[name] for name in names], tmp_path / "joined.scan").index()
    known = ~np.isnan(joined.pairs[0]["kld"]) & (joined.pairs[0]["rest"] == 1)
    held = joined.layout.chunks(np.flatnonzero(known))
    assert sorted(set(held.tolist())) == [0, 1, 2, 3]
    assert known.sum() == 4 * (joined.layout.n // 6)
    assert (joined.pairs[0]["state"] == State.SCORED).all()


def write_unfinished(
    path: Path, index: Index, ref: Recording, quant: Recording, chunks: tuple[int, int]
) -> None:
    """An index file as they once were written of scans that had not come to their end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Index, "scanned", lambda *_: True)
        write_scan(path, index, ref, [("quant", quant)], chunks=chunks)


def test_an_unfinished_scan_is_not_written_since_nothing_could_complete_the_file(
    tmp_path: Path,
) -> None:
    ref, quant = plain_pair(tmp_path / "data")
    index = scan_all(Index(ref, [quant]), stages=("roots",), compiled=False)
    scan_all(index, chunks=(1, 3), compiled=False)
    path = tmp_path / "x.scan"
    with pytest.raises(KldtuiError, match=r"x\.scan: is not written: chunks 1-3 of .*ref\.kld"):
        write_scan(path, index, ref, [("quant", quant)], chunks=(1, 4))
    assert not path.exists()
    write_scan(path, index, ref, [("quant", quant)], chunks=(1, 3))
    assert not np.isnan(ScanFile.open(path).array("1/kld")).any()


def test_parts_of_other_recordings_are_not_joined(tmp_path: Path) -> None:
    [one] = parts_of(tmp_path, (0, 3))
    changed = tmp_path / "data" / "q1.kld"
    changed.write_bytes(changed.read_bytes()[:-5])
    recordings = [open_recording(tmp_path / "data" / f"{n}.kld") for n in ("ref", "q1", "q2")]
    other, _ = whole(tmp_path, recordings)
    with pytest.raises(KldtuiError, match=r"x\.scan is not of .*q1\.kld is another file"):
        merge_scans([one, other], tmp_path / "joined.scan")
    named = [("a", recordings[1]), ("b", recordings[2])]
    index = scan_all(Index(recordings[0], recordings[1:]), compiled=False)
    write_scan(other, index, recordings[0], named)
    with pytest.raises(KldtuiError, match="quants a, b, not q1, q2"):
        merge_scans([one, other], tmp_path / "joined.scan")
    assert not (tmp_path / "joined.scan").exists()


def test_damage_is_named_and_nothing_of_it_shown(tmp_path: Path) -> None:
    path, _ = whole(tmp_path, plain_pair(tmp_path / "data"))
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-100] ^= 1
    for broken, error, words in (
        (data[: len(data) // 2], DamagedRecording, "cut short"),
        (data[:40], DamagedRecording, "damaged head"),
        (data.replace(b'"chunks"', b'"chanks"'), DamagedRecording, "damaged head"),
        (data.replace(b"kldtui-scan 1", b"kldtui-scan 7"), UnsupportedRecording, "another version"),
        (bytes(flipped), DamagedRecording, r"damaged in 1/\w+"),
    ):
        path.write_bytes(broken)
        with pytest.raises(error, match=words):
            ScanFile.open(path).index()


def test_a_damaged_file_leaves_nothing_open(tmp_path: Path) -> None:
    path, _ = whole(tmp_path, plain_pair(tmp_path / "data"))
    file = ScanFile.open(path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    before = open_files()
    with pytest.raises(DamagedRecording):
        file.index(Keeper(tmp_path / "cache"))
    assert open_files() == before


def without_a_sum(data: bytes) -> bytes:
    """An index file as they once were."""
    end = data.index(b"\0")
    return data[: end - 9] + bytes(9) + data[end:]


def what_it_says(path: Path) -> list[object]:
    file = ScanFile.open(path)
    index, recordings = file.index()
    tables = [table[:].tobytes() for table in (index.ref, *index.pairs)]
    about = [
        (r.path, r.shape, r.problems, r.label_identity, r.tokens(0).tolist()) for r in recordings
    ]
    return [file.names, file.floor, index.notes, tables, about]


@pytest.mark.parametrize("made_of", ["files", "runs"])
def test_a_file_from_before_heads_had_a_sum_is_read(tmp_path: Path, made_of: str) -> None:
    path = index_file_of(tmp_path, made_of)
    expected = what_it_says(path)
    path.write_bytes(without_a_sum(path.read_bytes()))
    assert what_it_says(path) == expected


def index_file_of(folder: Path, made_of: str) -> Path:
    recordings = plain_pair(folder / "data")
    if made_of == "runs":
        recordings[0] = open_recording(run_of(recordings[0], folder / "ref.gguf-run", top_n=5))
    return whole(folder, recordings)[0]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, list[object]]]:
    """The bytes of an index file of `.kld` files and of one of runs, and what each says."""
    out = {}
    for made_of in ("files", "runs"):
        folder = tmp_path_factory.mktemp(made_of)
        path = index_file_of(folder, made_of)
        name = tmp_path_factory.getbasetemp() / "damaged.scan"
        name.write_bytes(path.read_bytes())
        out[made_of] = (path.read_bytes(), what_it_says(name))
    return out


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_damage_anywhere_is_named_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    sound: dict[str, tuple[bytes, list[object]]],
    data: st.DataObject,
) -> None:
    good, expected = sound[data.draw(st.sampled_from(sorted(sound)))]
    once = data.draw(st.booleans())
    broken = bytearray(without_a_sum(good) if once else good)
    in_head = st.integers(0, good.index(b"\0") - 1)
    at = data.draw(in_head | st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        broken[at] ^= data.draw(st.integers(1, 255))
    else:
        del broken[at:]
    path = tmp_path_factory.getbasetemp() / "damaged.scan"
    path.write_bytes(broken)
    try:
        said = what_it_says(path)
        words = ""
    except KldtuiError as error:
        said, words = expected, str(error)
    assert "\n" not in words
    if not once:  # a head without a sum may say something else, but never fail
        assert said == expected


@pytest.mark.parametrize("length", [b"ffffffffffffffff", b"00000000ffffffff", b"-000000000000001"])
def test_a_damaged_length_reads_no_more_than_a_head_has(tmp_path: Path, length: bytes) -> None:
    path, _ = whole(tmp_path, plain_pair(tmp_path / "data"))
    with path.open("r+b") as file:
        file.seek(len(b"kldtui-scan 1\n"))
        file.write(length)
        os.truncate(path, 1 << 40)  # a hole: takes no space
    with pytest.raises(DamagedRecording, match="damaged head"):
        ScanFile.open(path)
