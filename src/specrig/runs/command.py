"""The body of ``specrig load``: arguments to a job, progress to the terminal, rows to an exit code."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from specrig.engine.client import EngineClient
from specrig.engine.errors import EngineError
from specrig.errors import GateError, SpecrigError, UsageError, printable
from specrig.load.metrics import median
from specrig.load.stream import Timeouts
from specrig.model.cell import Cell, expand, select
from specrig.model.record import CellRow, Request
from specrig.model.sweep import Sweep, load_sweep
from specrig.runs.folder import RunFolder, is_run_folder
from specrig.runs.lines import encoded
from specrig.runs.measure import Job, Progress, cells_of, describe, finish, run_job
from specrig.tokens import tokenizer as tokenizers
from specrig.tokens.budget import Limits
from specrig.tokens.plan import Pace, cell_seconds
from specrig.tokens.rows import read_jsonl
from specrig.tokens.trace import rows_of


def load_command(args: argparse.Namespace) -> int:
    """Run ``specrig load``.

    Args:
        args: as :mod:`specrig.load.load_cli` defines them.

    Returns:
        0 where every cell is done and valid (or none was left to do), 1 where one is not, 128 + the signal's number
        where one interrupted it.

    Raises:
        UsageError: the arguments, the sweep or the folder cannot be used.
        SpecrigError: the server is not the one asked for, or a result cannot be written.
    """
    with EngineClient(args.url, args.api_key or os.environ.get("SPECRIG_API_KEY"), ca_file=args.ca_file) as control:
        return _load(args, control)


def _load(args: argparse.Namespace, control: EngineClient) -> int:
    sweep = load_sweep(Path(args.sweep))
    reason = args.reason or os.environ.get("SPECRIG_REASON")
    api_key = args.api_key or os.environ.get("SPECRIG_API_KEY")
    tokenizer = tokenizers.load(args.tokenizer) if args.tokenizer else None
    base = Path(args.sweep).resolve().parent
    folder = Path(args.out)
    info, limits = _ask(control)
    models, model_info = _ask_more(control)
    if is_run_folder(folder):
        opened = RunFolder.open(folder)
        cells = cells_of(opened)
        if not _same_sweep(opened.manifest.get("sweep"), sweep):
            raise UsageError(
                f"{folder}: holds another run than {args.sweep} describes; give its own sweep, or a new folder"
            )
    else:
        if args.resume:
            raise UsageError(f"{folder}: no run there to resume; leave --resume out to start one")
        if args.profile is not None:
            raise UsageError(
                f"{folder}: --profile {args.profile} needs a run planned with profiles; specrig bench makes one"
            )
        if sweep.profiles is not None:
            raise UsageError(
                f"{args.sweep}: names profiles, which specrig bench starts; leave `profiles` out for a running server"
            )
        opened = None
        cells = expand(sweep, None)
    chosen = _choose(cells, args)
    if tokenizer is None:
        _need_no_tokenizer(chosen, control)
    if info is None and not models and sweep.api == "sglang":
        raise GateError(
            f"{control.base_url}: neither /server_info nor /v1/models answers as an engine's, and api is sglang; "
            "expected the address of one, without the path of its API; nothing was measured"
        )
    if opened is None:
        _need_files(chosen, base)
    launch, block = _launch(opened, args)
    with opened or RunFolder.create(folder, describe(sweep, cells, tokenizer, reason, base)) as run, run.lock():
        if opened is not None:
            known = {cell for cell, number in _parts(run) if number == launch}
            if not args.resume and (args.launch is None or known & {cell.id for cell in chosen}):
                raise UsageError(f"{folder}: a run is there already; add --resume to do what is missing in it")
            run.journal({"event": "resume", "launch": launch, "outcome": "ok", "message": reason})
        else:
            run.journal({"event": "start", "outcome": "ok", "message": reason})
            run.write_file("sweep.yml", Path(args.sweep).read_bytes())
        done = {cell for cell, number in run.done_cells() if number == launch}
        left = [cell for cell in chosen if cell.id not in done]
        show = _Show(args.json, left, len(chosen) - len(left))
        job = Job(
            url=args.url,
            cells=left,
            launch=launch,
            block=block,
            profile=args.profile,
            tokenizer=tokenizer,
            control=control,
            timeouts=Timeouts(
                first_token_s=sweep.timeouts.first_token_s,
                idle_s=sweep.timeouts.idle_s,
                request_s=sweep.timeouts.request_s,
            ),
            base=base,
            api_key=api_key,
            ca_file=args.ca_file,
            limits=limits,
            headroom=sweep.headroom,
            info=info,
            models=models,
            model_info=model_info,
            keep_text=args.keep_text,
            workers=args.workers,
        )
        number: int | None = None
        rows: list[CellRow] = []
        try:
            if left:
                rows, number = run_job(run, job, show.progress)
        except GateError:
            finish(run, None)
            raise
        except BaseException as error:
            _abort(run, str(error) or "interrupted")
            raise
        label = finish(run, number)
        show.end(run, label, rows)
    if number is not None:
        return 128 + number
    return 1 if any(row.state != "done" for row in rows) else 0


def _same_sweep(kept: object, sweep: Sweep) -> bool:
    """Whether a manifest's sweep is this one; keys that came after it was written have their defaults."""
    try:
        return msgspec.convert(kept, Sweep) == sweep
    except msgspec.ValidationError:
        return False


