# SPDX-License-Identifier: Apache-2.0
"""Reads NUMA nodes from ``numactl -H``, ``lscpu`` (in any language) and lists of sysfs files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from . import cpulist
from .text import bus_id, clean

_NUMACTL = re.compile(r"^node (\d+) (cpus|size|free):\s*(.*)$")
# "NUMA node0 CPU(s):", "NUMA-Knoten0 CPU(s):", "CPU(s) de nó0 NUMA:", "NUMA 节点0 CPU：": one number before the colon.
_LSCPU = re.compile(r"^(?=[^:：]*NUMA)[^\d:：]*(\d+)[^\d:：]*[:：]\s*([\d,\-]*)\s*$", re.IGNORECASE)
_OFFLINE = re.compile(r"^[^:：]*off-?line[^:：]*[:：]\s*([\d,\-]+)\s*$", re.IGNORECASE)
_SYSFS_GPU = re.compile(r"^/sys/bus/pci/devices/([0-9a-fA-F:.]+)/numa_node[:\s]+(-?\d+)\s*$")
_SYSFS_NODE = re.compile(r"^/sys/devices/system/node/node(\d+)/cpulist[:\s]+([\d,\-]*)\s*$")


def node_row(node: int, cpu_list: list[int] | None = None, memory_mib: int | None = None) -> dict[str, Any]:
    """Return a node in the shape of the look; CPUs that are not known are None, no CPUs is an empty list."""
    return {
        "node": node,
        "cpus": None if cpu_list is None else cpulist.format(cpu_list),
        "cpu_list": cpu_list,
        "memory_mib": memory_mib,
        "memory_policy": None,
    }


def outside(words: list[str], nodes: Iterable[int]) -> list[str]:
    """Return the words of a process's memory policies that bind it not, or not to these nodes; none where all is right.

    Args:
        words: as ``numa_maps`` has them, such as ``bind:1`` or ``default``. A mapping without a policy of its own
            beside bound ones is no fault.
        nodes: the nodes that it is to be bound to.
    """
    bound = [word for word in words if ":" in word]
    away = [word for word in bound if not set(cpulist.parse(word.rpartition(":")[2])) <= set(nodes)]
    return away or ([] if bound else list(words))


def parse(text: str) -> dict[str, Any]:
    """Return {"numa": [...], "gpus": [{bus_id, numa_node}], "problems": [...]}.

    Raises:
        ValueError: where no line names a node.
    """
    nodes: dict[int, dict[str, Any]] = {}
    gpus: list[dict[str, Any]] = []
    problems: list[str] = []
    offline = None
    for line in clean(text).split("\n"):
        match = _NUMACTL.match(line)
        if match:
            row = nodes.setdefault(int(match.group(1)), node_row(int(match.group(1))))
            if match.group(2) == "cpus":
                try:
                    row["cpu_list"] = cpulist.parse(match.group(3))
                    row["cpus"] = cpulist.format(row["cpu_list"])
                except ValueError as error:
                    problems.append("node %s: %s" % (match.group(1), error))
            elif match.group(2) == "size" and re.match(r"^\d+ MB$", match.group(3).strip()):
                row["memory_mib"] = int(match.group(3).split()[0])
            continue
        match = _SYSFS_GPU.match(line)
        if match and bus_id(match.group(1)):
            node = int(match.group(2))
            gpus.append({"bus_id": bus_id(match.group(1)), "numa_node": node if node >= 0 else None})
            continue
        match = _SYSFS_NODE.match(line) or _LSCPU.match(line)
        if match:
            try:
                nodes[int(match.group(1))] = node_row(int(match.group(1)), cpulist.parse(match.group(2)))
            except ValueError as error:
                problems.append("node %s: %s" % (match.group(1), error))
            continue
        match = _OFFLINE.match(line)
        if match:
            offline = match.group(1)
    if not nodes and not gpus:
        raise ValueError("no NUMA node named: not numactl -H, lscpu or a list of numa_node files")
    for gpu in gpus:
        if gpu["numa_node"] is None:
            problems.append("the NUMA node of %s is not known (-1, usual in a VM)" % gpu["bus_id"])
    for node in sorted(nodes):
        if nodes[node]["cpu_list"] == [] and nodes[node]["memory_mib"] == 0:
            problems.append("node %d has neither CPUs nor memory" % node)
    return {"numa": [nodes[n] for n in sorted(nodes)], "gpus": gpus, "offline_cpus": offline, "problems": problems}
