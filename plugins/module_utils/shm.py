# SPDX-License-Identifier: Apache-2.0
"""Shared-memory segments that nobody uses any more, of a host and its running guests.

This looks at /proc and /dev/shm, from the host: a guest's /dev/shm is reached through /proc/PID/root of its init, and
its processes stand in the host's /proc like any other. A file is leaked when no process maps it or holds it open; a
System V segment when none is attached. Whoever runs out of memory wants to know of both: their pages are neither cache
nor anybody's.

Nothing is removed but by ``remove``, whose caller asks for segments of one user whose maker is proven to be dead: the
process number in the name (``torch_PID_...``) is gone, or every process of that user is younger than the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import stat
import time

from . import memory, procfs

# Nothing smaller is worth a line: semaphores of living programs are files here too, mapped only while they are used.
LEAST_BYTES = 1 << 20
# A segment whose maker has not passed its name on yet is no leak.
LEAST_AGE_S = 60
CLONE_NEWIPC = 0x08000000
IPC_RMID = 0
# Not cuda.shm.UID.PID.N: its first number is no process.
_PID_NAME = re.compile(r"^/?(?:torch|sem\.torch)[_.](\d+)[_.]")
_MOST_FILES = 20000


def _text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None


def processes(proc="/proc"):
    """[{"pid", "inner_pid", "uid", "started_unix", "guest", "init"}] of all processes that have not ended meanwhile."""
    now, up = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = float(os.sysconf("SC_CLK_TCK"))
    rows = []
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        status = _text("%s/%s/status" % (proc, name))
        about = _text("%s/%s/stat" % (proc, name))
        if status is None or about is None:
            continue
        pids = re.search(r"^NSpid:\s*([\d\s]+)$", status, re.M)
        inner = [int(word) for word in pids.group(1).split()] if pids else [int(name)]
        uid = re.search(r"^Uid:\s*\d+\s+(\d+)", status, re.M)
        fields = about.rpartition(")")[2].split()
        nested = len(inner) > 1
        guest = procfs.parse_cgroup(_text("%s/%s/cgroup" % (proc, name)) or "")["guest"] if nested else None
        rows.append(
            {
                "pid": int(name),
                "inner_pid": inner[-1],
                "uid": int(uid.group(1)) if uid else None,
                "started_unix": now - up + int(fields[19]) / ticks if len(fields) > 19 else None,
                "guest": guest,
                "init": nested and len(inner) == 2 and inner[-1] == 1 and guest is not None,
            }
        )
    return rows


def files_of(root, skip=()):
    """[{"path", "name", "device", "inode", "bytes", "uid", "mtime", "ctime"}] of regular files below root/dev/shm.

    Args:
        root: ``""`` for this machine, ``/proc/PID/root`` for a guest.
        skip: folders, as the guest names them, that hold something known: staged models.
    """
    base, rows = root + "/dev/shm", []
    if root and any(os.path.islink(root + part) for part in ("/dev", "/dev/shm")):
        # A guest's link would be followed to what it names on this machine.
        return []
    left_out = {os.path.normpath(root + path) for path in skip}
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in left_out]
        for name in names:
            path = os.path.join(folder, name)
            try:
                about = os.lstat(path)
            except OSError:
                continue
            if not stat.S_ISREG(about.st_mode):
                continue
            rows.append(
                {
                    "path": path[len(root) :],
                    "name": os.path.relpath(path, base),
                    "device": about.st_dev,
                    "inode": about.st_ino,
                    # A segment of 10 GB of which one page was written eats one page.
                    "bytes": about.st_blocks * 512,
                    "uid": about.st_uid,
                    "mtime": about.st_mtime,
                    "ctime": about.st_ctime,
                }
            )
            if len(rows) >= _MOST_FILES:
                return rows
    return rows


def in_use(candidates, proc="/proc"):
    """(those of {(device, inode)} that a process maps or holds open, number of processes that could not be asked)."""
    found, unasked = set(), 0
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        base = "%s/%s" % (proc, name)
        try:
            with open(base + "/maps", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    fields = line.split(None, 5)
                    if len(fields) < 5 or fields[4] == "0":
                        continue
                    major, _colon, minor = fields[3].partition(":")
                    key = (os.makedev(int(major, 16), int(minor, 16)), int(fields[4]))
                    if key in candidates:
                        found.add(key)
            for number in os.listdir(base + "/fd"):
                try:
                    about = os.stat("%s/fd/%s" % (base, number))
                except OSError:
                    continue
                key = (about.st_dev, about.st_ino)
                if key in candidates:
                    found.add(key)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError):
            unasked += 1
        if found == candidates:
            break
    return found, unasked


def parse_sysvipc(text):
    """[{"key", "shmid", "bytes", "nattch", "cpid", "uid", "ctime"}] of /proc/sysvipc/shm."""
    lines = [line.split() for line in (text or "").splitlines() if line.strip()]
    if not lines:
        return []
    names = lines[0]
    rows = []
    for fields in lines[1:]:
        row = dict(zip(names, fields))  # noqa: B905 (Python 3.8)
        try:
            rows.append(
                {
                    "key": int(row["key"]),
                    "shmid": int(row["shmid"]),
                    "bytes": int(row.get("rss", row["size"])) + int(row.get("swap", 0)),
                    "nattch": int(row["nattch"]),
                    "cpid": int(row["cpid"]),
                    "uid": int(row["uid"]),
                    "mtime": max(int(row["ctime"]), int(row["atime"]), int(row["dtime"])),
                }
            )
        except (KeyError, ValueError):
            continue
    return rows


def _in_ipc(pid, work):
    """JSON that ``work`` returns in the IPC namespace of a process; None where that cannot be entered."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            namespace = os.open("/proc/%d/ns/ipc" % pid, os.O_RDONLY | os.O_CLOEXEC)
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWIPC) == 0:
                with os.fdopen(writer, "w") as answer:
                    json.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def sysv_of(pid):
    """System V segments of a guest (its init's pid) or, with None, of this machine; None where it cannot be told."""
    if pid is None:
        text = _text("/proc/sysvipc/shm")
        return None if text is None else parse_sysvipc(text)
    return _in_ipc(pid, lambda: parse_sysvipc(_text("/proc/sysvipc/shm")))


