"""The summary arranged for a reader: tables per tp, best method per cell, cells and their reasons, provenance."""

from __future__ import annotations

from typing import Any

from specrig.analysis.samples import method_order
from specrig.report import text

Row = dict[str, Any]

OPEN_LOOP_COLUMNS = (
    *("scheduled TTFT mean, ms", "scheduled TTFT p50, ms", "scheduled TTFT p99, ms"),
    *("TTFT mean, ms", "throughput, tokens/s"),
)
"""The figures of an open loop, the time that a user waits first."""
VERDICTS = {
    "faster": "the interval lies above the margin",
    "slower": "the interval lies below the margin",
    "equivalent": "the 90 % interval lies inside the margin",
    "undecided": "the interval allows more than one of these",
}


def view(summary: Row) -> Row:
    """Everything that the pages show, as text and numbers ready to print."""
    agentic_workloads = {row["workload"] for row in summary["agentic"]}
    tables = [_table(summary, tp, agentic_workloads) for tp in _tps(summary)]
    cells = [_cell(row) for row in sorted(summary["cells"], key=_cell_order) if row["state"] != "skipped"]
    names = list(cells[0]["figures"]) if cells else []
    return {
        "title": summary.get("name") or summary["run"],
        "run": summary["run"],
        "label": summary["label"],
        "label_class": _label_class(summary["label"]),
        "banner": summary["banner"],
        "facts": _facts(summary),
        "headline": _headline(summary, agentic_workloads),
        "baseline": summary["baseline"],
        "margin": text.percent(summary["margin"], 0),
        "level": text.percent(summary["level"], 0),
        "verdicts": VERDICTS,
        "tables": [table for table in tables if table["has_valid"]],
        "best": _best(summary, agentic_workloads),
        "regret": _regret(summary),
        "agentic": [_agentic(row) for row in sorted(summary["agentic"], key=_agentic_order)],
        "decomposition": _decomposition(summary, agentic_workloads),
        "cells": cells,
        "open_loops": [
            {"name": f"{cell['workload']} {cell['method']}", **cell}
            for cell in cells
            if cell["figures"]["scheduled TTFT mean, ms"] != text.UNKNOWN
        ],
        "open_loop_columns": OPEN_LOOP_COLUMNS,
        "columns": [name for name in names if any(cell["figures"][name] != text.UNKNOWN for cell in cells)],
        "invalid": [_invalid(row) for row in summary["cells"] if row["state"] != "skipped" and row["reason"]],
        "skipped": [_skipped(row) for row in summary["skipped"]],
        "placements": [_placement(row) for row in summary["placements"]],
        "gates": _gates(summary),
        "losslessness": _losslessness(summary["losslessness"]),
        "provenance": _provenance(summary),
        "problems": summary["problems"],
        "notes": _notes(summary),
        "over": _over(summary),
    }


def cell_speedup(row: Row) -> Row:
    """One speed-up as shown in a table: the figure, its interval, the verdict or why there is none."""
    verdict = row["verdict"]
    new_prompts = row["verdict_new_prompts"]
    return {
        "value": row["speedup"],
        "low": row["low"],
        "high": row["high"],
        "text": text.ratio(row["speedup"]),
        "interval": text.interval(row["low"], row["high"]),
        "verdict": verdict or "no verdict",
        "class": verdict or "none",
        "caveat": bool(verdict) and new_prompts is not None and new_prompts != verdict,
        "maximum": text.ratio(row["maximum"]),
        "label": row["label"],
        "launches": row["launches"],
        "prompts": row["prompts"],
    }


def _tps(summary: Row) -> list[int]:
    return sorted({row["tp"] or 0 for row in summary["cells"] if row["state"] != "skipped"})


def _group_key(row: Row) -> tuple[str, int, int, float]:
    return (
        str(row["workload"] or "unknown"),
        int(row["prompt_tokens"] or 0),
        int(row["concurrency"] or 0),
        float(row["rate"] or 0),
    )


