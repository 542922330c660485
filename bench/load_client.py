"""The stream client against a paced server with a known truth, beside a bare Protocol loop and httpx, in one run.

The server stamps every chunk as it sends it; both processes read the same monotonic clock. Each client gets the same
chunks one after the other, on a core of its own where there are two. Figures: how late a chunk's stamp is (lag), how
wrong the time to first token is when all streams start at once, processor seconds per million chunks, chunks a second
with no pacing. Absolute figures move from machine to machine; the ratios are what counts. Exit code 1 where the stream
client is not better than httpx in all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

clock = time.perf_counter
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event(number: int, last: bool) -> bytes:
    """One native chunk of three tokens, as long as a real one."""
    meta = {
        "id": "b8c1", "finish_reason": {"type": "length", "length": number * 3} if last else None,
        "prompt_tokens": 24978, "weight_version": "default", "num_retractions": 0, "reasoning_tokens": 0,
        "completion_tokens": number * 3, "cached_tokens": 0, "cached_tokens_details": None, "dp_rank": None,
    }  # fmt: skip
    body = {"text": " three more tokens", "output_ids": [3841, 13477, 37550], "meta_info": meta}
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- the server ------------------------------------------------------------------------------------------------------


def serve(streams: int, chunks: int, rate: float, file: str) -> None:
    """Take all requests, then send every stream's chunks in turn at the rate (0: unpaced); write the truth."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams + 8)
    print(listener.getsockname()[1], flush=True)
    connections = [listener.accept()[0] for _ in range(streams)]
    poll = select.poll()
    by_fd = {}
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection, select.POLLIN)
        by_fd[connection.fileno()] = connection
    received: dict[int, float] = {}
    order = []
    while len(received) < streams:
        for fd, _ in poll.poll():
            head = by_fd[fd].recv(65536)
            if fd not in received:
                received[fd] = clock()
                number = int(head.partition(b"X-Stream: ")[2].partition(b"\r\n")[0])
                order.append((number, by_fd[fd]))
    events = [event(number + 1, number == chunks - 1) for number in range(chunks)]
    truth: dict[int, list[float]] = {number: [] for number, _ in order}
    due = clock() + 0.05
    gap = 1 / rate if rate else 0.0
    for index, data in enumerate(events):
        head = HEAD if index == 0 else b""
        tail = DONE if index == chunks - 1 else b""
        for number, connection in order:
            due += gap
            while gap and (left := due - clock()) > 0:
                if left > 0.0002:
                    time.sleep(left - 0.0001)
            truth[number].append(clock())
            connection.sendall(head + data + tail)
    result = {"received": {number: received[connection.fileno()] for number, connection in order}, "truth": truth}
    Path(file).write_text(json.dumps(result))
    print("sent", flush=True)
    sys.stdin.read()  # the client may still be reading


# -- the clients -----------------------------------------------------------------------------------------------------


def payload(number: int) -> bytes:
    """A request that names its stream."""
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Stream: %d\r\nContent-Length: 2\r\n\r\n{}" % number


async def ours(port: int, streams: int) -> dict[int, tuple[float, list[float]]]:
    """The stream client, as specrig load uses it: decoded, counted, timed out, measured."""
    from specrig.load.api import make_decoder
    from specrig.load.stream import StreamClient, Timeouts

    client = StreamClient(f"http://127.0.0.1:{port}")
    await client.open(streams)
    decoders = [make_decoder("sglang") for _ in range(streams)]
    done = await asyncio.gather(
        *(client.exchange(payload(number), decoders[number], Timeouts()) for number in range(streams))
    )
    assert all(exchange.error is None for exchange in done), done[0].message
    await client.close()
    return {number: (exchange.sent, decoders[number].t) for number, exchange in enumerate(done)}


async def bare(port: int, streams: int) -> dict[int, tuple[float, list[float]]]:
    """The least that asyncio, uvloop and httptools can do: a stamp per piece of body, nothing decoded."""
    import httptools

    loop = asyncio.get_running_loop()

    class Bare(asyncio.Protocol):
        def __init__(self) -> None:
            self.t: list[float] = []
            self.now = 0.0
            self.over = loop.create_future()
            self.parser = httptools.HttpResponseParser(self)

        def data_received(self, data: bytes) -> None:
            self.now = clock()
            self.parser.feed_data(data)

        def on_body(self, _body: bytes) -> None:
            self.t.append(self.now)

        def on_message_complete(self) -> None:
            self.over.set_result(None)

    pairs = await asyncio.gather(*(loop.create_connection(Bare, "127.0.0.1", port) for _ in range(streams)))
    sent = []
    for number, (transport, _) in enumerate(pairs):
        sent.append(clock())
        transport.write(payload(number))
    await asyncio.gather(*(protocol.over for _, protocol in pairs))
    for transport, _ in pairs:
        transport.close()
    # the last piece is [DONE]
    return {number: (sent[number], protocol.t[:-1]) for number, (_, protocol) in enumerate(pairs)}


