"""The stream client against a scripted server: exact bytes out, exact packets back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from specrig.errors import UsageError
from specrig.load import slots
from specrig.load.api import make_decoder
from specrig.load.slots import Done, Item, Plan
from specrig.load.stream import Exchange, StreamClient, Timeouts, clock, uncollected

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
QUICK = Timeouts(first_token_s=5, idle_s=5, request_s=5)


def event(count: int, reason: str | None = None, text: str = "x") -> bytes:
    meta = {"completion_tokens": count, "prompt_tokens": 3, "finish_reason": {"type": reason} if reason else None}
    body = {"text": text, "output_ids": list(range(count)), "meta_info": meta}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def drive(handler: Handler, use: Callable[[StreamClient], Awaitable[Any]], **more: Any) -> Any:
    """Start a server with one handler per request, run ``use`` with a client of it."""

    async def main() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    if length:
                        head += await reader.readexactly(int(length[0].split(b":")[1]))
                    await handler(reader, writer, head)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(f"http://127.0.0.1:{port}", **more)
        try:
            return await asyncio.wait_for(use(client), 20)
        finally:
            await client.close()
            server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def ask(client: StreamClient, timeouts: Timeouts = QUICK) -> Awaitable[Exchange]:
    return client.exchange(client.frame("POST", "/generate", b"{}"), make_decoder("sglang"), timeouts)


def once(script: list[bytes | float], *, close: bool = False) -> Handler:
    """A handler that writes the pieces, each as its own packet, and sleeps where a number stands."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        for item in script:
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                writer.write(item)
                await writer.drain()
        if close:
            writer.close()

    return handler


def test_times_are_those_of_the_packets() -> None:
    script: list[bytes | float] = [
        HEAD,
        0.10,
        chunk(event(2)),
        0.05,
        chunk(event(6)),
        0.05,
        chunk(event(9, "length")) + chunk(DONE) + b"0\r\n\r\n",
    ]
    exchange = drive(once(script), ask)
    assert exchange.error is None
    t = exchange.decoder.t
    assert exchange.decoder.k == [2, 4, 3]
    assert t[0] - exchange.sent == pytest.approx(0.10, abs=0.03)
    assert t[2] - t[0] == pytest.approx(0.10, abs=0.03)


def test_a_stream_cut_at_every_byte_reads_the_same() -> None:
    body = b": ping\n\n" + event(2, text="é") + event(5, "length", text="é𝄞€") + DONE
    whole = HEAD + chunk(body[:20]) + chunk(body[20:]) + b"0\r\n\r\n"

    async def use(client: StreamClient) -> list[Exchange]:
        return [await ask(client) for _ in range(0, len(whole), 7)]

    cuts = iter(range(0, len(whole), 7))

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        cut = next(cuts)
        for piece in (whole[:cut], whole[cut : cut + 1], whole[cut + 1 :]):
            writer.write(piece)
            await asyncio.sleep(0.001)

    for exchange in drive(handler, use):
        assert exchange.error is None
        assert exchange.decoder.k == [2, 3]
        assert exchange.decoder.text == "é𝄞€"


