"""``specrig lab``: up, down, reboot, status, shell."""

from __future__ import annotations

import argparse
import sys
import time


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(prog="specrig lab", add_help=False)
    common.add_argument("--name", help="the lab's name (default: SPECRIG_LAB, else one derived from the checkout)")
    common.add_argument("--json", action="store_true", help="print JSON")
    return common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the lab's actions and their options."""
    common = _common()
    actions = parser.add_subparsers(dest="lab_action", required=True, metavar="ACTION")
    up = actions.add_parser("up", parents=[common], help="build and start a bare host and guest; idempotent")
    up.add_argument("--model-mb", type=int, default=256, metavar="MB", help="size of the synthetic model (256)")
    actions.add_parser("down", parents=[common], help="remove the lab and all it left on this machine")
    again = actions.add_parser(
        "reboot", parents=[common], help="stop and start: loses /dev, /run, tmpfs; moves the major"
    )
    again.add_argument(
        "--driver",
        choices=("all", "no-uvm", "none", "no-module"),
        default="all",
        help="what is loaded before the guest starts: all (default), all but nvidia-uvm, or nothing; "
        "no-module: this kernel has none, so that nothing can load it",
    )
    actions.add_parser("status", parents=[common], help="what runs, and where")
    shell = actions.add_parser("shell", parents=[common], help="a shell, or one command, in the host or the guest")
    shell.add_argument("target", nargs="?", choices=("host", "guest"), default="host")
    shell.add_argument("command", nargs=argparse.REMAINDER, help="a command to run instead, after --")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns the exit code."""
    import json
    import shlex
    import subprocess

    from specrig.errors import UsageError
    from specrig.ops.lab import lifecycle, state

    words: list[str] = list(getattr(args, "command", ()))
    if "--" in words or (words[:1] and words[0].startswith("-")):
        cut = words.index("--") if "--" in words else len(words)
        _common().parse_args(words[:cut], namespace=args)
        words = words[cut + 1 :]
    name = state.checked_name(args.name or state.default_name())
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"lab {name}: {line}", file=sys.stderr if args.json else sys.stdout, flush=True)

    def tell(**facts: object) -> None:
        seconds = round(time.monotonic() - started, 1)
        if args.json:
            print(json.dumps({"schema": 1, "name": name, **facts, "seconds": seconds}))
        else:
            say(f"{facts['did']} in {seconds} s")

    if args.lab_action == "up":
        if args.model_mb < 1:
            raise UsageError(f"--model-mb {args.model_mb}: expected at least 1")
        lab = lifecycle.up(name, args.model_mb, say)
        tell(did="up", address=lab.address, subnet=lab.subnet, key=lab.key, known_hosts=lab.known_hosts)
    elif args.lab_action == "reboot":
        lab = lifecycle.reboot(name, args.driver, say)
        tell(did="rebooted", address=lab.address, driver=args.driver)
    elif args.lab_action == "down":
        there = lifecycle.down(name, say)
        tell(did="removed" if there else "nothing to remove", removed=there)
    elif args.lab_action == "status":
        now = lifecycle.status(name)
        if args.json:
            print(json.dumps(now.as_json()))
        else:
            for key, value in now.as_json().items():
                if key != "schema" and value is not None:
                    print(f"{key:<10} {value}")
    else:
        lab = lifecycle.existing(name)
        command = shlex.join(words)
        if args.target == "guest":
            command = lifecycle.guest_command(command or "exec bash -l")
        line = lifecycle.ssh_command(lab, *([command] if command else []))
        if not words:
            line.insert(1, "-t")
        return subprocess.run(line, check=False).returncode
    return 0


def _main() -> int:
    from specrig.errors import SpecrigError

    parser = argparse.ArgumentParser(prog="specrig lab")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except SpecrigError as error:
        print(f"specrig lab: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_main())
