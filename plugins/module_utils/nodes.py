# SPDX-License-Identifier: Apache-2.0
"""Which device nodes the driver's majors call for, and how what is there differs.  Pure."""

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
