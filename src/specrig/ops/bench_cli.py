"""``specrig bench``: plan a sweep on the GPUs of an inventory, ask before hours of work, run it, collect it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="the sweep's file, or a shipped one: quick, nightly, full")
    add("-i", "--inventory", metavar="PATH", help="the inventory, or the name of an embedded one (default: lab)")
    add(
        "--only",
        action="append",
        default=[],
        metavar="GLOB",
        help="cells by profile, workload, method or id; repeatable",
    )
    add("--reason", metavar="TEXT", help="why; kept in the journal and in the run")
    add("--take-over", action="store_true", help="stop production profiles on GPUs the sweep needs; they are put back")
    add("--yes", action="store_true", help="do not ask before a plan of more than an hour")
    add("--plan", action="store_true", help="show the plan and the placement on this host, run nothing")
    add("--out", metavar="DIR", default="runs", help="folder that gets the run's folder (default: runs)")
    add("-e", "--extra-vars", metavar="K=V", action="append", default=[], help="passed on to Ansible")
    add("-v", "--verbose", action="count", default=0, help="more of Ansible's output")
    add("--json", action="store_true", help="one JSON object on standard output instead of the screen")


def run(args: argparse.Namespace) -> int:
    """Run the sweep; exit code 0 ok, 1 a gate, a launch or a cell failed, 2 bad input, 130 interrupted."""
    from specrig.ops import benchmark

    return benchmark.bench(args)
