"""Worker processes of ``specrig load``, seen from the process that starts them.

They share one cursor over a cell's sessions, so the next free slot of any of them takes the next session, as in one
process. All stamps are taken by workers from the one monotonic clock of the machine; merging is putting together.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrig.errors import SpecrigError
from specrig.load.api import make_decoder
from specrig.load.slots import Done, Item, Plan
from specrig.load.stream import Lag
from specrig.load.wire import Share, receive, send

STREAMS_EACH = 64
"""Streams that one process serves before another is worth its cost: far from what a core can stamp in time."""


def worker_count(asked: int | None, streams: int) -> int:
    """How many processes make a cell's requests.

    Args:
        asked: by the user; null = as many as help: one for every 64 streams, on half of the processors at most (the
            others are the server's, and this process's), one where there are fewer than four.
        streams: how many requests the cell has at once.

    Returns:
        At least 1; 1 is the load's own process.
    """
    if asked is None:
        processors = len(os.sched_getaffinity(0))
        asked = min(streams // STREAMS_EACH, processors // 2) if processors >= 4 else 1
    return max(1, min(asked, streams))


class WorkerError(SpecrigError):
    """A worker process ended before it should have."""


@dataclass(kw_only=True)
class _Process:
    number: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    took: list[int] = field(default_factory=list)
    streams: int = 0
    tokens: int = 0
    done_tokens: int = 0


class Workers:
    """The worker processes of a run; use from one running event loop."""

    def __init__(self, url: str, *, count: int, api_key: str | None = None, ca_file: str | None = None) -> None:
        """Start them; they get ready while prompts are made.

        Args:
            url: of the server.
            count: how many processes.
            api_key: as for :class:`specrig.load.stream.StreamClient`.
            ca_file: as there.

        Raises:
            WorkerError: they cannot be started.
        """
        self._setup = (url, api_key, ca_file)
        self._count = count
        self._payloads = os.memfd_create("specrig-payloads")
        # A memfd's own descriptor has no lock on its offset; one that was opened has.
        named = os.memfd_create("specrig-cursor")
        self._cursor = os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC)
        os.close(named)
        self._all: list[_Process] = []
        self._busy: list[_Process] = []
        self._sessions: list[list[int]] = []
        self._api = ""
        try:
            for number in range(count):
                self._all.append(self._spawn(number))
        except BaseException:
            self.close()
            raise

    def _spawn(self, number: int) -> _Process:
        ours, theirs = socket.socketpair()
        passed = (theirs.fileno(), self._payloads, self._cursor)
        command = [sys.executable, "-P", "-m", "specrig.load.worker", *map(str, passed), str(os.getpid())]
        try:
            # Not in the terminal's group: Ctrl-C is this process's to handle.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                process_group=0,
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"cannot start a worker process: {error}; use --workers 1") from error
        finally:
            theirs.close()
        return _Process(number=number, process=process, socket=ours)

    def _gone(self, worker: _Process) -> str:
        """How a worker ended that has closed its socket, in one line."""
        try:
            code = worker.process.wait(5)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        assert worker.process.stderr is not None
        words = worker.process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return ": ".join([f"worker process {worker.number + 1} of {self._count} {how}", *words])

    async def _hear(self, worker: _Process) -> tuple[Any, ...]:
        assert worker.reader is not None
        message = await receive(worker.reader)
        if message is None:
            raise WorkerError(self._gone(worker))
        return message

    async def prepare(self, plan: Plan, sessions: Sequence[Sequence[Item]], count: int, connections: int) -> None:
        """Hand a cell out: payloads written, connections open; nothing is sent yet.

        Args:
            plan: how its requests are made.
            sessions: its requests; their payloads are moved out.
            count: how many of the workers make them.
            connections: how many streams there are at once, over all of them.

        Raises:
            OSError: a worker cannot connect to the server.
            WorkerError: a worker ended.
        """
        try:
            rows = self._write(sessions)
            self._fill_cursor(len(sessions))
        except OSError as error:
            raise WorkerError(f"no memory to hand the prompts to worker processes: {error}; use --workers 1") from error
        self._sessions = [[item.index for item in session] for session in sessions]
        self._api = plan.api
        self._busy = []
        for number in range(count):
            worker = self._all[number]
            if worker.process.poll() is not None:
                self._end(worker)
                worker = self._all[number] = self._spawn(number)
            self._busy.append(worker)
        shares = [
            Share(
                plan=plan,
                sessions=rows,
                slots=range(number, plan.slots or 0, count),
                own=range(number, len(sessions), count) if plan.slots is None else None,
                connections=len(range(number, connections, count)),
            )
            for number in range(count)
        ]
        answers = await asyncio.gather(*map(self._hand, self._busy, shares), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer if isinstance(answer, BaseException) else OSError(answer)

    async def _hand(self, worker: _Process, share: Share) -> str | None:
        """Give a worker its share; why it cannot connect, if it cannot."""
        if worker.writer is None:
            worker.reader, worker.writer = await asyncio.open_unix_connection(sock=worker.socket)
            send(worker.writer, *self._setup)
            await self._hear(worker)
        worker.took.clear()
        send(worker.writer, "cell", share)
        _, problem = await self._hear(worker)
        return str(problem) if problem is not None else None

    def _write(self, sessions: Sequence[Sequence[Item]]) -> list[list[tuple[int, str, int, int]]]:
        """Move the payloads to the file that workers map; where each begins and ends."""
        os.ftruncate(self._payloads, 0)
        os.lseek(self._payloads, 0, os.SEEK_SET)
        at = 0
        rows = []
        with os.fdopen(self._payloads, "wb", closefd=False) as file:
            for session in sessions:
                row = []
                for item in session:
                    size = file.write(item.payload)
                    row.append((item.index, item.rid, at, at + size))
                    at += size
                    item.payload = b""
                rows.append(row)
        return rows

    def _fill_cursor(self, count: int) -> None:
        os.ftruncate(self._cursor, 0)
        os.pwrite(self._cursor, struct.pack(f"<{count}I", *range(count)), 0)
        os.lseek(self._cursor, 0, os.SEEK_SET)

    async def run(
        self, origin: float, give: Callable[[Done], None], over: Callable[[], bool]
    ) -> tuple[Lag, str | None]:
        """Make the requests of the cell that was prepared.

        Args:
            origin: from :meth:`specrig.load.slots.Plan.origin`.
            give: called with each request that ended. Those that a worker had in flight when it was killed are among
                them, as failed.
            over: asked after each; true when no further request may be made.

        Returns:
            The lag of all loops together, and how a worker ended early, if one did: no request was begun after that.
        """
        lags: list[tuple[list[float], float, float]] = []
        lost: list[str] = []
        told = False

        def tell() -> None:
            nonlocal told
            if not told and (lost or over()):
                told = True
                self._send_all("over")

        async def collect(worker: _Process) -> None:
            ended: set[int] = set()
            try:
                while True:
                    kind, *rest = await self._hear(worker)
                    if kind == "took":
                        worker.took.append(rest[0])
                    elif kind == "tick":
                        worker.streams, worker.tokens = rest
                    elif kind == "done":
                        ended.add(rest[0].index)
                        worker.done_tokens += rest[0].decoder.output_tokens
                        give(rest[0])
                        tell()
                    else:
                        lags.append((rest[0], rest[1], rest[2]))
                        return
            except WorkerError as error:
                lost.append(str(error))
                for session in worker.took:
                    if left := [index for index in self._sessions[session] if index not in ended]:
                        give(self._lost(left[0], str(error)))
                tell()
            finally:
                worker.streams = worker.tokens = worker.done_tokens = 0

        self._send_all("go", origin)
        async with asyncio.TaskGroup() as group:
            for worker in self._busy:
                group.create_task(collect(worker))
        os.ftruncate(self._payloads, 0)
        late = [sample for samples, _, _ in lags for sample in samples]
        lag = Lag.of(late, max((lag[1] for lag in lags), default=0.0), max((lag[2] for lag in lags), default=0.0))
        return lag, "; ".join(lost) or None

    def _lost(self, index: int, why: str) -> Done:
        return Done(
            index=index,
            due=None,
            tool_s=None,
            sent=None,
            status=None,
            error="worker",
            message=why,
            decoder=make_decoder(self._api),
        )

    def _send_all(self, *message: Any) -> None:
        for worker in self._busy:
            if worker.writer is not None:
                send(worker.writer, *message)

    def abort_streams(self, message: str) -> None:
        """End every stream now, keeping what arrived; later ones end before they are sent.

        Args:
            message: why, for the records.
        """
        self._send_all("stop", message)

    def in_flight(self) -> tuple[int, int]:
        """How many streams were open half a second ago, and how many tokens they had brought that no record has yet."""
        return (
            sum(worker.streams for worker in self._busy),
            sum(max(0, worker.tokens - worker.done_tokens) for worker in self._busy),
        )

    @property
    def pids(self) -> list[int]:
        """The workers' processes."""
        return [worker.process.pid for worker in self._all]

    def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            self._end(worker)
        self._all, self._busy = [], []
        os.close(self._payloads)
        os.close(self._cursor)

    def _end(self, worker: _Process) -> None:
        if worker.writer is not None:
            worker.writer.close()
        else:
            worker.socket.close()
        worker.process.kill()
        worker.process.wait()
        if worker.process.stderr is not None:
            worker.process.stderr.close()
