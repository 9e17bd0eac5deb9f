"""Engines that kldtui starts: ready, failing, and gone whatever happens to kldtui."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kldtui.engines import supervise
from kldtui.engines.supervise import ServedModel, find_program, free_port
from kldtui.errors import EngineError
from tests.builders_demo import (
    LLAMA_SERVER,
    alive,
    engine_program,
    noted_pid,
    wait_gone,
    wait_none,
)

PARENT = """
import sys, time
from pathlib import Path
from kldtui.engines.supervise import ServedModel
from tests.builders_demo import engine_program
folder = Path(sys.argv[1])
served = ServedModel(Path(__file__), program=engine_program(folder, sys.argv[2]), log_dir=folder)
served.launch()
time.sleep(600)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    return path


def serve(folder: Path, model: Path, mode: str, timeout: float = 60.0) -> ServedModel:
    program = engine_program(folder, mode)
    return ServedModel(model, program=program, log_dir=folder, timeout=timeout)


def test_an_engine_is_ready_when_it_says_so_and_gone_after_the_block(
    tmp_path: Path, model: Path
) -> None:
    with serve(tmp_path, model, "serve") as served:
        assert (served.state, served.url) == ("ready", "http://127.0.0.1:1")
        engine, helper = noted_pid(tmp_path, "engine"), noted_pid(tmp_path, "helper")
        assert served.engine_pid == engine
        assert os.getsid(engine) != os.getsid(0), "Ctrl-C in the terminal would reach the engine"
        log = served.log_path
    assert served.state == "stopped"
    assert not alive(engine)
    assert wait_gone(helper)
    assert log is not None
    assert not log.exists()


async def test_the_same_from_asyncio(tmp_path: Path, model: Path) -> None:
    async with serve(tmp_path, model, "serve") as served:
        assert served.url == "http://127.0.0.1:1"
        engine = noted_pid(tmp_path, "engine")
    assert not alive(engine)


@contextlib.contextmanager
def kldtui_with_an_engine(folder: Path, mode: str) -> Iterator[tuple[int, int]]:
    """The process ids of the engine and its helper; kldtui is killed with the block."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script), str(folder), mode], env=env)
    try:
        yield noted_pid(folder, "engine"), noted_pid(folder, "helper")
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("mode", ["load", "serve", "stubborn"])
def test_kill_9_of_kldtui_ends_the_engine_and_what_it_started(tmp_path: Path, mode: str) -> None:
    with kldtui_with_an_engine(tmp_path, mode) as pids:
        assert alive(pids[0])
    assert wait_gone(*pids)
    assert wait_none(tmp_path, "kldtui-*.log"), "its log is of use to nobody"


def test_where_all_are_told_to_end_at_once_nothing_is_left_either(tmp_path: Path) -> None:
    with kldtui_with_an_engine(tmp_path, "stubborn") as pids:
        os.kill(parent_of(pids[0]), signal.SIGTERM)
    assert wait_gone(*pids)
    assert wait_none(tmp_path, "kldtui-*.log")


def test_what_has_a_log_s_name_but_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A folder that is removed with kldtui, and in it a link to what is the user's."""
    mine, work = tmp_path / "mine", tmp_path / "work"
    for folder in (mine, work):
        folder.mkdir()
        (folder / "file").write_text("mine")
    (work / "inside").symlink_to(mine)
    (tmp_path / "link").symlink_to(mine)
    temporary = [str(work), str(tmp_path / "link"), str(tmp_path / "never was")]
    supervisor = Path(supervise.__file__).with_name("_supervisor.py")
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor, *temporary, "--", "sleep", "600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    engine = json.loads(started.stdout.readline())["pid"]
    started.communicate(timeout=30)
    assert not alive(engine)
    assert not work.exists()
    assert not (tmp_path / "link").is_symlink()
    assert (mine / "file").read_text() == "mine"


