"""summary.md: the first screen of the report as Markdown, for a pull request or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specrig.report.view import view


def markdown(summary: dict[str, Any]) -> str:
    """The summary as GitHub-flavoured Markdown."""
    shown = view(summary)
    out = [f"# {_plain(shown['title'])} ({_plain(shown['label'])})", ""]
    if shown["banner"]:
        out += [f"> **{shown['banner']}**", ""]
    out += [f"- {name}: {_plain(value)}" for name, value in shown["facts"]] + [""]
    out += [f"{_plain(line)}  " for line in shown["headline"]] + ([""] if shown["headline"] else [])
    if shown["problems"]:
        out += ["Note:", "", *(f"- {_plain(line)}" for line in shown["problems"]), ""]
    for table in shown["tables"]:
        out += [f"## Speed-up over {shown['baseline']}, {table['title']}", ""]
        if table["single_launch"]:
            out += ["Intervals within one launch; no verdict.", ""]
        head = ["workload", "prompt", "load", "method", "tokens/s", "accepted"]
        head += [f"decode @{n}" for n in table["lengths"]] + ["end to end", "throughput"]
        head += [f"decode over {table['reference']}"] if table["reference"] else []
        extra = 1 if table["reference"] else 0
        rows = []
        for group in table["groups"]:
            for row in group["rows"]:
                line = [group["workload"], group["prompt_tokens"], group["load"], row["method"], row["rate"]]
                items = [*row["lengths"], row["end_to_end"], row["throughput"], *[row["over_reference"]] * extra]
                said = "baseline" if row["state"] == "valid" else row["state"]
                plain = row["is_baseline"] or row["state"] != "valid"
                rest = [said, *[""] * (len(items) - 1)] if plain else [_cell(item) for item in items]
                rows.append([*line, row["acceptance"], *rest])
        out += [*_table(head, rows, right=range(4, len(head))), ""]
    for table in shown["best"]:
        out += [f"## Best method per cell, {table['title']}", "", f"{'; '.join(table['how']).capitalize()}.", ""]
        head = ["workload", "prompt", "load", *table["columns"]]
        rows = [
            [row["workload"], row["prompt_tokens"], row["load"]]
            + [f"{item['method']} {item['text']}" if item else "–" for item in row["cells"]]
            for row in table["rows"]
        ]
        out += [*_table(head, rows), ""]
    if shown["agentic"]:
        out += ["## Agentic sessions", "", "All output tokens over wall time without tool time.", ""]
        head = ["tp", "workload", "method", "load", "sessions", "tokens/s", "with tool time", "tool share", "speed-up"]
        rows = [
            [
                str(row[k])
                for k in ("tp", "workload", "method", "load", "sessions", "tokens_per_s", "with_tools", "tool_share")
            ]
            + [_cell(row["speedup"])]
            for row in shown["agentic"]
        ]
        out += [*_table(head, rows, right=range(4, len(head))), ""]
    if shown["open_loops"]:
        out += ["## Open loops", "", "TTFT from when a request was due (scheduled), and from when it was sent.", ""]
        rows = [
            [row["name"], row["load"], *(row["figures"][name] for name in shown["open_loop_columns"])]
            for row in shown["open_loops"]
        ]
        head = ["cell", "load", *shown["open_loop_columns"]]
        out += [*_table(head, rows, right=range(2, len(head))), ""]
    if shown["invalid"]:
        out += ["## Invalid", "", *(f"- {_plain(r['name'])}: {_plain(r['reason'])}" for r in shown["invalid"]), ""]
    if shown["skipped"]:
        out += ["## Skipped", "", *(f"- {_plain(r['name'])}: {_plain(r['reason'])}" for r in shown["skipped"]), ""]
    if shown["placements"]:
        out += ["## Placement", ""]
        head = ["profile", "planned GPUs", "NUMA", "actual GPUs", "NUMA", "gate"]
        rows = [
            [r[k] for k in ("profile", "planned_gpus", "planned_nodes", "actual_gpus", "actual_nodes", "status")]
            for r in shown["placements"]
        ]
        out += [*_table(head, rows), ""]
    out += ["Definitions and all cells: report.html; every figure: summary.json.", ""]
    return "\n".join(out)


def _cell(item: dict[str, Any] | None) -> str:
    if item is None:
        return "–"
    ends = f" ({item['interval']})" if item["interval"] else ""
    said = f" {item['verdict']}" if item["class"] != "none" else ""
    return f"{item['text']}{ends}{said}{' *' if item['caveat'] else ''}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    marks = ["---:" if i in set(right) else "---" for i in range(len(head))]
    lines = [head, marks, *rows]
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines]


def _plain(value: Any) -> str:
    """One line that cannot break out of a table or start HTML."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