def _table(summary: Row, tp: int, agentic: set[str]) -> Row:
    """One tp: rows by workload, context and load; a column per answer length, then end-to-end and throughput."""
    cells = [
        row for row in summary["cells"] if (row["tp"] or 0) == tp and (row["workload"] or "unknown") not in agentic
    ]
    found = [row for row in summary["speedups"] if row["tp"] == tp and row["workload"] not in agentic]
    decode = _pick([row for row in found if row["metric"] == "decode"])
    whole = _pick([row for row in found if row["metric"] == "end_to_end"])
    through = _pick([row for row in found if row["metric"] == "throughput"])
    methods = sorted({str(row["method"]) for row in cells if row["valid"]} - {summary["baseline"]}, key=method_order)
    reference = methods[0] if len(methods) > 1 and "@" not in methods[0] else None
    against = [row for row in summary["pairs"] if row["tp"] == tp and row["baseline"] == reference]
    pairs = _pick([row for row in against if row["metric"] == "decode"])
    lengths = sorted({key[2] for key in decode} | {int(row["output_tokens"] or 0) for row in cells})
    groups: dict[tuple[str, int, int, float], Row] = {}
    for row in sorted(cells, key=lambda c: (_group_key(c), c["output_tokens"] or 0)):
        key = _group_key(row)
        group = groups.setdefault(
            key,
            {
                "workload": key[0],
                "prompt_tokens": text.count(key[1]) if key[1] else text.UNKNOWN,
                "load": text.load(key[2], key[3], row["arrival"]),
                "rows": {},
            },
        )
        if not row["valid"] and row["method"] in group["rows"]:
            continue
        decode_rate = row["decode_tokens_per_s"]
        # of several output lengths the longest one's rate is shown
        group["rows"][row["method"]] = {
            "method": row["method"],
            "state": row["state"],
            "is_baseline": str(row["method"]).split("@")[0] == summary["baseline"],
            "rate": text.rate(decode_rate["mean"] if decode_rate else None),
            "ttft": text.milliseconds(row["ttft_s"]["mean"] if row["ttft_s"] else None),
            "acceptance": text.length(row["acceptance"]["sum_over_sum"] if row["acceptance"] else None),
            "length": row["output_tokens"],
            "lengths": [cell_speedup(item) if (item := decode.get((key, row["method"], n))) else None for n in lengths],
            "over_reference": _longest(pairs, key, row["method"]),
            "end_to_end": _longest(whole, key, row["method"]),
            "throughput": _longest(through, key, row["method"]),
        }
    for group in groups.values():
        order = sorted(group["rows"].values(), key=lambda r: (not r["is_baseline"], method_order(r["method"])))
        group["rows"] = order
    rows = [r for g in groups.values() for r in g["rows"]]
    return {
        "tp": tp,
        "title": f"tp {tp}" if tp else "tp unknown",
        "lengths": [text.count(n) if n else text.UNKNOWN for n in lengths],
        "groups": list(groups.values()),
        "has_speedups": bool(found),
        "has_valid": any(r["state"] == "valid" for r in rows),
        "reference": reference if any(r["over_reference"] for r in rows) else None,
        "has_throughput": any(r["throughput"] for r in rows),
        "has_acceptance": any(r["acceptance"] != text.UNKNOWN for r in rows),
        "single_launch": bool(found) and all(row["launches"] < 2 for row in found),
        "forest": _forest(groups.values(), lengths),
    }


def _pick(rows: list[Row]) -> dict[tuple[tuple[str, int, int, float], str, int], Row]:
    """By group, method and length; a length that was asked for goes before one read off a longer stream."""
    out: dict[tuple[tuple[str, int, int, float], str, int], Row] = {}
    for row in sorted(rows, key=lambda r: (r["length"] == r["output_tokens"], -r["output_tokens"])):
        out[(_group_key(row), row["method"], row["length"])] = row
    return out


