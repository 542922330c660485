# SPDX-License-Identifier: Apache-2.0
"""The program that looks from inside a guest; carried there as text, so it needs only the guest's python3.

It asks a rule by access(2) on a temporary node: the device cgroup answers that without any driver being opened, which
matters where a stale major now belongs to, say, a watchdog. Nodes that belong in the guest are really opened.
"""

from __future__ import annotations

SOURCE = r"""
import glob, json, os, pwd, re, stat, sys
ask = json.loads(sys.argv[1])

def see(path):
    try:
        about = os.lstat(path)
    except OSError:
        return {"path": path, "kind": "missing"}
    mode = about.st_mode
    kinds = ((stat.S_ISCHR, "char"), (stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"))
    kind = next((name for test, name in kinds if test(mode)), "other")
    row = {"path": path, "kind": kind, "mode": "%04o" % stat.S_IMODE(mode), "uid": about.st_uid, "gid": about.st_gid}
    row["bound"] = about.st_dev != os.lstat(os.path.dirname(path)).st_dev
    if kind == "char":
        row.update(major=os.major(about.st_rdev), minor=os.minor(about.st_rdev))
    return row

def opened(path):
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        return 0
    except OSError as problem:
        return problem.errno

def as_user(entry, paths):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            os.write(writer, json.dumps({path: opened(path) for path in paths}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {}

def rules(pairs):
    permitted = []
    place = "/dev/.specrig-%d" % os.getpid()
    for major, minor in pairs:
        try:
            os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
        except OSError:
            return None
        try:
            if os.access(place, os.R_OK | os.W_OK):
                permitted.append([major, minor])
        finally:
            os.unlink(place)
    return permitted

def folder(path):
    try:
        about, room = os.stat(path), os.statvfs(path)
    except OSError:
        return {"path": path, "device": None, "read_only": None}
    return {"path": path, "device": about.st_dev, "inode": about.st_ino, "read_only": bool(room.f_flag & 1)}

def library():
    places = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/lib/*-linux-gnu/nvidia/current")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        for place in places:
            for path in sorted(glob.glob(place + "/" + name)):
                found = re.search(r"\.so\.(\d+\.\d+(\.\d+)*)$", os.path.realpath(path))
                if found:
                    return found.group(1)
    return None

nodes = [see(path) for path in ask["nodes"]]
chars = [row for row in nodes if row["kind"] == "char"]
for row in chars:
    row["errno"] = opened(row["path"])
try:
    entry = pwd.getpwnam(ask["user"]) if ask["user"] else None
except KeyError:
    entry = None
if entry and chars:
    mine = as_user(entry, [row["path"] for row in chars])
    for row in chars:
        row["user_errno"] = mine.get(row["path"])
with open("/proc/self/uid_map") as text:
    identity = text.read().split() == ["0", "0", "4294967295"]
print(json.dumps({"nodes": nodes, "permitted": rules(ask["rules"]) if ask["rules"] else None,
                  "folders": [folder(path) for path in ask["folders"]], "privileged": identity, "library": library()}))
"""
