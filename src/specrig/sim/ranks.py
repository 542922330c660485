"""One process per tensor-parallel rank, and one for the detokenizer, as SGLang has them.

They are forked before anything heavy is imported, hold their GPU's node, and do nothing else: the simulation of the
schedule is in the main process. They die with their parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rank:
    """A live child: its title, pid, and the node it opened (None without devices)."""

    title: str
    pid: int
    node: str | None


class RankError(Exception):
    """A rank could not start; the text is its last words."""


def titles(tp_size: int) -> list[str]:
    """The process titles of the ranks."""
    if tp_size == 1:
        return ["sglang::scheduler"]
    return [f"sglang::scheduler_TP{rank}" for rank in range(tp_size)]


def _set_title(title: str) -> None:
    try:
        import setproctitle
    except ImportError:
        return
    setproctitle.setproctitle(title)


def _child(title: str, parent: int, report: int, work: Callable[[], str | None]) -> None:
    """The life of a child; never returns."""
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _set_title(title)
        try:
            node = work()
        except Exception as error:
            os.write(report, f"E{error}".encode())
            os._exit(1)
        os.write(report, f"K{node or ''}".encode())
        os.close(report)
        while True:
            signal.pause()
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _fork(title: str, work: Callable[[], str | None]) -> Rank:
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(title, parent, write, work)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        words = stream.read().decode("utf-8", "replace")
    if not words.startswith("K"):
        os.waitpid(pid, 0)
        raise RankError(f"{title}: {words[1:] or 'died without a word'}")
    return Rank(title=title, pid=pid, node=words[1:] or None)


def start(tp_size: int, gpu_ids: list[int] | None, shift: int = 0) -> list[Rank]:
    """Fork the ranks and the detokenizer.

    Args:
        tp_size: how many ranks.
        gpu_ids: each rank's CUDA index; None opens no devices.
        shift: a fault, see `specrig.sim.devices.open_gpu`.

    Returns:
        The ranks in order, then the detokenizer.

    Raises:
        RankError: one could not start; those before it are gone again.
    """

    def opening(gpu_id: int) -> Callable[[], str | None]:
        def work() -> str | None:
            from specrig.sim.devices import open_gpu

            path, _descriptor = open_gpu(gpu_id, shift)
            return path

        return work

    started: list[Rank] = []
    try:
        for number, title in enumerate(titles(tp_size)):
            started.append(_fork(title, opening(gpu_ids[number]) if gpu_ids is not None else lambda: None))
        started.append(_fork("sglang::detokenizer", lambda: None))
    except RankError:
        stop(started)
        raise
    return started


def stop(ranks: list[Rank]) -> None:
    """Kill and reap what still lives."""
    for rank in ranks:
        try:
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
