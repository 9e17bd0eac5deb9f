"""The loops over whole rows: numpy's and the compiled ones say what a token-by-token sum says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kldtui.analysis import Bound, Kernels, NumpyKernels, analyse_pair, analyse_ref, load_fast
from kldtui.analysis.kernels import Head, Summed, brackets, straight
from kldtui.recordings import open_recording
from kldtui.recordings.kld import decode
from kldtui.recordings.kld_writer import encode
from kldtui.rows import FullRows
from tests.builders import log_softmax, record


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    kernels = load_fast(tmp_path_factory.mktemp("compiled"))
    if kernels is None:
        pytest.skip("needs numba (kldtui[fast])")
    return kernels


def rows_of(n_vocab: int, count: int, seed: int, spread: float = 4.0) -> FullRows:
    """Rows of random logits, a third of them far below the best."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((count, n_vocab))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] -= 12
    return decode(encode(logits), n_vocab, 1)


def kld_by_hand(ref: FullRows, quant: FullRows) -> list[tuple[float, float]]:
    out = []
    for p, q, floor in zip(
        ref.logp.astype(float), quant.logp.astype(float), quant.floor, strict=True
    ):
        counted = p > -16
        floored = np.exp(p[counted & (q <= floor)]).sum()
        out.append((float((np.exp(p) * (p - q))[counted].sum()), float(floored)))
    return out


@pytest.mark.parametrize("n_vocab", [2, 5, 2047, 8191, 8192, 8193, 10_000, 50_257])
def test_both_kernels_give_the_tops_and_sums_of_every_vocabulary(
    n_vocab: int, fast: Kernels
) -> None:
    ref, quant = rows_of(n_vocab, 5, 1), rows_of(n_vocab, 5, 2)
    by_hand = kld_by_hand(ref, quant)
    for kernels in (NumpyKernels(), fast):
        ids, top, second, _ = kernels.tops(ref.run())
        for i, row in enumerate(ref.codes):
            order = np.sort(row)[::-1]
            assert ids[i] == np.flatnonzero(row == row.max())[0]
            assert (top[i], second[i]) == (order[0], order[1])
        which, tokens = np.array([4, 0, 4]), np.array([0, n_vocab - 1, n_vocab // 2], np.int32)
        above = [(ref.codes[i] > ref.codes[i, t]).sum() for i, t in zip(which, tokens, strict=True)]
        assert kernels.above(ref.run(), which, tokens).tolist() == above
        block = analyse_ref(ref, np.zeros(5, np.int32), kernels)
        found = analyse_pair(block, quant, kernels)
        assert found["kld"] == pytest.approx([kld for kld, _ in by_hand], abs=1e-5, rel=1e-4)
        assert found["kld_floored"] == pytest.approx([x for _, x in by_hand], abs=1e-5)
        assert not (found["bounds"] & Bound.MASS).any()


@pytest.mark.parametrize("place", [0, 1, 2047, 2048, 8191, 8195, 8999])
def test_the_best_is_found_wherever_it_is_and_the_lowest_of_equals_wins(
    place: int, fast: Kernels
) -> None:
    codes = np.arange(9000) % 700
    codes[place] = 60_000
    tied = codes.copy()
    tied[[5, 4000, 8998]] = 60_001
    raw = np.stack([record(codes, 2e-4, -14.0), record(tied, 2e-4, -14.0)])
    rows = decode(raw, 9000, 1)
    for kernels in (NumpyKernels(), fast):
        ids, top, second, _ = kernels.tops(rows.run())
        assert ids.tolist() == [place, 5]
        assert top.tolist() == [60_000, 60_001]
        assert second.tolist() == [699, 60_001]


@pytest.mark.parametrize(
    "tied",
    [
        (5, 4000),
        (4000, 4101),  # numpy's kernel looks down 4,096 columns: 4101 lies in one further left
        (4101, 8190),
        (5, 4101),
        (4095, 8192),
        (3000, 4097, 8995),
        (8193, 8998),
    ],
)
def test_of_equals_the_lowest_id_wins_wherever_they_lie(
    tied: tuple[int, ...], fast: Kernels
) -> None:
    codes = np.arange(9000) % 700
    codes[list(tied)] = 60_000
    rows = decode(np.stack([record(codes, 2e-4, -14.0)]), 9000, 1)
    for kernels in (NumpyKernels(), fast):
        ids, top, second, _ = kernels.tops(rows.run())
        assert (ids[0], top[0], second[0]) == (tied[0], 60_000, 60_000)


def test_equal_rows_have_a_kld_of_exactly_nothing(fast: Kernels) -> None:
    rows = rows_of(9000, 4, 3)
    for kernels in (NumpyKernels(), fast):
        found = analyse_pair(analyse_ref(rows, np.zeros(4, np.int32), kernels), rows, kernels)
        assert found["kld"].tolist() == [0, 0, 0, 0]


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=40), st.floats(0.01, 8), st.integers(0, 9))
@settings(deadline=None, max_examples=150)
def test_the_compiled_sums_agree_with_numpys_to_a_ten_thousandth(
    fast: Kernels, logits: list[float], spread: float, seed: int
) -> None:
    base = np.array([logits], np.float32)
    noise = np.random.default_rng(seed).standard_normal(base.shape)
    ref, quant = (
        decode(encode(x.astype(np.float32)), base.size, 1) for x in (base, base + spread * noise)
    )
    one, two = (
        analyse_pair(analyse_ref(ref, np.zeros(1, np.int32), kernels), quant, kernels)[0]
        for kernels in (NumpyKernels(), fast)
    )
    for name in ("kld", "kld_floored"):
        assert one[name] == pytest.approx(two[name], abs=1e-4)
    for name in ("quant_id", "kind", "bounds", "ref_p_quant", "ref_rank_quant"):
        assert one[name] == two[name]


