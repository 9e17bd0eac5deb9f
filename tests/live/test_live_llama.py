"""Real llama.cpp servers: ids equal to a direct request's, and verify tells models apart.

Run with `-s` to see the gaps (mean |Δ log p| over the top 20, nats) that verify measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kldtui.branching import Arm, Branch, bos_warning, prefix_of, run_branch
from kldtui.engines import Finish, Token
from kldtui.engines.llama_server import LlamaServer
from kldtui.errors import ContextExceeded
from kldtui.position import Position
from kldtui.recordings import open_recording
from kldtui.rows import FullRow
from kldtui.verify import VerifyResult, verify

TEXTS = {
    "prose": "User: What is the weather in Paris",
    "end of turn": "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n",
    "chinese": "今天天气很好,我们去公园",
    "emoji": "😀😁😂🤣 emoji: 😃",
    "russian": "Привет, как дела? Меня зовут",
    "japanese": "こんにちは、私は",
}


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(trust_env=False, timeout=120) as client:
        answer = client.post(url + path, json=body)
        answer.raise_for_status()
        return answer.json()


def direct(url: str, prefix: list[int], n: int) -> dict[str, Any]:
    """The same greedy request by hand, unstreamed."""
    body = {
        "prompt": prefix,
        "n_predict": n,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k", "temperature"],
        "n_probs": 5,
        "return_tokens": True,
        "post_sampling_probs": False,
        "cache_prompt": False,
    }
    answer: dict[str, Any] = post(url, "/completion", body)
    return answer


def ids_of(url: str, text: str) -> list[int]:
    found: list[int] = post(url, "/tokenize", {"content": text, "add_special": False})["tokens"]
    return found


@pytest.fixture
async def ref(ref_server: str) -> AsyncIterator[LlamaServer]:
    engine = LlamaServer(ref_server)
    await engine.connect()
    yield engine
    await engine.close()


@pytest.fixture
async def quant(quant_server: str) -> AsyncIterator[LlamaServer]:
    engine = LlamaServer(quant_server)
    await engine.connect()
    yield engine
    await engine.close()


async def test_says_who_it_is(ref: LlamaServer) -> None:
    info = ref.info
    assert info is not None
    assert (info.kind, info.n_vocab, info.bos_id, info.add_bos) == ("llama-server", 49152, 1, False)
    assert "Q4_1" in info.model
    assert info.n_ctx == 2048
    assert info.warnings == ()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_generated_ids_are_those_of_a_direct_request(ref: LlamaServer, text: str) -> None:
    prefix = ids_of(ref.url, text)
    tokens: list[Token] = []
    finish: Finish | None = None
    async for item in ref.generate(prefix, 40, 5):
        if isinstance(item, Finish):
            finish = item
        else:
            tokens.append(item)
    answer = direct(ref.url, prefix, 40)
    assert [token.id for token in tokens] == answer["tokens"]
    assert finish is not None
    assert finish.reason == ("eog" if answer["stop_type"] == "eos" else "limit")
    for token in tokens:
        assert len(token.top) == 5
        assert token.top[0][0] == token.id
        assert token.logp == pytest.approx(token.top[0][1])
    spelled = b"".join(token.data for token in tokens).removesuffix(b"<|im_end|>")
    assert spelled.decode("utf-8", "replace").rstrip("�") == answer["content"].rstrip("�")
    hidden = len(answer["tokens"]) - len(answer["completion_probabilities"])
    if text in (TEXTS["chinese"], TEXTS["emoji"], TEXTS["japanese"]):
        assert hidden > 0, "this text no longer shows what it is here for"


async def test_the_servers_vocabulary_is_the_tokenizers(ref: LlamaServer, smollm2: Path) -> None:
    from kldtui.vocab import load_vocabulary

    table = load_vocabulary(smollm2 / "tokenizer.json")
    pieces = await ref.pieces(range(49152))
    assert len(pieces) == 49152
    different = [id for id, data in pieces.items() if table.piece(id) != data]
    assert different == []


async def test_a_prefix_beyond_the_context_is_refused_in_its_words(ref: LlamaServer) -> None:
    with pytest.raises(ContextExceeded, match="exceeds the available context size"):
        async for _ in ref.generate([28] * 3000, 4, 1):
            pass


async def test_a_branch_that_fills_the_context_says_so(ref: LlamaServer) -> None:
    items = [item async for item in ref.generate([28] * 2040, 30, 1)]
    assert isinstance(items[-1], Finish)
    assert items[-1].reason == "context"
    assert len(items) == 9


async def test_both_arms_of_a_root(ref: LlamaServer, quant: LlamaServer, smollm2: Path) -> None:
    root = Position(3, 38)
    recorded = {
        "ref": open_recording(smollm2 / "ref.kld"),
        "quant": open_recording(smollm2 / "q5_0.kld"),
    }
    engines = {"ref": ref, "quant": quant}
    for side in ("ref", "quant"):
        row = recorded[side].row(root)
        assert isinstance(row, FullRow)
        engine = engines[side]
        assert engine.info is not None
        prefix = prefix_of(recorded["ref"], root, engine.info.add_bos, engine.info.bos_id)
        arm = Arm("ref", "ref") if side == "ref" else Arm("quant", "quant")
        branch = Branch(root, arm, "q5_0", row.top(1)[0][0], prefix)
        async for _ in run_branch(engine, branch, 24, 10):
            pass
        answer = direct(engine.url, [*prefix, branch.start_id], 24)
        assert branch.ids == answer["tokens"][: len(branch.ids)]
        assert branch.stop == "limit"
        assert len(branch.ids) == 24


def shown(what: str, result: VerifyResult) -> VerifyResult:
    print(f"\n{what}: {result.verdict}, own {result.own}, other {result.other}: {result.detail}")
    return result


async def test_verify_passes_for_the_right_servers(
    ref: LlamaServer, quant: LlamaServer, smollm2: Path
) -> None:
    mine, theirs = open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "q5_0.kld")
    for root in (None, Position(3, 38), Position(6, 50)):
        as_ref = shown("ref", await verify(ref, mine, theirs, None, root, "ref"))
        as_quant = shown("quant", await verify(quant, theirs, mine, None, root, "quant"))
        for result in (as_ref, as_quant):
            assert result.verdict == "ok"
            assert result.own is not None
            assert result.other is not None
            assert result.own < 0.3 < result.other
            assert result.positions >= 8


async def test_verify_names_exchanged_servers(
    ref: LlamaServer, quant: LlamaServer, smollm2: Path
) -> None:
    mine, theirs = open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "q5_0.kld")
    as_ref = shown("quant as ref", await verify(quant, mine, theirs, None, None, "ref"))
    as_quant = shown("ref as quant", await verify(ref, theirs, mine, None, None, "quant"))
    assert (as_ref.verdict, as_quant.verdict) == ("swapped", "swapped")
    assert "exchanged" in as_ref.detail


async def test_verify_tells_a_missing_bos_from_another_model(
    ref: LlamaServer, quant: LlamaServer, smollm2: Path
) -> None:
    with_bos = open_recording(smollm2 / "ref-bos.kld")
    assert ref.info is not None
    assert bos_warning(with_bos, ref.info.add_bos, ref.info.bos_id) is not None
    result = shown("ref against ref-bos", await verify(ref, with_bos))
    assert (result.verdict, result.add_bos) == ("bos", True)
    other = shown("quant against ref-bos", await verify(quant, with_bos))
    assert other.verdict == "other_model"


async def test_verify_names_another_model(quant: LlamaServer, smollm2: Path) -> None:
    mine, theirs = open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "q8_0.kld")
    assert shown("q5_0 as ref", await verify(quant, mine, theirs)).verdict == "other_model"
    assert shown("q5_0 as ref, alone", await verify(quant, mine)).verdict == "other_model"


async def test_the_null_recording_is_too_alike_to_cry_swap(ref: LlamaServer, smollm2: Path) -> None:
    mine, null = open_recording(smollm2 / "ref.kld"), open_recording(smollm2 / "ref-ub32.kld")
    result = shown("ref, null recording beside it", await verify(ref, mine, null))
    assert result.verdict == "ok"


def test_the_branch_command(ref_server: str, quant_server: str, smollm2: Path) -> None:
    line = [
        *(sys.executable, "-m", "kldtui", "branch", str(smollm2 / "ref.kld")),
        *("--quant", str(smollm2 / "q5_0.kld"), "--root", "c3:t38"),
        *("--ref-server", ref_server, "--quant-server", quant_server, "-n", "16", "--json"),
    ]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, env=os.environ | {"NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert {name: each["verdict"] for name, each in data["verify"].items()} == {
        "ref": "ok",
        "quant": "ok",
    }
    urls = {"ref": ref_server, "quant": quant_server}
    for arm in data["arms"]:
        answer = direct(urls[arm["engine"]], [*arm["prefix_ids"], arm["start_id"]], 16)
        assert arm["tokens"] == answer["tokens"][: len(arm["tokens"])]
    starts = {(arm["engine"], arm["start_id"]) for arm in data["arms"]}
    ref, quant = data["ref_id"], data["quant_id"]
    assert starts == {("ref", ref), ("quant", quant), ("ref", quant)}
