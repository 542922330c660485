# SPDX-License-Identifier: Apache-2.0
"""Makes the facts of a host (the look) from what ``probe.gather`` brought, or from a captured folder."""

from __future__ import annotations

import re
from typing import Any, Dict

from . import cpulist, gpusettings, nodes, numa, pci, placement, procfs, smi, topo
from .text import clean

Facts = Dict[str, Any]
SCHEMA = 1


def _answer(raw: Facts, name: str) -> tuple[str, None] | tuple[None, str]:
    """Return (output, None) of a command that worked, or (None, reason)."""
    result = raw.get("commands", {}).get(name)
    if result is None:
        return None, "not asked"
    if result.get("reason"):
        return None, result["reason"]
    text = result.get("out", "")
    failed = smi.failure(text) or smi.failure(result.get("err", ""))
    if failed and "NVML" in failed:
        library = smi.library_version(text + "\n" + result.get("err", ""))
        failed += " (NVML library %s)" % library if library else ""
    if failed:
        return None, failed
    if result.get("rc") != 0:
        words = " ".join((result.get("err") or text).split())[:200]
        return None, "%s ended with %s: %s" % (
            " ".join(result.get("argv", [])[:2]),
            result.get("rc"),
            words or "no word",
        )
    return text, None


def _driver(raw: Facts, unknown: dict[str, str]) -> Facts:
    driver = {"module_version": None, "library_version": raw.get("library_version"), "flavor": None}
    text = raw["files"].get("/proc/driver/nvidia/version")
    if text is None:
        unknown["driver"] = raw.get("failed", {}).get("/proc/driver/nvidia/version", "not asked")
    else:
        try:
            driver.update(procfs.parse_version(text))
        except ValueError as error:
            unknown["driver"] = str(error)
    for name in ("smi-gpus", "smi-apps"):
        result = raw.get("commands", {}).get(name, {})
        named = smi.library_version(result.get("out", "") + "\n" + result.get("err", ""))
        driver["library_version"] = named or driver["library_version"]
    lying = raw.get("libraries") or []
    if driver["library_version"] is None and len(lying) > 1:
        unknown["library"] = "libraries of %s lie side by side" % ", ".join(lying)
    return driver


def _informations(raw: Facts) -> dict[str, Facts]:
    found = []
    for path, text in sorted(raw["files"].items()):
        if re.match(r"^/proc/driver/nvidia/gpus/[^/]+/information$", path):
            try:
                found.append(procfs.parse_information(text))
            except ValueError:
                continue
    return {row["bus_id"]: row for row in found if row["bus_id"]}


def _numa_node(raw: Facts, bus: str | None) -> int | None:
    text = raw["files"].get("/sys/bus/pci/devices/%s/numa_node" % bus, "").strip()
    return int(text) if re.match(r"^\d+$", text) else None


def _gpus(raw: Facts, problems: list[str], unknown: dict[str, str]) -> tuple[list[Facts], dict[str, str]]:
    """Return (GPUs, links). Where nvidia-smi is silent the driver's own list stands in, in order of bus id."""
    informations = _informations(raw)
    text, reason = _answer(raw, "smi-gpus")
    gpus: list[Facts] = []
    if text is not None:
        try:
            gpus, found = smi.gpus_of_csv(smi.parse_csv(text))
            problems += found
            gpus = [gpu for gpu in gpus if gpu["index"] is not None]
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        unknown["gpus"] = reason
        for index, bus in enumerate(sorted(informations)):
            gpus.append(smi.gpu(index=index, bus=bus, reason=reason))
    else:
        listed = {gpu["bus_id"] for gpu in gpus}
        for bus in sorted(set(informations) - listed):
            problems.append("the driver has a GPU at %s that nvidia-smi does not list" % bus)
    affinity: dict[int, list[int] | None] = {}
    links: dict[str, str] = {}
    text, reason = _answer(raw, "smi-topo")
    if text is not None:
        try:
            facts = topo.parse(text)
            affinity = {gpu["index"]: gpu["numa_nodes"] for gpu in facts["gpus"]}
            links = facts["links"]
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        unknown["links"] = reason
    for gpu in gpus:
        known = informations.get(gpu["bus_id"], {})
        gpu["minor"] = known.get("minor") if gpu["minor"] is None else gpu["minor"]
        gpu["uuid"] = gpu["uuid"] or known.get("uuid")
        gpu["name"] = gpu["name"] or known.get("name")
        gpu["numa_node"] = _numa_node(raw, gpu["bus_id"])
        gpu["numa_nodes"] = affinity.get(gpu["index"])
        if gpu["numa_nodes"] is None and gpu["numa_node"] is not None:
            gpu["numa_nodes"] = [gpu["numa_node"]]
        listed = gpu["numa_nodes"]
        if gpu["numa_node"] is not None and listed and gpu["numa_node"] not in listed:
            problems.append(
                "GPU %d: the kernel says NUMA node %d, nvidia-smi says %s; the kernel's word is taken"
                % (gpu["index"], gpu["numa_node"], cpulist.format(listed))
            )
        if gpu["healthy"] is False and not any(text.startswith("GPU %d:" % gpu["index"]) for text in problems):
            problems.append(smi.remedy(gpu["index"], gpu["reason"]))
    return gpus, links


