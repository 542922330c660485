"""Run folders as tables: tolerant of cut-off lines, unknown fields and values of the wrong type.

Nothing here judges a number; a value that cannot be read is unknown (``None``/``NaN``), and a line in
``problems`` says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specrig.errors import UsageError
from specrig.model.profile import ALIASES

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
Part = tuple[str, int]
"""One cell in one launch: the unit of validity."""

RUN_FILES = ("manifest.json", "requests.jsonl", "cells.jsonl")
METHOD_ALIASES = ALIASES

_NUMBERS = (
    *("tp", "launch", "block", "index", "status", "turn", "tool_s"),
    *("prompt_tokens", "prompt_tokens_asked", "output_tokens", "output_tokens_asked", "cached_tokens", "first_eos"),
    *("scheduled_s", "sent_s", "first_s", "finished_s", "first_chunk_tokens", "chunks"),
    *("ttft_s", "ttfa_s", "e2e_s", "decode_tokens_per_s", "tpot_s", "itl_mean_s"),
    *("verify_steps", "correct_drafts", "server_accept_length"),
)
_TEXTS = (
    *("run", "cell", "profile", "method", "prompt_id", "rid", "session"),
    *("error", "finish_reason", "token_source", "server_message"),
)
_CELL_NUMBERS = (
    *("launch", "block", "tp", "prompt_tokens", "output_tokens", "concurrency"),
    *("requests", "ok", "wall_s", "time_scale"),
)
_CELL_TEXTS = ("cell", "profile", "workload", "method", "prompts", "cache", "state", "reason", "started_at", "stop")
_READ_NUMBERS = ("finished_s", "decode_tokens_per_s", "e2e_s", "verify_steps", "correct_drafts", "tokens")


@dataclass(frozen=True)
class CellInfo:
    """What a cell is, merged from the manifest, its rows in ``cells.jsonl`` and its requests."""

    cell: str
    workload: str | None = None
    profile: str | None = None
    method: str | None = None
    tp: int | None = None
    prompts: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    cache: str | None = None
    stop: str | None = None
    arrival: str | None = None


@dataclass(frozen=True)
class RunData:
    """One run folder (or several, merged) in memory.

    Attributes:
        requests: one row a request, the last record of each (cell, launch, index); numbers are floats, NaN = unknown.
        parts: one row a (cell, launch) of ``cells.jsonl``, the last one written.
        traces: (cell, launch, index) -> (chunk times in s, tokens per chunk).
        problems: what could not be read, a line each.
    """

    name: str
    paths: tuple[Path, ...]
    manifest: Row
    requests: pd.DataFrame
    parts: list[Row]
    cells: dict[str, CellInfo]
    traces: dict[tuple[str, int, int], tuple[list[float], list[float]]]
    problems: list[str] = field(default_factory=list)


def read_run(path: str | Path, *, traces: bool = True) -> RunData:
    """Read a run folder.

    Raises:
        UsageError: when ``path`` is not a folder that holds at least one of the run files.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder of a run (it holds {', '.join(RUN_FILES)})")
    if not any((folder / name).is_file() for name in RUN_FILES):
        raise UsageError(f"{folder}: not a run folder: none of {', '.join(RUN_FILES)} is in it")
    problems: list[str] = []
    manifest = _read_object(folder / "manifest.json", problems)
    wrong: Counter[str] = Counter()
    requests: dict[tuple[str, int, int], Row] = {}
    for raw in read_objects(folder / "requests.jsonl", problems):
        row = _request(raw, wrong)
        if row is None:
            wrong["a record without cell and index"] += 1
            continue
        requests[(row["cell"], row["launch"], row["index"])] = row
    parts: dict[Part, Row] = {}
    for raw in read_objects(folder / "cells.jsonl", problems):
        part = _part(raw, wrong)
        if part is None:
            wrong["a row without cell"] += 1
            continue
        parts[(part["cell"], part["launch"])] = part
    problems += [f"{count} x {what}: taken as unknown" for what, count in sorted(wrong.items())]
    found: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    if traces:
        for raw in read_objects(folder / "chunks.jsonl", problems):
            _trace(raw, found)
    rows = list(requests.values())
    part_rows = list(parts.values())
    name = _text(manifest.get("run")) or folder.resolve().name
    return RunData(
        name=name,
        paths=(folder,),
        manifest=manifest,
        requests=requests_frame(rows),
        parts=part_rows,
        cells=_cells(manifest, part_rows, rows),
        traces=found,
        problems=problems,
    )


