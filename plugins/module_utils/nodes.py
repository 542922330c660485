# SPDX-License-Identifier: Apache-2.0
"""Which device nodes the driver's majors call for, how what is there differs, and why a driver does not load.  Pure."""

from __future__ import annotations

CONTROL_MINOR = 255


def wanted(majors, minors):
    """The nodes that CUDA opens: [{"path", "major", "minor"}]; nothing for a driver that is not loaded.

    Args:
        majors: {"nvidia": int|None, "nvidia-uvm": int|None}.
        minors: the GPUs' minors, from the driver, never counted.
    """
    nodes = []
    if majors.get("nvidia") is not None:
        nodes.append({"path": "/dev/nvidiactl", "major": majors["nvidia"], "minor": CONTROL_MINOR})
        nodes += [{"path": "/dev/nvidia%d" % m, "major": majors["nvidia"], "minor": m} for m in sorted(minors)]
    if majors.get("nvidia-uvm") is not None:
        nodes.append({"path": "/dev/nvidia-uvm", "major": majors["nvidia-uvm"], "minor": 0})
        nodes.append({"path": "/dev/nvidia-uvm-tools", "major": majors["nvidia-uvm"], "minor": 1})
    return nodes


def fault(want, seen, mode=None):
    """What is wrong with a node in a few words, or None.

    Args:
        want: {"path", "major", "minor"}.
        seen: {"kind": "char"|"file"|"missing"|..., "major", "minor", "mode": "0666"}.
        mode: octal digits that the node's mode has to include, or None.
    """
    kind = seen.get("kind")
    if kind == "missing":
        return "is missing"
    if kind == "file":
        return "is a regular file, not a device"
    if kind != "char":
        return "is a %s, not a character device" % kind
    if (seen.get("major"), seen.get("minor")) != (want["major"], want["minor"]):
        return "is device %s:%s, the driver has %s:%s" % (
            seen.get("major"),
            seen.get("minor"),
            want["major"],
            want["minor"],
        )
    if mode is not None and int(seen.get("mode") or "0", 8) & int(mode, 8) != int(mode, 8):
        return "has mode %s, the service user needs %s" % (seen.get("mode"), mode)
    return None


def line(node, mode=None):
    """One node as a line of a diff."""
    if node.get("kind", "char") != "char":
        return "%s %s" % (node["path"], node["kind"])
    text = "%s c %s:%s" % (node["path"], node.get("major"), node.get("minor"))
    return "%s %s" % (text, mode or node["mode"]) if mode or node.get("mode") else text


def no_module(release, kernels):
    """Say that a kernel has no module of the driver, and what to do; or return None where it may have one.

    Args:
        release: the running kernel, as ``uname -r`` says.
        kernels: the kernels that have a module of it, or None where that is not known.
    """
    if kernels is None or not release or release in kernels:
        return None
    others = "there is one for %s; " % ", ".join(kernels) if kernels else ""
    return (
        "kernel %s has no module of it (DKMS did not build one): %ssee 'dkms status', install this kernel's headers "
        "and run 'dkms autoinstall -k %s'%s"
        % (release, others, release, ", or boot the other kernel" if kernels else "")
    )


def cannot_load(name, said, release, kernels, modules=(), drivers=None):
    """Return one line: why a module of the driver does not load, and what to do.

    Args:
        name: nvidia or nvidia-uvm.
        said: what the program that should load it said.
        release: the running kernel.
        kernels: the kernels that have a module of the driver, or None where that is not known.
        modules: names of the modules that are loaded.
        drivers: {bus id: driver or None} of the PCI devices of NVIDIA, or None where that is not known.
    """
    start = "the module %s does not load on kernel %s (%s): " % (name, release, said)
    words = said.lower()
    held = sorted({str(driver) for driver in (drivers or {}).values() if driver and driver.startswith("vfio")})
    missing = no_module(release, kernels)
    if "key was rejected" in words or "required key not available" in words:
        return start + "Secure Boot refuses its signature; enroll its key (mokutil --import) or turn Secure Boot off"
    if missing:
        return "the module %s does not load: %s" % (name, missing)
    if "nouveau" in modules:
        return start + "nouveau holds the GPUs; blacklist it, update the initramfs and reboot"
    if held:
        return start + "%s holds the GPUs for a virtual machine; give them back to the host" % ", ".join(held)
    if drivers == {} and "no such device" in words:
        return start + "the PCI bus shows no NVIDIA device; see lspci, the power of the cards and the BIOS"
    if "exec format" in words or "unknown symbol" in words or "invalid argument" in words or "not found" in words:
        return start + (
            "it was not built for this kernel; see 'dkms status' and run 'dkms autoinstall -k %s', with open kernel "
            "modules for Blackwell GPUs" % release
        )
    return start + "see dmesg and 'dkms status'; Blackwell GPUs need the open kernel modules"
