"""The stream client against a paced server with a known truth, beside a bare Protocol loop and httpx, in one run.

The server stamps every chunk as it sends it; both processes read the same monotonic clock. The client has a core of its
own where there are two. The bare loop is the least that asyncio, uvloop and httptools can do: connections opened
before, the clock started at the write, a stamp per piece of data, nothing decoded. Figures: how late a chunk's stamp is
(lag), how wrong the time to first token is when all requests leave at once and each is answered at once, processor
seconds per million chunks from the first request to the last chunk, peak memory of the client's process.

A virtual machine's own hiccups are larger than what is compared. So both clients run in short rounds, in turn, and a
figure is the median over the rounds; a round in which the server did not keep its pace is made again, and none counts
without the other client's beside it. Times under FLOOR_MS are met whatever the bare loop's: no figure that the client
reports can show them. Absolute figures move from machine to machine; the ratios are what counts. Exit code 1 where a
limit is not met or could not be judged, or the stream client is not better than httpx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from claims import Claims

clock = time.perf_counter
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
OVER_BARE = 1.5
FLOOR_MS = 0.1
MEMORY_MB = 100
LATE_MS = 2.0
"""A server whose chunks leave later than this after they are due, in one of a hundred, has not kept its pace."""

KINDS = {"native": "sglang", "cumulative": "sglang", "chat": "openai-chat"}
Stamps = dict[int, tuple[float, list[float]]]


def event(kind: str, number: int, last: bool) -> bytes:
    """One chunk of three tokens, as long as a real one."""
    tokens = number * 3
    body: dict[str, Any]
    if kind == "chat":
        choice = {"index": 0, "delta": {"role": None, "content": " three more tokens"}, "logprobs": None}
        usage = {"prompt_tokens": 24978, "total_tokens": 24978 + tokens, "completion_tokens": tokens}
        body = {
            "id": "b8c1", "object": "chat.completion.chunk", "created": 1764547200, "model": "Qwen3.6-27B",
            "choices": [{**choice, "finish_reason": "length" if last else None, "matched_stop": None}],
            "usage": {**usage, "prompt_tokens_details": None, "reasoning_tokens": 0},
        }  # fmt: skip
    else:
        meta = {
            "id": "b8c1", "finish_reason": {"type": "length", "length": tokens} if last else None,
            "prompt_tokens": 24978, "weight_version": "default", "num_retractions": 0, "reasoning_tokens": 0,
            "completion_tokens": tokens, "cached_tokens": 0, "cached_tokens_details": None, "dp_rank": None,
        }  # fmt: skip
        times = number if kind == "cumulative" else 1
        body = {"text": " three more tokens" * times, "output_ids": [3841, 13477, 37550] * times, "meta_info": meta}
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- the server ------------------------------------------------------------------------------------------------------


def serve(kind: str, streams: int, chunks: int, rate: float, burst: bool, file: str) -> None:
    """Take all requests, send every stream's chunks in turn at the rate (0: unpaced), write the truth.

    In a burst each request has its first chunk as soon as it is read.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams + 8)
    print(listener.getsockname()[1], flush=True)
    events = [event(kind, number + 1, number == chunks - 1) for number in range(chunks)]
    events[0] = HEAD + events[0]
    events[-1] += DONE
    connections = [listener.accept()[0] for _ in range(streams)]
    poll = select.poll()
    by_fd = {}
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection, select.POLLIN)
        by_fd[connection.fileno()] = connection
    received: dict[int, float] = {}
    truth: dict[int, list[float]] = {}
    order = []
    while len(received) < streams:
        for fd, _ in poll.poll():
            head = by_fd[fd].recv(65536)
            number = int(head.partition(b"X-Stream: ")[2].partition(b"\r\n")[0])
            received[number] = clock()
            truth[number] = []
            order.append((number, by_fd[fd]))
            poll.unregister(fd)
            if burst:
                truth[number].append(clock())
                by_fd[fd].sendall(events[0])
    late = []
    due = clock() + 0.05
    gap = 1 / rate if rate else 0.0
    for data in events[1:] if burst else events:
        for number, connection in order:
            due += gap
            while gap and (left := due - clock()) > 0:
                if left > 0.0002:
                    time.sleep(left - 0.0001)
            now = clock()
            truth[number].append(now)
            late.append(now - due)
            connection.sendall(data)
    result = {"received": received, "truth": truth, "late_p99_ms": 1e3 * at(sorted(late), 0.99) if gap else 0.0}
    Path(file).write_text(json.dumps(result))
    print("sent", flush=True)
    sys.stdin.read()  # the client may still be reading


# -- the clients: each gives back its stamps and the processor time from the first request to the last chunk -----------


