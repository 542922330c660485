#!/usr/bin/python
"""Loads the NVIDIA driver and makes the device nodes it calls for."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_nodes
short_description: Load the GPU driver and make its device nodes
author: specrig developers
description:
  - Loads C(nvidia) and C(nvidia-uvm) where their majors are missing from the character section of /proc/devices, and
    makes or corrects the nodes for the majors and minors that the kernel names. No number is ever assumed.
  - Has to come first after a boot, for the major of nvidia-uvm does not exist before its module is loaded.
  - In check mode what a load would create is unknown until loaded, and is reported as such.
  - A module that is not there for this kernel, or does not load, is one line that says what to do.
options:
  mode:
    description: Mode of the nodes; the user that serves has to be able to open them.
    type: str
    default: "0666"
  timeout:
    description: Seconds that loading a module, or the driver's own files in /proc, may take.
    type: float
    default: 60.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Load the driver and make its nodes
  specrig.host.driver_nodes:
"""

RETURN = r"""
majors:
  description: Character majors as /proc/devices names them now; null is not loaded.
  returned: always
  type: dict
nodes:
  description: The nodes that belong to them.
  returned: always
  type: list
  elements: dict
"""

import glob
import os
import stat

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpusettings, nodes, probe, procfs

INFORMATION = "/proc/driver/nvidia/gpus/*/information"


def read_majors():
    with open("/proc/devices", encoding="utf-8") as handle:
        return procfs.parse_devices(handle.read())


def read_minors(timeout_s):
    """Return (minors of the GPUs, None), or (None, why the driver does not name them)."""
    texts, reason = probe.guarded_texts(sorted(glob.glob(INFORMATION)), timeout_s)
    if reason:
        return None, "%s: it is stuck; see dmesg for Xid and reboot the host" % reason
    minors = []
    for path, text in sorted(texts.items()):
        try:
            about = procfs.parse_information(text)
        except ValueError as error:
            return None, "%s: %s" % (path, error)
        if about["minor"] is not None and not about["excluded"]:
            minors.append(about["minor"])
    return minors, None


def why_not(name, said):
    """Return one line on a module that does not load."""
    drivers = {}
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        if (probe.read_text(path) or "").strip() == "0x10de":
            link = os.path.join(os.path.dirname(path), "driver")
            drivers[path.split("/")[-2]] = os.path.basename(os.readlink(link)) if os.path.islink(link) else None
    loaded = [line.split(" ")[0] for line in (probe.read_text("/proc/modules") or "").split("\n")]
    return nodes.cannot_load(name, said, os.uname().release, probe.module_kernels(), loaded, drivers)


def see(path):
    try:
        about = os.lstat(path)
    except OSError:
        return {"path": path, "kind": "missing"}
    kinds = ((stat.S_ISCHR, "char"), (stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(about.st_mode)), "other")
    node = {"path": path, "kind": kind, "mode": "%04o" % stat.S_IMODE(about.st_mode)}
    if kind == "char":
        node.update(major=os.major(about.st_rdev), minor=os.minor(about.st_rdev))
    return node


class Driver:
    """The programs that load the driver."""

    def __init__(self, module):
        self.timeout_s = module.params["timeout"]
        folders = ["/usr/local/sbin", "/usr/local/bin"]
        self.modprobe = module.get_bin_path("modprobe", opt_dirs=folders)
        self.nvidia_modprobe = module.get_bin_path("nvidia-modprobe", opt_dirs=folders)

    def load(self, name):
        """Loads one module; returns the last line of what failed, or None."""
        tries = []
        if self.nvidia_modprobe:
            tries.append(
                [self.nvidia_modprobe, "-u", "-c", "0"] if name == "nvidia-uvm" else [self.nvidia_modprobe, "-c", "0"]
            )
        if self.modprobe:
            tries.append([self.modprobe, name])
        said = "neither nvidia-modprobe nor modprobe is installed"
        for argv in tries:
            result = probe.run_all({name: argv}, self.timeout_s)[name]
            if result["rc"] == 0 and read_majors()[name] is not None:
                return None
            words = (result["err"] or result["out"]).strip().splitlines()
            said = result["reason"] or (words or ["%s exits %s" % (os.path.basename(argv[0]), result["rc"])])[-1]
        return said

    def make(self, minors):
        """Lets the driver's own program make what is missing; it knows its settings best."""
        if self.nvidia_modprobe:
            calls = {"uvm": [self.nvidia_modprobe, "-u", "-c", "0"]}
            if minors:
                calls["gpus"] = [self.nvidia_modprobe]
                for minor in minors:
                    calls["gpus"] += ["-c", str(minor)]
            probe.run_all(calls, self.timeout_s)