def maker_is_dead(row, living):
    """Whether the process that made a segment is proven to be gone.

    Args:
        row: with ``name`` or ``cpid``, ``uid``, ``mtime``, and of a file ``ctime``, which nobody can set back.
        living: processes of the same guest (or of the host's own).

    A number in the name counts only by its absence, for numbers are given out again.
    """
    named = _PID_NAME.match(row.get("name", ""))
    number = int(named.group(1)) if named else row.get("cpid")
    if number is not None and number not in {process["inner_pid"] for process in living}:
        return True
    since = max(row["mtime"], row.get("ctime", 0))
    return all(
        process["started_unix"] is not None and process["started_unix"] > since + 2
        for process in living
        if process["uid"] == row["uid"]
    )


def look(skip=None, proc="/proc"):
    """Leaked segments of this machine and its running guests.

    Args:
        skip: {guest name, "" for the machine, None for all others: [folders]} that hold staged models.
        proc: where /proc is.

    Returns:
        dict: ``places`` [{guest, init_pid, segments [{kind: file|sysv, name, path, shmid, bytes, uid, age_s, dead}],
        bytes, unasked}], each with at least LEAST_BYTES; ``unasked``: how many processes could not be asked, None
        where there was nothing to ask about. With any, no maker of a file counts as dead.
    """
    now, left_out = time.time(), skip or {}
    rows = processes(proc)
    places = {"": None}
    for process in rows:
        if process["init"]:
            places.setdefault(process["guest"], process["pid"])
    found, unasked = [], None
    files = {}
    seen_devices = set()
    for guest, pid in places.items():
        root = "" if pid is None else "%s/%d/root" % (proc, pid)
        listed = [
            row
            for row in files_of(root, left_out.get(guest, left_out.get(None, ())))
            if now - row["mtime"] >= LEAST_AGE_S
        ]
        try:
            device = os.stat(root + "/dev/shm").st_dev
        except OSError:
            continue
        # A guest that shares the machine's /dev/shm is not counted again.
        if device not in seen_devices:
            files[guest] = listed
        seen_devices.add(device)
    worth = {guest: listed for guest, listed in files.items() if sum(row["bytes"] for row in listed) >= LEAST_BYTES}
    used = set()
    if worth:
        used, unasked = in_use({(row["device"], row["inode"]) for listed in worth.values() for row in listed}, proc)
    for guest, pid in places.items():
        living = [row for row in rows if (row["guest"] or "") == guest]
        segments = []
        for row in worth.get(guest, []):
            if (row["device"], row["inode"]) not in used and row["bytes"]:
                segments.append(
                    dict(
                        row,
                        kind="file",
                        shmid=None,
                        age_s=now - row["mtime"],
                        dead=not unasked and maker_is_dead(row, living),
                    )
                )
        for row in sysv_of(pid) or []:
            if row["nattch"] == 0 and row["bytes"] and now - row["mtime"] >= LEAST_AGE_S:
                segments.append(
                    dict(
                        row,
                        kind="sysv",
                        name="System V %d" % row["shmid"],
                        path=None,
                        age_s=now - row["mtime"],
                        dead=maker_is_dead({"cpid": row["cpid"], "uid": row["uid"], "mtime": row["mtime"]}, living),
                    )
                )
        total = sum(row["bytes"] for row in segments)
        if total >= LEAST_BYTES:
            segments.sort(key=lambda row: -row["bytes"])
            found.append(
                {"guest": guest, "init_pid": pid, "segments": segments, "bytes": total, "unasked": unasked or 0}
            )
    return {"places": found, "unasked": unasked}


