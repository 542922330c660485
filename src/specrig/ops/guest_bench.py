"""What the benchmark role asks of the package inside the guest: plan a run, note a launch, label the end.

``python -m specrig.ops.guest_bench ACTION`` reads one JSON object on standard input and prints one on standard
output. The guest has the model's tokenizer, so the plan is made there; the launches themselves are run by
``specrig load`` into the same run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from specrig.errors import SpecrigError, UsageError
from specrig.model.cell import expand, select
from specrig.model.profile import Profile, parse_profiles
from specrig.model.schedule import launches as schedule
from specrig.model.sweep import load_sweep
from specrig.runs.folder import RunFolder, is_run_folder

_PROFILE_FIELDS = ("model", "tp", "method", "budget", "context_length", "gpus", "port", "serve", "numa")


def plan_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a sweep, and make the run folder or find what is left of one that is there.

    Args:
        request: ``sweep`` (its text), ``sweep_name`` (for errors), ``profiles`` (the inventory's mapping), ``models``
            (folder with the models), ``reserved`` (reserved draft tokens and block size by profile), ``only`` (globs),
            ``folder`` (the run folder; null for a plan alone), ``manifest`` (more of the manifest).

    Returns:
        ``run``, ``profiles``, ``launches`` still to do (``{launch, block, profile, cells}``), ``done`` (launches that
        need nothing more), ``infeasible``, ``cells`` (count), ``expected_ci_width`` and ``estimate_s``.

    Raises:
        UsageError: the sweep, the profiles or the folder cannot be used.
    """
    from specrig.tokens import tokenizer as tokenizers
    from specrig.tokens.budget import Limits
    from specrig.tokens.plan import plan

    sweep = load_sweep(_text(request))
    profiles = _profiles(request["profiles"])
    cells = select(expand(sweep, profiles), request.get("only") or [])
    wanted = {cell.profile for cell in cells}
    chosen = {name: profile for name, profile in profiles.items() if name in wanted}
    folder = Path(request["models"]) / sweep.model
    if not folder.is_dir():
        raise UsageError(f"{folder}: the model is not there; stage it with specrig recover")
    tokenizer = tokenizers.load(folder)
    reserved = request.get("reserved") or {}
    limits: dict[str | None, Limits] = {
        name: Limits(
            context_length=profile.context_length or tokenizer_window(folder),
            reserved_tokens=int(reserved.get(name, {}).get("reserved_tokens") or 0),
            block=int(reserved.get(name, {}).get("block_size") or 0),
            source="the profile's context_length",
        )
        for name, profile in chosen.items()
    }
    planned = plan(sweep, tokenizer, limits, profiles)
    kept = {cell.id for cell in cells}
    infeasible = [item for item in planned.infeasible if item.cell in kept]
    unfit = {item.cell for item in infeasible}
    runnable = [cell for cell in cells if cell.id not in unfit]
    todo = schedule(sweep, runnable)
    done: set[tuple[str, int]] = set()
    if request.get("folder"):
        done = _folder(request, msgspec.to_builtins(sweep), cells, infeasible, planned.corpora)
    left = [
        {
            "launch": launch.index,
            "block": launch.block,
            "profile": launch.profile,
            "cells": [cell for cell in launch.cells if (cell, launch.index) not in done],
        }
        for launch in todo
    ]
    widths = [width for cell, width in planned.expected_ci_width.items() if cell in kept and cell not in unfit]
    share = len(runnable) / max(1, len(planned.cells))
    return {
        "run": Path(request["folder"]).name if request.get("folder") else None,
        "name": sweep.name,
        "model": sweep.model,
        "profiles": sorted(name for name in wanted if name),
        "cells": len(runnable),
        "launches": [row for row in left if row["cells"]],
        "done": sum(1 for row in left if not row["cells"]),
        "infeasible": [msgspec.to_builtins(item) for item in infeasible],
        "expected_ci_width": {"least": min(widths), "most": max(widths)} if widths else None,
        "estimate_s": planned.estimate_s * share,
    }


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
        manifest.setdefault("placements", {}).update(request.get("placements") or {})

    with RunFolder.open(request["folder"]) as run:
        run.update_manifest(change)
        for gate in (request.get("note") or {}).get("gates", []):
            run.journal(
                {"event": "gate", "launch": number, "outcome": gate.get("status"), "message": gate.get("message")}
            )
    return {"launch": number}


def label_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Label a run by what is in it, or as told.

    Args:
        request: ``folder``, and ``label`` (or null: complete where every cell of every launch has ended, else partial),
            ``why`` for the run's journal.
    """
    with RunFolder.open(request["folder"]) as run:
        label = request.get("label") or ("complete" if not missing(run) else "partial")
        run.set_label(label)
        run.journal({"event": "end", "outcome": label, "message": request.get("why")})
    return {"label": label, "missing": len(missing(run))}


def missing(run: RunFolder) -> list[tuple[str, int]]:
    """The ``(cell, launch)`` pairs of a run's plan that have not ended: not measured, not found invalid, not skipped."""
    done = run.done_cells()
    skipped = {item["cell"] for item in run.manifest.get("skipped", [])}
    wanted = [
        (cell, int(launch["launch"]))
        for launch in run.manifest.get("plan", {}).get("launches", [])
        for cell in launch["cells"]
        if cell not in skipped
    ]
    return [pair for pair in wanted if pair not in done]


def _text(request: Mapping[str, Any]) -> str:
    text = str(request["sweep"])
    return text if "\n" in text else text + "\n"


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


def _folder(
    request: Mapping[str, Any], sweep: dict[str, Any], cells: list[Any], infeasible: list[Any], corpora: dict[str, str]
) -> set[tuple[str, int]]:
    path = Path(request["folder"])
    if is_run_folder(path):
        with RunFolder.open(path) as run:
            run.set_label("running")
            run.journal({"event": "resume", "outcome": "ok", "message": (request.get("manifest") or {}).get("reason")})
            return run.done_cells()
    unfit = {item.cell for item in infeasible}
    plan_launches = [
        {"launch": launch.index, "block": launch.block, "profile": launch.profile, "cells": list(launch.cells)}
        for launch in schedule(load_sweep(_text(request)), [cell for cell in cells if cell.id not in unfit])
    ]
    manifest = {
        "name": sweep["name"],
        "sweep": sweep,
        "cells": [msgspec.to_builtins(cell) for cell in cells],
        "skipped": [{"cell": item.cell, "title": item.title, "reason": item.reason} for item in infeasible],
        "plan": {"launches": plan_launches},
        "corpora": corpora,
        **(request.get("manifest") or {}),
    }
    with RunFolder.create(path, manifest) as run:
        run.write_file("sweep.yml", _text(request).encode())
        run.journal({"event": "start", "outcome": "ok", "message": manifest.get("reason")})
    return set()


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