def main():
    module = AnsibleModule(
        argument_spec={"mode": {"type": "str", "default": "0666"}, "timeout": {"type": "float", "default": 60.0}},
        supports_check_mode=True,
    )
    mode = module.params["mode"]
    try:
        mode_bits = int(mode, 8)
    except ValueError:
        module.fail_json(msg='mode %r is no octal mode; set gpu_host_node_mode to one such as "0666"' % mode)
    driver = Driver(module)
    majors = read_majors()
    missing = [name for name in ("nvidia", "nvidia-uvm") if majors[name] is None]
    said = {"found": ["%s is not loaded on the host" % name for name in missing], "changed": [], "notes": []}
    before, after = [], []
    if missing and module.check_mode:
        before += ["%s not loaded" % name for name in missing]
        after += ["%s loaded, its major and nodes unknown until loaded" % name for name in missing]
        said["changed"] += ["would load %s; its major and nodes are unknown until loaded" % name for name in missing]
    elif missing:
        for name in missing:
            problem = driver.load(name)
            if problem:
                module.fail_json(msg=why_not(name, problem), specrig=said, majors=read_majors(), nodes=[])
        majors = read_majors()
        if "nvidia" in missing and os.path.exists(gpusettings.RECORD):
            os.unlink(gpusettings.RECORD)  # a driver that was loaded anew has forgotten its clock locks
        before += ["%s not loaded" % name for name in missing]
        after += ["%s loaded, major %d" % (name, majors[name]) for name in missing]
        said["changed"] += ["loaded %s, major %d" % (name, majors[name]) for name in missing]

    minors, stuck = read_minors(module.params["timeout"])
    if stuck:
        module.fail_json(msg=stuck, specrig=said, majors=majors, nodes=[])
    if majors["nvidia"] is not None and not minors:
        said["notes"].append("the driver is loaded and names no GPU; see dmesg and nvidia-smi")
    want = nodes.wanted(majors, minors)
    wrong = [(row, see(row["path"])) for row in want]
    wrong = [(row, seen) for row, seen in wrong if nodes.fault(row, seen, mode)]
    said["found"] += [
        "%s on the host %s" % (row["path"], nodes.fault(row, seen, mode)) for row, seen in wrong if not missing
    ]
    before += [nodes.line(seen) for _row, seen in wrong]
    if wrong and not module.check_mode:
        driver.make(
            [row["minor"] for row, _seen in wrong if row["major"] == majors["nvidia"] and row["minor"] in minors]
        )
        for row, _seen in wrong:
            seen = see(row["path"])
            if nodes.fault(row, seen):
                if seen["kind"] == "directory":
                    module.fail_json(
                        msg="%s is a directory, expected a device node; remove it" % row["path"], specrig=said
                    )
                if seen["kind"] != "missing":
                    os.unlink(row["path"])
                os.mknod(row["path"], stat.S_IFCHR | mode_bits, os.makedev(row["major"], row["minor"]))
            if nodes.fault(row, see(row["path"]), mode):
                os.chmod(row["path"], mode_bits)
    if wrong:
        after += [nodes.line(row, mode) for row, _seen in wrong]
        names = " ".join(row["path"].replace("/dev/", "", 1) for row, _seen in wrong)
        said["changed"].append("%s host nodes: %s" % ("would make" if module.check_mode else "made", names))
    changed = bool(missing or wrong)
    diff = {"before": "\n".join(before) + "\n", "after": "\n".join(after) + "\n"} if changed else {}
    module.exit_json(changed=changed, majors=majors, nodes=want, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
