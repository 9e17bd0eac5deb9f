"""Engines that kldtui starts itself: a GGUF model on a free loopback port, gone when kldtui is.

Knows: how xllamacpp and `llama-server` are started, the supervisor process that ends them
(`_supervisor.py`), their log, and when they are ready.
Must not know: what is asked of an engine, recordings, the user interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kldtui.errors import EngineError

State = Literal["idle", "starting", "ready", "failed", "stopped"]

MISSING = "no engine to start: pip install 'kldtui[embedded]', or put llama-server on the PATH"

_HERE = Path(__file__).parent
_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Program:
    """A command that serves one model.

    url: where it will listen; None where it reports that itself, as the xllamacpp child does.
    """

    name: str
    argv: tuple[str, ...]
    url: str | None = None


def default_threads(alone: bool = False) -> int:
    """Half of the usable cores, 1 to 8: reference and quant answer at the same time.

    alone: all of them, 1 to 16, for an engine that has no other beside it.
    """
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(16, usable) if alone else min(8, usable // 2))


def xllamacpp_version() -> str | None:
    """The installed version of xllamacpp, found without importing it; None if there is none."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    try:
        return importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def can_serve() -> bool:
    """Whether there is anything here to serve a model with."""
    return xllamacpp_version() is not None or shutil.which("llama-server") is not None


