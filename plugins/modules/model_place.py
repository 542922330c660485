#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Converges the tmpfs that holds the models, and says what else eats memory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_place
short_description: Converge the tmpfs of the model store, and report shared memory that nobody uses
author: specrig developers
description:
  - Writes the C(.mount) unit of a tmpfs, enables it and mounts it. Before anything is touched, the kernel is asked what
    it makes of the options, by a mount in a namespace of its own; an option that it refuses is one line.
  - A mounted tmpfs is converged by a remount, which loses nothing. What only a new mount can change is changed where
    the tmpfs is empty; where models lie on it they stay, and a note says what to do.
  - With O(place=guest) nothing is mounted here. A tmpfs that an earlier run mounted and that still holds models is
    reported, since it holds memory too.
  - Shared-memory segments that no process maps or holds open, of the host and its running guests, are reported with
    size, owner and age. They are removed only with O(remove_leaked), and then only those of O(user) whose maker is
    proven to be dead.
options:
  place:
    description: Whether the models lie on a tmpfs of the host or in the guests' own /dev/shm.
    type: str
    choices: [host, guest]
    default: host
  path:
    description: The mount point.
    type: path
    required: true
  size:
    description: Size of the tmpfs as mount takes it, C(64G) or C(50%) of the memory.
    type: str
    default: 50%
  huge:
    description:
      - Huge pages, one of C(auto), C(never), C(always), C(within_size), C(advise). V(auto) is V(within_size) where the
        kernel has huge pages for a tmpfs and does not deny them, else V(never).
    type: str
    default: never
  numa:
    description:
      - NUMA policy, C(default), C(local), C(prefer:NODE), C(bind:NODES), C(interleave) or C(interleave:NODES);
        C(=static) or C(=relative) may follow the word.
    type: str
    default: default
  noswap:
    description: Keep the pages out of swap (Linux 6.4 and later).
    type: bool
    default: false
  inodes:
    description: How many files it may hold. Left out, as many as the kernel gives.
    type: int
  options:
    description: Further mount options.
    type: str
    default: mode=0755,nosuid,nodev,noexec
  models:
    description: Names of the models that belong there; other folders are reported as what holds memory.
    type: list
    elements: str
    default: []
  guest_path:
    description: Where guests hold models of their own, which are no leaks.
    type: path
  user:
    description: The user that serves, whose leaked segments may be removed.
    type: str
    default: specrig
  remove_leaked:
    description: Remove leaked segments of O(user) whose maker is dead.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Mount the model store
  specrig.host.model_place:
    path: /srv/specrig/ram
    size: 64G
    numa: interleave
    noswap: true
    models: [Qwen3.6-27B]
"""

RETURN = r"""
mount_unit:
  description: Name of the mount unit, or null with O(place=guest).
  returned: always
  type: str
live:
  description: Options of the tmpfs as the kernel shows them after this task; null where nothing is mounted.
  returned: always
  type: dict
pending:
  description: What differs and was left because models lie there.
  returned: always
  type: list
  elements: dict
leaked:
  description: Per host and guest the shared-memory segments that nobody uses.
  returned: always
  type: list
  elements: dict
