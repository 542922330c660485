# SPDX-License-Identifier: Apache-2.0
"""Says what one captured file is and what it holds."""

from __future__ import annotations

from typing import Any

from . import guestconf, numa, pci, procfs, smi, topo
from .text import clean


class NotRecognised(ValueError):
    """The text is of no kind that is known; the text of the error is one line for the user."""


def _gpu(**facts: Any) -> dict[str, Any]:
    row = smi.gpu()
    row.update(facts)
    return row


def _topo(text: str) -> dict[str, Any]:
    facts = topo.parse(text)
    gpus = [
        _gpu(index=g["index"], numa_nodes=g["numa_nodes"], cpus=g["cpus"], gpu_numa_id=g["gpu_numa_id"])
        for g in facts["gpus"]
    ]
    return {"kind": "topo", "gpus": gpus, "nics": facts["nics"], "links": facts["links"], "problems": facts["problems"]}


def _smi_csv(text: str) -> dict[str, Any]:
    parsed = smi.parse_csv(text)
    if "pid" in parsed["columns"]:
        return {
            "kind": "smi-csv",
            "gpus": [],
            "processes": smi.processes_of_csv(parsed),
            "problems": parsed["problems"],
        }
    gpus, problems = smi.gpus_of_csv(parsed)
    versions = {smi.value(row.get("driver_version")) for row in parsed["rows"]} - {None}
    return {
        "kind": "smi-csv",
        "gpus": gpus,
        "driver_version": versions.pop() if len(versions) == 1 else None,
        "problems": problems,
    }


def _devices(text: str) -> dict[str, Any]:
    names = procfs.parse_device_names(text)["char"]
    majors = procfs.parse_devices(text)
    problems = []
    if majors["nvidia"] is None:
        problems.append("the nvidia driver is not loaded: no nvidia character major")
    if majors["nvidia-uvm"] is None:
        problems.append("nvidia-uvm is not loaded: no major for it; run nvidia-modprobe -u -c 0")
    others = {
        name: major
        for major, group in sorted(names.items())
        for name in group
        if name.startswith("nvidia") and name not in majors and name not in procfs.NVIDIA_NAMES
    }
    return {"kind": "proc-devices", "majors": majors, "other_nvidia": others, "problems": problems}


