# SPDX-License-Identifier: Apache-2.0
"""Shows a host's node or folder inside a running guest: the mount is cloned here and moved into the guest's view.

The one file of this folder that touches the world: the kernel's mount calls, which no command reaches on Debian 12.
A bind mount carries the host's own inode, so device number, mode and owner are right by construction, and it works in
guests where mknod does not.
"""

from __future__ import annotations

import ctypes
import os

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


def _inside(init_pid, source, target, folder, read_only):
    libc = _libc()
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
    if folder:
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        try:
            mode = os.lstat(target).st_mode
        except FileNotFoundError:
            mode = None
        if mode is None or mode & 0o170000 != 0o100000:
            if mode is not None:
                os.unlink(target)
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    _call(
        libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH),
        "move_mount to %s" % target,
    )


def bind_into(init_pid, source, target, folder, read_only=False):
    """Binds the host's `source` over the guest's `target`; returns None, or one line saying what failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            try:
                _inside(init_pid, source, target, folder, read_only)
            except Exception as problem:
                os.write(writer, ("%s could not be shown in the guest: %s" % (source, problem)).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    return " ".join(text.split()) or None
