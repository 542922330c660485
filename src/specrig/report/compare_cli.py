"""``specrig compare BASE NEW``: exit 1 on a regression that the interval supports, or on a cell that broke."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrig.analysis.frames import RunData
    from specrig.analysis.regression import Change, Comparison

NAMES = {
    "decode": "decode, tokens/s",
    "end_to_end": "end to end, tokens/s",
    "throughput": "throughput, tokens/s",
    "session": "session, tokens/s",
    "ttft": "TTFT, ms",
}
MAX_ROWS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("base", metavar="BASE", help="the run folder to hold the new one against")
    add("new", metavar="NEW", help="the new run folder")
    add("--max-regression", metavar="R", default="5%", help="how much slower is allowed (default 5%%)")
    add("--metrics", metavar="M,...", default=",".join(NAMES), help=f"of {', '.join(NAMES)} (default: all)")
    add("--level", metavar="L", default="95%", help="confidence level of the intervals (default 95%%)")
    add("--launch-spread", metavar="S", default="1%", help="launch spread assumed for a side with one launch (1%%)")
    add("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 on a regression or a broken cell."""
    import sys

    import msgspec

    from specrig.analysis.frames import read_run
    from specrig.analysis.regression import compare_runs
    from specrig.analysis.summary import engine_of
    from specrig.errors import UsageError
    from specrig.report.shares import share
    from specrig.runs.lines import encoded

    limit = share(args.max_regression, "--max-regression", 0.0, 0.99)
    level = share(args.level, "--level", 0.5, 0.999)
    spread = share(args.launch_spread, "--launch-spread", 0.0, 1.0)
    metrics = [name.strip().replace("-", "_") for name in args.metrics.split(",") if name.strip()]
    unknown = [name for name in metrics if name not in NAMES]
    if unknown or not metrics:
        raise UsageError(f"--metrics {args.metrics!r}: expected some of {', '.join(NAMES)}")
    base, new = read_run(args.base), read_run(args.new)
    _same_kind(base, new)
    found = compare_runs(base, new, max_regression=limit, level=level, launch_spread=spread, metrics=metrics)
    if not found.changes and not any(item.broken for item in found.lost):
        raise UsageError(
            f"{args.base} and {args.new}: no cell that both have as valid (same method, tp, prompt and output "
            f"tokens, load and prompts); compare runs of one sweep"
        )
    banner = engine_of(new)["banner"]
    notes = [f"base: {line}" for line in base.problems] + [f"new: {line}" for line in new.problems]
    if args.json:
        out = {
            "base": base.name,
            "new": new.name,
            "banner": banner,
            "max_regression": limit,
            "level": level,
            "failed": found.failed,
            "changes": [_row(item) for item in found.changes],
            "lost": msgspec.to_builtins(found.lost),
            "only_new": found.only_new,
            "problems": notes,
        }
        sys.stdout.write(encoded(out).decode() + "\n")
    else:
        print(_screen(base, new, found, banner, limit, notes))
    return 1 if found.failed else 0


def _row(item: Change) -> dict[str, object]:
    import dataclasses

    out = dataclasses.asdict(item)
    return {"metric": out.pop("metric"), **out.pop("key"), **out}


def _same_kind(base: RunData, new: RunData) -> None:
    """Refuse to compare numbers of different nature: simulated with real, CPU with GPU, two time scales."""
    from specrig.analysis.summary import engine_of
    from specrig.errors import UsageError

    a, b = engine_of(base), engine_of(new)
    for name, what in (("hardware", "hardware"), ("time_scale", "time scale")):
        if None not in (a[name], b[name]) and "unknown" not in (a[name], b[name]) and a[name] != b[name]:
            raise UsageError(
                f"BASE has {what} {a[name]}, NEW has {b[name]}: their figures cannot be compared; "
                f"name two runs of the same kind"
            )


def _screen(
    base: RunData, new: RunData, found: Comparison, banner: str | None, limit: float, notes: Sequence[str]
) -> str:
    from specrig.analysis.regression import FINE, REGRESSION, UNDECIDED
    from specrig.report import text
    from specrig.report.terminal import columns

    out = [f"*** {banner} ***", ""] if banner else []
    out.append(f"{new.name} against {base.name}, at most {limit:.0%} slower allowed")
    out += [f"! {line}" for line in notes]
    counts = {name: sum(c.status == name for c in found.changes) for name in (REGRESSION, UNDECIDED, FINE)}
    order = {REGRESSION: 0, UNDECIDED: 1, FINE: 2}
    rows = [c for c in found.changes if c.key.length == c.key.output_tokens or c.status == REGRESSION]
    rows.sort(key=lambda c: order[c.status])
    shown = rows[:MAX_ROWS]
    table: list[list[str]] = []
    for item in shown:
        form = text.milliseconds if item.metric == "ttft" else text.rate
        ends = "no interval"
        if item.low is not None and item.high is not None:
            ends = f"{_percent(item.low)} to {_percent(item.high)}"
        key = item.key
        size = f"{text.count(key.prompt_tokens)} → {text.count(key.length)}"
        table.append(
            [
                f"tp{key.tp} {item.method}" if key.tp else item.method,
                f"{key.workload} {size}, {text.load(key.concurrency, key.rate)}",
                NAMES[item.metric],
                form(item.base),
                form(item.new),
                _percent(item.ratio),
                ends,
                item.status,
            ]
        )
    if table:
        head = ["", "cell", "metric", "base", "new", "change", "interval", ""]
        out += ["", *columns(head, table, left=(0, 1, 2, 7))]
    if len(found.changes) > len(shown):
        out.append(f"and {len(found.changes) - len(shown)} more, shorter lengths included: --json has them all")
    if found.lost:
        out += ["", "valid in the base, not in the new run:"]
        for lost in found.lost:
            key = lost.key
            size = f"{text.count(key.prompt_tokens)} → {text.count(key.output_tokens)}"
            kind = "broken" if lost.broken else "not run"
            load = text.load(key.concurrency, key.rate)
            why = f": {lost.reason}" if lost.broken else ""
            out.append(f"  {kind}: tp{key.tp} {lost.method} {key.workload} {size}, {load}{why}")
    if found.only_new:
        out.append(f"{found.only_new} cells are only in the new run")
    out += ["", *sorted({c.note for c in found.changes if c.note})]
    said = [f"{n} {name}" for name, n in counts.items() if n]
    broken = sum(item.broken for item in found.lost)
    if broken:
        said.insert(0, f"{broken} broken cell{'s' if broken > 1 else ''}")
    out.append(f"{'FAILED' if found.failed else 'ok'}: {', '.join(said)}")
    return "\n".join(out)


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return ">+999 %" if change > 999 else f"{change:+.1f} %"
