"""`record score`: what a model says of a reference's tokens, exact, and the same however often it
was stopped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kldtui.engines.base import Engine
from kldtui.engines.sglang import SglangServer
from kldtui.engines.vllm import VllmServer
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    KldtuiError,
    RecordingError,
    UnusableEngine,
)
from kldtui.index import Index
from kldtui.position import Position
from kldtui.recorder.stream import OfChunks, OfRecording, ToScore, stretches
from kldtui.recordings import open_recording
from kldtui.recordings.base import prompt_length
from kldtui.recordings.kld import KldRecording
from kldtui.recordings.run import RunRecording, is_run, open_run
from kldtui.rows import TopRow
from tests import tiny_model
from tests.builders_recorder import (
    N_CHUNK,
    N_CTX,
    QUANT,
    REF,
    completions,
    quant_server,
    reference,
    roll,
    score_run,
    tokens,
)
from tests.builders_run import contents_of
from tests.fake_server import BOS, SPECIAL, VOCABULARY
from tests.fake_sglang import FakeSglang
from tests.fake_vllm import FakeVllm

FIRST = N_CTX // 2 + 1
PER_CHUNK = N_CTX - FIRST


def row(run: RunRecording, position: Position) -> TopRow:
    found = run.row(position)
    assert isinstance(found, TopRow)
    return found


# ── what is recorded ─────────────────────────────────────────────────────────────────────────


async def test_every_position_has_the_best_the_streams_token_and_the_references(
    tmp_path: Path,
) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server(drift=0.0) as server:
        new = await score_run(server, ref, tmp_path / "q.run")
    assert new == N_CHUNK * PER_CHUNK
    apart = 0
    with_run = open_run(tmp_path / "q.run")
    for chunk in range(N_CHUNK):
        ids = tokens()[chunk].tolist()
        assert with_run.tokens(chunk).tolist() == ids
        assert with_run.scored(chunk).tolist() == list(range(FIRST, N_CTX))
        for t in range(FIRST, N_CTX):
            logp = QUANT(ids[:t])
            found = row(with_run, Position(chunk, t))
            best = np.argsort(-logp, kind="stable")[:5].tolist()
            assert [id for id, _ in found.top(9)] == best
            their = int(REF(ids[:t]).argmax())
            for id in (ids[t], their):
                value = found.logp(id)
                assert value is not None
                assert not value.bound
                assert value.value == pytest.approx(float(logp[id]), abs=1e-5)
            apart += their not in best
    assert apart > 2, "this reference's tokens are all among the quant's best"
    assert with_run.problems == ()
    for id in tokens().ravel().tolist():
        assert with_run.pieces[id] == SPECIAL.get(id, VOCABULARY[id])
    with_run.close()


async def test_the_header_says_what_made_it(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        await score_run(server, ref, tmp_path / "q.run")
    run = open_run(tmp_path / "q.run")
    assert run.made.kind == "teacher_forced"
    assert run.header["n_positions"] == N_CHUNK * PER_CHUNK
    assert run.header["bos"] == {"rule": "none", "id": BOS}
    assert run.engine["name"] == "llama-server"
    assert run.engine["model"] == "/models/fake-q4.gguf"
    assert run.engine["cache_prompt"] is False
    assert run.engine["settings"]["temperature"] == 0
    run.close()


async def test_grammar_and_stepwise_write_the_same_file(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        await score_run(server, ref, tmp_path / "a.run")
        asked = len(completions(server))
        await score_run(server, ref, tmp_path / "b.run", grammar=False)
        assert len(completions(server)) > 1.5 * asked
    assert (tmp_path / "a.run").read_bytes() == (tmp_path / "b.run").read_bytes()


async def test_a_model_that_adds_bos_reads_it_in_place_of_each_chunks_first(
    tmp_path: Path,
) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server(add_bos=True) as server:
        await score_run(server, ref, tmp_path / "q.run", whole=True)
    run = open_run(tmp_path / "q.run")
    assert run.header["bos"] == {"rule": "replaces_first", "id": BOS}
    assert run.tokens(1).tolist() == tokens()[1].tolist()
    scoring = [body["prompt"] for body in completions(server)]
    assert all(prompt[0] == BOS and prompt.count(BOS) <= 2 for prompt in scoring)
    run.close()


async def test_all_positions_of_some_chunks(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        new = await score_run(server, ref, tmp_path / "q.run", chunks=(1, 1), whole=True)
    assert new == N_CTX - 1
    run = open_run(tmp_path / "q.run")
    assert run.shape.n_chunk == 2
    assert run.scored(0).size == 0
    assert run.scored(1).tolist() == list(range(1, N_CTX))
    recording = open_recording(ref)
    index = Index(recording, [run])
    list(index.scan())
    assert int((index.pairs[0]["state"] == 1).sum()) == PER_CHUNK
    recording.close()
    run.close()


async def test_a_run_of_turns_is_scored_with_its_prompts_turns_and_tags(tmp_path: Path) -> None:
    """A reference with prompts: only what was written is scored, the rest is context."""
    fields = {"turns": [[4, 6], [9, 12]], "tags": [["user", 0, 4]], "source": {"line": 3}}
    ids = np.array([97, 98, 99, 100, 101, 2, 102, 103, 104, 105, 106, 2], np.int32)
    ts = np.array([4, 5, 9, 10, 11], np.int32)
    stream = OfChunks([ToScore(ids, ts, None, 4, fields)], 306)
    any_ref = reference(tmp_path / "any.kld")
    async with quant_server() as server:
        await score_run(server, any_ref, tmp_path / "ref.run", stream=stream)
        new = await score_run(server, tmp_path / "ref.run", tmp_path / "q.run")
    assert new == 5
    run = open_run(tmp_path / "q.run")
    assert prompt_length(run, 0) == 4
    assert run.scored(0).tolist() == ts.tolist()
    told = run.chunk_fields(0)
    assert {name: told[name] for name in fields} == fields
    run.close()


# ── going on ─────────────────────────────────────────────────────────────────────────────────


@given(st.floats(0, 1))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_cut_anywhere_and_gone_on_with_it_is_the_same_file(
    tmp_path: Path, where: float
) -> None:
    ref = tmp_path / "ref.kld"
    if not ref.exists():
        reference(ref)
    whole, cut = tmp_path / "whole.run", tmp_path / "cut.run"
    async with quant_server() as server:
        if not whole.exists():
            await score_run(server, ref, whole)
        data = whole.read_bytes()
        kept = int(where * len(data))
        cut.write_bytes(data[:kept])
        if 0 < kept < data.index(b"\n") + 1:
            words = "header line is cut" if is_run(data[:kept]) else "exists and is no run"
            with pytest.raises(RecordingError, match=words):
                await score_run(server, ref, cut)
            return
        await score_run(server, ref, cut)
    assert cut.read_bytes() == data


async def test_a_whole_run_is_asked_nothing(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        await score_run(server, ref, tmp_path / "q.run")
        before = len(server.bodies())
        data = (tmp_path / "q.run").read_bytes()
        assert await score_run(server, ref, tmp_path / "q.run") == 0
        assert len(server.bodies()) == before
    assert (tmp_path / "q.run").read_bytes() == data


async def test_going_on_reads_no_rows_of_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference of 45 GB is not read again for what was recorded yesterday."""
    ref, path = reference(tmp_path / "ref.kld"), tmp_path / "q.run"
    async with quant_server() as server:
        await score_run(server, ref, path)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-3]))
        read: list[int] = []
        rows = KldRecording.rows

        def watched(self: KldRecording, chunk: int, *more: Any) -> object:
            read.append(chunk)
            return rows(self, chunk, *more)

        monkeypatch.setattr(KldRecording, "rows", watched)
        await score_run(server, ref, path)
    assert set(read) == {N_CHUNK - 1}


