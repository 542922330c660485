"""The measured client: an asyncio.Protocol on httptools, one time stamp per packet, everything else later.

What makes it measure what it says:

* Connections are opened before a request is due; the clock starts at the write of its bytes.
* ``data_received`` takes the time and hands the bytes to the HTTP parser (C). Events and JSON are looked at when an
  answer is whole, and every twenty milliseconds, for many packets at a time cost less than one by one; in slices of a
  tenth of a millisecond between which sockets are read, so that one stream's parsing is not in another stream's time.
* Python's garbage collector, which stops every stream for longer the more prompts and records there are, waits until
  the requests are over (:func:`uncollected`).
* There is no connection limit: as many as there are requests at once.
* A stream that stalls costs its own request only: first-token, idle and total time limits, partial results kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from specrig.engine.endpoint import check_endpoint
from specrig.engine.errors import message as error_message
from specrig.errors import UsageError
from specrig.load.api import Decoder
from specrig.load.sse import SseParser

clock = time.perf_counter
"""The clock of every time stamp: monotonic, seconds."""

_BATCH_S = 0.02
_SLICE_S = 0.0001
_KEPT_BODY = 65536
_LARGEST_HEAD = 1 << 20
_LARGEST_EVENT = 16 << 20
_CONNECT_S = 10.0
_LAG_TICK_S = 0.01


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running meanwhile; what the client does leaves it nothing to collect."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait on one stream, in seconds.

    Attributes:
        first_token_s: from the request's bytes to the first token.
        idle_s: between two events of a stream; comments that keep a connection alive do not count as events.
        request_s: for the whole request.
    """

    first_token_s: float = 120.0
    idle_s: float = 30.0
    request_s: float = 3600.0


class Exchange:
    """One request and what came back; times are :data:`clock` readings.

    Attributes:
        sent: when the request's bytes were written.
        status: the HTTP status, null where no answer came.
        error: null, or one of ``connect``, ``disconnected``, ``http``, ``server_error``, ``abort``, ``protocol``,
            ``no_terminal``, ``first_token_timeout``, ``idle_timeout``, ``request_timeout``, ``aborted``.
        message: the server's own words with an error, else ours.
        finished: when the answer was whole, or given up.
    """

    __slots__ = (
        "_body",
        "_complete",
        "_pending",
        "_queued",
        "_sse",
        "_stream",
        "bytes_in",
        "content_type",
        "decoder",
        "error",
        "finished",
        "future",
        "last_t",
        "message",
        "payload",
        "sent",
        "status",
        "timeouts",
    )

    def __init__(self, payload: bytes | memoryview, decoder: Decoder | None, timeouts: Timeouts) -> None:
        """Prepare a request; nothing is sent yet."""
        self.payload = payload
        self.decoder = decoder
        self.timeouts = timeouts
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = 0.0
        self.last_t = 0.0
        self.finished = 0.0
        self.status: int | None = None
        self.content_type = ""
        self.error: str | None = None
        self.message: str | None = None
        self.bytes_in = 0
        self._pending: list[tuple[float, bytes]] = []
        self._queued = False
        self._complete = False
        self._stream = False
        self._sse = SseParser()
        self._body = b""

    @property
    def body(self) -> bytes:
        """The body of an answer that is no event stream, up to 64 KiB of it for errors."""
        return self._body

    def _headers_done(self, status: int, content_type: str) -> None:
        self.status = status
        self.content_type = content_type
        self._stream = self.decoder is not None and status == 200 and "event-stream" in content_type

    def _process(self) -> None:
        """Look at what arrived; ends the exchange when its answer is whole."""
        self._queued = False
        pending = self._pending
        if self.future.done():
            pending.clear()
            return
        if self._stream:
            feed = self._sse.feed
            event_in = self.decoder.feed  # type: ignore[union-attr]
            for t, piece in pending:
                for event in feed(piece):
                    event_in(event, t)
        elif pending:
            # an answer to a control call is wanted whole, an error page is not
            room = _KEPT_BODY - len(self._body) if self.decoder is not None else 1 << 30
            self._body += b"".join(piece for _, piece in pending)[: max(room, 0)]
        pending.clear()
        if self._complete:
            self._settle()

    def _settle(self) -> None:
        if self.decoder is None:
            self._end(None, None)
        elif self.status != 200:
            self._end("http", error_message(self.status, self._body))
        elif not self._stream:
            self._end("protocol", f"the server answered {self.content_type or 'no content type'}, not an event stream")
        elif self.decoder.error is not None:
            self._end(self.decoder.error, self.decoder.message)
        elif not self.decoder.terminal:
            self._end("no_terminal", "the stream ended without its terminal event [DONE]")
        else:
            self._end(None, None)

    def _end(self, error: str | None, message: str | None) -> None:
        if self.future.done():
            return
        self.error = error
        self.message = message
        self.finished = self.last_t if error is None else clock()
        if self.decoder is not None:
            self.decoder.finish()
            if self.error is None and self.decoder.error is not None:
                self.error = self.decoder.error
                self.message = self.decoder.message
        self.future.set_result(None)


