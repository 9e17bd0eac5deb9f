"""The run format: what is written is read, what is broken is named, what was stopped goes on."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from kldtui.recordings import open_recording, run_sink, run_text
from kldtui.recordings.base import Recording
from kldtui.recordings.run import RunRecording, is_run, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import Invalid, Logp
from tests.builders_run import (
    CHUNK,
    HEADER,
    POSITION,
    At,
    Contents,
    Plan,
    contents,
    contents_of,
    plans,
    raw_run,
    run_of,
    small_run,
)

DOCS = Path(__file__).parents[1] / "docs"
AT = Position(0, 3)
any_run = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def opened(path: Path) -> Iterator[RunRecording]:
    run = open_run(path)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder for each example; tmp_path is one for all of a test's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def edited(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**line, **changes}


# -- the document ----------------------------------------------------------------------------------


def example_lines() -> list[str]:
    text = (DOCS / "run-format.md").read_text()
    match = re.search(r"```jsonl\n(.*?)```", text, re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def line_schema() -> jsonschema.Draft202012Validator:
    schema = json.loads((DOCS / "run.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_documents_example_is_a_whole_run(tmp_path: Path) -> None:
    with opened(raw_run(tmp_path / "example", example_lines())) as run:
        assert run.problems == ()
        assert (run.records, run.records_expected) == (4, 4)
        assert (run.add_bos, run.bos_id) == (True, 1)
        assert run.engine["model"] == "tiny-q4_k_m.gguf"
        assert run.tokens(1).tolist() == [2, 2, 19, 30, 5, 12]
        assert run.pieces[9] == b"\xe6\x97"
        invalid = run.row(Position(1, 4))
        assert invalid is not None
        assert invalid.invalid == Invalid.NOT_A_NUMBER
        row = run.row(Position(0, 5))
        assert row is not None
        assert row.logp(9) == Logp(-8.125, False)
        assert run.recorded_kld(0, 0, 2)[1] == np.float32(0.0172)


def test_the_documents_example_and_python_follow_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = line_schema()
    for line in example_lines():
        validator.validate(json.loads(line))
    text = (DOCS / "run-format.md").read_text()
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    monkeypatch.chdir(tmp_path)
    exec(match[1], {})  # noqa: S102  # our own document
    assert len(contents_of(tmp_path / "tiny.gguf-run").positions) == 2


@any_run
@given(plans())
def test_all_that_is_written_follows_the_schema(plan: Plan) -> None:
    validator = line_schema()
    with folder() as tmp:
        with plan.create(tmp / "run") as writer:
            plan.write(writer)
        for line in (tmp / "run").read_text(encoding="utf-8").split("\n")[:-1]:
            validator.validate(json.loads(line))


@pytest.mark.parametrize(
    "line",
    [
        edited(HEADER, version=2),
        edited(HEADER, bos={"rule": "replaces_first"}),
        {"chunk": 0},
        edited(CHUNK, tokens=[-1]),
        edited(POSITION, t=0),
        edited(POSITION, top=[]),
        edited(POSITION, top=[[4]]),
        edited(POSITION, logp=0.5),
        {"pieces": {"one": "text"}},
        {"pieces": {"1": {"hex": "e"}}},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(line: dict[str, Any], tmp_path: Path) -> None:
    assert not line_schema().is_valid(line)
    lines = [line, CHUNK] if "format" in line else [HEADER, CHUNK, line]
    with pytest.raises(RecordingError):
        contents_of(raw_run(tmp_path / "run", lines))


# -- what is written is read -----------------------------------------------------------------------


@any_run
@given(plans(), st.booleans())
def test_what_is_written_is_read(plan: Plan, compress: bool) -> None:
    with folder() as tmp:
        with plan.create(tmp / "run", compress) as writer:
            plan.write(writer)
        with opened(tmp / "run") as run:
            assert run.problems == ()
            assert contents(run) == plan.expected()
            assert run.whole
            assert run.survey().total() == sum(at is None for _, at in plan.positions)


def test_a_run_says_what_the_kld_file_says_that_it_was_made_from(
    smollm2: Path, tmp_path: Path
) -> None:
    reference = open_recording(smollm2 / "ref.kld")
    quant = open_recording(smollm2 / "q5_0.kld")
    path = run_of(quant, tmp_path / "run.gz", top_n=10, reference=reference, compress=True)
    run: Recording = open_recording(path)
    outside = 0
    for chunk in range(quant.shape.n_chunk):
        assert run.tokens(chunk).tolist() == quant.tokens(chunk).tolist()
        assert run.scored(chunk).tolist() == quant.scored(chunk).tolist()
        for t in quant.scored(chunk).tolist():
            position = Position(chunk, t)
            full, top, ref = quant.row(position), run.row(position), reference.row(position)
            assert full is not None
            assert top is not None
            assert ref is not None
            assert top.top(10) == full.top(10)
            wanted = int(quant.tokens(chunk)[t])
            ref_token = ref.top(1)[0][0]
            outside += top.rank(ref_token) is None
            for token in (wanted, ref_token):
                found, exact = top.logp(token), full.logp(token)
                assert found is not None
                assert exact is not None
                assert found == Logp(exact.value, False)
    assert run.records == 248
    assert outside > 0, "no ref token lies outside the quant's top: extra was not tested"
    assert path.stat().st_size < 248 * 150


def test_numbers_have_no_more_digits_than_float32_needs(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", n_ctx=4, n_vocab=20) as writer:
        writer.chunk([7, 8, 9, 10])
        writer.position(AT, [(10, float(np.float32(-0.1)))])
    line = (tmp_path / "run").read_text().splitlines()[-1]
    assert line == '{"chunk":0,"t":3,"token":10,"logp":-0.1,"top":[[10,-0.1]]}'


def test_the_best_come_first_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    line = edited(POSITION, top=[[10, -3.0], [9, -1.5], [4, -1.0], [2, -1.5]])
    with opened(small_run(tmp_path / "run", line)) as run:
        rows = run.rows(0, 0, 1)
        assert rows.ids.tolist() == [[4, 2, 9, 10]]
        assert rows.logp.tolist() == [[-1.0, -1.5, -1.5, -3.0]]


def test_shorter_lists_are_padded_at_the_end(tmp_path: Path) -> None:
    short = edited(POSITION, t=2, token=9, top=[[3, -0.5]])
    with opened(small_run(tmp_path / "run", short, POSITION, top_n=3)) as run:
        rows = run.rows(0, 0, 2)
        assert rows.ids.tolist() == [[3, -1, -1], [4, 10, -1]]
        assert np.isnan(rows.logp[0, 1:]).all()


def test_the_stream_tokens_logp_is_found_in_the_lists_where_it_has_no_field(
    tmp_path: Path,
) -> None:
    listed = edited(POSITION, logp=None)
    apart = edited(POSITION, t=2, token=9, logp=None, extra=[[9, -7.5]])
    unknown = edited(POSITION, t=1, token=8, logp=None)
    with opened(small_run(tmp_path / "run", listed, apart, unknown)) as run:
        logp = run.rows(0, 0, 3).stream_logp
    assert math.isnan(logp[0])
    assert logp[1:].tolist() == [-7.5, -1.5]


def test_other_peoples_spelling_is_read(tmp_path: Path) -> None:
    position = '{ "top" : [[10,-1.5], [4,-5e-1]], "token":10, "logp":-1.5,"chunk":0,\t"t":3 }'
    lines: list[dict[str, Any] | str] = [HEADER, "", CHUNK, position, "  "]
    plain = contents_of(small_run(tmp_path / "plain", POSITION))
    assert contents_of(raw_run(tmp_path / "odd", lines, end="\r\n")) == plain
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "odd").read_bytes())
    assert is_run(marked.read_bytes())
    assert contents_of(marked) == plain


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", POSITION)
    path.write_bytes(path.read_bytes().rstrip())
    with opened(path) as run:
        assert (run.records, run.problems) == (1, ())


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    path = raw_run(
        tmp_path / "run",
        [
            edited(HEADER, seed=7, engine={"name": "mine", "gpu": "none"}),
            edited(CHUNK, source="a.txt"),
            edited(POSITION, seconds={"prompt": 0.5}),
        ],
    )
    with opened(path) as run:
        assert run.header["seed"] == 7
        assert run.engine == {"name": "mine", "gpu": "none"}
        assert run.chunk_fields(0)["source"] == "a.txt"
        assert (run.records, run.problems) == (1, ())
    RunWriter.append(path).close()
    assert b'"seed": 7' in path.read_bytes()


def test_a_rollout_has_a_prompt_and_a_length_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, kind="rollout", n_ctx=9, n_vocab=20) as writer:
        writer.chunk([1, 2, 3, 4, 5], prompt_length=3)
        writer.chunk([1, 2], prompt_length=1)
        writer.position(Position(0, 3), [(4, -0.5)])
        writer.position(Position(1, 1), [(2, -0.5)])
        with pytest.raises(RecordingError, match="prompt_length"):
            writer.chunk([1, 2])
        with pytest.raises(RecordingError, match="n_ctx 9"):
            writer.chunk(range(10), prompt_length=1)
    with opened(path) as run:
        assert run.kind == "rollout"
        assert [run.tokens(c).size for c in (0, 1)] == [5, 2]
        assert [run.prompt_length(c) for c in (0, 1)] == [3, 1]
        assert [run.scored(c).tolist() for c in (0, 1)] == [[3], [1]]


def test_a_run_is_known_by_its_content(tmp_path: Path) -> None:
    path = small_run(tmp_path / "anything.txt", POSITION)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for candidate in (path, packed):
        assert is_run(candidate.read_bytes()[:100])
        recording = open_recording(candidate)
        assert (recording.format, recording.version, recording.full) == ("kldtui-run", 1, False)
    for other in (b"", b"_logits_", b"{}", b'{"format": "other"}', b"\x1f\x8bnonsense"):
        assert not is_run(other)
        (tmp_path / "other").write_bytes(other)
        with pytest.raises(RecordingError):
            open_run(tmp_path / "other")


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RecordingError, match=re.escape(str(path))):
            open_run(path)


# -- invalid positions and odd numbers -------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ("null", Invalid.NOT_A_NUMBER),
        ("[[4, NaN], [5, NaN]]", Invalid.NOT_A_NUMBER),
        ("[[4, -0.5], [5, null]]", Invalid.NOT_A_NUMBER),
        ("[[4, -Infinity]]", Invalid.INFINITE),
        ("[[4, -3.4028235e38]]", Invalid.INFINITE),
    ],
)
def test_nan_logits_make_an_invalid_position(top: str, reason: Invalid, tmp_path: Path) -> None:
    line = '{"chunk":0,"t":3,"token":10,"logp":null,"top":' + top + "}"
    with opened(small_run(tmp_path / "run", line)) as run:
        row = run.row(AT)
        assert run.records == 1
        assert run.survey() == {reason: 1}
    assert row is not None
    assert row.invalid == reason
    assert row.logp(4) is None


def test_a_probability_of_zero_is_no_entry_and_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        zero = -math.inf
        writer.position(AT, [(4, -0.1), (5, zero)], logp=zero, extra=[(6, zero)])
    line_schema().validate(json.loads(path.read_text().splitlines()[-1]))
    with opened(path) as run:
        row = run.row(AT)
    assert row is not None
    assert row.top(9) == [(4, float(np.float32(-0.1)))]
    assert row.logp(10) == row.logp(6) == Logp(-math.inf, False)


def test_rounding_above_zero_counts_as_zero(tmp_path: Path) -> None:
    with opened(small_run(tmp_path / "run", edited(POSITION, top=[[4, 1e-6]]))) as run:
        row = run.row(AT)
    assert row is not None
    assert row.top(1) == [(4, 0.0)]


@pytest.mark.parametrize("value", [math.nan, None])
def test_the_writer_spells_nan_as_an_invalid_position(value: float | None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.position(AT, None if value is None else [(4, value)])
    assert path.read_text().splitlines()[-1] == '{"chunk":0,"t":3,"token":10,"top":null}'


# -- what is broken is named -----------------------------------------------------------------------

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


# -- cut and flipped -------------------------------------------------------------------------------


def written(tmp: Path, plan: Plan, compress: bool = False) -> Path:
    path = tmp / "whole"
    with plan.create(path, compress) as writer:
        plan.write(writer, flush=True)
    return path


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


def first_member(data: bytes) -> int:
    """Where the first gzip member ends."""
    inflate = zlib.decompressobj(31)
    inflate.decompress(data)
    return len(data) - len(inflate.unused_data)


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


# -- stopped and gone on with ----------------------------------------------------------------------


@any_run
@given(plans(), st.data(), st.booleans())
def test_a_stopped_recording_goes_on(plan: Plan, data: st.DataObject, compress: bool) -> None:
    with folder() as tmp:
        path = written(tmp, plan, compress)
        whole = path.read_bytes()
        least = first_member(whole) if compress else whole.index(b"\n")
        os.truncate(path, data.draw(st.integers(least, len(whole))))
        with RunWriter.append(path) as writer:
            plan.write(writer)
        with opened(path) as run:
            assert run.problems == ()
            assert contents(run) == plan.expected()
        if not compress:
            assert path.read_bytes() == whole


def test_a_plain_run_is_on_disk_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.position(AT, [(4, -0.5)])
        assert contents_of(path).positions[AT].top == {4: -0.5}


def test_a_gzip_run_is_on_disk_member_by_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_sink, "MEMBER_BYTES", 100)
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20, compress=True) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.position(AT, [(4, -0.5)])
        assert not contents_of(path).positions
        writer.position(Position(0, 2), [(4, -0.5)])
        assert len(contents_of(path).positions) == 2
        writer.position(Position(0, 1), [(4, -0.5)])
        writer.flush()
        assert len(contents_of(path).positions) == 3
    gzip.decompress(path.read_bytes())


def test_members_of_another_programs_making_are_read_and_gone_on_with(tmp_path: Path) -> None:
    """They may end in mid-line, or with half a line, and be followed by zeros."""
    text = small_run(tmp_path / "plain", POSITION, n_positions=2).read_bytes()
    path = tmp_path / "run"
    path.write_bytes(gzip.compress(text[:130]) + gzip.compress(text[130:]) + bytes(50))
    with RunWriter.append(path) as writer:
        writer.position(Position(0, 2), [(4, -0.5)])
    with opened(path) as run:
        assert (run.records, run.problems) == (2, ())
    assert bytes(50) not in path.read_bytes()
    path.write_bytes(gzip.compress(text[:130]) + gzip.compress(text[130:-9]))
    with RunWriter.append(path) as writer:
        writer.position(Position(0, 2), [(4, -0.5)])
        writer.position(AT, [(4, -0.5)])
    with opened(path) as run:
        assert (run.records, run.problems) == (2, ())


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20):
        with pytest.raises(RecordingError, match="another program is recording"):
            RunWriter.append(path)
        with pytest.raises(RecordingError, match="exists already"):
            RunWriter.create(path, n_ctx=4, n_vocab=20)
    RunWriter.append(path).close()


@pytest.mark.parametrize("compress", [False, True])
def test_a_full_disk_leaves_whole_lines(
    compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    writer = RunWriter.create(path, n_ctx=4, n_vocab=20, compress=compress)
    writer.chunk(CHUNK["tokens"])
    writer.flush()
    write = os.write
    wrote: list[int] = []

    def full(fd: int, data: memoryview) -> int:
        if wrote:
            raise OSError(errno.ENOSPC, "No space left on device")
        wrote.append(write(fd, data[:5]))
        return 5

    def add() -> None:
        writer.position(AT, [(4, -0.5)])
        writer.flush()

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordingError, match="No space left"):
            add()
    with opened(path) as run:
        assert (run.records, run.problems) == (0, ())
    writer.position(AT, [(4, -0.5)])
    writer.close()
    with opened(path) as run:
        assert run.records == 1


def test_the_writer_refuses_what_the_reader_would_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter.create(path, n_ctx=4, n_vocab=20) as writer:
        writer.chunk(CHUNK["tokens"])
        writer.pieces({3: b"\xe6"})
        before = path.read_bytes()
        with pytest.raises(RecordingError, match=r"c0:t3: .*above 0"):
            writer.position(AT, [(4, 0.5)])
        with pytest.raises(RecordingError, match="JSON"):
            writer.position(AT, [(4, math.inf)])
        with pytest.raises(RecordingError, match="id twice"):
            writer.position(AT, [(4, -1.0), (4, -1.0)])
        with pytest.raises(RecordingError, match="c1:t3: its chunk is not declared"):
            writer.position(Position(1, 3), [(4, -0.5)])
        with pytest.raises(RecordingError, match="t is not from 1 to 3"):
            writer.position(Position(0, 4), [(4, -0.5)])
        with pytest.raises(RecordingError, match="more than n_ctx 4"):
            writer.chunk([1] * 5)
        with pytest.raises(RecordingError, match="id 3 is stored"):
            writer.pieces({3: b"a"})
        assert path.read_bytes() == before
        assert not writer.has(AT)
    with pytest.raises(RecordingError, match="closed"):
        writer.chunk(CHUNK["tokens"])
    with pytest.raises(RecordingError, match="n_vocab"):
        RunWriter.create(tmp_path / "other", n_ctx=4, n_vocab=0)
    assert not (tmp_path / "other").exists()


def test_a_damaged_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", "nonsense", POSITION)
    before = path.read_bytes()
    with pytest.raises(DamagedRecording, match="line 3"):
        RunWriter.append(path)
    assert path.read_bytes() == before


# -- changed while open ----------------------------------------------------------------------------


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


# -- large runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_every_position_of_a_run_of_many_blocks_is_found(
    compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_text, "_BLOCK", 1000)
    monkeypatch.setattr(run_text, "_INPUT", 64)
    monkeypatch.setattr(run_sink, "MEMBER_BYTES", 3333)
    rng = np.random.default_rng(1)
    path = tmp_path / "run"
    written: dict[Position, tuple[int, float]] = {}
    with RunWriter.create(path, n_ctx=64, n_vocab=1000, compress=compress) as writer:
        for _ in range(10):
            writer.chunk(rng.integers(0, 1000, 64))
        for chunk in range(10):
            for t in rng.permutation(np.arange(1, 64)).tolist():
                best = int(rng.integers(1000)), float(np.float32(-rng.random()))
                written[Position(chunk, t)] = best
                writer.position(Position(chunk, t), [best])
    with opened(path) as run:
        for position in rng.permutation(np.array(list(written), object)):
            row = run.row(position)
            assert row is not None
            assert row.top(1) == [written[position]]
        assert {
            p: next(iter(at.top.items())) for p, at in contents(run).positions.items()
        } == written
