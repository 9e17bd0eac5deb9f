"""Real mlx_lm: its server, and its `generate_step` in a child, held against `generate_step` here.

The folders are made from the same GGUF file that the other live tests serve: dequantized to
float32, and 4 bits of that. On a CPU, MLX reads some ten tokens a second: prefixes are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kldtui.engines import mlx_child
from kldtui.engines.base import EngineInfo, wait_ready
from kldtui.engines.mlx_child import MlxChild
from kldtui.engines.mlx_server import MlxServer
from kldtui.engines.parity import OwnTokenizer
from kldtui.engines.supervise import Child, free_port, last_words
from kldtui.errors import EngineLoading, EngineUnreachable, InexactPrefix
from kldtui.index import Index, Kind
from kldtui.position import Position
from kldtui.recordings import open_recording
from tests.asking import ask
from tests.builders_mlx import write_mlx_folder

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CALL = '{"name": "get", "arguments": {"city": "Paris"'
"""The model closes it, explains it, and ends its turn."""
LOST = 'User: Weather in Paris?\nAssistant: {"name": "get_weather", "arguments": {"city'
"""What it says after this soon has no text of its own, and never again."""
CUT = [236]
"""A byte that is part of a character, b"\\x92"."""

Truth = Callable[[Path, Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def fp32(ref_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if importlib.util.find_spec("mlx_lm") is None:
        pytest.skip(mlx_child.MISSING)
    folder = write_mlx_folder(ref_model, tmp_path_factory.mktemp("mlx") / "fp32")
    yield folder
    (folder / "model.safetensors").unlink()  # half a gigabyte that pytest would keep


@pytest.fixture(scope="session")
def four_bits(fp32: Path) -> Iterator[Path]:
    folder = fp32.parent / "4bit"
    made = subprocess.run(
        [
            *(sys.executable, "-m", "mlx_lm", "convert", "-q", "--q-bits", "4"),
            *("--hf-path", str(fp32), "--mlx-path", str(folder)),
        ],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    yield folder
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="session")
def truth() -> Truth:
    """Greedy ids straight from mlx_lm's `generate_step`, in this process."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    models: dict[Path, Any] = {}

    def say(folder: Path, prefix: Sequence[int], n: int) -> list[int]:
        if folder not in models:
            models[folder] = load_model(folder)[0]
        steps = generate_step(mx.array(list(prefix)), models[folder], max_tokens=n)
        return [int(id) for id, _ in steps]

    return say