def merge_runs(runs: list[RunData]) -> RunData:
    """Several runs as one: launches renumbered, and the launches of an arm paired with the baseline's in order.

    The n-th launch of (method, tp), counted over the runs in the order given, becomes block n. So the folders of one
    load run per method, or of three repetitions, can be read together.
    """
    import pandas as pd

    if len(runs) == 1:
        return runs[0]
    launch_of: dict[tuple[int, int], int] = {}
    seen: dict[tuple[Any, Any], list[int]] = {}
    block_of: dict[tuple[int, int], int] = {}
    requests: list[Row] = []
    parts: list[Row] = []
    traces: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    cells: dict[str, CellInfo] = {}
    problems: list[str] = []
    skipped: list[Any] = []
    launches: list[Any] = []
    for number, run in enumerate(runs):
        for old in sorted({int(r["launch"]) for r in run.parts} | {int(v) for v in run.requests["launch"]}):
            launch_of[(number, old)] = len(launch_of)
        arms = {}
        names = {cell: _merged_name(info, cells) for cell, info in run.cells.items()}
        rows: list[Row] = [*records(run.requests), *run.parts]
        for row in rows:
            info = run.cells[row["cell"]]
            arms[int(row["launch"])] = (info.method, info.tp)
        for old, arm in sorted(arms.items()):
            order = seen.setdefault(arm, [])
            order.append(launch_of[(number, old)])
            block_of[(number, old)] = len(order) - 1
        for row in rows:
            at = (number, int(row["launch"]))
            row = {**row, "cell": names[row["cell"]], "launch": launch_of[at], "block": block_of[at]}
            (parts if "checks" in row else requests).append(row)
        for (cell, old, index), trace in run.traces.items():
            if (number, old) in launch_of and cell in names:
                traces[(names[cell], launch_of[(number, old)], index)] = trace
        cells.update({name: replace(run.cells[cell], cell=name) for cell, name in names.items()})
        problems += [f"{run.name}: {line}" for line in run.problems]
        skipped += _list(run.manifest.get("skipped"))
        for launch in _list(run.manifest.get("launches")):
            at = (number, _integer(_dict(launch).get("launch")) or 0)
            if at in launch_of:
                launches.append({**launch, "launch": launch_of[at], "block": block_of.get(at)})
    manifest = {**runs[0].manifest, "skipped": skipped, "launches": launches}
    placements: Row = {}
    for run in runs:
        placements.update(_dict(run.manifest.get("placements")))
    manifest["placements"] = placements
    labels = sorted({str(run.manifest.get("label") or "unknown") for run in runs})
    manifest["label"] = labels[0] if len(labels) == 1 else " + ".join(labels)
    return RunData(
        name=" + ".join(run.name for run in runs),
        paths=tuple(p for run in runs for p in run.paths),
        manifest=manifest,
        requests=pd.DataFrame(requests) if requests else requests_frame([]),
        parts=parts,
        cells=cells,
        traces=traces,
        problems=problems,
    )


def _merged_name(info: CellInfo, known: Mapping[str, CellInfo]) -> str:
    """A cell's id, with its method where another run uses the id for another one (plain loads know no profile)."""
    name = info.cell
    other = known.get(name)
    if other is not None and (other.method, other.tp) != (info.method, info.tp):
        name = f"{info.cell}-{info.method}-tp{info.tp}"
    return name


