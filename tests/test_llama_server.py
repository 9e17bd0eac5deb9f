"""What a review relies on when it asks llama-server: exact ids, honest numbers, named faults."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kldtui.engines import Finish, Token, open_engine, wait_ready
from kldtui.engines.http import Address
from kldtui.engines.llama_server import LlamaServer
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    EngineUnreachable,
    UnusableEngine,
)
from tests.fake_server import BOS, EOG, VOCABULARY, FakeLlama

PREFIX = [72, 101, 108]
HELLO = list(b"Hello")


async def ask(
    engine: LlamaServer, n: int = 16, top_n: int = 3, prefix: list[int] | None = None
) -> tuple[list[Token], Finish | None, EngineError | None]:
    """Tokens, the Finish, and the error if there was one."""
    tokens: list[Token] = []
    finish: Finish | None = None
    try:
        async for item in engine.generate(prefix or PREFIX, n, top_n):
            if isinstance(item, Finish):
                finish = item
            else:
                tokens.append(item)
    except EngineError as error:
        return tokens, finish, error
    return tokens, finish, None


async def connected(fake: FakeLlama, **more: Any) -> LlamaServer:
    engine = LlamaServer(fake.url, **more)
    await engine.connect()
    return engine


# ── who is there ─────────────────────────────────────────────────────────────────────────────


async def test_says_who_answers_and_learns_the_bos_rule_by_tokenizing_nothing() -> None:
    async with FakeLlama(add_bos=True) as with_bos, FakeLlama() as without:
        info = await LlamaServer(with_bos.url).connect()
        plain = await LlamaServer(without.url).connect()
    assert (info.add_bos, info.bos_id) == (True, BOS)
    assert (plain.add_bos, plain.bos_id) == (False, BOS)
    assert (info.kind, info.model, info.build) == ("llama-server", "fake-q4.gguf", "b11549-abc")
    assert (info.n_vocab, info.n_ctx) == (306, 64)
    assert {"content": "", "add_special": True} in with_bos.bodies("/tokenize")


async def test_a_build_that_does_not_know_itself_takes_the_name_it_is_given() -> None:
    props = {"default_generation_settings": {"n_ctx": 64}, "build_info": "b0-unknown"}
    async with FakeLlama(replies={"/props": (200, props)}) as fake:
        assert (await LlamaServer(fake.url).connect()).build == "unknown"
        named = await LlamaServer(fake.url, build="xllamacpp 1.2").connect()
    assert named.build == "xllamacpp 1.2"


async def test_waits_while_the_model_loads_and_says_how_long() -> None:
    waited: list[float] = []
    async with FakeLlama(loading=3) as fake:
        with pytest.raises(EngineLoading, match="Loading model"):
            await LlamaServer(fake.url).connect()
        info = await wait_ready(LlamaServer(fake.url), waited.append, interval=0.01)
    assert info.model == "fake-q4.gguf"
    assert len(waited) == 2


async def test_gives_up_waiting() -> None:
    async with FakeLlama(loading=1000) as fake:
        with pytest.raises(EngineLoading):
            await wait_ready(LlamaServer(fake.url), timeout=0.05, interval=0.01)


async def test_nothing_at_the_url() -> None:
    async with FakeLlama() as fake:
        url = fake.url
    with pytest.raises(EngineUnreachable, match="nothing answers there"):
        await LlamaServer(url).connect()


@pytest.mark.parametrize(
    ("owner", "name"),
    [("library", "Ollama"), ("organization_owner", "LM Studio"), ("vllm", "vLLM")],
)
async def test_another_kind_of_server_is_refused_by_name(owner: str, name: str) -> None:
    models = {"data": [{"id": "m", "owned_by": owner}]}
    replies = {"/props": (404, {}), "/v1/models": (200, models)}
    async with FakeLlama(replies=replies) as fake:
        with pytest.raises(UnusableEngine, match=f"this is {name}.*llama-server"):
            await LlamaServer(fake.url).connect()


async def test_mlx_and_the_unknown_are_told_from_llama_server() -> None:
    models = {"data": [{"id": "m", "object": "model", "created": 1}]}
    replies: dict[str, tuple[int, Any]] = {"/props": (404, b"no"), "/v1/models": (200, models)}
    async with FakeLlama(replies=replies) as fake:
        with pytest.raises(UnusableEngine, match=r"mlx_lm\.server"):
            await LlamaServer(fake.url).connect()
    web = dict.fromkeys(("/health", "/v1/models", "/props"), (200, b"<html>"))
    async with FakeLlama(replies=web, headers={"Server": "nginx"}) as fake:
        with pytest.raises(UnusableEngine, match=r"no llama-server.*nginx"):
            await LlamaServer(fake.url).connect()


async def test_a_router_needs_to_know_which_model() -> None:
    props = {"role": "router", "default_generation_settings": {"n_ctx": 0}}
    models = {"data": [{"id": "small"}, {"id": "big"}]}
    replies = {"/props": (200, props), "/v1/models": (200, models)}
    async with FakeLlama(replies=replies, script=HELLO) as fake:
        with pytest.raises(UnusableEngine, match=r"\?model=NAME.*small, big"):
            await LlamaServer(fake.url).connect()
        engine = LlamaServer(fake.url + "/?model=big")
        await engine.connect()
        await ask(engine)
    assert all(body["model"] == "big" for body in fake.bodies())


async def test_what_greedy_requests_do_not_keep_out_is_warned_of() -> None:
    params = {"ignore_eos": True, "logit_bias": [[1, 2]], "speculative.types": "draft"}
    async with FakeLlama(params=params, total_slots=4) as fake:
        words = " ".join((await LlamaServer(fake.url).connect()).warnings)
    assert "-np 1" in words
    assert "--ignore-eos" in words
    assert "--logit-bias" in words
    assert "speculatively" in words


# ── secrets ──────────────────────────────────────────────────────────────────────────────────


async def test_a_key_is_sent_and_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLDTUI_REF_API_KEY", "sk-right")
    monkeypatch.setenv("KLDTUI_API_KEY", "sk-wrong")
    async with FakeLlama(api_key="sk-right", echoes_key=True) as fake:
        engine = open_engine(fake.url, "ref")
        info = await engine.connect()
        with pytest.raises(EngineUnauthorized) as caught:
            await open_engine(fake.url, "quant").connect()
    assert "KLDTUI_QUANT_API_KEY" in str(caught.value)
    assert "Invalid API Key" in str(caught.value)
    for text in (str(caught.value), repr(info), repr(engine.settings), engine.url):
        assert "sk-" not in text


async def test_user_and_password_in_a_url_are_used_and_never_shown() -> None:
    async with FakeLlama() as fake:
        url = fake.url.replace("://", "://me:se%20cret@")
        engine = LlamaServer(url)
        info = await engine.connect()
        sent = fake.requests[0][2]["authorization"]
    assert sent.startswith("Basic ")
    assert "se" not in engine.url.partition("//")[2]
    assert "cret" not in repr(info) + repr(engine.settings) + repr(Address.parse(url))
    with pytest.raises(EngineUnreachable) as caught:
        await LlamaServer(url).connect()
    assert "cret" not in str(caught.value)


async def test_user_and_password_in_a_url_go_before_a_key_for_all_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KLDTUI_API_KEY", "sk-for-all")
    async with FakeLlama() as fake:
        url = fake.url.replace("://", "://me:cret@")
        await open_engine(url, "ref").connect()
        assert all(sent["authorization"].startswith("Basic ") for *_, sent in fake.requests)
    async with FakeLlama(api_key="sk-for-all") as fake:
        url = fake.url.replace("://", "://me:cret@")
        with pytest.raises(EngineUnauthorized, match="user and password of its URL") as caught:
            await open_engine(url, "ref").connect()
    assert "cret" not in str(caught.value)
    assert "sk-for-all" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://me:pw@host", "http://", "http://me:pw@host:x1", "::::"])
def test_what_is_no_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(EngineError) as caught:
        LlamaServer(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://h:1/v1/", "http://h:1"),
        ("http://h:1/proxy/completion", "http://h:1/proxy"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_urls_as_people_write_them(given: str, meant: str) -> None:
    assert LlamaServer(given).url == meant


async def test_no_proxy_is_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with FakeLlama() as fake:
        assert (await LlamaServer(fake.url).connect()).model == "fake-q4.gguf"


async def test_a_redirect_is_not_followed() -> None:
    async with FakeLlama() as elsewhere:
        headers = {"Location": elsewhere.url.replace("://", "://u:pw@") + "/x?key=pw"}
        async with FakeLlama(replies={"/health": (302, {})}, headers=headers) as fake:
            with pytest.raises(EngineRefused, match="redirects to") as caught:
                await LlamaServer(fake.url).connect()
    assert elsewhere.requests == []
    assert "pw" not in str(caught.value)


# ── what is asked ────────────────────────────────────────────────────────────────────────────


async def test_a_judged_branch_is_asked_for_by_ids_greedily_and_without_cache() -> None:
    async with FakeLlama(script=HELLO) as fake:
        engine = await connected(fake)
        await ask(engine, 4, 3)
    (body,) = fake.bodies()
    assert body == {
        "prompt": PREFIX,
        "n_predict": 4,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k", "temperature"],
        "n_probs": 3,
        "return_tokens": True,
        "post_sampling_probs": False,
        "cache_prompt": False,
        "stream": True,
    }
    assert engine.settings == {
        name: body[name]
        for name in (
            "temperature",
            "top_k",
            "samplers",
            "return_tokens",
            "post_sampling_probs",
            "cache_prompt",
        )
    }


async def test_tokens_carry_bytes_probability_and_top_list() -> None:
    async with FakeLlama(script=[303, EOG]) as fake:
        engine = await connected(fake)
        tokens, finish, _ = await ask(engine)
    assert [token.data for token in tokens] == [" héllo".encode(), b"</s>"]
    assert tokens[0].logp == -0.1
    assert [len(token.top) for token in tokens] == [3, 3]
    assert tokens[0].top[0] == (303, -0.1)
    assert finish is not None
    assert (finish.reason, finish.n_prompt, finish.tokens_per_second) == ("eog", 3, 40.0)


async def test_one_answer_at_a_time() -> None:
    async with FakeLlama(script=HELLO, pause=0.002) as fake:
        engine = await connected(fake)
        both = await asyncio.gather(ask(engine), ask(engine))
    assert fake.most_running == 1
    assert [token.id for token in both[0][0]] == [token.id for token in both[1][0]]


async def test_closing_an_answer_ends_it_at_the_server_and_frees_the_engine() -> None:
    async with FakeLlama(script=[97] * 50, pause=0.01) as fake:
        engine = await connected(fake)
        async with contextlib.aclosing(engine.generate(PREFIX, 50, 1)) as items:
            async for _ in items:
                break
        tokens, _, _ = await ask(engine, 2)
        assert len(tokens) == 2
        assert fake.running == 0


# ── context ──────────────────────────────────────────────────────────────────────────────────


async def test_a_branch_that_fills_the_context_says_so() -> None:
    async with FakeLlama(script=[97] * 99, n_ctx=8) as fake:
        engine = await connected(fake)
        tokens, finish, _ = await ask(engine, 20)
    assert len(tokens) == 5
    assert fake.bodies()[0]["n_predict"] == 5
    assert finish is not None
    assert finish.reason == "context"


async def test_a_prefix_that_does_not_fit_is_refused_in_the_servers_words() -> None:
    async with FakeLlama(n_ctx=8) as fake:
        engine = await connected(fake)
        _, _, error = await ask(engine, prefix=[97] * 9)
    assert isinstance(error, ContextExceeded)
    assert "request (9 tokens) exceeds the available context size" in str(error)


async def test_a_server_that_reads_other_tokens_than_were_sent_is_unusable() -> None:
    async with FakeLlama(script=HELLO, evaluates=1) as fake:
        _, _, error = await ask(await connected(fake))
    assert isinstance(error, UnusableEngine)
    assert "read 4 tokens where 3 were sent" in str(error)


# ── faults in mid-answer ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"dies_after": 3}, "closed the connection"), ({"no_end": True}, "ended in mid-answer")],
)
async def test_what_arrived_before_a_server_broke_is_kept(
    fault: dict[str, Any], words: str
) -> None:
    async with FakeLlama(script=HELLO[:3] if "no_end" in fault else HELLO, **fault) as fake:
        tokens, finish, error = await ask(await connected(fake), 3 if "no_end" in fault else 9)
    assert [token.id for token in tokens] == HELLO[:3]
    assert finish is None
    assert isinstance(error, EngineBroke)
    assert words in str(error)
    assert fake.url in str(error)


async def test_an_error_event_is_said_in_the_servers_words() -> None:
    async with FakeLlama(script=HELLO, fails_after=2) as fake:
        tokens, _, error = await ask(await connected(fake))
    assert len(tokens) == 2
    assert isinstance(error, EngineRefused)
    assert "slot unavailable" in str(error)


async def test_a_silent_server_is_given_up() -> None:
    async with FakeLlama(script=HELLO, pause=5) as fake:
        engine = await connected(fake, answer_seconds=0.05)
        tokens, _, error = await ask(engine)
    assert len(tokens) == 1
    assert isinstance(error, EngineBroke)


# ── characters cut between tokens ────────────────────────────────────────────────────────────

CUT = [97, *"美".encode(), 303, 301, 0x8E, 302, 0x80, EOG]


async def test_ids_are_exact_though_the_stream_hides_those_that_end_in_mid_character() -> None:
    async with FakeLlama(script=CUT) as fake:
        tokens, finish, error = await ask(await connected(fake), 20)
    assert error is None
    assert [token.id for token in tokens] == CUT
    assert b"".join(token.data for token in tokens).decode() == "a美 héllo美😀</s>"
    assert [token.data for token in tokens[1:4]] == [bytes([b]) for b in "美".encode()]
    assert all(token.top[0] == (token.id, -0.1) and token.logp == -0.1 for token in tokens)
    assert finish is not None
    assert finish.reason == "eog"
    unstreamed = next(b for b in fake.bodies() if "stream" not in b and b["prompt"] == PREFIX)
    assert unstreamed["cache_prompt"] is False
    assert unstreamed["n_predict"] == 20


async def test_lists_that_the_stream_hid_are_asked_for_from_the_last_to_the_first() -> None:
    async with FakeLlama(script=CUT) as fake:
        await ask(await connected(fake), 20)
    asked = fake.bodies()
    answered = max(k for k, body in enumerate(asked) if body["n_predict"] == 20)
    lengths = [len(body["prompt"]) for body in asked[answered + 1 :]]
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 4
    assert all(body["cache_prompt"] for body in asked[answered + 1 :])


async def test_a_build_without_counts_is_caught_by_the_bytes() -> None:
    async with FakeLlama(script=CUT, predicted=False) as fake:
        tokens, _, _ = await ask(await connected(fake), 20)
    assert [token.id for token in tokens] == CUT


async def test_an_answer_that_ends_inside_a_character_has_all_its_ids() -> None:
    async with FakeLlama(script=[97, *"美".encode()]) as fake:
        tokens, finish, _ = await ask(await connected(fake), 3)
    assert [token.id for token in tokens] == [97, *"美".encode()[:2]]
    assert b"".join(token.data for token in tokens) == b"a" + "美".encode()[:2]
    assert finish is not None
    assert finish.reason == "limit"


async def test_text_is_there_to_show_before_its_ids_are_known() -> None:
    seen: list[bytes] = []
    async with FakeLlama(script=[*"美".encode(), *b"abcdef"], pause=0.005) as fake:
        engine = await connected(fake)

        async def watch() -> None:
            while True:
                seen.append(engine.arriving)
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        tokens, _, _ = await ask(engine, 9)
        watcher.cancel()
        assert engine.arriving == b""
    assert any(text.startswith("美ab".encode()) for text in seen)
    assert len(tokens) == 9


async def test_a_server_that_answers_differently_the_second_time_is_unusable() -> None:
    async with FakeLlama(script=CUT, script_again=[98, *CUT[1:]]) as fake:
        tokens, _, error = await ask(await connected(fake), 20)
    assert [token.id for token in tokens] == [97]
    assert isinstance(error, UnusableEngine)
    assert "-np 1" in str(error)


async def test_the_best_next_token_may_end_in_mid_character() -> None:
    async with FakeLlama(script=[301]) as fake:
        engine = await connected(fake)
        top = await engine.next_top(PREFIX, 2)
    assert top[0] == (301, -0.1)
    assert len(top) == 2


# ── bytes of tokens ──────────────────────────────────────────────────────────────────────────


async def test_pieces_are_byte_exact_special_and_cut_ones_included() -> None:
    async with FakeLlama() as fake:
        engine = await connected(fake)
        few = await engine.pieces([EOG, 303, 301, 97, 9999])
        everything = await (await connected(fake)).pieces(range(306))
    assert few == {EOG: b"</s>", 303: " héllo".encode(), 301: VOCABULARY[301], 97: b"a"}
    named = {BOS: b"<s>", EOG: b"</s>", 0: b"<unk>"}
    assert everything == {**VOCABULARY, **named}


# ── shapes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", ["new", "old", "post"])
async def test_every_shape_of_answer_is_read(shape: str) -> None:
    async with FakeLlama(script=[*b"hi", EOG], shape=shape) as fake:
        tokens, finish, error = await ask(await connected(fake))
    assert error is None
    assert [token.id for token in tokens] == [*b"hi", EOG]
    assert finish is not None
    for token in tokens[:2]:
        assert token.logp == pytest.approx(-0.1)
        assert token.top[0][0] == token.id
        assert token.top[0][1] == pytest.approx(-0.1)


async def test_a_build_too_old_for_ids_is_refused() -> None:
    def without(event: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in event.items() if name != "tokens"}

    async with FakeLlama(script=HELLO, shape="old", rewrite=without) as fake:
        _, _, error = await ask(await connected(fake))
    assert isinstance(error, UnusableEngine)
    assert "too old" in str(error)
