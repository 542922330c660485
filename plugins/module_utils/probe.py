# SPDX-License-Identifier: Apache-2.0
"""Gathers what the host says, unread: the one file here that touches the machine, and only by reading.

``gather`` returns plain texts (files, outputs of commands) and numbers; ``look.assemble`` makes facts of them. The
module host_look and ``specrig capture`` share it, so that a captured folder holds what a look is made of.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import re
import signal
import stat
import subprocess
import tempfile
import time
from typing import Any, Iterable, Sequence

from . import engineprocs, gpusettings, pci, placement, smi

GPU_FIELDS = (
    "index,uuid,pci.bus_id,name,memory.total,memory.used",
    "temperature.gpu,mig.mode.current,driver_version,gpu_recovery_action,persistence_mode,power.limit,"
    "power.default_limit,power.min_limit,power.max_limit,clocks.sm,clocks.max.sm",
)
"""Fields that every driver knows, and fields that some do not: one unknown field fails the whole query."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_LARGEST = 1 << 20
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def read_text(path: str, failed: dict[str, str] | None = None) -> str | None:
    """Return a file's text, at most 1 MiB of it, or None; the reason goes into ``failed`` by path."""
    try:
        with open(path, "rb") as stream:
            return stream.read(_LARGEST).decode("utf-8", "replace")
    except OSError as error:
        if failed is not None:
            failed[path] = "%s: %s" % (path, error.strerror or error)
        return None


