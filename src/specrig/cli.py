"""The ``specrig`` command: a table of subcommands, each loaded only when it is the one asked for.

``specrig --help`` reads nothing but this table, so it stays fast however heavy a subcommand's imports are.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specrig import __version__
from specrig.errors import SpecrigError

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
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    try:
        code = int(module.run(parser.parse_args(arguments)) or 0)
        sys.stdout.flush()
    except SpecrigError as error:
        print(f"specrig {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"specrig {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
