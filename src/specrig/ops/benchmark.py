"""The controller's side of a benchmark: the playbook benchmark.yml, and an end in good order however it ends."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from specrig.errors import UsageError
from specrig.facts.benchmark import duration
from specrig.ops.runner import PlayResult, collection_root, inventory_path, run_playbook
from specrig.runs.folder import RunFolder, is_run_folder

CONFIRM_ABOVE_S = 3600


def bench(args: argparse.Namespace) -> int:
    """``specrig bench``; see :mod:`specrig.ops.bench_cli` for the arguments and exit codes."""
    from specrig.model.sweep import load_sweep

    inventory = inventory_path(args.inventory)
    sweep = sweep_path(args.sweep)
    load_sweep(sweep)  # a wrong sweep is told before any machine is asked
    extra: dict[str, Any] = {
        "decode_bench_sweep": str(sweep),
        "decode_bench_only": args.only,
        "decode_bench_take_over": args.take_over,
        "decode_bench_collect_to": str(Path(args.out).resolve()),
    }
    if args.reason:
        extra["specrig_reason"] = args.reason
    if args.plan or not args.yes:
        planned = run_playbook(
            "benchmark", inventory, {**extra, "decode_bench_plan_only": True}, _arguments(args), quiet=True
        )
        if planned.interrupted:
            return 130
        plan = next(iter(planned.specrig.get("plan", [])), None)
        if args.plan:
            _show_plan(args, planned, plan)
            return 0 if planned.rc == 0 else 1
        if planned.rc == 0 and plan and plan["estimate_s"] > CONFIRM_ABOVE_S and not _agreed(planned, plan):
            return 2
    result = _run(args, inventory, {**extra, "decode_bench_yes": True})
    return _end(args, inventory, extra, result)


def resume(args: argparse.Namespace) -> int:
    """``specrig runs resume``: the missing cells, in the same run folder."""
    folder = run_path(args.run, must_exist=False)
    extra = _of_run(args, folder)
    extra |= {"decode_bench_resume": folder.name, "decode_bench_yes": True, "decode_bench_take_over": args.take_over}
    inventory = inventory_path(args.inventory)
    result = _run(args, inventory, extra)
    return _end(args, inventory, extra, result, run=folder.name)


def abort(args: argparse.Namespace) -> int:
    """``specrig runs abort``: stop what a run left, put production back, collect and label what was finished."""
    folder = run_path(args.run, must_exist=False)
    inventory = inventory_path(args.inventory)
    result = _run(args, inventory, {**_of_run(args, folder), "decode_bench_abort": folder.name})
    if args.json:
        print(json.dumps(_summary(result), indent=2))
    else:
        _say_notes(result)
    return 130 if result.interrupted else 0 if result.rc == 0 else 1


def schedule(args: argparse.Namespace) -> int:
    """``specrig schedule``: install or remove the timer."""
    from specrig.model.sweep import load_sweep

    if not args.remove and not args.on_calendar:
        raise UsageError("--on-calendar is missing; say when, such as '*-*-* 02:00:00' or 'Sun 03:00'")
    sweep = sweep_path(args.sweep)
    load_sweep(sweep)
    extra: dict[str, Any] = {
        "bench_timer_sweep": str(sweep),
        "bench_timer_name": args.name,
        "bench_timer_take_over": args.take_over,
        "bench_timer_state": "absent" if args.remove else "present",
    }
    if args.on_calendar:
        extra["bench_timer_on_calendar"] = args.on_calendar
    if args.reason:
        extra |= {"specrig_reason": args.reason, "bench_timer_reason": args.reason}
    arguments = _arguments(args) + (["--check"] if args.check else [])
    result = run_playbook("schedule", inventory_path(args.inventory), extra, arguments, quiet=args.json)
    if args.json:
        print(json.dumps({**_summary(result), "changed": result.changed}, indent=2))
    return 130 if result.interrupted else 0 if result.rc == 0 else 1


def list_runs(args: argparse.Namespace) -> int:
    """``specrig runs list``."""
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; runs are collected below ./runs unless --out says otherwise")
    rows = [describe(path) for path in folder.iterdir() if is_run_folder(path)]
    rows.sort(key=lambda row: (str(row["created_at"] or ""), row["run"]), reverse=True)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"no run below {folder}")
        return 0
    head = ("RUN", "LABEL", "CELLS", "INVALID", "MISSING", "ON", "REASON")
    table = [head] + [
        (
            row["run"],
            row["label"],
            str(row["done"]),
            str(row["invalid"]),
            "unknown" if row["missing"] is None else str(row["missing"]),
            row["engine"],
            row["reason"] or "",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return 0


def show_run(args: argparse.Namespace) -> int:
    """``specrig runs show``."""
    row = describe(run_path(args.run))
    if args.json:
        print(json.dumps(row, indent=2))
        return 0
    for name, value in row.items():
        if isinstance(value, list):
            print(f"{name}:" if value else f"{name}: none")
            for item in value:
                print(f"  {item}")
        else:
            print(f"{name}: {'unknown' if value is None else value}")
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """What a run folder holds, in a few values: counts are of (cell, launch) pairs, None is unknown."""
    from specrig.runs.measure import unfinished

    run = RunFolder.open(folder)
    manifest = run.manifest
    cells = run.read_cells()
    # A run against a server that was there has no plan; its own launches and cells say what it was to do.
    told = bool(manifest.get("plan", {}).get("launches") or (manifest.get("launches") and manifest.get("cells")))
    engine = manifest.get("engine") or {}
    kind = str(engine.get("kind") or "unknown")
    scale = engine.get("time_scale")
    return {
        "run": run.name,
        "folder": str(folder),
        "label": str(manifest.get("label", "unknown")),
        "created_at": manifest.get("created_at"),
        "reason": manifest.get("reason"),
        "by": manifest.get("by"),
        "engine": f"{kind} (time scale {scale})" if kind == "simulated" and scale is not None else kind,
        "done": sum(1 for cell in cells if cell.get("state") == "done"),
        "invalid": sum(1 for cell in cells if cell.get("state") == "invalid"),
        "missing": unfinished(run) if told else None,
        "skipped": [f"{item.get('title') or item['cell']}: {item['reason']}" for item in manifest.get("skipped", [])],
        "failed": [
            f"launch {item['launch']} of {item.get('profile', 'unknown')}: {item['error']}"
            for item in manifest.get("launches", [])
            if item.get("error")
        ],
    }


def sweep_path(given: str) -> Path:
    """Resolve a sweep: a path, or the name of a shipped one.

    Raises:
        UsageError: neither.
    """
    path = Path(given)
    if path.is_file():
        return path.resolve()
    shipped = collection_root() / "sweeps"
    if "/" not in given and (shipped / f"{given}.yml").is_file():
        return shipped / f"{given}.yml"
    names = ", ".join(sorted(entry.stem for entry in shipped.glob("*.yml")))
    raise UsageError(f"{given}: no such file, and no shipped sweep ({names}) has that name")


def run_path(given: str, *, must_exist: bool = True) -> Path:
    """Resolve a run: its folder, or its id below ./runs.

    A run that died with its controller was never collected: with ``must_exist`` false, a plain id is taken as it is.

    Raises:
        UsageError: no run is there.
    """
    for path in (Path(given), Path("runs") / given):
        if is_run_folder(path):
            return path.resolve()
    if not must_exist and "/" not in given.rstrip("/"):
        return Path("runs").resolve() / given
    raise UsageError(f"{given}: no run there and none below ./runs; specrig runs list shows them")


def _of_run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    extra: dict[str, Any] = {"decode_bench_collect_to": str(folder.parent)}
    if args.reason:
        extra["specrig_reason"] = args.reason
    return extra


def _arguments(args: argparse.Namespace) -> list[str]:
    arguments = [word for assignment in args.extra_vars for word in ("-e", assignment)]
    return arguments + (["-" + "v" * args.verbose] if args.verbose else [])


def _run(args: argparse.Namespace, inventory: Path, extra: dict[str, Any]) -> PlayResult:
    """Run the playbook: one line a launch, Ansible's own output with ``-v``."""
    progress = None if args.json or args.verbose else Progress()
    result = run_playbook(
        "benchmark",
        inventory,
        extra,
        _arguments(args),
        quiet=not args.verbose,
        on_event=progress.event if progress else None,
    )
    if progress:
        progress.close()
    return result


