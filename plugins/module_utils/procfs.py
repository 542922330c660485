# SPDX-License-Identifier: Apache-2.0
"""Reads /proc/devices, /proc/driver/nvidia/*, /proc/PID/{status,cgroup} and listings of /dev."""

from __future__ import annotations

import re
from typing import Any

from .text import bus_id, clean

_DEVICE = re.compile(r"^\s*(\d+)\s+(\S.*?)\s*$")
_LS = re.compile(r"^([bcdlps-])([rwxsStT-]{9})\S*\s+\d+\s+(\S+)\s+(\S+)\s+(\d+),\s*(\d+)\s.*?(\S+)$")
_UNIT = re.compile(r"\.(?:service|scope)$")
_GUEST = (
    re.compile(r"(?:^|/)lxc\.payload\.([^/]+)(/.*)?$"),
    re.compile(r"^/lxc/([^/]+)(/.*)?$"),
)
NVIDIA_NAMES = ("nvidia-frontend", "nvidia", "nvidiactl")


def parse_device_names(text: str) -> dict[str, dict[int, list[str]]]:
    """Return {"char": {major: [names]}, "block": {major: [names]}} of /proc/devices.

    Raises:
        ValueError: where neither section is there.
    """
    sections: dict[str, dict[int, list[str]]] = {"char": {}, "block": {}}
    section = None
    for line in clean(text).split("\n"):
        word = line.strip().lower()
        if word in ("character devices:", "block devices:"):
            section = "char" if word.startswith("char") else "block"
            continue
        match = _DEVICE.match(line)
        if match and section:
            sections[section].setdefault(int(match.group(1)), []).append(match.group(2))
    if section is None:
        raise ValueError("not /proc/devices: no line says Character devices: or Block devices:")
    return sections


def parse_devices(text: str) -> dict[str, int | None]:
    """Return the character majors {"nvidia", "nvidia-uvm", "nvidia-caps"}; None for a driver that is not loaded.

    Only the character section counts: the same number can belong to another driver in the block section.
    """
    named: dict[str, int] = {}
    for major, names in parse_device_names(text)["char"].items():
        for name in names:
            named.setdefault("nvidia" if name in NVIDIA_NAMES else name, major)
    return {key: named.get(key) for key in ("nvidia", "nvidia-uvm", "nvidia-caps")}


def parse_version(text: str) -> dict[str, str | None]:
    """Return {"module_version", "flavor"} of /proc/driver/nvidia/version; flavor is open or proprietary.

    Raises:
        ValueError: where no line starts with NVRM version.
    """
    for line in clean(text).split("\n"):
        if not line.startswith("NVRM version:"):
            continue
        version = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", line + " ")
        flavor = None
        if "Kernel Module" in line:
            flavor = "open" if "Open Kernel Module" in line else "proprietary"
        return {"module_version": version.group(1) if version else None, "flavor": flavor}
    raise ValueError("not /proc/driver/nvidia/version: no NVRM version line")


def parse_information(text: str) -> dict[str, Any]:
    """Return {bus_id, minor, uuid, name, excluded} of /proc/driver/nvidia/gpus/*/information.

    Raises:
        ValueError: where it has no Bus Location line.
    """
    facts: dict[str, str] = {}
    for line in clean(text).split("\n"):
        key, colon, cell = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), cell.strip())
    if "Bus Location" not in facts:
        raise ValueError("not a GPU's information file: no Bus Location line")
    minor = facts.get("Device Minor", "")
    uuid = facts.get("GPU UUID", "")
    return {
        "bus_id": bus_id(facts["Bus Location"]),
        "minor": int(minor) if minor.isdigit() else None,
        "uuid": uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
        "name": facts.get("Model") or None,
        "firmware": facts.get("GPU Firmware") or None,
        "excluded": {"Yes": True, "No": False}.get(facts.get("GPU Excluded", "")),
    }


def parse_ls(text: str) -> list[dict[str, Any]]:
    """Return [{path, kind, major, minor, mode, owner, group}] of ``ls -l /dev/nvidia*``.

    Raises:
        ValueError: where no line shows a device.
    """
    nodes = []
    for line in clean(text).split("\n"):
        match = _LS.match(line)
        if not match:
            continue
        bits = match.group(2)
        mode = 0
        for place, letter in enumerate(bits):
            if letter not in "-ST":
                mode |= 1 << (8 - place)
        nodes.append(
            {
                "path": match.group(7),
                "kind": {"c": "char", "b": "block"}.get(match.group(1), "other"),
                "major": int(match.group(5)),
                "minor": int(match.group(6)),
                "mode": "%04o" % mode,
                "owner": match.group(3),
                "group": match.group(4),
            }
        )
    if not nodes:
        raise ValueError("not a listing of device nodes: no line shows a major and a minor")
    return nodes


def parse_status(text: str) -> dict[str, Any]:
    """Return {name, state, pid, ppid, uid, guest_pid, cpus_allowed, mems_allowed} of /proc/PID/status.

    guest_pid is the innermost of NSpid, uid the real one.
    """
    facts = {}
    for line in clean(text).split("\n"):
        key, colon, cell = line.partition(":")
        if colon:
            facts[key] = cell.strip()
    pids = facts.get("NSpid", "").split()
    uids = facts.get("Uid", "").split()
    return {
        "name": facts.get("Name") or None,
        "state": facts.get("State", "")[:1] or None,
        "pid": int(facts["Pid"]) if facts.get("Pid", "").isdigit() else None,
        "ppid": int(facts["PPid"]) if facts.get("PPid", "").isdigit() else None,
        "uid": int(uids[0]) if uids and uids[0].isdigit() else None,
        "guest_pid": int(pids[-1]) if len(pids) > 1 and pids[-1].isdigit() else None,
        "cpus_allowed": facts.get("Cpus_allowed_list") or None,
        "mems_allowed": facts.get("Mems_allowed_list") or None,
    }


def parse_cgroup(text: str) -> dict[str, str | None]:
    """Return {guest, unit, profile} of /proc/PID/cgroup; each None where the path does not say.

    Knows plain LXC (``/lxc.payload.NAME/...``) and Proxmox VE (``/lxc/ID/ns/...``), nested ones included: the
    outermost guest of this view counts. The profile is the instance of a ``specrig-sglang@`` unit.
    """
    result: dict[str, str | None] = {"guest": None, "unit": None, "profile": None}
    for line in clean(text).split("\n"):
        path = line.split(":", 2)[-1].strip()
        for pattern in _GUEST:
            match = pattern.search(path)
            if match and not result["guest"]:
                result["guest"] = match.group(1)
        unit = next((part for part in reversed(path.split("/")) if _UNIT.search(part)), None)
        if unit and unit != "init.scope" and not result["unit"]:
            result["unit"] = unit
            instance = re.match(r"^specrig-sglang@(.+)\.service$", unit)
            if instance:
                result["profile"] = re.sub(
                    r"\\x([0-9a-f]{2})", lambda code: chr(int(code.group(1), 16)), instance.group(1)
                )
    return result
