"""What ``specrig report`` prints: a screen that fits a terminal, verdicts first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specrig.report.view import view

MAX_LISTED = 8
MARKS = {"faster": "▲", "slower": "▼", "equivalent": "=", "undecided": "?", "none": " "}
LEGEND = "▲ faster  ▼ slower  = equivalent  ? undecided (margin {margin}, {level} intervals); no mark: under 3 launches"


def screen(summary: dict[str, Any]) -> str:
    """The compact text of a report."""
    shown = view(summary)
    facts = dict(shown["facts"])
    out: list[str] = []
    if shown["banner"]:
        out += [f"*** {shown['banner']} ***", ""]
    out.append(
        f"{shown['title']} ({shown['run']}): {shown['label']}"
        if shown["title"] != shown["run"]
        else f"{shown['run']}: {shown['label']}"
    )
    out.append(f"{facts['Model']} · {facts['Engine']} · {facts['Cells']} · {facts['Launches']} · {facts['When']}")
    out += [f"! {line}" for line in shown["problems"][:MAX_LISTED]]
    out += _more(shown["problems"])
    for table in shown["tables"]:
        out += [
            "",
            f"{table['title']}: speed-up over {shown['baseline']}"
            + (", intervals within one launch, no verdict" if table["single_launch"] else ""),
        ]
        head = ["", "tok/s", *(f"decode @{n}" for n in table["lengths"]), "end to end"]
        head += ["throughput"] if table["has_throughput"] else []
        rows: list[Sequence[str]] = []
        for group in table["groups"]:
            rows.append([f"{group['workload']} · {group['prompt_tokens']} prompt tokens · {group['load']}"])
            for row in group["rows"]:
                cells = [*row["lengths"], row["end_to_end"], *([row["throughput"]] if table["has_throughput"] else [])]
                blank = row["is_baseline"]
                if row["state"] != "valid":
                    rows.append([f"  {row['method']}: {row['state']}"])
                    continue
                rows.append([f"  {row['method']}", row["rate"], *("" if blank else _cell(item) for item in cells)])
        out += columns(head, rows)
    if any(table["has_speedups"] and not table["single_launch"] for table in shown["tables"]):
        out += ["", LEGEND.format(margin=shown["margin"], level=shown["level"])]
    for table in shown["best"]:
        out += ["", f"{table['title']}: best method, estimated on data that did not choose it"]
        head = ["", *table["columns"]]
        rows = [
            [
                f"  {row['workload']} · {row['prompt_tokens']} · {row['load']}",
                *(f"{item['method']} {item['text']}" if item else "–" for item in row["cells"]),
            ]
            for row in table["rows"]
        ]
        out += columns(head, rows)
    if shown["agentic"]:
        out += ["", "agentic sessions: output tokens over wall time without tool time"]
        rows = [
            [
                f"  tp{row['tp']} {row['workload']} {row['method']}",
                row["load"],
                f"{row['tokens_per_s']} tok/s",
                _cell(row["speedup"]) if row["speedup"] else "",
            ]
            for row in shown["agentic"]
        ]
        out += columns(["", "", "", ""], rows)
    if shown["open_loops"]:
        out += ["", "open loops: TTFT from when a request was due (scheduled), and from when it was sent"]
        rows = [
            [f"  {row['name']} · {row['load']}", *(row["figures"][name] for name in shown["open_loop_columns"])]
            for row in shown["open_loops"]
        ]
        out += columns(["", *(name.replace("scheduled TTFT", "sched.") for name in shown["open_loop_columns"])], rows)
    for name, title in (("invalid", "invalid"), ("skipped", "skipped")):
        items = shown[name]
        if items:
            out += ["", f"{title}:"]
            out += [f"  {item['name']}: {item['reason']}" for item in items[:MAX_LISTED]] + _more(items)
    return "\n".join(out)


def _cell(item: dict[str, Any] | None) -> str:
    if item is None:
        return "–  "
    ends = f" {item['interval']}" if item["interval"] else ""
    return f"{item['text']}{ends} {MARKS[item['class']]}"


def _more(items: Sequence[Any]) -> list[str]:
    return [f"  and {len(items) - MAX_LISTED} more: see report.html"] if len(items) > MAX_LISTED else []


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows in aligned columns, those of ``left`` to the left; a row of one text spans them all."""
    table = [head, *rows]
    full = [row for row in table if len(row) > 1]
    widths = [max(len(row[i]) for row in full) for i in range(len(head))]
    out = []
    for row in table:
        if len(row) == 1:
            out.append(row[0])
            continue
        cells = [row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]) for i in range(len(row))]
        line = "  ".join(cells).rstrip()
        if line:
            out.append(line)
    return out