async def with_httpx(port: int, streams: int) -> dict[int, tuple[float, list[float]]]:
    """Httpx as most tools use it: aiter_lines, json.loads."""
    import httpx

    out: dict[int, tuple[float, list[float]]] = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def one(number: int) -> None:
            sent = clock()
            t = []
            headers = {"X-Stream": str(number)}
            url = f"http://127.0.0.1:{port}/generate"
            async with client.stream("POST", url, headers=headers, content=b"{}") as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        t.append(clock())
                        json.loads(line[6:])
            out[number] = (sent, t)

        await asyncio.gather(*(one(number) for number in range(streams)))
    return out


CLIENTS = {"bare loop": bare, "specrig": ours, "httpx": with_httpx}


def run_client(name: str, port: int, streams: int, file: str) -> None:
    """Run one client in this process; write its stamps and the processor time it took."""
    import uvloop

    factory = None if name == "httpx" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        before = time.process_time()
        stamps = runner.run(CLIENTS[name](port, streams))
        cpu = time.process_time() - before
    Path(file).write_text(json.dumps({"stamps": stamps, "cpu": cpu}))


# -- the comparison --------------------------------------------------------------------------------------------------


def pin(core: int) -> list[str]:
    """How to start a process on one core of its own, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[core])] if len(cores) > 1 else []


def measure(name: str, streams: int, chunks: int, rate: float) -> dict[str, float]:
    """One client against one server: lag, TTFT error, CPU."""
    script = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as scratch:
        truth_file, seen_file = f"{scratch}/truth", f"{scratch}/seen"
        line = [*pin(0), *script, "--serve", str(streams), str(chunks), str(rate), truth_file]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            line = [*pin(1), *script, "--client", name, port, str(streams), seen_file]
            client = subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False)
            if client.returncode:
                server.kill()
                raise SystemExit(f"bench: {name} ended with {client.returncode}: {client.stderr.strip()[-800:]}")
            server.stdout.readline()
            server.stdin.close()
        truth = json.loads(Path(truth_file).read_text())
        seen = json.loads(Path(seen_file).read_text())
    lags, errors = [], []
    for number, (sent, t) in seen["stamps"].items():
        real = truth["truth"][number]
        if len(t) == len(real):
            lags += [1e3 * (a - b) for a, b in zip(t, real, strict=True)]
        errors.append(1e3 * ((t[0] - sent) - (real[0] - truth["received"][number])))
    lags.sort()
    errors.sort()
    begun = min(real[0] for real in truth["truth"].values())
    ended = max(t[-1] for _, t in seen["stamps"].values())
    return {
        "rate": streams * chunks / (ended - begun),
        "lag_p50_ms": at(lags, 0.5),
        "lag_p99_ms": at(lags, 0.99),
        "ttft_error_p50_ms": at(errors, 0.5),
        "ttft_error_p99_ms": at(errors, 0.99),
        "cpu_s_per_million": seen["cpu"] / (streams * chunks) * 1e6,
    }


def at(ordered: list[float], share: float) -> float:
    """A percentile of sorted values; not a number of none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def main() -> int:
    """Compare; 1 where the stream client does not beat httpx."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each paced measurement")
    parser.add_argument("--rates", type=int, nargs="+", default=[10_000, 20_000], help="chunks a second")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), int(arguments.serve[1]), float(arguments.serve[2]), arguments.serve[3])
        return 0
    if arguments.client:
        run_client(arguments.client[0], int(arguments.client[1]), int(arguments.client[2]), arguments.client[3])
        return 0
    rows: list[dict[str, Any]] = []
    behind = []
    for rate in [*arguments.rates, 0]:
        streams = arguments.streams if rate else 64
        chunks = max(8, int(arguments.seconds * (rate or 40_000) / streams))
        label = f"{rate:,} chunks/s paced" if rate else "not paced"
        print(f"\n{label}, {streams} streams of {chunks} chunks")
        print(
            f"  {'':<10}{'chunks/s':>10}{'lag p50':>10}{'p99 ms':>10}{'TTFT err p50':>14}{'p99 ms':>10}{'CPU s/1M':>10}"
        )
        found = {}
        for name in CLIENTS:
            got = found[name] = measure(name, streams, chunks, rate)
            rows.append({"rate_asked": rate, "client": name, **got})
            print(
                f"  {name:<10}{got['rate']:>10,.0f}{got['lag_p50_ms']:>10.3f}{got['lag_p99_ms']:>10.3f}"
                f"{got['ttft_error_p50_ms']:>14.3f}{got['ttft_error_p99_ms']:>10.3f}{got['cpu_s_per_million']:>10.1f}"
            )
        for other in ("bare loop", "httpx"):
            shares = []
            for key in ("lag_p50_ms", "lag_p99_ms", "ttft_error_p50_ms", "cpu_s_per_million"):
                share = found["specrig"][key] / found[other][key]
                shares.append(f"{key} {share:.2f}x")
                compared = rate and key != "lag_p50_ms"
                if other == "httpx" and compared and not share < 1:
                    behind.append(f"{label}: {key} is {share:.2f}x httpx's")
            print(f"  specrig over {other}: {', '.join(shares)}")
    for line in behind:
        print(f"NOT MET: {line}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"schema": 1, "rows": rows, "not_met": behind}, indent=1) + "\n")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
