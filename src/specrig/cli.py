"""The ``specrig`` command: a table of subcommands, each loaded only when it is the one asked for.

``specrig --help`` reads nothing but this table, so it stays fast however heavy a subcommand's imports are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specrig import __version__
from specrig.errors import SpecrigError, printable

COMMANDS: dict[str, tuple[str, str]] = {
    "lab": ("specrig.ops.lab.lab_cli", "a nested host and guest with a simulated driver, to try everything on"),
    "provision": ("specrig.ops.play_cli", "set a host and its guest up, from bare to serving"),
    "recover": ("specrig.ops.play_cli", "bring a host back after a reboot; changes nothing that is right"),
    "preflight": ("specrig.ops.play_cli", "run the gates: device, placement, model, budget, smoke"),
    "plan": ("specrig.tokens.plan_cli", "what a sweep would run: cells, token budget, expected interval width"),
    "budget": ("specrig.tokens.budget_cli", "does one prompt and answer fit a context window and a KV pool"),
    "load": ("specrig.load.load_cli", "run a sweep's cells against a running server"),
    "bench": ("specrig.ops.bench_cli", "run a sweep on the GPUs of an inventory, gates first"),
    "report": ("specrig.report.report_cli", "speed-ups with intervals and verdicts, from run folders"),
    "export": ("specrig.report.export_cli", "a run under the JSON keys of aiperf, vllm or sglang dashboards"),
    "compare": ("specrig.report.compare_cli", "a new run against a base run; exit 1 on a regression"),
    "runs": ("specrig.ops.runs_cli", "list, show, resume or abort runs"),
    "schedule": ("specrig.ops.schedule_cli", "a timer on the host that runs a sweep"),
    "topology": ("specrig.ops.topology_cli", "GPUs, NUMA nodes and the groups that fit one node"),
    "capture": ("specrig.ops.capture_cli", "gather a host's facts into a folder, serials and UUIDs replaced"),
    "explain": ("specrig.ops.explain_cli", "what specrig makes of one captured output"),
    "sim": ("specrig.sim.sim_cli", "the simulated engine: SGLang's HTTP API with a known truth"),
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: specrig COMMAND [OPTIONS]

Recover a multi-GPU SGLang host after a reboot, prove its placement, and benchmark
speculative decoding on it.

commands:
{rows}

  specrig COMMAND --help   the options of one command
  specrig --version        the version

exit codes: 0 ok, 1 a gate or a regression failed or a cell does not fit, 2 bad input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit code: 0 ok, 1 a gate or a regression failed or a cell does not fit, 2 usage or bad input,
        130 interrupted.
    """
    _mend_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    try:
        code = _command(arguments)
        sys.stdout.flush()
    except SpecrigError as error:
        _complain(name, error)
        return error.exit_code
    except KeyboardInterrupt:
        _complain(name, "interrupted")
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except OSError as error:
        # What no command foresaw: a path that the system refuses, a disk that is full. Never a traceback.
        _silence_stdout()
        what = f"{error.filename!r}: " if error.filename else ""
        _complain(name, f"{what}{error.strerror or error}; correct the path or the file system and run it again")
        return 2 if error.filename else 1
    return code


def _mend_streams() -> None:
    """Have three open standard streams, none of which fails at a character that it can't show."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so that no file of ours becomes it
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Let nothing be written at the interpreter's end to an output that is closed or full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(name: str, what: object) -> None:
    with contextlib.suppress(OSError):
        print(f"specrig {name}: {printable(str(what))}" if name else f"specrig: {what}", file=sys.stderr, flush=True)


def _command(arguments: list[str]) -> int:
    """Find the subcommand, parse its arguments, run it."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"specrig {__version__}")
        return 0
    name = arguments.pop(0)
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see specrig --help"
        print(f"specrig: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    module_name, text = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = _Parser(prog=f"specrig {name}", description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.set_defaults(command=name)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)) or 0)


if __name__ == "__main__":
    sys.exit(main())