def method_label(raw: Mapping[str, Any]) -> str | None:
    """``ddtree-b15`` for a mapping with method and budget, or its own label; aliases resolved; None if unknown."""
    label = _text(raw.get("label"))
    if label:
        return METHOD_ALIASES.get(label, label)
    method = _text(raw.get("method"))
    if method is None:
        return None
    method = METHOD_ALIASES.get(method, method)
    budget = _number(raw.get("budget"))
    if budget is not None and "-b" not in method:
        return f"{method}-b{int(budget)}"
    return method


def number(value: Any) -> float | None:
    """``value`` as a finite float, or None."""
    return _number(value)


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame as mappings."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def requests_frame(rows: list[Row]) -> pd.DataFrame:
    """The frame of normalised request rows, with the columns and types that every reader relies on."""
    import pandas as pd

    frame = pd.DataFrame.from_records(rows, columns=[*_TEXTS, *_NUMBERS, "ok", "eos_known", "reads", "output_ids"])
    for name in _NUMBERS:
        frame[name] = frame[name].astype("float64")
    for name in ("launch", "block", "index"):
        frame[name] = frame[name].astype("int64")
    frame["ok"] = frame["ok"].astype("bool")
    frame["eos_known"] = frame["eos_known"].astype("bool")
    for name in [*_TEXTS, "reads", "output_ids"]:
        frame[name] = frame[name].astype("object").where(frame[name].notna(), None)
    return frame


def _read_object(path: Path, problems: list[str]) -> Row:
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path.name}: not there; what was run, on what and why is unknown")
        return {}
    except (OSError, msgspec.DecodeError) as error:
        problems.append(f"{path.name}: cannot be read ({error}); what was run, on what and why is unknown")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: holds a {type(value).__name__}, not an object; taken as empty")
        return {}
    return value


def read_objects(path: Path, problems: list[str]) -> Iterator[Row]:
    """The objects of a JSON-lines file; unreadable lines are counted, a cut-off last one is named as such."""
    try:
        data = path.open("rb")
    except FileNotFoundError:
        if path.name != "chunks.jsonl":
            problems.append(f"{path.name}: not there")
        return
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror or error})")
        return
    decoder = msgspec.json.Decoder()
    bad = 0
    cut = False
    with data:
        for line in data:
            if not line.strip():
                continue
            try:
                value = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                value = None
            if isinstance(value, dict):
                yield value
            elif line.endswith(b"\n"):
                bad += 1
            else:
                cut = True
    if bad:
        problems.append(f"{path.name}: {bad} unreadable line{'s' if bad > 1 else ''} left out")
    if cut:
        problems.append(f"{path.name}: the last line is cut off (the writer was stopped); left out")


def _request(raw: Row, wrong: Counter[str]) -> Row | None:
    cell = _text(raw.get("cell"))
    index = _number(raw.get("index"))
    if cell is None or index is None:
        return None
    row: Row = {"ok": raw.get("ok") is True, "eos_known": raw.get("eos_known") is not False}
    for name in _TEXTS:
        row[name] = _text(raw.get(name))
        if row[name] is None and raw.get(name) is not None:
            wrong[f"{name} of the wrong type"] += 1
    for name in _NUMBERS:
        row[name] = _number(raw.get(name))
        if row[name] is None and raw.get(name) is not None:
            wrong[f"{name} of the wrong type"] += 1
    row["index"] = int(index)
    row["launch"] = int(row["launch"] or 0)
    row["block"] = int(row["block"] if row["block"] is not None else row["launch"])
    if row["method"] is not None:
        row["method"] = METHOD_ALIASES.get(row["method"], row["method"])
    reads: dict[int, dict[str, float | None]] = {}
    for length, read in _dict(raw.get("reads")).items():
        if str(length).isdigit() and isinstance(read, dict):
            reads[int(length)] = {name: _number(read.get(name)) for name in _READ_NUMBERS}
    row["reads"] = reads or None
    ids = raw.get("output_ids")
    row["output_ids"] = ids if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids) else None
    return row


