"""A reference to be scored, a server of a quant of it, and templates for conversations.

Knows: fakes, and how to lay out a small reference.
Must not know: what a test wants to show.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kldtui.engines.base import Engine
from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.vllm import VllmServer
from kldtui.recorder.prompts import Prompt
from kldtui.recorder.rollout import RolloutJob, prompt_ids
from kldtui.recorder.score import ScoreJob
from kldtui.recorder.stream import OfRecording, Stream
from kldtui.recordings import open_recording
from tests.builders import Stream as KldStream
from tests.builders import write_kld
from tests.builders_engines import model, served
from tests.fake_server import EOG, FakeLlama
from tests.fake_vllm import FakeVllm

N_VOCAB, N_CTX, N_CHUNK = 306, 16, 3
CREATED = datetime(2026, 11, 30, 12, tzinfo=UTC)
REF, QUANT = model(1, N_VOCAB), model(2, N_VOCAB)

_ODD = (301, 0x8E, EOG, 1, 302)
"""Cut characters, an end, a control token: what no grammar may hold."""


def tokens() -> np.ndarray[Any, np.dtype[np.int32]]:
    """The stream: letters, and odd tokens in its second chunk's scored half."""
    laid = np.random.default_rng(4).integers(97, 122, (N_CHUNK, N_CTX)).astype(np.int32)
    laid[1, N_CTX // 2 + 2 : N_CTX // 2 + 2 + len(_ODD)] = _ODD
    return laid


def reference(path: Path) -> Path:
    """The `.kld` file of REF."""
    laid = KldStream(tokens(), N_VOCAB)
    rows = [
        REF(laid.tokens[chunk, :t].tolist())
        for chunk in range(N_CHUNK)
        for t in range(laid.first_t, N_CTX)
    ]
    return write_kld(path, laid, np.array(rows, np.float32))


def quant_server(**more: Any) -> FakeLlama:
    """A llama-server of QUANT, whose numbers move with how tokens are computed."""
    answer = served(QUANT)
    settings: dict[str, Any] = {"n_ctx": 64, "drift": 0.1, **more}
    return FakeLlama(next_top=lambda prompt: list(answer(prompt)), **settings)


def asked_of(ref: Path, chunks: tuple[int, int] | None, whole: bool) -> dict[str, Any]:
    """As `kldtui record score` has it."""
    asked: dict[str, Any] = {"ref": ref.name, "positions": "all" if whole else "scored"}
    return asked if chunks is None else asked | {"chunks": list(chunks)}


async def score_run(
    server: FakeLlama | str,
    ref: Path,
    path: Path,
    *,
    top_n: int = 5,
    chunks: tuple[int, int] | None = None,
    whole: bool = False,
    engine: Engine | None = None,
    grammar: bool = True,
    stream: Stream | None = None,
) -> int:
    """Record what a server says of a reference; how many positions were new."""
    url = server if isinstance(server, str) else server.url
    asked = LlamaServer(url) if engine is None else engine
    info = await asked.connect()
    if isinstance(asked, LlamaServer):
        asked.scorer.grammar = grammar
    recording = open_recording(ref)
    try:
        job = ScoreJob(
            asked,
            stream or OfRecording(recording, chunks, whole=whole),
            path,
            top_n=top_n,
            add_bos=info.add_bos,
            bos_id=info.bos_id,
            fields={"asked": asked_of(ref, chunks, whole)},
            created=CREATED,
        )
        last = await job.run()
    finally:
        recording.close()
        await asked.close()
    return last.done - last.before


def completions(server: FakeLlama) -> list[dict[str, Any]]:
    """The requests that scored something."""
    return [body for body in server.bodies() if len(body["prompt"]) > 1]


# ── rollouts ─────────────────────────────────────────────────────────────────────────────────

LETTERS = model(1, N_VOCAB)
PROMPTS = [Prompt(1, text="What is"), Prompt(2, ids=(97, 98, 99)), Prompt(4, text="Once")]


def teller(others: Mapping[int, int] | None = None, ends_at: int = 14) -> Any:
    """Says letters, a cut character now and then, and its end after so many tokens in all.

    others: first token of a prompt -> at which length it says something else.
    """

    def answer(prompt: list[int]) -> list[tuple[int, float]]:
        length = len(prompt)
        letter = 97 + (7 * length + prompt[0]) % 13
        best = 301 if length % 6 == 5 else 0x8E if prompt[-1] == 301 else letter
        if length >= ends_at:
            best = EOG
        if (others or {}).get(prompt[0]) == length:
            best = letter + 1
        logp = LETTERS(prompt) - 3.0
        logp[best] = -0.2
        order = np.argsort(-logp, kind="stable")
        return [(int(id), float(logp[id])) for id in order]

    return answer


def rolling_server(**more: Any) -> FakeLlama:
    settings: dict[str, Any] = {"next_top": teller(), "n_ctx": 64, "drift": 0.05, **more}
    return FakeLlama(**settings)


async def roll(
    fake: FakeLlama | FakeVllm,
    path: Path,
    prompts: list[Prompt] = PROMPTS,
    *,
    n: int = 10,
    top_n: int = 4,
    **more: Any,
) -> int:
    engine = LlamaServer(fake.url) if isinstance(fake, FakeLlama) else VllmServer(fake.url)
    await engine.connect()
    try:
        ids = await prompt_ids(engine, prompts)
        job = RolloutJob(engine, prompts, ids, path, n=n, top_n=top_n, created=CREATED, **more)
        last = await job.run()
    finally:
        await engine.close()
    return last.done - last.before


async def own_pair(folder: Path) -> tuple[Path, Path]:
    """They part 3 tokens on from the first prompt, and at the first token from the third."""
    async with rolling_server() as fake:
        await roll(fake, folder / "ref.run")
    async with rolling_server(next_top=teller({ord("W"): 10, ord("O"): 4})) as fake:
        await roll(fake, folder / "quant.run", n=12)
    return folder / "ref.run", folder / "quant.run"


# ── templates ────────────────────────────────────────────────────────────────────────────────


def chatml(
    body: dict[str, Any], *, forgets: bool = True, calls: bool = True, alternates: bool = False
) -> str:
    """A template as Qwen's: thinking is dropped from what lies before the last user message.

    forgets: whether it is. calls: whether calls are written. alternates: two user messages in a
    row are refused. As llama-server does, a final assistant message is continued, its end and its
    calls left out.
    """
    messages = list(body["messages"])
    prefill = None
    if messages[-1]["role"] == "assistant":
        prefill = messages.pop()
        if prefill.get("tool_calls"):
            raise ValueError("Cannot continue an assistant message that contains tool calls.")
    if alternates and any(
        a["role"] == b["role"] == "user" for a, b in itertools.pairwise(messages)
    ):
        raise ValueError("roles must alternate")
    asked = [k for k, message in enumerate(messages) if message["role"] == "user"]
    last = asked[-1] if asked else len(messages)
    text = ""
    if body.get("tools"):
        text += f"<s>tools {len(body['tools'])}</s>\n"
    for k, message in enumerate(messages):
        text += f"<s>{message['role']}\n"
        if message.get("reasoning_content") and (k > last or not forgets):
            text += f"<think>{message['reasoning_content']}</think>\n"
        text += message.get("content") or ""
        for call in (message.get("tool_calls") or ()) if calls else ():
            function = call["function"]
            text += f'<call>{{"name":"{function["name"]}","arguments":{function["arguments"]}}}'
        text += "</s>\n"
    if body.get("add_generation_prompt", True) or prefill is not None:
        text += "<s>assistant\n"
    return text + ((prefill.get("content") or "") if prefill is not None else "")


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(ids: Sequence[int]) -> str:
    """What the fake server's ids spell."""
    from tests.fake_server import SPECIAL, VOCABULARY

    return b"".join(SPECIAL.get(id, VOCABULARY[id]) for id in ids).decode()
