#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_outcome
short_description: Report what a run came to
description:
  - Runs on the controller, touches nothing. Fails where launches of the run failed.
options:
  path:
    description: The run folder on the controller.
    type: path
    required: true
  outcome:
    description: What the package said when it labelled the run.
    type: dict
    default: {}
  report:
    description: What C(specrig report) printed.
    type: str
    default: ""
author: specrig developers (@specrig)
"""

EXAMPLES = r"""
- name: Say what came out
  specrig.host.bench_outcome:
    path: "{{ collected.path }}"
    outcome: "{{ labelled.answer }}"
"""

RETURN = r"""
label:
  description: complete, partial, aborted or unknown.
  type: str
  returned: always
"""