def _abort(run: RunFolder, why: str) -> None:
    """Label a run that a failed write ended, as far as the disk lets."""
    try:
        run.set_label("aborted")
        run.journal({"event": "end", "outcome": "aborted", "message": why})
    except SpecrigError:
        return


def _ask(control: EngineClient) -> tuple[dict[str, Any] | None, Limits | None]:
    """The server's own report and limits; (None, None) where it is no SGLang but answers.

    Raises:
        GateError: nothing answers, or it can't yet.
    """
    try:
        info = control.server_info()
    except EngineError as error:
        if error.status is None:
            raise GateError(str(error)) from error
        if error.kind == "unauthorized":
            raise UsageError(f"{error}; give the key with --api-key") from error
        if error.status >= 500 and error.status != 501:  # not implemented: an API without it
            raise GateError(f"{error}; is it ready? nothing was measured") from error
        return None, None
    try:
        from specrig.engine.limits import from_server

        return info, from_server(control)
    except SpecrigError:
        return info, None


def _ask_more(control: EngineClient) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The rows of ``/v1/models`` and ``/model_info``, for the manifest; nothing where the server has none."""
    models: list[dict[str, Any]] = []
    with contextlib.suppress(EngineError):
        models = control.models()
    try:
        return models, control.model_info()
    except EngineError:
        return models, None


def _choose(cells: Sequence[Cell], args: argparse.Namespace) -> list[Cell]:
    chosen = list(cells)
    if args.profile is not None:
        chosen = [cell for cell in chosen if cell.profile == args.profile]
        if not chosen:
            known = sorted({cell.profile for cell in cells if cell.profile})
            raise UsageError(f"--profile {args.profile}: no cell has it; expected one of {', '.join(known) or 'none'}")
    elif any(cell.profile for cell in chosen):
        raise UsageError("the run has profiles; say by --profile which one this server serves")
    if args.cells is not None:
        by_id = {cell.id: cell for cell in chosen}
        wanted = [item for item in args.cells.replace(",", " ").split() if item]
        missing = [item for item in wanted if item not in by_id]
        if missing:
            raise UsageError(f"--cells {missing[0]}: no such cell here; expected ids such as {next(iter(by_id))}")
        chosen = [by_id[item] for item in wanted]
    return select(chosen, args.only)


def _need_files(cells: Sequence[Cell], base: Path) -> None:
    """Refuse prompts and traces that cannot be read before the first cell runs, not hours later.

    Raises:
        UsageError: in one line, with the file.
    """
    for name in dict.fromkeys(cell.prompts for cell in cells if cell.prompts.endswith(".jsonl")):
        read_jsonl(base / name)
    for cell in cells:
        rows_of(cell, base)


def _need_no_tokenizer(cells: Sequence[Cell], control: EngineClient) -> None:
    """Refuse cells whose prompts only a tokenizer can make, before anything is sent.

    The native API takes ids; there the server's own /tokenize has to make them.

    Raises:
        UsageError: in one line, with the workload.
    """
    for cell in cells:
        asked = None
        if cell.prompts != "questions" and not cell.prompts.endswith(".jsonl"):
            asked = f"prompts {cell.prompts}"
        elif cell.trace is not None:
            asked = "the lengths of a trace"
        elif cell.prompt_tokens is not None:
            asked = f"prompt_tokens {cell.prompt_tokens}"
        elif (cell.turns or 1) > 1:
            asked = "the turns of sessions"
        if asked is not None:
            raise UsageError(
                f"workload {cell.workload}: {asked} cannot be counted without the model's tokenizer; give --tokenizer "
                "DIR, or questions or a .jsonl file without prompt_tokens"
            )
    native = next((cell for cell in cells if cell.api == "sglang"), None)
    if native is None:
        return
    try:
        control.tokenize(messages=[{"role": "user", "content": "x"}], chat_template_kwargs={}, model=native.model)
    except EngineError as error:
        raise UsageError(
            f"workload {native.workload}: api sglang is asked with token ids, and the server makes none ({error}); "
            "give --tokenizer DIR, or use api openai-chat"
        ) from error


def _launch(run: RunFolder | None, args: argparse.Namespace) -> tuple[int, int]:
    launch = args.launch or 0
    if launch < 0:
        raise UsageError(f"--launch {launch}: expected a number from 0")
    if run is not None:
        for planned in run.manifest.get("plan", {}).get("launches", []):
            if int(planned["launch"]) == launch:
                if args.profile is not None and planned.get("profile") != args.profile:
                    raise UsageError(
                        f"--launch {launch} is of profile {planned.get('profile')}; --profile says {args.profile}"
                    )
                return launch, int(planned["block"])
    return launch, launch


def _parts(run: RunFolder) -> set[tuple[str, int]]:
    return {(str(row["cell"]), int(row.get("launch", 0))) for row in run.read_cells()}


class Pacer:
    """Live rate and time left of a row of cells; pure but for the moments that it is given.

    A cell's share of the work is what the plan takes it to need; how fast that goes is measured.
    """

    SPAN_S = 5.0

    def __init__(self, cells: Sequence[Cell]) -> None:
        """Name the cells, in any order."""
        self._weight = {cell.id: cell_seconds(cell, cell.prompt_tokens or 512, Pace()) for cell in cells}
        self._whole = sum(self._weight.values())
        self._before = 0.0
        self._cell: str | None = None
        self._begun: float | None = None
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def begin(self, cell: Cell, now: float) -> None:
        """A cell begins; the one before it has ended."""
        if self._cell is not None:
            self._before += self._weight.get(self._cell, 0.0)
        self._cell = cell.id
        self._begun = now if self._begun is None else self._begun
        self._seen.clear()

    def rate(self, now: float, tokens: int) -> float | None:
        """Tokens a second over the last seconds, from the tokens that the cell has brought up to now."""
        if self._seen and tokens < self._seen[-1][1]:
            self._seen.clear()  # the warm-up's are not the cell's
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > self.SPAN_S:
            self._seen.popleft()
        begun, first = self._seen[0]
        return (tokens - first) / (now - begun) if now > begun else None

    def left_s(self, now: float, share: float) -> float | None:
        """Seconds to the end of all cells, with that share of the running one done; None before anything is."""
        if self._begun is None or self._cell is None:
            return None
        done = self._before + share * self._weight.get(self._cell, 0.0)
        return (now - self._begun) * (self._whole - done) / done if done > 0 and now > self._begun else None


def clock_text(seconds: float) -> str:
    """A duration for people: ``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def fitted(head: str, figures: str, width: int) -> str:
    """``head: figures`` in so many columns; what is too long is taken from the head, figures come last."""
    room = max(width - len(figures) - 2, 0)
    short = head if len(head) <= room else head[: room - 1] + "…" if room else ""
    line = f"{short}: {figures}" if short else figures
    return line if len(line) <= width else line[: width - 1] + "…"


