#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Says, before the first byte is copied, whether models fit into memory, as one sum."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_memory
short_description: Check that models fit into memory before anything is copied
author: specrig developers
description:
  - Runs on the host, also for models that a guest stages in its own /dev/shm. Works out what is still to be copied, and
    compares it with the free space of the tmpfs, with the host's memory (MemAvailable and, counted apart, what ZFS's
    ARC can give back), with what its NUMA nodes have where the tmpfs is bound to some, and with the limit of the
    control group that is charged.
  - The sum is one line, in the gate C(memory) when it passes and in the error when it does not. What could not be read
    is C(unknown) in it, never assumed.
options:
  path:
    description: The folder that gets the models, as host or guest name it.
    type: path
    required: true
  models:
    description: Per model what RV(specrig.host.model_stage#module:models) says after a look.
    type: dict
    required: true
  guest:
    description: Name of the guest that stages; left out, the host does.
    type: str
    default: ""
  kind:
    description: Which kind of guest it is.
    type: str
    choices: [lxc, pve]
    default: lxc
  init_pid:
    description: Process id of the guest's init on the host; left out, it is looked for.
    type: int
  reserve:
    description: Memory that has to stay free for everything else, such as C(1G); C(0) for none.
    type: str
    default: 1G
  others:
    description: Name to bytes of what other guests of this host are about to stage.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    details: It changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Check that the models fit
  specrig.host.model_memory:
    path: /srv/specrig/ram
    models: "{{ staged.models }}"
"""

RETURN = r"""
memory:
  description: The parts of the sum, C(status), C(need_bytes), C(rooms), C(short), C(unknown) and C(sum).
  returned: always
  type: dict
"""

import os
import re
import stat

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import cpulist, memory, modelfiles, shm, tmpfs, unitfiles
from ..module_utils.guestmount import cgroup_folder

ARC = "/proc/spl/kstat/zfs/arcstats"
NODE = "/sys/devices/system/node/node%d/meminfo"
PVE_CONFIG = "/etc/pve/lxc/%s.conf"
# The control group that holds a guest: what is below it is the guest's own affair.
_GUEST_TOP = re.compile(r"^.*?/(?:lxc\.payload\.[^/]+|lxc/[^/]+)$")
_GUEST_GROUP = re.compile(r"^.*?/(?:lxc\.payload\.[^/]+|lxc/[^/]+(?:/ns)?)(?=/|$)")


def free_of(path):
    """Free bytes of the file system of a folder, or of the nearest one above it that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    usage = os.statvfs(path)
    # A tmpfs without limit has no blocks.
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


def leftover_of(folders):
    """Bytes of temporary files that a staging left in folders of models."""
    total = 0
    for folder in folders:
        for base, _folders, names in os.walk(folder):
            for name in names:
                if not name.startswith(modelfiles.TEMPORARY_PREFIX):
                    continue
                try:
                    about = os.lstat(os.path.join(base, name))
                except OSError:
                    continue
                total += about.st_blocks * 512 if stat.S_ISREG(about.st_mode) else 0
    return total


def needs_of(row, folder):
    """{"bytes", "missing_bytes"} of a model: what a look says is right there counts as present."""
    if "missing_bytes" in row:
        return {"bytes": int(row["bytes"]), "missing_bytes": int(row["missing_bytes"])}
    present = 0
    for path in list(row.get("keep") or []) + list(row.get("verify") or []):
        try:
            present += os.stat(os.path.join(folder, path)).st_size
        except OSError:
            continue
    return {"bytes": int(row["bytes"]), "missing_bytes": max(0, int(row["bytes"]) - present)}


def group_limit(subject, pid, guest):
    """What the control groups of a process leave, or those of the guest it is the init of."""
    row = {"subject": subject, "known": False, "limit": None, "left": None, "why": None}
    folder = cgroup_folder(pid)
    if folder is None:
        return dict(row, why="no cgroup v2 here"), None
    root = "/sys/fs/cgroup/unified" if folder.startswith("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"
    controllers = unitfiles.read(root + "/cgroup.controllers")
    if controllers is None or "memory" not in controllers.split():
        return dict(row, why="no memory controller on cgroup v2 here"), None
    if guest:
        found = _GUEST_GROUP.match(folder[len(root) :])
        folder = root + found.group() if found else folder
    chain, used = [], None
    place = folder
    while place.startswith(root):
        limit = unitfiles.read(place + "/memory.max")
        if limit is not None:
            # A group without the file has no limit of its own: the controller is not handed down to it.
            texts = [unitfiles.read("%s/memory.%s" % (place, name)) for name in ("current", "stat")]
            chain.append({"name": place[len(root) :] or "/", "max": limit, "current": texts[0], "stat": texts[1]})
            if texts[0] is not None and _GUEST_TOP.match(place[len(root) :]):
                cache = memory.parse_stat(texts[1])
                used = max(0, int(texts[0]) - cache.get("active_file", 0) - cache.get("inactive_file", 0))
        if place == root:
            break
        place = os.path.dirname(place)
    room = memory.room_below(chain)
    return dict(row, known=room["known"], limit=room["limit"], left=room["left"], why=room["why"]), used


def limits_of(module):
    """Rows of every limit that the copied pages are charged to."""
    params = module.params
    if not params["guest"]:
        # Few hosts limit the session that stages; where that cannot be told, it is shown and holds nobody up.
        return [dict(group_limit("limit of this host's session", os.getpid(), False)[0], aside=True)]
    subject = "limit of guest %s" % params["guest"]
    row, used = group_limit(subject, params["init_pid"], True)
    rows = [row]
    if params["kind"] == "pve":
        configured = memory.configured_limit(unitfiles.read(PVE_CONFIG % params["guest"]))
        if configured is not None and not (row["known"] and row["limit"] == configured):
            left = None if used is None else max(0, configured - used)
            rows.append(
                {
                    "subject": "memory of its config",
                    "known": left is not None,
                    "limit": configured,
                    "left": left,
                    "why": "%s, of which used is unknown" % memory.amount(configured),
                }
            )
    return rows


def remedies(params, found):
    """What to do about each thing that is too small."""
    words = []
    for row in found["short"]:
        more = memory.amount(row["bytes"])
        if row["name"] == "tmpfs" and params["guest"]:
            words.append("the guest's /dev/shm lacks %s: set model_store_guest_size" % more)
        elif row["name"] == "tmpfs":
            words.append("the tmpfs lacks %s: raise model_store_size, or remove another model" % more)
        elif row["name"] == "memory":
            words.append("the host lacks %s: stop what uses it, or lower zfs_arc_max where ZFS holds it" % more)
        elif row["name"] == "NUMA nodes":
            words.append("the NUMA nodes lack %s: let model_store_numa name more of them, or interleave" % more)
        elif params["guest"] and params["kind"] == "pve":
            words.append("the guest lacks %s: raise its memory, 'pct set %s --memory MiB'" % (more, params["guest"]))
        elif params["guest"]:
            words.append("the guest lacks %s: raise lxc.cgroup2.memory.max of its config" % more)
        else:
            words.append("the session lacks %s: raise MemoryMax of the slice that it runs in" % more)
    return "; ".join(words)


def refuse_links(module, root, place):
    """Ends the module where a guest's link is on the way: it would be followed to what it names on this machine."""
    step = root
    for part in place.strip("/").split("/"):
        step = os.path.join(step, part)
        if os.path.islink(step):
            module.fail_json(
                msg="in guest %s %s is a link; remove it, or set model_store_guest_path to a folder without links"
                % (module.params["guest"], step[len(root) :])
            )


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "models": {"type": "dict", "required": True},
            "guest": {"type": "str", "default": ""},
            "kind": {"type": "str", "choices": ["lxc", "pve"], "default": "lxc"},
            "init_pid": {"type": "int"},
            "reserve": {"type": "str", "default": "1G"},
            "others": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        reserve = 0 if params["reserve"] in ("", "0") else memory.parse_size(params["reserve"], 0)
    except ValueError as problem:
        module.fail_json(msg="model_store_reserve: %s" % problem)
    if params["reserve"].endswith("%"):
        module.fail_json(msg="model_store_reserve is %s; expected an amount such as 1G, or 0" % params["reserve"])
    if params["guest"] and params["init_pid"] is None:
        found = [row["pid"] for row in shm.processes() if row["init"] and row["guest"] == params["guest"]]
        params["init_pid"] = found[0] if found else None
    if params["guest"] and params["init_pid"] is None:
        module.fail_json(msg="guest %s is not running, so its memory cannot be asked; start it" % params["guest"])
    pid = params["init_pid"] if params["guest"] else os.getpid()
    root = "/proc/%d/root" % pid if params["guest"] else ""
    place = os.path.normpath(params["path"])
    if params["guest"]:
        refuse_links(module, root, place)
    mount, point = tmpfs.mount_of(unitfiles.read("/proc/%d/mountinfo" % pid) or "", place)
    free = None
    if mount and mount["fstype"] == "tmpfs":
        free = free_of(root + place)
    elif not module.check_mode:
        module.fail_json(
            msg="%s%s lies on %s, expected a tmpfs; set model_store_%s to a folder of one, such as %s"
            % (
                "in guest %s " % params["guest"] if params["guest"] else "",
                place,
                mount["fstype"] if mount else "nothing known",
                "guest_path" if params["guest"] else "mount",
                "/dev/shm/models" if params["guest"] else "/srv/specrig/ram",
            )
        )
    nodes = None
    bound = re.match(r"^bind(?:=static)?:([\d,\-]+)$", (mount or {"options": {}})["options"].get("mpol") or "")
    if bound:
        nodes = {node: memory.node_room(unitfiles.read(NODE % node)) for node in cpulist.parse(bound.group(1))}
    arc, arc_problem = None, None
    if os.path.exists(ARC) or os.path.isdir(os.path.dirname(ARC)):
        try:
            arc = memory.parse_arcstats(unitfiles.read(ARC))
        except ValueError as problem:
            arc_problem = str(problem)
    found = memory.judge(
        {name: needs_of(row, root + os.path.join(place, name)) for name, row in params["models"].items()},
        point if free is not None else place,
        free,
        memory.parse_meminfo(unitfiles.read("/proc/meminfo")),
        arc,
        arc_problem,
        limits_of(module),
        nodes,
        reserve,
        {name: int(count) for name, count in params["others"].items()},
        leftover_of(root + os.path.join(place, name) for name in params["models"]),
    )
    said = {
        "gates": [
            {
                "gate": "memory",
                "subject": params["guest"] or place,
                "status": found["status"],
                "seen": {row["name"]: row["bytes"] for row in found["rooms"]},
                "expected": {"bytes": found["need_bytes"]},
                "message": found["sum"],
            }
        ],
        "notes": found["notes"],
    }
    if found["status"] == "fail":
        module.fail_json(
            msg="the models do not fit, and nothing was copied: %s. %s" % (found["sum"], remedies(params, found)),
            memory=found,
            specrig=said,
        )
    module.exit_json(changed=False, memory=found, specrig=said)


if __name__ == "__main__":
    main()
