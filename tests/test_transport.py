"""Every way a server can fail at HTTP, whatever it is: named, bounded, and without secrets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kldtui.engines import events
from kldtui.engines.http import Address, Http
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    EngineUnreachable,
)
from tests.fake_http import SILENCE, Died, Events, FakeHttp, Reply, Request, event_bytes


class Scripted(FakeHttp):
    """Answers every request with the same."""

    def __init__(self, reply: Reply | list[Any], *, pieces_cut: int | None = 7) -> None:
        super().__init__(pieces_cut=pieces_cut)
        self.reply = reply

    async def answer(self, request: Request) -> Reply | Events:
        return self.reply if isinstance(self.reply, Reply) else self._events(self.reply)

    async def _events(self, script: list[Any]) -> Events:
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item


def client(fake: FakeHttp, **more: Any) -> Http:
    return Http(Address.parse(fake.url), **more)


async def stream(http: Http) -> tuple[list[dict[str, Any]], EngineError | None]:
    """The events, and the error after them."""
    got: list[dict[str, Any]] = []
    try:
        async for event in http.stream("/x", {"a": 1}):
            got.append(event)
    except EngineError as error:
        return got, error
    return got, None


# ── silence ──────────────────────────────────────────────────────────────────────────────────


async def test_a_host_that_does_not_answer_at_all_is_given_up_soon() -> None:
    def nowhere(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("")

    http = Http(Address.parse("http://10.0.0.1:9"), transport=httpx.MockTransport(nowhere))
    with pytest.raises(EngineUnreachable, match=r"10\.0\.0\.1:9: no answer in 5 s"):
        await http.get("/health")


@pytest.mark.parametrize("how", ["get", "peek", "post", "patient"])
async def test_a_server_that_accepts_and_never_answers_is_given_up(how: str) -> None:
    ways: dict[str, Callable[[Http], Awaitable[Any]]] = {
        "get": lambda http: http.get("/x"),
        "peek": lambda http: http.peek("/x"),
        "post": lambda http: http.post("/x", {}),
        "patient": lambda http: http.post("/x", {}, patient=True),
    }
    async with Scripted([SILENCE]) as fake:
        http = client(fake, answer_seconds=0.1, probe_seconds=0.1)
        with pytest.raises(EngineUnreachable, match="stopped answering"):
            await ways[how](http)


async def test_a_stream_that_falls_silent_keeps_what_came_before() -> None:
    async with Scripted([{"k": 1}, {"k": 2}, SILENCE]) as fake:
        got, error = await stream(client(fake, answer_seconds=0.2))
    assert got == [{"k": 1}, {"k": 2}]
    assert isinstance(error, EngineBroke)
    assert "stopped answering" in str(error)


async def test_an_answer_that_trickles_in_for_ever_is_bounded_as_a_whole() -> None:
    trickle = [item for _ in range(1000) for item in (b"x", 0.01)]
    async with Scripted(trickle) as fake:
        with pytest.raises(EngineUnreachable, match="stopped answering"):
            await client(fake, probe_seconds=0.2).get("/health")


async def test_one_token_now_and_then_is_no_fault_however_long_the_whole_takes() -> None:
    slow = [item for k in range(4) for item in (0.2, {"k": k})]
    async with Scripted(slow) as fake:
        got, error = await stream(client(fake, answer_seconds=0.5, probe_seconds=0.1))
    assert [event["k"] for event in got] == [0, 1, 2, 3]
    assert error is None


async def test_everything_else_goes_on_while_ten_thousand_tokens_arrive() -> None:
    flood = b"".join(event_bytes({"k": k, "pad": "x" * 300}) for k in range(10_000))
    turns = 0

    async def something_else() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with Scripted([flood], pieces_cut=None) as fake:
        other = asyncio.create_task(something_else())
        got, error = await stream(client(fake))
        other.cancel()
    assert len(got) == 10_000
    assert error is None
    assert turns > 20, "the screen would have stood still"


async def test_cancelling_ends_a_silent_answer_at_once_and_a_second_one_succeeds() -> None:
    async with Scripted([{"k": 1}, SILENCE]) as fake:
        http = client(fake)
        task = asyncio.create_task(stream(http))
        await fake.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake.reply = [{"k": 2}]
        assert await stream(http) == ([{"k": 2}], None)


# ── broken answers ───────────────────────────────────────────────────────────────────────────

FAULTS: dict[str, tuple[list[Any], str]] = {
    "dies": ([Died()], "closed the connection in mid-answer"),
    "no JSON": ([b"data: {nonsense\n\n"], "no JSON"),
    "no object": ([b"data: [1, 2]\n\n"], "no event"),
    "error event": ([{"error": {"message": "CUDA out of memory"}}], "CUDA out of memory"),
    "old vLLM": ([{"object": "error", "message": "engine dead", "code": 500}], "engine dead"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_arrived_before_a_fault_is_kept_and_the_next_answer_is_whole(
    fault: str,
) -> None:
    script, words = FAULTS[fault]
    async with Scripted([{"k": 1}, *script]) as fake:
        http = client(fake)
        got, error = await stream(http)
        assert got == [{"k": 1}]
        assert error is not None
        assert words in str(error)
        assert str(error).startswith(fake.url)
        fake.reply = [{"k": 2}]
        assert await stream(http) == ([{"k": 2}], None)


async def test_half_a_character_harms_nothing_after_it() -> None:
    half = b'data: {"text": "' + "美".encode()[:2] + b'"}\n\n'
    async with Scripted([half, {"text": "美"}], pieces_cut=1) as fake:
        got, error = await stream(client(fake))
    assert [event["text"] for event in got] == ["�", "美"]
    assert error is None


async def test_an_event_without_end_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "LONGEST", 1000)
    async with Scripted([{"k": 1}, b"data: " + b"x" * 5000, SILENCE], pieces_cut=100) as fake:
        got, error = await stream(client(fake))
    assert got == [{"k": 1}]
    assert "without end" in str(error)


async def test_an_answer_that_is_no_json_breaks_by_name() -> None:
    async with Scripted(Reply(200, b"<html>")) as fake:
        with pytest.raises(EngineBroke, match="no JSON"):
            await client(fake).post("/x", {})


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (503, {"error": {"message": "Loading model", "code": 503}}, EngineLoading, "Loading"),
        (401, {"error": "Unauthorized"}, EngineUnauthorized, "set KLDTUI_REF_API_KEY"),
        (400, {"error": {"message": "bad seed", "code": 400}}, EngineRefused, "'bad seed'"),
        (400, {"object": "error", "message": "no such model"}, EngineRefused, "no such model"),
        (404, {"detail": "Not Found"}, EngineRefused, "'Not Found'"),
        (
            422,
            {"detail": [{"loc": ["body", "n"], "msg": "not a number"}]},
            EngineRefused,
            r"body\.n: not a number",
        ),
        (500, b"", EngineRefused, "HTTP 500 without words"),
        (
            400,
            {"error": {"message": "This model's maximum context length is 64 tokens."}},
            ContextExceeded,
            "larger context .--max-model-len.",
        ),
    ],
)
async def test_a_refusal_is_told_in_the_servers_words(
    status: int, body: Any, kind: type[EngineError], words: str
) -> None:
    async with Scripted(Reply(status, body)) as fake:
        http = client(
            fake, api_key="sk-1", key_hint="KLDTUI_REF_API_KEY", context_option="--max-model-len"
        )
        with pytest.raises(kind, match=words):
            await http.post("/x", {})
        _, error = await stream(http)
        assert type(error) is kind


async def test_a_redirect_is_named_and_nothing_follows_it() -> None:
    async with Scripted([{"k": 1}]) as elsewhere:
        there = Reply(302, b"", {"Location": f"{elsewhere.url}/y?key=secret"})
        async with Scripted(there) as fake:
            http = client(fake, api_key="sk-1")
            for ask in (http.get, http.peek, lambda path: http.post(path, {})):
                with pytest.raises(EngineRefused, match=f"redirects to {elsewhere.url}/y;") as told:
                    await ask("/x")
                assert "secret" not in str(told.value)
            _, error = await stream(http)
            assert "redirects" in str(error)
    assert elsewhere.requests == []


async def test_a_key_that_a_server_says_back_is_not_repeated() -> None:
    words = {"error": {"message": "no such key: Bearer sk-secret", "code": 401}}
    async with Scripted(Reply(401, words)) as fake:
        with pytest.raises(EngineUnauthorized) as told:
            await client(fake, api_key="sk-secret").post("/x", {})
        with contextlib.suppress(EngineError):
            await client(fake, api_key="sk-secret").stream("/x", {}).__anext__()
    assert "sk-secret" not in str(told.value)
    assert all(r.headers["authorization"] == "Bearer sk-secret" for r in fake.requests)


async def test_a_password_that_a_server_says_back_is_not_repeated_in_any_spelling() -> None:
    sent = base64.b64encode(b"bob:hush-hush").decode()
    words = {"error": {"message": f"bad key Basic {sent} of bob, hush-hush", "code": 401}}
    async with Scripted(Reply(401, words)) as fake:
        address = Address.parse(fake.url.replace("//", "//bob:hush-hush@"))
        with pytest.raises(EngineUnauthorized) as told:
            await Http(address).post("/x", {})
    assert fake.requests[0].headers["authorization"] == f"Basic {sent}"
    assert sent not in str(told.value)
    assert "hush-hush" not in str(told.value)
