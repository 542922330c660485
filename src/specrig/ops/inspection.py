"""What topology and explain share: read a source, find the groups, put facts on a screen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from specrig.errors import GateError, UsageError
from specrig.facts import cpulist, explain, gpusettings, look, numa, placement

_LARGEST = 16 << 20


def read_captured(name: str) -> str:
    """Return a captured file's text, whatever its encoding; ``-`` is standard input.

    Raises:
        UsageError: it cannot be read or is larger than any captured output.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_LARGEST + 1)
        else:
            with Path(name).open("rb") as stream:
                data = stream.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; expected a file with one captured output") from None
    if len(data) > _LARGEST:
        raise UsageError(f"{name} is larger than {_LARGEST >> 20} MiB; expected one captured output")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8", "replace")


def look_of(source: str) -> dict[str, Any]:
    """Return the look of a capture folder, or what a topology matrix alone tells.

    Raises:
        UsageError: it is neither.
    """
    path = Path(source)
    if path.is_dir():
        from specrig.ops import capture

        facts: dict[str, Any] = look.assemble(capture.read(path))
        return facts
    try:
        told = explain.explain(read_captured(source), source)
    except explain.NotRecognised as error:
        raise UsageError(str(error)) from None
    if told["kind"] != "topo":
        raise UsageError(
            f"{source} is of kind {told['kind']}; expected a folder of specrig capture or nvidia-smi topo -m"
        )
    return _look_of_matrix(told)


def _look_of_matrix(told: dict[str, Any]) -> dict[str, Any]:
    cpus: dict[int, set[int]] = {}
    for gpu in told["gpus"]:
        nodes = gpu["numa_nodes"] or []
        gpu["numa_node"] = nodes[0] if len(nodes) == 1 else None
        if len(nodes) == 1 and gpu["cpus"]:
            cpus.setdefault(nodes[0], set()).update(cpulist.parse(gpu["cpus"]))
    return {
        "schema": look.SCHEMA,
        "simulated": False,
        "gpus": told["gpus"],
        "links": told["links"],
        "numa": [numa.node_row(node, sorted(found)) for node, found in sorted(cpus.items())],
        "processes": [],
        "problems": told["problems"],
        "unknown": {"processes": "a topology matrix does not tell", "numa": "CPU lists are those of the matrix"},
    }


def inventory_looks(given: str) -> dict[str, dict[str, Any]]:
    """Look at the GPU hosts of an inventory, by the module that the roles use.

    Raises:
        UsageError: no such inventory.
        GateError: a host could not be looked at.
    """
    from specrig.ops.runner import inventory_path, run_playbook

    found: dict[str, dict[str, Any]] = {}

    def keep(event: dict[str, Any]) -> None:
        data = event.get("event_data") or {}
        facts = (data.get("res") or {}).get("look")
        if event.get("event") == "runner_on_ok" and isinstance(facts, dict):
            found[str(data.get("host"))] = facts

    result = run_playbook("topology", inventory_path(given), quiet=True, on_event=keep)
    if result.failures:
        raise GateError(result.failures[0])
    if not found:
        raise UsageError(f"inventory {given} has no host in the group gpu_hosts that could be looked at; add one")
    return found


def group_for(facts: dict[str, Any], tp: int) -> dict[str, Any]:
    """Return {"tp", "gpus", "numa_nodes", "cpus", "refused"} of ``gpus: auto`` on this host."""
    planned = placement.plan(facts, {f"tp{tp}": {"tp": tp, "gpus": "auto"}})
    row = planned["profiles"].get(f"tp{tp}", {})
    return {
        "tp": tp,
        "gpus": row.get("gpus"),
        "numa_nodes": row.get("numa_nodes"),
        "cpus": row.get("cpus"),
        "refused": planned["refused"].get(f"tp{tp}"),
    }


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return cpulist.format(value) if value else "none"
    return str(value)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]


def topology_text(name: str, facts: dict[str, Any], group: dict[str, Any] | None) -> str:
    """Return one host's topology on a screen."""
    lines = [f"{name}{'  (simulated driver)' if facts.get('simulated') else ''}"]
    used: dict[int, list[str]] = {}
    for process in facts.get("processes") or []:
        who = process.get("profile") or process.get("name") or "a process"
        used.setdefault(process.get("gpu_index"), []).append(f"{who} ({process.get('pid')})")
    nodes: dict[int | None, list[int]] = {}
    rows = []
    for gpu in facts["gpus"]:
        node = placement.gpu_node(gpu, facts)
        nodes.setdefault(node, []).append(gpu["index"])
        state = "mig" if gpu.get("mig") else {True: "ok", False: gpu.get("reason")}.get(gpu.get("healthy"), "unknown")
        memory = gpu.get("memory_used_mib")
        rows.append(
            [
                str(gpu["index"]),
                _cell(gpu.get("bus_id")),
                _cell(gpu.get("minor")),
                _cell(node),
                "unknown" if memory is None else f"{memory} MiB",
                str(state),
                ", ".join(used.get(gpu["index"], [])) or "-",
            ]
        )
    if rows:
        lines += _table(["GPU", "bus id", "minor", "NUMA node", "memory used", "health", "used by"], rows)
    else:
        lines.append("no GPU")
    cpus = {row["node"]: row.get("cpus") for row in facts.get("numa") or []}
    for known in sorted({*cpus, *(node for node in nodes if node is not None)}):
        here = nodes.get(known, [])
        lines.append(f"NUMA node {known}: {placement.gpus_text(here)}, CPUs {cpus.get(known) or 'unknown'}")
    if nodes.get(None):
        lines.append(f"NUMA node unknown: {placement.gpus_text(nodes[None])}")
    if group and group["gpus"]:
        lines.append(
            f"tp {group['tp']}: {placement.gpus_text(group['gpus'])} ({placement.nodes_text(group['numa_nodes'])}), "
            f"CPUs {group['cpus'] or 'unknown'}"
        )
    elif group:
        lines.append(str(group["refused"]))
    lines += _settings(facts["gpus"]) + _versions(facts) + _between(facts)
    lines += [f"problem: {text}" for text in facts.get("problems") or []]
    lines += [f"note: {text}" for text in facts.get("notes") or []]
    reasons: dict[str, list[str]] = {}
    for probe, reason in (facts.get("unknown") or {}).items():
        reasons.setdefault(reason, []).append(probe)
    lines += [f"unknown: {', '.join(probes)}: {reason}" for reason, probes in reasons.items()]
    return "\n".join(lines)


