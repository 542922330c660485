#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Start the servers whose models have come."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_release
short_description: Start the profiles that waited for their models
description:
  - Starts, all at once and without waiting for them, the units whose models are there by now. Their files were written
    by M(specrig.host.serving_state), which said what they wait for.
options:
  waiting:
    description: What M(specrig.host.serving_state), or an earlier task of this kind, returned as RV(waiting).
    type: dict
    required: true
  staged:
    description: Names of the models that are there.
    type: list
    elements: str
    default: []
  lost:
    description: Model to one line on why it will not be there.
    type: dict
    default: {}
  given_up:
    description: RV(given_up) of an earlier task of this kind, to which it is added.
    type: dict
    default: {}
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says what would be started.
    support: full
  diff_mode:
    description: There is no file to show.
    support: none
"""

EXAMPLES = r"""
- name: Start what has its models
  specrig.host.serving_release:
    waiting: "{{ serving.waiting }}"
    staged: "{{ staging.staged }}"
"""

RETURN = r"""
waiting:
  description: What still waits.
  returned: success
  type: dict
started:
  description: Profiles that were started.
  returned: success
  type: list
  elements: str
given_up:
  description: Profiles that cannot start, since a model of theirs will not come, each with a line that says why.
  returned: success
  type: dict
"""

import subprocess

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import serving, stageprogress


def systemctl(module, *words, needed=True):
    try:
        done = subprocess.run(
            ["systemctl", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg="systemctl {0}: {1}".format(" ".join(words), error))
    if done.returncode and needed:
        output = done.stdout.decode("utf-8", "replace").strip().replace("\n", "; ")
        module.fail_json(msg="systemctl {0} failed: {1}".format(" ".join(words), output))


def main():
    module = AnsibleModule(
        argument_spec={
            "waiting": {"type": "dict", "required": True},
            "staged": {"type": "list", "elements": "str", "default": []},
            "lost": {"type": "dict", "default": {}},
            "given_up": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    waiting = module.params["waiting"]
    models = {name: waiting[name]["models"] for name in waiting}
    start, rest, problems = stageprogress.release(models, module.params["staged"], module.params["lost"])
    if start and not module.check_mode:
        units = [serving.unit_name(name) for name in start]
        # A start limit that was hit earlier would refuse this start; a unit that systemd forgot has none.
        systemctl(module, "reset-failed", *units, needed=False)
        # A restart of what does not run is a start.
        systemctl(module, "--no-block", "restart", *units)
    would = {"started": "would start", "restarted": "would restart"}
    lines = []
    for name in start:
        verb = waiting[name]["verb"]
        lines.append("{0} {1}".format(would[verb] if module.check_mode else verb, name))
    module.exit_json(
        changed=bool(start),
        waiting={name: dict(waiting[name], models=rest[name]) for name in rest},
        started=start,
        given_up=dict(module.params["given_up"], **problems),
        specrig={"changed": lines},
    )


if __name__ == "__main__":
    main()