def payload(number: int) -> bytes:
    """A request that names its stream."""
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Stream: %d\r\nContent-Length: 2\r\n\r\n{}" % number


async def ours(kind: str, port: int, streams: int) -> tuple[Stamps, float]:
    """The stream client as specrig load drives it: decoded, counted, timed out, its own lag measured."""
    from specrig.load.slots import Done, Item, Plan, drive
    from specrig.load.stream import StreamClient, Timeouts

    client = StreamClient(f"http://127.0.0.1:{port}")
    await client.open(streams)
    items = [[Item(index=number, rid=str(number), payload=payload(number))] for number in range(streams)]
    plan = Plan(
        api=KINDS[kind], abort_path=None, timeouts=Timeouts(), slots=streams, due=None, ramp_s=None, tool_s=None
    )
    done: list[Done] = []
    numbers = iter(range(streams))
    following = lambda: next(numbers, None)  # noqa: E731
    before = time.process_time()
    client.start_lag()
    await drive(
        plan, items, client, plan.origin(), range(streams), following, done.append, asyncio.Event(), lambda: False
    )
    client.stop_lag()
    cpu = time.process_time() - before
    if wrong := [one.message for one in done if one.error is not None]:
        raise SystemExit(f"{len(wrong)} of {streams} streams failed: {wrong[0]}")
    await client.close()
    return {one.index: (one.sent or 0.0, one.decoder.t) for one in done}, cpu


async def bare(_kind: str, port: int, streams: int) -> tuple[Stamps, float]:
    """The bare Protocol loop."""
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
    before = time.process_time()
    sent = []
    for number, (transport, _) in enumerate(pairs):
        sent.append(clock())
        transport.write(payload(number))
    await asyncio.gather(*(protocol.over for _, protocol in pairs))
    cpu = time.process_time() - before
    for transport, _ in pairs:
        transport.close()
    # the last piece is [DONE]
    return {number: (sent[number], protocol.t[:-1]) for number, (_, protocol) in enumerate(pairs)}, cpu


async def with_httpx(_kind: str, port: int, streams: int) -> tuple[Stamps, float]:
    """Httpx as most tools use it: aiter_lines, json.loads."""
    import httpx

    out: Stamps = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    before = time.process_time()
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
    return out, time.process_time() - before


CLIENTS = {"bare loop": bare, "specrig": ours, "httpx": with_httpx}


def run_client(name: str, kind: str, port: int, streams: int, file: str) -> None:
    """Run one client in this process; write its stamps, the processor time it took and its peak memory."""
    import uvloop

    factory = None if name == "httpx" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        stamps, cpu = runner.run(CLIENTS[name](kind, port, streams))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.exists():  # of this program alone; the other figure is the starting process's, too
        peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    Path(file).write_text(json.dumps({"stamps": stamps, "cpu": cpu, "peak_mb": peak * 1024 / 1e6}))


# -- the comparison --------------------------------------------------------------------------------------------------


def pin(core: int) -> list[str]:
    """How to start a process on one core of its own, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[core])] if len(cores) > 1 else []


def measure(name: str, kind: str, streams: int, chunks: int, rate: float, burst: bool = False) -> dict[str, float]:
    """One client against one server, in fresh processes."""
    script = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as scratch:
        truth_file, seen_file = f"{scratch}/truth", f"{scratch}/seen"
        line = [*pin(0), *script, "--serve", kind, str(streams), str(chunks), str(rate), str(int(burst)), truth_file]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            line = [*pin(1), *script, "--client", name, kind, port, str(streams), seen_file]
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
        if len(t) == len(real):  # else packets held several chunks
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
        "cpu_s_per_million": seen["cpu"] / (streams * chunks) * 1e6,
        "peak_mb": seen["peak_mb"],
        "server_late_p99_ms": truth["late_p99_ms"],
    }


def at(ordered: list[float], share: float) -> float:
    """A percentile of sorted values; not a number of none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


