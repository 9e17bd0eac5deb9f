"""HTTP with one server: whom to ask, and every way it can fail, by name and without secrets.

Knows: URLs, API keys, httpx, the objects in which servers say what is wrong, server-sent events.
Must not know: what is asked, tokens, models.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import httpx

from kldtui.engines.events import EventReader
from kldtui.errors import (
    ContextExceeded,
    EngineBroke,
    EngineError,
    EngineLoading,
    EngineRefused,
    EngineUnauthorized,
    EngineUnreachable,
)

CONNECT_SECONDS = 5.0
PROBE_SECONDS = 15.0
"""For the whole of a short answer, however slowly it trickles in."""
ANSWER_SECONDS = 600.0
"""A long prefix on a slow machine is silent for minutes before its first token."""
TOTAL_FACTOR = 6
"""A whole unstreamed answer may take this many times `ANSWER_SECONDS`; a stream may go on."""

_WORDS_KEPT = 300
_NO_ROOM = re.compile(
    r"maximum context length|model's context length|maximum model length|max_model_len"
    r"|exceeds? the (available )?context|too long to fit",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL taken apart, so that only `public` is ever shown, logged or stored.

    query: of the URL, such as `model` for a llama-server that holds several.
    """

    public: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    query: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `http[s]://[user:password@]host[:port][/path][?model=NAME]`, `http://` assumed.

        A path that ends in `/v1` or in an endpoint is cut there. Raises EngineError.
        """
        text = url.strip()
        if "://" not in text:
            text = "http://" + text
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise EngineError(f"{_shown(text)} is no URL; write http://127.0.0.1:8080") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"{_shown(text)} is no HTTP URL; write http://127.0.0.1:8080")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = host if port is None else f"{host}:{port}"
        path = parts.path.rstrip("/")
        for end in ("/completion", "/completions", "/generate", "/v1"):
            path = path.removesuffix(end)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return cls(
            urlunsplit((parts.scheme, netloc, path.rstrip("/"), "", "")),
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            query,
        )


def _shown(url: str) -> str:
    """Text that should have been a URL, without what may be a password or a key."""
    return repr(url.split("?")[0].rpartition("@")[2])


class Http:
    """Requests to one address. A new connection each: llama-server drops idle ones unannounced."""

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None = None,
        key_hint: str = "KLDTUI_API_KEY",
        transport: httpx.AsyncBaseTransport | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        probe_seconds: float = PROBE_SECONDS,
        context_option: str = "-c",
    ) -> None:
        """answer_seconds: the longest silence in an answer; a whole unstreamed one may take six
        times as long. probe_seconds: the longest that anything short may take. context_option:
        what this kind of server is started with for more context."""
        self.address = address
        sent = base64.b64encode(f"{address.user}:{address.password}".encode()).decode()
        secrets = (api_key, address.password, sent if address.password else "")
        self._secrets = [secret for secret in secrets if secret]
        self._key_hint = key_hint
        self._context_option = context_option
        self._answer = httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS)
        self._answer_total = answer_seconds * TOTAL_FACTOR
        self._probe_total = probe_seconds
        auth = None
        headers = {}
        if address.user:
            # One header holds either; a URL means this server, a variable perhaps several.
            auth = httpx.BasicAuth(address.user, address.password)
        elif api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            auth=auth,
            timeout=httpx.Timeout(probe_seconds, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,
            transport=transport,
        )

    async def close(self) -> None:
        await self._client.aclose()

    def url(self, path: str) -> str:
        return self.address.public + path

    def error(self, kind: type[EngineError], words: str) -> EngineError:
        """An error whose text names the server and holds no secret."""
        return kind(f"{self.address.public}: {self.clean(words)}")

    def clean(self, words: str) -> str:
        """Foreign words in one line, secrets taken out."""
        for secret in self._secrets:
            words = words.replace(secret, "•••")
        words = " ".join("".join(c if c.isprintable() else " " for c in words).split())
        return words if len(words) <= _WORDS_KEPT else words[:_WORDS_KEPT] + "…"

    async def get(self, path: str) -> tuple[int, Any, httpx.Headers]:
        """Status, decoded JSON (None if it is none) and headers.

        Raises EngineUnreachable, and what a redirect, 401, 403 or 503 means.
        """
        answer = await self._get(path)
        if answer.status_code in (401, 403, 503):
            self.refuse(answer.status_code, answer.content, answer.headers)
        return answer.status_code, _json(answer.content), answer.headers

    async def peek(self, path: str) -> httpx.Response:
        """The answer to a GET, whatever its status: for who does not know yet whom it asks.

        Raises EngineUnreachable, and EngineRefused for a redirect, which is not followed.
        """
        return await self._get(path)

    async def _get(self, path: str) -> httpx.Response:
        with self._faults():
            async with asyncio.timeout(self._probe_total):
                answer = await self._client.get(self.url(path), params=self.address.query)
        if 300 <= answer.status_code < 400:
            self.refuse(answer.status_code, answer.content, answer.headers)
        return answer

    async def post(self, path: str, body: dict[str, Any], *, patient: bool = False) -> Any:
        """The decoded answer to `body`. Raises an EngineError for anything but success."""
        timeout = self._answer if patient else httpx.USE_CLIENT_DEFAULT
        with self._faults():
            async with asyncio.timeout(self._answer_total if patient else self._probe_total):
                answer = await self._client.post(
                    self.url(path), json=self._addressed(body), timeout=timeout
                )
        if answer.status_code != 200:
            self.refuse(answer.status_code, answer.content, answer.headers)
        data = _json(answer.content)
        if data is None:
            raise self.error(EngineBroke, f"{path}: it sent what is no JSON")
        if _is_fault(data):
            self.refuse(200, answer.content, answer.headers)
        return data

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer; `{"error": …}` ones raise EngineRefused or a subclass.

        Raises EngineBroke if the connection ends in the middle of an event or of the answer.
        """
        reader = EventReader()
        with self._faults(started=True):
            async with self._client.stream(
                "POST", self.url(path), json=self._addressed(body), timeout=self._answer
            ) as answer:
                if answer.status_code != 200:
                    content = await answer.aread()
                    self.refuse(answer.status_code, content, answer.headers)
                async for chunk in answer.aiter_bytes():
                    for event in reader.feed(chunk):
                        yield self._checked(event, answer)
                for event in reader.close():
                    yield self._checked(event, answer)

    def _checked(self, event: dict[str, Any], answer: httpx.Response) -> dict[str, Any]:
        if _is_fault(event):
            self.refuse(200, json.dumps(event).encode(), answer.headers)
        return event

    def _addressed(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self.address.query.get("model")
        return body if model is None else {"model": model, **body}

    def refuse(self, status: int, content: bytes, headers: httpx.Headers) -> NoReturn:
        """Raise what an answer that is no success means, in the server's words."""
        if 300 <= status < 400:
            where = headers.get("location", "")
            target = Address.parse(where).public if "://" in where else where.split("?")[0]
            raise self.error(
                EngineRefused, f"it redirects to {target or 'nowhere'}; give the URL itself"
            )
        words, kind, code = _fault(content, status)
        said = f"it says {words!r}" if words else f"it answers HTTP {code} without words"
        if kind == "exceed_context_size_error" or _NO_ROOM.search(words):
            raise self.error(
                ContextExceeded,
                f"{said}; start it with a larger context ({self._context_option}), "
                "or branch earlier in the chunk",
            )
        if code in (401, 403):
            hint = f"{said}; set {self._key_hint} to its API key"
            if self.address.user:
                hint = f"{said}; it was sent the user and password of its URL, and so no API key"
            raise self.error(EngineUnauthorized, hint)
        if code == 503 and "oading" in words:
            raise self.error(EngineLoading, f"{said}; wait for it")
        raise self.error(EngineRefused, said if kind or words == "" else f"{said} (HTTP {code})")

    @contextlib.contextmanager
    def _faults(self, started: bool = False) -> Any:
        try:
            yield
        except httpx.ConnectTimeout:
            raise self.error(
                EngineUnreachable, f"no answer in {CONNECT_SECONDS:.0f} s; is the host right?"
            ) from None
        except httpx.ConnectError as error:
            raise self.error(
                EngineUnreachable, f"nothing answers there ({error}); is the server running?"
            ) from None
        except (httpx.TimeoutException, TimeoutError):
            raise self.error(
                EngineBroke if started else EngineUnreachable, "it has stopped answering"
            ) from None
        except EngineBroke as error:
            raise self.error(EngineBroke, str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self.error(
                EngineBroke, f"it closed the connection in mid-answer ({error}); is it alive?"
            ) from None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8", "replace"))
    except ValueError:
        return None


def _is_fault(data: Any) -> bool:
    """Whether an object that came with status 200 says that something is wrong."""
    if not isinstance(data, dict):
        return False
    return data.get("error") is not None or data.get("object") == "error"


def _fault(content: bytes, status: int) -> tuple[str, str, int]:
    """(the server's words, their type, the status they name), from what is no success.

    llama-server, vLLM and SGLang: `{"error": {"message", "type", "code"}}` or `{"error": "…"}`;
    older vLLM and SGLang: the same fields without `error`; FastAPI: `{"detail": …}`.
    """
    data = _json(content)
    fault: Any = None
    if isinstance(data, dict):
        fault = data.get("error") or data.get("detail") or (data if "message" in data else None)
    if isinstance(fault, list) and fault and isinstance(fault[0], dict):
        first = fault[0]
        where = ".".join(str(part) for part in first.get("loc") or ())
        fault = {"message": f"{where}: {first.get('msg')}" if where else first.get("msg")}
    if isinstance(fault, dict):
        code = fault.get("code")
        return (
            str(fault.get("message") or ""),
            str(fault.get("type") or ""),
            code if isinstance(code, int) else status,
        )
    if fault:
        return str(fault), "", status
    return content[:_WORDS_KEPT].decode("utf-8", "replace"), "", status
