"""What the benchmark role asks of the package inside the guest: plan a run, note a launch, label the end.

``python -m specrig.ops.guest_bench ACTION`` reads one JSON object on standard input and prints one on standard
output. The guest has the model's tokenizer, so the plan is made there; the launches themselves are run by
``specrig load`` into the same run folder.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import SpecrigError, UsageError
from specrig.model.cell import Cell, expand, select
from specrig.model.profile import Profile, parse_profiles
from specrig.model.schedule import Launch
from specrig.model.sweep import load_sweep
from specrig.runs.folder import RunFolder, is_run_folder
from specrig.runs.lines import write_atomic
from specrig.tokens.budget import Limits

_SIMULATED_LAUNCH_S = 10.0
_PROFILE_FIELDS = ("model", "tp", "method", "budget", "context_length", "gpus", "port", "serve", "numa")


def plan_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a sweep, and make the run folder or find what is left of one that is there.

    Args:
        request: ``sweep`` (its text; with ``run`` the run's own is taken), ``files`` (name to text of the prompts that
            it names), ``profiles`` (the inventory's mapping), ``dialects`` (by profile, the inventory's
            and its engine's additions to the method table), ``models`` (folder with the models), ``only`` (globs),
            ``runs`` (folder of the runs),
            ``run`` (id of the run to go on with, or empty), ``create`` (make or reopen the run folder), ``manifest``
            (more of the manifest), ``time_scale`` (of a simulated engine).

    Returns:
        ``run``, ``folder``, ``profiles``, ``launches`` still to do (``{launch, block, profile, cells}``), ``done``
        (launches that need nothing more), ``infeasible``, ``cells`` (count), ``expected_ci_width``, ``estimate_s`` and
        ``pace``, what that assumes.

    Raises:
        UsageError: the sweep, the profiles or the folder cannot be used.
    """
    from specrig.tokens import tokenizer as tokenizers
    from specrig.tokens.plan import Pace, plan

    path = _staged(request)
    sweep = load_sweep(path)
    profiles = _profiles(request["profiles"])
    run = str(request.get("run") or "") or None
    only = list(request.get("only") or [])
    folder: Path | None = Path(request["runs"]) / run if run else None
    if folder is not None:
        only = only or list(RunFolder.open(folder).manifest.get("only") or [])
    cells = select(expand(sweep, profiles), only)
    wanted = {cell.profile for cell in cells}
    chosen = {name: profile for name, profile in profiles.items() if name in wanted}
    model = Path(request["models"]) / sweep.model
    if not model.is_dir():
        raise UsageError(f"{model}: the model is not there; stage it with specrig recover")
    overrides = request.get("dialects") or {}
    limits = {name: _limits(profile, model, overrides.get(name) or {}) for name, profile in chosen.items()}
    scale = float(request.get("time_scale") or 1)
    # a simulated engine starts in seconds of wall time, whatever its time scale
    pace = Pace(launch_s=_SIMULATED_LAUNCH_S / scale) if request.get("time_scale") else Pace()
    planned = plan(sweep, tokenizers.load(model), limits, profiles, source=path, cells=cells, pace=pace)
    runnable = planned.feasible
    fit = {cell.id for cell in runnable}
    whole = planned.launches
    done: set[tuple[str, int]] = set()
    if request.get("create"):
        folder = folder or _new_folder(Path(request["runs"]), sweep.name)
        manifest = {
            "name": sweep.name,
            "model": sweep.model,
            "sweep": sweep.as_dict(),
            "only": only,
            "cells": [msgspec.to_builtins(cell) for cell in cells],
            "skipped": [msgspec.to_builtins(item) for item in planned.infeasible],
            "plan": {"launches": [_launch(launch, done) for launch in whole]},
            "corpora": planned.corpora,
            "prompts": list(planned.notes),
            "tokenizer": planned.tokenizer,
            **(request.get("manifest") or {}),
        }
        done = _open(folder, path, manifest)
    elif folder is not None:
        done = RunFolder.open(folder).done_cells()
    left = [_launch(launch, done) for launch in whole]
    widths = [width for cell, width in planned.expected_ci_width.items() if cell in fit]
    cells_left = sum(len(row["cells"]) for row in left)
    return {
        "run": folder.name if folder else None,
        "folder": str(folder) if folder else None,
        "name": sweep.name,
        "model": sweep.model,
        "profiles": sorted(name for name in {cell.profile for cell in runnable} if name),
        "cells": len(runnable),
        "launches": [row for row in left if row["cells"]],
        "done": sum(1 for row in left if not row["cells"]),
        "shapes": _shapes(runnable),
        "infeasible": [msgspec.to_builtins(item) for item in planned.infeasible],
        "expected_ci_width": {"least": min(widths), "most": max(widths)} if widths else None,
        "estimate_s": planned.estimate_s * scale * cells_left / max(1, sum(len(launch.cells) for launch in whole)),
        "pace": {
            "prefill_tokens_per_s": pace.prefill_tokens_per_s / scale,
            "decode_tokens_per_s": pace.decode_tokens_per_s / scale,
            "launch_s": pace.launch_s * scale,
        },
    }