def test_a_failing_engine_is_quoted_in_one_printable_line(tmp_path: Path, model: Path) -> None:
    served = serve(tmp_path, model, "fail")
    with pytest.raises(EngineError) as caught:
        served.start()
    text = str(caught.value)
    assert "some.gguf ended with status 3" in text
    assert "tensor 'blk.0' is missing" in text
    assert text.isprintable()
    assert served.state == "failed"
    assert served.log_path is not None
    assert "loading tensors" in served.log_path.read_text()


def test_an_engine_that_dies_later_is_noticed(tmp_path: Path, model: Path) -> None:
    with serve(tmp_path, model, "serve") as served:
        os.kill(noted_pid(tmp_path, "engine"), signal.SIGSEGV)
        assert wait_gone(noted_pid(tmp_path, "engine"), noted_pid(tmp_path, "helper"))
        wait_state(served, "failed")
        with pytest.raises(EngineError, match="SIGSEGV"):
            _ = served.url


def wait_state(served: ServedModel, state: str) -> None:
    waited = threading.Event()
    for _ in range(500):
        if served.state == state:
            return
        waited.wait(0.01)
    pytest.fail(f"the engine is {served.state}, not {state}")


def test_a_model_that_does_not_load_in_time_is_given_up(tmp_path: Path, model: Path) -> None:
    served = serve(tmp_path, model, "load", timeout=0.3)
    with pytest.raises(EngineError, match=r"not loaded its model after 0\.3 s"):
        served.start()
    assert served.engine_pid is None or not alive(served.engine_pid)
    assert served.log_path is not None
    assert served.log_path.exists(), "the error names it"


def test_starting_can_be_cancelled(tmp_path: Path, model: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    served = serve(tmp_path, model, "load")
    with pytest.raises(EngineError, match="cancelled"):
        served.start(cancel)
    assert served.state == "stopped"


async def test_cancelling_the_task_ends_an_engine_that_loads(tmp_path: Path, model: Path) -> None:
    served = serve(tmp_path, model, "stubborn")
    task = asyncio.create_task(served.start_async())
    engine = await asyncio.to_thread(noted_pid, tmp_path, "engine")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(engine)


def test_an_engine_does_not_outlive_a_killed_supervisor(tmp_path: Path, model: Path) -> None:
    with serve(tmp_path, model, "serve"):
        engine = noted_pid(tmp_path, "engine")
        os.kill(parent_of(engine), signal.SIGKILL)
    assert wait_gone(engine)


def parent_of(pid: int) -> int:
    listed = subprocess.run(
        ["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("needs ps")
    return int(listed.stdout)


def test_a_served_model_can_be_started_again(tmp_path: Path, model: Path) -> None:
    served = serve(tmp_path, model, "serve")
    for _ in range(2):
        assert served.start() == "http://127.0.0.1:1"
        served.stop()
        served.stop()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no such model: .*none\.gguf"):
        ServedModel(tmp_path / "none.gguf").start()


def test_llama_server_from_the_path_serves_on_a_free_loopback_port(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "llama-server"
    server.write_text(LLAMA_SERVER.format(python=sys.executable))
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")  # noqa: S104 - what must not get through
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    monkeypatch.setattr(supervise, "xllamacpp_version", lambda: None)
    with ServedModel(model, n_ctx=99, threads=1, gpu_layers=0, log_dir=tmp_path) as served:
        host, _, port = served.url.removeprefix("http://").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("GET", "/")
        said = json.loads(connection.getresponse().read())
        connection.close()
    assert host == "127.0.0.1"
    options = dict(zip(said["argv"][1::2], said["argv"][2::2], strict=True))
    assert options == {
        "-m": str(model),
        "--host": "127.0.0.1",
        "--port": port,
        "-np": "1",
        "-c": "99",
        "-t": "1",
        "-ngl": "0",
    }
    assert not [name for name in said["env"] if name.startswith("LLAMA_")]


def test_without_any_engine_it_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(supervise, "xllamacpp_version", lambda: None)
    assert not supervise.can_serve()
    with pytest.raises(EngineError, match=r"pip install 'kldtui\[embedded\]'"):
        find_program(model, 64, 1)


def test_a_free_port_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