class Progress:
    """A benchmark as it goes, one line a launch, from ansible-runner's events."""

    STEPS: ClassVar[dict[str, str]] = {
        "Start the server": "starting",
        "Pass the gates": "gates",
        "Run the cells": "measuring",
        "Stop the server": "stopping",
        "Put everything back": "putting production back",
        "Bring the run home": "collecting",
        "Analyse it": "analysing",
    }

    def __init__(self) -> None:
        self._launches: list[dict[str, Any]] = []
        self._number = 0
        self._started = time.monotonic()
        self._live = sys.stderr.isatty()
        self._shown = ""

    def event(self, event: dict[str, Any]) -> None:
        """Take one event."""
        data = event.get("event_data") or {}
        kind = event.get("event")
        task = str(data.get("task") or data.get("name") or "")
        if kind == "playbook_on_task_start":
            self._step(task)
        elif kind in ("runner_on_ok", "runner_on_failed"):
            self._result(task, data.get("res") or {}, kind == "runner_on_failed")

    def close(self) -> None:
        """End a line that is being rewritten."""
        self._transient("")

    def _head(self) -> str:
        if not 0 < self._number <= len(self._launches):
            return ""
        launch = self._launches[self._number - 1]
        return f"launch {self._number}/{len(self._launches)} {launch['profile']}: "

    def _step(self, task: str) -> None:
        name = task.rsplit(" : ", 1)[-1]
        if name == "Start the server":
            self._number += 1
            self._started = time.monotonic()
        if name in self.STEPS:
            self._transient(self._head() + self.STEPS[name])

    def _result(self, task: str, outcome: dict[str, Any], failed: bool) -> None:
        name = task.rsplit(" : ", 1)[-1]
        answer = outcome.get("answer")
        if name.startswith("Make the run folder") and isinstance(answer, dict):
            self._launches = answer.get("launches", [])
            self._say(f"run {answer.get('run')}: {answer.get('cells')} cells, {len(self._launches)} launches to do")
        elif name == "Decide whether and where it can run":
            for line in (outcome.get("specrig") or {}).get("notes", []):
                self._say(line)
        elif name == "Run the cells":
            states: dict[str, int] = {}
            for cell in outcome.get("cells") or []:
                states[cell["state"]] = states.get(cell["state"], 0) + 1
            counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no cell ended"
            self._say(f"{self._head()}{counts}, {time.monotonic() - self._started:.1f} s")
            for cell in outcome.get("cells") or []:
                if cell.get("reason"):
                    self._say(f"  {cell.get('workload')} {cell['cell']}: {cell['state']}: {cell['reason']}")
        if failed:
            message = " ".join(str(outcome.get("msg", "no message")).split())
            self._say(f"{self._head()}FAILED: {name}: {message}")

    def _say(self, line: str) -> None:
        self._transient("")
        print(line, file=sys.stderr, flush=True)

    def _transient(self, text: str) -> None:
        if self._live and text != self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        self._shown = text


