#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Puts back the settings of GPUs that a reboot loses."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_settings
short_description: Put back persistence, power limits and clock locks of GPUs
author: specrig developers
description:
  - Sets with nvidia-smi what differs from the picture that M(specrig.host.host_look) gave, and nothing else; then reads
    persistence and power limits back.
  - A clock lock cannot be read back from any driver. What was set is noted in C(/run/specrig/gpu-clocks), which a
    reboot loses as it loses the lock.
  - A power limit that reads back within 1 W is right. What is not asked for any more is left as it is until the next
    boot.
options:
  gpus:
    description: The GPUs as M(specrig.host.host_look) returned them.
    type: list
    elements: dict
    required: true
  persistence:
    description: Whether persistence mode has to be on. False leaves it as it is.
    type: bool
    default: true
  power_limit_w:
    description: Watts for all GPUs, or a mapping of index, bus id, UUID or V(all) to watts.
    type: raw
  lock_clocks_mhz:
    description: MHz, or lowest and highest MHz, for all GPUs or as a mapping.
    type: raw
  timeout:
    description: Seconds that each call of nvidia-smi may take.
    type: float
    default: 30.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Put back what a reboot loses
  specrig.host.gpu_settings:
    gpus: "{{ gpu_host_look.look.gpus }}"
    power_limit_w: 450
    lock_clocks_mhz: {all: [1200, 2400], 3: 1800}
"""

RETURN = r"""
settings:
  description: What was to be put back, each with gpu, setting, seen and wanted.
  returned: always
  type: list
  elements: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import cpulist, gpusettings, probe, smi


def ask(argv, timeout_s):
    """Run one call of nvidia-smi; returns (output, None), or (None, what it said)."""
    result = probe.run_all({"smi": argv}, timeout_s)["smi"]
    if result["rc"] == 0 and not smi.failure(result["out"]):
        return result["out"], None
    words = " ".join((result["out"] + " " + result["err"]).split())
    return None, result["reason"] or words[:300] or "exit %s" % result["rc"]


def note_locks(rows):
    os.makedirs(os.path.dirname(gpusettings.RECORD), mode=0o755, exist_ok=True)
    with open(gpusettings.RECORD, "a", encoding="utf-8") as record:
        record.write("".join("%s %d,%d\n" % (row["id"], row["wanted"][0], row["wanted"][1]) for row in rows))


def still_due(rows, want, timeout_s):
    """Return (the rows that did not take, reason) after reading back what can be read back."""
    argv = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id,persistence_mode,power.limit", "--format=csv"]
    text, reason = ask(argv, timeout_s)
    if text is None:
        return [], "what was set could not be read back: %s" % reason
    gpus, _problems = smi.gpus_of_csv(smi.parse_csv(text))
    asked = {(row["gpu"], row["setting"]) for row in rows}
    left, _notes = gpusettings.due(dict(want, clocks={}), gpus)
    return [row for row in left if (row["gpu"], row["setting"]) in asked], None


def main():
    module = AnsibleModule(
        argument_spec={
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "persistence": {"type": "bool", "default": True},
            "power_limit_w": {"type": "raw"},
            "lock_clocks_mhz": {"type": "raw"},
            "timeout": {"type": "float", "default": 30.0},
        },
        supports_check_mode=True,
    )
    asked = module.params
    try:
        want = gpusettings.wanted(asked["persistence"], asked["power_limit_w"], asked["lock_clocks_mhz"])
        rows, notes = gpusettings.due(want, asked["gpus"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    calls = gpusettings.commands(rows)
    said = {"found": [], "changed": [], "notes": notes}
    done = []
    for call in calls:
        first = call["rows"][0]
        who = "GPU %s" % cpulist.format([row["gpu"] for row in call["rows"]])
        seen = sorted({gpusettings.text(row["setting"], row["seen"]) for row in call["rows"]})
        said["found"].append("%s: %s" % (who, ", ".join(seen)))
        if not module.check_mode:
            _text, reason = ask(call["argv"], asked["timeout"])
            if reason is not None and first["setting"] == "persistence" and not want["power"] and not want["clocks"]:
                # On by default, and not every card or virtual machine has it: no reason to leave the host unrecovered.
                said["notes"].append("%s: persistence could not be turned on: %s" % (who, reason))
                continue
            if reason is not None:
                module.fail_json(
                    msg="%s: %s could not be set: %s; change gpu_host_* in the inventory, or look at dmesg"
                    % (who, gpusettings.text(first["setting"], first["wanted"]), reason),
                    changed=bool(done),
                    specrig=said,
                )
            if first["setting"] == "lock_clocks_mhz":
                note_locks(call["rows"])
        done += call["rows"]
        to = gpusettings.text(first["setting"], first["wanted"])
        said["changed"].append("%s: %s%s" % (who, "would set " if module.check_mode else "", to))
    rows = done
    if rows and not module.check_mode:
        left, reason = still_due(rows, want, asked["timeout"])
        if reason:
            said["notes"].append(reason)
        if left:
            first = left[0]
            module.fail_json(
                msg="GPU %d: %s was set and %s is read back; see nvidia-smi -q -d POWER"
                % (
                    first["gpu"],
                    gpusettings.text(first["setting"], first["wanted"]),
                    gpusettings.text(first["setting"], first["seen"]),
                ),
                changed=True,
                specrig=said,
            )
    diff = {
        "before": "".join("GPU %d: %s\n" % (r["gpu"], gpusettings.text(r["setting"], r["seen"])) for r in rows),
        "after": "".join("GPU %d: %s\n" % (r["gpu"], gpusettings.text(r["setting"], r["wanted"])) for r in rows),
    }
    module.exit_json(changed=bool(rows), settings=rows, specrig=said, diff=diff if rows else {})


if __name__ == "__main__":
    main()
