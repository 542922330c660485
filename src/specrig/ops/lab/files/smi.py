#!/usr/bin/python3
"""The lab's ``nvidia-smi``: answers as the recorded box does, and lists the processes that hold a GPU node open.

A process is on the GPU whose node (195:minor) one of its descriptors refers to, whatever it was told to use.
Persistence, power limits and clock locks can be set; like a real driver's they are lost when the host stops.
Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path("/usr/local/libexec/specrig-lab")
NVIDIA_MAJOR = 195
PROC_DRIVER = Path("/proc/driver/nvidia")
SETTINGS = Path("/run/specrig-lab/smi-settings.json")
POWER_W = (600.0, 300.0, 600.0)
"""The simulated cards' default, least and most power limit."""
CLOCK_MHZ = (180, 3090)
"""What their SM clock is when idle, and at most."""
MEMORY_SHARE = 0.88
LONG = {
    "--id": "-i",
    "--list-gpus": "-L",
    "--query": "-q",
    "--persistence-mode": "-pm",
    "--power-limit": "-pl",
    "--lock-gpu-clocks": "-lgc",
    "--reset-gpu-clocks": "-rgc",
}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)

Gpu = dict[str, Any]


def usable(path: str) -> bool:
    """Whether the node may be opened here; ENXIO means permitted with no driver behind it."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return error.errno == errno.ENXIO
    return True


def processes() -> list[tuple[int, str, int]]:
    """Process id, title and minor of each process that refers to a GPU node."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            descriptors = list(os.scandir(f"/proc/{entry.name}/fd"))
        except OSError:
            continue
        minors = set()
        for descriptor in descriptors:
            try:
                at = os.stat(descriptor.path)  # noqa: PTH116
            except OSError:
                continue
            if stat.S_ISCHR(at.st_mode) and os.major(at.st_rdev) == NVIDIA_MAJOR and os.minor(at.st_rdev) < 254:
                minors.add(os.minor(at.st_rdev))
        if minors:
            try:
                title = Path(f"/proc/{entry.name}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue
            found += [(int(entry.name), title.strip() or "[Not Found]", minor) for minor in sorted(minors)]
    return sorted(found)


def look(box: dict[str, Any]) -> list[Gpu]:
    """The GPUs that this machine or guest may open, each with its processes and its memory in use."""
    gpus: list[Gpu] = []
    alive = processes()
    kept = settings()
    total, reserved = box["memory_total_mib"], box["memory_reserved_mib"]
    for gpu in box["gpus"]:
        if not (PROC_DRIVER / "gpus" / gpu["bus_id"]).is_dir() or not usable(f"/dev/nvidia{gpu['minor']}"):
            continue
        mine = [(pid, title) for pid, title, minor in alive if minor == gpu["minor"]]
        each = int((total - reserved) * MEMORY_SHARE) // len(mine) if mine else 0
        bus = "0000" + gpu["bus_id"].upper()
        gpus.append(
            {
                **gpu,
                "index": len(gpus),
                "bus": bus,
                "name": box["name"],
                "total": total,
                "reserved": reserved,
                "used": each * len(mine),
                "free": total - reserved + 1 - each * len(mine),
                "processes": [(pid, title, each) for pid, title in mine],
                "persistence": "Enabled" if own(kept, gpu).get("persistence") else "Disabled",
                "power": own(kept, gpu).get("power", POWER_W[0]),
                "clock": max(CLOCK_MHZ[0], own(kept, gpu).get("clocks", [0])[0]),
            }
        )
    return gpus


def settings() -> dict[str, dict[str, Any]]:
    """What was set since the host came up, by UUID."""
    try:
        kept: dict[str, dict[str, Any]] = json.loads(SETTINGS.read_text())
    except (OSError, ValueError):
        return {}
    return kept


def own(kept: dict[str, dict[str, Any]], gpu: Gpu) -> dict[str, Any]:
    """The settings of one GPU."""
    return kept.get(gpu["uuid"], {})


def change(gpus: list[Gpu], option: str, value: str) -> int:
    """Do what -pm, -pl, -lgc and -rgc do, and say what the real program says."""
    if not SETTINGS.parent.is_dir() or os.geteuid() != 0:
        print("Unable to set the value: Insufficient Permissions\nTerminating early due to previous errors.")
        return 4
    kept = settings()
    for gpu in gpus:
        mine = kept.setdefault(gpu["uuid"], {})
        if option == "-pm":
            mine["persistence"] = value in ("1", "ENABLED")
            print(f"{'Enabled' if mine['persistence'] else 'Disabled'} persistence mode for GPU {gpu['bus']}.")
        elif option == "-pl":
            least, most = POWER_W[1:]
            if not least <= float(value) <= most:
                print(
                    f"Provided power limit {float(value):.2f} W is not a valid power limit which should be between "
                    f"{least:.2f} W and {most:.2f} W for GPU {gpu['bus']}\nTerminating early due to previous errors."
                )
                return 2
            before, mine["power"] = mine.get("power", POWER_W[0]), float(value)
            print(f"Power limit for GPU {gpu['bus']} was set to {float(value):.2f} W from {before:.2f} W.")
        elif option == "-lgc":
            low, _, high = value.partition(",")
            mine["clocks"] = [int(low), int(high or low)]
            print(f'GPU clocks set to "(gpuClkMin {low}, gpuClkMax {high or low})" for GPU {gpu["bus"]}')
        else:
            mine.pop("clocks", None)
            print(f"All GPU clocks reset to default for GPU {gpu['bus']}")
    SETTINGS.write_text(json.dumps(kept))
    print("All done.")
    return 0


Field = tuple[str, str, Callable[[Gpu], Any]]


def gpu_fields(box: dict[str, Any], count: int) -> dict[str, Field]:
    """The fields of --query-gpu: header, unit and value."""
    now = time.strftime("%Y/%m/%d %H:%M:%S.000")
    fields: dict[str, Field] = {
        "timestamp": ("timestamp", "", lambda _: now),
        "driver_version": ("driver_version", "", lambda _: box["driver_version"]),
        "count": ("count", "", lambda _: count),
        "index": ("index", "", lambda g: g["index"]),
        "name": ("name", "", lambda g: g["name"]),
        "uuid": ("uuid", "", lambda g: g["uuid"]),
        "serial": ("serial", "", lambda g: g["serial"]),
        "pci.bus_id": ("pci.bus_id", "", lambda g: g["bus"]),
        "persistence_mode": ("persistence_mode", "", lambda g: g["persistence"]),
        "temperature.gpu": ("temperature.gpu", "", lambda g: 41 if g["processes"] else 29),
        "gpu_recovery_action": ("gpu_recovery_action", "", lambda _: "None"),
        "power.limit": ("power.limit", "W", lambda g: f"{g['power']:.2f}"),
        "power.default_limit": ("power.default_limit", "W", lambda _: f"{POWER_W[0]:.2f}"),
        "power.min_limit": ("power.min_limit", "W", lambda _: f"{POWER_W[1]:.2f}"),
        "power.max_limit": ("power.max_limit", "W", lambda _: f"{POWER_W[2]:.2f}"),
        "enforced.power.limit": ("enforced.power.limit", "W", lambda g: f"{g['power']:.2f}"),
        "clocks.current.sm": ("clocks.current.sm", "MHz", lambda g: g["clock"]),
        "clocks.max.sm": ("clocks.max.sm", "MHz", lambda _: CLOCK_MHZ[1]),
        "mig.mode.current": ("mig.mode.current", "", lambda _: "Disabled"),
        "mig.mode.pending": ("mig.mode.pending", "", lambda _: "Disabled"),
        "compute_mode": ("compute_mode", "", lambda _: "Default"),
        "compute_cap": ("compute_cap", "", lambda _: "12.0"),
        "memory.total": ("memory.total", "MiB", lambda g: g["total"]),
        "memory.reserved": ("memory.reserved", "MiB", lambda g: g["reserved"]),
        "memory.used": ("memory.used", "MiB", lambda g: g["used"]),
        "memory.free": ("memory.free", "MiB", lambda g: g["free"]),
    }
    unknown = {
        "": ["vbios_version", "pstate", "display_active", "display_mode", "addressing_mode",
             "ecc.mode.current", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
             "pcie.link.width.max", "ecc.errors.uncorrected.volatile.total"],
        "%": ["utilization.gpu", "utilization.memory", "fan.speed"],
        "W": ["power.draw", "power.draw.average", "power.draw.instant"],
        "MHz": ["clocks.mem", "clocks.gr", "clocks.max.mem"],
    }  # fmt: skip
    for unit, names in unknown.items():
        for name in names:
            fields[name] = (name, unit, lambda _: None)
    for alias, name in {
        "gpu_name": "name",
        "gpu_uuid": "uuid",
        "gpu_serial": "serial",
        "gpu_bus_id": "pci.bus_id",
        "clocks.sm": "clocks.current.sm",
    }.items():
        fields[alias] = fields[name]
    return fields


APP_FIELDS: dict[str, Field] = {
    "timestamp": ("timestamp", "", lambda _: time.strftime("%Y/%m/%d %H:%M:%S.000")),
    "gpu_name": ("gpu_name", "", lambda g: g["name"]),
    "gpu_bus_id": ("gpu_bus_id", "", lambda g: g["bus"]),
    "gpu_serial": ("gpu_serial", "", lambda g: g["serial"]),
    "gpu_uuid": ("gpu_uuid", "", lambda g: g["uuid"]),
    "pid": ("pid", "", lambda g: g["pid"]),
    "process_name": ("process_name", "", lambda g: g["title"]),
    "used_gpu_memory": ("used_gpu_memory", "MiB", lambda g: g["process_mib"]),
}
APP_FIELDS["name"] = APP_FIELDS["process_name"]
APP_FIELDS["used_memory"] = APP_FIELDS["used_gpu_memory"]


def table(names: str, known: dict[str, Field], rows: list[Gpu], options: set[str]) -> int:
    """Print a query's rows as csv; one unknown field fails the whole query, as with the real program."""
    if "csv" not in options:
        sys.stdout.write("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n")
        return 2
    chosen = []
    for name in names.split(","):
        if name.strip() not in known:
            sys.stdout.write(f'Field "{name.strip()}" is not a valid field to query.\n\n')
            return 2
        chosen.append(known[name.strip()])
    bare = "nounits" in options
    if "noheader" not in options:
        print(", ".join(f"{head} [{unit}]" if unit else head for head, unit, _ in chosen))
    for row in rows:
        cells = []
        for _, unit, value in chosen:
            cell = value(row)
            cells.append("[N/A]" if cell is None else f"{cell} {unit}" if unit and not bare else str(cell))
        print(", ".join(cells))
    return 0


def full(box: dict[str, Any], gpus: list[Gpu]) -> str:
    """The report of -q, in the sections that were recorded."""

    def line(depth: int, key: str, value: Any) -> str:
        return f"{' ' * 4 * depth}{key}".ljust(55) + f": {value}\n"

    text = "\n==============NVSMI LOG==============\n\n"
    text += line(0, "Timestamp", time.strftime("%a %b %e %H:%M:%S %Y"))
    text += line(0, "Driver Version", box["driver_version"]) + line(0, "CUDA Version", box["cuda_version"])
    text += "\n" + line(0, "Attached GPUs", len(gpus))
    for gpu in gpus:
        text += f"GPU {gpu['bus']}\n" + line(1, "Product Name", gpu["name"])
        text += line(1, "Persistence Mode", gpu["persistence"])
        text += "    MIG Mode\n" + line(2, "Current", "Disabled") + line(2, "Pending", "Disabled")
        text += line(1, "Serial Number", gpu["serial"]) + line(1, "GPU UUID", gpu["uuid"])
        text += line(1, "Minor Number", gpu["minor"]) + line(1, "GPU Recovery Action", "None")
        text += "    PCI\n" + line(2, "Bus Id", gpu["bus"]) + "    FB Memory Usage\n"
        for key in ("Total", "Reserved", "Used", "Free"):
            text += line(2, key, f"{gpu[key.lower()]} MiB")
        if gpu["processes"]:
            text += "    Processes\n"
            for pid, title, mib in gpu["processes"]:
                text += line(2, "GPU instance ID", "N/A") + line(2, "Compute instance ID", "N/A")
                text += line(2, "Process ID", pid) + line(3, "Type", "C") + line(3, "Name", title)
                text += line(3, "Used GPU Memory", f"{mib} MiB")
        else:
            text += line(1, "Processes", "None")
        text += "\n"
    return text


def main() -> int:
    """Answer one call; the exit code is the real program's."""
    box = json.loads((DATA / "box.json").read_text())
    words = sys.argv[1:]
    if not (PROC_DRIVER / "version").exists():
        sys.stdout.write(NO_DRIVER)
        return 9
    if not usable("/dev/nvidiactl"):
        sys.stdout.write("Failed to initialize NVML: Unknown Error\n")
        return 255
    if words == ["topo", "-m"]:
        sys.stdout.write((DATA / "topo.txt").read_text())
        return 0
    gpus = look(box)
    if not gpus:
        sys.stdout.write("No devices were found\n")
        return 6
    if words[:2] == ["topo", "-p2p"] and words[2:] in (["r"], ["w"]):
        names = [f"GPU{gpu['index']}" for gpu in gpus]
        print(" \t" + "\t".join(names))
        for name in names:
            print(f" {name}\t" + "\t".join("X" if other == name else "OK" for other in names))
        print("\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported")
        return 0
    options: dict[str, str] = {}
    while words:
        word, _, value = words.pop(0).partition("=")
        word = LONG.get(word, word)
        if word in ("-i", "-pm", "-pl", "-lgc") and not value and words:
            value = words.pop(0)
        options[word] = value
    if "-i" in options:
        wanted = {name.strip().lower() for name in options["-i"].split(",")}
        gpus = [g for g in gpus if wanted & {str(g["index"]), g["uuid"].lower(), g["bus"].lower(), g["bus_id"]}]
        if not gpus:
            sys.stdout.write("No devices were found\n")
            return 6
    shape = set(options.get("--format", "").split(","))
    if "--query-gpu" in options:
        return table(options["--query-gpu"], gpu_fields(box, len(gpus)), gpus, shape)
    if "--query-compute-apps" in options:
        rows = [{**g, "pid": p, "title": t, "process_mib": m} for g in gpus for p, t, m in g["processes"]]
        return table(options["--query-compute-apps"], APP_FIELDS, rows, shape)
    if set(options) <= {"-q", "-i"} and "-q" in options:
        sys.stdout.write(full(box, gpus))
    elif set(options) <= {"-L", "-i"} and "-L" in options:
        for gpu in gpus:
            print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
    elif setters := [word for word in ("-pm", "-pl", "-lgc", "-rgc") if word in options]:
        return change(gpus, setters[0], options[setters[0]])
    elif set(options) <= {"-i"}:
        version = box["driver_version"]
        print(f"NVIDIA-SMI {version}   Driver Version: {version}   CUDA Version: {box['cuda_version']}")
        for gpu in gpus:
            print(f"|   {gpu['index']}  {gpu['name']}  On  |  {gpu['bus']}  |  {gpu['used']}MiB / {gpu['total']}MiB |")
    else:
        sys.stdout.write("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