def _longest(
    table: dict[tuple[tuple[str, int, int, float], str, int], Row], key: tuple[str, int, int, float], method: str
) -> Row | None:
    rows = [row for (k, m, _), row in table.items() if k == key and m == method]
    return cell_speedup(max(rows, key=lambda row: row["length"])) if rows else None


def _forest(groups: Any, lengths: list[int]) -> list[Row]:
    """The rows of the interval plot: the longest length of each method and group."""
    out: list[Row] = []
    for group in groups:
        title = f"{group['workload']} · {group['prompt_tokens']} · {group['load']}"
        for row in group["rows"]:
            shown = [item for item in row["lengths"] if item]
            if shown and not row["is_baseline"]:
                out.append({"group": title, "method": row["method"], **shown[-1]})
    return out if lengths else []


def _headline(summary: Row, agentic: set[str]) -> list[str]:
    """A sentence per tp: the largest speed-up with its interval, where, and what the sample allows to say."""
    out: list[str] = []
    for tp in _tps(summary):
        rows = [
            row
            for row in summary["speedups"]
            if row["tp"] == tp and row["metric"] == "decode" and row["workload"] not in agentic
        ]
        if not rows:
            continue
        decided = [row for row in rows if row["verdict"]]
        counts = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
        top = max(decided or rows, key=lambda row: row["low"] if row["low"] is not None else row["speedup"])
        where = f"{text.count(top['prompt_tokens'])} prompt tokens, {text.count(top['length'])} generated"
        ends = text.interval(top["low"], top["high"])
        said = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        tail = f" Of {len(rows)} comparisons: {said}." if said else f" No verdict: {top['note']}."
        bounds = f" ({ends})" if ends else ""
        head = f"{top['method']} decodes {text.ratio(top['speedup'])}{bounds} as fast as {top['baseline']} at best"
        out.append(f"tp {tp or 'unknown'}: {head}: {where}, {text.load(top['concurrency'], top['rate'])}.{tail}")
    return out


def _facts(summary: Row) -> list[tuple[str, str]]:
    model = summary["model"].get("name") or summary["model"].get("model") or summary["model"].get("id")
    sampling = summary["sampling"]
    how = []
    if sampling.get("temperature") is not None:
        how.append(f"temperature {text.scalar(sampling['temperature'])}")
    if isinstance(sampling.get("thinking"), bool):
        how.append(f"thinking {'on' if sampling['thinking'] else 'off'}")
    profiles = sorted({str(c["profile"]) for c in summary["cells"] if c["profile"]})
    valid = sum(c["valid"] for c in summary["cells"])
    ran = sum(c["state"] != "skipped" for c in summary["cells"])
    requests = sum(c["requests"] for c in summary["cells"])
    blocks = {part["block"] for c in summary["cells"] for part in c["launches"]}
    return [
        ("Model", text.scalar(model)),
        ("Engine", _engine(summary)),
        ("Cells", f"{valid} of {ran} valid, {len(summary['skipped'])} skipped"),
        ("Requests", f"{requests:,}" + (f" over {len(profiles)} profiles" if profiles else "")),
        ("Launches", f"{len(blocks)} per arm" if blocks else "none"),
        ("Sampling", ", ".join(filter(None, how)) or "unknown"),
        ("When", text.stamp(summary["created_at"])),
        ("By", text.scalar(summary["by"])),
        ("Why", text.scalar(summary["reason"])),
    ]


def _engine(summary: Row) -> str:
    kind = {"sglang": "SGLang"}.get(str(summary["engine"]), str(summary["engine"]))
    versions = sorted({str(row["engine_version"]) for row in summary["launches"] if row.get("engine_version")})
    hosts = [host for host in summary["hosts"].values() if host.get("gpu_names")]
    parts = [kind + (f" {', '.join(versions)}" if versions else "")]
    if summary["hardware"] == "gpu" and hosts:
        parts.append(f"{hosts[0]['gpus']}× {', '.join(hosts[0]['gpu_names'])}")
    elif summary["hardware"] not in (kind, "simulated"):
        parts.append(f"hardware {summary['hardware']}")
    return " on ".join(parts)


