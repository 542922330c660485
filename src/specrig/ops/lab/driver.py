"""Puts the simulated NVIDIA driver into the lab's containers, and picks how the next boot finds it."""

from __future__ import annotations

import json
import os
from importlib import resources
from typing import Literal

from specrig.ops.lab import network
from specrig.ops.lab.rootfs import Tree

Load = Literal["all", "no-uvm", "none", "no-module"]
"""How far the driver is loaded when the host boots; ``no-module``: this kernel has none, so nothing can load it."""

LIBEXEC = "/usr/local/libexec/specrig-lab"


def _file(name: str) -> str:
    return (resources.files("specrig.ops.lab") / "files" / name).read_text()


def box() -> dict[str, object]:
    """The recorded box that is simulated: GPUs with bus id, minor, UUID and NUMA node, and the driver's version."""
    value: dict[str, object] = json.loads(_file("box.json"))
    return value


def _user_space(tree: Tree) -> None:
    """The driver's user-space half, the same in host and guest: nvidia-smi and the versioned library names."""
    tree.write(f"{LIBEXEC}/box.json", _file("box.json"))
    tree.write(f"{LIBEXEC}/topo.txt", _file("topo.txt"))
    tree.write("/usr/bin/nvidia-smi", _file("smi.py"), 0o755)
    version = box()["driver_version"]
    for library in ("libcuda", "libnvidia-ml"):
        tree.write(f"/usr/lib/{os.uname().machine}-linux-gnu/{library}.so.{version}", "")


def into_guest(tree: Tree) -> None:
    """What a guest with the driver's user space has."""
    _user_space(tree)


def into_host(tree: Tree, load: Load = "all") -> None:
    """What the host has: the user space, the "module", its tools, and the units that load it before guests start."""
    _user_space(tree)
    tree.write(f"{LIBEXEC}/driver.py", _file("driver.py"), 0o755)
    tree.link("/usr/bin/nvidia-modprobe", f"{LIBEXEC}/driver.py")
    tree.link("/usr/local/sbin/modprobe", f"{LIBEXEC}/driver.py")
    tree.write("/etc/specrig-lab/driver.json", json.dumps({"load": load}) + "\n")
    for unit in ("specrig-lab-driver.service", "specrig-lab-net.service"):
        text = _file(unit).replace("@GATEWAY@", network.GUEST_GATEWAY).replace("@SUBNET@", network.GUEST_SUBNET)
        tree.write(f"/etc/systemd/system/{unit}", text)
        tree.enable(unit)