def _staged(request: Mapping[str, Any]) -> Path:
    """The sweep's file in the guest, its prompts beside it: a run's own, or written below a folder named by content."""
    if request.get("run"):
        return Path(request["runs"]) / str(request["run"]) / "sweep.yml"
    files = {"sweep.yml": str(request["sweep"]), **(request.get("files") or {})}
    digest = hashlib.sha256(msgspec.json.encode(sorted(files.items()))).hexdigest()[:16]
    folder = Path(request["runs"]).parent / "sweeps" / digest
    try:
        for name, text in files.items():
            target = folder / name
            if target.is_relative_to(folder) and ".." not in Path(name).parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, text.encode())
            else:
                raise UsageError(f"{name}: the prompts of a sweep have to lie in its folder or below it")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return folder / "sweep.yml"


def _limits(profile: Profile, model: Path, overrides: Mapping[str, Any]) -> Limits:
    """What the profile's server will take, as far as it is known before it runs."""
    from specrig.facts import dialects

    method = dialects.resolve(profile.method, profile.budget, dict(overrides))
    reserved = method["reserved_tokens"]
    return Limits(
        context_length=profile.context_length or tokenizer_window(model),
        reserved_tokens=reserved if reserved is not None else (profile.budget or 0) + 1,
        block=method["block_size"] or 0,
        source="the profile",
    )


def _launch(launch: Launch, done: set[tuple[str, int]]) -> dict[str, Any]:
    return {
        "launch": launch.index,
        "block": launch.block,
        "profile": launch.profile,
        "cells": [cell for cell in launch.cells if (cell, launch.index) not in done],
    }


def _shapes(cells: Sequence[Cell]) -> dict[str, list[dict[str, int]]]:
    """The largest request of each profile, for its full-shape smoke test, and how many will be sent at once."""
    largest: dict[str, dict[str, int]] = {}
    at_once: dict[str, list[int]] = {}
    for cell in cells:
        if cell.profile is None:
            continue
        at_once.setdefault(cell.profile, []).append(cell.concurrency or 1)
        if cell.prompt_tokens is None:
            continue
        shape = {"prompt_tokens": cell.prompt_tokens, "max_tokens": cell.output_tokens}
        if sum(shape.values()) > sum(largest.get(cell.profile, {}).values()):
            largest[cell.profile] = shape
    return {
        name: [{**largest[name], "at_once": max(counts), "at_least": min(counts)}]
        for name, counts in at_once.items()
        if name in largest
    }


