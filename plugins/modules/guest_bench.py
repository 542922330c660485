#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guest_bench
short_description: Ask the package in the guest to plan, note or label a run
description:
  - Runs C(python -m specrig.ops.guest_bench) as the service user, with the request on standard input.
  - Fails with the package's own line.
options:
  ask:
    description: What is asked.
    type: str
    choices: [plan, launch, label]
    required: true
  request:
    description: The request; see the package's functions of these names.
    type: dict
    required: true
  python:
    description: The package's Python in the guest.
    type: path
    default: /opt/specrig/venv/bin/python
  user:
    description: Who it runs as.
    type: str
    default: specrig
author: specrig developers (@specrig)
"""

EXAMPLES = r"""
- name: Plan the sweep
  specrig.host.guest_bench:
    ask: plan
    request:
      sweep: /var/lib/specrig/sweeps/nightly.yml
      profiles: {}
      models: /srv/models
      runs: /var/lib/specrig/runs
  register: planned
"""

RETURN = r"""
answer:
  description: The package's answer.
  type: dict
  returned: success
"""