def _columns() -> int:
    """The width of the terminal that standard error is; also where standard output is none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


class _Show:
    """Progress: one line a cell, rewritten in place where standard error is a terminal; JSON lines when asked for."""

    def __init__(self, as_json: bool, cells: Sequence[Cell], already: int) -> None:
        self._json = as_json
        self._live = sys.stderr.isatty() and not as_json
        self._head = ""
        self._total = 0
        self._length = 1
        self._flying = 0
        self._good = 0
        self._bad = 0
        self._tokens = 0
        self._open = False
        self._ttfts: list[float] = []
        self._waits: list[float] = []
        self._pace = Pacer(cells)
        self._rate: float | None = None
        self.progress = Progress(
            cell_started=self._started,
            request_done=self._request,
            cell_done=self._done,
            tick=self._tick if self._live else None,
        )
        if already and not as_json:
            print(f"{already} cells are done already, {len(cells)} left", file=sys.stderr)

    def _started(self, number: int, total: int, cell: Cell) -> None:
        self._head = f"[{number}/{total}] {cell.title}"
        self._total = cell.total_requests
        self._length = cell.output_tokens
        self._good = self._bad = self._tokens = self._flying = 0
        self._open = cell.arrival != "closed"
        self._ttfts.clear()
        self._waits.clear()
        self._rate = None
        self._pace.begin(cell, time.monotonic())
        self._line()

    def _request(self, record: Request) -> None:
        if record.ok:
            self._good += 1
            if record.ttft_s is not None and record.first_s is not None and record.scheduled_s is not None:
                self._ttfts.append(record.ttft_s)
                self._waits.append(record.first_s - record.scheduled_s)
        else:
            self._bad += 1
        self._tokens += record.output_tokens or 0
        self._flying = max(0, self._flying - (record.output_tokens or 0))
        self._line()

    def _tick(self, _streams: int, tokens: int) -> None:
        self._flying = tokens
        self._rate = self._pace.rate(time.monotonic(), self._tokens + tokens)
        self._line()

    def _line(self) -> None:
        if not self._live:
            return
        done = self._good + self._bad
        parts = [f"{done}/{self._total} requests"]
        if self._bad:
            parts.append(f"{self._bad} failed")
        if self._rate is not None:
            parts.append(f"{self._rate:,.0f} tok/s now")
        share = min(1.0, (done + self._flying / self._length) / self._total) if self._total else 0.0
        left = self._pace.left_s(time.monotonic(), share)
        if left is not None:
            parts.append(f"{clock_text(left)} left")
        sys.stderr.write(f"\r\x1b[K{fitted(self._head, ', '.join(parts), _columns() - 1)}")
        sys.stderr.flush()

    def _done(self, row: CellRow) -> None:
        if self._json:
            sys.stdout.buffer.write(encoded({"event": "cell", **msgspec.to_builtins(row)}) + b"\n")
            sys.stdout.flush()
            return
        if self._live:
            sys.stderr.write("\r\x1b[K")
        rate = f", {row.window.tokens_per_s:.1f} tok/s" if row.window else ""
        why = f": {printable(row.reason)}" if row.reason else ""
        made = f" {row.ok}/{row.requests} requests{rate}{self._first()}, {row.wall_s:.1f} s" if row.requests else ""
        print(f"{self._head}: {row.state}{made}{why}", file=sys.stderr, flush=True)

    def _first(self) -> str:
        """The median time to the first token; of an open loop the one from when requests were due, first."""
        ttft, wait = median(self._ttfts), median(self._waits)
        if ttft is None or wait is None:
            return ""
        scheduled = f", scheduled TTFT {wait * 1e3:,.0f} ms" if self._open else ""
        return f"{scheduled}, TTFT {ttft * 1e3:,.0f} ms"

    def end(self, run: RunFolder, label: str, rows: Sequence[CellRow]) -> None:
        """Say how the run ended."""
        states: dict[str, int] = {}
        for row in rows:
            states[row.state] = states.get(row.state, 0) + 1
        engine = run.manifest.get("engine") or {}
        if self._json:
            end: dict[str, Any] = {"event": "end", "run": run.name, "folder": str(run.path), "label": label}
            end["cells"] = states
            end["simulated"] = engine.get("hardware") == "simulated"
            end["time_scale"] = engine.get("time_scale")
            sys.stdout.buffer.write(encoded(end) + b"\n")
            sys.stdout.flush()
            return
        said = ", ".join(f"{count} {state}" for state, count in states.items()) or "nothing to do"
        simulated = ""
        if engine.get("hardware") == "simulated":
            simulated = f" (simulated engine, time scale {engine.get('time_scale')}: not GPU performance)"
        print(f"{run.path}: {label}; {said}{simulated}", file=sys.stderr)
