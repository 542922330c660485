"""``specrig explain FILE``: what specrig makes of one captured output."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="output of nvidia-smi (topo -m, -q, -L, a CSV query), numactl -H or lscpu, /proc/devices, "
        "a guest config, ...; - reads standard input",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Print the facts; exit code 0, or 2 where the file is not readable or not recognised."""
    from specrig.errors import UsageError
    from specrig.facts import explain
    from specrig.ops.inspection import facts_text, read_captured

    text = read_captured(args.file)
    try:
        facts = explain.explain(text, args.file)
    except explain.NotRecognised as error:
        raise UsageError(str(error)) from None
    if args.json:
        import json

        print(json.dumps(facts, indent=1))
    else:
        print(facts_text(facts))
    return 0