class Bench:
    """The rounds of one run, and what is claimed of them."""

    def __init__(self, kind: str, rounds: int) -> None:
        self.kind = kind
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []
        self.claims = Claims()

    def round(self, name: str, label: str, *load: Any) -> dict[str, float]:
        """One round of one client."""
        got = measure(name, self.kind, *load)
        self.rows.append({"load": label, "client": name, **got})
        return got

    def compare(self, label: str, streams: int, chunks: int, rate: float, burst: bool = False) -> dict[str, Any]:
        """Rounds of the bare loop and the stream client in turn, one of httpx; medians, none of too few rounds."""
        found: dict[str, list[dict[str, float]]] = {"bare loop": [], "specrig": []}
        load = (streams, chunks, rate, burst)
        refused = 0
        while len(found["specrig"]) < self.rounds and refused <= self.rounds:
            names = ["bare loop", "specrig"][:: -1 if (len(found["specrig"]) + refused) % 2 else 1]
            pair = {name: self.round(name, label, *load) for name in names}
            if max(got["server_late_p99_ms"] for got in pair.values()) > LATE_MS:
                refused += 1
                continue
            for name, got in pair.items():
                found[name].append(got)
        print(f"\n{label}, {streams} streams of {chunks} chunks: {len(found['specrig'])} rounds", end="")
        print(f", {refused} more in which the server was late" if refused else "", flush=True)
        print(f"  {'':<10}{'chunks/s':>10}{'lag p50':>10}{'p99 ms':>10}{'(of rounds)':>16}", end="")
        print(f"{'TTFT err p50':>14}{'CPU s/1M':>10}{'peak MB':>9}")
        medians = {}
        for name, rounds in {**found, "httpx": [self.round("httpx", label, *load)]}.items():
            if not rounds:
                continue
            got = medians[name] = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
            got["peak_mb"] = max(row["peak_mb"] for row in rounds)
            p99 = [row["lag_p99_ms"] for row in rounds]
            spread = f"{min(p99):.2f}..{max(p99):.2f}"
            print(f"  {name:<10}{got['rate']:>10,.0f}{got['lag_p50_ms']:>10.3f}{got['lag_p99_ms']:>10.3f}", end="")
            print(
                f"{spread:>16}{got['ttft_error_p50_ms']:>14.3f}{got['cpu_s_per_million']:>10.1f}{got['peak_mb']:>9.0f}"
            )
        return medians if len(found["specrig"]) == self.rounds else {}

    def beside_bare(self, title: str, medians: dict[str, Any], key: str, unit: str, floor: float = 0.0) -> None:
        """One figure of the stream client, at most 1.5 times the bare loop's or the floor."""
        if not medians:
            self.claims.add(title, None, unit, OVER_BARE, False, "the server did not keep its pace")
            return
        value, other = medians["specrig"][key], medians["bare loop"][key]
        limit = max(OVER_BARE * other, floor)
        self.claims.add(f"{title}, bare {other:.3g} ({value / other:.2f}x)", value, unit, round(limit, 4), False)

    def beside_httpx(self, label: str, medians: dict[str, Any], *keys: str) -> None:
        """Figures that are better than httpx's."""
        for key in keys if medians else ():
            share = medians["specrig"][key] / medians["httpx"][key]
            self.claims.add(f"{label}: {key}, against httpx", share, "x", 1, False)


def main() -> int:
    """Compare; 1 where a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="native", help="of the events; cumulative ones grow")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each paced round")
    parser.add_argument("--rates", type=int, nargs="+", default=[20_000, 60_000], help="chunks a second")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.serve:
        kind, *numbers, file = arguments.serve
        serve(kind, int(numbers[0]), int(numbers[1]), float(numbers[2]), numbers[3] == "1", file)
        return 0
    if arguments.client:
        name, kind, port, streams, file = arguments.client
        run_client(name, kind, int(port), int(streams), file)
        return 0
    bench = Bench(arguments.kind, arguments.rounds)
    streams = arguments.streams
    burst = bench.compare(f"burst of {streams}", streams, 4, 0, True)
    paced = {
        rate: bench.compare(f"{rate:,} chunks/s", streams, max(8, int(arguments.seconds * rate / streams)), rate)
        for rate in arguments.rates
    }
    unpaced = bench.compare("not paced", 64, 1000, 0)
    print(f"\nlimits: {OVER_BARE}x the bare loop's median; times under {FLOOR_MS} ms are met in any case")
    bench.beside_bare(f"TTFT error p50, burst of {streams}", burst, "ttft_error_p50_ms", "ms", FLOOR_MS)
    bench.beside_httpx(f"burst of {streams}", burst, "ttft_error_p50_ms")
    for rate, medians in paced.items():
        label = f"{rate:,} chunks/s"
        bench.beside_bare(f"{label}: lag p99", medians, "lag_p99_ms", "ms", FLOOR_MS)
        bench.beside_bare(f"{label}: CPU s per 1M chunks", medians, "cpu_s_per_million", "s")
        bench.beside_httpx(label, medians, "lag_p99_ms", "cpu_s_per_million")
    for label, medians in {"not paced, 64 streams": unpaced, f"paced, {streams} streams": paced[max(paced)]}.items():
        peak = medians["specrig"]["peak_mb"] if medians else None
        note = "" if medians else "the server did not keep its pace"
        bench.claims.add(f"{label}: peak memory", peak, "MB", MEMORY_MB, False, note)
    rows = bench.claims.rows
    if arguments.json:
        out = {"schema": 2, "kind": arguments.kind, "rows": bench.rows, "claims": rows}
        Path(arguments.json).write_text(json.dumps(out, indent=1) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
