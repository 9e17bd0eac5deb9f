"""Damaged runs: what is broken is named, and what is whole of a cut run is read."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kldtui.errors import (
    DamagedRecording,
    KldtuiError,
    NotARecording,
    RecordingChanged,
    RecordingError,
    UnsupportedRecording,
)
from kldtui.position import Position
from kldtui.recordings import run_text
from kldtui.recordings.run import open_run
from kldtui.recordings.run_writer import RunWriter
from tests.builders_run import (
    AT,
    CHUNK,
    HEADER,
    POSITION,
    At,
    Contents,
    Plan,
    any_run,
    contents,
    contents_of,
    edited,
    first_member,
    folder,
    opened,
    plans,
    raw_run,
    small_run,
    written,
)

# -- what is broken is named ----------------------------------------------------------------------

HUGE = "1" + "0" * 5000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "no JSON"),
        ("[1, 2]", "not a JSON object"),
        (b'{"chunk":0,"t":3,"token":10,"top":[[4,-0.5]],"x":"\xff"}', "not UTF-8"),
        ('{"chunk":' + HUGE + "}", "number"),
        ('{"chunk":0,"t":3,"token":10,"top":' + "[" * 100_000 + "}", "nested"),
        ('{"chunk":0,"t":3,"tok{"chunk":0,"t":3,"token":10,"top":[[4,-0.5]]}', "no JSON"),
        ('{"chunk":0,"t":3,"token":10,"top":[[4,-0.5]],"t":2}', "twice"),
        ({"chunk": 1, "t": 3, "token": 10, "top": [[4, -0.5]]}, "chunk 1, which no line"),
        (edited(POSITION, token=11), "token 11 at c0:t3, where the chunk has 10"),
        (edited(POSITION, t=0), "t 0"),
        (edited(POSITION, t=4), "t 4"),
        (edited(POSITION, t=-1), "t is -1"),
        (edited(POSITION, t=3.0), "t is 3.0"),
        (edited(POSITION, chunk=True), "chunk is true"),
        ({"chunk": 0, "t": 3, "token": 10}, "without top"),
        (edited(POSITION, top=[]), "empty"),
        (edited(POSITION, top={"4": -0.5}), "top is"),
        (edited(POSITION, top=[4, -0.5]), "top is not a list"),
        (edited(POSITION, top=["ab", "cd"]), "token id"),
        (edited(POSITION, top=[[4, -0.5, 1]]), "top is not a list"),
        (edited(POSITION, top=[["4", -0.5]]), "token id"),
        (edited(POSITION, top=[[20, -0.5]]), "n_vocab"),
        (edited(POSITION, top=[[-1, -0.5]]), "n_vocab"),
        (edited(POSITION, top=[[4, -0.9], [4, -0.9]]), "id twice"),
        (edited(POSITION, top=[[4, "-0.5"]]), "not a number"),
        (edited(POSITION, top=[[4, False]]), "not a number"),
        (edited(POSITION, top=[[4, 0.5]]), "above 0"),
        (edited(POSITION, top=[[4, math.inf]]), "above 0"),
        (edited(POSITION, top=[[4, -(10**400)]]), "out of range"),
        (edited(POSITION, top=[[4, -0.3], [5, -0.4]]), "add up to 1.41"),
        (edited(POSITION, logp=0.5), "logp has a log-probability above 0"),
        (edited(POSITION, logp="x"), "logp is"),
        (edited(POSITION, extra=[[20, -1.0]]), "extra has an id"),
        (edited(POSITION, kld="x"), "kld is"),
        ({"chunk": 0}, "not a list of token ids"),
        ({"chunk": 0, "tokens": [7, 8, 9, 11]}, "chunk 0 again, differently"),
        ({"chunk": 2, "tokens": [7, 8, 9, 11]}, "chunk 2 where 1 is the next"),
        ({"chunk": 1, "tokens": [7, 8, 9, 7, 8]}, "5 tokens, more than n_ctx 4"),
        ({"chunk": 1, "tokens": [7, 8, 9, 20]}, "n_vocab"),
        ({"chunk": 1, "tokens": [7, 8, 9, "1"]}, "not a list of token ids"),
        ({"pieces": ["a"]}, "pieces is not"),
        ({"pieces": {"01": "a"}}, "place of a token id"),
        ({"pieces": {"20": "a"}}, "n_vocab"),
        ({"pieces": {"1": {"hex": "zz"}}}, "piece of id 1"),
        ('{"pieces":{"1":"\\ud800"}}', "piece of id 1"),
        ({"pieces": {"3": "b"}}, "another piece"),
        (HEADER, "second header"),
    ],
)
def test_a_damaged_line_is_named(
    line: dict[str, Any] | str | bytes, words: str, tmp_path: Path
) -> None:
    path = small_run(tmp_path / "run", {"pieces": {"3": "a"}}, line, edited(POSITION, t=2, token=9))
    with pytest.raises(
        DamagedRecording, match=f"{re.escape(str(path))}: line 4: .*{words}"
    ) as caught:
        contents_of(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("header", "error", "words"),
    [
        (edited(HEADER, version=2), UnsupportedRecording, "version 2"),
        (edited(HEADER, version="1"), UnsupportedRecording, 'version "1"'),
        (edited(HEADER, kind="dreamt"), UnsupportedRecording, 'kind "dreamt"'),
        (edited(HEADER, bos={"rule": "twice"}), UnsupportedRecording, 'BOS rule "twice"'),
        (edited(HEADER, bos={"rule": "replaces_first"}), DamagedRecording, "bos.id"),
        (edited(HEADER, n_ctx=None), DamagedRecording, "n_ctx is null"),
        (edited(HEADER, n_vocab=2**31), DamagedRecording, "n_vocab"),
        (edited(HEADER, n_chunk=-1), DamagedRecording, "n_chunk"),
        (edited(HEADER, engine="llama"), DamagedRecording, "engine"),
        (edited(HEADER, format="kldtui-walk"), NotARecording, "is no kldtui-run"),
        ({"version": 1}, NotARecording, "is no kldtui-run"),
    ],
)
def test_an_unusable_header_is_named(
    header: dict[str, Any], error: type[KldtuiError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        open_run(raw_run(tmp_path / "run", [header, CHUNK]))


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kldtui.recordings.run_scan._MAX_LINE", 1 << 20)
    monkeypatch.setattr(run_text, "_BLOCK", 1 << 16)
    path = small_run(tmp_path / "run")
    with path.open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(DamagedRecording, match="line 3: is longer"):
        open_run(path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", POSITION, {"remark": "x"}, n_chunk=2, n_positions=2)
    with opened(path) as run:
        assert run.shape.n_chunk == 1
        assert (run.records, run.records_expected) == (1, 2)
        assert not run.whole
        assert run.problems == (
            "holds 1 of 2 chunks",
            "holds 1 of 2 positions",
            "1 lines of an unknown kind were skipped, the first is line 4",
        )


def test_of_a_position_that_is_recorded_twice_the_later_line_counts(tmp_path: Path) -> None:
    again = edited(POSITION, logp=-2.0, top=[[5, -0.25]])
    other = edited(POSITION, t=2, token=9)
    with opened(small_run(tmp_path / "run", POSITION, other, again)) as run:
        assert run.records == 2
        assert run.scored(0).tolist() == [2, 3]
        assert contents(run).positions[AT] == At({5: -0.25}, -2.0)
        assert run.problems == ("1 positions are recorded again; the last line counts",)


def test_a_chunk_may_be_declared_again_as_it_was(tmp_path: Path) -> None:
    with opened(small_run(tmp_path / "run", POSITION, CHUNK)) as run:
        assert (run.shape.n_chunk, run.records, run.problems) == (1, 1, ())


def test_only_what_is_there_is_given(tmp_path: Path) -> None:
    with opened(small_run(tmp_path / "run", POSITION)) as run:
        for position in (Position(0, 2), Position(1, 3), Position(0, 4)):
            assert run.row(position) is None
        for chunk in (-1, 1):
            with pytest.raises(IndexError):
                run.tokens(chunk)
        with pytest.raises(IndexError):
            run.rows(0, 0, 2)
        assert len(run.rows(0, 1, 1)) == 0


# -- cut and flipped ------------------------------------------------------------------------------


def is_part(part: Contents, whole: Contents) -> bool:
    """Whether `part` says nothing that `whole` does not say."""
    n = len(part.tokens)
    return (
        part.tokens == whole.tokens[:n]
        and part.prompts == whole.prompts[:n]
        and part.positions.items() <= whole.positions.items()
        and part.pieces.items() <= whole.pieces.items()
    )


@any_run
@given(plans(), st.data())
def test_any_cut_of_a_plain_run_leaves_its_whole_lines(plan: Plan, data: st.DataObject) -> None:
    with folder() as tmp:
        whole = written(tmp, plan).read_bytes()
        cut = data.draw(st.integers(0, len(whole) - 1))
        (tmp / "cut").write_bytes(whole[:cut])
        ends = [m.end() for m in re.finditer(b"\n", whole)]
        kept = max([end for end in ends if end - 1 <= cut], default=0)
        if not kept:
            with pytest.raises((DamagedRecording, NotARecording)):
                open_run(tmp / "cut")
            return
        (tmp / "lines").write_bytes(whole[:kept])
        with opened(tmp / "cut") as run:
            assert contents(run) == contents_of(tmp / "lines")
            assert any("is cut" in p for p in run.problems) == (cut > kept)
            assert not (run.whole and cut > kept)


@any_run
@given(plans(), st.data())
def test_any_cut_of_a_gzip_run_leaves_its_whole_members(plan: Plan, data: st.DataObject) -> None:
    with folder() as tmp:
        path = written(tmp, plan, compress=True)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole) - 1))
        (tmp / "cut").write_bytes(whole[:cut])
        try:
            part = contents_of(tmp / "cut")
        except (DamagedRecording, NotARecording):
            assert cut < first_member(whole)
            return
        assert is_part(part, plan.expected())
        with opened(tmp / "cut") as run:
            assert part == plan.expected() or (run.problems and not run.whole)
            assert not (run.problems and run.whole)


@any_run
@given(plans(), st.data())
def test_a_flipped_bit_is_named_or_changes_its_line_alone(plan: Plan, data: st.DataObject) -> None:
    with folder() as tmp:
        whole = bytearray(written(tmp, plan).read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        number = whole[:at].count(b"\n")
        before = whole.split(b"\n")[number]
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        (tmp / "flipped").write_bytes(whole)
        try:
            found = contents_of(tmp / "flipped")
        except RecordingError:
            return
        lines = [json.loads(before)]
        after = whole.split(b"\n")
        if len(after) > number and after[number].startswith(b"{"):
            with suppress(ValueError):
                lines.append(json.loads(after[number]))
        assert without(found, lines) == without(plan.expected(), lines)


def without(said: Contents, lines: list[dict[str, Any]]) -> Contents:
    """What is said apart from what these lines say."""
    said = replace(said, positions=dict(said.positions), pieces=dict(said.pieces))
    for line in lines:
        if "t" in line:
            said.positions.pop(Position(line.get("chunk", 0), line["t"]), None)
        elif "tokens" in line or "chunk" in line:
            said = replace(said, tokens=[], prompts=[])
        elif "format" not in line:
            for token in line.get("pieces", {}):
                said.pieces.pop(int(token), None)
    return said


@any_run
@given(plans(), st.data())
def test_a_flipped_bit_in_gzip_data_is_named_or_harmless(plan: Plan, data: st.DataObject) -> None:
    with folder() as tmp:
        whole = bytearray(written(tmp, plan, compress=True).read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        (tmp / "flipped").write_bytes(whole)
        try:
            run = open_run(tmp / "flipped")
        except RecordingError:
            return
        try:
            assert run.problems or contents(run) == plan.expected()
        finally:
            run.close()


# -- changed while open ---------------------------------------------------------------------------


def test_a_run_that_grows_while_it_is_open_stays_readable(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", POSITION)
    with opened(path) as run:
        with RunWriter.append(path) as writer:
            writer.position(Position(0, 2), [(4, -0.5)])
        assert run.row(AT) is not None
        assert run.row(Position(0, 2)) is None


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def replaced(path: Path) -> None:
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").replace(path)


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    if data.startswith(run_text.GZIP_MAGIC):
        path.write_bytes(gzip.compress(gzip.decompress(data).replace(old, new)))
    else:
        path.write_bytes(data.replace(old, new))


def another_header(path: Path) -> None:
    rewritten(path, b'"n_vocab": 20', b'"n_vocab": 21')


def other_positions(path: Path) -> None:
    rewritten(path, b'"t": 3', b'"t": 2')


@pytest.mark.parametrize("change", [shrink, replaced, another_header, other_positions])
@pytest.mark.parametrize("compress", [False, True])
def test_a_run_that_changes_while_it_is_open_is_not_read_on(
    change: Any, compress: bool, tmp_path: Path
) -> None:
    path = small_run(tmp_path / "run", edited(CHUNK, note="x" * 5000), POSITION)
    if compress:
        path.write_bytes(gzip.compress(path.read_bytes()))
    with opened(path) as run:
        change(path)
        os.utime(path, ns=(1, 1))
        with pytest.raises(RecordingChanged, match=re.escape(str(path))):
            run.rows(0, 0, 1)


def test_a_closed_run_is_not_read(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path / "run", POSITION))
    run.close()
    run.close()
    with pytest.raises(RecordingError):
        run.row(AT)
