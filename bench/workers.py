"""Worker processes of a load: how chunks a second grow with them, and what they cost.

A source of several processes behind one port sends streams as fast as they are read. One process reads them first, then
several do. The claim, at least 85 % of N times the rate of one, is judged where there are four processors or more, half
of them for the source. The cost is judged everywhere: processor seconds per million chunks with two workers, the load's
own process counted, at most 1 / 0.85 of one process's. Exit code 1 where a claim is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from claims import Claims
from load_client import DONE, HEAD, event, payload

SHARE = 85
"""Percent."""
STREAMS = 64


def serve(port: int, chunks: int) -> None:
    """Answer every request with the same stream, as fast as the client reads it."""
    import uvloop

    answer = HEAD + b"".join(event("native", number + 1, number == chunks - 1) for number in range(chunks)) + DONE

    class Source(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, _data: bytes) -> None:
            self.transport.write(answer)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(1024)
            print("ready", flush=True)
            server = await loop.create_server(Source, sock=listener)
            await server.serve_forever()

    uvloop.run(main())


def cpu_s(pids: list[int]) -> float:
    """Processor seconds that these processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def make(url: str, count: int, requests: int) -> tuple[float, float]:
    """Make the requests with so many processes; the seconds and processor seconds they took, start-up left out."""
    from specrig.load.slots import Done, Item, Plan, drive
    from specrig.load.stream import StreamClient, Timeouts
    from specrig.load.workers import Workers

    plan = Plan(
        api="sglang", abort_path=None, timeouts=Timeouts(), slots=STREAMS, due=None, ramp_s=None, tool_s=None
    )  # fmt: skip
    items = [[Item(index=number, rid=str(number), payload=payload(number))] for number in range(requests)]
    good = 0

    def give(done: Done) -> None:
        nonlocal good
        good += done.error is None

    if count > 1:
        workers = Workers(url, count=count)
        await workers.prepare(plan, items, count, STREAMS)
        pids = [os.getpid(), *workers.pids]
        begun, before = time.perf_counter(), cpu_s(pids)
        await workers.run(plan.origin(), give, lambda: False)
        seconds, cpu = time.perf_counter() - begun, cpu_s(pids) - before
        workers.close()
    else:
        client = StreamClient(url)
        await client.open(STREAMS)
        numbers = iter(range(requests))
        pids = [os.getpid()]
        begun, before = time.perf_counter(), cpu_s(pids)
        await drive(
            plan, items, client, plan.origin(), range(STREAMS), lambda: next(numbers, None), give, asyncio.Event(),
            lambda: False,
        )  # fmt: skip
        seconds, cpu = time.perf_counter() - begun, cpu_s(pids) - before
        await client.close()
    if good != requests:
        raise SystemExit(f"bench: {good} of {requests} streams came whole")
    return seconds, cpu


def client(url: str, count: int, requests: int) -> None:
    """One measurement in this process and its workers; prints seconds and processor seconds."""
    import uvloop

    print(json.dumps(uvloop.run(make(url, count, requests))))


def measure(count: int, sources: int, chunks: int, requests: int) -> tuple[float, float]:
    """Chunks a second and processor seconds per million chunks of so many client processes."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        line = [sys.executable, __file__, "--serve", str(port), str(chunks)]
        started = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(sources)]
        try:
            for source in started:
                assert source.stdout is not None
                source.stdout.readline()
            line = [sys.executable, __file__, "--client", f"http://127.0.0.1:{port}", str(count), str(requests)]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
        finally:
            for source in started:
                source.kill()
                source.communicate()
    if done.returncode:
        raise SystemExit(f"bench: {count} processes ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    seconds, cpu = json.loads(done.stdout)
    return requests * chunks / seconds, cpu / (requests * chunks) * 1e6


def main() -> int:
    """Compare one process with several; 1 where a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=1500, help="streams for each client process")
    parser.add_argument("--chunks", type=int, default=512, help="of each stream")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), int(arguments.serve[1]))
        return 0
    if arguments.client:
        client(arguments.client[0], int(arguments.client[1]), int(arguments.client[2]))
        return 0
    processors = len(os.sched_getaffinity(0))
    most = max(2, processors // 2)
    counts = sorted({1, 2, most})
    rates: dict[int, float] = {}
    costs: dict[int, float] = {}
    for count in counts:
        tries = [measure(count, most, arguments.chunks, arguments.requests * count) for _ in range(arguments.repeat)]
        rates[count] = max(rate for rate, _ in tries)
        costs[count] = min(cost for _, cost in tries)
        print(f"  {count} client processes{rates[count]:>12,.0f} chunks/s{costs[count]:>8.2f} CPU s per 1M chunks")
    claims = Claims()
    for count in counts[1:]:
        share = 100 * rates[count] / (count * rates[1])
        note = "" if processors >= 4 else f"{processors} processors"
        claims.add(f"{count} processes: chunks/s, of {count} times one's", share, "%", SHARE, True, note)
    claims.add("2 processes: chunks a processor second, of one's", 100 * costs[1] / costs[2], "%", SHARE, True)
    if arguments.json:
        rows = [{"processes": n, "chunks_per_s": rates[n], "cpu_s_per_million": costs[n]} for n in counts]
        out = {"schema": 1, "rows": rows, "claims": claims.rows}
        Path(arguments.json).write_text(json.dumps(out, indent=1) + "\n")
    return 1 if any(row["met"] is False for row in claims.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
