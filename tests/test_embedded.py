"""A GGUF file as an engine: started when it is connected, started anew where it died, and gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kldtui.engines import wait_ready
from kldtui.engines.base import Finish, Token
from kldtui.engines.embedded import EmbeddedLlama, open_model
from kldtui.engines.supervise import MISSING, Program
from kldtui.errors import EngineError, EngineLoading
from tests.builders_demo import alive, engine_program, noted_pid
from tests.fake_server import EOG, FakeLlama

RELAY = """
import os, sys, time
notes, url, wait = sys.argv[1:4]
time.sleep(float(wait))
os.write(int(os.environ["KLDTUI_REPORT_FD"]), b'{"url": "%s"}\\n' % url.encode())
with open(os.path.join(notes, "relay.part"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(notes, "relay.part"), os.path.join(notes, "relay"))
time.sleep(600)
"""


def relay(folder: Path, url: str, wait: float = 0.0) -> Program:
    """A stand-in for llama.cpp that says that it serves at `url`, and leaves its process id."""
    script = folder / "relay.py"
    script.write_text(RELAY)
    argv = (sys.executable, "-I", "-S", str(script), str(folder), url, str(wait))
    return Program("stand-in", argv)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    return path


async def said(engine: EmbeddedLlama) -> list[int]:
    items = [item async for item in engine.generate([5, 6], 8, 3)]
    assert isinstance(items[-1], Finish)
    return [item.id for item in items if isinstance(item, Token)]


async def test_it_loads_answers_and_is_gone(tmp_path: Path, model: Path) -> None:
    async with FakeLlama(script=[*b"ok", EOG]) as fake:
        engine = EmbeddedLlama(
            model, n_ctx=64, program=relay(tmp_path, fake.url, 0.5), log_dir=tmp_path
        )
        assert engine.url == f"gguf:{model}"
        with pytest.raises(EngineError, match="not started"):
            await engine.next_top([5], 3)
        with pytest.raises(EngineLoading, match="stand-in loads it"):
            await engine.connect()
        waited: list[float] = []
        info = await wait_ready(engine, waited.append, interval=0.05)
        assert info.kind == "llama-server"
        assert waited
        assert engine.info == info
        assert await said(engine) == [*b"ok", EOG]
        assert engine.capabilities is not None
        pid = noted_pid(tmp_path, "relay")
        assert alive(pid)
        log = engine.served.log_path
        await engine.close()
    assert not alive(pid)
    assert log is not None
    assert not log.exists()


async def test_one_that_cannot_start_says_its_last_words_and_may_be_tried_again(
    tmp_path: Path, model: Path
) -> None:
    engine = EmbeddedLlama(
        model, n_ctx=64, program=engine_program(tmp_path, "fail"), log_dir=tmp_path
    )
    for _ in range(2):
        with pytest.raises(EngineError, match=r"tensor 'blk\.0' is missing.*log: "):
            await wait_ready(engine, interval=0.05)
    await engine.close()


async def test_one_that_died_is_started_anew(tmp_path: Path, model: Path) -> None:
    async with FakeLlama(script=[*b"ok", EOG]) as fake:
        engine = EmbeddedLlama(model, n_ctx=64, program=relay(tmp_path, fake.url), log_dir=tmp_path)
        await wait_ready(engine, interval=0.05)
        first = noted_pid(tmp_path, "relay")
        (tmp_path / "relay").unlink()
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(10):
            while engine.served.state == "ready":  # noqa: ASYNC110 - a process is waited for
                await asyncio.sleep(0.01)
        await wait_ready(engine, interval=0.05)
        second = noted_pid(tmp_path, "relay")
        assert second != first
        assert await said(engine) == [*b"ok", EOG]
        await engine.close()
    assert not alive(second)


def test_what_is_no_model_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        open_model(tmp_path / "none.gguf", 64)
    other = tmp_path / "text.gguf"
    other.write_text("no model")
    with pytest.raises(EngineError, match="no GGUF file"):
        open_model(other, 64)
    with pytest.raises(EngineError, match="no MLX folder"):
        open_model(tmp_path, 64)
    monkeypatch.setattr("kldtui.engines.embedded.can_serve", lambda: False)
    with pytest.raises(EngineError) as refused:
        open_model(model, 64)
    assert MISSING in str(refused.value)
