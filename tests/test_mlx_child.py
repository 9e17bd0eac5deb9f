"""The model in a process of kldtui's own: exact, streamed, and gone when it should be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kldtui.engines import mlx_child
from kldtui.engines.base import Token, wait_ready
from kldtui.engines.mlx_child import MlxChild
from kldtui.errors import EngineBroke, EngineError, EngineLoading, EngineRefused, UnusableEngine
from tests import tiny_model as model
from tests.asking import ask
from tests.builders_demo import alive, wait_gone, wait_none
from tests.builders_vocab import BYTE_LEVEL, write_tokenizer_json
from tests.mlx_fake import bare_folder, child_command

PREFIX = model.encode("The weather")
ROOT = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def _imports_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)


def child_of(tmp_path: Path, mode: str = "well", **more: float) -> MlxChild:
    folder = bare_folder(tmp_path / "tiny-4bit")
    return MlxChild(folder, command=child_command(tmp_path, mode), log_dir=tmp_path, **more)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, mode: str = "well", **more: float) -> AsyncIterator[MlxChild]:
    engine = child_of(tmp_path, mode, **more)
    try:
        await wait_ready(engine, interval=0.01)
        yield engine
    finally:
        await engine.close()


async def test_it_says_token_by_token_what_the_model_says(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        said = await ask(engine, PREFIX, 12, 4)
        top = await engine.next_top(PREFIX, 40)
    speaker = model.Speaker(PREFIX)
    for token in said.tokens:
        id, values = speaker.next()
        assert token.id == id
        assert token.logp == pytest.approx(values[id])
        assert list(token.top) == model.best(values, 4)
    assert said.finish is not None
    assert said.finish.n_prompt == len(PREFIX)
    assert list(top) == model.best(model.logprobs(tuple(PREFIX)), 40)


async def test_it_names_its_model_and_can_do_everything(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        info, can = engine.info, engine.capabilities
    assert info is not None
    assert (info.kind, info.model, info.build) == ("mlx_lm", "tiny-4bit", "mlx-lm 9.9, mlx 8.8")
    assert info.n_vocab == model.N_VOCAB
    assert info.details["quantization"] == {"bits": 4, "group_size": 64}
    assert json.dumps(info.to_json())
    assert (can.takes_ids, can.top_n_limit, can.cache_switch) == (True, None, True)


async def test_a_prefix_in_mid_character_is_no_question(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        said = await ask(engine, [model.SECOND_HALF, *PREFIX], 5)
    assert len(said.ids) == 5


async def test_pieces_and_ends_come_from_the_folders_tokenizer(tmp_path: Path) -> None:
    folder = bare_folder(tmp_path / "tiny-4bit")
    spelled = {chr(code): code - 32 for code in range(33, 127)}
    write_tokenizer_json(
        folder / "tokenizer.json",
        spelled,
        added=[(model.EOS, "<|im_end|>", True)],
        pre_tokenizer=BYTE_LEVEL,
        decoder=BYTE_LEVEL,
    )
    async with running(tmp_path) as engine:
        assert await engine.pieces([1, 33, 400]) == {1: b"<|im_end|>", 33: b"A"}
        assert engine.info is not None
        assert engine.info.details["ends"] == [model.EOS]


async def test_while_it_loads_it_says_so_and_close_ends_it(tmp_path: Path) -> None:
    engine = child_of(tmp_path, "loads")
    with pytest.raises(EngineLoading):
        await engine.connect()
    while engine.pid is None:  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.01)
    pid = engine.pid
    await engine.close()
    assert wait_gone(pid)


async def test_a_model_that_cannot_be_loaded_is_told_in_mlx_lms_words(tmp_path: Path) -> None:
    engine = child_of(tmp_path, "fails")
    with pytest.raises(EngineError, match="no safetensors found") as caught:
        await wait_ready(engine, interval=0.01)
    assert not isinstance(caught.value, EngineLoading)
    assert engine.log_path is not None
    assert str(engine.log_path) in str(caught.value)
    await engine.close()
    assert engine.log_path.exists()


async def test_one_that_dies_keeps_what_came_and_is_started_anew(tmp_path: Path) -> None:
    async with running(tmp_path, "dies") as engine:
        first = engine.pid
        said = await ask(engine, PREFIX, 10)
        assert len(said.ids) == 2
        assert isinstance(said.error, EngineBroke)
        assert "out of memory" in str(said.error)
        await wait_ready(engine, interval=0.01)
        assert engine.pid != first
        assert len((await ask(engine, PREFIX, 2)).ids) == 2


async def test_one_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, "silent", silence_seconds=0.3) as engine:
        said = await ask(engine, PREFIX, 10)
    assert len(said.ids) == 2
    assert "stopped answering" in str(said.error)


async def test_ids_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        with pytest.raises(EngineRefused, match="invalid tokens"):
            await engine.next_top([model.N_VOCAB], 3)


async def test_a_log_probability_above_0_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, "positive") as engine:
        said = await ask(engine, PREFIX, 10)
    assert isinstance(said.error, UnusableEngine)


async def test_a_cancelled_branch_frees_the_model_for_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, "slow") as engine:
        async with contextlib.aclosing(engine.generate(PREFIX, 10_000, 3)) as items:
            async for item in items:
                assert isinstance(item, Token)
                break
        assert len((await ask(engine, PREFIX, 3)).ids) == 3


async def test_one_cancelled_while_it_connects_leaves_the_model_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.open_unix_connection

    async def cancelled(*args: Any, **more: Any) -> None:
        _, writer = await connect(*args, **more)
        writer.close()
        raise asyncio.CancelledError

    async with running(tmp_path) as engine:
        pid = engine.pid
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "open_unix_connection", cancelled)
            with pytest.raises(asyncio.CancelledError):
                await engine.next_top(PREFIX, 3)
        assert len((await ask(engine, PREFIX, 3)).ids) == 3
        assert engine.pid == pid


async def test_nothing_is_asked_before_it_is_connected(tmp_path: Path) -> None:
    engine = child_of(tmp_path)
    with pytest.raises(EngineError, match="not connected"):
        await engine.next_top(PREFIX, 3)
    await engine.close()


def test_what_is_no_mlx_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no MLX folder .*mlx_lm\.convert"):
        MlxChild(tmp_path)


def test_without_mlx_lm_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_child, "can_run_mlx", lambda: False)
    with pytest.raises(EngineError, match=r"pip install 'kldtui\[mlx\]'"):
        MlxChild(bare_folder(tmp_path / "tiny"))


PARENT = """
import asyncio, sys
from pathlib import Path
from kldtui.engines.mlx_child import MlxChild
from kldtui.errors import EngineLoading
from tests.mlx_fake import bare_folder, child_command
async def main():
    where = Path(sys.argv[1])
    command = child_command(where, "loads")
    engine = MlxChild(bare_folder(where / "tiny"), command=command, log_dir=where)
    try:
        await engine.connect()
    except EngineLoading:
        pass
    while engine.pid is None:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_kill_9_of_kldtui_ends_it_while_it_loads(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        assert len(list(tmp_path.glob("kldtui-*"))) == 2, "its folder and its log"
        os.kill(parent.pid, signal.SIGKILL)
    assert wait_gone(child)
    assert wait_none(tmp_path, "kldtui-*")
