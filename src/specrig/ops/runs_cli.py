"""``specrig runs``: the run folders on the controller."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|resume|abort")
    texts = {
        "list": "runs below a folder, newest first",
        "show": "one run: label, cells, what is missing, where it ran",
        "resume": "do the missing cells of a run",
        "abort": "stop what a run left in the guest, put production back, keep what was finished",
    }
    for action, text in texts.items():
        sub = actions.add_parser(action, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if action == "list":
            sub.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="where to look (default: runs)")
        else:
            sub.add_argument("run", metavar="RUN", help="the run's folder, or its id below ./runs")
        if action in ("resume", "abort"):
            sub.add_argument("-i", "--inventory", metavar="PATH", help="the inventory (default: the embedded lab)")
            sub.add_argument("--reason", metavar="TEXT", help="why; kept in the journal")
            sub.add_argument("-e", "--extra-vars", metavar="K=V", action="append", default=[], help="for Ansible")
            sub.add_argument("-v", "--verbose", action="count", default=0, help="more of Ansible's output")
        if action == "resume":
            sub.add_argument("--take-over", action="store_true", help="stop production profiles where needed")
        sub.add_argument("--json", action="store_true", help="JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the action; exit code 0 ok, 1 something did not run, 2 no such run or bad input, 130 interrupted."""
    from specrig.ops import benchmark

    if args.action == "list":
        return benchmark.list_runs(args)
    if args.action == "show":
        return benchmark.show_run(args)
    if args.action == "resume":
        return benchmark.resume(args)
    return benchmark.abort(args)