class _Connection(asyncio.Protocol):
    """One keep-alive connection; at most one exchange at a time."""

    def __init__(self, client: StreamClient) -> None:
        self.client = client
        self._dirty = client._dirty
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.uses = 0
        self._parser: httptools.HttpResponseParser
        self._content_type = ""
        self._bounded = False
        self._interim = False

    # -- transport ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it
        self.client._connections.add(self)

    def data_received(self, data: bytes) -> None:
        t = clock()
        exchange = self.exchange
        if exchange is None:
            self.abort()  # an answer that nobody asked for: the connection can't be trusted any more
            return
        exchange.last_t = t
        exchange.bytes_in += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._over("protocol", f"not HTTP: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.client._connections.discard(self)
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.status is not None and not self._bounded:
            self._complete()  # no length and no chunks: the end of the connection is the end of the body
            return
        exchange._process()
        got = exchange.decoder.output_tokens if exchange.decoder is not None else 0
        why = f": {exc}" if exc else ""
        where = "before any answer" if exchange.status is None else f"in the middle of the answer, after {got} tokens"
        self._over("disconnected", f"the server closed the connection {where}{why}")

    # -- one exchange -------------------------------------------------------------------------------------------

    def start(self, exchange: Exchange) -> None:
        assert self.transport is not None
        self.exchange = exchange
        self.uses += 1
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = ""
        self._bounded = False
        exchange.sent = clock()
        self.transport.write(exchange.payload)

    def abort(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _over(self, error: str, message: str) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            self.client._active.discard(exchange)
            exchange._end(error, message)

    def _complete(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        self.client._active.discard(exchange)
        exchange._complete = True
        asyncio.get_running_loop().call_soon(exchange._process)
        if self.closed or not self._bounded or not self._parser.should_keep_alive():
            self.abort()
        else:
            self.client._idle.append(self)

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        low = name.lower()
        if low == b"content-type":
            self._content_type = value.decode("latin-1").lower()
        elif low in (b"content-length", b"transfer-encoding"):
            self._bounded = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = status < 200
        if self.exchange is not None and not self._interim:
            self.exchange._headers_done(status, self._content_type)

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            exchange._pending.append((exchange.last_t, body))
            if not exchange._queued:
                self._dirty(exchange)

    def on_message_complete(self) -> None:
        if not self._interim:
            self._complete()


@dataclass(frozen=True)
class Lag:
    """How late the client's own event loop ran, milliseconds; timers tick in whole milliseconds.

    Attributes:
        mean_ms: the mean over time, so that a delay counts for as long as it took.
        p50_ms: the median.
        p99_ms: the 99th percentile.
        max_ms: the worst.
        seconds: over how long it was measured.
        cpu: processor seconds used per second, of one core.
    """

    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    seconds: float
    cpu: float

    @classmethod
    def of(cls, late_s: Sequence[float], seconds: float, cpu: float) -> Lag:
        """Sum up samples, of one loop or of several that shared the work.

        A packet is the likelier to fall into a delay the longer that is: in the mean each counts for the time it took.

        Args:
            late_s: how late each timer fired, seconds.
            seconds: how long the samples were taken.
            cpu: of the busiest process.
        """
        late = sorted(late_s) or [0.0]
        spans = [_LAG_TICK_S + delay for delay in late]
        mean = sum(delay * span for delay, span in zip(late, spans, strict=True)) / sum(spans)
        return cls(
            mean_ms=round(mean * 1e3, 3),
            p50_ms=round(late[len(late) // 2] * 1e3, 3),
            p99_ms=round(late[min(len(late) - 1, int(len(late) * 0.99))] * 1e3, 3),
            max_ms=round(late[-1] * 1e3, 3),
            seconds=round(seconds, 3),
            cpu=round(cpu, 4),
        )


class _LagMeter:
    """Samples how late a timer fires, and the process's CPU time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._late: list[float] = []
        self._due = clock() + _LAG_TICK_S
        self._begun = clock()
        self._cpu = time.process_time()
        self._handle = loop.call_later(_LAG_TICK_S, self._tick)

    def _tick(self) -> None:
        now = clock()
        self._late.append(max(0.0, now - self._due))
        self._due = now + _LAG_TICK_S
        self._handle = self._loop.call_later(_LAG_TICK_S, self._tick)

    def stop(self) -> tuple[list[float], float, float]:
        self._handle.cancel()
        if (over := clock() - self._due) > 0:
            self._late.append(over)  # a tick that a blocked loop has not come to
        wall = max(clock() - self._begun, 1e-9)
        return self._late, wall, (time.process_time() - self._cpu) / wall


class StreamClient:
    """Streams completions from one server and measures them.

    Use from one running event loop (uvloop where speed matters); see :func:`run`.
    """

    def __init__(self, url: str, *, api_key: str | None = None, ca_file: str | None = None) -> None:
        """Name the server.

        Args:
            url: ``http://host:port`` or ``https://...``; a path is put before the API's.
            api_key: sent as a bearer token.
            ca_file: certificates to trust instead of the system's, for https.

        Raises:
            UsageError: the URL is not one of http or https.
        """
        check_endpoint(url, api_key)
        parts = urllib.parse.urlsplit(url.rstrip("/").removesuffix("/v1"))
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"the engine's URL is {url!r}; expected http://HOST:PORT")
        self.url = url
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path
        self._ssl: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._ssl = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                raise UsageError(f"{ca_file}: cannot read certificates: {error.strerror or error}") from error
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self._ssl else 80
        lines = [
            f"Host: {host}" if self.port == default else f"Host: {host}:{self.port}",
            "User-Agent: specrig",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines).encode()
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._active: set[Exchange] = set()
        self._queue: collections.deque[Exchange] = collections.deque()
        self._scheduled = False
        self._watch: asyncio.TimerHandle | None = None
        self._meter: _LagMeter | None = None
        self._owners: dict[Exchange, _Connection] = {}
        self.aborting = False

    def frame(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Write a whole HTTP request.

        Args:
            method: GET or POST.
            path: such as ``/generate``.
            body: a JSON body, if any.

        Returns:
            Its bytes, ready to be sent.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode() + self._headers
        if body is None:
            return head + b"\r\n\r\n"
        return head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    # -- connections --------------------------------------------------------------------------------------------

    async def open(self, count: int) -> None:
        """Have at least this many connections open and unused, before any clock starts.

        Args:
            count: how many.

        Raises:
            OSError: the server cannot be reached.
        """
        self._idle = [connection for connection in self._idle if not connection.closed]
        missing = count - len(self._idle)
        for _ in range(0, missing, 64):
            batch = min(64, count - len(self._idle))
            self._idle.extend(await asyncio.gather(*(self._connect() for _ in range(batch))))

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await loop.create_connection(lambda: _Connection(self), self.host, self.port, ssl=self._ssl)
        return connection

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.transport is not None and not connection.transport.is_closing():
                return connection
        return await self._connect()

    # -- exchanges ----------------------------------------------------------------------------------------------

    async def exchange(self, payload: bytes | memoryview, decoder: Decoder | None, timeouts: Timeouts) -> Exchange:
        """Send one request and take its answer.

        Args:
            payload: the whole request, from :meth:`frame`.
            decoder: for a streamed answer; None for a plain one.
            timeouts: how long to wait.

        Returns:
            The exchange, ended; it never raises for what a server or a network does.
        """
        while True:
            exchange = Exchange(payload, decoder, timeouts)
            try:
                connection = await self._connection()
            except (OSError, TimeoutError) as error:
                exchange.sent = clock()
                text = "no answer in 10 s" if isinstance(error, TimeoutError) else _plain(error)
                exchange._end("connect", f"cannot connect to {self.host}:{self.port}: {text}")
                return exchange
            if self.aborting and decoder is not None:
                self._idle.append(connection)
                exchange.sent = clock()
                exchange._end("aborted", "stopped before it was sent")
                return exchange
            reused = connection.uses > 0
            self._active.add(exchange)
            self._owners[exchange] = connection
            if self._watch is None:
                self._watch = asyncio.get_running_loop().call_later(0.05, self._look)
            connection.start(exchange)
            try:
                await exchange.future
            finally:
                self._owners.pop(exchange, None)
                self._active.discard(exchange)
                if not exchange.future.done():
                    connection.exchange = None
                    connection.abort()
            if exchange.error == "disconnected" and exchange.bytes_in == 0 and reused and not self.aborting:
                continue  # the server had closed an idle connection: nothing was read of the request
            return exchange

    async def request(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 10.0
    ) -> tuple[int | None, bytes]:
        """A small control call on the same loop, for looks at the server while streams run.

        Args:
            method: GET or POST.
            path: the endpoint.
            body: a JSON body, if any.
            timeout_s: for the whole call.

        Returns:
            The status (null where no answer came) and the body.
        """
        limits = Timeouts(first_token_s=timeout_s, idle_s=timeout_s, request_s=timeout_s)
        exchange = await self.exchange(self.frame(method, path, body), None, limits)
        return (None if exchange.error else exchange.status), exchange.body

    def _dirty(self, exchange: Exchange) -> None:
        exchange._queued = True
        self._queue.append(exchange)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_BATCH_S, self._drain)

    def _drain(self) -> None:
        queue = self._queue
        deadline = clock() + _SLICE_S
        while queue:
            queue.popleft()._process()
            if queue and clock() > deadline:
                asyncio.get_running_loop().call_soon(self._drain)
                return
        self._scheduled = False

    def in_flight(self) -> tuple[int, int]:
        """How many streams are open now, and how many tokens they have brought so far."""
        decoders = [exchange.decoder for exchange in self._active if exchange.decoder is not None]
        return len(decoders), sum(decoder.output_tokens for decoder in decoders)

    def _look(self) -> None:
        """Give up on streams that are over one of their limits."""
        now = clock()
        for exchange in list(self._active):
            if _overdue(exchange, now):
                exchange._process()  # what came in the last batch counts
                if not exchange.future.done() and (why := _overdue(exchange, now)):
                    self._give_up(exchange, *why)
        self._watch = asyncio.get_running_loop().call_later(0.05, self._look) if self._active else None

    def _give_up(self, exchange: Exchange, error: str, message: str) -> None:
        exchange._process()
        if exchange.future.done():
            return
        connection = self._owners.get(exchange)
        self._active.discard(exchange)
        if connection is not None:
            connection.exchange = None
            connection.abort()
        exchange._end(error, message)

    def abort_streams(self, message: str) -> None:
        """End every stream now, keeping what arrived; later ones end before they are sent.

        Args:
            message: why, for the records.
        """
        self.aborting = True
        for exchange in list(self._active):
            if exchange.decoder is not None:
                self._give_up(exchange, "aborted", message)

    # -- the client itself --------------------------------------------------------------------------------------

    def start_lag(self) -> None:
        """Start measuring how late this client's loop runs."""
        self._meter = _LagMeter(asyncio.get_running_loop())

    def stop_lag(self) -> Lag:
        """Stop measuring it.

        Returns:
            What was seen since :meth:`start_lag`.
        """
        return Lag.of(*self.stop_lag_samples())

    def stop_lag_samples(self) -> tuple[list[float], float, float]:
        """Stop measuring it.

        Returns:
            What :meth:`Lag.of` takes.
        """
        assert self._meter is not None
        meter, self._meter = self._meter, None
        return meter.stop()

    async def close(self) -> None:
        """Close every connection."""
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)


def _overdue(exchange: Exchange, now: float) -> tuple[str, str] | None:
    """The limit that a stream is over, and in words; None where it is over none."""
    limits, decoder = exchange.timeouts, exchange.decoder
    last = decoder.last_event_t if decoder is not None else None
    got = decoder.output_tokens if decoder is not None else 0
    if exchange.status is None and exchange.bytes_in > _LARGEST_HEAD:
        return "protocol", f"a head without end: {exchange.bytes_in:,} bytes before any answer"
    if exchange._sse.held > _LARGEST_EVENT:
        return "protocol", f"an event without end: {exchange._sse.held:,} bytes of it came"
    if now - exchange.sent > limits.request_s:
        return "request_timeout", f"not done {limits.request_s:g} s after it was sent"
    if last is None or not got:
        over = now - exchange.sent > limits.first_token_s
        return ("first_token_timeout", f"no token in {limits.first_token_s:g} s") if over else None
    if now - last > limits.idle_s:
        return "idle_timeout", f"stalled: nothing for {limits.idle_s:g} s after {got} tokens"
    return None


def _plain(error: OSError) -> str:
    if error.errno is not None:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror or error)
    return str(error)
