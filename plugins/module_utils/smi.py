# SPDX-License-Identifier: Apache-2.0
"""Reads ``nvidia-smi``: CSV queries, ``-q``, ``-L``, and the sentences it prints instead of them.

A value that the tool does not know (``[N/A]``, ``[Not Supported]``, ``ERR!``) is None. A GPU that says "requires
reset" is unhealthy, and the zero it reports as used memory is None, not 0.
"""

from __future__ import annotations

import re
from typing import Any

from .text import bus_id, clean

_UNKNOWN = re.compile(
    r"^\[?\s*(n/a|not supported|not found|unknown error|unknown|insufficient permissions|err!"
    r"|requested functionality .*)\s*\]?$",
    re.IGNORECASE,
)
_SICK = re.compile(r"requires? (?:a )?reset|gpu is lost|unknown error|\berr!|fallen off", re.IGNORECASE)
_DEAD = re.compile(r"requires? (?:a )?reset|gpu is lost|fallen off", re.IGNORECASE)
_SETTINGS = ("power.", "clocks.", "persistence_mode")
_FAILURE = re.compile(
    r"Failed to initialize NVML|NVIDIA-SMI has failed|No devices were found|Unable to determine the device handle"
    r"|is not a valid field to query|couldn't find libnvidia-ml|libnvidia-ml\.so.*(?:not found|cannot open)",
    re.IGNORECASE,
)
_LIST = re.compile(r"^GPU (\d+): (.*?)\s*\(UUID: (GPU-[0-9A-Za-z-]+)\)\s*$")
_MIG = re.compile(r"^\s+MIG (.*?)\s+Device\s+(\d+):\s*\(UUID: (MIG-[^)]+)\)")
_Q_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_Q_LINE = re.compile(r"^(\s*)(\S.*?)\s*(?::\s?(.*))?$")
_POWER = ("GPU Power Readings/", "Power Readings/")
_COLUMN = re.compile(r"^[a-z][a-z0-9_.]*(?: \[[^\]]+\])?$")


def failure(text: str) -> str | None:
    """Return the line in which nvidia-smi says that it failed, or None."""
    for line in clean(text).split("\n"):
        if _FAILURE.search(line):
            return " ".join(line.split())[:200]
    return None


def library_version(text: str) -> str | None:
    """Return the version of the user-space library where an NVML failure names it, or None."""
    match = re.search(r"NVML library version:\s*(\d+(?:\.\d+)+)", clean(text))
    return match.group(1) if match else None


def value(cell: str | None) -> str | None:
    """Return the cell's text, or None where the tool says that it does not know."""
    text = (cell or "").strip()
    return None if not text or _UNKNOWN.match(text) or _SICK.search(text) else text


