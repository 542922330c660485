#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_look
short_description: Look once at a GPU host and return all that the roles decide from
description:
  - Reads driver and library versions of host and guests, majors, device nodes, GPUs with their settings, NUMA nodes,
    the processes on each GPU with their guest and unit, guests, tmpfs mounts, and what lies between the GPUs (IOMMU,
    ACS, peer-to-peer, kernel flags), in one call. Changes nothing.
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
  settings:
    description:
      - What the inventory asks for of the settings that a reboot loses, C(persistence), C(power_limit_w) and
        C(lock_clocks_mhz); the result then says in C(settings_due) what of it is to be put back.
    type: dict
    default: {}
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
    - The facts, schema 1. Keys are schema, simulated, driver, majors, major_names, nodes, gpus, links, p2p, pci, numa,
      processes, units, engines, guests, mounts, kernel, problems, notes, unknown, seconds.
    - What could not be read is null, and C(unknown) has the reason.
  type: dict
  returned: always
settings_due:
  description: Settings that differ from what was asked for, each with gpu, id, setting, seen and wanted.
  type: list
  elements: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gpusettings, look, probe

SETTINGS = ("persistence", "power_limit_w", "lock_clocks_mhz")


def main():
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "float", "default": 5.0},
            "guests": {"type": "list", "elements": "str"},
            "settings": {"type": "dict", "default": {}},
            "simulated": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    if module.params["timeout"] <= 0:
        module.fail_json(msg="timeout is %g; expected seconds above 0" % module.params["timeout"])
    asked = module.params["settings"]
    strange = sorted(set(asked) - set(SETTINGS))
    if strange:
        module.fail_json(msg="settings has %s; expected %s" % (", ".join(strange), ", ".join(SETTINGS)))
    try:
        want = gpusettings.wanted(*[asked.get(key) for key in SETTINGS])
        raw = probe.gather(module.params["timeout"], module.params["guests"])
        facts = look.assemble(raw, module.params["simulated"])
        due, notes = gpusettings.due(want, facts["gpus"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    said = {"found": facts["problems"], "notes": facts["notes"] + notes}
    module.exit_json(changed=False, look=facts, settings_due=due, specrig=said)


if __name__ == "__main__":
    main()