def _part(raw: Row, wrong: Counter[str]) -> Row | None:
    cell = _text(raw.get("cell"))
    if cell is None:
        return None
    row: Row = {name: _text(raw.get(name)) for name in _CELL_TEXTS}
    row.update({name: _number(raw.get(name)) for name in _CELL_NUMBERS})
    row["method"] = method_label(raw)
    row["launch"] = int(row["launch"] or 0)
    row["simulated"] = raw.get("simulated") if isinstance(raw.get("simulated"), bool) else None
    window = _dict(raw.get("window"))
    row["window"] = {k: _number(window.get(k)) for k in ("start_s", "end_s", "tokens", "tokens_per_s", "running_mean")}
    checks = []
    for check in _list(raw.get("checks")):
        if isinstance(check, dict) and _text(check.get("rule")):
            checks.append({k: check.get(k) for k in ("rule", "ok", "seen", "expected")})
        else:
            wrong["a check that is not an object with a rule"] += 1
    row["checks"] = checks
    return row


def _trace(raw: Row, found: dict[tuple[str, int, int], tuple[list[float], list[float]]]) -> None:
    cell, launch, index = _text(raw.get("cell")), _number(raw.get("launch")), _number(raw.get("index"))
    times, tokens = raw.get("t"), raw.get("k")
    if cell is None or index is None or not isinstance(times, list) or not isinstance(tokens, list):
        return
    if len(times) != len(tokens) or not all(isinstance(x, (int, float)) for x in [*times, *tokens]):
        return
    kept = [(float(t), float(k)) for t, k in zip(times, tokens, strict=True) if k > 0]
    found[(cell, int(launch or 0), int(index))] = ([t for t, _ in kept], [k for _, k in kept])


def _cells(manifest: Row, parts: list[Row], requests: list[Row]) -> dict[str, CellInfo]:
    merged: dict[str, Row] = {}

    def add(cell: str, values: Row) -> None:
        known = merged.setdefault(cell, {})
        for name, value in values.items():
            if value is not None and known.get(name) is None:
                known[name] = value

    for raw in _list(manifest.get("cells")):
        if not isinstance(raw, dict):
            continue
        cell = _text(raw.get("id")) or _text(raw.get("cell"))
        if cell is not None:
            texts = {
                name: _text(raw.get(name)) for name in ("workload", "profile", "prompts", "cache", "stop", "arrival")
            }
            numbers = {
                name: _integer(raw.get(name))
                for name in ("tp", "prompt_tokens", "output_tokens", "concurrency", "requests")
            }
            turns = _integer(raw.get("turns"))
            if turns and numbers["requests"]:
                numbers["requests"] *= turns
            add(cell, {**texts, **numbers, "rate": _number(raw.get("rate")), "method": method_label(raw)})
    for row in parts:
        names = ("tp", "prompt_tokens", "output_tokens", "concurrency")
        counts = {name: _integer(row.get(name)) for name in names}
        texts = {name: row.get(name) for name in ("workload", "profile", "method", "prompts", "cache", "stop")}
        add(row["cell"], {**texts, **counts})
    for row in requests:
        known = merged.get(row["cell"])
        if known is not None and known.get("method") and known.get("prompt_tokens") and known.get("output_tokens"):
            continue
        add(
            row["cell"],
            {
                "profile": row["profile"],
                "method": row["method"],
                "tp": _integer(row["tp"]),
                "prompt_tokens": _integer(row["prompt_tokens_asked"]),
                "output_tokens": _integer(row["output_tokens_asked"]),
            },
        )
    # the request's own label wins over a bare method name of the definition ("ddtree" against "ddtree-b15")
    for row in requests:
        known = merged[row["cell"]]
        if row["method"] and str(row["method"]).startswith(str(known.get("method"))):
            known["method"] = row["method"]
    return {cell: CellInfo(cell=cell, **values) for cell, values in merged.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _integer(value: Any) -> int | None:
    found = _number(value)
    return None if found is None else int(found)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None


def _dict(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
