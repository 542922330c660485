#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_plan
short_description: Say which engines have to be installed, and have ready what that needs
description:
  - Compares the engines of the inventory with what M(specrig.host.serving_look) saw. Where everything is right the
    guest is not asked again.
  - For what has to be installed it asks the guest for its Python, and where the inventory says so has the controller's
    own pip fill the wheelhouse.
options:
  engine:
    description: C(sglang_server_engine).
    type: dict
    required: true
  engines:
    description: C(sglang_server_engines).
    type: dict
    default: {}
  look:
    description: What M(specrig.host.serving_look) saw.
    type: dict
    required: true
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says what would be installed; fills nothing.
    support: full
  diff_mode:
    description: It changes nothing in the guest.
    support: none
"""

EXAMPLES = r"""
- name: See which engines have to be installed
  specrig.host.engine_plan:
    engine: "{{ sglang_server_engine }}"
    engines: "{{ sglang_server_engines }}"
    look: "{{ serving.look }}"
  register: planned
"""

RETURN = r"""
engines:
  description: Per engine with an installation whether it is needed, why, and the files that it installs from.
  returned: success
  type: dict
needed:
  description: Whether anything has to be installed.
  returned: success
  type: bool
needs:
  description: Packages of the distribution that the guest lacks for it.
  returned: success
  type: list
  elements: str
folders:
  description: The wheelhouses, each with source and files.
  returned: success
  type: list
  elements: dict
"""