def test_real_rows_agree_to_a_hundred_thousandth(smollm2: Path, fast: Kernels) -> None:
    ref, quant = (open_recording(smollm2 / f"{name}.kld") for name in ("ref", "q5_0"))
    for chunk in range(ref.shape.n_chunk):
        stream = ref.tokens(chunk)[ref.scored(chunk)]
        mine, theirs = (r.rows(chunk, 0, len(stream)) for r in (ref, quant))
        a, b = (
            analyse_pair(analyse_ref(mine, stream, k), theirs, k) for k in (NumpyKernels(), fast)
        )
        assert np.allclose(a["kld"], b["kld"], atol=1e-5)
        assert np.array_equal(a["ref_rank_quant"], b["ref_rank_quant"])
        assert np.array_equal(a["bounds"], b["bounds"])


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=50))
@settings(deadline=None, max_examples=100)
def test_a_mass_lies_between_its_brackets(logits: list[float]) -> None:
    logp = log_softmax(np.array([logits], np.float32))[0] - 0.03
    best = np.array([logp.max()], np.float32)
    low, high = brackets(np.array([straight(logp).sum()]), best)
    mass = np.exp(logp).sum()
    assert low[0] - 1e-6 <= mass <= high[0] + 1e-6


def test_loops_for_any_machine_agree_with_those_for_this_one(tmp_path: Path, fast: Kernels) -> None:
    n_vocab = 8193
    ref, quant = rows_of(n_vocab, 3, 1), rows_of(n_vocab, 3, 2)
    np.savez(tmp_path / "rows.npz", ref=ref.codes, quant=quant.codes)
    heads = (ref.scale, ref.base, quant.scale, quant.base)
    here = np.zeros((3, 4))
    summed = Summed(quant.run(), Head(*heads[2:]), np.arange(3), here)
    fast.sums(ref.run(), Head(*heads[:2]), [summed])
    np.savez(tmp_path / "heads.npz", *heads)
    program = """
import sys
from pathlib import Path
import numpy as np
from kldtui.analysis.kernels import Head, Summed, load_fast
from kldtui.rows import Codes
folder = Path(sys.argv[1])
rows, heads = np.load(folder / "rows.npz"), np.load(folder / "heads.npz")
ref, quant = (Codes(np.ascontiguousarray(rows[name]), 0, rows[name].shape[1]) for name in rows)
out = np.zeros((3, 4))
a, b, c, d = heads.values()
load_fast(folder).sums(ref, Head(a, b), [Summed(quant, Head(c, d), np.arange(3), out)])
np.save(folder / "sums.npy", out)
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True)
    assert np.load(tmp_path / "sums.npy")[:, :3] == pytest.approx(here[:, :3], rel=1e-5, abs=1e-7)


def test_without_numba_there_are_no_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert load_fast(tmp_path) is None
