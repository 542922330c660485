"""``specrig schedule``: a timer on the host that runs a sweep, through the playbook schedule.yml."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="the sweep's file, or a shipped one: quick, nightly, full")
    add("-i", "--inventory", metavar="PATH", help="the inventory, or the name of an embedded one (default: lab)")
    add("--on-calendar", metavar="WHEN", help="when it runs, as systemd.time(7) writes it; needed unless --remove")
    add("--name", default="", help="the timer's name (default: the sweep's file name)")
    add("--take-over", action="store_true", help="the sweep may stop production profiles; they are put back")
    add("--remove", action="store_true", help="take the timer away again")
    add("--reason", metavar="TEXT", help="why; kept in the journal of every run it starts")
    add("--check", action="store_true", help="change nothing, say what would be changed")
    add("-e", "--extra-vars", metavar="K=V", action="append", default=[], help="passed on to Ansible")
    add("-v", "--verbose", action="count", default=0, help="more of Ansible's output")
    add("--json", action="store_true", help="one JSON object on standard output instead of the screen")


def run(args: argparse.Namespace) -> int:
    """Install or remove the timer; exit code 0 ok, 1 a task failed, 2 bad input, 130 interrupted."""
    from specrig.ops import benchmark

    return benchmark.schedule(args)
