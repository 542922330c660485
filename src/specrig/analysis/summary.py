"""The whole analysis of a run as one plain mapping: what summary.json holds and what every page is made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from specrig.analysis.acceptance import acceptance
from specrig.analysis.choice import Choice, best, regrets
from specrig.analysis.frames import METHOD_ALIASES, Part, Row, RunData, number
from specrig.analysis.intervals import DEFAULT_LEVEL, DEFAULT_MARGIN
from specrig.analysis.losslessness import losslessness
from specrig.analysis.percentiles import Distribution, distribution, weighted
from specrig.analysis.samples import Key, Sample, Samples, arms, by_arm, collect, key_of
from specrig.analysis.speedup import (
    DECODE,
    THROUGHPUT,
    Cells,
    Speedup,
    decode_cells,
    sessions,
    speedups,
    throughput_cells,
)
from specrig.analysis.validity import MAX_POST_EOS_SHARE, PartValidity, judge, post_eos_share

SCHEMA = 1


def summarise(
    run: RunData,
    *,
    margin: float | None = None,
    level: float = DEFAULT_LEVEL,
    max_post_eos: float = MAX_POST_EOS_SHARE,
) -> Row:
    """Everything the reports show, as JSON-ready values; unknown is None.

    Args:
        run: the run as read.
        margin: the verdict's margin; the sweep's own, else 2 %, when None.
        level: confidence level of the intervals.
        max_post_eos: largest share of tokens after the first end-of-sequence token in a valid cell.
    """
    manifest = run.manifest
    sweep = _mapping(manifest.get("sweep"))
    baseline = str(sweep.get("baseline") or "autoregressive")
    baseline = METHOD_ALIASES.get(baseline, baseline)
    if margin is None:
        margin = number(sweep.get("margin")) or DEFAULT_MARGIN
    valid = judge(run, max_post_eos)
    samples = collect(run, valid)
    found = speedups(samples.rows, run, valid, baseline, margin=margin, level=level)
    over_baseline = [item for item in found if item.baseline.split("@")[0] == baseline]
    choices, losses = _choices(samples.rows, run, valid, baseline)
    origin = engine_of(run)
    problems = list(run.problems)
    problems += [
        f"launch {row['launch']} of {row['profile'] or 'unknown'} did not run: {row['error']}"
        for row in _launches(run)
        if row["error"]
    ]
    problems += [f"{count} samples left out: {why}" for why, count in samples.left_out.items()]
    cells = _cells(run, valid, samples)
    problems += _gaps(cells, over_baseline, baseline)
    return {
        "schema": SCHEMA,
        "run": run.name,
        "name": manifest.get("name") or sweep.get("name"),
        "folders": [path.resolve().name for path in run.paths],
        "label": manifest.get("label") if isinstance(manifest.get("label"), str) else "unknown",
        **origin,
        "created_at": manifest.get("created_at"),
        "reason": manifest.get("reason"),
        "by": manifest.get("by"),
        "versions": _mapping(manifest.get("versions")),
        "model": _mapping(manifest.get("model")) or {"name": sweep.get("model")},
        "corpora": _mapping(manifest.get("corpora")),
        "git": _mapping(manifest.get("git")),
        "hosts": _hosts(manifest),
        "sampling": _mapping(sweep.get("sampling")),
        "baseline": baseline,
        "margin": margin,
        "level": level,
        "launches": _launches(run),
        "cells": cells,
        "speedups": [_speedup(item) for item in over_baseline],
        "pairs": [_speedup(item) for item in found if item not in over_baseline],
        "best": choices,
        "regret": losses,
        "agentic": _agentic(run, valid, found, baseline),
        "losslessness": _lossless(samples, sweep, baseline),
        "skipped": _skipped(run),
        "placements": _placements(manifest),
        "problems": problems,
    }


def engine_of(run: RunData) -> Row:
    """Where the numbers come from: simulated (None = unknown), hardware, time scale and the banner line."""
    engine = _mapping(run.manifest.get("engine"))
    kind = str(engine.get("kind") or "unknown")
    hardware = str(engine.get("hardware") or "unknown")
    flags = [row["simulated"] for row in run.parts if row["simulated"] is not None]
    scales = {row["time_scale"] for row in run.parts if row["time_scale"] is not None}
    for launch in _sequence(run.manifest.get("launches")):
        info = _mapping(_mapping(launch).get("server_info"))
        if isinstance(info.get("simulated"), bool):
            flags.append(info["simulated"])
        scale = number(info.get("sim_time_scale"))
        if scale is not None:
            scales.add(scale)
    scale = number(engine.get("time_scale"))
    if scale is not None:
        scales.add(scale)
    simulated: bool | None = None
    if kind.startswith("sim") or hardware == "simulated" or any(flags):
        simulated = True
        hardware = "simulated"
    elif flags or hardware in ("gpu", "cpu"):
        simulated = False
    if simulated:
        said = ", ".join(f"{value:g}" for value in sorted(scales)) or "unknown"
        banner = f"SIMULATED ENGINE, time scale {said}: not GPU performance"
    elif hardware == "cpu":
        banner = "CPU ENGINE: not GPU performance"
    elif hardware != "gpu":
        banner = "HARDWARE UNKNOWN: not to be read as GPU performance"
    else:
        banner = None
    return {
        "engine": kind,
        "hardware": hardware,
        "simulated": simulated,
        "time_scale": next(iter(scales)) if len(scales) == 1 else None,
        "banner": banner,
    }


def _cells(run: RunData, valid: Mapping[Part, PartValidity], samples: Samples) -> list[Row]:
    by_cell: dict[str, list[PartValidity]] = {}
    for item in valid.values():
        by_cell.setdefault(item.cell, []).append(item)
    full: dict[str, list[Sample]] = {}
    for sample in samples.rows:
        if sample.key.length == sample.key.output_tokens and sample.full:
            full.setdefault(sample.cell, []).append(sample)
    rows_of: dict[str, list[Row]] = {}
    for raw in run.requests.to_dict("records"):
        rows_of.setdefault(raw["cell"], []).append({str(k): v for k, v in raw.items()})
    arm = arms(run)
    order = sorted(by_cell, key=lambda c: (key_of(run, c), arm[c]))
    out = []
    for cell in order:
        info = run.cells[cell]
        parts = sorted(by_cell[cell], key=lambda p: p.launch)
        ran = [p for p in parts if p.state != "skipped"]
        good = [p for p in ran if p.valid]
        kept = {(p.cell, p.launch) for p in good}
        raws = [r for r in rows_of.get(cell, []) if r["ok"] and (cell, int(r["launch"])) in kept]
        bad = [p for p in parts if not p.valid]
        reason = "; ".join(dict.fromkeys(p.reason or "" for p in bad)) or None
        if good and bad:
            reason = "; ".join(f"launch {p.launch} left out: {p.reason}" for p in bad)
        out.append(
            {
                "cell": cell,
                "valid": bool(good),
                "reason": reason,
                "state": "skipped" if not ran else ("valid" if good else "invalid"),
                **{name: getattr(info, name) for name in ("workload", "profile", "tp", "prompts", "cache", "rate")},
                "arrival": info.arrival,
                "method": arm[cell],
                "prompt_tokens": info.prompt_tokens,
                "output_tokens": info.output_tokens,
                "concurrency": info.concurrency,
                "launches": [
                    {
                        "launch": p.launch,
                        "block": p.block,
                        "valid": p.valid,
                        "state": p.state,
                        "reason": p.reason,
                        "requests": p.requests,
                        "ok": p.ok,
                        "unknown": p.unknown,
                    }
                    for p in parts
                ],
                "requests": sum(p.requests for p in parts),
                "ok": sum(p.ok for p in parts),
                **_metrics(run, cell, full.get(cell, []), raws, kept),
            }
        )
    return out


def _metrics(run: RunData, cell: str, rows: list[Sample], raws: list[Row], kept: set[Part]) -> Row:
    rates = [row.decode_rate for row in rows if row.decode_rate is not None]
    pooled = [(row.decode_tokens, row.decode_s) for row in rows if row.decode_tokens and row.decode_s]
    gaps: list[tuple[float, float]] = []
    for (name, launch, _), (times, counts) in run.traces.items():
        if name == cell and (name, launch) in kept:
            for i in range(1, len(times)):
                gaps.append(((times[i] - times[i - 1]) / counts[i], counts[i]))
    windows = [
        row["window"] for row in run.parts if (row["cell"], row["launch"]) in kept and row["window"]["tokens_per_s"]
    ]
    server = [v for v in (number(r["server_accept_length"]) for r in raws) if v is not None]
    accepted = acceptance(rows, sum(server) / len(server) if server else None)
    sources = sorted({r["token_source"] for r in raws if r["token_source"]})
    decode = _dist(distribution(rates))
    if decode is not None and pooled:
        decode["pooled"] = math.fsum(t for t, _ in pooled) / math.fsum(s for _, s in pooled)
    opened = run.cells[cell].arrival not in (None, "closed")
    waits = [r["first_s"] - r["scheduled_s"] for r in raws] if opened else []
    return {
        "decode_tokens_per_s": decode,
        "scheduled_ttft_s": _dist(distribution(_known(waits))),
        "ttft_s": _dist(distribution(_known(r["ttft_s"] for r in raws))),
        "e2e_s": _dist(distribution(row.e2e_s for row in rows if row.e2e_s is not None)),
        "itl_s": _dist(weighted(gaps, "tokens")),
        "throughput_tokens_per_s": _mean([w["tokens_per_s"] for w in windows]),
        "running_mean": _mean([w["running_mean"] for w in windows if w["running_mean"] is not None]),
        "acceptance": asdict(accepted) if accepted else None,
        "post_eos_share": post_eos_share(raws),
        "cached_tokens_mean": _mean(_known(r["cached_tokens"] for r in raws)),
        "token_source": sources[0] if len(sources) == 1 else (sources or None),
    }


def _speedup(item: Speedup) -> Row:
    result = asdict(item.result)
    return {
        "metric": item.metric,
        **asdict(item.key),
        "method": item.method,
        "baseline": item.baseline,
        "speedup": result.pop("geometric_mean"),
        **result,
        "label": "within one launch" if item.result.launches < 2 else f"{item.result.launches} launches",
        "ratio_of_sums": item.ratio_of_sums,
        "maximum": item.maximum,
        "maximum_prompt": item.maximum_prompt,
        "decomposition": asdict(item.decomposition) if item.decomposition else None,
    }


def _choices(
    rows: list[Sample], run: RunData, valid: Mapping[Part, PartValidity], baseline: str
) -> tuple[list[Row], list[Row]]:
    """The best method per key by decode rate and, with more than one in flight, by throughput; and the regrets."""
    decode: dict[Key, Mapping[str, Cells]] = {
        key: {method: decode_cells(samples) for method, samples in found.items()}
        for key, found in by_arm(rows).items()
        if not any(sample.session for samples in found.values() for sample in samples)
    }
    out: list[Row] = []
    losses: list[Row] = []
    for metric, tables in ((DECODE, decode), (THROUGHPUT, throughput_cells(run, valid))):
        chosen = {key: choice for key in sorted(tables) if (choice := best(key, tables[key], baseline)) is not None}
        out += [{"metric": metric, **_flat(choice)} for choice in chosen.values()]
        losses += [{"metric": metric, **asdict(item)} for item in regrets(tables, chosen)]
    return out, losses


def _flat(item: Choice) -> Row:
    out = asdict(item)
    return {**out.pop("key"), **out}


def _agentic(run: RunData, valid: Mapping[Part, PartValidity], found: Iterable[Speedup], baseline: str) -> list[Row]:
    arm = arms(run)
    groups: dict[tuple[Key, str], list[Any]] = {}
    for item in sessions(run, valid):
        groups.setdefault((key_of(run, item.cell), arm[item.cell]), []).append(item)
    ratios = {(s.key, s.method): s for s in found if s.metric == "session" and s.baseline.split("@")[0] == baseline}
    out = []
    for (key, method), items in sorted(groups.items(), key=lambda pair: (pair[0][0], pair[0][1])):
        tokens = math.fsum(s.tokens for s in items)
        wall = math.fsum(s.wall_s for s in items)
        tool = math.fsum(s.tool_s for s in items)
        ratio = ratios.get((key, method))
        out.append(
            {
                **asdict(key),
                "method": method,
                "sessions": len(items),
                "turns": sum(s.turns for s in items),
                "tokens": tokens,
                "wall_s": wall,
                "tool_s": tool,
                "tokens_per_s": tokens / (wall - tool),
                "tokens_per_s_with_tools": tokens / wall,
                "session_tokens_per_s": _dist(distribution((s.tokens_per_s for s in items), "sessions")),
                "last_prompt_tokens": max(s.last_prompt_tokens for s in items),
                "speedup": _speedup(ratio) if ratio else None,
            }
        )
    return out


def _lossless(samples: Samples, sweep: Row, baseline: str) -> Row:
    temperature = number(_mapping(sweep.get("sampling")).get("temperature"))
    if temperature is None:
        return {"applies": None, "why": "the temperature is unknown", "rows": []}
    if temperature > 0:
        return {
            "applies": False,
            "why": f"sampled at temperature {temperature:g}: outputs differ by design",
            "rows": [],
        }
    rows = [
        {**asdict(item.key), **{k: v for k, v in asdict(item).items() if k != "key"}}
        for item in losslessness(samples.rows, baseline)
    ]
    why = None if rows else "no output ids of a method and of the baseline for the same prompts"
    return {"applies": bool(rows) or None, "why": why, "rows": rows}


def _gaps(cells: list[Row], found: list[Speedup], baseline: str) -> list[str]:
    """What a reader would look for and not find, a line each."""
    out: list[str] = []
    if not cells:
        return [*out, "no cell was run: there is nothing to measure"]
    if not any(cell["valid"] for cell in cells):
        out.append("no valid cell: every figure is unknown; the reasons are listed with the cells")
        return out
    methods = {(c["tp"], c["method"]) for c in cells if c["valid"] and c["method"] != "unknown"}
    for tp in sorted({tp for tp, _ in methods}, key=lambda v: v or 0):
        here = {str(method) for t, method in methods if t == tp}
        where = "tp unknown" if tp is None else f"tp {tp}"
        if not any(method.split("@")[0] == baseline for method in here):
            out.append(
                f"{where}: the baseline {baseline} has no valid cell, so {', '.join(sorted(here))} has no speed-up"
            )
        elif len(here) == 1:
            out.append(f"{where}: only the baseline has valid cells, so there is no speed-up")
        elif not any(s.key.tp == (tp or 0) for s in found):
            out.append(f"{where}: no prompt was answered by two methods at the same context, length and load")
    if not methods and not found:
        out.append("the method of this run is unknown, so there is no speed-up")
    return out


def _skipped(run: RunData) -> list[Row]:
    out: dict[str, Row] = {}
    rows = [_mapping(item) for item in _sequence(run.manifest.get("skipped"))]
    rows += [row for row in run.parts if row["state"] == "skipped"]
    for row in rows:
        cell = row.get("cell")
        name = str(cell.get("id") if isinstance(cell, dict) else cell)
        info = run.cells.get(name)
        out.setdefault(
            name,
            {
                "cell": name,
                "reason": str(row.get("reason") or "no reason recorded"),
                "workload": info.workload if info else None,
                "profile": info.profile if info else None,
                "method": info.method if info else None,
                "tp": info.tp if info else None,
                "prompt_tokens": info.prompt_tokens if info else None,
                "output_tokens": info.output_tokens if info else None,
                "concurrency": info.concurrency if info else None,
            },
        )
    return list(out.values())


def _launches(run: RunData) -> list[Row]:
    out = []
    for raw in _sequence(run.manifest.get("launches")):
        launch = _mapping(raw)
        gates = [_mapping(g) for g in _sequence(launch.get("gates"))]
        info = _mapping(launch.get("server_info"))
        out.append(
            {
                "launch": launch.get("launch"),
                "profile": launch.get("profile"),
                "block": launch.get("block"),
                "t0_unix": number(launch.get("t0_unix")),
                "gates": gates,
                "gates_not_passed": [g for g in gates if g.get("status") != "pass"],
                "engine_version": info.get("version"),
                "error": launch.get("error") if isinstance(launch.get("error"), str) else None,
            }
        )
    return out


def _placements(manifest: Row) -> list[Row]:
    """Profile, planned and actual placement; the actual one is what the last placement gate saw."""
    planned = _mapping(manifest.get("placements"))
    actual: dict[str, Row] = {}
    for raw in _sequence(manifest.get("launches")):
        launch = _mapping(raw)
        for gate in (_mapping(g) for g in _sequence(launch.get("gates"))):
            profile = gate.get("profile") or gate.get("subject") or launch.get("profile")
            if gate.get("gate") == "placement" and isinstance(profile, str):
                actual[profile] = gate
    out = []
    for profile in sorted({*map(str, planned), *actual}):
        plan = _mapping(planned.get(profile))
        plan = _mapping(plan.get("planned")) or plan
        gate = actual.get(profile, {})
        seen = _mapping(gate.get("seen")) or _mapping(_mapping(planned.get(profile)).get("actual"))
        out.append(
            {
                "profile": profile,
                "planned": {k: plan.get(k) for k in ("gpus", "numa_nodes", "cpus", "numa")},
                "actual": {k: seen.get(k) for k in ("gpus", "numa_nodes")},
                "status": gate.get("status") or "unknown",
                "message": gate.get("message"),
            }
        )
    return out


def _hosts(manifest: Row) -> Row:
    """The few host facts a page shows: GPUs, driver and simulation, of each host that was looked at."""
    facts = _mapping(manifest.get("host_facts"))
    looks = {"host": facts} if "gpus" in facts or "driver" in facts else facts
    out = {}
    for name, raw in looks.items():
        look = _mapping(raw)
        gpus = [_mapping(g) for g in _sequence(look.get("gpus"))]
        driver = _mapping(look.get("driver"))
        if gpus or driver:
            names = sorted({str(g.get("name")) for g in gpus if g.get("name")})
            out[str(name)] = {
                "gpus": len(gpus),
                "gpu_names": names,
                "driver": driver.get("module_version"),
                "library": driver.get("library_version"),
                "simulated": look.get("simulated"),
            }
    return out


def _dist(item: Distribution | None) -> Row | None:
    if item is None:
        return None
    out = asdict(item)
    return {**{k: v for k, v in out.items() if k != "percentiles"}, **out["percentiles"]}


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _known(values: Iterable[Any]) -> list[float]:
    return [v for v in (number(value) for value in values) if v is not None]


def _mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
