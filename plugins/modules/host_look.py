#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_look
short_description: Look once at a GPU host and return all that the roles decide from
description:
  - Reads driver, majors, device nodes, GPUs, NUMA nodes, the processes on each GPU with their guest and unit, guests
    and tmpfs mounts, in one call. Changes nothing.
  - A tool that is missing, fails or hangs makes its facts unknown, with the reason; it does not fail the module.
options:
  timeout:
    description: Seconds that each command may take before its facts count as unknown.
    type: float
    default: 5.0
  guests:
    description: Names of the guests to look into. Left out means all that are configured.
    type: list
    elements: str
  simulated:
    description: The inventory says that this host's driver is simulated; repeated in the result, as a label.
    type: bool
    default: false
author: specrig
"""

EXAMPLES = r"""
- name: Look at the host
  specrig.host.host_look:
    simulated: "{{ gpu_host_simulated_driver }}"
  register: host
"""

RETURN = r"""
look:
  description:
    - The facts, schema 1. Keys are schema, simulated, driver, majors, major_names, nodes, gpus, links, numa, processes,
      units, guests, mounts, kernel, problems, unknown.
    - What could not be read is null, and C(unknown) has the reason.
  type: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import look, probe


def main():
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "float", "default": 5.0},
            "guests": {"type": "list", "elements": "str"},
            "simulated": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    if module.params["timeout"] <= 0:
        module.fail_json(msg="timeout is %g; expected seconds above 0" % module.params["timeout"])
    raw = probe.gather(module.params["timeout"], module.params["guests"])
    facts = look.assemble(raw, module.params["simulated"])
    module.exit_json(changed=False, look=facts, specrig={"found": facts["problems"]})


if __name__ == "__main__":
    main()
