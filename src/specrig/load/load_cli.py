"""``specrig load``: a sweep's cells against a running server."""

from __future__ import annotations

import argparse

_EPILOG = """exit codes: 0 every cell done and valid, 1 a cell failed or is invalid, or does not fit, 2 bad input,
130 interrupted by Ctrl-C, 143 by SIGTERM (finished cells are kept, --resume does the rest)

A new folder holds one run. With --resume, or with --launch on a folder that has a plan, cells that are done stay."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="the sweep, a YAML file")
    add("--url", required=True, help="the server, http://HOST:PORT")
    add(
        "--tokenizer", metavar="DIR", help="the folder of the served model's tokenizer; needed for exact prompt lengths"
    )
    add("--out", required=True, metavar="RUN", help="the run folder")
    add("--profile", metavar="NAME", help="the profile that is served, where the run was planned with profiles")
    add("--launch", type=int, default=None, metavar="N", help="which server start this is, from 0 (0)")
    add("--cells", metavar="IDS", help="cell ids, comma-separated, in the order they run")
    add("--only", action="append", default=[], metavar="GLOB", help="cells by workload, profile or id; repeatable")
    add("--resume", action="store_true", help="run what is missing in RUN")
    add("--reason", metavar="TEXT", help="why; kept in the run's journal")
    add("--api-key", metavar="KEY", help="bearer token (SPECRIG_API_KEY)")
    add("--ca-file", metavar="FILE", help="certificates to trust, for https")
    add("--keep-text", action="store_true", help="keep the generated texts in the records")
    add("--workers", type=_workers, default="auto", metavar="N", help="processes that make the requests (auto)")
    add("--json", action="store_true", help="one JSON object a cell on standard output, then one for the run")


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 to 256, or auto")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the cells; see the module's epilog for the exit codes."""
    from specrig.runs.command import load_command

    return load_command(args)