def _new_folder(runs: Path, name: str) -> Path:
    """A name that no run has: the sweep's and the time, UTC, to the second; a letter more where that is taken."""
    stem = f"{name}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    for suffix in ["", *"bcdefghij"]:
        folder: Path = runs / (stem + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{runs}: no run folder can be made there: {error.strerror}") from None
        return folder
    raise UsageError(f"{runs}/{stem}: ten runs of one second; wait a moment")


def _open(folder: Path, sweep: Path, manifest: dict[str, Any]) -> set[tuple[str, int]]:
    if is_run_folder(folder):
        with RunFolder.open(folder) as run:
            run.set_label("running")
            run.journal({"event": "resume", "outcome": "ok", "message": manifest.get("reason")})
            return run.done_cells()
    with RunFolder.create(folder, manifest) as run:
        run.write_file("sweep.yml", sweep.read_bytes())
        named = {name for cell in manifest["cells"] for name in (cell["prompts"], cell.get("trace")) if name}
        for item in sorted(name for name in named if name.endswith((".jsonl", ".csv"))):
            (folder / item).parent.mkdir(parents=True, exist_ok=True)
            run.write_file(item, (sweep.parent / item).read_bytes())
        run.journal({"event": "start", "outcome": "ok", "message": manifest.get("reason")})
    return set()


def tokenizer_window(folder: Path) -> int:
    """The model's own context length from its config.json, in tokens, for a profile that states none.

    Raises:
        UsageError: it is not there.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder}/config.json: cannot be read ({error}); set context_length in the profile") from None
    for holder in (config, config.get("text_config") or {}):
        if isinstance(holder.get("max_position_embeddings"), int):
            return int(holder["max_position_embeddings"])
    raise UsageError(f"{folder}/config.json: no max_position_embeddings; set context_length in the profile")


def note_launch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a launch's placement and gates in the manifest.

    Args:
        request: ``folder``, ``launch``, and ``note`` (merged into that launch's entry), ``placements`` (by profile).
    """
    number = int(request["launch"])

    def change(manifest: dict[str, Any]) -> None:
        entries = manifest.setdefault("launches", [])
        entry = next((item for item in entries if item.get("launch") == number), None)
        if entry is None:
            entry = {"launch": number}
            entries.append(entry)
        for name, value in (request.get("note") or {}).items():
            if name == "gates":
                value = [*entry.get("gates", []), *value]
            entry[name] = value
        entry["noted"] = True
        manifest.setdefault("placements", {}).update(request.get("placements") or {})

    with RunFolder.open(request["folder"]) as run:
        run.update_manifest(change)
        for gate in (request.get("note") or {}).get("gates", []):
            run.journal(
                {"event": "gate", "launch": number, "outcome": gate.get("status"), "message": gate.get("message")}
            )
    return {"launch": number}


def label_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Label a run by what is in it, or as told; every launch in it has been told of by then.

    Args:
        request: ``folder``, and ``label`` (or null: complete where every cell of every launch has ended, else partial),
            ``why`` for the run's journal.
    """
    with RunFolder.open(request["folder"]) as run:
        failed = [item for item in run.manifest.get("launches", []) if item.get("error")]
        run.update_manifest(_all_noted)
        label = request.get("label") or ("complete" if not missing(run) else "partial")
        run.set_label(label)
        run.journal({"event": "end", "outcome": label, "message": request.get("why")})
    return {
        "label": label,
        "missing": len(missing(run)),
        "failed": [f"launch {item['launch']} of {item.get('profile', '?')}: {item['error']}" for item in failed],
    }


def _all_noted(manifest: dict[str, Any]) -> None:
    for entry in manifest.get("launches", []):
        entry["noted"] = True


def missing(run: RunFolder) -> list[tuple[str, int]]:
    """The ``(cell, launch)`` pairs of a run's plan that have not ended: not measured, found invalid or skipped."""
    done = run.done_cells()
    skipped = {item["cell"] for item in run.manifest.get("skipped", [])}
    wanted = [
        (cell, int(launch["launch"]))
        for launch in run.manifest.get("plan", {}).get("launches", [])
        for cell in launch["cells"]
        if cell not in skipped
    ]
    return [pair for pair in wanted if pair not in done]


def _profiles(mapping: Any) -> dict[str, Profile]:
    if not isinstance(mapping, Mapping):
        return parse_profiles(mapping)
    # engine settings of a profile (draft model, environment) are the serving role's business
    return parse_profiles(
        {
            name: {key: row[key] for key in _PROFILE_FIELDS if row.get(key) is not None}
            if isinstance(row, Mapping)
            else row
            for name, row in mapping.items()
        }
    )


ACTIONS = {"plan": plan_run, "launch": note_launch, "label": label_run}


def main() -> int:
    """Run one action; exit code 0, or 2 with one line on standard error."""
    if len(sys.argv) != 2 or sys.argv[1] not in ACTIONS:
        print(f"guest_bench: expected one of {', '.join(ACTIONS)}", file=sys.stderr)
        return 2
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Any])
        answer = ACTIONS[sys.argv[1]](request)
    except msgspec.DecodeError as error:
        print(f"guest_bench: standard input is not a JSON object: {error}", file=sys.stderr)
        return 2
    except SpecrigError as error:
        print(str(error), file=sys.stderr)
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
