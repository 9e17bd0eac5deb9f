"""A server made of Python on a real loopback socket, for answers that no real one gives to order.

A subclass says what is answered; what was asked is in `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class Request:
    method: str
    path: str
    query: str
    body: Any
    headers: dict[str, str]


@dataclass
class Reply:
    """A whole answer: `body` as JSON unless it is bytes."""

    status: int
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)


class Died(Exception):
    """Raised in a stream: the connection is torn down there."""


SILENCE = object()
"""Yielded in a stream: nothing comes after it, and the connection stays open."""

Events = AsyncIterator[Any]
"""What is streamed: dicts as `data:` events, bytes as they are, numbers as seconds of waiting."""


class InThread(ABC):
    """A server that is entered with `async with`, or, by code without a loop, `in_thread`."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve from a thread of its own, for code that runs an event loop itself."""
        started, stop = threading.Event(), None
        loop = asyncio.new_event_loop()

        async def run() -> None:
            nonlocal stop
            stop = asyncio.Event()
            async with self:
                started.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
        thread.start()
        started.wait(10)
        try:
            yield self
        finally:
            assert stop is not None
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()


class FakeHttp(InThread):
    """`async with` it, and give `url` to an engine.

    pieces_cut: a stream arrives cut into as many bytes, so that characters and lines are cut too.
    """

    def __init__(self, *, pieces_cut: int | None = 7) -> None:
        self.requests: list[Request] = []
        self.asked = asyncio.Event()
        self.pieces_cut = pieces_cut
        self.headers: dict[str, str] = {}
        self.closed_early = 0
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request) -> Reply | Events:
        """What is answered; overridden."""
        return Reply(404, {"error": "not found"})

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def bodies(self, path: str) -> list[Any]:
        return [request.body for request in self.requests if request.path == path]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            request = await _read(reader)
            self.requests.append(request)
            self.asked.set()
            answer = await self.answer(request)
            if isinstance(answer, Reply):
                await self._whole(answer, writer)
            else:
                await self._stream(answer, writer)
        except Died:
            writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed_early += 1
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _whole(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        raw = isinstance(reply.body, bytes)
        body = reply.body if raw else json.dumps(reply.body).encode()
        headers = {"Content-Type": "text/plain" if raw else "application/json"}
        headers |= {**self.headers, **reply.headers, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} x\r\n{lines}\r\n".encode() + body)
        await writer.drain()

    async def _stream(self, events: Events, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        async for event in events:
            if event is SILENCE:
                await writer.drain()
                await asyncio.Event().wait()
            if isinstance(event, (int, float)):
                await writer.drain()
                await asyncio.sleep(event)
                continue
            text = event if isinstance(event, bytes) else event_bytes(event)
            step = self.pieces_cut or max(1, len(text))
            for at in range(0, len(text), step):
                part = text[at : at + step]
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            if writer.is_closing():
                raise ConnectionResetError
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def event_bytes(event: Any) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    path, _, query = target.partition("?")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, query, json.loads(body) if body else None, headers)
