"""A scan on a dask cluster: what it fills and opens, how far it says it is, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kldtui.cli import cli
from kldtui.cli.scanning import _opened
from kldtui.errors import KldtuiError
from kldtui.index import Index, State
from kldtui.index.scanfile import ScanFile
from tests.builders import make_logits, make_stream, write_kld
from tests.builders_foreign import Model, sglang, write_lines
from tests.builders_index import mixed_pair, open_files, plain_pair, same, scan_all
from tests.builders_recorder import own_pair


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def scheduler() -> Iterator[str]:
    """A cluster of two processes on this machine."""
    distributed = pytest.importorskip("distributed", reason="needs dask (kldtui[dask])")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
    ) as cluster:
        yield cluster.scheduler_address


def test_a_cluster_of_two_processes_scans_what_one_does(
    tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed_pair(tmp_path, n_chunk=9)
    words: list[str | Path] = ["--quant", tmp_path / "q1.kld", "--quant", tmp_path / "q2.kld"]
    monkeypatch.setenv("KLDTUI_CACHE", str(tmp_path / "one"))
    done = run("scan", tmp_path / "ref.kld", *words, "-o", tmp_path / "x", "--dask", scheduler)
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("KLDTUI_CACHE", str(tmp_path / "other"))
    alone: list[str | Path] = ["-o", tmp_path / "y", "--workers", "1"]
    assert run("scan", tmp_path / "ref.kld", *words, *alone).exit_code == 0
    one, two = (ScanFile.open(tmp_path / name).index()[0] for name in "xy")
    for a, b in zip([one.ref, *one.pairs], [two.ref, *two.pairs], strict=True):
        assert same(a, b, near=1e-5)


def test_a_cluster_opens_whatever_quants_a_review_does(
    tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of the quant's own, and answers saved from a server that carry no chunks."""
    ref, own = asyncio.run(own_pair(tmp_path))
    stream = make_stream(3, 16, 40)
    of = write_kld(tmp_path / "of.kld", stream, make_logits(stream, 1))
    model = Model.of(stream, 2)
    served = write_lines(tmp_path / "served.json", [sglang(model, chunk) for chunk in range(3)])
    for name, one, other in (("own", ref, own), ("served", of, served)):
        files = []
        for how in (["--dask", scheduler], ["--workers", "1"]):
            monkeypatch.setenv("KLDTUI_CACHE", str(tmp_path / f"{name}{how[0]}"))
            files.append(tmp_path / f"{name}{how[0]}.scan")
            done = run("scan", one, "--quant", other, "-o", files[-1], *how)
            assert done.exit_code == 0, done.output
        there, here = (ScanFile.open(path).index()[0] for path in files)
        assert (there.pairs[0]["state"] == State.SCORED).any()
        assert same(there.pairs[0], here.pairs[0], near=1e-5)


def opener_of(*paths: Path) -> partial[Any]:
    return partial(_opened, paths, None)


def test_a_cluster_counts_the_positions_of_the_chunks_that_were_asked_for(
    tmp_path: Path, scheduler: str
) -> None:
    from kldtui.index.cluster import scan_on_cluster

    ref, quant = plain_pair(tmp_path)
    opened = opener_of(ref.path, quant.path)
    index = Index(ref, [quant])
    per = index.layout.n // 6
    seen = list(scan_on_cluster(scheduler, index, opened, (1, 4)))
    assert {each.total for each in seen} == {3 * per}
    assert seen[-1].done == 3 * per
    seen = list(scan_on_cluster(scheduler, index, opened, (0, 4)))
    assert [(each.done, each.total) for each in seen] == [(4 * per, 4 * per)], "some stood already"
    assert list(scan_on_cluster(scheduler, index, opened, (7, 9))) == []


def test_a_cluster_completes_what_a_review_left_after_the_first_pass(tmp_path: Path) -> None:
    from kldtui.index.cluster import _gather, parts, scan_part

    mixed = mixed_pair(tmp_path)
    opened = opener_of(*(recording.path for recording in mixed))
    index = scan_all(Index(mixed[0], mixed[1:]), stages=("roots",))
    todo = parts(index, 3, None)
    assert todo == [(0, 2), (2, 4), (4, 6)]
    arriving = ((None, scan_part(opened, part)) for part in todo)
    assert [each.done for each in _gather(index, arriving, todo, None)][-1] == index.layout.n
    assert index.complete
    assert parts(index, 3, None) == []
    whole = scan_all(Index(mixed[0], mixed[1:]))
    for a, b in zip([index.ref, *index.pairs], [whole.ref, *whole.pairs], strict=True):
        assert same(a, b, near=1e-5)


def test_a_worker_that_cannot_see_the_files_is_an_error_in_words(
    tmp_path: Path, scheduler: str
) -> None:
    from kldtui.index.cluster import scan_on_cluster

    ref, quant = plain_pair(tmp_path)
    opened = opener_of(tmp_path / "gone.kld", quant.path)
    with pytest.raises(KldtuiError, match="cannot be opened"):
        list(scan_on_cluster(scheduler, Index(ref, [quant]), opened))


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs dask (kldtui[dask])")
    from kldtui.index import cluster

    ref, quant = plain_pair(tmp_path)
    opened = opener_of(ref.path, quant.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_WAIT_SECONDS", 1)
        with pytest.raises(KldtuiError, match="no scheduler answers"):
            list(cluster.scan_on_cluster("tcp://127.0.0.1:9", Index(ref, [quant]), opened))


@pytest.mark.parametrize("address", ["", "localhost", "tcp://localhost", "localhost:x"])
def test_what_is_no_address_of_a_scheduler_is_said_to_be_none(tmp_path: Path, address: str) -> None:
    pytest.importorskip("distributed", reason="needs dask (kldtui[dask])")
    plain_pair(tmp_path)
    args: list[str | Path] = [
        "scan",
        tmp_path / "ref.kld",
        "--quant",
        tmp_path / "quant.kld",
        "--dask",
        address,
    ]
    done = run(*args)
    assert done.exit_code == 2
    assert "write it as HOST:PORT" in done.output


def test_a_part_whose_quant_cannot_be_opened_leaves_no_file_open(tmp_path: Path) -> None:
    from kldtui.index.cluster import scan_part

    ref, _ = plain_pair(tmp_path)
    before = open_files()
    with pytest.raises(KldtuiError, match=r"gone\.kld: cannot be opened"):
        scan_part(opener_of(ref.path, tmp_path / "gone.kld"), (0, 1))
    assert open_files() == before
