#!/usr/bin/env python3
"""Stands in for a Proxmox VE host in tests: pct, pveversion and the lxc-* tools, on a folder of one test.

It rewrites a guest's configuration the way Proxmox VE does on any change: comments go to the top, keys are sorted, of a
repeated key the last wins, ``lxc.*`` lines come last in their order, lines that are none are dropped, sections follow
sorted. A start reads the devices' numbers, and fails where a ``devN`` node is not there.

The folder holds ``ID.conf`` and ``state.json``: {version, host: {path: [major, minor, mode]}, drivers: [majors],
guests: {ID: {running, pid, rules, nodes, starts, unprivileged}}, calls}.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import urllib.parse
from pathlib import Path
from typing import Any

LXC = re.compile(r"^(lxc\.[A-Za-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*$")
KEY = re.compile(r"^([a-z][a-z_]*\d*):\s*(.*?)\s*$")


def sections(text: str) -> dict[str, dict[str, Any]]:
    """What Proxmox VE reads out of a configuration: {section: {comments, keys, lxc}}; the main section is ''."""
    found: dict[str, dict[str, Any]] = {}
    current = found.setdefault("", {"comments": [], "keys": {}, "lxc": []})
    for line in text.split("\n"):
        header = re.match(r"^\[([a-z][a-z0-9_\-:]+)\]\s*$", line, re.I)
        if header:
            current = found.setdefault(header.group(1), {"comments": [], "keys": {}, "lxc": []})
        elif line.startswith("#"):
            current["comments"].append(urllib.parse.unquote(line[1:].rstrip("\r")))
        elif match := LXC.match(line):
            current["lxc"].append((match.group(1), match.group(2)))
        elif match := KEY.match(line):
            current["keys"][match.group(1)] = match.group(2)
    return found


def _written(section: dict[str, Any]) -> str:
    lines = ["#" + text.replace("%", "%25").replace(":", "%3A") for text in section["comments"]]
    lines += [f"{key}: {value}" for key, value in sorted(section["keys"].items())]
    lines += [f"{key}: {value}" for key, value in section["lxc"]]
    return "".join(line + "\n" for line in lines)


def rewrite(text: str) -> str:
    """The configuration as Proxmox VE writes it back."""
    found = sections(text)
    main, pending = found.pop(""), found.pop("pve:pending", None)
    written = _written(main)
    if pending is not None:
        written += "\n[pve:pending]\n" + _written(pending)
    for name, section in sorted(found.items()):
        written += f"\n[{name}]\n" + _written(section)
    return written


def covers(rules: list[str], major: int, minor: int) -> bool:
    """Whether a device rule allows reading and writing."""
    for rule in rules:
        if rule == "a":
            return True
        match = re.match(r"^c (\d+|\*):(\d+|\*) ([rwm]+)$", rule)
        if match and match.group(1) in ("*", str(major)) and match.group(2) in ("*", str(minor)):
            return "r" in match.group(3) and "w" in match.group(3)
    return False


class Host:
    """The host of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state: dict[str, Any] = json.loads((folder / "state.json").read_text())

    def save(self) -> None:
        """Write the state back."""
        (self.folder / "state.json").write_text(json.dumps(self.state, indent=1))

    def config(self, guest: str) -> Path:
        """The guest's configuration; a guest without one is an error as pct words it."""
        path = self.folder / f"{guest}.conf"
        if not path.exists():
            sys.exit(f"Configuration file 'nodes/pve/lxc/{guest}.conf' does not exist")
        return path

    def guest(self, name: str) -> dict[str, Any]:
        """The guest's live state."""
        self.config(name)
        new = {"running": False, "pid": 4242, "rules": [], "nodes": {}, "starts": 0}
        return self.state["guests"].setdefault(name, new)

    def start(self, name: str) -> None:
        """Start: rules and nodes as the configuration and the host's nodes of this moment say."""
        main, guest = sections(self.config(name).read_text())[""], self.guest(name)
        rules = ["c 1:3 rwm"] + [value for key, value in main["lxc"] if key == "lxc.cgroup2.devices.allow"]
        nodes: dict[str, Any] = {}
        for key, value in main["lxc"]:
            if key == "lxc.mount.entry" and value.split()[0].startswith("/dev/"):
                source, target = value.split()[0], "/" + value.split()[1]
                # What bind,optional,create=file leaves where the source is missing.
                nodes[target] = self.state["host"].get(source, "file")
        for key in sorted(key for key in main["keys"] if re.match(r"^dev\d+$", key)):
            path, *options = main["keys"][key].split(",")
            path = path.replace("path=", "", 1)
            if path not in self.state["host"]:
                sys.exit(f"Device {path} does not exist")
            major, minor, _mode = self.state["host"][path]
            mode = dict(option.split("=") for option in options).get("mode", "0660")
            rules.append(f"c {major}:{minor} rw")
            nodes[path] = [major, minor, mode]
        if main["keys"].get("unprivileged") == "1":
            rules.append("a")
        guest.update(running=True, rules=rules, nodes=nodes, starts=guest["starts"] + 1, pid=guest["pid"] + 1)

    def look(self, name: str, ask: dict[str, Any]) -> dict[str, Any]:
        """What the program that looks from inside would print."""
        guest, nodes = self.guest(name), []
        for path in ask["nodes"]:
            node = guest["nodes"].get(path)
            if node is None or node == "file":
                nodes.append({"path": path, "kind": "missing" if node is None else "file", "mode": "0644"})
                continue
            major, minor, mode = node
            code = 0 if major in self.state["drivers"] else errno.ENXIO
            code = code if covers(guest["rules"], major, minor) else errno.EPERM
            row = {"path": path, "kind": "char", "major": major, "minor": minor, "mode": mode, "errno": code}
            row.update(uid=0, gid=0, user_errno=code if code or int(mode[-1]) & 6 == 6 else errno.EACCES)
            nodes.append(row)
        pairs = [pair for pair in ask["rules"] if covers(guest["rules"], *pair)]
        answer = {"nodes": nodes, "permitted": pairs, "folders": [], "privileged": True, "library": None}
        return {**answer, **guest.get("answer", {})}


