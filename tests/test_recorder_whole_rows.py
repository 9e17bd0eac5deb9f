"""Whole rows of an engine become a `.kld` file, that goes on where it was stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kldtui.errors import EngineBroke, EngineError, KldtuiError, RecordingError, UnusableEngine
from kldtui.recorder.whole_rows import WholeRowsJob
from kldtui.recordings import open_recording
from kldtui.recordings.kld_writer import KldWriter
from tests.builders import Stream as KldStream
from tests.builders import write_kld
from tests.builders_engines import ScriptedEngine, info, model
from tests.builders_recorder import N_CHUNK, N_CTX, N_VOCAB, reference, tokens
from tests.builders_run import HEADER, raw_run

SAYS = model(2, N_VOCAB)
FIRST = N_CTX // 2 + 1


class Rows(ScriptedEngine):
    """Gives the logits of SAYS, a few rows at a time; breaks after so many texts."""

    def __init__(self, breaks: int = 99, n_vocab: int = N_VOCAB, loses: int = 0) -> None:
        super().__init__(info=info(n_vocab=n_vocab))
        self.prefixes: list[list[int]] = []
        self.breaks, self.loses = breaks, loses

    async def rows(
        self, prefix: Sequence[int], targets: Sequence[int]
    ) -> AsyncGenerator[NDArray[np.float32], None]:
        if len(self.prefixes) == self.breaks:
            raise EngineError("mlx: it died")
        self.prefixes.append(list(prefix))
        ids = [*prefix, *targets]
        made = np.array([SAYS(ids[:t]) + 3 for t in range(len(prefix), len(ids))], np.float32)
        for at in range(0, len(made) - self.loses, 3):
            yield made[at : min(at + 3, len(made) - self.loses)]


def expected(path: Path, chunks: int = N_CHUNK) -> Path:
    laid = KldStream(tokens()[:chunks], N_VOCAB)
    rows = [
        SAYS(laid.tokens[c, :t].tolist()) + 3 for c in range(chunks) for t in range(FIRST, N_CTX)
    ]
    return write_kld(path, laid, np.array(rows, np.float32))


async def record(
    engine: ScriptedEngine, ref: Path, path: Path, *, last: int | None = None, bos: bool = False
) -> int:
    recording = open_recording(ref)
    try:
        job = WholeRowsJob(engine, recording, path, last=last, add_bos=bos, bos_id=1)
        done = await job.run()
    finally:
        recording.close()
    return done.done - done.before


async def test_it_is_the_file_that_these_logits_make(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    assert await record(Rows(), ref, tmp_path / "q.kld") == N_CHUNK * (N_CTX - FIRST)
    assert (tmp_path / "q.kld").read_bytes() == expected(tmp_path / "want.kld").read_bytes()
    await record(Rows(), ref, tmp_path / "one.kld", last=0)
    assert (tmp_path / "one.kld").read_bytes() == expected(tmp_path / "w.kld", 1).read_bytes()


async def test_bos_stands_in_place_of_the_first_token(tmp_path: Path) -> None:
    engine = Rows()
    await record(engine, reference(tmp_path / "ref.kld"), tmp_path / "q.kld", bos=True)
    assert [prefix[0] for prefix in engine.prefixes] == [1] * N_CHUNK
    assert [prefix[1:] for prefix in engine.prefixes] == tokens()[:, 1:FIRST].tolist()


@given(st.floats(0, 1))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_cut_anywhere_it_goes_on(tmp_path: Path, where: float) -> None:
    ref, path = tmp_path / "ref.kld", tmp_path / "q.kld"
    if not ref.exists():
        reference(ref)
    data = expected(tmp_path / "want.kld").read_bytes()
    header = 20 + 4 * tokens().size
    path.write_bytes(data[: int(where * len(data))])
    if 0 < path.stat().st_size < header:
        with pytest.raises(RecordingError):
            await record(Rows(), ref, path)
        return
    engine = Rows()
    await record(engine, ref, path)
    assert path.read_bytes() == data
    whole = max(0, (int(where * len(data)) - header) * N_CHUNK // (len(data) - header))
    assert len(engine.prefixes) == N_CHUNK - whole, "whole chunks are not computed again"


async def test_an_engine_that_dies_leaves_whole_chunks(tmp_path: Path) -> None:
    ref, path = reference(tmp_path / "ref.kld"), tmp_path / "q.kld"
    with pytest.raises(EngineError, match="it died"):
        await record(Rows(breaks=1), ref, path)
    recording = open_recording(path)
    assert recording.records == N_CTX - FIRST
    recording.close()
    engine = Rows()
    await record(engine, ref, path)
    assert len(engine.prefixes) == N_CHUNK - 1
    assert path.read_bytes() == expected(tmp_path / "want.kld").read_bytes()


async def test_rows_that_are_missing_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(EngineBroke, match="fewer rows"):
        await record(Rows(loses=1), reference(tmp_path / "ref.kld"), tmp_path / "q.kld")


@pytest.mark.parametrize(
    ("engine", "kind", "words"),
    [
        (lambda: Rows(n_vocab=5), UnusableEngine, "5 tokens, the stream's had 306"),
        (ScriptedEngine, UnusableEngine, "gives no whole rows; leave out --kld"),
    ],
)
async def test_who_cannot_is_named(
    tmp_path: Path, engine: Callable[[], ScriptedEngine], kind: type[EngineError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        await record(engine(), reference(tmp_path / "ref.kld"), tmp_path / "q.kld")
    assert not (tmp_path / "q.kld").exists()


async def test_chunks_of_several_lengths_fit_in_no_kld_file(tmp_path: Path) -> None:
    header = {**HEADER, "n_ctx": 9, "n_vocab": N_VOCAB}
    lines = [header, {"chunk": 0, "tokens": [1, 2, 3, 4]}, {"chunk": 1, "tokens": [1] * 9}]
    ref = raw_run(tmp_path / "ref.run", lines)
    with pytest.raises(KldtuiError, match="differ in length"):
        await record(Rows(), ref, tmp_path / "q.kld")


async def test_one_that_another_program_records_to_is_left_alone(tmp_path: Path) -> None:
    path, ref = tmp_path / "q.kld", reference(tmp_path / "ref.kld")
    with KldWriter(path, tokens(), N_VOCAB):
        for _ in ("empty, as what is written is held back", "begun"):
            before = path.read_bytes()
            with pytest.raises(RecordingError, match="another program is recording to it"):
                await record(Rows(), ref, path)
            assert path.read_bytes() == before
            if not before:
                path.write_bytes(expected(tmp_path / "want.kld").read_bytes()[:-1])
    await record(Rows(), ref, path)


async def test_another_file_is_never_written_over(tmp_path: Path) -> None:
    ref = reference(tmp_path / "ref.kld")
    other = tmp_path / "other.kld"
    other.write_bytes(b"_logits_" + bytes(4000))
    with pytest.raises(RecordingError, match=r"exists and is no \.kld file of this stream"):
        await record(Rows(), ref, other)
    assert other.read_bytes() == b"_logits_" + bytes(4000)
