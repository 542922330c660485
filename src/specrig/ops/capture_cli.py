"""``specrig capture``: gather this host's facts into a folder fit for a bug report."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help="a folder to make (default: specrig-capture-TIME in this one)"
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="for each command that is asked (10)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Write the folder; exit code 0, or 2 where it cannot be written."""
    import time
    from pathlib import Path

    from specrig.errors import UsageError
    from specrig.ops.capture import gather, write

    if args.timeout <= 0:
        raise UsageError(f"--timeout is {args.timeout:g}; expected seconds above 0")
    folder = Path(args.folder or time.strftime("specrig-capture-%Y%m%dT%H%M%SZ", time.gmtime()))
    raw = gather(args.timeout)
    report = write(raw, folder)
    if args.json:
        import json

        print(json.dumps(report, indent=1))
        return 0
    print(f"captured   {folder}: {report['files']} files, {report['commands']} outputs of commands")
    print(f"replaced   {report['replaced']} serials, UUIDs and addresses, the same one by the same stand-in")
    for reason in report["unknown"]:
        print(f"unknown    {reason}")
    print(f"look at it with: specrig topology --from {folder}")
    return 0
