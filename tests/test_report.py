"""Statistics against llama-perplexity's own printouts, line by line, and what they leave out."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from kldtui.index import Bound, Index, Kind, State
from kldtui.recordings import open_recording
from kldtui.report import format_stats, pair_stats
from kldtui.roots import Thresholds
from tests.builders import make_logits, make_stream, nan_record, record_of, write_kld
from tests.test_index import MemoryRun, scanned

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MEANS = ("Mean", "Cor", "RMS", "Same")
PROMISED = (
    *("positions", "roots", "ties", "near_ties", "invalid", "floored"),
    *("mean_kld", "median_kld", "max_kld", "same_top", "ppl_ref", "ppl_quant", "rms_dp"),
)


def numbers(text: str) -> list[tuple[float, float]]:
    """Each number of a line with the value of its last printed digit."""
    found = _NUMBER.findall(text)
    return [(float(n), 10.0 ** -len(n.partition(".")[2])) for n in found]


@pytest.mark.parametrize("name", ["q5_0", "q8_0", "ref-ub32"])
def test_every_line_of_llama_perplexitys_printout_is_ours(smollm2: Path, name: str) -> None:
    theirs = (smollm2 / f"{name}.llama-perplexity.txt").read_text().splitlines()
    theirs = list(itertools.dropwhile(lambda line: not line.startswith("chunk"), theirs))
    while theirs and not theirs[-1]:
        theirs.pop()
    index = scanned(open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / f"{name}.kld"))
    ours = format_stats(pair_stats(index, 0)).splitlines()
    assert len(theirs) > 45
    for mine, line in zip(ours, theirs, strict=False):
        head = _NUMBER.sub("#", re.sub(r" +", " ", line))
        assert _NUMBER.sub("#", re.sub(r" +", " ", mine)) == head
        exact = line.startswith("Same top p")
        # Only means are held to 0.3 %: an extreme or a percentile is one position's value, and
        # the file knows a quant's log p only to half a code, and not at all under its floor.
        loose = 0.003 if line.startswith(MEANS) or line[:4].strip().isdigit() else 0.02
        for (got, _), (wanted, digit) in zip(numbers(mine), numbers(line), strict=True):
            if exact:
                assert got == wanted, line
            assert abs(got - wanted) <= max(loose * abs(wanted), 1.01 * digit), (mine, line)


def test_statistics_tell_how_far_they_are_and_can_be_ended(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    shares: list[float] = []
    expected = pair_stats(index, 0, told=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 4
    assert shares[-1] == 1
    assert str(expected.to_json()) == str(pair_stats(index, 0).to_json())

    def stop(share: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        pair_stats(index, 0, told=stop)


def test_layout_is_llama_perplexitys_to_the_column(smollm2: Path) -> None:
    theirs = (smollm2 / "q5_0.llama-perplexity.txt").read_text().splitlines()
    index = scanned(open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "q5_0.kld"))
    ours = format_stats(pair_stats(index, 0)).splitlines()
    start = next(i for i, line in enumerate(theirs) if line.startswith("chunk"))
    for mine, line in zip(ours, theirs[start:-1], strict=False):
        assert len(mine) == len(line)


def odd_pair(tmp_path: Path) -> Index:
    """Two chunks of seven: a root, a tie, a floored stream token on each side, two invalid."""
    stream = make_stream(2, 16, 4)
    stream.tokens[:] = 0
    stream.tokens[1, 10:12] = 3
    plain, other = record_of([65535, 60000, 9, 0]), record_of([60000, 65535, 9, 0])
    tied, low = record_of([65535, 65535, 9, 0]), record_of([60000, 65535, 9, 50000])
    bad = nan_record(4)
    refs = [plain] * 7 + [plain, plain, low, plain, tied, bad, plain]
    quants = [plain] * 6 + [other] + [plain, low, plain, plain, plain, plain, bad]
    return scanned(
        open_recording(write_kld(tmp_path / "ref.kld", stream, records=refs)),
        open_recording(write_kld(tmp_path / "quant.kld", stream, records=quants)),
    )


def test_counts_keep_apart_what_totals_must_not_hold(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    stats = pair_stats(index, 0)
    assert (stats.positions, stats.positions_ref) == (12, 14)
    assert stats.invalid == 2
    assert (stats.roots, stats.ties, stats.missing) == (3, 1, 0)
    assert stats.floored_ref == 1
    assert stats.floored_quant == 1
    assert stats.floored == 2
    assert stats.totals.same_top.value == pytest.approx(9 / 12)
    values = index.pairs[0]["kld"][index.pairs[0]["state"] == State.SCORED].astype(float)
    assert stats.kld.mean.value == pytest.approx(values.mean())
    text = format_stats(stats)
    assert re.search(r"Mean PPL\(Q\) .*lower bound, 1 floored", text)
    assert re.search(r"Mean PPL\(base\) .*lower bound, 1 floored", text)
    assert re.search(r"Mean PPL\(Q\)/PPL\(base\) .*rests on 2 floored", text)
    assert re.search(r"Invalid +: 2", text)
    assert "nan" not in text.lower()


def test_json_has_the_promised_names_and_never_nan(tmp_path: Path) -> None:
    found = pair_stats(odd_pair(tmp_path), 0).to_json()
    text = json.dumps(found, allow_nan=False)
    assert "NaN" not in text
    for name in PROMISED:
        assert isinstance(found[name], int | float), name
    assert found["ppl_ref_is_bound"]
    assert 0 <= found["same_top"] <= 1


def test_nothing_to_compare_gives_nulls_and_zeros(tmp_path: Path) -> None:
    stream = make_stream(2, 16, 4)
    empty = open_recording(write_kld(tmp_path / "ref.kld", stream))
    stats = pair_stats(scanned(empty, empty), 0)
    found = json.loads(json.dumps(stats.to_json(), allow_nan=False))
    assert found["positions"] == 0
    assert found["mean_kld"] is None
    assert found["ppl_quant"] is None
    assert "Compared  : 0 of 0" in format_stats(stats)


def test_an_infinite_kld_is_counted_and_null_in_json(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    index.pairs[0]["kld"][0] = np.inf
    stats = pair_stats(index, 0)
    assert stats.kld.mean.value == math.inf
    found = json.loads(json.dumps(stats.to_json(), allow_nan=False))
    assert found["mean_kld"] is None
    assert found["kld_infinite"] == 1
    assert isinstance(found["median_kld"], float)


def test_a_top_n_quant_has_a_lower_bound_and_no_mean_kld(tmp_path: Path) -> None:
    stream = make_stream(3, 8, 16)
    ref = open_recording(write_kld(tmp_path / "ref.kld", stream, make_logits(stream)))
    logp = np.concatenate([ref.rows(c, 0, 3).logp for c in range(3)])
    stats = pair_stats(scanned(ref, MemoryRun(stream, logp[::-1], 5)), 0)
    found = stats.to_json()
    assert found["mean_kld"] is None
    assert found["max_kld"] is None
    assert found["mean_kld_lower_bound"] > 0
    text = format_stats(stats)
    assert "KL Divergence" not in text
    for line in text.splitlines():
        if " KLD: " in line:
            assert line.endswith("lower bound")


def test_the_floor_stands_beside_or_is_said_to_be_unmeasured(smollm2: Path) -> None:
    index = scanned(
        open_recording(smollm2 / "ref.kld"),
        open_recording(smollm2 / "q8_0.kld"),
        open_recording(smollm2 / "ref-ub32.kld"),
    )
    quant, floor = (pair_stats(index, i) for i in range(2))
    without, beside = format_stats(quant), format_stats(quant, floor)
    assert "not measured; record the reference's own model once more" in without
    assert "-ub" in without
    assert re.search(r"Mean    KLD:   0\.0083\d+ ± .* floor 0\.0044\d+ ±", beside)
    assert "not measured" not in beside
    assert len(beside.splitlines()) == len(without.splitlines())


def test_near_ties_are_counted_by_the_threshold_that_is_given(smollm2: Path) -> None:
    index = scanned(open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "q5_0.kld"))
    stats = pair_stats(index, 0, Thresholds(0.1, "given"))
    assert stats.roots_by_cost[0.0] == stats.roots == 40
    assert stats.near_ties == 40 - stats.roots_by_cost[0.1]
    assert "cost < 0.1 nat (given)" in format_stats(stats)


def test_rows_that_do_not_sum_to_one_are_reported(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    assert "Not sum 1" not in format_stats(pair_stats(index, 0))
    index.pairs[0]["bounds"][0] |= Bound.MASS
    stats = pair_stats(index, 0)
    assert stats.not_summing_quant == 1
    assert "Not sum 1 : ref 0, quant 1" in format_stats(stats)


def test_an_unfinished_scan_counts_what_it_has_and_says_so(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    index.pairs[0]["state"][7:] = State.PENDING
    index.pairs[0]["kind"][7:] = Kind.ROOT
    stats = pair_stats(index, 0)
    assert (stats.positions, stats.roots, stats.complete) == (7, 1, False)
    assert "the scan is not complete" in format_stats(stats)


def test_a_scan_whose_second_pass_is_pending_is_not_complete(tmp_path: Path) -> None:
    index = odd_pair(tmp_path)
    assert pair_stats(index, 0).complete
    index.pairs[0]["rest"][3] = 0
    assert not pair_stats(index, 0).complete
