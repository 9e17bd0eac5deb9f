"""FDT and SDT on rollouts, flips under their own name elsewhere, in stats and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from kldtui.cli import cli
from kldtui.index import Index
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.recordings.run_writer import RunWriter
from kldtui.report import divergence_of, format_stats, pair_stats, runs_of
from tests.builders import Stream, make_logits, make_stream, nan_record, write_kld

STREAM = make_stream(n_chunk=3, n_ctx=12, n_vocab=16, seed=2)


def logits_that_pick(tokens: NDArray[np.int32], margin: float = 2.0) -> NDArray[np.float32]:
    """Logits [record, 16] whose argmax is the token of each record, by that margin."""
    out = np.zeros((tokens.size, 16), np.float32)
    out[np.arange(tokens.size), tokens.ravel()] = margin
    return out


def rollout_pair(tmp_path: Path, flips: list[str], suffix: str = ".kld") -> tuple[Path, Path]:
    """A reference whose stream is its own rollout, and a quant that flips at each "x"."""
    scored = STREAM.tokens[:, STREAM.first_t :]
    other = np.where(np.array([list(row) for row in flips]) == "x", (scored + 1) % 16, scored)
    return (
        write_kld(tmp_path / f"ref{suffix}", STREAM, logits_that_pick(scored)),
        write_kld(tmp_path / f"quant{suffix}", STREAM, logits_that_pick(other)),
    )


def scanned(ref: Path, quant: Path) -> Index:
    index = Index(open_recording(ref), [open_recording(quant)])
    for _ in index.scan():
        pass
    return index


def stats(*args: str | Path) -> Any:
    result = CliRunner().invoke(cli, ["stats", *map(str, args), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)[0]


def test_on_the_references_own_rollout_there_is_fdt_and_sdt(tmp_path: Path) -> None:
    ref, quant = rollout_pair(tmp_path, ["..x.x", "x....", "....."])
    found = stats(ref, "--quant", quant)
    assert found["rollout"] is True
    assert found["first_flip"] is found["top1_flips"] is None
    fdt = found["fdt"]
    assert (fdt["unit"], fdt["runs"], fdt["diverged"], fdt["seen"]) == ("rollout", 3, 2, 5)
    assert fdt["median"] == 2
    assert fdt["none_within"] == {}
    shares = [(step["tokens"], step["at_risk"], step["share"]) for step in fdt["survival"]]
    assert shares == [(1, 3, pytest.approx(2 / 3)), (3, 2, pytest.approx(1 / 3))]
    assert found["sdt"]["share"] == pytest.approx(3 / 15)
    text = format_stats(pair_stats(scanned(ref, quant), 0))
    assert "FDT       : median 2 tokens agree" in text
    assert "SDT       : 20.00 %" in text


def test_a_median_that_outlasts_the_rollouts_is_said_to(tmp_path: Path) -> None:
    ref, quant = rollout_pair(tmp_path, [".....", "x....", "....."])
    fdt = stats(ref, "--quant", quant)["fdt"]
    assert (fdt["median"], fdt["median_at_least"]) == (None, 5)
    assert "median unknown, at least 5" in format_stats(pair_stats(scanned(ref, quant), 0))


def test_on_other_text_flips_are_called_flips(tmp_path: Path) -> None:
    """One stream token that is not the reference's best: FDT and SDT are not defined."""
    ref, quant = rollout_pair(tmp_path, ["..x.x", "x....", "....."])
    tokens = STREAM.tokens.copy()
    tokens[1, 9] = (tokens[1, 9] + 3) % 16
    for path in (ref, quant):
        data = path.read_bytes()
        path.write_bytes(data[:20] + tokens.astype("<i4").tobytes() + data[20 + tokens.nbytes :])
    found = stats(ref, "--quant", quant)
    assert found["rollout"] is False
    assert found["fdt"] is found["sdt"] is None
    assert found["first_flip"]["unit"] == "chunk"
    assert found["top1_flips"]["share"] == pytest.approx(3 / 15)
    text = format_stats(pair_stats(scanned(ref, quant), 0))
    assert "there is no FDT and no SDT" in text
    assert "FDT  " not in text
    assert "First flip: median 2" in text


def test_a_stream_token_outside_the_list_is_not_the_references_best(tmp_path: Path) -> None:
    path = tmp_path / "ref.gguf-run"
    with RunWriter.create(path, n_ctx=4, n_vocab=16) as writer:
        writer.chunk([0, 1, 2, 3], prompt_length=1)
        for t, best in ((1, 1), (2, 2), (3, 9)):
            writer.position(Position(0, t), [(best, -0.1), (15, -3.0)])
    assert stats(path, "--quant", path)["rollout"] is False


