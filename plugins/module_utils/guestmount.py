# SPDX-License-Identifier: Apache-2.0
"""Shows a host's node or folder inside a running guest: the mount is cloned here and moved into the guest's view.

What touches the world here are the kernel's own calls, which no command reaches on Debian 12. A bind mount carries the
host's own inode, so device number, mode and owner are right by construction, and it works in guests where mknod does
not. Such guests (unprivileged ones) are asked about their device rules from out here too, by a process of ours that
joins their cgroup.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import stat
import struct

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = 0o2000000
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY = 1
MNT_DETACH = 2
CLONE_NEWNS = 0x00020000
# The same on every architecture: calls since Linux 5.2 and 5.12 share their numbers.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def _call(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))
    return result


def id_map(pid="self"):
    """The (uid, gid) on this side of root in a process's user namespace; (0, 0) where nothing is mapped."""
    found = []
    for name in ("uid_map", "gid_map"):
        with open("/proc/%s/%s" % (pid, name)) as text:
            rows = [line.split() for line in text]
        found.append(next((int(row[1]) for row in rows if row[0] == "0"), None))
    return tuple(found)


def is_mapped(pid="self"):
    """Whether a process lives in a user namespace of its own: root there is not the machine's root."""
    with open("/proc/%s/uid_map" % pid) as text:
        return text.read().split() != ["0", "0", "4294967295"]


@contextlib.contextmanager
def _as_root_of(ids):
    """What is made on a file system of the guest has to belong to an id that the guest has."""
    uid, gid = ids
    os.setegid(gid or 0)
    os.seteuid(uid or 0)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def _inside(init_pid, source, target, folder, read_only):
    libc = _libc()
    ids = id_map(init_pid)
    namespace = os.open("/proc/%d/ns/mnt" % init_pid, os.O_RDONLY | os.O_CLOEXEC)
    tree = _call(
        libc.syscall(SYS_OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC),
        "open_tree %s" % source,
    )
    if read_only:
        attr = _MountAttr(attr_set=MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attr))
        _call(libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, ctypes.byref(attr), size), "mount_setattr")
    _call(libc.setns(namespace, CLONE_NEWNS), "setns")
    for _again in range(8):
        # What an earlier start bound there, possibly several times.
        if libc.umount2(target.encode(), MNT_DETACH) != 0:
            break
    with _as_root_of(ids):
        _make_target(target, folder)
    _call(
        libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH),
        "move_mount to %s" % target,
    )


def _make_target(target, folder):
    if folder:
        os.makedirs(target, mode=0o755, exist_ok=True)
        return
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        mode = None
    if mode is None or not stat.S_ISREG(mode):
        if mode is not None:
            os.unlink(target)
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def cgroup_folder(pid):
    """The folder of a process's cgroup v2, or None where this machine shows none."""
    try:
        with open("/proc/%d/cgroup" % pid) as text:
            path = next((line.split(":", 2)[2].strip() for line in text if line.startswith("0::")), None)
    except OSError:
        return None
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        folder = root + (path or "/nowhere")
        if os.path.exists(folder + "/cgroup.procs"):
            return folder
    return None


def permitted_in(init_pid, pairs):
    """Those of the (major, minor) pairs that a process in the guest's cgroup may open, or None where nobody can tell.

    The nodes are made here and asked for by access(2), so no driver is opened, and no right to make nodes is needed in
    the guest.
    """
    cgroup = cgroup_folder(init_pid)
    if cgroup is None:
        return None
    place = "/dev/.specrig-%d" % os.getpid()
    reader, writer = os.pipe()
    try:
        os.mkdir(place, 0o700)
        for major, minor in pairs:
            os.mknod("%s/%d-%d" % (place, major, minor), 0o600 | stat.S_IFCHR, os.makedev(major, minor))
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                with open(cgroup + "/cgroup.procs", "w") as procs:
                    procs.write("0")
                paths = [(pair, "%s/%d-%d" % (place, pair[0], pair[1])) for pair in pairs]
                found = [list(pair) for pair, path in paths if os.access(path, os.R_OK | os.W_OK)]
                with os.fdopen(writer, "w") as answer:
                    json.dump(found, answer)
            finally:
                os._exit(0)
        os.close(writer)
        writer = -1
        with os.fdopen(reader) as answer:
            reader = -1
            text = answer.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else None
    except OSError:
        return None
    finally:
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                os.unlink(place + "/" + name)
            os.rmdir(place)


def device_programs():
    """None where the kernel takes a device program (BPF) from us, else its error: then device rules have no effect."""
    number = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
    if number is None:
        return None
    # r0 = 1; exit: allow everything. It is loaded and thrown away, never attached.
    code = ctypes.create_string_buffer(struct.pack("<BBhi", 0xB7, 0, 0, 1) + struct.pack("<BBhi", 0x95, 0, 0, 0))
    word = ctypes.create_string_buffer(b"GPL")
    load, cgroup_device = 5, 15
    attr = struct.pack("<IIQQ", cgroup_device, 2, ctypes.addressof(code), ctypes.addressof(word)).ljust(72, b"\0")
    buffer = ctypes.create_string_buffer(attr, len(attr))
    found = _libc().syscall(number, load, buffer, len(attr))
    if found >= 0:
        os.close(found)
        return None
    return os.strerror(ctypes.get_errno())


def rules_impossible():
    """One line on why device rules can have no effect on this host, or None."""
    if is_mapped():
        return (
            "this host is itself an unprivileged container (its ids are mapped): device rules need the machine's real"
            " root; hand the GPUs over on the machine itself, or make this container a privileged one"
        )
    if os.path.isdir("/sys/fs/cgroup/devices"):
        return (
            "this host has the devices controller of cgroup v1, where lxc.cgroup2 rules have no effect; boot it with"
            " systemd.unified_cgroup_hierarchy=1"
        )
    refused = device_programs()
    if refused:
        return (
            "the kernel takes no device programs from this host (bpf: %s), so no device rule has any effect; run on the"
            " machine itself, with root's full rights and without kernel lockdown" % refused
        )
    return None


def bind_into(init_pid, source, target, folder, read_only=False):
    """Binds the host's `source` over the guest's `target`; returns None, or one line saying what failed."""
    return _in_child(
        lambda: _inside(init_pid, source, target, folder, read_only), "%s could not be shown in the guest" % source
    )


def unbind_from(init_pid, target):
    """Takes away what was bound over the guest's `target`, and the folder if it is empty; None, or one line."""

    def inside():
        libc = _libc()
        namespace = os.open("/proc/%d/ns/mnt" % init_pid, os.O_RDONLY | os.O_CLOEXEC)
        _call(libc.setns(namespace, CLONE_NEWNS), "setns")
        for _again in range(8):
            if libc.umount2(target.encode(), MNT_DETACH) != 0:
                break
        with contextlib.suppress(OSError):
            os.rmdir(target)

    return _in_child(inside, "%s could not be taken from the guest" % target)


def _in_child(work, what):
    """Runs `work` in a process of its own, since it leaves this machine's view; None, or one line on what failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            try:
                work()
            except Exception as problem:
                os.write(writer, ("%s: %s" % (what, problem)).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    return " ".join(text.split()) or None
