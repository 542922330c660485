#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Converge a virtual environment to what its record says should be in it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_venv
short_description: Install into a virtual environment, recorded and repeatable
description:
  - Makes the virtual environment, installs a hashed lock, then a wheel without its dependencies, then further
    requirements, and writes down what was installed as the last step. Where the record matches, nothing is run.
  - An environment that matches its record and is damaged (its interpreter does not run or is another Python, files are
    missing, added, cut or grown) is made anew. A file whose content alone changed is not noticed.
options:
  path:
    description: The virtual environment.
    type: path
    required: true
  record:
    description: What identifies the content, such as hashes. Compared with the record that the last installation left.
    type: dict
    required: true
  lock:
    description: A requirements file in which every line carries hashes.
    type: path
  wheel:
    description: A wheel, installed without its dependencies.
    type: path
  requirements:
    description: Further requirements as pip takes them, such as V(sglang==0.5.23), a path, or a git reference.
    type: list
    elements: str
    default: []
  pip_args:
    description: Further arguments for pip with O(requirements), such as an index or a constraints file.
    type: list
    elements: str
    default: []
  python:
    description: The interpreter to make the environment with.
    type: path
    default: /usr/bin/python3
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says whether it would install.
    support: full
  diff_mode:
    description: Shows the record before and after.
    support: full
"""

EXAMPLES = r"""
- name: Install the package
  specrig.host.guest_venv:
    path: /opt/specrig/venv
    record: {fingerprint: 5c0ffee, lock: c0ffee}
    lock: /var/cache/specrig/requirements-guest.lock
    wheel: /var/cache/specrig/specrig-0.1.0-py3-none-any.whl
"""

RETURN = r"""
before:
  description: The record that was there, or null.
  returned: success
  type: dict
damaged:
  description: How what was there differed from what its installation had left, or null.
  returned: success
  type: str
"""

import json
import os
import subprocess

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import venvs


def works(path):
    python = os.path.join(path, "bin", "python")
    try:
        return (
            subprocess.run([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, check=False).returncode == 0
        )
    except OSError:
        return False


def run(module, argv):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = done.stdout.decode("utf-8", "replace").strip().splitlines()[-8:]
        module.fail_json(msg="{0} failed ({1}): {2}".format(" ".join(argv[:4]), done.returncode, " | ".join(tail)))


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "record": {"type": "dict", "required": True},
            "lock": {"type": "path"},
            "wheel": {"type": "path"},
            "requirements": {"type": "list", "elements": "str", "default": []},
            "pip_args": {"type": "list", "elements": "str", "default": []},
            "python": {"type": "path", "default": "/usr/bin/python3"},
        },
        supports_check_mode=True,
    )
    params = module.params
    path = params["path"]
    before = venvs.read_json(os.path.join(path, venvs.RECORD))
    contents = venvs.read_json(os.path.join(path, venvs.CONTENTS))
    damaged = venvs.damage(path, contents) if before is not None else None
    diff = {
        "before": json.dumps(before, indent=1, sort_keys=True) + "\n",
        "after": json.dumps(params["record"], indent=1, sort_keys=True) + "\n",
        "before_header": path,
        "after_header": path,
    }
    if before == params["record"] and not damaged:
        module.exit_json(changed=False, before=before, damaged=None)
    if module.check_mode:
        module.exit_json(changed=True, before=before, damaged=damaged, diff=diff)

    if before is not None:
        # Half an installation must not look like a whole one.
        os.unlink(os.path.join(path, venvs.RECORD))
    if damaged or not works(path):
        run(module, [params["python"], "-m", "venv", "--clear", path])
    pip = [
        os.path.join(path, "bin", "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
    ]
    if params["lock"]:
        run(module, [*pip, "--no-deps", "--require-hashes", "--requirement", params["lock"]])
    if params["wheel"]:
        run(module, [*pip, "--no-deps", "--no-index", "--force-reinstall", params["wheel"]])
    if params["requirements"]:
        run(module, [*pip, *params["pip_args"], *params["requirements"]])
    venvs.write_contents(path)
    venvs.write_json(path, venvs.RECORD, params["record"])
    module.exit_json(changed=True, before=before, damaged=damaged, diff=diff)


if __name__ == "__main__":
    main()