def test_an_invalid_position_ends_what_is_known_of_a_run(tmp_path: Path) -> None:
    ref, quant = rollout_pair(tmp_path, ["...x.", "x....", "....."])
    data = bytearray(quant.read_bytes())
    at = STREAM.data_offset + 2 * STREAM.record_bytes
    data[at : at + STREAM.record_bytes] = nan_record(16).tobytes()
    quant.write_bytes(data)
    curve = divergence_of(scanned(ref, quant), 0).first
    assert curve.diverged == 1
    assert curve.at_risk.tolist() == [3]
    assert curve.at(3).value == pytest.approx(2 / 3)


def test_turns_are_runs_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "ref.gguf-run"
    with RunWriter.create(path, n_ctx=10, n_vocab=16) as writer:
        turns = {"turns": [[2, 5], [7, 10]]}
        writer.chunk(list(range(10)), prompt_length=2, fields=turns)
        for t in (2, 3, 4, 7, 8, 9):
            writer.position(Position(0, t), [(t, -0.1), (15, -3.0)])
    quant = tmp_path / "q.gguf-run"
    with RunWriter.create(quant, n_ctx=10, n_vocab=16) as writer:
        writer.chunk(list(range(10)), prompt_length=2)
        for t in (2, 3, 4, 7, 8, 9):
            best = 15 if t in (3, 9) else t
            writer.position(Position(0, t), [(best, -0.1), ((best + 1) % 16, -3.0)])
    index = scanned(path, quant)
    runs = runs_of(index, open_recording(path))
    assert (runs.unit, runs.stretches) == ("turn", ((0, 3), (3, 6)))
    found = divergence_of(index, 0, runs)
    assert found.first.tokens.tolist() == [2, 3]
    assert stats(path, "--quant", quant)["fdt"]["runs"] == 2
    assert stats(path, "--quant", quant)["fdt"]["unit"] == "turn"


def test_flips_are_told_by_how_sure_the_reference_was(tmp_path: Path) -> None:
    scored = STREAM.tokens[:, STREAM.first_t :]
    margins = np.linspace(0.05, 9, scored.size)
    logits = (logits_that_pick(scored) * (margins / 2)[:, None]).astype(np.float32)
    other = logits.copy()
    other[:5] = np.roll(logits[:5], 1, axis=1)  # the least sure ones
    ref = write_kld(tmp_path / "ref.kld", STREAM, logits)
    quant = write_kld(tmp_path / "quant.kld", STREAM, other)
    found = stats(ref, "--quant", quant)
    for name in ("by_p_top1", "by_margin"):
        bins = found[name]
        assert sum(one["positions"] for one in bins) == 15
        assert sum(one["flips"] for one in bins) == 5
        assert bins[-1]["flips"] == 0
        for one in bins:
            if one["positions"]:
                assert one["flip_rate_low"] <= one["flip_rate"] <= one["flip_rate_high"]
                assert (one["mean_kld"] > 1e-5) == (one["flips"] > 0)
    margin = found["by_margin"]
    assert [one["low"] for one in margin] == [0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0]
    assert margin[-1]["high"] is None


def test_the_floors_effect_is_printed_with_what_it_rests_on(tmp_path: Path) -> None:
    logits = make_logits(STREAM, 1)
    other = logits.copy()
    other[:, 3] -= 40
    ref = write_kld(tmp_path / "ref.kld", STREAM, logits)
    quant = write_kld(tmp_path / "quant.kld", STREAM, other)
    found = stats(ref, "--quant", quant)
    assert found["kld_floored_positions"] == 15
    assert 0 < found["mean_kld_floored"] < 1
    assert found["total_kld_more"] == pytest.approx(15 * found["mean_kld_more"])
    assert found["max_kld_more"] >= found["mean_kld_more"]
    flips = CliRunner().invoke(cli, ["flips", str(ref), "--quant", str(quant), "--json"])
    for row in json.loads(flips.stdout):
        assert 0 < row["kld_floored"] < 1
        assert row["kld_more"] <= found["max_kld_more"]
    text = format_stats(pair_stats(scanned(ref, quant), 0))
    assert f"{found['mean_kld_more']:.6f} (" in text
    assert "Nothing bounds it else" in text


def test_a_stream_of_one_chunk_has_no_interval(tmp_path: Path) -> None:
    stream = Stream(STREAM.tokens[:1], 16)
    logits = logits_that_pick(stream.tokens[:, stream.first_t :])
    ref = write_kld(tmp_path / "ref.kld", stream, logits)
    quant = write_kld(tmp_path / "quant.kld", stream, make_logits(stream, 4))
    found = stats(ref, "--quant", quant)
    assert found["sdt"]["share"] is not None
    assert found["sdt"]["low"] is None
