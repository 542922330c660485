"""``specrig report RUN...``: analyse run folders and write summary.json, summary.md and report.html."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder; several are read as one design")
    add("--out", metavar="DIR", help="where to write (default: into RUN; of several: ./specrig-report)")
    add("--margin", metavar="M", help="margin of the verdicts, as 0.02 or 2%% (default: the sweep's own, else 2%%)")
    add("--level", metavar="L", default="95%", help="confidence level of the intervals (default 95%%)")
    add(
        "--max-post-eos",
        metavar="S",
        default="25%",
        help="largest valid share of tokens after the end (25%%)",
    )
    add("--truth", metavar="FILE", action="append", help="hold the run against the simulated engine's truth file")
    add("--json", action="store_true", help="print summary.json instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Write the report; 1 when ``--truth`` disagrees."""
    import sys
    from pathlib import Path

    import msgspec

    from specrig.analysis.frames import merge_runs, read_run
    from specrig.analysis.summary import summarise
    from specrig.errors import UsageError
    from specrig.report.pages import write
    from specrig.report.shares import share
    from specrig.report.terminal import screen
    from specrig.runs.lines import encoded

    level = share(args.level, "--level", 0.5, 0.999)
    margin = None if args.margin is None else share(args.margin, "--margin", 0.0, 1.0)
    limit = share(args.max_post_eos, "--max-post-eos", 0.0, 1.0)
    runs = [read_run(path) for path in args.runs]
    data = merge_runs(runs)
    summary = summarise(data, margin=margin, level=level, max_post_eos=limit)
    truth = None
    if args.truth:
        from specrig.analysis.truth import compare_truth, read_truth

        truth = compare_truth(data, read_truth(args.truth), baseline=summary["baseline"])
        summary["truth"] = {
            "ok": truth.ok,
            "matched": truth.matched,
            "unmatched": truth.unmatched,
            "rows": msgspec.to_builtins(truth.rows),
        }
    folder = Path(args.out) if args.out else (Path(args.runs[0]) if len(runs) == 1 else Path("specrig-report"))
    try:
        files = write(summary, folder)
    except OSError as error:
        raise UsageError(
            f"{folder}: the report cannot be written ({error.strerror or error}); name another folder with --out"
        ) from None
    if args.json:
        sys.stdout.write(encoded(summary).decode() + "\n")
    else:
        print(screen(summary))
        if truth is not None:
            _say_truth(truth)
        print(f"\n{files[-1]}")
    return 0 if truth is None or truth.ok else 1


def _say_truth(truth: object) -> None:
    from specrig.analysis.truth import TruthReport

    assert isinstance(truth, TruthReport)
    worst = truth.worst
    bad = [row for row in truth.rows if not row.ok]
    if worst is None:
        print("\ntruth: no request of this run is in the truth file; give the one of the same servers")
        return
    print(
        f"\ntruth: {len(truth.rows) - len(bad)} of {len(truth.rows)} figures agree; the largest difference is "
        f"{worst.error:+.2%} ({worst.figure}, {worst.where})"
    )
    for row in bad:
        print(f"  {row.figure}, {row.where}: measured {row.measured:.5g}, truth {row.truth:.5g} ({row.error:+.2%})")