def run_all(commands: dict[str, list[str]], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Run commands side by side and return {name: {argv, rc, out, err, reason}}.

    A command that takes longer than ``timeout_s`` is killed and not waited for: rc is None and reason says so. A
    process stuck in the kernel, as nvidia-smi is on a dead GPU, cannot hold the caller up.
    """
    started: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, argv in commands.items():
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(os.environ, LC_ALL="C", LANG="C"),
                start_new_session=True,
            )
        except OSError as error:
            results[name] = {"argv": argv, "rc": None, "out": "", "err": "", "reason": _why(argv[0], error)}
            out.close()
            err.close()
            continue
        started[name] = (process, argv, out, err)
    deadline = time.monotonic() + timeout_s
    for name, (process, argv, out, err) in started.items():
        reason = None
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            reason = "%s did not answer within %g s" % (argv[0], timeout_s)
            try:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(0.2)
            except (OSError, subprocess.TimeoutExpired):
                pass
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(_LARGEST).decode("utf-8", "replace"))
            stream.close()
        rc = None if reason else process.returncode
        results[name] = {"argv": argv, "rc": rc, "out": texts[0], "err": texts[1], "reason": reason}
    return results


def _why(program: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "%s is not installed" % program
    return "%s cannot be run: %s" % (program, error.strerror or error)


def node_facts(path: str, shown: str | None = None) -> dict[str, Any]:
    """Return {path, kind, major, minor, mode, uid, gid} of a path that should be a device node."""
    facts: dict[str, Any] = {"path": shown or path, "kind": "missing", "major": None, "minor": None}
    facts.update(mode=None, uid=None, gid=None)
    try:
        status = os.lstat(path)
    except OSError:
        return facts
    kinds = (
        (stat.S_ISCHR, "char"),
        (stat.S_ISBLK, "block"),
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "link"),
    )
    facts["kind"] = next((word for test, word in kinds if test(status.st_mode)), "other")
    if facts["kind"] in ("char", "block"):
        facts["major"], facts["minor"] = os.major(status.st_rdev), os.minor(status.st_rdev)
    facts["mode"] = "%04o" % stat.S_IMODE(status.st_mode)
    facts["uid"], facts["gid"] = status.st_uid, status.st_gid
    return facts


def nodes_below(root: str = "", minors: Iterable[int] = ()) -> list[dict[str, Any]]:
    """Return the facts of all NVIDIA nodes below a root, and of the ones that have to be there but are missing."""
    due = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    due += ["/dev/nvidia%d" % minor for minor in minors]
    found = glob.glob(root + "/dev/nvidia*") + glob.glob(root + "/dev/nvidia-caps/*")
    paths = {path[len(root) :] for path in found if not os.path.isdir(path)}
    return [node_facts(root + path, path) for path in sorted(paths.union(due))]


def memory_policy(node: int) -> tuple[bool | None, str | None]:
    """Try to bind this process's memory to a node, and undo it. Returns (True, None), (False or None, reason)."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None, "not known how to ask on %s" % platform.machine()
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        return None, "no C library: %s" % error
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    result = call(ctypes.c_long(number), ctypes.c_long(_MPOL_BIND), mask, ctypes.c_ulong(len(mask) * bits + 1))
    number_of_error = ctypes.get_errno()
    call(ctypes.c_long(number), ctypes.c_long(_MPOL_DEFAULT), None, ctypes.c_ulong(0))
    return (True, None) if result == 0 else (False, os.strerror(number_of_error))


def _tmpfs(mounts: str | None) -> dict[str, dict[str, Any]]:
    found = {}
    for line in (mounts or "").split("\n"):
        fields = line.split(" ")
        if len(fields) < 4 or fields[2] != "tmpfs" or fields[1].startswith(("/run/user", "/run/credentials", "/proc")):
            continue
        path = fields[1].replace("\\040", " ")
        try:
            usage = os.statvfs(path)
        except OSError:
            continue
        found[path] = {
            "fstype": "tmpfs",
            "size_bytes": usage.f_blocks * usage.f_frsize,
            "used_bytes": (usage.f_blocks - usage.f_bfree) * usage.f_frsize,
            "options": fields[3],
        }
    return found


def _process(pid: int) -> dict[str, str | None]:
    """Return what /proc says about a process; of its environment only the variable that places it."""
    base = "/proc/%d/" % pid
    environ = read_text(base + "environ") or ""
    title = (read_text(base + "cmdline") or "").split("\0")[0].split(" ")[0]
    visible = [item.split("=", 1)[1] for item in environ.split("\0") if item.startswith("CUDA_VISIBLE_DEVICES=")]
    return {
        "status": read_text(base + "status"),
        "cgroup": read_text(base + "cgroup"),
        "title": title[:80] or None,
        "visible": visible[-1] if visible else None,
    }


def _units() -> dict[str, str]:
    """Return {pid: cgroup text} of every process of one of our servers, whether or not it is on a GPU."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/cgroup"):
        text = read_text(path)
        if text and "/specrig-sglang@" in text:
            found[path.split("/")[2]] = text
    return found


def _guest_configs() -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted(glob.glob("/etc/pve/lxc/*.conf")):
        found[os.path.basename(path)[: -len(".conf")]] = {"kind": "pve", "config": path}
    for path in sorted(glob.glob("/var/lib/lxc/*/config")):
        found.setdefault(os.path.basename(os.path.dirname(path)), {"kind": "lxc", "config": path})
    return found


def library_versions(root: str = "") -> list[str]:
    """Return the versions of the NVIDIA user-space libraries below a root: the one in use, or all that lie there.

    Only names are read. A folder that is an absolute link is left out: below a guest's root it would lead out of it.
    """
    lying: set[str] = set()
    for folder in _LIBRARIES:
        parts = folder.strip("/").split("/")
        above = [root + "/" + "/".join(parts[: n + 1]) for n in range(len(parts))]
        if root and any(os.path.islink(path) and os.readlink(path).startswith("/") for path in above):
            continue
        try:
            names = os.listdir(root + folder)
        except OSError:
            continue
        for name in names:
            match = re.match(r"^lib(?:nvidia-ml|cuda)\.so\.(\d+\.\d+(?:\.\d+)*)$", name)
            if match:
                lying.add(match.group(1))
            elif name in ("libnvidia-ml.so.1", "libcuda.so.1"):
                try:
                    target = os.readlink(root + folder + "/" + name)
                except OSError:
                    continue
                match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)*)$", target)
                if match:
                    return [match.group(1)]
    return sorted(lying)


def module_kernels() -> list[str]:
    """Return the kernels for which a module of the NVIDIA driver is installed here."""
    found = []
    for path in glob.glob("/lib/modules/*/modules.dep"):
        try:
            with open(path, "rb") as stream:
                if re.search(rb"(?m)^\S*/nvidia\.ko", stream.read(16 * _LARGEST)):
                    found.append(path.split("/")[3])
        except OSError:
            continue
    return sorted(found)


def guarded_texts(paths: Sequence[str], timeout_s: float) -> tuple[dict[str, str], str | None]:
    """Return ({path: text}, reason) of files whose reading a stuck driver may hold up: another process reads them."""
    if not paths:
        return {}, None
    result = run_all({"tail": ["tail", "-v", "-n", "+1", *paths]}, timeout_s)["tail"]
    texts: dict[str, str] = {}
    for part in re.split(r"(?m)^==> (?=/)", result["out"])[1:]:
        path, _, text = part.partition(" <==\n")
        texts[path] = text[:-1] if text.endswith("\n\n") else text
    if "did not answer" in (result["reason"] or ""):
        return texts, "the driver's files in /proc did not answer within %g s" % timeout_s
    for path in paths:
        text = read_text(path) if path not in texts else None
        if text is not None:
            texts[path] = text
    return texts, None


def _bridges(device: str) -> list[str]:
    """Return the PCI bridges above a device, the nearest first; empty where sysfs does not show the tree."""
    parts = os.path.realpath(device).split("/")[:-1]
    return [part for part in reversed(parts) if re.match(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", part)]


def pci_facts(buses: Iterable[str], root: str = "") -> dict[str, Any]:
    """Return the IOMMU groups of the GPUs and the access control of the bridges above them, as sysfs has them."""
    groups = root + "/sys/kernel/iommu_groups"
    told: dict[str, Any] = {"iommu": None, "iommu_reason": None, "gpus": {}, "bridges": {}, "bridges_reason": None}
    try:
        told["iommu"] = bool(os.listdir(groups))
    except OSError as error:
        told["iommu_reason"] = "/sys/kernel/iommu_groups: %s" % (error.strerror or error)
    for bus in sorted(buses):
        device = root + "/sys/bus/pci/devices/" + bus
        group = None
        try:
            group = os.path.basename(os.readlink(device + "/iommu_group"))
        except OSError:
            pass
        kind = read_text("%s/%s/type" % (groups, group)) if group else None
        told["gpus"][bus] = {"group": group, "type": kind.strip() if kind else None}
        for bridge in _bridges(device):
            if bridge in told["bridges"]:
                continue
            try:
                with open(root + "/sys/bus/pci/devices/" + bridge + "/config", "rb") as stream:
                    control, reason = pci.acs_control(stream.read(4096))
            except OSError as error:
                control, reason = None, error.strerror or str(error)
            told["bridges"][bridge] = {"control": control, "reason": reason}
    return told


def _gpu_query(results: dict[str, dict[str, Any]], timeout_s: float) -> None:
    """Ask again without each field that this driver does not know, and at last with those that every driver knows."""
    fields = ",".join(GPU_FIELDS).split(",")
    deadline = time.monotonic() + timeout_s
    while True:
        result = results["smi-gpus"]
        text = result["out"] + result["err"]
        if result["rc"] in (0, None) or "not a valid field" not in text:
            return
        named = re.search(r'Field "([^"]+)" is not a valid field', text)
        if named and named.group(1) in fields and time.monotonic() < deadline:
            fields.remove(named.group(1))
        elif fields != GPU_FIELDS[0].split(","):
            fields = GPU_FIELDS[0].split(",")
        else:
            return
        argv = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv"]
        results["smi-gpus"] = run_all({"smi-gpus": argv}, timeout_s)["smi-gpus"]


def gather(timeout_s: float = 5.0, guests: Sequence[str] | None = None) -> dict[str, Any]:
    """Return everything a look is made of, as texts and numbers, with a time limit for every command.

    Args:
        timeout_s: seconds for each command.
        guests: names of the guests to ask about; None means all that are configured.
    """
    began = time.monotonic()
    failed: dict[str, str] = {}
    files: dict[str, str] = {}

    def keep(path: str) -> str | None:
        text = read_text(path, failed)
        if text is not None:
            files[path] = text
        return text

    configs = {name: c for name, c in _guest_configs().items() if guests is None or name in guests}
    commands = {
        "smi-gpus": ["nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv"],
        "smi-apps": ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv"],
        "smi-topo": ["nvidia-smi", "topo", "-m"],
        "smi-p2p": ["nvidia-smi", "topo", "-p2p", "r"],
    }
    for name in configs:
        commands["guest:" + name] = ["lxc-info", "-n", name, "-s", "-p"]
    results = run_all(commands, timeout_s)
    _gpu_query(results, timeout_s)

    for path in ("/proc/devices", "/proc/cmdline", "/proc/sys/kernel/osrelease"):
        keep(path)
    if os.path.exists(gpusettings.RECORD):
        keep(gpusettings.RECORD)
    informations = sorted(glob.glob("/proc/driver/nvidia/gpus/*/information"))
    buses = {os.path.basename(os.path.dirname(path)).lower() for path in informations}
    version = "/proc/driver/nvidia/version"
    if os.path.exists(version):
        texts, reason = guarded_texts([version, *informations], timeout_s)
        files.update(texts)
        failed.update(
            (path, reason or "%s: not readable" % path) for path in (version, *informations) if path not in texts
        )
    else:
        failed[version] = "%s: No such file or directory" % version
    try:
        gpus, _ = smi.gpus_of_csv(smi.parse_csv(results["smi-gpus"]["out"]))
        buses.update(gpu["bus_id"] for gpu in gpus if gpu["bus_id"])
    except ValueError:
        pass
    loaded = re.search(r"(?m)^\s*\d+ nvidia(?:ctl|-frontend)?\s*$", files.get("/proc/devices", ""))
    for bus in sorted(buses):
        keep("/sys/bus/pci/devices/%s/numa_node" % bus)
    node_folders = sorted(glob.glob("/sys/devices/system/node/node[0-9]*"))
    for folder in node_folders:
        keep(folder + "/cpulist")
        keep(folder + "/meminfo")
    keep("/sys/devices/system/cpu/online")
    for path in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list"):
        keep(path)
    policies = {}
    for folder in node_folders:
        works, reason = memory_policy(int(folder.rsplit("node", 1)[1]))
        policies[folder.rsplit("node", 1)[1]] = {"works": works, "reason": reason}

    processes = {}
    try:
        for row in smi.processes_of_csv(smi.parse_csv(results["smi-apps"]["out"])):
            processes[str(row["pid"])] = _process(row["pid"])
    except ValueError:
        pass
    minors = []
    for path in informations:
        match = re.search(r"Device Minor:\s*(\d+)", files.get(path, ""))
        if match:
            minors.append(int(match.group(1)))
    guest_rows = {}
    for name, config in configs.items():
        keep(config["config"])
        keep(placement.RECORD % name)
        pid = re.search(r"^PID:\s*(\d+)", results["guest:" + name]["out"], re.M)
        row = dict(config, cgroup=None, nodes=None, libraries=None)
        if pid:
            row["cgroup"] = read_text("/proc/%s/cgroup" % pid.group(1))
            if os.path.isdir("/proc/%s/root/dev" % pid.group(1)):
                row["nodes"] = nodes_below("/proc/%s/root" % pid.group(1))
                row["libraries"] = library_versions("/proc/%s/root" % pid.group(1))
        guest_rows[name] = row
    mounts = read_text("/proc/mounts")
    libraries = library_versions()
    return {
        "schema": 1,
        "files": files,
        "commands": results,
        "nodes": nodes_below("", minors),
        "memory_policy": policies,
        "processes": processes,
        "units": _units(),
        "engines": engineprocs.gather(),
        "guests": guest_rows,
        "mounts": _tmpfs(mounts),
        "library_version": libraries[0] if len(libraries) == 1 else None,
        "libraries": libraries,
        "pci": pci_facts(buses),
        "module_kernels": None if loaded else module_kernels(),
        "failed": failed,
        "seconds": round(time.monotonic() - began, 3),
    }
