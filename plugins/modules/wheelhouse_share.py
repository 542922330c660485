#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Show a guest, read-only and for the time of an installation, a folder of wheels that its host sees too."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wheelhouse_share
short_description: Show a folder of wheels to a guest whose host sees it too
description:
  - Runs on the host of a guest. Where the host has the controller's folder, since it is the controller or mounts the
    same file system, the folder is bound read-only into the running guest, and nothing has to be copied.
  - A folder counts as the same if it has every file with the same size and time. The guest proves each file by its hash
    before it installs from it.
options:
  name:
    description: Name (plain LXC) or ID (Proxmox VE) of the guest.
    type: str
    required: true
  state:
    description: V(present) shows the folders, V(absent) takes them away.
    type: str
    choices: [present, absent]
    default: present
  folders:
    description: Folders, each with C(source) and C(files) (C(name), C(size), C(mtime_ns)).
    type: list
    elements: dict
    default: []
  shown:
    description: What V(absent) takes away, source to target.
    type: dict
    default: {}
  root:
    description: Where the guest sees them, a folder each.
    type: path
    default: /run/specrig/wheels
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Shows nothing.
    support: full
  diff_mode:
    description: Nothing lasting is changed.
    support: none
"""

EXAMPLES = r"""
- name: Show the wheels
  specrig.host.wheelhouse_share:
    name: gpu
    folders: "{{ plan.folders }}"
  delegate_to: gpu-host
  register: shown
"""

RETURN = r"""
shown:
  description: Source to target of the folders that the guest sees now.
  returned: success
  type: dict
why:
  description: Source to the reason why it is not shown.
  returned: success
  type: dict
"""

import hashlib
import os
import re
import stat

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.guestmount import bind_into, unbind_from


def difference(source, files):
    """Why a folder of this machine is not the controller's, or None if it is."""
    if not os.path.isdir(source):
        return "the host has no {0}".format(source)
    for row in files:
        path = os.path.join(source, row["name"])
        try:
            about = os.lstat(path)
        except OSError:
            return "the host has no {0}".format(path)
        # A link would lead somewhere else as the guest sees it.
        if not stat.S_ISREG(about.st_mode):
            return "{0} is no plain file".format(path)
        if (about.st_size, about.st_mtime_ns) != (row["size"], row["mtime_ns"]):
            return "{0} on the host is another file".format(path)
    return None


def init_pid(module):
    code, out, _err = module.run_command(["timeout", "-k", "5", "60", "lxc-info", "-n", module.params["name"], "-p"])
    found = re.search(r"^PID:\s*(\d+)", out, re.M)
    return int(found.group(1)) if code == 0 and found else None


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "folders": {"type": "list", "elements": "dict", "default": []},
            "shown": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/run/specrig/wheels"},
        },
        supports_check_mode=True,
    )
    params = module.params
    shown, why = {}, {}
    if module.check_mode:
        module.exit_json(changed=False, shown=shown, why=why)
    pid = None
    for row in params["folders"]:
        source = row["source"]
        why[source] = difference(source, row["files"])
        if why[source] is None:
            pid = pid or init_pid(module)
            target = "{0}/{1}".format(params["root"], hashlib.sha256(source.encode()).hexdigest()[:12])
            # Whatever stands in the way costs a copy, nothing else.
            why[source] = bind_into(pid, source, target, True, True) if pid else "the guest's init was not found"
            if why[source] is None:
                shown[source] = target
    problems = []
    if params["state"] == "absent" and params["shown"]:
        pid = init_pid(module)
        problems = [unbind_from(pid, target) for target in params["shown"].values()] if pid else []
    module.exit_json(
        changed=False,
        shown=shown,
        why={source: line for source, line in why.items() if line},
        specrig={"notes": [line for line in problems if line]},
    )


if __name__ == "__main__":
    main()
