#!/usr/bin/python3
"""The lab's simulated NVIDIA driver: what a loaded module shows in /proc, /sys and /dev.

Run as ``driver.py boot`` by a unit of the lab's host, and under the names ``nvidia-modprobe`` and ``modprobe``.
Standard library only. There is no driver behind the nodes: to open one that the cgroup permits gives ENXIO.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = Path("/run/specrig-lab")
BOX = Path("/usr/local/libexec/specrig-lab/box.json")
SETTINGS = Path("/etc/specrig-lab/driver.json")
LAST_MAJOR = Path("/var/lib/specrig-lab/uvm-major")
REAL_MODPROBE = "/usr/sbin/modprobe"
UVM_POOL = range(511, 499, -1)
CAPS_POOL = range(254, 233, -1)


def box() -> dict[str, Any]:
    """The recorded box that is simulated."""
    value: dict[str, Any] = json.loads(BOX.read_text())
    return value


def rewrite(path: Path, text: str) -> None:
    """Write in place, since bind mounts in host and guest show this very inode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+" if path.exists() else "w") as out:
        out.write(text)
        out.truncate()


def cpulist(cpus: list[int]) -> str:
    """The kernel's list format, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def cpumap(cpus: list[int]) -> str:
    """The kernel's mask format: 32-bit groups of hexadecimal digits, highest first."""
    mask = sum(1 << cpu for cpu in cpus)
    groups = max(cpus, default=0) // 32 + 1
    return ",".join(f"{mask >> 32 * i & 0xFFFFFFFF:08x}" for i in range(groups - 1, -1, -1))


def node_cpus() -> list[list[int]]:
    """This machine's CPUs, split over the box's two NUMA nodes."""
    cpus: list[int] = []
    for part in Path("/sys/devices/system/cpu/online").read_text().strip().split(","):
        low, _, high = part.partition("-")
        cpus.extend(range(int(low), int(high or low) + 1))
    half = -(-len(cpus) // 2)
    return [cpus[:half], cpus[half:]]


def majors(section: str) -> dict[int, str]:
    """Major to name, of one section of the kernel's own /proc/devices."""
    found: dict[int, str] = {}
    here = False
    for line in (RUN / "devices.kernel").read_text().splitlines():
        if line.endswith("devices:"):
            here = line.startswith(section)
        elif here and line.strip():
            number, name = line.split(None, 1)
            found[int(number)] = name
    return found


def loaded() -> dict[str, int]:
    """The simulated majors there are now, by name; empty where the module is not loaded."""
    path = RUN / "majors.json"
    value: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return value


def show() -> None:
    """Bring /proc/devices and /proc/driver/nvidia in line with what is loaded."""
    extra = [(number, name) for name, number in loaded().items()]
    if extra:
        extra += [(195, "nvidia-modeset"), (195, "nvidiactl")]
    lines = sorted([*majors("Character").items(), *extra])
    text = "Character devices:\n" + "".join(f"{number:3d} {name}\n" for number, name in lines)
    text += "\nBlock devices:\n" + "".join(f"{number:3d} {name}\n" for number, name in sorted(majors("Block").items()))
    rewrite(RUN / "proc_devices", text)
    if not extra:
        return
    about = box()
    base = RUN / "proc_driver" / "nvidia"
    rewrite(
        base / "version",
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {about['driver_version']}  Release Build  "
        "(simulated by the lab)\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
    )
    rewrite(base / "params", "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n")
    for gpu in about["gpus"]:
        rewrite(
            base / "gpus" / gpu["bus_id"] / "information",
            f"Model: \t\t {about['name']}\nIRQ:   \t\t {64 + gpu['index']}\nGPU UUID: \t {gpu['uuid']}\n"
            "Video BIOS: \t 98.02.81.00.05\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {gpu['bus_id']}\nDevice Minor: \t {gpu['minor']}\nGPU Excluded:\t No\n",
        )


def register(name: str) -> None:
    """What loading a module does: its majors appear. ``nvidia-uvm`` gets another one than at its last load."""
    now = loaded()
    taken = set(majors("Character"))
    if "nvidia" not in now:
        now["nvidia"] = 195
        now["nvidia-caps"] = next(number for number in CAPS_POOL if number not in taken)
    if name == "nvidia-uvm" and name not in now:
        last = int(LAST_MAJOR.read_text()) if LAST_MAJOR.exists() else UVM_POOL[-1]
        pool = [number for number in UVM_POOL if number not in taken and number != last]
        now[name] = next((number for number in pool if number < last), pool[0])
        LAST_MAJOR.parent.mkdir(parents=True, exist_ok=True)
        LAST_MAJOR.write_text(f"{now[name]}\n")
    rewrite(RUN / "majors.json", json.dumps(now))
    show()


def make_node(name: str, major: int, minor: int) -> None:
    """Make /dev/NAME as nvidia-modprobe does, replacing a node of another major."""
    path = Path("/dev") / name
    wanted = os.makedev(major, minor)
    if path.exists() or path.is_symlink():
        at = path.lstat()
        if stat.S_ISCHR(at.st_mode) and at.st_rdev == wanted:
            return
        path.unlink()
    os.mknod(path, 0o666 | stat.S_IFCHR, wanted)
    path.chmod(0o666)


def make_nodes(minors: list[int], uvm: bool) -> None:
    """The nodes of the control device, of the GPUs named and, if asked, of the unified memory."""
    now = loaded()
    make_node("nvidiactl", now["nvidia"], 255)
    make_node("nvidia-modeset", now["nvidia"], 254)
    for minor in minors:
        make_node(f"nvidia{minor}", now["nvidia"], minor)
    if uvm:
        make_node("nvidia-uvm", now["nvidia-uvm"], 0)
        make_node("nvidia-uvm-tools", now["nvidia-uvm"], 1)


def bind(source: Path, target: str) -> None:
    """Show ``source`` in place of ``target``, once."""
    with Path("/proc/self/mountinfo").open() as mounts:
        if any(line.split()[4] == target for line in mounts):
            return
    subprocess.run(["mount", "--bind", str(source), target], check=True)


def boot() -> int:
    """Present the hardware, then load the driver as far as the settings say (all, no-uvm or none)."""
    RUN.mkdir(parents=True, exist_ok=True)
    kernel = RUN / "devices.kernel"
    if not kernel.exists():
        kernel.write_text(Path("/proc/devices").read_text())
    cpus = node_cpus()
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1]) // 2
    for gpu in box()["gpus"]:
        device = RUN / "pci" / gpu["bus_id"]
        rewrite(device / "numa_node", f"{gpu['numa_node']}\n")
        rewrite(device / "vendor", "0x10de\n")
        rewrite(device / "device", "0x2bb5\n")
        rewrite(device / "class", "0x030200\n")
        rewrite(device / "local_cpulist", cpulist(cpus[gpu["numa_node"]]) + "\n")
    nodes = RUN / "nodes"
    for node, own in enumerate(cpus):
        rewrite(nodes / f"node{node}" / "cpulist", cpulist(own) + "\n")
        rewrite(nodes / f"node{node}" / "cpumap", cpumap(own) + "\n")
        rewrite(nodes / f"node{node}" / "distance", "10 32\n" if node == 0 else "32 10\n")
        rewrite(
            nodes / f"node{node}" / "meminfo",
            f"Node {node} MemTotal:       {memory_kib} kB\nNode {node} MemFree:        {memory_kib // 2} kB\n",
        )
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        rewrite(nodes / name, "0-1\n")
    (RUN / "proc_driver").mkdir(exist_ok=True)
    show()
    bind(RUN / "proc_devices", "/proc/devices")
    bind(RUN / "proc_driver", "/proc/driver")
    bind(RUN / "pci", "/sys/bus/pci/devices")
    bind(nodes, "/sys/devices/system/node")
    load = load_setting()
    if load not in ("none", "no-module"):
        register("nvidia" if load == "no-uvm" else "nvidia-uvm")
        make_nodes([gpu["minor"] for gpu in box()["gpus"]], uvm=load != "no-uvm")
    return 0


