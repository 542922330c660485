"""``specrig provision``, ``specrig recover`` and ``specrig preflight``: the playbooks of those names."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all three share."""
    parser.add_argument(
        "-i", "--inventory", metavar="PATH", help="the inventory, or the name of an embedded one (default: lab)"
    )
    parser.add_argument("--reason", metavar="TEXT", help="why; kept in the journal")
    parser.add_argument("--check", action="store_true", help="change nothing, say what would be changed")
    parser.add_argument("--diff", action="store_true", help="show differences of files")
    parser.add_argument("--limit", metavar="PATTERN", help="only these hosts of the inventory")
    parser.add_argument("-e", "--extra-vars", metavar="K=V", action="append", default=[], help="passed on to Ansible")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="more of Ansible's output")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of the screen")


def run(args: argparse.Namespace) -> int:
    """Run the playbook; exit code 0 ok, 1 a task or gate failed, 2 bad input, 130 interrupted."""
    from specrig.ops.runner import inventory_path, run_playbook

    inventory = inventory_path(args.inventory)
    extra = {"specrig_reason": args.reason} if args.reason else {}
    result = run_playbook(args.command, inventory, extra, ansible_arguments(args), quiet=args.json)
    if args.json:
        import json

        report = {
            "schema": 1,
            "playbook": args.command,
            "rc": result.rc,
            "interrupted": result.interrupted,
            "changed": result.changed,
            "failures": result.failures,
            "seconds": round(result.seconds, 3),
            **{name: result.specrig.get(name, []) for name in ("found", "changes", "serving", "gates", "notes")},
        }
        report["changes"] = result.specrig.get("changed", [])
        print(json.dumps(report, indent=2))
    if result.interrupted:
        return 130
    return 0 if result.rc == 0 else 1


def ansible_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments that are handed to ansible-playbook as they are."""
    arguments = [flag for flag, wanted in (("--check", args.check), ("--diff", args.diff)) if wanted]
    if args.limit:
        arguments += ["--limit", args.limit]
    for assignment in args.extra_vars:
        arguments += ["-e", assignment]
    if args.verbose:
        arguments.append("-" + "v" * args.verbose)
    return arguments