def mib(cell: str | None) -> int | None:
    """Return a memory cell in MiB (``97887 MiB`` or, without units, ``97887``), or None."""
    match = re.match(r"^(\d+)(?:\.\d+)?\s*(MiB|MB|GiB|KiB)?$", value(cell) or "")
    if not match:
        return None
    number = int(match.group(1))
    return {"GiB": number * 1024, "KiB": number // 1024}.get(match.group(2), number)


def number(cell: str | None) -> int | None:
    """Return a whole number, or None."""
    text = value(cell)
    return int(text) if text and re.match(r"^\d+$", text) else None


def watts(cell: str | None) -> float | None:
    """Return a power cell in watts (``600.00 W``, ``600,00 W`` or, without units, ``600.00``), or None."""
    match = re.match(r"^(\d+(?:[.,]\d+)?)\s*W?$", value(cell) or "")
    return float(match.group(1).replace(",", ".")) if match else None


def mhz(cell: str | None) -> int | None:
    """Return a clock cell in MHz (``2430 MHz`` or, without units, ``2430``), or None."""
    match = re.match(r"^(\d+)\s*(?:MHz)?$", value(cell) or "")
    return int(match.group(1)) if match else None


def switched(cell: str | None) -> bool | None:
    """Return True for Enabled, False for Disabled, None for anything else."""
    return {"enabled": True, "on": True, "disabled": False, "off": False}.get((value(cell) or "").lower())


def remedy(index: int | None, reason: str) -> str:
    """Return what is wrong with a sick GPU and what to do, in one line."""
    which = "?" if index is None else str(index)
    words = reason.lower()
    if "lost" in words or "fallen off" in words or "reboot" in words:
        what = "see dmesg for Xid and reboot the host"
    elif "drain" in words and "reset" not in words:
        what = "stop every process on the GPUs and start them again"
    elif "reset" in words:
        what = "stop what runs on it, then nvidia-smi --gpu-reset -i %s, or reboot the host" % which
    else:
        what = "see dmesg for Xid; reset the GPU or reboot the host"
    return "GPU %s: %s: %s" % (which, reason, what)


def gpu(
    index: int | None = None,
    bus: str | None = None,
    minor: int | None = None,
    uuid: str | None = None,
    name: str | None = None,
    total: int | None = None,
    used: int | None = None,
    healthy: bool | None = None,
    reason: str | None = None,
    mig: bool | None = None,
) -> dict[str, Any]:
    """Return the facts of a GPU in the one shape that all parsers share; a fact that is not there is None."""
    return {
        "index": index,
        "bus_id": bus,
        "minor": minor,
        "uuid": uuid,
        "name": name,
        "numa_nodes": None,
        "memory_total_mib": total,
        "memory_used_mib": None if healthy is False else used,
        "healthy": healthy,
        "reason": reason,
        "mig": mig,
        "persistence": None,
        "power_limit_w": None,
        "power_default_w": None,
        "power_min_w": None,
        "power_max_w": None,
        "clock_sm_mhz": None,
        "clock_max_mhz": None,
    }


def looks_like_csv(text: str) -> bool:
    """Tell whether the first line is a CSV header of nvidia-smi (``index, uuid, pci.bus_id``)."""
    for line in clean(text).split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        return len(cells) > 1 and all(_COLUMN.match(cell) for cell in cells) and not cells[0].isdigit()
    return False


def parse_csv(text: str, columns: list[str] | None = None) -> dict[str, Any]:
    """Return the rows of a CSV query as dicts of raw cells, with column names without their unit.

    Args:
        text: with a header line, unless ``columns`` is given (``noheader``).
        columns: names of the columns, in order.

    Returns:
        dict: ``columns``, ``rows``, ``problems``. A comma inside a name is put back into the name's cell.

    Raises:
        ValueError: where there is no header and no columns were given, or nvidia-smi says that it failed.
    """
    failed = failure(text)
    if failed:
        raise ValueError(failed)
    rows, problems = [], []
    for line in clean(text).split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if columns is None:
            if not looks_like_csv(line):
                raise ValueError("not a CSV query of nvidia-smi: the first line is %r, expected a header" % line[:60])
            columns = [re.sub(r" \[[^\]]+\]$", "", cell) for cell in cells]
            continue
        surplus = len(cells) - len(columns)
        if surplus > 0:
            wide = next((i for i, column in enumerate(columns) if column in ("process_name", "name")), None)
            if wide is not None:
                cells[wide : wide + surplus + 1] = [", ".join(cells[wide : wide + surplus + 1])]
        if len(cells) != len(columns):
            problems.append("a line has %d of %d cells: %r" % (len(cells), len(columns), line[:60]))
            continue
        rows.append(dict(zip(columns, cells)))  # noqa: B905 (strict= needs Python 3.10)
    return {"columns": columns or [], "rows": rows, "problems": problems}


def gpus_of_csv(parsed: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (GPUs, problems) of a parsed ``--query-gpu``."""
    gpus, problems = [], list(parsed["problems"])
    for row in parsed["rows"]:
        # A setting that a healthy card does not have may be "[Unknown Error]"; only a word on the GPU itself counts.
        sick = next(
            (
                cell
                for column, cell in row.items()
                if _SICK.search(cell) and (_DEAD.search(cell) or not column.startswith(_SETTINGS))
            ),
            None,
        )
        action = value(row.get("gpu_recovery_action"))
        if not sick and action and action.lower() != "none":
            sick = "recovery action: %s" % action
        alive = [row[c] for c in ("temperature.gpu", "utilization.gpu") if c in row]
        healthy = (
            False
            if sick
            else (
                True
                if (action or "").lower() == "none" or any(number(re.sub(r"\s*%$", "", a)) is not None for a in alive)
                else None
            )
        )
        mig = value(row.get("mig.mode.current"))
        index = number(row.get("index"))
        reason = sick.strip("[] ") if sick else None
        if reason:
            problems.append(remedy(index, reason))
        gpus.append(
            dict(
                gpu(
                    index=index,
                    bus=bus_id(value(row.get("pci.bus_id") or row.get("gpu_bus_id"))),
                    uuid=value(row.get("uuid") or row.get("gpu_uuid")),
                    name=value(row.get("name") or row.get("gpu_name")),
                    total=mib(row.get("memory.total")),
                    used=mib(row.get("memory.used")),
                    healthy=healthy,
                    reason=reason,
                    mig=None if mig is None else mig.lower() == "enabled",
                ),
                persistence=switched(row.get("persistence_mode")),
                power_limit_w=watts(row.get("power.limit")),
                power_default_w=watts(row.get("power.default_limit")),
                power_min_w=watts(row.get("power.min_limit")),
                power_max_w=watts(row.get("power.max_limit")),
                clock_sm_mhz=mhz(row.get("clocks.current.sm") or row.get("clocks.sm")),
                clock_max_mhz=mhz(row.get("clocks.max.sm")),
            )
        )
    return gpus, problems


def processes_of_csv(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return [{gpu_uuid, pid, name, memory_mib}] of a parsed ``--query-compute-apps``."""
    found = []
    for row in parsed["rows"]:
        pid = number(row.get("pid"))
        if pid is not None:
            found.append(
                {
                    "gpu_uuid": value(row.get("gpu_uuid")),
                    "pid": pid,
                    "name": value(row.get("process_name") or row.get("name")),
                    "memory_mib": mib(row.get("used_gpu_memory") or row.get("used_memory")),
                }
            )
    return found


def is_q(text: str) -> bool:
    """Tell whether the text is a log of ``nvidia-smi -q``."""
    return any("NVSMI LOG" in line or _Q_GPU.match(line) for line in clean(text).split("\n"))


def _q_gpu(bus: str, facts: dict[str, str], index: int) -> dict[str, Any]:
    sick = next((found for found in facts.values() if _SICK.search(found)), None)
    action = facts.get("GPU Recovery Action")
    if not sick and action and value(action) and action != "None":
        sick = "recovery action: %s" % action
    healthy = False if sick else (True if action == "None" else None)
    mig = value(facts.get("MIG Mode/Current"))
    power = next((section for section in _POWER if any(key.startswith(section) for key in facts)), _POWER[0])
    row = gpu(
        index=index,
        bus=bus_id(facts.get("PCI/Bus Id") or bus),
        minor=number(facts.get("Minor Number")),
        uuid=value(facts.get("GPU UUID")),
        name=value(facts.get("Product Name")),
        total=mib(facts.get("FB Memory Usage/Total")),
        used=mib(facts.get("FB Memory Usage/Used")),
        healthy=healthy,
        reason=sick.strip("[] ") if sick else None,
        mig=None if mig is None else mig.lower() == "enabled",
    )
    row.update(
        persistence=switched(facts.get("Persistence Mode")),
        power_limit_w=watts(facts.get(power + "Current Power Limit") or facts.get(power + "Power Limit")),
        power_default_w=watts(facts.get(power + "Default Power Limit")),
        power_min_w=watts(facts.get(power + "Min Power Limit")),
        power_max_w=watts(facts.get(power + "Max Power Limit")),
        clock_sm_mhz=mhz(facts.get("Clocks/SM")),
        clock_max_mhz=mhz(facts.get("Max Clocks/SM")),
    )
    return row


def parse_q(text: str) -> dict[str, Any]:
    """Return {"driver_version", "gpus", "problems"} of ``nvidia-smi -q``; the order of the GPUs is their index.

    Raises:
        ValueError: where it is no such log, or nvidia-smi says that it failed.
    """
    failed = failure(text)
    if failed:
        raise ValueError(failed)
    if not is_q(text):
        raise ValueError("not the output of nvidia-smi -q: no NVSMI LOG line and no GPU line")
    top: dict[str, str] = {}
    found: list[tuple[str, dict[str, str]]] = []
    path: list[tuple[int, str]] = []
    facts = top
    for line in clean(text).split("\n"):
        start = _Q_GPU.match(line)
        if start:
            facts, path = {}, []
            found.append((start.group(1), facts))
            continue
        match = _Q_LINE.match(line)
        if not match or line.startswith("="):
            continue
        depth, key, cell = len(match.group(1)), match.group(2), match.group(3)
        path = [(level, word) for level, word in path if level < depth]
        if cell is None:
            path.append((depth, key))
        else:
            facts.setdefault("/".join([word for _, word in path] + [key]), cell.strip())
    gpus = [_q_gpu(bus, facts, index) for index, (bus, facts) in enumerate(found)]
    problems = [remedy(item["index"], item["reason"]) for item in gpus if item["reason"]]
    attached = number(top.get("Attached GPUs"))
    if attached is not None and attached != len(gpus):
        problems.append("%d GPUs are attached, the text holds %d" % (attached, len(gpus)))
    return {"driver_version": value(top.get("Driver Version")), "gpus": gpus, "problems": problems}


def is_list(text: str) -> bool:
    """Tell whether the text is ``nvidia-smi -L``."""
    return any(_LIST.match(line) for line in clean(text).split("\n"))


def parse_list(text: str) -> dict[str, Any]:
    """Return {"gpus", "problems"} of ``nvidia-smi -L``; a GPU with MIG devices below it is in MIG mode.

    Raises:
        ValueError: where no line names a GPU.
    """
    failed = failure(text)
    if failed:
        raise ValueError(failed)
    gpus = []
    for line in clean(text).split("\n"):
        match = _LIST.match(line)
        if match:
            gpus.append(gpu(index=int(match.group(1)), uuid=match.group(3), name=match.group(2)))
        elif _MIG.match(line) and gpus:
            gpus[-1]["mig"] = True
    if not gpus:
        raise ValueError("not the output of nvidia-smi -L: no line names a GPU")
    return {"gpus": gpus, "problems": []}
