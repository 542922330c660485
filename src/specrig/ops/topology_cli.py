"""``specrig topology``: GPUs, NUMA nodes, and the groups that fit one node."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "-i", "--inventory", metavar="PATH", help="ask the GPU hosts of this inventory (a path or an embedded name)"
    )
    source.add_argument(
        "--from",
        dest="capture",
        metavar="CAPTURE",
        help="a folder written by specrig capture, or a file with the output of nvidia-smi topo -m",
    )
    parser.add_argument("--tp", type=int, metavar="N", help="show the group that gpus: auto takes for N GPUs")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Print the topology, of this machine by default; exit code 0, 1 where no group of --tp fits, 2 on bad input."""
    from specrig.errors import UsageError
    from specrig.facts import look, probe
    from specrig.ops.inspection import group_for, inventory_looks, look_of, topology_text

    if args.tp is not None and args.tp < 1:
        raise UsageError(f"--tp is {args.tp}; expected a number of GPUs, 1 or more")
    looks: dict[str, dict[str, Any]]
    if args.capture is not None:
        looks = {args.capture: look_of(args.capture)}
    elif args.inventory is not None:
        looks = inventory_looks(args.inventory)
    else:
        looks = {"this machine": look.assemble(probe.gather())}
    groups = {name: group_for(facts, args.tp) for name, facts in looks.items()} if args.tp else {}
    if args.json:
        import json

        report = {
            "schema": 1,
            "hosts": {name: {"look": facts, "group": groups.get(name)} for name, facts in looks.items()},
        }
        print(json.dumps(report, indent=1))
    else:
        print("\n\n".join(topology_text(name, facts, groups.get(name)) for name, facts in looks.items()))
    return 1 if any(group["refused"] for group in groups.values()) else 0
