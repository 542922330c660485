"""A lab's bridge, its way out, and putting all of that back."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from specrig.errors import SpecrigError
from specrig.ops.lab.state import STATE_ROOT, bridge_name

GUEST_SUBNET = "10.0.3.0/24"
"""The network behind the lab's host, where its guests are; the same in every lab, since each is a world of its own."""
GUEST_GATEWAY = "10.0.3.1"
GUEST_ADDRESS = "10.0.3.2"

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_FORWARD_BEFORE = STATE_ROOT / ".ip_forward"
_IPV6_OFF = "/proc/sys/net/ipv6/conf/{}/disable_ipv6"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise SpecrigError(f"`{shlex.join(command)}` failed: {reason[-1] if reason else f'exit {done.returncode}'}")


def free_subnet(name: str, taken: Iterable[str]) -> str:
    """A /24 of 10.0.0.0/8 that overlaps nothing in ``taken``, the same for the same name where possible.

    Args:
        name: the lab's name, which decides where the search starts.
        taken: networks in use, such as this machine's routes; what is no IPv4 network is passed over.

    Raises:
        SpecrigError: none is free.
    """
    used = [ipaddress.IPv4Network(GUEST_SUBNET)]
    for text in taken:
        try:
            network = ipaddress.IPv4Network(text, strict=False)
        except ValueError:
            continue
        if network.prefixlen:
            used.append(network)
    start = int(bridge_name(name)[3:], 16)
    for step in range(65_536):
        value = (start + step * 257) % 65_536
        candidate = ipaddress.IPv4Network((0x0A000000 | value << 8, 24))
        if not any(candidate.overlaps(network) for network in used):
            return str(candidate)
    raise SpecrigError("no free /24 in 10.0.0.0/8 for the lab's bridge: every one is routed already")


def routes() -> list[str]:
    """The IPv4 networks that this machine routes, default routes left out."""
    done = subprocess.run(
        ["ip", "-j", "-4", "route", "show", "table", "all"], capture_output=True, text=True, check=False
    )
    return [row["dst"] for row in json.loads(done.stdout or "[]") if row.get("dst", "default") != "default"]


def mtu() -> int:
    """The largest packet of the way out: what the lab's links must not exceed. 1500 where there is no way out."""
    done = subprocess.run(["ip", "-j", "-4", "route", "show", "default"], capture_output=True, text=True, check=False)
    sizes = []
    for row in json.loads(done.stdout or "[]"):
        path = Path("/sys/class/net", row.get("dev", ""), "mtu")
        if path.is_file():
            sizes.append(int(path.read_text()))
    return min([1500, *sizes])


def _rules(bridge: str, subnet: str) -> list[tuple[str, list[str]]]:
    """(table, rule) of each rule that a lab adds; the comment names the lab's bridge, by which they are found again."""
    comment = ["-m", "comment", "--comment", f"specrig-lab {bridge}"]
    return [
        ("nat", ["POSTROUTING", "-s", subnet, "!", "-d", subnet, *comment, "-j", "MASQUERADE"]),
        ("filter", ["FORWARD", "-i", bridge, *comment, "-j", "ACCEPT"]),
        ("filter", ["FORWARD", "-o", bridge, *comment, "-j", "ACCEPT"]),
    ]


def up(bridge: str, gateway: str, subnet: str) -> None:
    """Make the bridge and let what is behind it reach out. Does nothing that is done already."""
    if not Path("/sys/class/net", bridge).exists():
        _run("ip", "link", "add", bridge, "type", "bridge")
    quiet = Path(_IPV6_OFF.format(bridge))
    if quiet.exists():
        quiet.write_text("1\n")
    _run("ip", "address", "replace", f"{gateway}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    for table, rule in _rules(bridge, subnet):
        check = ["iptables", "-w", "-t", table, "-C", *rule]
        if subprocess.run(check, capture_output=True, check=False).returncode:
            position = [rule[0], "1", *rule[1:]] if table == "filter" else rule
            _run("iptables", "-w", "-t", table, "-I" if table == "filter" else "-A", *position)
    before = _FORWARD.read_text().strip()
    if not _FORWARD_BEFORE.exists():
        _FORWARD_BEFORE.write_text(before + "\n")
    if before != "1":
        _FORWARD.write_text("1\n")


def rules_of(bridge: str) -> list[tuple[str, list[str]]]:
    """(table, arguments) of the rules that carry this bridge's name, as iptables lists them."""
    found = []
    for table in ("nat", "filter"):
        done = subprocess.run(["iptables", "-w", "-t", table, "-S"], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            words = shlex.split(line)
            if words[:1] == ["-A"] and f"specrig-lab {bridge}" in words:
                found.append((table, words[1:]))
    return found


def ssh_sessions(address: str) -> list[int]:
    """Processes of ssh on this machine that are connected to an address, such as the ones that Ansible keeps open."""
    remote = f"{int.from_bytes(ipaddress.IPv4Address(address).packed, 'little'):08X}:"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[2].startswith(remote)}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text() == "ssh\n" and sockets & {
                str(p.readlink()) for p in process.glob("fd/*")
            }:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def hang_up(address: str) -> None:
    """End this machine's ssh sessions to an address; each removes its control socket."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for _ in range(20):
            left = ssh_sessions(address)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not left:
                return
            time.sleep(0.05)


def down(bridge: str, last: bool) -> None:
    """Remove the bridge and the rules; with the last lab, put IP forwarding back as it was."""
    for table, rule in rules_of(bridge):
        subprocess.run(["iptables", "-w", "-t", table, "-D", *rule], capture_output=True, check=False)
    if Path("/sys/class/net", bridge).exists():
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)
    if last and _FORWARD_BEFORE.exists():
        _FORWARD.write_text(_FORWARD_BEFORE.read_text())
        _FORWARD_BEFORE.unlink()