def _best(summary: Row, agentic: set[str]) -> list[Row]:
    """Per tp, a row per workload, context and load; a column per length by decode rate, then one by throughput."""
    out: list[Row] = []
    rows = [row for row in summary["best"] if row["workload"] not in agentic]
    for tp in sorted({row["tp"] for row in rows}):
        here = [row for row in rows if row["tp"] == tp]
        decode = [row for row in here if row["metric"] == "decode"]
        through = [row for row in here if row["metric"] == "throughput"]
        lengths = sorted({row["length"] for row in decode})
        groups: dict[tuple[str, int, int, float], dict[int, Row]] = {}
        for row in sorted(decode, key=lambda r: (r["length"] == r["output_tokens"], -r["output_tokens"])):
            groups.setdefault(_group_key(row), {})[row["length"]] = row
        wide: dict[tuple[str, int, int, float], Row] = {}
        for row in sorted(through, key=lambda r: int(r["length"])):
            wide[_group_key(row)] = row
        columns = [f"{text.count(n)} generated" for n in lengths] + (["throughput"] if wide else [])
        out.append(
            {
                "tp": tp,
                "title": f"tp {tp}" if tp else "tp unknown",
                "columns": columns,
                "rows": [
                    {
                        "workload": key[0],
                        "prompt_tokens": text.count(key[1]) if key[1] else text.UNKNOWN,
                        "load": text.load(key[2], key[3]),
                        "cells": [_best_cell(found.get(n)) for n in lengths]
                        + ([_best_cell(wide.get(key))] if wide else []),
                    }
                    for key, found in sorted(groups.items())
                ],
                "how": sorted({row["how"] for row in here}),
            }
        )
    return out


def _best_cell(row: Row | None) -> Row | None:
    if row is None:
        return None
    return {
        "method": row["method"],
        "text": text.ratio(row["speedup"]),
        "over": text.ratio(row["over_runner_up"]),
        "runner_up": row["runner_up"],
    }


def _regret(summary: Row) -> list[Row]:
    return [
        {
            "tp": row["tp"],
            "method": row["method"],
            "cells": row["cells"],
            "loss": text.percent(max(0.0, row["loss"])),
        }
        for row in sorted(summary["regret"], key=lambda row: (row["tp"], row["loss"]))
        if row["metric"] == "decode"
    ]


def _agentic_order(row: Row) -> tuple[Any, ...]:
    return (row["tp"], row["workload"], row["concurrency"], row["speedup"] is not None, method_order(row["method"]))


def _agentic(row: Row) -> Row:
    return {
        "tp": row["tp"] or text.UNKNOWN,
        "workload": row["workload"],
        "method": row["method"],
        "load": text.load(row["concurrency"], row["rate"]),
        "context": text.count(row["last_prompt_tokens"]),
        "sessions": row["sessions"],
        "turns": f"{row['turns'] / row['sessions']:.3g}" if row["sessions"] else text.UNKNOWN,
        "tokens_per_s": text.rate(row["tokens_per_s"]),
        "with_tools": text.rate(row["tokens_per_s_with_tools"]),
        "tool_share": text.percent(row["tool_s"] / row["wall_s"], 0) if row["wall_s"] else text.UNKNOWN,
        "speedup": cell_speedup(row["speedup"]) if row["speedup"] else None,
    }