async def test_a_server_that_dies_leaves_whole_positions_and_another_goes_on(
    tmp_path: Path,
) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server() as server:
        await score_run(server, ref, tmp_path / "whole.run")
    for dies_at in (3, 5):
        path = tmp_path / f"q{dies_at}.run"
        async with quant_server() as server:
            server.dies_after = dies_at
            with pytest.raises(EngineBroke):
                await score_run(server, ref, path)
        held = contents_of(path)
        assert len(held.positions) % PER_CHUNK == 0
        async with quant_server() as server:
            await score_run(server, ref, path)
        assert path.read_bytes() == (tmp_path / "whole.run").read_bytes()


@pytest.mark.parametrize(
    ("more", "server", "words"),
    [
        ({"top_n": 6}, {}, "begun with --top-n 5, not with --top-n 6;"),
        ({"chunks": (0, 1)}, {}, "begun without --chunks, not with --chunks 0-1;"),
        ({}, {"model_path": "/models/other.gguf"}, 'engine.model is "/models/fake-q4.gguf", not'),
        ({}, {"add_bos": True}, "bos.rule is"),
    ],
)
async def test_a_run_that_was_begun_otherwise_is_not_gone_on_with(
    tmp_path: Path, more: dict[str, object], server: dict[str, object], words: str
) -> None:
    ref = reference(tmp_path / "ref.kld")
    path = tmp_path / "q.run"
    async with quant_server() as one:
        await score_run(one, ref, path)
    data = path.read_bytes()
    async with quant_server(**server) as other:
        with pytest.raises(RecordingError) as caught:
            await score_run(other, ref, path, **more)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "data", [b"\xff\xd8\xff\xe0 a picture", b"some notes\n", b'{"a": 1}\n', None]
)
async def test_what_is_no_run_is_never_written_over(tmp_path: Path, data: bytes | None) -> None:
    """None: the reference itself."""
    ref = reference(tmp_path / "ref.kld")
    path = ref if data is None else tmp_path / "other"
    if data is not None:
        path.write_bytes(data)
    before = path.read_bytes()
    async with quant_server() as server:
        with pytest.raises(RecordingError, match=r"exists and is no run; .*another name"):
            await score_run(server, ref, path)
    assert path.read_bytes() == before


