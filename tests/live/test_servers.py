"""The servers that the live tests stand on, and that `kldtui demo` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kldtui.engines.supervise import ServedModel
from kldtui.errors import EngineError
from tests.builders_demo import wait_gone

REQUEST = {"prompt": [504, 3575, 282, 4649, 314], "n_predict": 2, "temperature": 0, "top_k": 1}


def test_both_models_answer_ids_and_are_told_apart(ref_server: str, quant_server: str) -> None:
    answers = []
    for url in (ref_server, quant_server):
        body = REQUEST | {"return_tokens": True, "n_probs": 2, "cache_prompt": False}
        answer = httpx.post(url + "/completion", json=body, timeout=60).raise_for_status().json()
        assert len(answer["tokens"]) == 2
        answers.append(answer["completion_probabilities"][0]["logprob"])
    assert answers[0] != answers[1]


def test_the_requantization_keeps_the_model_apart_from_its_weights(
    ref_server: str, quant_server: str
) -> None:
    ref, quant = (
        httpx.get(url + "/v1/models", timeout=60).json()["data"][0]["meta"]
        for url in (ref_server, quant_server)
    )
    assert ref["n_params"] == quant["n_params"]
    assert ref["n_vocab"] == quant["n_vocab"]
    assert (ref["ftype"], quant["ftype"]) == ("Q4_1", "Q5_0")


PARENT = """
import sys, time
from pathlib import Path
from kldtui.engines.supervise import ServedModel
served = ServedModel(Path(sys.argv[1]), threads=1, gpu_layers=0, log_dir=Path(sys.argv[2]))
served.launch()
while served.engine_pid is None:
    time.sleep(0.001)
print(served.engine_pid, flush=True)
time.sleep(600)
"""


def test_kill_9_ends_a_real_engine_while_it_loads(ref_model: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ref_model), str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    assert wait_gone(engine)


def test_what_is_no_model_is_refused_in_llama_cpps_words(ref_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with ref_model.open("rb") as file:
        cut.write_bytes(file.read(100_000))
    with pytest.raises(EngineError, match="failed to load model"):
        ServedModel(cut, threads=1, log_dir=tmp_path).start()