def pct(host: Host, verb: str, name: str, *more: str) -> None:
    """pct status|config|set|start|stop|shutdown|exec."""
    guest = host.guest(name)
    if verb == "status":
        print("status:", "running" if guest["running"] else "stopped")
    elif verb == "config":
        print(_written(sections(host.config(name).read_text())[""]), end="")
    elif verb == "set":
        text = host.config(name).read_text()
        main, section, rest = text.partition("\n[")
        for option, value in zip(more[::2], more[1::2], strict=True):
            if option in ("--delete", "-delete"):
                main = "".join(line + "\n" for line in main.split("\n") if not line.startswith(value + ":"))
            else:
                main = main.rstrip("\n") + f"\n{option.lstrip('-')}: {value}\n"
        host.config(name).write_text(rewrite(main + section + rest))
    elif verb == "start":
        host.start(name)
    elif verb in ("stop", "shutdown"):
        guest["running"] = False
    elif verb == "exec":
        attach(host, name, list(more[1:]))
    else:
        sys.exit(f"unknown command 'pct {verb}'")


def attach(host: Host, name: str, argv: list[str]) -> None:
    """lxc-attach, pct exec: of all programs the two that are asked for."""
    if not host.guest(name)["running"]:
        sys.exit(f"lxc-attach: {name}: attach.c: get_attach_context: 405 Connection refused - Failed to get init pid")
    if argv[:2] == ["systemctl", "is-system-running"]:
        print("running")
    elif argv[1:2] == ["-c"]:
        print(json.dumps(host.look(name, json.loads(argv[3]))))
    else:
        sys.exit(127)


def main(program: str, argv: list[str]) -> None:
    """Do as the named program does."""
    host = Host(Path(os.environ["STAND_IN_PVE"]))
    host.state["calls"].append([program, *(word for word in argv if len(word) < 200)])
    try:
        if program == "pct":
            pct(host, *argv)
        elif program == "pveversion":
            print(host.state["version"])
        elif program == "lxc-attach":
            attach(host, argv[argv.index("-n") + 1], argv[argv.index("--") + 1 :])
        elif program == "lxc-info":
            guest = host.guest(argv[argv.index("-n") + 1])
            if guest["starts"] == 0:
                sys.exit(f"{argv[1]} doesn't exist")
            print("State:          " + ("RUNNING" if guest["running"] else "STOPPED"))
            if guest["running"]:
                print(f"PID:            {guest['pid']}")
        elif program == "lxc-cgroup":
            rules, text = host.guest(argv[1])["rules"], argv[3]
            if argv[2] == "devices.allow" and text not in rules:
                rules.append(text)
            elif argv[2] == "devices.deny" and text in rules:
                rules.remove(text)
    finally:
        host.save()


if __name__ == "__main__":
    main(Path(sys.argv[0]).name, sys.argv[1:])