async def test_a_folder_or_a_run_of_another_command_is_said_to_be_one(tmp_path: Path) -> None:
    ref, path = reference(tmp_path / "ref.kld"), tmp_path / "r.run"
    async with quant_server() as server:
        with pytest.raises(RecordingError, match="is no file"):
            await score_run(server, ref, tmp_path)
        await roll(server, path)
        with pytest.raises(RecordingError, match="begun with kldtui record rollout, not with"):
            await score_run(server, ref, path)


# ── what cannot be ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("server", "kind", "words"),
    [
        ({"n_vocab": 400}, UnusableEngine, "400 tokens, the stream's had 306"),
        ({"n_ctx": 15}, ContextExceeded, "15 tokens, and 16 are needed"),
    ],
)
async def test_a_server_that_cannot_is_named_before_a_file_is_begun(
    tmp_path: Path, server: dict[str, object], kind: type[EngineError], words: str
) -> None:
    ref = reference(tmp_path / "ref.kld")
    async with quant_server(**server) as one:
        with pytest.raises(kind, match=words):
            await score_run(one, ref, tmp_path / "q.run")
    assert not (tmp_path / "q.run").exists()


def test_chunks_that_are_not_there_are_named(tmp_path: Path) -> None:
    recording = open_recording(reference(tmp_path / "ref.kld"))
    with pytest.raises(KldtuiError, match="has chunks 0 to 2"):
        OfRecording(recording, (1, 3))
    recording.close()


# ── one pass ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("server", "engine", "path", "asks"),
    [
        (partial(FakeVllm, add_bos=False), VllmServer, "/v1/completions", "prompt_logprobs"),
        (partial(FakeSglang, add_bos=False), SglangServer, "/generate", "input_ids"),
    ],
    ids=["vllm", "sglang"],
)
async def test_servers_that_score_a_prompt_are_asked_for_a_chunk_at_once(
    tmp_path: Path,
    server: Callable[[], FakeVllm | FakeSglang],
    engine: Callable[[str], Engine],
    path: str,
    asks: str,
) -> None:
    """One request a chunk, and one more where the reference's token is not among the best."""
    ids = np.array([tiny_model.BOS, *tiny_model.encode("Hello there, you")], np.int32)
    ts = np.arange(4, ids.size, dtype=np.int32)
    far = tuple(50 if k % 2 else None for k in range(ts.size))
    stream = OfChunks([ToScore(ids, ts, lambda: far)], tiny_model.N_VOCAB)
    any_ref = reference(tmp_path / "any.kld")
    async with server() as fake:
        await score_run(
            fake.url, any_ref, tmp_path / "q.run", engine=engine(fake.url), stream=stream
        )
        asked = [body for body in fake.bodies(path) if asks in body]
    run = open_run(tmp_path / "q.run")
    more = 0
    for k, t in enumerate(ts.tolist()):
        logp = tiny_model.logprobs(tuple(ids[:t].tolist()))
        found = row(run, Position(0, t))
        assert [id for id, _ in found.top(9)] == [id for id, _ in tiny_model.best(logp, 5)]
        own, other = found.logp(int(ids[t])), far[k]
        assert own is not None
        assert own.value == pytest.approx(logp[ids[t]], abs=1e-5)
        if other is not None and other not in found.known:
            more += other != int(ids[t])
            theirs = found.logp(other)
            assert theirs is not None
            assert not theirs.bound
            assert theirs.value == pytest.approx(logp[other], abs=1e-5)
    assert len(asked) == 1 + more
    run.close()


async def test_no_more_is_asked_of_vllm_than_it_gives(tmp_path: Path) -> None:
    ids = np.array([tiny_model.BOS, *tiny_model.encode("Hello there")], np.int32)
    chunk = ToScore(ids, np.array([5, 6], np.int32))
    stream = OfChunks([chunk], tiny_model.N_VOCAB)
    any_ref = reference(tmp_path / "any.kld")
    for most in (8, 30):
        async with FakeVllm(add_bos=False, max_logprobs=most) as fake:
            path = tmp_path / f"{most}.run"
            engine = VllmServer(fake.url)
            await score_run(fake.url, any_ref, path, engine=engine, stream=stream, top_n=30)
        run = open_run(path)
        assert run.header["top_n"] == most
        assert len(row(run, Position(0, 5)).known) == most
        run.close()


# ── stretches ────────────────────────────────────────────────────────────────────────────────


@given(st.sets(st.integers(1, 3000), min_size=1), st.integers(20, 400))
@settings(max_examples=200, deadline=None)
def test_stretches_hold_every_position_once_and_no_long_gap(wanted: set[int], most: int) -> None:
    ts = np.array(sorted(wanted), np.int32)
    found = stretches(ts, lambda start: most)
    held = [t for start, stop in found for t in range(start, stop)]
    assert len(held) == len(set(held))
    assert wanted <= set(held)
    for start, stop in found:
        inside = [t for t in sorted(wanted) if start <= t < stop]
        assert inside[0] == start
        assert inside[-1] == stop - 1
        assert stop - start <= most
        assert all(b - a <= 17 + max(0, start // 16) for a, b in itertools.pairwise(inside))
