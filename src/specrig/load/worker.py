"""A worker process of ``specrig load``: makes its share of a cell's requests, and hands each back as it ends.

``python -m specrig.load.worker`` is started by :mod:`specrig.load.workers` alone. It leaves signals to the process that
started it, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys

import uvloop

from specrig.load.slots import Done, Item, drive
from specrig.load.stream import StreamClient
from specrig.load.wire import Share, receive, send

TICK_S = 0.5
_PR_SET_PDEATHSIG = 1
_INDEX = struct.Struct("<I")


class _Worker:
    def __init__(self, client: StreamClient, writer: asyncio.StreamWriter, payloads: int, cursor: int) -> None:
        self.client = client
        self.writer = writer
        self.payloads = payloads
        self.cursor = cursor
        self.stop = asyncio.Event()
        self.over = False
        self.tokens = 0
        self.share: Share
        self.sessions: list[list[Item]] = []

    async def prepare(self, share: Share) -> None:
        """Have a cell's requests at hand and its connections open, before its clock starts."""
        self.share, self.over, self.tokens = share, False, 0
        size = os.fstat(self.payloads).st_size
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        view = memoryview(mmap.mmap(self.payloads, size, flags=flags, prot=mmap.PROT_READ))
        self.sessions = [
            [Item(index=index, rid=rid, payload=view[begin:end]) for index, rid, begin, end in session]
            for session in share.sessions
        ]
        problem = None
        try:
            await self.client.open(share.connections)
        except OSError as error:  # a timeout is one, too
            problem = str(error) or "no answer in 10 s"
        send(self.writer, "opened", problem)

    def _following(self) -> int | None:
        number: int | None
        if self._own is not None:
            number = next(self._own, None)
        else:
            # One read at a time: the kernel locks the offset of an opened file that several processes share.
            raw = os.read(self.cursor, _INDEX.size)
            number = _INDEX.unpack(raw)[0] if raw else None
        if number is not None:
            send(self.writer, "took", number)
        return number

    def _give(self, done: Done) -> None:
        self.tokens += done.decoder.output_tokens
        send(self.writer, "done", done)

    async def run(self, origin: float) -> None:
        """Make the requests."""
        share = self.share
        self._own = iter(share.own) if share.own is not None else None
        self.client.start_lag()
        ticking = asyncio.create_task(self._tick())
        await drive(
            share.plan,
            self.sessions,
            self.client,
            origin,
            share.slots,
            self._following,
            self._give,
            self.stop,
            lambda: self.over or self.stop.is_set(),
        )
        ticking.cancel()
        self.sessions = []
        send(self.writer, "end", *self.client.stop_lag_samples())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            streams, tokens = self.client.in_flight()
            send(self.writer, "tick", streams, self.tokens + tokens)


async def _serve(connection: socket.socket, payloads: int, cursor: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    setup = await receive(reader)
    if setup is None:
        return
    url, api_key, ca_file = setup
    worker = _Worker(StreamClient(url, api_key=api_key, ca_file=ca_file), writer, payloads, cursor)
    send(writer, "ready")
    async with asyncio.TaskGroup() as group:
        while (message := await receive(reader)) is not None:
            kind, *rest = message
            if kind == "cell":
                await worker.prepare(*rest)
            elif kind == "go":
                group.create_task(worker.run(*rest))
            elif kind == "over":
                worker.over = True
            elif kind == "stop":
                worker.stop.set()
                worker.client.abort_streams(*rest)
        os._exit(0)  # the load has gone: nobody is left to hand anything to


def main() -> None:
    """Serve the process that passed these descriptors until it closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection, payloads, cursor, parent = (int(argument) for argument in sys.argv[1:])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(socket.socket(fileno=connection), payloads, cursor))
    except Exception as error:
        problem = error
        while isinstance(problem, ExceptionGroup):
            problem = problem.exceptions[0]
        sys.exit(f"{type(problem).__name__}: {problem}")


if __name__ == "__main__":
    main()