def remove(place, row, proc="/proc"):
    """Removes one segment; returns None, or why not. A file that is another one by now stays."""
    if row["kind"] == "sysv":

        def drop():
            libc = ctypes.CDLL(None, use_errno=True)
            return ctypes.get_errno() if libc.shmctl(row["shmid"], IPC_RMID, None) else 0

        code = drop() if place["init_pid"] is None else _in_ipc(place["init_pid"], drop)
        return None if code == 0 else "System V segment %d: %s" % (row["shmid"], os.strerror(code or 1))
    root = "/" if place["init_pid"] is None else "%s/%d/root" % (proc, place["init_pid"])
    opened = []
    try:
        opened.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        # A guest may have put links in the way: none is followed.
        for part in ["dev", "shm", *row["name"].split("/")[:-1]]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened.append(os.open(part, flags, dir_fd=opened[-1]))
        name = row["name"].split("/")[-1]
        about = os.stat(name, dir_fd=opened[-1], follow_symlinks=False)
        if (about.st_dev, about.st_ino) != (row["device"], row["inode"]):
            return "%s is another file by now" % printable(row["path"])
        os.unlink(name, dir_fd=opened[-1])
    except OSError as problem:
        return "%s: %s" % (printable(row["path"]), problem.strerror or problem)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def printable(name):
    """A file's name as it can be shown: whoever may write to shared memory chose it, down to a terminal's codes."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def age_text(seconds):
    """``3 h``, ``12 min``, ``2 days``."""
    if seconds >= 2 * 86400:
        return "%d days" % (seconds // 86400)
    if seconds >= 3600:
        return "%d h" % (seconds // 3600)
    return "%d min" % (seconds // 60)


def describe(place, owner_of, pve=False):
    """One line: what lies there, whose, how old, and how it is removed.

    Args:
        place: of ``look``.
        owner_of: a function from a user's number to a name or None.
        pve: whether the guest is one of Proxmox VE.
    """
    shown, listed = place["segments"][:4], []
    for row in shown:
        owner = owner_of(place, row["uid"]) or "uid %d" % row["uid"]
        maker = ", its maker is gone" if row["dead"] else ""
        listed.append(
            "%s (%s, %s, %s old%s)"
            % (printable(row["name"]), memory.amount(row["bytes"]), printable(owner), age_text(row["age_s"]), maker)
        )
    if len(place["segments"]) > len(shown):
        listed.append("%d more" % (len(place["segments"]) - len(shown)))
    inside = "" if not place["guest"] else ("pct exec %s -- " if pve else "lxc-attach -n %s -- ") % place["guest"]
    first = place["segments"][0]
    if first["kind"] == "sysv":
        how = "ipcrm -m %d" % first["shmid"]
    elif shlex.quote(first["path"]) == first["path"]:
        how = "rm %s" % first["path"]
    else:
        # A name that a shell would take for more than a name is not put into a command.
        how = "find /dev/shm -xdev -inum %d -delete" % first["inode"]
    doubt = ", as far as can be told (%d processes could not be asked)" % place["unasked"] if place["unasked"] else ""
    return "%s in shared memory that no process maps or holds open%s: %s; remove with '%s%s' what nobody needs" % (
        memory.amount(place["bytes"]),
        doubt,
        ", ".join(listed),
        inside,
        how,
    )
