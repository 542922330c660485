# SPDX-License-Identifier: Apache-2.0
"""Reads which processes of this machine belong to an engine, from /proc.  Touches the machine, only by reading.

In a guest it sees the guest's, on a host those of all guests as well; ``placement`` and ``orphans`` decide from them.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import subprocess
import time

from . import orphans, procfs, serving

# Of a large file the beginning is enough, and reading on would walk the page tables of a whole model.
_NUMA_MAPS_BYTES = 8192
_LISTEN = "0A"


def gather(root="/proc"):
    """Rows of all processes that look like an engine's or stand in one of our units.

    Returns:
        ``[{pid, guest_pid, ppid, uid, title, command, guest, unit, profile, named_profile, visible, cpus_allowed,
        mems_allowed, memory_policy, minors, ports, started, age_s}]`` by pid. ``profile`` is the unit's,
        ``named_profile`` the one that its environment names; ``minors`` are the GPU nodes that it holds open,
        ``started`` is its start time in clock ticks, with which a pid is unique. What can't be read is None.
    """
    major = _nvidia_major(root)
    listening = None
    rows = []
    for folder in glob.glob(root + "/[0-9]*"):
        words = (_read(folder + "/cmdline") or "").rstrip("\0").split("\0")
        cgroup = _read(folder + "/cgroup") or ""
        ours = "specrig-sglang@" in cgroup
        if not ours and not orphans.is_engine(words) and not words[0]:
            continue
        environ = _environ(folder)
        named = (environ or {}).get("SPECRIG_PROFILE")
        if not ours and not named and not orphans.is_engine(words):
            continue
        status = procfs.parse_status(_read(folder + "/status") or "")
        if status["pid"] is None or status["state"] == "Z":
            continue
        where = procfs.parse_cgroup(cgroup)
        held, sockets = _descriptors(folder, major)
        if sockets and listening is None:
            listening = _listening(root)
        ticks = _started(folder)
        rows.append(
            {
                "pid": int(folder.rsplit("/", 1)[1]),
                "guest_pid": status["guest_pid"],
                "ppid": status["ppid"],
                "uid": status["uid"],
                "title": orphans.shown_title(words, status["name"]),
                "command": orphans.shown_command(words),
                "guest": where["guest"],
                "unit": where["unit"],
                "profile": where["profile"],
                "named_profile": named,
                "visible": None if environ is None else environ.get("CUDA_VISIBLE_DEVICES"),
                "cpus_allowed": status["cpus_allowed"],
                "mems_allowed": status["mems_allowed"],
                "memory_policy": policies(folder),
                "minors": held,
                "ports": sorted({listening[inode] for inode in sockets or () if inode in (listening or {})}),
                "started": ticks,
                "age_s": _age(ticks),
            }
        )
    return sorted(rows, key=lambda row: row["pid"])


def units():
    """What systemd here says of our units: profile to ``{active, main_pid}``; None where it can't be asked."""
    argv = ["systemctl", "show", "-p", "Id,ActiveState,MainPID", serving.UNIT_PREFIX + "*"]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    found = {}
    for block in done.stdout.decode("utf-8", "replace").split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        name = serving.profile_of(fields.get("Id", ""))
        if name:
            main = fields.get("MainPID") or "0"
            found[name] = {"active": fields.get("ActiveState"), "main_pid": int(main) or None}
    return found


def _read(path, limit=1 << 20):
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def _environ(folder):
    text = _read(folder + "/environ")
    if text is None:
        return None
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def _nvidia_major(root):
    try:
        return procfs.parse_devices(_read(root + "/devices") or "")["nvidia"]
    except ValueError:
        return None


def _descriptors(folder, major):
    """``(minors of the GPU nodes, inodes of the sockets)`` that a process holds open; (None, None) unreadable."""
    try:
        names = os.listdir(folder + "/fd")
    except OSError:
        return None, None
    minors, sockets = set(), set()
    for name in names:
        path = folder + "/fd/" + name
        try:
            target = os.readlink(path)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
                continue
            about = os.stat(path)
        except OSError:
            continue
        if stat.S_ISCHR(about.st_mode) and os.major(about.st_rdev) == major and os.minor(about.st_rdev) < 254:
            minors.add(os.minor(about.st_rdev))
    return sorted(minors), sockets


def _listening(root):
    """Inode to port of the listening TCP sockets of this network namespace."""
    found = {}
    for path in (root + "/net/tcp", root + "/net/tcp6"):
        for line in (_read(path, 16 << 20) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                found[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    return found


def _started(folder):
    text = _read(folder + "/stat")
    # The name in brackets may hold blanks and brackets itself.
    fields = text.rpartition(")")[2].split() if text else []
    return int(fields[19]) if len(fields) > 19 else None


def _age(ticks):
    """Seconds since a start. /proc/uptime is not asked: in a container it may be the container's."""
    if ticks is None:
        return None
    return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")), 1)


def policies(folder):
    """The memory policies of a process's first mappings, such as ``["bind:1"]``; None where they can't be read."""
    text = _read(folder + "/numa_maps", _NUMA_MAPS_BYTES)
    if not text:
        return None
    whole = text if text.endswith("\n") else text.rpartition("\n")[0]
    found = {match.group(1) for match in re.finditer(r"(?m)^[0-9a-f]+ (\S+)", whole)}
    return sorted(found) or None
