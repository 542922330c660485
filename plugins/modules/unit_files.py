#!/usr/bin/python
"""Converges whole files and the systemd units among them in one go."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_files
short_description: Converge unit files, what they run, and their state
author: specrig developers
description:
  - Writes files that belong to specrig as a whole, reloads systemd once if a unit changed, enables and starts units.
  - One task where template, systemd and handler tasks would be many; nothing that is right is restarted.
options:
  files:
    description: Path to content, of files of mode 0644, or 0755 where the content starts with C(#!).
    type: dict
    default: {}
  enabled:
    description: Units that have to be enabled.
    type: list
    elements: str
    default: []
  started:
    description: Units that have to be active.
    type: list
    elements: str
    default: []
  subject:
    description: What to call these files in the summary.
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Make the nodes at every boot
  specrig.host.unit_files:
    subject: nodes at boot
    files:
      /etc/systemd/system/specrig-gpu-nodes.service: "{{ lookup('ansible.builtin.template', 'nodes.service.j2') }}"
    enabled: [specrig-gpu-nodes.service]
"""

RETURN = r"""
written:
  description: Paths of the files that were not as asked for.
  returned: always
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import unitfiles

UNIT_FOLDER = "/etc/systemd/system"


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "enabled": {"type": "list", "elements": "str", "default": []},
            "started": {"type": "list", "elements": "str", "default": []},
            "subject": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    files, enabled, started = params["files"], params["enabled"], params["started"]
    subject, diff, told = params["subject"], [], []
    written = []
    for path in sorted(files):
        content = files[path] if files[path].endswith("\n") else files[path] + "\n"
        mode = 0o755 if content.startswith("#!") else 0o644
        old = unitfiles.read(path)
        right_mode = old is not None and os.stat(path).st_mode & 0o7777 == mode
        if old == content and right_mode:
            continue
        diff.append({"before_header": path, "after_header": path, "before": old or "", "after": content})
        written.append(path)
        if not module.check_mode:
            unitfiles.write_or_fail(module, path, content, mode)
    if written:
        told.append(("would write %s" if module.check_mode else "wrote %s") % ", ".join(written))
    reload = any(path.startswith(UNIT_FOLDER) for path in written)
    if reload and not module.check_mode:
        unitfiles.systemctl(module, "daemon-reload")

    now, stale = unitfiles.states(module, sorted(set(enabled + started)))
    if stale and not module.check_mode:
        # Someone wrote a unit and did not get to the reload: a run that was killed in between, for one.
        unitfiles.systemctl(module, "daemon-reload")
    enable = [name for name in enabled if not now.get(name, (False, False))[1]]
    start = [name for name in started if not now.get(name, (False, False))[0]]
    if enable:
        told.append(("would enable %s" if module.check_mode else "enabled %s") % ", ".join(enable))
    if start:
        told.append(("would start %s" if module.check_mode else "started %s") % ", ".join(start))
    if enable or start:
        diff.append(unitfiles.units_diff(enable, start))
    if not module.check_mode:
        if enable:
            unitfiles.systemctl(module, "enable", *enable)
        for name in start:
            unitfiles.systemctl(module, "start", name)
    said = {"changed": ["%s: %s" % (subject, text) for text in told]}
    module.exit_json(changed=bool(told), written=written, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