def config_problems(facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with a guest config, one text each."""
    problems = ["%s has no effect on cgroup v2: write lxc.cgroup2" % text for text in facts["v1_keys"]]
    problems += ["stands twice: %s" % text for text in facts["duplicates"]]
    if not facts["device_rules"] and not facts["mounts"] and not facts["devs"]:
        for item in facts["elsewhere"]:
            problems.append("in section [%s], without effect on the guest: %s" % (item["section"], item["text"]))
    for mount in facts["mounts"]:
        source = mount["source"] or ""
        if source.startswith("dev/"):
            problems.append("mount source %s has no leading slash: %s" % (source, mount["text"]))
        elif not mount["target"]:
            problems.append("a mount entry without a target: %s" % mount["text"])
    for rule in facts["device_rules"]:
        if rule["stale"]:
            owner = "now %s" % ", ".join(rule["owner"]) if rule["owner"] else "no driver has it"
            problems.append("rule %s allows a major that is not NVIDIA's (%s)" % (rule["text"], owner))
        elif guestconf.rule(rule["text"]) is None:
            problems.append("device rule not understood: %s" % rule["text"])
    problems += guestconf.dev_problems(facts)
    paths = {mount["source"] for mount in facts["mounts"]} | {dev["path"] for dev in facts["devs"]}
    if any(path and path.startswith("/dev/nvidia") and path[len("/dev/nvidia") :].isdigit() for path in paths):
        for node in ("/dev/nvidiactl", "/dev/nvidia-uvm"):
            if node not in paths:
                problems.append("GPUs are handed over without %s: CUDA cannot start" % node)
    return problems


def _config(text: str) -> dict[str, Any]:
    facts = guestconf.parse(text)
    problems = config_problems(facts)
    if "ANSIBLE MANAGED BLOCK\n# END" in clean(text):
        problems.append("the marker block is empty: the file was rewritten, its lines are further down")
    return {
        "kind": "guest-config",
        "style": facts["style"],
        "sections": facts["sections"],
        "device_rules": facts["device_rules"],
        "mounts": facts["mounts"],
        "devs": facts["devs"],
        "v1_keys": facts["v1_keys"],
        "unprivileged": facts["unprivileged"],
        "problems": problems,
    }


def _numa(text: str) -> dict[str, Any]:
    facts = numa.parse(text)
    gpus = [
        _gpu(
            bus_id=g["bus_id"],
            numa_nodes=None if g["numa_node"] is None else [g["numa_node"]],
        )
        for g in facts["gpus"]
    ]
    return {
        "kind": "numa",
        "numa": facts["numa"],
        "offline_cpus": facts["offline_cpus"],
        "gpus": gpus,
        "problems": facts["problems"],
    }


def _information(text: str) -> dict[str, Any]:
    facts = procfs.parse_information(text)
    row = _gpu(bus_id=facts["bus_id"], minor=facts["minor"], uuid=facts["uuid"], name=facts["name"])
    problems = []
    if facts["firmware"] in ("N/A", "n/a"):
        problems.append("GPU firmware is N/A: Blackwell cards need the open kernel module")
    if facts["excluded"]:
        problems.append("the GPU is excluded by the driver")
    return {"kind": "gpu-information", "gpus": [row], "problems": problems}


def _listing(text: str) -> dict[str, Any]:
    nodes = procfs.parse_ls(text)
    majors = dict.fromkeys(("nvidia", "nvidia-uvm", "nvidia-caps"))
    for node in nodes:
        name = node["path"].rsplit("/", 1)[-1]
        if name in ("nvidia-uvm", "nvidia-uvm-tools"):
            majors["nvidia-uvm"] = node["major"]
        elif name.startswith("nvidia-cap"):
            majors["nvidia-caps"] = node["major"]
        elif name == "nvidiactl" or name[6:].isdigit():
            majors["nvidia"] = node["major"]
    problems = [
        "%s is mode %s: a service user cannot open it" % (n["path"], n["mode"]) for n in nodes if n["mode"][-1] < "6"
    ]
    names = {node["path"].rsplit("/", 1)[-1] for node in nodes}
    problems += ["/dev/%s is not listed" % name for name in ("nvidiactl", "nvidia-uvm") if name not in names]
    return {"kind": "dev-listing", "nodes": nodes, "majors": majors, "problems": problems}


def _p2p(text: str) -> dict[str, Any]:
    pairs = pci.parse_p2p(text)
    bad: dict[str, list[str]] = {}
    for pair, word in pairs.items():
        if word in pci.P2P_WORDS:
            bad.setdefault(word, []).append(pair)
    problems = [
        "no peer-to-peer between %s: %s" % (", ".join(found), pci.P2P_WORDS[word])
        for word, found in sorted(bad.items())
    ]
    return {"kind": "p2p", "gpus": [], "p2p": pairs, "problems": problems}


def _cmdline(text: str) -> dict[str, Any]:
    found = pci.flags(text.strip()) or {}
    around = {"iommu": {"enabled": None, "gpus": []}, "acs": {"redirecting": None, "bridges": {}}, "flags": found}
    return {"kind": "kernel-cmdline", "gpus": [], "flags": found, "problems": pci.notes(around, None, [{}, {}])}


def _is_cmdline(lines: list[str]) -> bool:
    starts = ("BOOT_IMAGE=", "root=", "initrd=", "console=", "iommu=", "intel_iommu=", "amd_iommu=")
    words = " ".join(lines).split()
    return len([line for line in lines if line.strip()]) == 1 and any(word.startswith(starts) for word in words)


def _version(text: str) -> dict[str, Any]:
    facts = procfs.parse_version(text)
    return {"kind": "driver-version", "driver": facts, "problems": []}


def explain(text: str, name: str = "") -> dict[str, Any]:
    """Return ``kind``, ``problems`` and the facts of one captured output; what it does not hold is None.

    Args:
        text: the file, with or without terminal codes and carriage returns.
        name: shown in the error only; the kind is told by content.

    Raises:
        NotRecognised: one line.
    """
    plain = clean(text)
    label = "%s: " % name if name else ""
    if not plain.strip():
        raise NotRecognised(label + "the file is empty; expected one captured output, such as nvidia-smi topo -m")
    lines = plain.split("\n")
    if "\0" in plain:
        raise NotRecognised(label + "binary data; expected the text of one captured output")
    kinds = (
        (any(line.strip() in ("Character devices:", "Block devices:") for line in lines), _devices),
        (topo.is_topo(plain), _topo),
        (any("GPU0" in line for line in lines), _p2p),
        (any(line.startswith("NVRM version:") for line in lines), _version),
        (any(line.startswith("Bus Location:") for line in lines), _information),
        (smi.is_q(plain), lambda t: dict(smi.parse_q(t), kind="smi-q")),
        (smi.is_list(plain), lambda t: dict(smi.parse_list(t), kind="smi-list")),
        (smi.looks_like_csv(plain), _smi_csv),
        (smi.failure(plain) is not None, lambda t: {"kind": "smi-csv", "gpus": [], "problems": [smi.failure(t)]}),
        (any(line[:1] in "cb" and "/dev/" in line for line in lines), _listing),
        (_is_cmdline(lines), _cmdline),
        (True, _numa),
        (True, _config),
    )
    for fits, read in kinds:
        if fits:
            try:
                return read(plain)
            except ValueError:
                continue
    raise NotRecognised(
        "%snot recognised; expected the output of nvidia-smi (topo -m, topo -p2p, -q, -L, CSV), numactl -H or lscpu, "
        "/proc/devices, /proc/cmdline, /proc/driver/nvidia/*, ls -l /dev/nvidia*, or a guest config; the first line "
        "is %r" % (label, next(line for line in lines if line.strip())[:60])
    )
