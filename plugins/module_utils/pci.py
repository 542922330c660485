# SPDX-License-Identifier: Apache-2.0
"""What lies between the GPUs: IOMMU, PCI access control (ACS), peer-to-peer, and kernel flags.  Pure.

A tensor-parallel group exchanges data at every step. Where the IOMMU translates, or a bridge redirects it to the root
complex, the first all-reduce is known to hang at full load, or every one is slow. Nothing here is changed by specrig:
it is read and reported.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Dict, List

from . import cpulist

Facts = Dict[str, Any]
_ACS = 0x000D
_EXTENDED = 0x100
_REDIRECT = ((0x04, "request redirect"), (0x08, "completion redirect"), (0x20, "egress control"))
_FLAGS = (
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "iommu.passthrough",
    "iommu.strict",
    "pci",
    "pcie_acs_override",
    "pcie_aspm",
    "numa_balancing",
)
P2P_WORDS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "disabled by a driver setting",
    "NS": "not supported",
}

_P2P_CELLS = {"X", "OK", "U", "N/A", *P2P_WORDS}


def flags(cmdline: str | None) -> dict[str, str] | None:
    """Return the flags of a kernel command line that bear on PCI traffic; a flag without a value is "".

    Module options of the NVIDIA driver (``nvidia.NVreg_...``) are kept too. None where the command line is not known.
    """
    if cmdline is None:
        return None
    try:
        words = shlex.split(cmdline)
    except ValueError:
        words = cmdline.split()
    found = {}
    for word in words:
        key, _, cell = word.partition("=")
        if key in _FLAGS or key.startswith(("nvidia.", "nvidia_uvm.")):
            found[key] = cell
    return found


def acs_control(space: bytes) -> tuple[int | None, str | None]:
    """Return (ACS control register, None) of a device's PCI configuration space, or (None, reason).

    (None, None) is a device that has no ACS, which redirects nothing.
    """
    if len(space) <= _EXTENDED:
        return None, "only %d bytes of the configuration space can be read; that takes root on the host" % len(space)
    place, seen = _EXTENDED, 0
    while place and place + 8 <= len(space) and seen < 64:
        header = int.from_bytes(space[place : place + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None, None
        if header & 0xFFFF == _ACS:
            return int.from_bytes(space[place + 6 : place + 8], "little"), None
        place, seen = (header >> 20) & 0xFFC, seen + 1
    return None, None


def redirects(control: int | None) -> list[str]:
    """Return what an ACS control register redirects, in words."""
    return [word for bit, word in _REDIRECT if control is not None and control & bit]


def facts(raw: Facts, gpus: list[Facts], unknown: dict[str, str]) -> Facts:
    """Return {"iommu", "acs", "flags"} of what ``probe.gather`` brought.

    Returns:
        dict: ``iommu`` {enabled: bool or None, gpus: [{index, group, type}]}, ``acs`` {redirecting: [bridge] or None,
        bridges: {bus id: [words]}}, ``flags`` as ``flags()`` gives them.
    """
    told = raw.get("pci") or {}
    rows: List[Facts] = []
    for gpu in gpus:
        about = (told.get("gpus") or {}).get(gpu["bus_id"]) or {}
        rows.append({"index": gpu["index"], "group": about.get("group"), "type": about.get("type")})
    enabled = told.get("iommu")
    if enabled is None:
        unknown["iommu"] = told.get("iommu_reason") or "not asked"
    bridges: dict[str, list[str]] = {}
    reasons = []
    for bus, about in sorted((told.get("bridges") or {}).items()):
        if about.get("reason"):
            reasons.append("%s: %s" % (bus, about["reason"]))
        else:
            bridges[bus] = redirects(about.get("control"))
    if not told.get("bridges"):
        reasons.append(told.get("bridges_reason") or "no bridge above the GPUs is shown in /sys/bus/pci/devices")
    if reasons:
        unknown["acs"] = reasons[0] + (" (and %d more)" % (len(reasons) - 1) if len(reasons) > 1 else "")
    on = [bus for bus, words in bridges.items() if words]
    return {
        "iommu": {"enabled": enabled, "gpus": rows},
        "acs": {"redirecting": on if on or not reasons else None, "bridges": bridges},
        "flags": flags(raw["files"].get("/proc/cmdline")),
    }


def parse_p2p(text: str) -> dict[str, str]:
    """Return {"0-1": "OK"} of ``nvidia-smi topo -p2p r`` (text without terminal codes).

    Raises:
        ValueError: where it has no header that names GPUs, or no row.
    """
    names: list[str] | None = None
    rows = 0
    pairs: dict[str, str] = {}
    for line in text.split("\n"):
        words = line.split()
        if words and all(re.match(r"^GPU\d+$", word) for word in words) and names is None:
            names = words
        elif (
            names
            and words
            and words[0] in names
            and words.count("X") == 1
            and all(word in _P2P_CELLS for word in words[1:])
        ):
            rows += 1
            for name, cell in zip(names, words[1:]):  # noqa: B905 (strict= needs Python 3.10)
                if cell != "X" and name != words[0]:
                    one, two = sorted((int(words[0][3:]), int(name[3:])))
                    key = "%d-%d" % (one, two)
                    pairs[key] = cell if pairs.get(key, "OK") == "OK" else pairs[key]
    if names is None or not rows:
        raise ValueError("not the output of nvidia-smi topo -p2p: no header of GPUs with a row of X and OK, CNS, ...")
    return pairs


def notes(pci: Facts, p2p: dict[str, str] | None, gpus: list[Facts]) -> list[str]:
    """Return one text for each setting that is known to hang or slow a tensor-parallel group."""
    if len(gpus) < 2:
        return []
    found = []
    known = {row["index"]: row["type"] for row in pci["iommu"]["gpus"]}
    translated = [index for index, kind in known.items() if (kind or "").startswith("DMA")]
    given = pci["flags"] or {}
    passthrough = given.get("iommu") in ("pt", "off") or given.get("iommu.passthrough") == "1"
    off = "off" in (given.get("intel_iommu"), given.get("amd_iommu"))
    way = "boot with iommu=pt"
    if translated:
        kinds = sorted({str(known[index]) for index in translated})
        found.append(
            "IOMMU translates for GPU %s (group type %s): the first all-reduce of a tp group may hang or every one be "
            "slow; %s, or give the engine NCCL_P2P_DISABLE=1" % (cpulist.format(translated), ", ".join(kinds), way)
        )
    elif pci["iommu"]["enabled"] is not False and not any(known.values()) and not passthrough and not off:
        asked = [
            "%s=%s" % (key, given[key])
            for key in ("intel_iommu", "amd_iommu")
            if given.get(key, "").split(",")[0] in ("on", "force_enable", "force_isolation")
        ]
        if asked:
            found.append(
                "the kernel was booted with %s and without iommu=pt: all-reduces between GPUs may hang or be slow; %s"
                % (" ".join(asked), way)
            )
    on = pci["acs"]["redirecting"] or []
    if on:
        words = sorted({word for bus in on for word in pci["acs"]["bridges"][bus]})
        found.append(
            "ACS is on (%s) at %d bridges above the GPUs (%s): traffic between GPUs goes through the CPU, slow "
            "or hanging; turn ACS off in the BIOS, or with setpci at each boot"
            % (", ".join(words), len(on), ", ".join(on[:4]) + (", ..." if len(on) > 4 else ""))
        )
    if "pcie_acs_override" in given:
        found.append("pcie_acs_override is set: IOMMU groups say less than they seem to")
    here = {gpu.get("index"): gpu.get("numa_node") for gpu in gpus}
    bad: dict[str, list[str]] = {}
    for pair, word in (p2p or {}).items():
        one, two = (int(part) for part in pair.split("-"))
        if word in P2P_WORDS and here.get(one) == here.get(two):
            bad.setdefault(word, []).append(pair)
    for word, pairs in sorted(bad.items()):
        found.append(
            "no peer-to-peer between GPUs of one NUMA node (%s: %s): NCCL goes through host memory, slower"
            % (", ".join(pairs[:6]) + (", ..." if len(pairs) > 6 else ""), P2P_WORDS[word])
        )
    return found
