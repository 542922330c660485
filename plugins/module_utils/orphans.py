# SPDX-License-Identifier: Apache-2.0
"""Which engine processes nobody answers for any more, and which of them are ours to stop.  Pure.

An engine that lost its parent keeps its GPU memory and its port. It is stopped only where three things prove that it is
ours: it runs as the service user, our unit or our environment file started it, and it is an engine's process.
"""

from __future__ import annotations

import re

from . import cpulist, serving

UNASKED = "systemd in the guest cannot be asked whether its unit runs"
"""Of a process in a unit's control group while systemd gives no answer: it may be a server that is right."""
UNASKED_GATE = "systemd in the guest cannot be asked which units run, so orphans are not told from servers; run again"

_ALIVE = ("active", "activating", "reloading", "deactivating")
_SESSION = re.compile(r"^(?:session-.*|init)\.scope$")


def is_engine(words):
    """Whether a command line is an engine's: SGLang's server or one of its ranks, or the simulated engine's."""
    if not words or not words[0]:
        return False
    if words[0].startswith("sglang::"):
        return True
    names = [word.rsplit("/", 1)[-1] for word in words[:4]]
    if "sglang.launch_server" in names:
        return True
    # A script's own interpreter may stand before it.
    for at in (0, 1):
        if names[at : at + 1] == ["sglang"] and words[at + 1 : at + 2] == ["serve"]:
            return True
        if names[at : at + 1] == ["specrig"] and words[at + 1 : at + 2] == ["sim"]:
            return True
    return "specrig.sim" in names


def shown_title(words, name=None):
    """What to call a process: its title where it has one, else its program without the interpreter."""
    words = [word for word in words if word]
    if not words:
        return name or "name unknown"
    first = words[0].split(" ")[0]
    if first.startswith("sglang::"):
        return first[:80]
    names = [word.rsplit("/", 1)[-1] for word in words[:4]]
    if re.match(r"^python[0-9.]*$", names[0]) and len(names) > 1:
        names = names[2:] if names[1] == "-m" else names[1:]
    return " ".join(names[:2] if names[1:2] in (["serve"], ["sim"]) else names[:1])[:80]


def shown_command(words):
    """A command line for a message: secrets masked, cut where it still tells what is run from a long path."""
    return " ".join(serving.mask_argv([word for word in words if word])).strip()[:200]


def find(processes, units, user):
    """Engine processes of this machine that no running unit of ours answers for.

    Args:
        processes: rows of ``engineprocs.gather``.
        units: profile to ``{active, main_pid}`` as systemd says, or None where it could not be asked.
        user: ``{uid, ...}`` of the service user, or None where there is none.

    Returns:
        Rows with ``profile``, ``why`` (why nobody answers for it, or why it is not ours) and ``ours`` added. Those that
        are not ours are left alone by whoever reads this; ``ours`` is None where a unit may answer for it.
    """
    by_pid = {row["pid"]: row for row in processes}
    found = []
    for row in processes:
        name = row["profile"] or row["named_profile"]
        if row["profile"] and units is None:
            found.append(dict(row, profile=name, ours=None, why=UNASKED))
            continue
        unit = (units or {}).get(row["profile"]) or {}
        if row["profile"] and unit.get("active") in _ALIVE:
            main = by_pid.get(unit.get("main_pid"))
            if not _left_behind(row, main, by_pid):
                continue
            why = "it is older than the server of its unit"
        elif row["profile"]:
            why = "its unit {0} is {1}".format(row["unit"], unit.get("active") or "gone")
        else:
            why = _loose(row, by_pid)
        proof = _not_ours(row, _top(row, by_pid), user)
        ours = why is not None and proof is None
        found.append(dict(row, profile=name, ours=ours, why=why if ours else proof or "somebody runs it"))
    return found


def _left_behind(row, main, by_pid):
    """Whether a process in a running unit's group is from an earlier start: its parents end at 1, not at main."""
    if main is None or row["pid"] == main["pid"] or None in (row["started"], main["started"]):
        return False
    top = _top(row, by_pid)
    return top["pid"] != main["pid"] and top["ppid"] == 1 and row["started"] < main["started"]