@contextlib.contextmanager
def serving(folder: Path, log: Path, **more: str) -> Iterator[str]:
    """The URL of an mlx_lm.server that ends with the block, and with this process."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    child = Child(command, log, env={**os.environ, **OFFLINE, **more})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.stop()


@pytest.fixture(scope="session")
def mlx_server(fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(fp32, tmp_path_factory.mktemp("log") / "fp32.log") as url:
        yield url


async def ready(engine: MlxServer) -> EngineInfo:
    until = time.monotonic() + 60
    while True:
        try:
            return await engine.connect()
        except (EngineUnreachable, EngineLoading):
            if time.monotonic() > until:
                raise
        await asyncio.sleep(0.2)


@pytest_asyncio.fixture
async def engine(mlx_server: str, fp32: Path) -> AsyncIterator[MlxServer]:
    engine = MlxServer(mlx_server, tokenizer=fp32)
    await ready(engine)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def prefix(fp32: Path) -> list[int]:
    return OwnTokenizer.load(fp32).encode(CALL)


async def test_a_branch_in_steps_is_what_generate_step_says_up_to_its_end(
    engine: MlxServer, fp32: Path, prefix: list[int], truth: Truth
) -> None:
    expected = truth(fp32, prefix, 21)
    said = await ask(engine, prefix, 8, 5)
    longer = await ask(engine, [*prefix, *said.ids], 40, 5)
    assert said.error is None
    assert longer.error is None
    assert longer.finish is not None
    assert longer.finish.reason == "eog"
    assert [*said.ids, *longer.ids] == expected
    assert longer.data.endswith(b"<|im_end|>")
    for token in [*said.tokens, *longer.tokens]:
        values = [logp for _, logp in token.top]
        assert values == sorted(values, reverse=True)
        assert (token.id, token.logp) == token.top[0]
    assert engine.info is not None
    assert engine.info.build.startswith("mlx-lm ")
    assert engine.info.n_vocab == 49152


async def test_a_call_whose_text_is_lost_for_good_comes_exactly_all_the_same(
    engine: MlxServer, fp32: Path, truth: Truth
) -> None:
    tokenizer = OwnTokenizer.load(fp32)
    prefix = tokenizer.encode(LOST)
    expected = truth(fp32, prefix, 14)
    texts = [tokenizer.text([*prefix, *expected[:n]]) for n in range(1, 14)]
    assert texts[-3:] == [None] * 3
    said = await ask(engine, prefix, 14, 5)
    assert said.error is None
    assert said.ids == expected


async def test_a_prompt_that_leaves_the_server_nothing_to_compute_is_answered_all_the_same(
    engine: MlxServer, mlx_server: str, fp32: Path, prefix: list[int], truth: Truth
) -> None:
    expected = truth(fp32, prefix[:-2], 6)
    first = await ask(engine, prefix[:-2], 3, 3)
    asked = [*prefix[:-2], *first.ids]
    stranger = MlxServer(mlx_server, tokenizer=fp32)
    await stranger.connect()
    assert stranger.tokenizer is not None
    assert stranger.tokenizer.text(asked) is not None
    said = await ask(stranger, asked, 3, 3)
    await stranger.close()
    assert said.error is None
    assert [*first.ids, *said.ids] == expected


async def test_a_prefix_in_mid_character_is_refused_there_and_taken_in_process(
    engine: MlxServer, fp32: Path, prefix: list[int], truth: Truth, tmp_path: Path
) -> None:
    short = prefix[:6]
    cut = [*CUT, *short]
    with pytest.raises(InexactPrefix, match="begins in mid-character") as caught:
        await engine.next_top(cut, 5)
    assert (caught.value.at, caught.value.nearest) == (0, None)
    child = MlxChild(fp32, log_dir=tmp_path)
    try:
        info = await wait_ready(child, interval=0.1)
        assert info.n_vocab == 49152
        said = await ask(child, cut, 6, 40)
        warm = await ask(child, cut, 6, 40, cache=True)
        top = await child.next_top(short, 10)
    finally:
        await child.close()
    assert said.error is None
    assert said.ids == warm.ids == truth(fp32, cut, 6)
    assert [len(token.top) for token in said.tokens] == [40] * 6
    served = await engine.next_top(short, 10)
    assert [id for id, _ in served] == [id for id, _ in top]
    assert [p for _, p in served] == pytest.approx([p for _, p in top], abs=1e-3)


async def test_four_bits_are_as_exact_and_name_their_tokenizer_where_there_is_a_cache(
    four_bits: Path, prefix: list[int], truth: Truth, tmp_path: Path
) -> None:
    log = tmp_path / "4bit.log"
    with serving(four_bits, log, HF_HUB_CACHE=str(tmp_path)) as url:
        engine = MlxServer(url)
        info = await ready(engine)
        said = await ask(engine, prefix[:8], 6, 5)
        await engine.close()
    assert said.error is None, last_words(log)
    assert said.ids == truth(four_bits, prefix[:8], 6)
    assert info.details["quantization"]["bits"] == 4
    assert info.details["model_path"] == str(four_bits)


async def test_the_recordings_positions_that_no_text_reaches_are_told_before_any_request(
    engine: MlxServer, smollm2: Path
) -> None:
    recording = open_recording(smollm2 / "ref.kld")
    tokens = recording.tokens(6).tolist()
    for t in recording.scored(6):
        with pytest.raises(InexactPrefix) as caught:
            await engine.next_top(tokens[: int(t)], 5)
        assert caught.value.nearest is None
    row = recording.row(Position(1, 33))
    top = await engine.next_top(recording.tokens(1)[:33].tolist(), 5)
    assert row is not None
    assert top[0][0] == row.top(1)[0][0]
    recording.close()


def test_a_folder_is_scored_in_one_pass_against_the_gguf_reference(
    fp32: Path, smollm2: Path, tmp_path: Path
) -> None:
    """The same weights, computed by another library: whole rows, and the run made of them."""
    ref = smollm2 / "ref.kld"
    made = []
    for name, more in (("m.kld", ["--kld"]), ("m.run", [])):
        line = [sys.executable, "-m", "kldtui", "record", "score", str(ref), "--mlx-model"]
        line += [str(fp32), "--chunks", "0-0", "-o", str(tmp_path / name), *more]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        made.append(open_recording(tmp_path / name))
    recorded = open_recording(ref)
    index = Index(recorded, made)
    list(index.scan())
    whole, best = (pair[:31] for pair in index.pairs)
    print(f"\nmean KLD {whole['kld'].mean():.4f}, flips {(whole['kind'] == Kind.ROOT).sum()} of 31")
    assert whole["kld"].mean() < 0.03
    assert (whole["quant_id"] == best["quant_id"]).all()
    assert np.allclose(whole["quant_p_ref"], best["quant_p_ref"], atol=1e-3)
    for recording in (recorded, *made):
        recording.close()
