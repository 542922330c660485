# SPDX-License-Identifier: Apache-2.0
"""Reads ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from typing import Any

from . import cpulist
from .text import clean

_GPU = re.compile(r"^GPU(\d+)$")
_LINK = re.compile(r"^(X|SYS|SOC|NODE|PHB|PXB|PIX|NV\d+|N/A)$")
_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def _header(lines: list[str]) -> tuple[int, list[str], list[str]] | None:
    """Return (line number, device names, column names) or None."""
    for number, line in enumerate(lines):
        words = line.split()
        if not words or not _GPU.match(words[0]) or (len(words) > 1 and _LINK.match(words[1])):
            continue
        flat = " ".join(words)
        first = min((flat.find(column) for column in _COLUMNS if column in flat), default=len(flat))
        names = flat[:first].split()
        if not all(re.match(r"^[A-Za-z][\w.:-]*$", name) for name in names):
            continue
        row = next((line.split() for line in lines[number + 1 :] if line.strip()), [])
        bare = len(row) > 1 and row[0] == names[0] and all(_LINK.match(cell) for cell in row[1:])
        if first < len(flat) or bare:
            return number, names, [column for column in _COLUMNS if column in flat]
    return None


def is_topo(text: str) -> bool:
    """Tell whether the text is a topology matrix."""
    return _header(clean(text).split("\n")) is not None


def _cells(line: str, names: list[str], columns: list[str]) -> dict[str, str | None]:
    """Return the cells right of the matrix by column name; None for one that is not there."""
    words = line.split()[1 + len(names) :]
    if len(words) == len(columns):
        return dict(zip(columns, words))  # noqa: B905 (strict= needs Python 3.10)
    if "\t" in line:
        tabs = [cell.strip() for cell in line.rstrip("\n").split("\t")][1 + len(names) :]
        cells = dict.fromkeys(columns)
        if "CPU Affinity" in columns and tabs:
            cells["CPU Affinity"] = tabs[0]
        if "NUMA Affinity" in columns and len(tabs) > 1:
            cells["NUMA Affinity"] = next((cell for cell in tabs[1:3] if cell), None)
        if "GPU NUMA ID" in columns and len(tabs) > 3:
            cells["GPU NUMA ID"] = tabs[-1]
        return cells
    return dict.fromkeys(columns)


def _numbers(cell: str | None, what: str, problems: list[str]) -> list[int] | None:
    if not cell or cell in ("N/A", "[N/A]"):
        return None
    try:
        return cpulist.parse(cell)
    except ValueError:
        problems.append("%s is %r, not a list of numbers: taken as unknown" % (what, cell))
        return None


def parse(text: str) -> dict[str, Any]:
    """Return GPUs, links and what is odd about the matrix.

    Returns:
        dict: ``gpus`` [{index, numa_nodes (list or None), cpus (list text or None), gpu_numa_id (int or None)}],
        ``links`` {"0-1": "PIX"} between GPUs, ``nics`` (other devices in the matrix), ``problems``.

    Raises:
        ValueError: where there is no header that names GPUs.
    """
    lines = clean(text).split("\n")
    header = _header(lines)
    if header is None:
        raise ValueError("not the output of nvidia-smi topo -m: no header line that names GPU0")
    number, names, columns = header
    gpus: list[dict[str, Any]] = []
    links: dict[str, str] = {}
    problems: list[str] = []
    for line in lines[number + 1 :]:
        words = line.split()
        match = _GPU.match(words[0]) if words else None
        if not match or words[0] not in names:
            continue
        index = int(match.group(1))
        row = words[1 : 1 + len(names)]
        if len(row) < len(names) or not all(_LINK.match(cell) for cell in row):
            problems.append("the row of GPU %d is cut off or not understood: its facts are unknown" % index)
            gpus.append({"index": index, "numa_nodes": None, "cpus": None, "gpu_numa_id": None})
            continue
        for name, cell in zip(names, row):  # noqa: B905 (strict= needs Python 3.10)
            other = _GPU.match(name)
            if other and cell not in ("X", "N/A") and int(other.group(1)) != index:
                links["%d-%d" % tuple(sorted((index, int(other.group(1)))))] = cell
        cells = _cells(line, names, columns)
        cpus = _numbers(cells.get("CPU Affinity"), "CPU Affinity of GPU %d" % index, problems)
        own = _numbers(cells.get("GPU NUMA ID"), "GPU NUMA ID of GPU %d" % index, problems)
        gpus.append(
            {
                "index": index,
                "numa_nodes": _numbers(cells.get("NUMA Affinity"), "NUMA Affinity of GPU %d" % index, problems),
                "cpus": cpulist.format(cpus) if cpus else None,
                "gpu_numa_id": own[0] if own and len(own) == 1 else None,
            }
        )
    listed = [int(found.group(1)) for found in map(_GPU.match, names) if found]
    missing = sorted(set(listed) - {gpu["index"] for gpu in gpus})
    if missing:
        problems.append("the header names GPUs %s, but they have no row" % cpulist.format(missing))
    unknown = [gpu["index"] for gpu in gpus if gpu["numa_nodes"] is None]
    if unknown:
        problems.append("the NUMA node of GPU %s is not known (usual in a VM)" % cpulist.format(unknown))
    nics = len([name for name in names if not _GPU.match(name)])
    return {"gpus": sorted(gpus, key=lambda gpu: gpu["index"]), "links": links, "nics": nics, "problems": problems}
