#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Gives a guest's own tmpfs another size, without losing what lies there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_shm
short_description: Set the size of the tmpfs that a folder of a guest lies on
author: specrig developers
description:
  - Runs in the guest. Remounts the tmpfs, usually C(/dev/shm), with another size; what lies there stays.
  - M(specrig.host.guest_config) sees to it that the size holds after the guest's next start.
options:
  path:
    description: A folder that lies, or will lie, on the tmpfs.
    type: path
    required: true
  size:
    description: Size as mount takes it, such as C(64G).
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Make room for the models
  specrig.host.guest_shm:
    path: /dev/shm/models
    size: 64G
"""

RETURN = r"""
mount_point:
  description: The tmpfs.
  returned: always
  type: str
size_bytes:
  description: Its size after this task.
  returned: always
  type: int
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import memory, tmpfs, unitfiles


def main():
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}, "size": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    path = os.path.normpath(module.params["path"])
    total = memory.parse_meminfo(unitfiles.read("/proc/meminfo")).get("MemTotal")
    try:
        wish = memory.parse_size(module.params["size"], total)
    except ValueError as problem:
        module.fail_json(msg="model_store_guest_size: %s" % problem)
    mount, point = tmpfs.mount_of(unitfiles.read("/proc/self/mountinfo") or "", path)
    if not mount or mount["fstype"] != "tmpfs":
        module.fail_json(
            msg="%s lies on %s, expected a tmpfs of the guest; set model_store_guest_path to a folder of one, such as "
            "/dev/shm/models" % (path, mount["fstype"] if mount else "nothing known")
        )
    usage = os.statvfs(point)
    now, used = usage.f_blocks * usage.f_frsize, (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    page = os.sysconf("SC_PAGE_SIZE")
    wish = -(-wish // page) * page
    result = {"mount_point": point, "size_bytes": now, "changed": False}
    # A percentage is of the memory that the guest shows, which need not be the kernel's own figure to the page.
    slack = now // 100 if module.params["size"].endswith("%") else 0
    if abs(now - wish) <= slack and now:
        module.exit_json(**result)
    if wish < used:
        module.fail_json(
            msg="%s cannot get %s: %s lie there; raise model_store_guest_size, or remove a model"
            % (point, module.params["size"], memory.amount(used))
        )
    seen = memory.amount(now) if now else "no limit"
    if not module.check_mode:
        code, _out, err = module.run_command(["mount", "-o", "remount,size=%d" % wish, point])
        if code != 0:
            module.fail_json(
                msg="%s has %s and the kernel refuses %s while the guest runs (%s); its config has the size, so restart"
                " the guest" % (point, seen, module.params["size"], err.strip().split("\n")[0])
            )
        usage = os.statvfs(point)
        result["size_bytes"] = usage.f_blocks * usage.f_frsize
    text = "%s %s instead of %s" % (point, memory.amount(wish), seen)
    would = "would get size" if module.check_mode else "size"
    module.exit_json(
        **dict(result, changed=True),
        diff={"before": "%s %s\n" % (point, seen), "after": "%s %s\n" % (point, memory.amount(wish))},
        specrig={"changed": ["%s: %s" % (would, text)]},
    )


if __name__ == "__main__":
    main()
