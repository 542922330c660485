"""Run a launch's cells into a run folder: what ``specrig load`` does.

The first interrupt ends the cell that runs and keeps every finished one; the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import platform
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from specrig import __version__
from specrig.engine import tokencheck
from specrig.engine.tokencheck import TokenizerCheck
from specrig.errors import GateError, UsageError
from specrig.facts import serverinfo
from specrig.load.cell import Context, connections, run_cell
from specrig.load.checks import asked_for, verdict
from specrig.load.stream import StreamClient, Timeouts, clock
from specrig.load.workers import Workers, worker_count
from specrig.model.cell import Cell
from specrig.model.record import CellRow, Request
from specrig.model.sweep import Sweep
from specrig.runs.folder import RunFolder, utc_now
from specrig.runs.lines import encoded
from specrig.tokens.budget import Limits
from specrig.tokens.prompts import notes, texts
from specrig.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specrig.engine.client import EngineClient

_OWN_FILES = 64
"""Files of the run, sockets of control calls, libraries: what a load has open beside its streams."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        url: the server.
        cells: in the order they run.
        launch, block: which start of a server this is.
        profile: the served profile, where it is one.
        base: the folder that a sweep's .jsonl prompts are relative to.
        tokenizer: the model's; null = prompts have their own length, see docs/load.md.
        limits: what the server can take; null = not checked.
        info: the server's own report, null where it has none.
        models, model_info: what else it says of itself: the rows of /v1/models, and /model_info where it has that.
        workers: how many processes make a cell's requests; null = as many as help.
    """

    url: str
    cells: Sequence[Cell]
    launch: int
    block: int
    profile: str | None
    tokenizer: Tokenizer | None
    control: EngineClient
    timeouts: Timeouts
    base: Path | None = None
    api_key: str | None = None
    ca_file: str | None = None
    limits: Limits | None = None
    headroom: int = 0
    info: dict[str, Any] | None = None
    models: Sequence[dict[str, Any]] = ()
    model_info: dict[str, Any] | None = None
    keep_text: bool = False
    workers: int | None = None


TICK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What to show while it runs; every call is cheap and may be left out.

    Attributes:
        cell_started: number from 1, how many in all, the cell.
        request_done: the record of a request.
        cell_done: its row.
        tick: twice a second, how many streams are open and the tokens they have brought so far.
    """

    cell_started: Callable[[int, int, Cell], None] | None = None
    request_done: Callable[[Request], None] | None = None
    cell_done: Callable[[CellRow], None] | None = None
    tick: Callable[[int, int], None] | None = None


