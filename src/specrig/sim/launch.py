"""Start and end of a simulated server: ranks first, then the loop, the listener, the tokenizer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrig.errors import UsageError
from specrig.sim.config import Config, build
from specrig.sim.physics import true_to_scale
from specrig.sim.ranks import Rank, RankError, start, stop

if TYPE_CHECKING:
    from specrig.sim.api import Server
    from specrig.sim.http import Connection


class _Log:
    """SGLang-like lines, or JSON lines for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json

    def __call__(self, event: str, text: str, **fields: Any) -> None:
        if self._json:
            line = json.dumps({"event": event, "at": time.time(), "text": text, **fields})
        else:
            line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}"
        with contextlib.suppress(BrokenPipeError):
            print(line, flush=True)


def launch(args: argparse.Namespace) -> int:
    """Run a server until it is told to stop.

    Returns:
        0 after SIGTERM or SIGINT, 1 where a rank failed or died.

    Raises:
        UsageError: flags that do not work, or a port that is taken.
    """
    begun = time.monotonic()
    config = true_to_scale(build(args))
    if config.truth is not None:
        _writable(config.truth)
    log = _Log(as_json=config.json_log)
    if config.time_scale > args.sim_time_scale:
        log(
            "scale",
            f"time scale {config.time_scale:.3f} instead of {args.sim_time_scale:g}: a decode step would be under "
            f"{config.min_step_s * 1000:g} ms of wall time; --sim-allow-fast takes it as it is",
        )
    log("start", f"specrig sim (simulated, not a GPU): {config.command}", simulated=True)
    if importlib.util.find_spec("setproctitle") is None:
        log("titles", "setproctitle is not installed (extra specrig[sim]): the ranks keep the name of this process")
    fault = config.faults.get("wrong-gpus")
    try:
        ranks = start(config.tp_size, config.gpu_ids, int(fault.number) if fault is not None else 0)
    except RankError as error:
        log("failed", f"Scheduler hit an exception: {error}")
        print(f"specrig sim: Scheduler hit an exception: {error}", file=sys.stderr)
        return 1
    try:
        return _serve(config, ranks, log, begun)
    finally:
        stop(ranks)


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    except OSError as error:
        raise UsageError(
            f"--sim-truth {path} can't be written: {os.strerror(error.errno or 0)}; give a file in a folder that this "
            "user may write"
        ) from error


def _serve(config: Config, ranks: list[Rank], log: _Log, begun: float) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(config, ranks, log, begun))


async def _main(config: Config, ranks: list[Rank], log: _Log, begun: float) -> int:
    from specrig.sim.api import Server
    from specrig.sim.http import Connection

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[int, str]] = loop.create_future()

    def end(code: int, why: str) -> None:
        if not ended.done():
            ended.set_result((code, why))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0, f"{signal.Signals(number).name}: stopping")
    watched = [_watch(loop, rank, end) for rank in ranks]
    server = Server(config, ranks, begun)
    connections: set[Connection] = set()
    try:
        listener = await loop.create_server(
            lambda: Connection(server, time.monotonic, connections),
            config.host,
            config.port,
            backlog=2048,
            reuse_port=False,
        )
    except OSError as error:
        # A name that does not resolve has a negative number, which strerror does not know.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise UsageError(
            f"can't listen on {config.host}:{config.port}: {why}; is another server on this port?"
        ) from error
    server.port = listener.sockets[0].getsockname()[1]
    opening = loop.create_task(_open(server, config, log, end))
    code, why = await ended
    server.status = "stopping"
    log("stop" if code == 0 else "died", why)
    if code != 0:
        print(f"specrig sim: {why}", file=sys.stderr)
    opening.cancel()
    listener.close()
    if server.scheduler is not None:
        server.scheduler.close()
    for connection in list(connections):
        connection.close()
    for descriptor in watched:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    await asyncio.sleep(0)
    return code


def _watch(loop: asyncio.AbstractEventLoop, rank: Rank, end: Any) -> int:
    """Call `end` when the rank dies, unless the whole server was told to stop at that moment."""
    descriptor = os.pidfd_open(rank.pid)

    def died() -> None:
        loop.remove_reader(descriptor)
        loop.call_later(0.15, end, 1, f"{rank.title} (pid {rank.pid}) died; the server goes down with it")

    if select.select([descriptor], [], [], 0)[0]:
        end(1, f"{rank.title} (pid {rank.pid}) died during start")
    else:
        loop.add_reader(descriptor, died)
    return descriptor


async def _open(server: Server, config: Config, log: _Log, end: Any) -> None:
    """Load the tokenizer and become ready; whatever fails ends the server."""
    try:
        await _load(server, config, log)
    except Exception as error:
        end(1, f"the server can't start: {error}")


async def _load(server: Server, config: Config, log: _Log) -> None:
    from specrig.sim.scheduler import Scheduler
    from specrig.sim.text import vocabulary
    from specrig.tokens.tokenizer import load

    loop = asyncio.get_running_loop()
    tokenizer = await asyncio.to_thread(load, str(config.args["tokenizer_path"]))
    words = await asyncio.to_thread(vocabulary, tokenizer)
    if tokenizer.has_template:
        await asyncio.to_thread(tokenizer.chat_ids, [{"role": "user", "content": "warm"}])

    def kill_rank() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.ranks[0].pid, signal.SIGKILL)

    server.tokenizer, server.words = tokenizer, words
    if config.faults.get("never-ready") is not None:
        log("loading", "Load weight begin.")
        return
    if config.startup_s > 0:
        log("loading", f"Load weight begin. ({config.startup_s:g} s)")
        await asyncio.sleep(config.startup_s)
    server.scheduler = Scheduler(config, words, loop, kill_rank)
    server.startup_s = time.monotonic() - server.launched
    server.status = "ready"
    dies = config.faults.get("rank-dies")
    if dies is not None:
        loop.call_later(dies.number, kill_rank)
    log(
        "ready",
        f"The server is fired up and ready to roll! http://{config.host}:{server.port} "
        f"({config.method.label}, tp {config.tp_size}, {server.startup_s:.2f} s)",
        port=server.port,
        pid=os.getpid(),
        simulated=True,
        sim_time_scale=config.time_scale,
        ranks=[{"title": rank.title, "pid": rank.pid, "node": rank.node} for rank in server.ranks],
        seconds=round(server.startup_s, 3),
    )
