"""The run format: its document and schema hold, and what is written is read."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kldtui.errors import (
    RecordingError,
)
from kldtui.position import Position
from kldtui.recordings import open_recording, run_sink, run_text
from kldtui.recordings.base import Recording, prompt_length
from kldtui.recordings.run import is_run, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import Invalid, Logp
from tests.builders_run import (
    AT,
    CHUNK,
    HEADER,
    POSITION,
    Plan,
    any_run,
    contents,
    contents_of,
    edited,
    folder,
    opened,
    plans,
    raw_run,
    run_of,
    small_run,
)

DOCS = Path(__file__).parents[1] / "docs"


# -- the document ---------------------------------------------------------------------------------


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
        assert (run.made.add_bos, run.made.bos_id) == (True, 1)
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


# -- what is written is read ----------------------------------------------------------------------


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
        assert run.made.kind == "rollout"
        assert [run.tokens(c).size for c in (0, 1)] == [5, 2]
        assert [prompt_length(run, c) for c in (0, 1)] == [3, 1]
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


# -- invalid positions and odd numbers ------------------------------------------------------------


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


# -- large runs -----------------------------------------------------------------------------------


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