def describe(
    sweep: Sweep, cells: Sequence[Cell], tokenizer: Tokenizer | None, reason: str | None, base: Path | None = None
) -> dict[str, Any]:
    """The manifest of a new run.

    Args:
        sweep: what is run.
        cells: its cells.
        tokenizer: the tokenizer of the prompts; None = they have their own length.
        reason: why, in the user's words.
        base: the folder that a sweep's .jsonl prompts are relative to.

    Returns:
        The manifest's fields as far as they are known before the server is asked.
    """
    return {
        "name": sweep.name,
        "sweep": sweep.as_dict(),
        "reason": reason,
        "by": f"{_user()}@{socket.gethostname()}",
        "versions": {"specrig": __version__, "python": platform.python_version(), "kernel": platform.release()},
        "engine": {"kind": "unknown", "time_scale": None, "hardware": "unknown"},
        "placements": {},
        "host_facts": None,
        "model": {"name": sweep.model, "tokenizer": tokenizer.revision if tokenizer is not None else None},
        "cells": [msgspec.to_builtins(cell) for cell in cells],
        "corpora": texts(cells, base),
        "prompts": list(notes(tokenizer, cells, base)),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def engine_facts(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """What answered, as the manifest says it: kind, time scale, hardware, version.

    Args:
        info: ``/server_info``; None where the server has none.
    """
    if info is None:
        return {"kind": "openai-compatible", "time_scale": None, "hardware": "unknown"}
    if info.get("simulated"):
        return {
            "kind": "simulated",
            "time_scale": info.get("sim_time_scale"),
            "hardware": "simulated",
            "version": info.get("version"),
        }
    device = info.get("device")
    hardware = "gpu" if device == "cuda" else device if device == "cpu" else "unknown"
    return {"kind": "sglang", "time_scale": None, "hardware": hardware, "version": info.get("version")}


def run_job(run: RunFolder, job: Job, progress: Progress | None = None) -> tuple[list[CellRow], int | None]:
    """Measure a job's cells into a run folder; the caller holds the folder's lock.

    Args:
        run: the run.
        job: what to run.
        progress: what to show.

    Returns:
        The rows of the cells that ended, and the signal that ended it early, if one did.

    Raises:
        GateError: the server is not the one the sweep asks for, or its tokenizer is not the prompts'.
        SpecrigError: a result could not be written; finished cells are kept.
    """
    if job.info is not None and job.cells:
        asked = asked_for(job.cells[0], job.info)
        if asked.ok is False:
            raise GateError(f"{job.url}: {verdict([asked])}; nothing was measured")
    checked = _check_tokenizer(job)
    if checked is not None and checked.ok is False:
        raise GateError(f"{job.url}: {checked.message}; nothing was measured")
    _allow_files(max((connections(cell) for cell in job.cells), default=0))
    t0_unix = _enter_launch(run, job, checked)
    run.set_aside({(cell.id, job.launch) for cell in job.cells})
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(run, job, progress or Progress(), t0_unix))


def _allow_files(count: int) -> None:
    """See to it that this process may have so many connections, beside its own files.

    Raises:
        UsageError: it may not.
    """
    wanted = count + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UsageError(
            f"{count} connections at once need {wanted} open files and this process may have {hard}; raise the limit "
            f"(ulimit -Hn {wanted}), or lower the sweep's concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_tokenizer(job: Job) -> TokenizerCheck | None:
    """The server's tokenizer against the prompts'; None where there is none, or nothing to send."""
    if job.tokenizer is None or not job.cells:
        return None
    first = job.cells[0]
    return tokencheck.compare(job.control, job.tokenizer, model=first.model, thinking=first.sampling.thinking)


def _enter_launch(run: RunFolder, job: Job, checked: TokenizerCheck | None) -> float:
    """Note the launch in the manifest; a launch that goes on keeps its clock's origin."""
    origin = time.time()

    def change(manifest: dict[str, Any]) -> None:
        nonlocal origin
        entries = manifest.setdefault("launches", [])
        entry = next((item for item in entries if item.get("launch") == job.launch), None)
        if entry is None:
            entry = {"launch": job.launch, "gates": []}
            entries.append(entry)
        if isinstance(entry.get("t0_unix"), int | float):
            origin = float(entry["t0_unix"])
        entry.pop("noted", None)  # whoever started it has to see this end, too
        entry.update(
            profile=job.profile,
            block=job.block,
            t0_unix=origin,
            server_info=job.info,
            models=list(job.models),
            model_info=job.model_info,
            server_info_summary=serverinfo.summary(job.info, list(job.models), job.model_info),
            tokenizer_check=None if checked is None else msgspec.to_builtins(checked),
        )
        note_unlike(manifest)
        manifest["engine"] = engine_facts(job.info)
        manifest["label"] = "running"

    run.update_manifest(change)
    run.journal({"event": "launch", "launch": job.launch, "profile": job.profile, "outcome": "ok", "message": job.url})
    return origin


def note_unlike(manifest: dict[str, Any]) -> None:
    """Give each launch its rows of the gate ``like-for-like``: what its server differs in from the baseline's.

    With every launch that starts, the baseline may be another one; so all rows are made again.

    Args:
        manifest: the run's; its launches are changed.
    """
    launches = manifest.get("launches", [])
    rows = serverinfo.unlike(launches)
    for entry in launches:
        kept = [gate for gate in entry.get("gates", []) if gate.get("gate") != serverinfo.ALIKE]
        entry["gates"] = kept + [row for row in rows if row["launch"] == entry.get("launch")]


@contextlib.contextmanager
def _interruptible(stop: Callable[[int], None]) -> Iterator[None]:
    """Call ``stop`` for the first SIGINT or SIGTERM; end the process at once for the second."""
    loop = asyncio.get_running_loop()
    count = 0

    def handler(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop, number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


async def _run(run: RunFolder, job: Job, progress: Progress, t0_unix: float) -> tuple[list[CellRow], int | None]:
    client = StreamClient(job.url, api_key=job.api_key, ca_file=job.ca_file)
    count = max((worker_count(job.workers, connections(cell)) for cell in job.cells), default=1)
    workers = Workers(job.url, count=count, api_key=job.api_key, ca_file=job.ca_file) if count > 1 else None
    stop = asyncio.Event()
    got: list[int] = []

    def interrupt(number: int) -> None:
        got.append(number)
        stop.set()
        client.abort_streams("interrupted")
        if workers is not None:
            workers.abort_streams("interrupted")

    simulated = None if job.info is None else bool(job.info.get("simulated"))
    context = Context(
        client=client,
        control=job.control,
        tokenizer=job.tokenizer,
        sink=run,
        run=run.name,
        launch=job.launch,
        block=job.block,
        origin=clock() - (time.time() - t0_unix),
        timeouts=job.timeouts,
        stop=stop,
        base=job.base,
        sglang=job.info is not None,
        limits=job.limits,
        headroom=job.headroom,
        keep_text=job.keep_text,
        simulated=simulated,
        time_scale=(job.info or {}).get("sim_time_scale"),
        workers=workers,
        workers_asked=job.workers,
        on_request=progress.request_done,
    )
    rows: list[CellRow] = []
    ticking = asyncio.create_task(_tick(client, workers, progress.tick)) if progress.tick is not None else None
    try:
        with _interruptible(interrupt):
            for number, cell in enumerate(job.cells, 1):
                if stop.is_set():
                    break
                if progress.cell_started is not None:
                    progress.cell_started(number, len(job.cells), cell)
                try:
                    row = await run_cell(cell, context)
                except ExceptionGroup as group:
                    raise _first(group) from None
                run.finish_cell(msgspec.to_builtins(row))
                rows.append(row)
                if progress.cell_done is not None:
                    progress.cell_done(row)
    finally:
        if ticking is not None:
            ticking.cancel()
        if workers is not None:
            workers.close()
        await client.close()
    return rows, got[0] if got else None


async def _tick(client: StreamClient, workers: Workers | None, tick: Callable[[int, int], None]) -> None:
    """Tell a display what is in flight, until it is cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        streams, tokens = client.in_flight()
        if workers is not None:
            more = workers.in_flight()
            streams, tokens = streams + more[0], tokens + more[1]
        tick(streams, tokens)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The first error in a task group's, which is what the user is told."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def unfinished(run: RunFolder) -> int:
    """How many parts of a run have not ended: cells of its plan, or of every launch it has had.

    Args:
        run: the run.

    Returns:
        The number of ``(cell, launch)`` pairs neither measured nor found invalid nor skipped.
    """
    manifest = run.manifest
    skipped = {item["cell"] for item in manifest.get("skipped", [])}
    planned = manifest.get("plan", {}).get("launches")
    if planned:
        parts = [(cell, int(launch["launch"])) for launch in planned for cell in launch["cells"]]
    else:
        parts = [
            (cell["id"], int(launch["launch"]))
            for launch in manifest.get("launches", [])
            for cell in manifest.get("cells", [])
            if cell.get("profile") in (None, launch.get("profile"))
        ]
    done = run.done_cells()
    return sum(1 for part in parts if part not in done and part[0] not in skipped)


def finish(run: RunFolder, signal_number: int | None) -> str:
    """Label a run after a job, and write its short summary.

    Args:
        run: the run.
        signal_number: what interrupted it, if anything did.

    Returns:
        The label: aborted, complete, or partial; a planned benchmark with launches to come stays running.
    """
    left = unfinished(run)
    if signal_number is not None:
        label = "aborted"
    elif not left:
        label = "complete"
    else:
        label = "running" if run.manifest.get("plan") else "partial"
    run.set_label(label)
    run.journal({"event": "end", "outcome": label, "message": f"{left} cells left"})
    run.write_file("summary.json", msgspec.json.format(encoded(short_summary(run)), indent=1) + b"\n")
    return label


def short_summary(run: RunFolder) -> dict[str, Any]:
    """The summary that needs no analysis: each cell's verdict and its medians; ``specrig report`` replaces it.

    Args:
        run: the run.

    Returns:
        ``schema, run, label, simulated, time_scale, cells, speedups``; one entry per cell and launch.
    """
    from specrig.load.metrics import median

    requests: dict[tuple[str, int], list[dict[str, Any]]] = {}
    closed = {cell["id"] for cell in run.manifest.get("cells", []) if cell.get("arrival", "closed") == "closed"}
    for record in run.read_requests():
        if record.get("ok"):
            requests.setdefault((record["cell"], record["launch"]), []).append(record)
    cells = []
    for row in run.read_cells():
        good = requests.get((row["cell"], row["launch"]), [])
        steps = sum(record.get("verify_steps") or 0 for record in good)
        drafts = sum(record.get("correct_drafts") or 0 for record in good)
        cells.append(
            {
                "cell": row["cell"],
                "launch": row["launch"],
                "title": row.get("title"),
                "method": row.get("method"),
                "tp": row.get("tp"),
                "valid": row["state"] == "done",
                "state": row["state"],
                "reason": row.get("reason"),
                "requests": row.get("requests"),
                "ok": row.get("ok"),
                "decode_tokens_per_s": median(_values(good, "decode_tokens_per_s")),
                "scheduled_ttft_s": None if row["cell"] in closed else median(_waits(good)),
                "ttft_s": median(_values(good, "ttft_s")),
                "acceptance_length": 1 + drafts / steps if steps else None,
                "output_tokens_per_s": (row.get("window") or {}).get("tokens_per_s"),
                "session_tokens_per_s": row.get("session_tokens_per_s"),
            }
        )
    engine = run.manifest.get("engine") or {}
    return {
        "schema": 1,
        "run": run.name,
        "label": run.manifest.get("label"),
        "written_at": utc_now(),
        "simulated": engine.get("hardware") == "simulated" if engine.get("hardware") != "unknown" else None,
        "time_scale": engine.get("time_scale"),
        "cells": cells,
        "speedups": [],
    }


def _waits(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """From when each was due to its first token, seconds."""
    pairs = [(record.get("scheduled_s"), record.get("first_s")) for record in records]
    return [first - due for due, first in pairs if due is not None and first is not None]


def _values(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if isinstance(record.get(name), int | float)]


def cells_of(run: RunFolder) -> list[Cell]:
    """The cells that a run's manifest defines.

    Args:
        run: the run.

    Returns:
        The cells, in its order.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        return msgspec.convert(run.manifest.get("cells", []), list[Cell])
    except msgspec.ValidationError as error:
        raise UsageError(f"{run.path}/manifest.json: cells cannot be read: {error}") from error
