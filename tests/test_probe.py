"""A URL is enough: what answers there is found out by itself, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kldtui.engines import open_engine, wait_ready
from kldtui.engines.llama_server import LlamaServer
from kldtui.engines.probe import MAKERS, Access, Probed
from kldtui.engines.sglang import SglangServer
from kldtui.engines.vllm import VllmServer
from kldtui.engines.who import INSTEAD, NAMES, recognise
from kldtui.errors import (
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    EngineUnreachable,
    UnusableEngine,
)
from tests import tiny_model as model
from tests.asking import ask
from tests.builders_vocab import BYTE_LEVEL, write_tokenizer_json
from tests.fake_http import SILENCE, Events, FakeHttp, Reply, Request
from tests.fake_server import FakeLlama
from tests.fake_sglang import FakeSglang
from tests.fake_vllm import FakeVllm
from tests.mlx_fake import FakeMlx

PREFIX = [model.BOS, *model.encode("Hello")]


class Pages(FakeHttp):
    """A server that answers these paths, and `otherwise` to any other."""

    def __init__(
        self, pages: dict[str, Any], otherwise: Reply | None = None, server: str = "uvicorn"
    ) -> None:
        super().__init__()
        self.pages = pages
        self.otherwise = otherwise or Reply(404, {"detail": "Not Found"})
        self.headers = {"Server": server} if server else {}

    async def answer(self, request: Request) -> Reply | Events:
        page = self.pages.get(request.path, self.otherwise)
        if page is SILENCE:
            return self._silence()
        return page if isinstance(page, Reply) else Reply(200, page)

    async def _silence(self) -> Events:
        yield SILENCE


def models(**card: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, **card}]}


# ── found ────────────────────────────────────────────────────────────────────────────────────


async def test_opening_is_at_once_and_contacts_nobody() -> None:
    async with FakeVllm() as fake:
        engine = open_engine(fake.url, "ref")
        assert (engine.url, engine.info, engine.capabilities) == (fake.url, None, None)
        assert fake.requests == []
        said = await ask(engine, PREFIX)
        assert isinstance(said.error, EngineError)
        assert "not connected yet" in str(said.error)
        assert fake.requests == []


@pytest.mark.parametrize(("fake", "engine"), [(FakeVllm, VllmServer), (FakeSglang, SglangServer)])
async def test_vllm_and_sglang_are_found_and_continue_by_ids(
    fake: type[FakeVllm | FakeSglang], engine: type[VllmServer | SglangServer]
) -> None:
    script = [*model.encode("Hi"), model.EOS]
    async with fake(script) as server:
        found = open_engine(server.url, "quant")
        assert isinstance(found, Probed)
        info = await wait_ready(found)
        assert isinstance(found.engine, engine)
        assert (info.kind, info) == (engine.kind, found.info)
        said = await ask(found, PREFIX)
        assert said.ids == script
        assert found.capabilities is not None
        assert found.capabilities.takes_ids
        assert found.settings == found.engine.settings
        assert len(await found.next_top(PREFIX, 2)) == 2
        assert await found.pieces([4]) == {4: model.PIECES[4]}
        await found.close()


@pytest.mark.parametrize("headers", [{"Server": "llama.cpp"}, {"Server": "nginx"}, {}])
async def test_llama_server_is_found_also_behind_another_front(headers: dict[str, str]) -> None:
    async with FakeLlama(script=[72, 105], headers=headers) as fake:
        engine = open_engine(fake.url, "ref", build="xllamacpp 1")
        info = await engine.connect()
        assert isinstance(engine, Probed)
        assert isinstance(engine.engine, LlamaServer)
        assert info.kind == "llama-server"
        assert (await ask(engine, [72], n=2)).ids == [72, 105]
        assert engine.arriving == b""


async def test_an_old_llama_server_without_owner_is_found_by_its_settings() -> None:
    replies = {"/v1/models": (200, {"data": [{"id": "m", "owned_by": "someone"}]})}
    async with FakeLlama(replies=dict(replies)) as fake:
        assert (await open_engine(fake.url, "ref").connect()).kind == "llama-server"


@pytest.mark.parametrize("headers", [{"Server": "llama.cpp"}, {}])
async def test_a_llama_server_that_loads_its_model_is_waited_for(headers: dict[str, str]) -> None:
    async with FakeLlama(loading=6, headers=headers) as fake:
        engine = open_engine(fake.url, "ref")
        with pytest.raises(EngineLoading):
            await engine.connect()
        waited: list[float] = []
        info = await wait_ready(engine, waited.append, interval=0.01)
    assert info.kind == "llama-server"
    assert waited


async def test_sglang_is_found_before_it_is_ready_and_waited_for() -> None:
    async with FakeSglang(starting=4) as fake:
        info = await wait_ready(open_engine(fake.url, "ref"), interval=0.01)
    assert info.kind == "sglang"


async def test_a_router_names_its_models_and_takes_the_one_chosen() -> None:
    props = {"role": "router", "default_generation_settings": {"n_ctx": 0}}
    replies = {"/props": (200, props), "/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})}
    async with FakeLlama(replies=dict(replies), script=[72]) as fake:
        with pytest.raises(UnusableEngine, match=r"\?model=NAME.*a, b"):
            await open_engine(fake.url, "ref").connect()
        engine = open_engine(fake.url + "?model=b", "ref")
        await engine.connect()
        await ask(engine, [72], n=1)
        assert fake.bodies()[-1]["model"] == "b"


async def test_a_router_is_waited_for_while_it_loads_the_model_chosen() -> None:
    cards: list[dict[str, Any]] = [{"id": "a"}, {"id": "b", "status": {"value": "loading"}}]
    replies: dict[str, tuple[int, Any]] = {"/v1/models": (200, {"data": cards})}
    async with FakeLlama(replies=replies) as fake:
        engine = open_engine(fake.url + "?model=b", "ref")
        with pytest.raises(EngineLoading, match="it loads b; wait"):
            await engine.connect()
        cards[1]["status"] = {"value": "loaded"}
        info = await engine.connect()
    assert info.kind == "llama-server"


async def test_a_name_that_a_router_does_not_have_is_refused_with_those_it_has() -> None:
    missing = (404, {"error": {"message": "model not found", "code": 404}})
    replies: dict[str, tuple[int, Any]] = {
        "/v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]}),
        "/props": missing,
    }
    async with FakeLlama(replies=replies, headers={"Server": "llama.cpp"}) as fake:
        with pytest.raises(UnusableEngine, match=r"no model 'c' \(it has: a, b\)"):
            await open_engine(fake.url + "?model=c", "ref").connect()


async def test_a_key_opens_what_says_nothing_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeVllm(api_key="sk-secret") as fake:
        engine = open_engine(fake.url, "ref")
        with pytest.raises(EngineUnauthorized, match="KLDTUI_REF_API_KEY"):
            await engine.connect()
        monkeypatch.setenv("KLDTUI_REF_API_KEY", "sk-secret")
        again = open_engine(fake.url, "ref")
        assert (await again.connect()).kind == "vllm"
    assert "sk-secret" not in repr(vars(again)["_access"])


async def test_another_server_at_the_same_url_is_found_at_the_next_connect() -> None:
    class Changing(FakeHttp):
        now: FakeHttp = FakeVllm()

        async def answer(self, request: Request) -> Reply | Events:
            return await self.now.answer(request)

    async with Changing() as fake:
        engine = Probed(Access(fake.url))
        assert (await engine.connect()).kind == "vllm"
        kept = engine.engine
        assert (await engine.connect()).kind == "vllm"
        assert engine.engine is kept
        fake.now = FakeSglang()
        assert (await engine.connect()).kind == "sglang"


async def test_mlx_lm_server_is_found_and_given_the_tokenizer(tmp_path: Path) -> None:
    file = write_tokenizer_json(tmp_path / "tokenizer.json", {"a": 0}, decoder=BYTE_LEVEL)
    async with FakeMlx() as fake:
        alone = open_engine(fake.url, "ref")
        with pytest.raises(UnusableEngine, match="--tokenizer"):
            await alone.connect()
        assert alone.capabilities is not None
        assert not alone.capabilities.takes_ids
        wrong = open_engine(fake.url, "ref", tokenizer=file)
        with pytest.raises(UnusableEngine, match="tokenizer"):
            await wrong.connect()
        gguf = tmp_path / "model.gguf"
        gguf.write_bytes(b"GGUF")
        spells_only = open_engine(fake.url, "ref", tokenizer=gguf)
        with pytest.raises(UnusableEngine, match="--tokenizer"):
            await spells_only.connect()


async def test_an_mlx_lm_server_whose_thread_has_died_says_so() -> None:
    async with FakeMlx(thread_died=True) as fake:
        with pytest.raises(EngineRefused, match="thread has died"):
            await open_engine(fake.url, "ref").connect()


async def test_mlx_lm_server_is_told_also_when_it_lists_no_models() -> None:
    empty = {"/health": {"status": "ok"}, "/v1/models": Reply(200, b"")}
    async with Pages(empty, Reply(404, b"Not Found"), "BaseHTTP/0.6 Python/3.12.3") as fake:
        seen = await recognise(Probed(Access(fake.url))._http)
        assert (seen.kind, seen.name) == ("mlx_lm.server", "mlx_lm.server")
    behind = {"/health": {"status": "ok"}, "/v1/models": models()}
    async with Pages(behind, server="nginx") as fake:
        seen = await recognise(Probed(Access(fake.url))._http)
        assert seen.kind == "mlx_lm.server"


async def test_a_kind_without_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MAKERS, "sglang")
    async with FakeSglang() as fake:
        with pytest.raises(UnusableEngine, match="this is SGLang, from which"):
            await open_engine(fake.url, "ref").connect()


# ── refused by name ──────────────────────────────────────────────────────────────────────────

STUDIO = Reply(200, {"error": "Unexpected endpoint or method. (GET /x)"})
REFUSED: dict[str, tuple[FakeHttp, str, str]] = {
    "ollama": (
        Pages({"/v1/models": models(owned_by="library"), "/api/version": {"version": "0.12.3"}}),
        "Ollama",
        "ollama show --modelfile",
    ),
    "ollama without models": (
        Pages({"/v1/models": {"object": "list", "data": None}, "/api/version": {"version": "1"}}),
        "Ollama",
        "llama-server",
    ),
    "lm studio": (
        Pages({"/v1/models": models(owned_by="organization_owner")}, STUDIO),
        "LM Studio",
        "llama-server",
    ),
    "lm studio by its greeting": (
        Pages({"/v1/models": models(owned_by="x"), "/lmstudio-greeting": {"lmstudio": True}}),
        "LM Studio",
        "mlx_lm.server",
    ),
    "old lm studio": (
        Pages({"/v1/models": {"data": []}, "/api/v0/models": {"data": []}}, STUDIO),
        "LM Studio",
        "llama-server",
    ),
    "llama-cpp-python": (
        Pages({"/v1/models": models(owned_by="me", permissions=[])}),
        "llama-cpp-python's server",
        "llama-server",
    ),
    "llama-cpp-python with a key": (
        Pages(
            {
                "/v1/models": Reply(401, {"detail": "Invalid API key"}),
                "/openapi.json": {"info": {"title": "🦙 llama.cpp Python API"}},
            }
        ),
        "llama-cpp-python's server",
        "llama-server",
    ),
    "tabbyapi": (
        Pages(
            {
                "/health": {"status": "healthy", "issues": []},
                "/v1/models": Reply(401, {"detail": "Please provide an API key"}),
            }
        ),
        "TabbyAPI",
        "vLLM or SGLang",
    ),
    "old tabbyapi": (
        Pages({"/v1/models": {"data": []}, "/v1/model": {"id": "m", "owned_by": "tabbyAPI"}}),
        "TabbyAPI",
        "llama-server",
    ),
    "koboldcpp, which also answers for Ollama": (
        Pages(
            {
                "/api/extra/version": {"result": "KoboldCpp", "version": "1.9"},
                "/api/version": {"version": "0.7.0"},
            }
        ),
        "KoboldCpp",
        "llama-server",
    ),
    "text-generation-webui": (
        Pages({"/v1/internal/model/info": {"model_name": "m", "lora_names": []}}),
        "text-generation-webui",
        "llama-server",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_server_that_takes_no_ids_is_refused_by_name_with_what_to_run(case: str) -> None:
    fake, name, instead = REFUSED[case]
    async with fake:
        with pytest.raises(UnusableEngine) as told:
            await open_engine(fake.url, "ref").connect()
    assert str(told.value).startswith(f"{fake.url}: this is {name}, which takes no token ids; ")
    assert instead in str(told.value)
    assert not str(told.value).endswith("…"), "cut"
    assert {request.method for request in fake.requests} == {"GET"}


async def test_sglang_is_not_taken_for_ollama_whose_paths_it_has() -> None:
    ollama = {"/api/version": Reply(200, {"version": "0.5.5"}), "/api/tags": Reply(200, {})}
    async with FakeSglang(replies=ollama) as fake:
        assert (await open_engine(fake.url, "ref").connect()).kind == "sglang"


async def test_an_unknown_server_is_called_unknown_with_what_can_be_asked() -> None:
    async with Pages({"/health": Reply(200, b"<html>")}, server="Caddy") as fake:
        with pytest.raises(UnusableEngine) as told:
            await open_engine(fake.url, "ref").connect()
    words = str(told.value)
    assert "no server that kldtui knows (it calls itself 'Caddy')" in words
    assert "llama-server, vLLM, SGLang, mlx_lm.server" in words


async def test_a_front_whose_server_is_gone_is_no_unknown_server() -> None:
    async with Pages({}, Reply(502, b"<html>Bad Gateway"), "nginx") as fake:
        with pytest.raises(EngineBroke, match=r"HTTP 502\), to everything"):
            await open_engine(fake.url, "ref").connect()


async def test_a_server_that_wants_a_key_for_everything_says_so_at_once() -> None:
    async with Pages({}, Reply(401, {"error": "Unauthorized"})) as fake:
        with pytest.raises(EngineUnauthorized, match="KLDTUI_REF_API_KEY"):
            await open_engine(fake.url, "ref").connect()
        assert len(fake.requests) == 1


async def test_a_server_that_wants_a_key_and_is_of_no_known_kind() -> None:
    closed = Reply(403, {"error": "Forbidden"})
    async with Pages({"/health": {"status": "fine"}}, closed) as fake:
        with pytest.raises(EngineUnauthorized, match="Forbidden"):
            await open_engine(fake.url, "ref").connect()


# ── only there ───────────────────────────────────────────────────────────────────────────────


async def test_nothing_answers() -> None:
    async with FakeVllm() as fake:
        url = fake.url
    with pytest.raises(EngineUnreachable, match="nothing answers there"):
        await open_engine(url, "ref").connect()


async def test_a_server_that_accepts_and_never_answers_is_given_up() -> None:
    async with Pages({"/health": SILENCE}) as fake:
        engine = Probed(Access(fake.url, probe_seconds=0.1))
        with pytest.raises(EngineUnreachable, match="stopped answering"):
            await engine.connect()


async def test_a_redirect_is_refused_and_the_other_host_is_not_contacted() -> None:
    async with FakeVllm() as elsewhere:
        away = Reply(307, b"", {"Location": elsewhere.url + "/health"})
        async with Pages({}, away) as fake:
            with pytest.raises(EngineRefused, match=f"redirects to {elsewhere.url}"):
                await open_engine(fake.url, "ref").connect()
    assert elsewhere.requests == []


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeVllm() as proxy, FakeVllm() as fake:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        await open_engine(fake.url, "ref").connect()
    assert proxy.requests == []


async def test_everything_is_asked_under_the_path_that_was_given() -> None:
    async with Pages({}) as fake:
        with pytest.raises(UnusableEngine):
            await open_engine(f"{fake.url}/models/one/v1", "ref").connect()
    assert fake.requests
    assert all(path.startswith("/models/one/") for path in fake.paths())


def test_what_is_no_url_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(EngineError, match="no HTTP URL"):
        open_engine("ftp://host", "ref")


# ── the documentation ────────────────────────────────────────────────────────────────────────


def test_the_table_of_the_documentation_is_what_the_engines_say() -> None:
    text = (Path(__file__).parent.parent / "docs/engines.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    header = rows[0]
    said = {row[0]: dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)}
    for kind, make in MAKERS.items():
        name, can = NAMES[kind], make(Access("http://127.0.0.1:1")).capabilities
        assert can is not None
        flags = {
            "takes ids": can.takes_ids,
            "returns ids": can.returns_ids,
            "probabilities as it streams": can.streams_probabilities,
            "a request can avoid its cache": can.cache_switch,
        }
        for row, able in flags.items():
            assert said[row][name].startswith("yes" if able else "no"), (row, name)
        limit = "any number" if can.top_n_limit is None else str(can.top_n_limit)
        assert said["candidates a position"][name].startswith(limit)
    for refused in INSTEAD:
        assert f"\n| {refused} |" in text