def _decomposition(summary: Row, agentic: set[str]) -> list[Row]:
    """Where a speed-up comes from, at each cell's full length."""
    out = []
    for row in sorted(
        summary["speedups"], key=lambda r: (r["tp"], _group_key(r), r["length"], method_order(r["method"]))
    ):
        parts = row["decomposition"]
        full = row["length"] == row["output_tokens"]
        if row["metric"] != "decode" or not parts or not full or row["workload"] in agentic:
            continue
        out.append(
            {
                "tp": row["tp"] or text.UNKNOWN,
                "workload": row["workload"],
                "prompt_tokens": text.count(row["prompt_tokens"]),
                "length": text.count(row["length"]),
                "load": text.load(row["concurrency"], row["rate"]),
                "method": row["method"],
                "baseline": row["baseline"],
                "tokens_per_step": text.length(parts["tokens_per_step"]),
                "step": text.milliseconds(parts["step_ms"] / 1000),
                "base_step": text.milliseconds(parts["base_step_ms"] / 1000),
                "break_even": text.length(parts["break_even"]),
                "speedup": text.ratio(row["speedup"]),
            }
        )
    return out


def _cell_order(row: Row) -> tuple[Any, ...]:
    return (row["tp"] or 0, _group_key(row), row["output_tokens"] or 0, method_order(row["method"]))


def _cell(row: Row) -> Row:
    ttft, decode, accepted = row["ttft_s"] or {}, row["decode_tokens_per_s"] or {}, row["acceptance"] or {}
    itl, scheduled = row["itl_s"] or {}, row["scheduled_ttft_s"] or {}
    unknown = sorted({rule for part in row["launches"] for rule in part["unknown"] if part["valid"]})
    return {
        "cell": row["cell"],
        "tp": row["tp"] or text.UNKNOWN,
        "method": row["method"],
        "workload": row["workload"] or "unknown",
        "prompt_tokens": text.count(row["prompt_tokens"]),
        "output_tokens": text.count(row["output_tokens"]),
        "load": text.load(row["concurrency"], row["rate"], row["arrival"]),
        "launches": f"{sum(p['valid'] for p in row['launches'])}/{len(row['launches'])}",
        "requests": f"{row['ok']}/{row['requests']}",
        "figures": {
            "decode, tokens/s": text.rate(decode.get("mean")),
            "scheduled TTFT mean, ms": text.milliseconds(scheduled.get("mean")),
            "scheduled TTFT p50, ms": text.milliseconds(scheduled.get("p50")),
            "scheduled TTFT p99, ms": text.milliseconds(scheduled.get("p99")),
            "TTFT mean, ms": text.milliseconds(ttft.get("mean")),
            "TTFT p50, ms": text.milliseconds(ttft.get("p50")),
            "TTFT p99, ms": text.milliseconds(ttft.get("p99")),
            "ITL p50, ms": text.milliseconds(itl.get("p50")),
            "ITL p99, ms": text.milliseconds(itl.get("p99")),
            "throughput, tokens/s": text.rate(row["throughput_tokens_per_s"]),
            "accepted": text.length(accepted.get("sum_over_sum")),
        },
        "state": row["state"],
        "partly": bool(row["valid"] and row["reason"]),
        "unknown": unknown,
    }


def _name(row: Row) -> str:
    where = f"tp{row['tp']} " if row["tp"] else ""
    size = f" · {text.count(row['prompt_tokens'])} → {text.count(row['output_tokens'])} tokens"
    load = f" · {text.load(row['concurrency'], row.get('rate'))}" if row["concurrency"] or row.get("rate") else ""
    return f"{where}{row['method'] or 'unknown'} · {row['workload'] or 'unknown'}{size}{load}"


def _invalid(row: Row) -> Row:
    return {"cell": row["cell"], "name": _name(row), "reason": row["reason"], "partly": row["valid"]}


def _skipped(row: Row) -> Row:
    known = row["workload"] or row["method"] or row["tp"]
    return {"cell": row["cell"], "name": _name(row) if known else row["cell"], "reason": row["reason"]}


def _placement(row: Row) -> Row:
    planned, actual = row["planned"], row["actual"]
    return {
        "profile": row["profile"],
        "planned_gpus": text.numbers(planned.get("gpus")),
        "planned_nodes": text.numbers(planned.get("numa_nodes")),
        "span": planned.get("numa") == "span",
        "cpus": planned.get("cpus") or text.UNKNOWN,
        "actual_gpus": text.numbers(actual.get("gpus")),
        "actual_nodes": text.numbers(actual.get("numa_nodes")),
        "status": row["status"],
        "message": row["message"],
    }