"""

import contextlib
import os
import pwd
import re
import shlex
import stat

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import cpulist, memory, shm, tmpfs, unitfiles, units

UNIT_FOLDER = "/etc/systemd/system"
NODES = "/sys/devices/system/node/has_memory"
SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
RELEASE = "/proc/sys/kernel/osrelease"
MOUNTINFO = "/proc/self/mountinfo"
# More than any list of users has; a guest may have put anything there.
PASSWD_LIMIT_BYTES = 1 << 20
TRIAL = 'mount -t tmpfs -o "$1" tmpfs "$2" && cat /proc/self/mountinfo'


def machine():
    """Facts that the options are judged by; None what cannot be read."""
    nodes = unitfiles.read(NODES)
    try:
        nodes = cpulist.parse(nodes) if nodes is not None else None
    except ValueError:
        nodes = None
    return {
        "nodes": nodes,
        "shmem_enabled": unitfiles.read(SHMEM),
        "release": (unitfiles.read(RELEASE) or "").strip(),
        "memory": memory.parse_meminfo(unitfiles.read("/proc/meminfo")).get("MemTotal"),
    }


def trial(module, options):
    """(text for mount -o, of_mountinfo's dict) of what the kernel makes of options; ends the module if it refuses."""
    said = ""
    for text in tmpfs.spellings(options):
        found, said = try_mount(module, text)
        if found:
            return text, found
    refused = []
    for word in options:
        alone = [word] if word.startswith("size=") else ["size=1M", word]
        if not any(try_mount(module, text)[0] for text in tmpfs.spellings(alone)):
            refused.append(word)
    hints = {
        "mpol": "in a container and in a virtual machine the kernel may know other NUMA nodes than it shows; set "
        "model_store_numa to default, or to nodes that it takes",
        "nosw": "in an unprivileged container the kernel takes no noswap; unset model_store_noswap",
        "huge": "set model_store_huge to never",
    }
    hint = next((text for key, text in hints.items() if any(word.startswith(key) for word in refused)), None)
    module.fail_json(
        msg="the kernel refuses a tmpfs with %s (%s); %s"
        % (
            " and ".join(refused) or ",".join(options),
            said or "no word",
            hint or "correct the option",
        )
    )
    return None


def try_mount(module, text):
    """(of_mountinfo's dict or None, what mount said), in a mount namespace of its own: nobody sees it."""
    place = os.path.join(module.tmpdir, "trial")
    os.makedirs(place, mode=0o700, exist_ok=True)
    code, out, err = module.run_command(["unshare", "-m", "--", "sh", "-c", TRIAL, "sh", text, place])
    if code != 0:
        said = re.sub(r"^mount: \S+: ", "", (err.strip() or out.strip()).split("\n")[0])
        return None, said.rstrip(".")
    return tmpfs.of_mountinfo(out, os.path.realpath(place)), ""


def contents(path):
    """[(name, bytes)] of what lies in a folder, ours that begin with a dot left out; [] where it is not there."""
    rows = []
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(path), key=lambda item: item.name):
            if not entry.name.startswith("."):
                rows.append((entry.name, size_of(entry.path)))
    return rows


def size_of(path):
    total = 0
    paths = [os.path.join(base, name) for base, _folders, names in os.walk(path) for name in names]
    for each in paths if os.path.isdir(path) else [path]:
        with contextlib.suppress(OSError):
            total += os.lstat(each).st_blocks * 512
    return total


