"""mlx_lm.server: greedy continuations of ids, though it takes and streams text only.

Knows: its `/v1/completions`, `/v1/models` and `/health`, and how its prompt cache fails.
Must not know: recordings, branches, the screen; tokenizers (`parity`), shapes (`mlx_shapes`),
the faults of HTTP (`http`).

A prefix goes out as a text that the model's own tokenizer encodes to exactly its ids, or not at
all. Ids come back only from unstreamed answers, so a branch is asked for in short steps. Each step
begins one token before the end of the last or earlier, where text and ids agree, and the tokens
that it repeats must be the same: a prompt that equals an earlier prompt with its answer leaves the
server nothing to compute, and it drops the connection. `seed` makes it compute one request at a
time; without, such a prompt ends its generation thread for good.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from kldtui.engines.base import Capabilities, EngineInfo, Finish, Token, Top
from kldtui.engines.http import ANSWER_SECONDS, Address, Http
from kldtui.engines.mlx_folder import folder_facts
from kldtui.engines.mlx_shapes import Answer, Choice, read_answer
from kldtui.engines.mlx_steps import Asked, Run, Runs, Step
from kldtui.engines.parity import SAMPLE, OwnTokenizer
from kldtui.errors import (
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnreachable,
    InexactPrefix,
    KldtuiError,
    UnusableEngine,
    VocabularyError,
)

TOP_LIMIT = 10
_GREEDY: dict[str, Any] = {"temperature": 0, "seed": 0}
_IN_PROCESS = (
    "to branch there, let kldtui run the model itself, on ids: give its folder as --ref-model or "
    "--quant-model (pip install 'kldtui[mlx]')"
)
_CAPABILITIES = Capabilities(
    takes_ids=False,
    returns_ids=True,
    top_n_limit=TOP_LIMIT,
    streams_probabilities=False,
    cache_switch=False,
    notes=(
        "it takes text only: a prefix whose text encodes to other ids is refused",
        "it streams no ids: a branch comes in steps of some tokens",
        "its prompt cache cannot be switched off by a request; --prompt-cache-size 0 does, and "
        "makes every step compute the prefix again",
    ),
)
_CHANGES = (
    "it answers the same text differently, so that the parts of a branch do not fit together; "
    "is somebody else using it?"
)
_DROPPED = "it closed the connection"
_FIRST_STEP, _LONGEST_STEP = 4, 32
_TRIALS = (1, 8, 64)
_SHORT_STEP_SECONDS = 1.0
_FIRST_ANSWER_SECONDS = 10.0


class MlxServer:
    """An engine over one mlx_lm.server. One answer at a time.

    Every prefix is checked before anything is sent: where it cannot be sent exactly, InexactPrefix
    is raised, which knows the nearest prefix that can.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: Path | OwnTokenizer | None = None,
        api_key: str | None = None,
        key_hint: str = "KLDTUI_API_KEY",
        transport: httpx.AsyncBaseTransport | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        first_answer_seconds: float = _FIRST_ANSWER_SECONDS,
    ) -> None:
        """`tokenizer`: the model's own, or the tokenizer.json or MLX folder that has it. Without
        one that encodes, the folder is taken that a server on this machine names.
        first_answer_seconds: how long `connect` waits before it says that the server is loading.
        Raises EngineError for what is no URL."""
        # A model in a request would make the server load that one, perhaps over the network.
        address = dataclasses.replace(Address.parse(url), query={})
        self._http = Http(
            address,
            api_key=api_key,
            key_hint=key_hint,
            transport=transport,
            answer_seconds=answer_seconds,
        )
        self._given = tokenizer
        self._patience = first_answer_seconds
        self._turn = asyncio.Lock()
        self._first: asyncio.Task[Answer] | None = None
        self._tokenizer: OwnTokenizer | None = None
        self._info: EngineInfo | None = None
        self._older = False
        self._asked = Asked()
        self._runs = Runs()

    @property
    def url(self) -> str:
        return self._http.address.public

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def settings(self) -> dict[str, Any]:
        """What a judged branch is asked with, text and length apart."""
        return {**_GREEDY, **self._wanted, "prompt": "text that encodes to the exact ids"}

    @property
    def arriving(self) -> bytes:
        return b""

    @property
    def tokenizer(self) -> OwnTokenizer | None:
        """The model's own tokenizer; None before `connect`. Its `check` says whether a prefix
        can be sent, without sending anything."""
        return self._tokenizer

    # ── who is there ─────────────────────────────────────────────────────────────────────────

    async def connect(self) -> EngineInfo:
        """Ask who is there, and for one token, which shows that its tokenizer is the given one.

        Raises EngineUnreachable, EngineLoading, EngineUnauthorized, EngineRefused, UnusableEngine
        for a server of which no tokenizer is known or another one is given, or VocabularyError
        for a tokenizer that cannot be read.
        """
        health = await self._http.peek("/health")
        if health.status_code == 503:
            raise self._http.error(EngineRefused, "its generation thread has died; restart it")
        if health.status_code in (401, 403):
            self._http.refuse(health.status_code, health.content, health.headers)
        _, models, _ = await self._http.get("/v1/models")
        served = _served(models)
        folder = self._folder(served)
        tokenizer = await asyncio.to_thread(self._load, folder)
        answer = await self._first_answer()
        try:
            tokenizer.settle(answer.n_prompt)
        except KldtuiError as error:
            words = f"{error}: give the tokenizer of the model that it serves"
            raise self._http.error(UnusableEngine, words) from None
        if tokenizer.after:
            words = "its tokenizer puts an end after every text, so that nothing can be continued"
            raise self._http.error(UnusableEngine, words)
        self._older = answer.older
        self._tokenizer = tokenizer
        self._info = self._describe(served, folder, tokenizer, answer.build)
        return self._info

    async def close(self) -> None:
        if self._first is not None:
            self._first.cancel()
        await self._http.close()

    def _folder(self, served: str) -> Path | None:
        """The model's folder, where it is on this machine."""
        if isinstance(self._given, Path) and self._given.is_dir():
            return self._given
        host = urlsplit(self._http.address.public).hostname or ""
        near = host == "localhost" or host.startswith("127.") or host == "::1"
        path = Path(served)
        return path if near and path.is_absolute() and path.is_dir() else None

    def _load(self, folder: Path | None) -> OwnTokenizer:
        if isinstance(self._given, OwnTokenizer):
            return self._given
        if self._given is not None:
            try:
                return OwnTokenizer.load(self._given)
            except VocabularyError:
                if folder in (None, self._given):
                    raise
        if folder is None:
            raise self._http.error(
                UnusableEngine,
                "mlx_lm.server takes text only, and which ids a text gives is not known without "
                "its model's tokenizer: give it with --tokenizer (tokenizer.json or the folder)",
            )
        return OwnTokenizer.load(folder)

    async def _first_answer(self) -> Answer:
        """The answer to a sample text. It takes as long as the server loads its model, so one
        request is waited for over several calls, whatever becomes of these."""
        if self._first is None:
            body = {"prompt": SAMPLE, "max_tokens": 1, **_GREEDY, "logprobs": True}
            self._first = asyncio.create_task(self._post(body))
        done, _ = await asyncio.wait({self._first}, timeout=self._patience)
        if not done:
            words = "it has not answered yet: it loads its model, or has another request to answer"
            raise self._http.error(EngineLoading, f"{words}; wait for it")
        first, self._first = self._first, None
        return first.result()

    def _describe(
        self, served: str, folder: Path | None, tokenizer: OwnTokenizer, build: str
    ) -> EngineInfo:
        facts = folder_facts(folder)
        n_vocab = facts.pop("vocab_size", None)
        bos = tokenizer.vocabulary.bos_id
        name = Path(served).name if served else folder.name if folder else "unnamed"
        return EngineInfo(
            kind="mlx_lm.server",
            url=self.url,
            model=name,
            build=build or "unknown",
            n_vocab=n_vocab,
            n_ctx=None,
            bos_id=bos,
            add_bos=bos is not None and tokenizer.before[:1] == (bos,),
            details={
                **facts,
                "model_path": served or str(folder or ""),
                "tokenizer": tokenizer.vocabulary.source,
                "tokenizer_n_vocab": tokenizer.vocabulary.n_vocab,
            },
        )

    # ── one answer ───────────────────────────────────────────────────────────────────────────

    async def generate(
        self, prefix: Sequence[int], n: int, top_n: int, *, cache: bool = False
    ) -> AsyncGenerator[Token | Finish, None]:
        """Continue `prefix` greedily by up to `n` tokens, each with its best 10 at most (nats).

        `cache` changes nothing: the server reuses what it has. The last item is a Finish. Raises
        InexactPrefix where no text gives the prefix, before anything is sent if it is clear then;
        any other EngineError after the tokens that arrived.
        """
        ids = [int(id) for id in prefix]
        start, started = len(ids), time.monotonic()
        size, stuck, ended = _FIRST_STEP, 0, False
        async with self._turn:
            run = self._runs.begin(ids)
            while not ended and len(ids) - start < n:
                left = start + n - len(ids)
                wanted = (size, _LONGEST_STEP, left)[min(stuck, 2)]
                begun, last = time.monotonic(), run.cut
                step = await self._step(run, min(wanted, left), left)
                quick = time.monotonic() - begun < _SHORT_STEP_SECONDS
                if quick or (last is not None and step.cached == 0):
                    size = min(2 * size, _LONGEST_STEP)
                stuck = 0 if last is None or step.cut > last else stuck + 1
                for choice in step.choices:
                    ids.append(choice.id)
                    ended = self._ends(choice.id) or (step.ended and choice is step.choices[-1])
                    yield self._token(choice, top_n)
                    if ended:
                        break
        seconds = time.monotonic() - started
        speed = (len(ids) - start) / seconds if seconds > 0 else None
        yield Finish("eog" if ended else "limit", start, seconds, speed)

    async def next_top(self, prefix: Sequence[int], top_n: int, *, cache: bool = True) -> Top:
        """The best continuations of `prefix`, 10 at most, best first, ties by lowest id; nats.

        Raises InexactPrefix where no text gives the prefix, or any other EngineError.
        """
        ids = [int(id) for id in prefix]
        async with self._turn:
            step = await self._step(Run(ids, len(ids)), 1, 1)
        return step.choices[0].top[:top_n]

    async def _step(self, run: Run, n: int, left: int) -> Step:
        """Up to `n` tokens after the run's; `left` where parts of it do not fit together.

        Raises InexactPrefix where the run has not begun and cannot.
        """
        tokenizer, highest = self._known(), len(run.ids)
        dropped = ""
        while True:
            found = await asyncio.to_thread(self._asked.place, tokenizer, run, highest)
            if found is None:
                raise await self._nowhere(tokenizer, run, dropped)
            cut, text = found
            try:
                step = await self._step_from(run, cut, text, n)
            except EngineBroke as error:
                # As it does where nothing is left to compute: others may have asked for it.
                if dropped or _DROPPED not in str(error):
                    raise EngineBroke(dropped or str(error)) from None
                dropped = f"{error} If it is, start it with --prompt-cache-size 0"
                self._asked.add(run.ids[:cut])
                continue
            except EngineUnreachable as error:
                raise EngineBroke(dropped) if dropped else error from None
            if step is not None:
                run.cut, run.own = cut, min(run.own, cut)
                return step
            if run.cut is None:
                raise await self._nowhere(tokenizer, run, dropped)
            if cut <= run.cut:
                raise self._http.error(UnusableEngine, _CHANGES)
            highest, n = run.cut, left

    async def _step_from(self, run: Run, cut: int, text: str, n: int) -> Step | None:
        """The step that begins at `cut`; None where other tokens come there than the run's.

        Where that is to be feared, it is found out by few tokens before many are asked for.
        """
        repeated = len(run.ids) - cut
        trials = [k for k in _TRIALS if k <= repeated] if run.cut is None else []
        for wanted in (*trials, repeated + n):
            answer = await self._ask(text, cut, wanted)
            said = [choice.id for choice in answer.choices]
            self._asked.add([*run.ids[:cut], *said])
            if said[:repeated] != run.ids[cut : cut + wanted]:
                return None
        if len(said) <= repeated:
            return None
        return Step(cut, answer.choices[repeated:], answer.reason == "eog", answer.cached)

    async def _nowhere(self, tokenizer: OwnTokenizer, run: Run, dropped: str) -> EngineError:
        """Why the run cannot begin."""
        if dropped:
            return EngineBroke(dropped)
        if await asyncio.to_thread(tokenizer.text, run.ids) is not None:
            return self._http.error(UnusableEngine, _CHANGES)
        return await asyncio.to_thread(self._inexact, tokenizer, run.ids)

    async def _ask(self, text: str, n_prompt: int, n: int) -> Answer:
        answer = await self._post({"prompt": text, "max_tokens": n, **_GREEDY, **self._wanted})
        if answer.n_prompt != n_prompt:
            raise self._http.error(
                UnusableEngine,
                f"it read {answer.n_prompt} tokens where {n_prompt} were meant: "
                "give the tokenizer of the model that it serves",
            )
        return answer

    @property
    def _wanted(self) -> dict[str, Any]:
        """The most candidates: the sampled id is told apart by being the best of them."""
        if self._older:
            return {"logprobs": TOP_LIMIT}
        return {"logprobs": True, "top_logprobs": TOP_LIMIT}

    async def _post(self, body: dict[str, Any]) -> Answer:
        try:
            data = await self._http.post("/v1/completions", body, patient=True)
            return read_answer(data)
        except EngineRefused as error:
            if "generation thread" in str(error):
                raise type(error)(f"{error}; restart it") from None
            raise
        except (UnusableEngine, EngineBroke) as error:
            named = str(error).startswith(self.url)
            raise error if named else self._http.error(type(error), str(error)) from None

    # ── helpers ──────────────────────────────────────────────────────────────────────────────

    def _known(self) -> OwnTokenizer:
        if self._tokenizer is None:
            raise self._http.error(EngineError, "not connected yet")
        return self._tokenizer

    def _inexact(self, tokenizer: OwnTokenizer, ids: list[int]) -> InexactPrefix:
        found = tokenizer.check(ids)
        at = found.at or 0
        piece = tokenizer.vocabulary.display(ids[at]).table if ids else ""
        if found.nearest is not None:
            else_ = f"the longest prefix that does not ends before t{found.nearest}"
        else:
            else_ = f"so does every prefix of this chunk, {_why_none(tokenizer, ids)}"
        words = (
            f"it takes text only, and the text of this prefix gives other tokens from t{at} "
            f"({piece}) on; {else_}; {_IN_PROCESS}"
        )
        return InexactPrefix(f"{self.url}: {words}", at, found.nearest)

    def _token(self, choice: Choice, top_n: int) -> Token:
        piece = self._known().vocabulary.piece(choice.id)
        return Token(choice.id, piece or b"", choice.logp, choice.top[:top_n])

    def _ends(self, id: int) -> bool:
        """As llama.cpp does, also at ends of generation that are not the model's usual one."""
        return id in self._known().vocabulary.eog_ids

    async def pieces(self, ids: Sequence[int]) -> dict[int, bytes]:
        """The exact bytes of tokens, from the tokenizer; ids without any are left out."""
        vocabulary = self._known().vocabulary
        return {id: piece for id in ids if (piece := vocabulary.piece(id))}


def _served(models: Any) -> str:
    """The model's name: of the one that is a path, else of the only one; else empty. It lists
    whatever the machine has downloaded, and nothing at all where that is nothing."""
    listed = models.get("data") if isinstance(models, dict) else None
    names = [str(each["id"]) for each in listed or () if isinstance(each, dict) and each.get("id")]
    paths = [name for name in names if Path(name).is_absolute()]
    return paths[-1] if paths else names[0] if len(names) == 1 else ""


def _why_none(tokenizer: OwnTokenizer, ids: list[int]) -> str:
    if tuple(ids[: len(tokenizer.before)]) != tokenizer.before:
        return "since its tokenizer puts other tokens before every text"
    first = ids[len(tokenizer.before) : len(tokenizer.before) + 1]
    try:
        b"".join(tokenizer.vocabulary.piece(id) or b"" for id in first).decode("utf-8")
    except UnicodeDecodeError:
        return "which begins in mid-character"
    return "as far as was looked"
