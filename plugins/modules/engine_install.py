#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_install
short_description: Install the engines that M(specrig.host.engine_plan) found missing
description:
  - Makes wheels of source folders, copies the files that the guest lacks (going on where an earlier copy was cut off,
    and proving each by its sha256), and has M(specrig.host.engine_venv) build and switch.
  - An engine that fails leaves what was installed before as it is, and does not keep the others from being installed.
options:
  engine:
    description: C(sglang_server_engine).
    type: dict
    required: true
  engines:
    description: C(sglang_server_engines).
    type: dict
    default: {}
  plan:
    description: RV(specrig.host.engine_plan#module:engines).
    type: dict
    required: true
  shown:
    description: RV(specrig.host.wheelhouse_share#module:shown), wheelhouses that the guest sees.
    type: dict
    default: {}
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says what would be installed.
    support: full
  diff_mode:
    description: The lines say what changes.
    support: none
"""

EXAMPLES = r"""
- name: Install the engines
  specrig.host.engine_install:
    engine: "{{ sglang_server_engine }}"
    engines: "{{ sglang_server_engines }}"
    plan: "{{ planned.engines }}"
"""

RETURN = r"""
installed:
  description: Per engine that was installed its id, folder and packages.
  returned: success
  type: dict
"""