def _top(row, by_pid):
    """The first of a row's line of parents that is in none of our rows' care; stops on a loop."""
    seen = set()
    while row["ppid"] in by_pid and row["pid"] not in seen:
        seen.add(row["pid"])
        row = by_pid[row["ppid"]]
    return row


def _loose(row, by_pid):
    """Why nobody answers for a process outside of our units, or None where somebody does."""
    top = _top(row, by_pid)
    if top["ppid"] != 1:
        return None
    if top["unit"] and not _SESSION.match(top["unit"]):
        return None
    return "no unit started it and its parent is gone"


def _not_ours(row, top, user):
    """Why a process is not proven to be ours, or None where it is."""
    if user is None:
        return "the guest has no service user"
    if row["uid"] != user["uid"]:
        return "its user is not the service user"
    if not row["profile"] and not row["named_profile"]:
        return "neither its control group nor its environment names one of our profiles"
    if not row["profile"] and row["unit"] and not _SESSION.match(row["unit"]):
        return "it belongs to {0}".format(row["unit"])
    if not row["profile"] and not any(is_engine((one["command"] or "").split(" ")) for one in (row, top)):
        return "it is no engine's process"
    return None


def on_gpus(rows, look, guest):
    """The same rows with ``gpus`` (the host's indices) and ``memory_mib`` of the host's look, None where not known."""
    by_minor = {gpu.get("minor"): gpu["index"] for gpu in look.get("gpus") or []}
    listed = {}
    for process in look.get("processes") or []:
        if process.get("guest") in (None, guest):
            listed.setdefault(process.get("guest_pid") or process.get("pid"), []).append(process)
    result = []
    for row in rows:
        here = listed.get(row["pid"]) or []
        gpus = {process["gpu_index"] for process in here if process.get("gpu_index") is not None}
        gpus.update(by_minor[minor] for minor in row["minors"] or [] if by_minor.get(minor) is not None)
        sizes = [process["memory_mib"] for process in here if process.get("memory_mib") is not None]
        result.append(dict(row, gpus=sorted(gpus), memory_mib=sum(sizes) if sizes else None))
    return result


def text(row, users=None):
    """One process in words: ``sglang::scheduler (pid 812, user specrig, 2 h old, GPU 1, 71230 MiB, port 31001)``."""
    about = ["pid {0}".format(row["pid"])]
    about.append("user {0}".format((users or {}).get(row["uid"], row["uid"])))
    if row["age_s"] is not None:
        about.append(age_text(row["age_s"]) + " old")
    if row.get("gpus"):
        about.append("GPU {0}".format(cpulist.format(row["gpus"])))
    elif row["minors"]:
        about.append("/dev/nvidia{0}".format(cpulist.format(row["minors"])))
    if row.get("memory_mib") is not None:
        about.append("{0} MiB".format(row["memory_mib"]))
    elif row.get("gpus") or row["minors"]:
        about.append("GPU memory unknown")
    if row["ports"]:
        about.append("port {0}".format(",".join(str(port) for port in row["ports"])))
    return "{0} ({1})".format(row["title"], ", ".join(about))


def age_text(seconds):
    """``40 s``, ``12 min``, ``5 h``, ``3 d``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return "{0:.0f} {1}".format(seconds // size, unit)
    return "{0:.0f} d".format(seconds // 86400)


def matters(row, ports):
    """Whether a process that is not ours stands in our way: it holds a GPU or a port of a profile."""
    return bool(row["minors"] or row.get("gpus") or set(row["ports"]) & set(ports))


def gate(rows, ports, users=None):
    """The gate's row: no orphan of ours may hold a GPU or a port; a stranger's is named."""
    ours = [row for row in rows if row["ours"]]
    others = [row for row in rows if row["ours"] is False and matters(row, ports)]
    lines = ["{0}: {1}".format(text(row, users), row["why"]) for row in ours]
    foreign = ["{0}, not ours: {1}".format(text(row, users), row["why"]) for row in others]
    unsure = any(row["ours"] is None for row in rows)
    message = "; ".join(lines + foreign + ([UNASKED_GATE] if unsure else [])) or "none"
    if lines:
        message += "; run recover, which stops ours"
    return {
        "gate": "orphans",
        "subject": "guest",
        "status": "fail" if lines else "unknown" if unsure else "pass",
        "seen": [row["pid"] for row in ours + others],
        "expected": [],
        "message": message,
    }