@pytest.mark.parametrize(
    ("script", "close", "error", "words"),
    [
        ([HEAD, chunk(event(4)) + b"0\r\n\r\n"], False, "no_terminal", "without its terminal event"),
        ([HEAD, chunk(event(4))], True, "disconnected", "in the middle of the answer, after 4 tokens"),
        ([b""], True, "disconnected", "before any answer"),
        ([b"SSH-2.0-OpenSSH_9\r\n"], False, "protocol", "not HTTP"),
        (
            [HEAD, chunk(b'data: {"error":{"message":"out of memory"}}\n\n' + DONE) + b"0\r\n\r\n"],
            False,
            "server_error",
            "out of memory",
        ),
        (
            [b'HTTP/1.1 400 Bad Request\r\nContent-Length: 33\r\n\r\n{"error":{"message":"too long!!"}}'[:-1] + b"}"],
            False,
            "http",
            "too long!!",
        ),
        ([b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"], False, "http", "503"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"],
            False,
            "protocol",
            "not an event stream",
        ),
        ([b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", event(4)], True, "no_terminal", "terminal"),
    ],
)
def test_failures_are_failures_with_the_servers_words(
    script: list[bytes | float], close: bool, error: str, words: str
) -> None:
    exchange = drive(once(script, close=close), ask)
    assert exchange.error == error
    assert words in exchange.message


def test_an_answer_that_ends_with_the_connection_is_whole() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    exchange = drive(once([head, event(4, "length") + DONE], close=True), ask)
    assert exchange.error is None
    assert exchange.decoder.k == [4]


@pytest.mark.parametrize(
    ("script", "error", "tokens"),
    [
        ([HEAD, 30.0], "first_token_timeout", 0),
        ([HEAD, chunk(b": ping\n\n"), 30.0], "first_token_timeout", 0),
        ([HEAD, chunk(event(4)), 30.0], "idle_timeout", 4),
        ([HEAD, *([chunk(event(4)), 0.1] * 40)], "request_timeout", 4),
    ],
)
def test_time_limits_keep_what_arrived(script: list[bytes | float], error: str, tokens: int) -> None:
    limits = Timeouts(first_token_s=0.3, idle_s=0.3, request_s=0.9)
    begun = time.monotonic()
    exchange = drive(once(script), lambda client: ask(client, limits))
    assert exchange.error == error
    assert exchange.decoder.output_tokens == tokens
    assert time.monotonic() - begun < 20  # not the 30 s of the script


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (Timeouts(first_token_s=0.2, idle_s=5, request_s=5), "first_token_timeout"),
        (Timeouts(first_token_s=5, idle_s=0.2, request_s=5), "idle_timeout"),
        (Timeouts(first_token_s=5, idle_s=5, request_s=0.2), "request_timeout"),
    ],
)
def test_giving_up_closes_the_connection_which_any_server_sees(limits: Timeouts, error: str) -> None:
    gone: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(HEAD if error == "first_token_timeout" else HEAD + chunk(event(4)))
        with contextlib.suppress(ConnectionError):
            gone.append(await reader.read())

    async def use(client: StreamClient) -> Exchange:
        exchange = await ask(client, limits)
        for _ in range(500):
            if gone:
                break
            await asyncio.sleep(0.01)
        return exchange

    assert drive(handler, use).error == error
    assert gone == [b""]


@pytest.mark.parametrize("path", ["/abort_request", None])
def test_a_request_that_is_given_up_is_aborted_by_its_id(path: str | None) -> None:
    asked: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        asked.append(head)
        if head.startswith(b"POST /generate"):
            writer.write(HEAD + chunk(event(4)))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def use(client: StreamClient) -> list[Done]:
        plan = Plan(
            api="sglang", abort_path=path, timeouts=Timeouts(first_token_s=5, idle_s=0.2, request_s=5), slots=1,
            due=None, ramp_s=None, tool_s=None,
        )  # fmt: skip
        item = Item(index=0, rid="r-7", payload=client.frame("POST", "/generate", b"{}"))
        numbers, ended = iter([0]), []
        await slots.drive(
            plan, [[item]], client, plan.origin(), [0], lambda: next(numbers, None), ended.append, asyncio.Event(),
            lambda: False,
        )  # fmt: skip
        return ended

    (done,) = drive(handler, use)
    assert done.error == "idle_timeout"
    aborts = [head for head in asked if not head.startswith(b"POST /generate")]
    assert len(aborts) == (1 if path else 0)
    assert all(head.startswith(b"POST /abort_request ") and head.endswith(b'{"rid":"r-7"}') for head in aborts)


def test_comments_do_not_hide_a_stalled_stream() -> None:
    pings: list[bytes | float] = [chunk(b": ping\n\n"), 0.05] * 100
    limits = Timeouts(first_token_s=5, idle_s=0.3, request_s=5)
    exchange = drive(once([HEAD, chunk(event(4)), *pings]), lambda client: ask(client, limits))
    assert exchange.error == "idle_timeout"


def test_what_came_but_was_not_decoded_yet_is_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrig.load.stream._BATCH_S", 60.0)
    pieces: list[bytes | float] = [0.05, chunk(event(4))] * 30
    limits = Timeouts(first_token_s=0.6, idle_s=0.6, request_s=60)
    end = [chunk(event(4, "length")), chunk(DONE), b"0\r\n\r\n"]
    exchange = drive(once([HEAD, *pieces, *end]), lambda client: ask(client, limits))
    assert exchange.error is None


def test_nobody_listens() -> None:
    async def main() -> Exchange:
        client = StreamClient("http://127.0.0.1:9")
        return await ask(client)

    exchange = asyncio.run(main())
    assert exchange.error == "connect"
    assert exchange.message == "cannot connect to 127.0.0.1:9: Connection refused"


