"""``specrig sim``: the simulated engine."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """SGLang's flags and the simulation's own."""
    from specrig.sim.flags import add_server_arguments, add_simulation_arguments

    parser.usage = "%(prog)s --model-path DIR [SGLang's flags] [--sim-...]"
    add_server_arguments(parser)
    add_simulation_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; 0 after SIGTERM, 1 where a rank failed, 2 for bad input."""
    if args.list_faults:
        from specrig.sim.faults import FAULTS, table

        if args.json:
            import json

            print(json.dumps({name: {"help": kind.text, "default": kind.default} for name, kind in FAULTS.items()}))
        else:
            print(table())
        return 0
    from specrig.sim.launch import launch

    return launch(args)
