"""A small HTTP/1.1 server protocol on httptools: whole bodies, keep-alive, chunked event streams."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl

import httptools

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_MAX_BODY = 256 * 2**20


@dataclass(frozen=True)
class Call:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    at: float
    keep_alive: bool = True


class Handler(Protocol):
    """What answers calls."""

    async def __call__(self, call: Call, connection: Connection) -> None:
        """Answer `call` on `connection`."""


class Connection(asyncio.Protocol):
    """One client's connection. Requests on it are answered one after another."""

    def __init__(self, handler: Handler, clock: Callable[[], float], connections: set[Connection]) -> None:
        self._handler = handler
        self._clock = clock
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._backlog: deque[Call] = deque()
        self._task: asyncio.Task[None] | None = None
        self._keep_alive = True
        self._streaming = False
        self._held = False
        self.on_lost: Callable[[], None] | None = None

    # -- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; send small packets at once."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Tell whoever streams."""
        self._transport = None
        self._connections.discard(self)
        self._backlog.clear()
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a malformed request is answered 400 and the connection closed."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep_alive = False
            self.respond(400, b"Invalid HTTP request received.", "text/plain; charset=utf-8")

    # -- httptools -----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A new request."""
        self._url, self._headers, self._body, self._size = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        key = name.decode("latin-1").lower()
        self._headers[key] = value.decode("latin-1")
        if key == "expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._size += len(body)
        if self._size <= _MAX_BODY:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer it, or queue it behind the one that is being answered."""
        target = httptools.parse_url(self._url)
        call = Call(
            method=self._parser.get_method().decode("latin-1"),
            path=(target.path or b"/").decode("latin-1"),
            query=dict(parse_qsl((target.query or b"").decode("latin-1"))),
            headers=self._headers,
            body=b"".join(self._body),
            at=self._clock(),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._backlog.append(call)
        self._next()

    def _next(self) -> None:
        if self._task is None and self._backlog:
            self._task = asyncio.get_running_loop().create_task(self._answer(self._backlog.popleft()))

    async def _answer(self, call: Call) -> None:
        self._keep_alive = call.keep_alive
        try:
            await self._handler(call, self)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            if self._streaming:
                self.close()
            else:
                self.respond(500, b"Internal Server Error", "text/plain; charset=utf-8")
        finally:
            self._task = None
            if self._transport is not None and not self._streaming and not self._held:
                self._next()

    # -- answers -------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the client is still there."""
        return self._transport is not None

    def _head(self, status: int, extra: str) -> bytes:
        return (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}\r\ndate: {formatdate(usegmt=True)}\r\n"
            f"server: uvicorn\r\n{extra}\r\n"
        ).encode("latin-1")

    def respond(self, status: int, body: bytes, content_type: str | None = "application/json") -> None:
        """A whole answer."""
        if self._transport is None:
            return
        kind = f"content-type: {content_type}\r\n" if content_type else ""
        close = "" if self._keep_alive else "connection: close\r\n"
        self._transport.write(self._head(status, f"content-length: {len(body)}\r\n{kind}{close}") + body)
        if not self._keep_alive:
            self._transport.close()
        elif self._held:
            self._held = False
            self._next()

    def hold(self) -> None:
        """The answer comes later: keep what the client sent after this request until then."""
        self._held = True

    def start_stream(self, status: int = 200) -> None:
        """The head of an event stream."""
        self._streaming = True
        self.write(
            self._head(status, "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n")
        )

    def chunk(self, data: bytes) -> bytes:
        """The bytes of one chunk of a stream."""
        return b"%x\r\n%b\r\n" % (len(data), data)

    def write(self, data: bytes) -> None:
        """Bytes as they are."""
        if self._transport is not None:
            self._transport.write(data)

    def end_stream(self, *, complete: bool = True) -> None:
        """The end of a stream.

        Args:
            complete: with the last chunk of HTTP, so that the body is whole; the connection lives on.
        """
        self._streaming = False
        self.on_lost = None
        if self._transport is None:
            return
        if complete:
            self._transport.write(b"0\r\n\r\n")
        if not complete or not self._keep_alive:
            self._transport.close()
        else:
            self._next()

    def reset(self) -> None:
        """Break the connection off as a crash does."""
        if self._transport is None:
            return
        sock: Any = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._streaming = False
        self._transport.abort()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside this connection."""
        return asyncio.get_running_loop().create_task(work)