def test_connections_are_kept_and_a_closed_one_is_not_a_failure() -> None:
    seen: list[bytes] = []
    good = HEAD + chunk(event(1, "length") + DONE) + b"0\r\n\r\n"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        seen.append(b"%d" % writer.get_extra_info("peername")[1])
        writer.write(good)
        if len(seen) == 2:
            await writer.drain()
            writer.close()

    async def use(client: StreamClient) -> list[Exchange]:
        out = []
        for _ in range(4):
            out.append(await ask(client))
            await asyncio.sleep(0.02)
        return out

    assert [exchange.error for exchange in drive(handler, use)] == [None] * 4
    assert len(seen) == 4
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_many_streams_at_once_have_no_connection_limit() -> None:
    gate: list[asyncio.Event] = []
    count = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        nonlocal count
        if not gate:
            gate.append(asyncio.Event())
        count += 1
        if count == 150:
            gate[0].set()
        await gate[0].wait()
        writer.write(HEAD + chunk(event(1, "length") + DONE) + b"0\r\n\r\n")

    async def use(client: StreamClient) -> list[Exchange]:
        await client.open(150)
        return list(await asyncio.gather(*(ask(client) for _ in range(150))))

    assert all(exchange.error is None for exchange in drive(handler, use))


def test_the_clock_starts_at_the_write_not_at_the_connect() -> None:
    good = HEAD + chunk(event(1, "length") + DONE) + b"0\r\n\r\n"

    async def use(client: StreamClient) -> tuple[float, Exchange]:
        real = client._connect

        async def slow() -> Any:
            await asyncio.sleep(0.2)
            return await real()

        client._connect = slow  # type: ignore[method-assign]
        begun = clock()
        return begun, await ask(client)

    begun, exchange = drive(once([good]), use)
    assert exchange.sent - begun >= 0.19
    assert exchange.decoder.t[0] - exchange.sent < 0.1


def test_stopping_keeps_what_arrived_and_sends_no_more() -> None:
    async def use(client: StreamClient) -> list[Exchange]:
        first = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.1)
        client.abort_streams("interrupted")
        return [await first, await ask(client)]

    one, two = drive(once([HEAD, chunk(event(4)), 30.0]), use)
    assert (one.error, one.message, one.decoder.output_tokens) == ("aborted", "interrupted", 4)
    assert (two.error, two.decoder.output_tokens) == ("aborted", 0)


def test_plain_calls_and_headers() -> None:
    heads: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

    result = drive(handler, lambda client: client.request("GET", "/v1/loads"), api_key="k3y")
    assert result == (200, b"hi")
    assert heads[0].startswith(b"GET /v1/loads HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k3y\r\n" in heads[0]


def test_finished_exchanges_are_freed_without_the_garbage_collector() -> None:
    async def use(client: StreamClient) -> Any:
        gc.collect()
        with uncollected():
            assert not gc.isenabled()
            for _ in range(20):
                assert (await ask(client)).error is None
            await asyncio.sleep(0.1)  # until what is looked at in a batch has been
            return sum(isinstance(thing, Exchange) for thing in gc.get_objects())

    assert drive(once([HEAD, chunk(event(1, "length") + DONE), b"0\r\n\r\n"]), use) <= 1
    assert gc.isenabled()


def test_a_blocked_loop_shows_as_lag() -> None:
    async def use(client: StreamClient) -> Any:
        client.start_lag()
        await asyncio.sleep(0.05)
        time.sleep(0.1)
        await asyncio.sleep(0.05)
        return client.stop_lag()

    lag = drive(once([]), use)
    assert 80 < lag.max_ms < 300
    assert lag.seconds > 0.19
    assert lag.mean_ms > 25  # half of the time was one delay of 100 ms


def test_a_loop_that_is_blocked_to_the_end_is_seen() -> None:
    async def use(client: StreamClient) -> Any:
        client.start_lag()
        await asyncio.sleep(0.03)
        time.sleep(0.3)
        return client.stop_lag()

    assert drive(once([]), use).mean_ms > 200


@pytest.mark.parametrize("url", ["ftp://x", "localhost:30000", "http://", "http://x:99999"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match=r"expected http://HOST:PORT"):
        StreamClient(url)


def test_https_uses_tls() -> None:
    client = StreamClient("https://example.invalid")
    assert isinstance(client._ssl, ssl.SSLContext)
    assert client.port == 443
