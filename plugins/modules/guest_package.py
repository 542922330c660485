#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_package
short_description: Bring the specrig package of the controller into a guest
description:
  - Builds the wheel of the controller's own specrig, sends it with its hashed lock, and installs both into a virtual
    environment by M(specrig.host.guest_venv). Where the guest has them already nothing is built or sent.
options:
  path:
    description: The virtual environment in the guest.
    type: path
    required: true
  installed:
    description: The record that the guest has, from M(specrig.host.serving_look).
    type: dict
  python:
    description: The interpreter to make the environment with.
    type: path
    default: /usr/bin/python3
  lock:
    description: Which lock is installed, a guest's or that of a host that is its own controller.
    type: str
    choices: [guest, host]
    default: guest
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
  specrig.host.guest_package:
    path: /opt/specrig/venv
    installed: "{{ serving.look.venvs['/opt/specrig/venv'] }}"
"""

RETURN = r"""
record:
  description: What the guest has afterwards.
  returned: success
  type: dict
  sample: {version: 0.1.0, package: 5c0ffee, lock: c0ffee}
"""