def _gates(summary: Row) -> list[Row]:
    return [
        {
            "launch": launch["launch"],
            "profile": launch["profile"] or "unknown",
            "gate": gate.get("gate") or "gate",
            "status": gate.get("status") or "unknown",
            "message": gate.get("message") or "no message",
        }
        for launch in summary["launches"]
        for gate in launch["gates_not_passed"]
    ]


def _losslessness(found: Row) -> Row:
    rows = []
    for row in found["rows"]:
        against, floor = row["against_baseline"], row["floor"]
        rows.append(
            {
                "tp": row["tp"] or text.UNKNOWN,
                "method": row["method"],
                "workload": row["workload"],
                "prompt_tokens": text.count(row["prompt_tokens"]),
                "length": text.count(row["length"]),
                "load": text.load(row["concurrency"], row["rate"]),
                "identical": f"{against['identical']}/{against['pairs']}",
                "hazard": _hazard(against),
                "floor": _hazard(floor) if floor else "unknown",
                "floor_from": row["floor_from"] or "no second look at the baseline",
                "p": text.UNKNOWN if row["mcnemar_p"] is None else f"{row['mcnemar_p']:.2g}",
            }
        )
    return {"applies": found["applies"], "why": found["why"], "rows": rows}


def _hazard(item: Row) -> str:
    """Divergences per 1,000 tokens with the exact interval."""
    return f"{1000 * item['hazard']:.2f} ({1000 * item['hazard_low']:.2f}–{1000 * item['hazard_high']:.2f})"


def _provenance(summary: Row) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = [
        ("Run", summary["run"]),
        ("Label", summary["label"]),
        ("Started", text.stamp(summary["created_at"])),
        ("By", text.scalar(summary["by"])),
        ("Reason", text.scalar(summary["reason"])),
    ]
    rows += [(f"Version of {name}", text.scalar(value)) for name, value in summary["versions"].items()]
    rows += [(f"Model {name}", text.scalar(value)) for name, value in summary["model"].items()]
    rows += [(f"Prompt texts {name}", text.scalar(value)) for name, value in summary["corpora"].items()]
    rows += [(f"Git {name}", text.scalar(value)) for name, value in summary["git"].items()]
    for name, host in summary["hosts"].items():
        gpus = f"{host['gpus']}× {', '.join(host['gpu_names']) or 'GPU'}, driver {text.scalar(host['driver'])}"
        rows.append((f"Host {name}", gpus + (" (simulated driver)" if host["simulated"] else "")))
    return rows


def _notes(summary: Row) -> list[str]:
    out: list[str] = []
    sources = sorted({str(c["token_source"]) for c in summary["cells"] if c["token_source"]})
    if sources:
        out.append(f"Token counts come from: {', '.join(sources)}.")
    if any(c["prompts"] == "repeat" for c in summary["cells"]):
        out.append("Cells on a repeated phrase have periodic prompts: acceptance there says little about real text.")
    short = [
        c
        for c in summary["cells"]
        if c["arrival"] in (None, "closed")
        and (c["concurrency"] or 1) > 1
        and c["requests"] < 10 * c["concurrency"] * len(c["launches"])
    ]
    if short:
        out.append(f"{len(short)} cells ran fewer than ten requests per slot in flight: their steady window is short.")
    return out


def _over(summary: Row) -> str:
    """What the intervals of this run are over, as the page says it."""
    launches = {row["launches"] for row in summary["speedups"]}
    if launches and max(launches) < 2:
        return "over prompts, within one launch"
    return "over server launches"


def _label_class(label: str) -> str:
    return "good" if label == "complete" else "bad" if label in ("failed", "aborted") else "odd"