class Store:
    """The mount, wanted and live."""

    def __init__(self, module, said):
        self.module, self.said, self.diff, self.told = module, said, [], []
        self.path = module.params["path"]
        try:
            self.unit = units.escape_path(self.path) + ".mount"
        except ValueError as problem:
            module.fail_json(msg="mount point %s" % problem)
        self.pending = []

    def live(self):
        return tmpfs.of_mountinfo(unitfiles.read(MOUNTINFO) or "", os.path.realpath(self.path))

    def tell(self, would, did):
        self.told.append(would if self.module.check_mode else did)

    def converge(self):
        module = self.module
        try:
            options, notes = tmpfs.wanted(module.params, machine())
        except tmpfs.TmpfsError as problem:
            module.fail_json(msg=str(problem))
        self.said["notes"] += notes
        text, want = trial(module, options)
        live = self.live()
        if live and live["fstype"] != "tmpfs":
            module.fail_json(
                msg="%s is a mount of %s, expected a tmpfs or nothing; unmount it, or set model_store_mount elsewhere"
                % (self.path, live["fstype"])
            )
        plan = self.plan(want, live) if live else []
        self.write_unit(text)
        now, stale = unitfiles.states(module, [self.unit])
        if stale and not module.check_mode:
            unitfiles.systemctl(module, "daemon-reload")
        active, enabled = now.get(self.unit, (False, False))
        if not enabled:
            self.tell("would enable %s" % self.unit, "enabled %s" % self.unit)
        if not active:
            self.tell("would start %s" % self.unit, "started %s" % self.unit)
            self.said["found"].append("%s is not mounted on the host" % self.path)
        if not enabled or not active:
            self.diff.append(unitfiles.units_diff([] if enabled else [self.unit], [] if active else [self.unit]))
        if not module.check_mode:
            if not enabled:
                unitfiles.systemctl(module, "enable", self.unit)
            if not active:
                unitfiles.systemctl(module, "start", self.unit)
        if live and active:
            self.apply(plan, want)
        return self.live()

    def write_unit(self, text):
        module, path = self.module, os.path.join(UNIT_FOLDER, self.unit)
        content, old = tmpfs.unit_text(self.path, text), unitfiles.read(path)
        if old == content:
            return
        self.diff.append({"before_header": path, "after_header": path, "before": old or "", "after": content})
        self.tell("would write %s" % path, "wrote %s" % path)
        if not module.check_mode:
            unitfiles.write_or_fail(module, path, content, 0o644)
            unitfiles.systemctl(module, "daemon-reload")

    def plan(self, want, live):
        """Differences of the live mount; ends the module where one cannot be."""
        usage = os.statvfs(self.path)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        if not usage.f_blocks:
            used = sum(size for _name, size in contents(self.path))
        rows = tmpfs.differences(want, live, used, usage.f_files - usage.f_ffree)
        mode = stat.S_IMODE(os.stat(self.path).st_mode)
        if mode != want["options"]["mode"]:
            rows.append(
                {
                    "what": "mode",
                    "seen": "%04o" % mode,
                    "wanted": "%04o" % want["options"]["mode"],
                    "how": "chmod",
                    "why": None,
                }
            )
        for row in rows:
            if row["how"] == "refuse":
                self.module.fail_json(
                    msg="%s cannot get %s %s: %s; ask for more, or remove a model from it"
                    % (self.path, row["what"], row["wanted"], row["why"])
                )
        return rows

    def apply(self, rows, want):
        module = self.module
        fresh = [row for row in rows if row["how"] == "new"]
        here = contents(self.path)
        if fresh and not here:
            # Nothing is lost: the unit has the new options already.
            self.show(rows, "mounted anew")
            if not module.check_mode:
                unitfiles.systemctl(module, "stop", self.unit)
                unitfiles.systemctl(module, "start", self.unit)
            return
        if fresh:
            self.pending = fresh
            self.said["notes"].append(
                "%s keeps %s until it is mounted anew (%s), and %s in it would be lost: stop what serves, then "
                "'systemctl restart %s' on the host and recover"
                % (
                    self.path,
                    ", ".join("%s %s instead of %s" % (row["what"], row["seen"], row["wanted"]) for row in fresh),
                    "; ".join(sorted({row["why"] for row in fresh})),
                    " and ".join(name for name, _size in here),
                    self.unit,
                )
            )
        rows = [row for row in rows if row["how"] in ("remount", "chmod")]
        if not rows:
            return
        self.show(rows, "remounted")
        if here and any(row["what"] in ("huge", "mpol") for row in rows):
            self.said["notes"].append(
                "%s lie in the pages they were given; to move them, remove their folders from %s and recover"
                % (", ".join(name for name, _size in here), self.path)
            )
        if module.check_mode:
            return
        if any(row["how"] == "remount" for row in rows):
            code, said, words = 1, "", []
            for text in tmpfs.spellings(tmpfs.remount_options(want, rows)):
                words = ["mount", "-o", text, self.path]
                code, _out, said = module.run_command(words)
                if code == 0:
                    break
            if code != 0:
                module.fail_json(msg="%s cannot be remounted (%s): %s" % (self.path, " ".join(words), said.strip()))
        for row in rows:
            if row["how"] == "chmod":
                os.chmod(self.path, want["options"]["mode"])

    def show(self, rows, verb):
        words = ", ".join("%s %s instead of %s" % (row["what"], row["wanted"], row["seen"]) for row in rows)
        self.tell("would be %s: %s" % (verb, words), "%s: %s" % (verb, words))
        self.diff.append(
            {
                "before_header": self.path,
                "after_header": self.path,
                "before": "".join("%s %s\n" % (row["what"], row["seen"]) for row in rows),
                "after": "".join("%s %s\n" % (row["what"], row["wanted"]) for row in rows),
            }
        )


