#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gates
short_description: Report gate rows, and stop the play where one is not passed
description:
  - Shows all rows in the end-of-run summary and in the journal, then fails with one line for each that is not passed.
  - It is an action that runs on the controller; nothing is sent to the host.
options:
  rows:
    description: Gate rows (C(gate), C(subject), C(status), C(seen), C(expected), C(message)).
    type: list
    elements: dict
    required: true
  allow_unknown:
    description: Gates whose V(unknown) does not stop the play. A V(fail) always does.
    type: list
    elements: str
    default: []
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: It only reports.
    support: full
  diff_mode:
    description: It only reports.
    support: none
"""

EXAMPLES = r"""
- name: Stop where a gate is not passed
  specrig.host.gates:
    rows: "{{ guest.rows + placement }}"
"""

RETURN = r"""
not_passed:
  description: One line for each gate that stops the play.
  returned: always
  type: list
  elements: str
"""