def _traffic(raw: Facts, unknown: dict[str, str]) -> dict[str, str] | None:
    """Return whether GPUs reach each other directly, {"0-1": "OK"}, or None."""
    text, reason = _answer(raw, "smi-p2p")
    if text is not None:
        try:
            return pci.parse_p2p(clean(text))
        except ValueError as error:
            reason = str(error)
    unknown["p2p"] = str(reason)
    return None


def _numa(raw: Facts, unknown: dict[str, str]) -> list[Facts]:
    rows = []
    siblings = {}
    for path, text in raw["files"].items():
        match = re.match(r"^/sys/devices/system/cpu/cpu(\d+)/topology/thread_siblings_list$", path)
        if match:
            try:
                group = cpulist.parse(text)
            except ValueError:
                continue
            if len(group) > 1:
                siblings[int(match.group(1))] = cpulist.format(group)
    for path, text in sorted(raw["files"].items()):
        match = re.match(r"^/sys/devices/system/node/node(\d+)/cpulist$", path)
        if not match:
            continue
        node = int(match.group(1))
        try:
            cpus = cpulist.parse(text)
        except ValueError as error:
            unknown["numa"] = str(error)
            continue
        memory = re.search(r"MemTotal:\s*(\d+) kB", raw["files"].get(path.replace("cpulist", "meminfo"), ""))
        row = numa.node_row(node, cpus, int(memory.group(1)) // 1024 if memory else None)
        row["siblings"] = sorted({siblings[cpu] for cpu in cpus if cpu in siblings}, key=lambda t: cpulist.parse(t))
        row["memory_policy"] = raw.get("memory_policy", {}).get(str(node), {}).get("works")
        rows.append(row)
    if not rows:
        unknown.setdefault("numa", "no /sys/devices/system/node/node*/cpulist")
    return sorted(rows, key=lambda row: row["node"])


def _processes(raw: Facts, gpus: list[Facts], unknown: dict[str, str]) -> list[Facts]:
    text, reason = _answer(raw, "smi-apps")
    rows: list[Facts] = []
    if text is not None:
        try:
            rows = smi.processes_of_csv(smi.parse_csv(text))
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        unknown["processes"] = reason
        return []
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus if gpu["uuid"]}
    found = []
    for row in rows:
        known = raw.get("processes", {}).get(str(row["pid"]), {})
        status = procfs.parse_status(known.get("status") or "")
        where = procfs.parse_cgroup(known.get("cgroup") or "")
        gpu = by_uuid.get(row["gpu_uuid"], {})
        found.append(
            {
                "pid": row["pid"],
                "name": known.get("title") or status["name"] or row["name"],
                "gpu_index": gpu.get("index"),
                "bus_id": gpu.get("bus_id"),
                "guest": where["guest"],
                "guest_pid": status["guest_pid"],
                "unit": where["unit"],
                "profile": where["profile"],
                "cpus_allowed": status["cpus_allowed"],
                "visible": known.get("visible"),
                "memory_mib": row["memory_mib"],
            }
        )
    return sorted(found, key=lambda p: (p["gpu_index"] is None, p["gpu_index"] or 0, p["pid"]))