def _settings(gpus: list[dict[str, Any]]) -> list[str]:
    """Persistence, power limits and clock locks, GPUs with the same ones together."""
    same: dict[str, list[int]] = {}
    for gpu in gpus:
        if gpu.get("persistence") is None and gpu.get("power_limit_w") is None:
            continue
        words = [
            gpusettings.text("persistence", gpu["persistence"]),
            gpusettings.text("power_limit_w", gpu["power_limit_w"]),
            gpusettings.text("lock_clocks_mhz", gpu.get("clock_lock_mhz")),
        ]
        same.setdefault(", ".join(words), []).append(gpu["index"])
    return [f"{placement.gpus_text(indices)}: {words}" for words, indices in same.items()]


def _versions(facts: dict[str, Any]) -> list[str]:
    """The driver's versions in module, host and guests."""
    driver = facts.get("driver")
    if not driver:
        return []
    words = [f"module {_cell(driver['module_version'])} ({_cell(driver['flavor'])})"]
    words.append(f"library of the host {_cell(driver['library_version'])}")
    words += [f"of guest {guest['name']} {_cell(guest.get('library_version'))}" for guest in facts.get("guests") or []]
    return ["driver: " + ", ".join(words)]


def _between(facts: dict[str, Any]) -> list[str]:
    """What lies between the GPUs: IOMMU, ACS, peer-to-peer."""
    around = facts.get("pci")
    if not around:
        return []
    kinds = sorted({row["type"] for row in around["iommu"]["gpus"] if row["type"]})
    iommu = {None: "unknown", False: "off", True: "on"}[around["iommu"]["enabled"]]
    redirecting = around["acs"]["redirecting"]
    acs = "unknown" if redirecting is None else f"redirects at {len(redirecting)} bridges" if redirecting else "off"
    pairs = facts.get("p2p")
    p2p = "unknown" if pairs is None else f"{list(pairs.values()).count('OK')} of {len(pairs)} pairs"
    iommu += f" ({', '.join(kinds)})" if kinds else ""
    return [f"between GPUs: IOMMU {iommu}, ACS {acs}, peer-to-peer {p2p}"]


def facts_text(facts: dict[str, Any]) -> str:
    """Return what ``explain`` found on a screen."""
    lines = [f"kind: {facts['kind']}"]
    gpus = facts.get("gpus") or []
    if gpus:
        columns = [
            key for key in gpus[0] if key == "index" or any(gpu.get(key) is not None for gpu in gpus) if key != "reason"
        ]
        lines += _table(columns, [[_cell(gpu.get(column)) for column in columns] for gpu in gpus])
    for row in facts.get("numa") or []:
        memory = f", {row['memory_mib']} MiB" if row.get("memory_mib") is not None else ""
        lines.append(f"NUMA node {row['node']}: CPUs {row['cpus'] if row['cpus'] else 'none'}{memory}")
    for driver, major in {**facts.get("majors", {}), **facts.get("other_nvidia", {})}.items():
        lines.append(f"major of {driver}: {'not there' if major is None else major}")
    if facts.get("style"):
        lines.append(f"style: {facts['style']}, sections: {', '.join(facts['sections']) or 'only the main one'}")
    for rule in facts.get("device_rules") or []:
        lines.append(f"device rule: {rule['text']}")
    for mount in facts.get("mounts") or []:
        lines.append(f"mount: {mount['text']}")
    for dev in facts.get("devs") or []:
        lines.append(f"{dev['key']}: {dev['text']}")
    for node in facts.get("nodes") or []:
        lines.append(f"{node['path']}: {node['kind']} {node['major']}:{node['minor']} mode {node['mode']}")
    for process in facts.get("processes") or []:
        lines.append(f"process {process['pid']}: {_cell(process['name'])} on {_cell(process['gpu_uuid'])}")
    for pair, word in (facts.get("p2p") or {}).items():
        if word != "OK":
            lines.append(f"GPUs {pair}: no peer-to-peer ({word})")
    if facts.get("kind") == "p2p":
        lines.append(f"peer-to-peer: {list(facts['p2p'].values()).count('OK')} of {len(facts['p2p'])} pairs")
    for key, value in (facts.get("flags") or {}).items():
        lines.append(f"kernel flag: {key}{'=' if value else ''}{value}")
    driver = facts.get("driver")
    if driver:
        lines.append(f"driver: {_cell(driver['module_version'])} ({_cell(driver['flavor'])} kernel module)")
    lines += [f"problem: {text}" for text in facts["problems"]] or ["no problem found"]
    return "\n".join(lines)