def find_program(model: Path, n_ctx: int, threads: int, gpu_layers: int | None = None) -> Program:
    """xllamacpp if it is installed, else the `llama-server` on the PATH.

    gpu_layers: None leaves it to llama.cpp; 0 computes on the CPU alone.
    Raises EngineError where there is neither.
    """
    version = xllamacpp_version()
    if version is not None and sys.executable:
        settings = {
            "model": str(model),
            "n_ctx": n_ctx,
            "threads": threads,
            "gpu_layers": gpu_layers,
        }
        child = str(_HERE / "_xllamacpp_child.py")
        return Program(f"xllamacpp {version}", (sys.executable, "-P", child, json.dumps(settings)))
    server = shutil.which("llama-server")
    if server is None:
        raise EngineError(MISSING)
    port = free_port()
    argv = [server, "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["-np", "1", "-c", str(n_ctx), "-t", str(threads)]
    if gpu_layers is not None:
        argv += ["-ngl", str(gpu_layers)]
    return Program("llama-server", tuple(argv), f"http://127.0.0.1:{port}")


def free_port() -> int:
    """A loopback TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A command under the supervisor: ended with `stop()`, or as soon as this process is gone.

    command: a list of arguments, no shell. log: takes its standard output and error. on_report:
    called, in a thread, with each JSON object that the command writes to the descriptor named by
    KLDTUI_REPORT_FD. temporary: what is removed if this process is gone before it has ended the
    command; else it stays. on_exit: called once in that thread, with the exit code as `exit_code`
    has it. Raises EngineError if no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        on_report: Callable[[dict[str, Any]], None] | None = None,
        on_exit: Callable[[int | None], None] | None = None,
        env: dict[str, str] | None = None,
        temporary: Sequence[Path] = (),
    ) -> None:
        self.pid: int | None = None
        self.exit_code: int | None = None
        """Once `done` is set: negative when ended by that signal, None with its supervisor."""
        self.done = threading.Event()
        self._on_report = on_report
        self._on_exit = on_exit
        line = [sys.executable, "-I", "-S", str(_HERE / "_supervisor.py")]
        line += [*(str(path.absolute()) for path in temporary), "--", *command]
        with log.open("ab") as file:
            try:
                self._supervisor = subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
                    line,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env=env,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise EngineError(f"cannot run {sys.executable}: {error.strerror}") from error
        self._watcher = threading.Thread(target=self._watch, name="kldtui-child", daemon=True)
        self._watcher.start()

    def end(self) -> None:
        """Ask for the command's end and return at once; from any thread."""
        if self._supervisor.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # gone, or closed already
                self._supervisor.stdin.write(b".")
            with contextlib.suppress(OSError):
                self._supervisor.stdin.close()

    def stop(self) -> None:
        """End the command, and wait until all of it is gone (a second or two at most)."""
        self.end()
        try:
            self._supervisor.wait(5)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if not self.done.wait(1):  # the supervisor was killed, and its reports' pipe is still held
            self._kill()
            self.done.wait(5)

    def _watch(self) -> None:
        if self._supervisor.stdout is None:
            return
        with self._supervisor.stdout as reports:
            for line in reports:
                said = json.loads(line)
                if "pid" in said:
                    self.pid = said["pid"]
                elif "exit" in said:
                    self.exit_code = said["exit"]
                elif self._on_report is not None:
                    self._on_report(said)
        self._supervisor.wait()
        if self.exit_code is None:
            self._kill()
        self.end()
        if self._on_exit is not None:
            self._on_exit(self.exit_code)
        self.done.set()

    def _kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class ServedModel:
    """A model served on a loopback port by a process of its own, for as long as kldtui runs.

    `async with ServedModel(path) as served: served.url`, `with` alike, or `launch()` (returns at
    once), `state`, and `stop()` from any thread. The engine ends with the context, with `stop()`,
    and with this process, however that ends, also while the model is still loading.

    n_ctx: tokens of context (one slot). threads: default `default_threads()`. timeout: seconds
    until the model has to be loaded. program: what to run instead of `find_program`'s.
    """

    def __init__(
        self,
        model: Path,
        *,
        n_ctx: int = 2048,
        threads: int | None = None,
        gpu_layers: int | None = None,
        timeout: float = 300.0,
        program: Program | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.model = model
        self._given = program
        self._program: Program | None = None
        self._n_ctx = n_ctx
        self._threads = threads or default_threads()
        self._gpu_layers = gpu_layers
        self._timeout = timeout
        self._log_dir = log_dir
        self._log: Path | None = None
        self._state: State = "idle"
        self._error = ""
        self._url = ""
        self._child: Child | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()

    @property
    def state(self) -> State:
        """`failed` also where a ready engine has died since."""
        return self._state

    @property
    def error(self) -> str:
        """Why it failed, in one line that ends with the engine's own last words; else empty."""
        return self._error

    @property
    def url(self) -> str:
        """Such as `http://127.0.0.1:43817`. Raises EngineError while the engine is not ready."""
        if self._state != "ready":
            raise EngineError(self._error or f"the engine of {self.model.name} is {self._state}")
        return self._url

    @property
    def program(self) -> str:
        """What serves it, with its version where known; empty before `launch`."""
        return self._program.name if self._program else ""

    @property
    def log_path(self) -> Path | None:
        """The engine's output; None before `launch`. Kept after a failure, else removed, also
        where this process is killed."""
        return self._log

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, which leads a group of its own; None before it runs."""
        return self._child.pid if self._child else None

    def launch(self) -> None:
        """Start the engine and return at once. Raises EngineError if nothing can be started."""
        if self._state in ("starting", "ready"):
            raise EngineError(f"the engine of {self.model.name} is {self._state} already")
        if not self.model.is_file():
            raise EngineError(f"no such model: {self.model}")
        if self._child is not None:
            self._child.stop()
        program = self._given or find_program(
            self.model, self._n_ctx, self._threads, self._gpu_layers
        )
        self._program = program
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".log", f"kldtui-{self.model.stem}-", self._log_dir)
        os.close(handle)
        self._log = Path(name)
        self._state, self._error, self._url = "starting", "", ""
        self._settled.clear()
        try:
            self._child = Child(
                program.argv,
                self._log,
                self._heard,
                self._ended,
                env=_environment(),
                temporary=[self._log],
            )
        except EngineError as error:
            self._fail(str(error))
            raise
        waiter = threading.Thread(target=self._wait, args=(program.url,), daemon=True)
        waiter.start()

    def settled(self, timeout: float = 0.0) -> bool:
        """Whether it is ready, has failed or was stopped; waits `timeout` seconds for that."""
        return self._settled.wait(timeout)

    def stop(self) -> None:
        """End the engine and wait until it is gone (at most a few seconds). Idempotent."""
        with self._lock:
            if self._state in ("starting", "ready"):
                self._state = "stopped"
        self._settled.set()
        if self._child is not None:
            self._child.stop()
        if self._state == "stopped" and self._log is not None:
            self._log.unlink(missing_ok=True)

    def start(self, cancel: threading.Event | None = None) -> str:
        """Launch, wait until the model is loaded, and return the URL.

        Raises EngineError with the engine's last words if it cannot start, or if `cancel` is set
        meanwhile; nothing is left running then.
        """
        self.launch()
        try:
            while not self._settled.wait(0.05):
                if cancel is not None and cancel.is_set():
                    raise EngineError(f"starting the engine of {self.model.name} was cancelled")
            return self.url
        except BaseException:
            self.stop()
            raise

    async def start_async(self) -> str:
        """`start` for asyncio: cancelling the task ends the engine."""
        self.launch()
        try:
            while not self._settled.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.02)
            return self.url
        except BaseException:
            await self.stop_async()
            raise

    async def stop_async(self) -> None:
        """`stop` for asyncio; goes on to its end if the task is cancelled."""
        await asyncio.shield(asyncio.to_thread(self.stop))

    def __enter__(self) -> ServedModel:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> ServedModel:
        await self.start_async()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_async()

    def _wait(self, url: str | None) -> None:
        """Until the engine is ready, or its time is up; `url` is asked where it is known."""
        deadline = time.monotonic() + self._timeout
        while not self._settled.wait(0.1):
            if url is not None and _healthy(url):
                self._ready(url)
            elif time.monotonic() > deadline:
                self._fail(f"has not loaded its model after {self._timeout:g} s")
                if self._child is not None:
                    self._child.end()

    def _heard(self, said: dict[str, Any]) -> None:
        if "url" in said:
            self._ready(str(said["url"]))

    def _ended(self, code: int | None) -> None:
        self._fail(_cause(code))

    def _ready(self, url: str) -> None:
        with self._lock:
            if self._state == "starting":
                self._url, self._state = url.rstrip("/"), "ready"
        self._settled.set()

    def _fail(self, cause: str) -> None:
        with self._lock:
            if self._state in ("starting", "ready"):
                words = last_words(self._log)
                quoted = f"; its last words: {words}" if words else ""
                self._error = f"the engine of {self.model.name} {cause}{quoted} (log: {self._log})"
                self._state = "failed"
        self._settled.set()


def last_words(log: Path | None) -> str:
    """The last lines of an engine's log as one printable line; errors first; empty if none."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-20:]
    errors = [line for line in lines if re.search(r"\bE\b|error|cannot|fail", line)]
    chosen = (errors or lines)[-3:]
    shown = " | ".join(line[:200] for line in chosen)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def _cause(code: int | None) -> str:
    if code is None:
        return "was killed with its supervisor"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _healthy(url: str) -> bool:
    """Whether llama-server says that its model is loaded (503 while it loads)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _environment() -> dict[str, str]:
    """This process's, without the settings that llama-server would take from it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_ARG_", "LLAMA_API_KEY"))
    }