def owner_of(place, uid):
    """A user's name as the host or the guest knows it; a guest with mapped ids is asked by the number that it has."""
    if not place["guest"]:
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
        return None
    root = "/proc/%d" % place["init_pid"]
    inner = None
    for line in (unitfiles.read(root + "/uid_map") or "").splitlines():
        first, outer, count = (int(word) for word in line.split())
        if outer <= uid < outer + count:
            inner = first + uid - outer
    passwd = root + "/root/etc/passwd"
    # A guest may have put anything there, a pipe that never answers for one, or a file without end.
    regular = False
    with contextlib.suppress(OSError):
        about = os.lstat(passwd)
        regular = stat.S_ISREG(about.st_mode) and about.st_size <= PASSWD_LIMIT_BYTES
    for line in (unitfiles.read(passwd) or "").splitlines() if regular else []:
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(inner):
            return fields[0]
    return None


def leaks(module, said):
    """Reports and, where asked to, removes; returns (changed, rows)."""
    params = module.params
    found = shm.look({"": [params["path"]], None: [params["guest_path"]] if params["guest_path"] else []})
    changed = False
    for place in found["places"]:
        where = "guest %s" % place["guest"] if place["guest"] else "host"
        mine = [row for row in place["segments"] if row["dead"] and owner_of(place, row["uid"]) == params["user"]]
        if params["remove_leaked"] and mine:
            changed = True
            total, problems = 0, []
            for row in mine:
                problem = None if module.check_mode else shm.remove(place, row)
                if problem:
                    problems.append(problem)
                else:
                    total += row["bytes"]
                    place["segments"].remove(row)
            place["bytes"] -= total
            would = "would remove" if module.check_mode else "removed"
            said["changed"].append(
                "%s: %s %s of leaked shared memory of %s" % (where, would, memory.amount(total), params["user"])
            )
            said["notes"] += problems
        if place["segments"]:
            pve = os.path.isdir("/etc/pve/lxc")
            said["notes"].append("%s: %s" % (where, shm.describe(place, owner_of, pve)))
    rows = [
        {
            "guest": place["guest"] or None,
            "bytes": place["bytes"],
            "segments": [
                {
                    "kind": row["kind"],
                    "name": shm.printable(row["name"]),
                    "bytes": row["bytes"],
                    "owner": owner_of(place, row["uid"]),
                    "age_s": int(row["age_s"]),
                    "maker_dead": row["dead"],
                }
                for row in place["segments"]
            ],
        }
        for place in found["places"]
        if place["segments"]
    ]
    return changed, rows


def strangers(path, models, place):
    """One line on what holds memory in the store and is no model of the inventory; None where all is known."""
    # A model's name may have a folder in it.
    known = {name.split("/")[0] for name in models}
    rows = [(name, size) for name, size in contents(path) if place == "guest" or name not in known]
    rows = [(name, size) for name, size in rows if size >= shm.LEAST_BYTES]
    if not rows:
        return None
    return "%s holds %s, %s: 'rm -r %s' on the host gives the memory back" % (
        path,
        ", ".join("%s (%s)" % (name, memory.amount(size)) for name, size in rows),
        "and the models are to lie in the guests" if place == "guest" else "which the inventory does not name",
        " ".join(shlex.quote(os.path.join(path, name)) for name, _size in rows),
    )


def main():
    module = AnsibleModule(
        argument_spec={
            "place": {"type": "str", "choices": ["host", "guest"], "default": "host"},
            "path": {"type": "path", "required": True},
            "size": {"type": "str", "default": "50%"},
            "huge": {"type": "str", "default": "never"},
            "numa": {"type": "str", "default": "default"},
            "noswap": {"type": "bool", "default": False},
            "inodes": {"type": "int"},
            "options": {"type": "str", "default": "mode=0755,nosuid,nodev,noexec"},
            "models": {"type": "list", "elements": "str", "default": []},
            "guest_path": {"type": "path"},
            "user": {"type": "str", "default": "specrig"},
            "remove_leaked": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    said = {"found": [], "changed": [], "notes": []}
    store = Store(module, said)
    live = None
    if params["place"] == "host":
        live = store.converge()
        said["changed"] += ["model store: %s" % text for text in store.told]
    left = strangers(params["path"], params["models"], params["place"])
    if left:
        said["notes"].append(left)
    removed, leaked = leaks(module, said)
    module.exit_json(
        changed=bool(store.told) or removed,
        mount_unit=store.unit if params["place"] == "host" else None,
        live=dict(live["options"], flags=sorted(live["flags"])) if live else None,
        pending=store.pending,
        leaked=leaked,
        specrig=said,
        diff=store.diff,
    )


if __name__ == "__main__":
    main()
