"""What a run keeps of whole rows: the KLD to its reference, the floor, and the rows themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kldtui.errors import DamagedRecording, UnsupportedRecording
from kldtui.index import Bound, Index
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.recordings.base import Recording
from kldtui.recordings.run import RunRecording, open_run
from kldtui.recordings.run_writer import RunWriter
from kldtui.rows import FullRow, FullRows, TopRow
from tests.builders import make_logits, make_stream, write_kld
from tests.builders_run import POSITION, run_of, small_run


def full_pair(tmp_path: Path) -> tuple[Recording, Recording]:
    stream = make_stream(2, 8, 31)
    return (
        open_recording(write_kld(tmp_path / "ref.kld", stream, make_logits(stream, 1))),
        open_recording(write_kld(tmp_path / "quant.kld", stream, make_logits(stream, 2))),
    )


def scanned(ref: Recording, *quants: Recording) -> Index:
    index = Index(ref, quants)
    for _ in index.scan():
        pass
    return index


def kept_run(path: Path, ref: Recording, quant: Recording, *, rows: bool) -> RunRecording:
    """The quant's run: its KLD to the reference, or at every second position the whole row."""
    pair = scanned(ref, quant).pairs[0]
    header = {"rows": {"encoding": "kld", "version": 1}} if rows else None
    with RunWriter.create(path, n_ctx=8, n_vocab=31, top_n=3, fields=header) as writer:
        for chunk in range(2):
            writer.chunk(quant.tokens(chunk))
            for i, t in enumerate(quant.scored(chunk).tolist()):
                position = Position(chunk, t)
                row, mine = quant.row(position), ref.row(position)
                assert isinstance(row, FullRow)
                assert isinstance(mine, FullRow)
                whole = quant.rows(chunk, i, i + 1)
                assert isinstance(whole, FullRows)
                head = np.array([whole.scale[0], whole.base[0]], "<f4").view("<u2")
                record = np.concatenate([head, whole.codes[0], np.zeros(1, "<u2")]).astype("<u2")
                writer.position(
                    position,
                    row.top(3),
                    kld=None if rows else float(pair["kld"][chunk * 3 + i]),
                    kld_floored=0.25,
                    kld_more=0.5,
                    ref=None if rows else mine.top(1)[0],
                    row=record if rows and i % 2 else None,
                )
    return open_run(path)


def test_a_kld_measured_against_this_reference_counts_as_exact(tmp_path: Path) -> None:
    ref, quant = full_pair(tmp_path)
    run = kept_run(tmp_path / "q.gguf-run", ref, quant, rows=False)
    exact, found = scanned(ref, quant, run).pairs
    assert found["kld"].tolist() == exact["kld"].tolist()
    assert not (found["bounds"] & Bound.KLD).any()
    assert set(found["kld_floored"].tolist()) == {0.25}
    # Also where the reference is a run itself: its best is the same.
    ref_run = open_run(run_of(ref, tmp_path / "ref.gguf-run", top_n=3))
    found = scanned(ref_run, run).pairs[0]
    assert found["kld"].tolist() == exact["kld"].tolist()
    assert not (found["bounds"] & Bound.KLD).any()


def test_a_kld_measured_against_another_reference_does_not_count(tmp_path: Path) -> None:
    ref, quant = full_pair(tmp_path)
    run = kept_run(tmp_path / "q.gguf-run", ref, quant, rows=False)
    stream = make_stream(2, 8, 31)
    logits = make_logits(stream, 1) + 0.05 * make_logits(stream, 9)
    other = open_recording(write_kld(tmp_path / "other.kld", stream, logits))
    exact, found = scanned(other, quant, run).pairs
    assert (found["bounds"] & Bound.KLD).all()
    assert (found["kld"] <= exact["kld"] + 1e-5).all()
    assert np.isnan(found["kld_more"]).all()


def test_whole_rows_are_given_where_they_are_and_make_the_kld_exact(tmp_path: Path) -> None:
    ref, quant = full_pair(tmp_path)
    run = kept_run(tmp_path / "q.gguf-run", ref, quant, rows=True)
    exact, found = scanned(ref, quant, run).pairs
    whole = np.array([i % 3 == 1 for i in range(6)])
    assert ((found["bounds"] & Bound.KLD) == 0).tolist() == whole.tolist()
    for name in exact.dtype.names or ():
        np.testing.assert_allclose(found[name][whole], exact[name][whole], rtol=1e-4, atol=1e-5)
    row, theirs = run.row(Position(1, 6)), quant.row(Position(1, 6))
    assert isinstance(row, FullRow)
    assert isinstance(theirs, FullRow)
    assert row.logp_all.tolist() == theirs.logp_all.tolist()
    assert isinstance(run.row(Position(1, 5)), TopRow)


def test_what_lies_at_the_floor_is_a_bound_in_a_run_too(tmp_path: Path) -> None:
    line = {**POSITION, "logp": -16.5, "top": [[4, -0.5], [9, -1.5]], "floor": -16.5}
    line |= {"extra": [[7, -16.5], [8, -9.0]]}
    run = open_run(small_run(tmp_path / "run", line))
    row = run.row(Position(0, 3))
    assert row is not None
    assert row.logp(10) == (-16.5, True)
    assert row.logp(7) == (-16.5, True)
    assert row.logp(8) == (-9.0, False)
    assert row.logp(4) == (-0.5, False)


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        ({}, {"row": "AAAA"}, r"not the 64 characters in base64"),
        ({}, {"row": "A" * 64}, "the header does not say how they are encoded"),
        ({"rows": {"encoding": "kld", "version": 1}}, {"row": "!" * 64}, "no base64"),
        ({}, {"ref": [4]}, "ref is not a list"),
        ({}, {"ref": [44, -1.0]}, "n_vocab"),
        ({}, {"floor": 1.0}, "floor has a log-probability above 0"),
    ],
)
def test_damage_in_what_is_kept_is_named_with_its_line(
    tmp_path: Path, header: dict[str, Any], line: dict[str, Any], words: str
) -> None:
    run = open_run(small_run(tmp_path / "run", {**POSITION, **line}, **header))
    with pytest.raises(DamagedRecording, match=words) as caught:
        run.rows(0, 0, 1)
    assert "line 3" in str(caught.value)


def test_rows_in_an_unknown_encoding_are_refused_by_name(tmp_path: Path) -> None:
    path = small_run(tmp_path / "run", POSITION, rows={"encoding": "fp8", "version": 1})
    with pytest.raises(UnsupportedRecording, match='"fp8" version 1'):
        open_run(path)
