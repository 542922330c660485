"""``specrig export RUN``: a run under the JSON keys of other load generators."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrig.report.export import Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("run", metavar="RUN", help="the run folder")
    add("--format", required=True, choices=("aiperf", "vllm", "sglang"), help="whose keys")
    add("--out", metavar="DIR", help="where to write (default: RUN/export-FORMAT)")
    add("--all", action="store_true", help="cells that are invalid or incomplete too; their specrig.valid is false")
    add("--json", action="store_true", help="print which files were written and which cells were left out")


def run(args: argparse.Namespace) -> int:
    """Write the files; what was left out is named."""
    import sys
    from pathlib import Path

    from specrig.errors import GateError, UsageError
    from specrig.report.export import render
    from specrig.runs.lines import encoded

    folder = Path(args.run)
    measured = _read(folder)
    chosen = [cell for cell in measured if args.all or cell.row.state == "done"]
    left = [cell for cell in measured if cell not in chosen]
    reasons = [f"{_name(cell)}: {cell.row.state}, {cell.row.reason or 'no reason given'}" for cell in left]
    if not chosen:
        why = f" ({reasons[0]}); --all exports it, marked" if reasons else ""
        raise GateError(f"{folder}: no valid cell to export{why}")
    out = Path(args.out) if args.out else folder / f"export-{args.format}"
    files = []
    for name, data in render(chosen, args.format).items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.new")
            scratch.write_bytes(data)
            scratch.replace(path)
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be written: {error.strerror or error}; name another folder with --out"
            ) from error
        files.append(str(path))
    if args.json:
        sys.stdout.write(encoded({"files": files, "left_out": reasons}).decode() + "\n")
        return 0
    for reason in reasons:
        print(f"left out: {reason}", file=sys.stderr)
    if chosen[0].row.simulated:
        print("measured on the simulated engine: not GPU performance; the label of every file says so")
    print(f"{len(files)} file{'s' if len(files) != 1 else ''} with {len(chosen)} cells in {out}")
    return 0


def _name(cell: Measured) -> str:
    return f"{cell.row.title or cell.row.workload}, launch {cell.row.launch}"


def _read(folder: object) -> list[Measured]:
    """Every cell of a run that ended, with its requests.

    Raises:
        UsageError: no run is there, or a line of it is not one of ours.
    """
    from pathlib import Path

    import msgspec

    from specrig.errors import SpecrigError, UsageError
    from specrig.model.record import CellRow, ChunkTrace, Request
    from specrig.report.export import Measured
    from specrig.runs.folder import RunFolder

    assert isinstance(folder, Path)
    with RunFolder.open(folder) as opened:
        manifest = opened.manifest
        requests: dict[tuple[str, int], list[Request]] = {}
        traces: dict[tuple[str, int], dict[int, ChunkTrace]] = {}
        try:
            rows = [msgspec.convert(row, CellRow) for row in opened.read_cells()]
            for line in opened.read_requests():
                request = msgspec.convert(line, Request)
                requests.setdefault((request.cell, request.launch), []).append(request)
            for line in opened.read_chunks():
                trace = msgspec.convert(line, ChunkTrace)
                traces.setdefault((trace.cell, trace.launch), {})[trace.index] = trace
        except (msgspec.ValidationError, SpecrigError) as error:
            raise UsageError(f"{folder}: not a run of this version: {error}") from error
    cells = {cell.get("id"): cell for cell in manifest["cells"]}
    engine = manifest.get("engine")
    hardware = engine.get("hardware") if isinstance(engine, dict) else None
    origins = {launch.get("launch"): launch.get("t0_unix") for launch in manifest.get("launches") or []}
    return [
        Measured(
            run=opened.name,
            row=row,
            cell=cells.get(row.cell, {}),
            requests=tuple(sorted(requests.get((row.cell, row.launch), []), key=lambda request: request.index)),
            chunks=traces.get((row.cell, row.launch), {}),
            hardware=hardware if isinstance(hardware, str) else None,
            t0_unix=origins.get(row.launch),
        )
        for row in rows
    ]