def _units(raw: Facts, processes: list[Facts]) -> list[Facts]:
    """Return [{guest, unit, profile, pids, listed}]; listed tells whether nvidia-smi shows one of its processes."""
    on_gpu = {process["pid"] for process in processes}
    found: dict[tuple[str, str | None], Facts] = {}
    for pid, text in raw.get("units", {}).items():
        where = procfs.parse_cgroup(text)
        row = found.setdefault((where["guest"] or "", where["unit"]), dict(where, pids=[]))
        row["pids"].append(int(pid))
    rows = [dict(row, pids=sorted(row["pids"])) for _, row in sorted(found.items())]
    return [dict(row, listed=bool(on_gpu.intersection(row["pids"]))) for row in rows if row["unit"]]


def _engines(raw: Facts, gpus: list[Facts]) -> list[Facts]:
    """Return every engine process with ``held``, the GPUs whose nodes it has open, None where that can't be read."""
    by_minor = {gpu["minor"]: gpu["index"] for gpu in gpus if gpu["minor"] is not None}
    found = []
    for row in raw.get("engines") or []:
        minors = row.get("minors")
        held = None if minors is None else sorted(by_minor[minor] for minor in minors if minor in by_minor)
        found.append(dict(row, held=held))
    return found


def _guests(raw: Facts, unknown: dict[str, str]) -> list[Facts]:
    rows = []
    for name, facts in sorted(raw.get("guests", {}).items()):
        text, reason = _answer(raw, "guest:" + name)
        state = re.search(r"^State:\s*(\S+)", text or "", re.M)
        pid = re.search(r"^PID:\s*(\d+)", text or "", re.M)
        if reason is not None:
            unknown["guest " + name] = reason
        path = next((line.split(":", 2)[-1].strip() for line in (facts.get("cgroup") or "").split("\n") if line), None)
        rows.append(
            {
                "name": name,
                "kind": facts.get("kind"),
                "config": facts.get("config"),
                "state": state.group(1).lower() if state else None,
                "init_pid": int(pid.group(1)) if pid else None,
                "cgroup": path,
                "nodes": facts.get("nodes"),
                "placement": placement.parse_record(raw["files"].get(placement.RECORD % name)),
                "library_version": (facts.get("libraries") or [None])[0]
                if len(facts.get("libraries") or []) < 2
                else None,
            }
        )
        if len(facts.get("libraries") or []) > 1:
            unknown["library of guest " + name] = "libraries of %s lie side by side" % ", ".join(facts["libraries"])
    return rows


def _node_problems(seen: list[Facts], majors: dict[str, int | None]) -> list[str]:
    problems = []
    for node in seen:
        name = node["path"]
        driver = "nvidia"
        if name.startswith("/dev/nvidia-uvm"):
            driver = "nvidia-uvm"
        elif name.startswith("/dev/nvidia-caps"):
            driver = "nvidia-caps"
        if node["kind"] == "missing":
            if majors.get(driver) is not None:
                problems.append("%s is missing" % name)
            continue
        if node["kind"] != "char":
            problems.append("%s is a %s, expected a character device" % (name, node["kind"]))
            continue
        if driver == "nvidia" and not re.match(r"^/dev/nvidia(?:ctl|-modeset|\d+)$", name):
            continue
        live = majors.get(driver)
        if live is not None and node["major"] != live:
            problems.append("%s has major %d, %s has %d now" % (name, node["major"], driver, live))
    return problems


def not_loaded(release: str | None, kernels: list[str] | None) -> str:
    """Return why the driver may not be loaded, and what to do."""
    missing = nodes.no_module(release, kernels)
    return "the nvidia driver is not loaded" + (" and " + missing if missing else ": run recover, which loads it")