def _say_notes(result: PlayResult) -> None:
    for line in result.specrig.get("notes", []):
        if line.startswith("run "):
            print(line)


def _show_plan(args: argparse.Namespace, planned: PlayResult, plan: dict[str, Any] | None) -> None:
    if args.json:
        print(json.dumps({**_summary(planned), "plan": plan}, indent=2))
        return
    for line in planned.specrig.get("notes", []):
        print(line)
    for line in planned.failures:
        print(line, file=sys.stderr)


def _agreed(planned: PlayResult, plan: dict[str, Any]) -> bool:
    for line in planned.specrig.get("notes", []):
        print(line)
    long = duration(plan["estimate_s"])
    if not sys.stdin.isatty():
        print(f"specrig bench: the plan takes about {long}; add --yes, or take part of it with --only", file=sys.stderr)
        return False
    return input(f"This takes about {long}. Go on? [y/N] ").strip().lower() in ("y", "yes")


def _end(
    args: argparse.Namespace, inventory: Path, extra: dict[str, Any], result: PlayResult, run: str | None = None
) -> int:
    """After the play: clean up where Ctrl-C ended it, and say where the results are."""
    found = run or next((str(item) for item in result.specrig.get("started_runs", [])), None)
    if result.interrupted and found:
        print("interrupted: keeping what was finished, putting production back ...", file=sys.stderr)
        cleaned = _run(args, inventory, {**extra, "decode_bench_abort": found, "decode_bench_resume": ""})
        for name in ("runs", "notes", "cells"):
            result.specrig.setdefault(name, []).extend(cleaned.specrig.get(name, []))
        again = f"specrig runs resume {found}"
        print(
            f"run {found}: labelled aborted; {again} does the missing cells"
            if cleaned.rc == 0
            else f"run {found}: the clean-up failed ({'; '.join(cleaned.failures) or 'no message'}); "
            f"specrig runs abort {found} tries it again, specrig recover puts production back",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(_summary(result), indent=2))
    else:
        for line in result.specrig.get("report", []):
            print(line)
        _say_notes(result)
    if result.interrupted:
        return 130
    return 0 if result.rc == 0 else 1


def _summary(result: PlayResult) -> dict[str, Any]:
    return {
        "schema": 1,
        "rc": result.rc,
        "interrupted": result.interrupted,
        "runs": result.specrig.get("runs", []),
        "gates": result.specrig.get("gates", []),
        "cells": result.specrig.get("cells", []),
        "notes": result.specrig.get("notes", []),
        "failures": result.failures,
        "seconds": round(result.seconds, 3),
    }