def load_setting() -> str:
    """How far the driver is loaded at boot."""
    return str(json.loads(SETTINGS.read_text())["load"]) if SETTINGS.exists() else "all"


def no_module(name: str) -> bool:
    """Whether this kernel has no module of the driver, as after a DKMS build that failed; says what modprobe says."""
    if load_setting() != "no-module":
        return False
    where = f"/lib/modules/{os.uname().release}"
    print(f"modprobe: FATAL: Module {name} not found in directory {where}", file=sys.stderr)
    return True


def nvidia_modprobe(arguments: list[str]) -> int:
    """``nvidia-modprobe [-u] [-c MINOR]...``: load the module and make the nodes."""
    uvm = False
    minors: list[int] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-u", "--unified-memory"):
            uvm = True
        elif word in ("-c", "--create-nvidia-device-file"):
            minors.append(int(rest.pop(0)))
        elif word.startswith("-c="):
            minors.append(int(word[3:]))
    if no_module("nvidia-uvm" if uvm else "nvidia"):
        return 1
    register("nvidia-uvm" if uvm else "nvidia")
    make_nodes([] if uvm else minors, uvm)
    return 0


def modprobe(arguments: list[str]) -> int:
    """``modprobe``: the simulated modules here, all others by the real program."""
    names = [word.replace("_", "-") for word in arguments if not word.startswith("-") and "=" not in word]
    if not names or not all(name.startswith("nvidia") for name in names):
        os.execv(REAL_MODPROBE, [REAL_MODPROBE, *arguments])
    if "-r" in arguments or "--remove" in arguments:
        print(f"modprobe: FATAL: Module {names[0]} is in use.", file=sys.stderr)
        return 1
    if no_module(names[0]):
        return 1
    if not {"-n", "--dry-run", "--show", "--show-depends"} & set(arguments):
        for name in names:
            register(name)
    return 0


def main() -> int:
    """Do what the program's name, or its first argument, says."""
    name = Path(sys.argv[0]).name
    if os.geteuid() != 0:
        print(f"{name}: must be run as root", file=sys.stderr)
        return 1
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), False)
        if name == "nvidia-modprobe":
            return nvidia_modprobe(sys.argv[1:])
        if name == "modprobe":
            return modprobe(sys.argv[1:])
        return boot()


if __name__ == "__main__":
    sys.exit(main())