def _driver_problems(
    raw: Facts, driver: Facts, gpus: list[Facts], guests: list[Facts], unknown: dict[str, str]
) -> list[str]:
    problems = []
    module, library = driver["module_version"], driver["library_version"]
    for guest in guests:
        theirs = guest["library_version"]
        if module and theirs and theirs != module:
            problems.append(
                "guest %s has the driver's libraries %s, the kernel module is %s: install the same in the guest, "
                "without a kernel module" % (guest["name"], theirs, module)
            )
    if module and library and module != library:
        problems.append(
            "the kernel module is %s, the host's library %s: reboot or install the same" % (module, library)
        )
    firmware = [row["firmware"] for row in _informations(raw).values()]
    silent = "no devices were found" in (unknown.get("gpus") or "").lower()
    if driver["flavor"] == "proprietary" and (silent or not gpus) and firmware:
        problems.append(
            "nvidia-smi finds no GPU under the proprietary kernel module although the driver lists %d: "
            "Blackwell cards need the open kernel module; install it (nvidia-open) and reboot" % len(firmware)
        )
    return problems


def assemble(raw: Facts, simulated: bool = False) -> Facts:
    """Return the look, schema 1, of what ``probe.gather`` or a capture holds. Pure.

    Returns:
        dict with schema, simulated, driver, majors, nodes, gpus, links, p2p, pci, numa, processes, units, guests,
        mounts, kernel, problems and notes (texts), and unknown ({probe: reason}). A fact that could not be read is
        None.
    """
    problems: list[str] = []
    unknown: dict[str, str] = {}
    majors = dict.fromkeys(("nvidia", "nvidia-uvm", "nvidia-caps"))
    names = {}
    text = raw["files"].get("/proc/devices")
    if text is None:
        unknown["majors"] = raw.get("failed", {}).get("/proc/devices", "not asked")
    else:
        try:
            majors = procfs.parse_devices(text)
            names = {str(major): words for major, words in sorted(procfs.parse_device_names(text)["char"].items())}
        except ValueError as error:
            unknown["majors"] = str(error)
    driver = _driver(raw, unknown)
    release = (raw["files"].get("/proc/sys/kernel/osrelease") or "").strip() or None
    gpus, links = _gpus(raw, problems, unknown)
    if "majors" not in unknown:
        if majors["nvidia"] is None:
            problems.insert(0, not_loaded(release, raw.get("module_kernels")))
        elif majors["nvidia-uvm"] is None:
            problems.insert(0, "nvidia-uvm is not loaded: CUDA cannot start; run nvidia-modprobe -u -c 0")
    problems += _node_problems(raw.get("nodes", []), majors)
    guests = _guests(raw, unknown)
    problems += _driver_problems(raw, driver, gpus, guests, unknown)
    p2p = _traffic(raw, unknown)
    notes: list[str] = []
    record = gpusettings.parse_record(raw["files"].get(gpusettings.RECORD))
    for gpu in gpus:
        gpu["clock_lock_mhz"], why = gpusettings.lock_of(gpu, record)
        notes += [why] if why else []
        if gpu["mig"]:
            notes.append(
                "GPU %d is in MIG mode: no profile is placed on it; 'nvidia-smi -i %d -mig 0' and a reset give it back"
                % (gpu["index"], gpu["index"])
            )
    around = pci.facts(raw, gpus, unknown)
    notes += pci.notes(around, p2p, gpus)
    rows = _numa(raw, unknown)
    placed = [gpu["index"] for gpu in gpus if gpu["numa_node"] is None and not gpu["numa_nodes"]]
    if placed:
        problems.append("the NUMA node of GPU %s is not known" % cpulist.format(placed))
    for row in rows:
        reason = raw.get("memory_policy", {}).get(str(row["node"]), {}).get("reason")
        if reason:
            unknown["memory policy of node %d" % row["node"]] = reason
    processes = _processes(raw, gpus, unknown)
    return {
        "schema": SCHEMA,
        "simulated": bool(simulated),
        "driver": driver,
        "majors": majors,
        "major_names": names,
        "nodes": raw.get("nodes", []),
        "gpus": gpus,
        "links": links,
        "p2p": p2p,
        "pci": around,
        "numa": rows,
        "processes": processes,
        "units": _units(raw, processes),
        "engines": _engines(raw, gpus),
        "guests": guests,
        "mounts": raw.get("mounts", {}),
        "kernel": {
            "release": release,
            "cmdline": (raw["files"].get("/proc/cmdline") or "").strip() or None,
        },
        "problems": problems,
        "notes": notes,
        "unknown": unknown,
        "seconds": raw.get("seconds"),
    }
