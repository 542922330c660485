#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_plan
short_description: Decide whether and where a planned sweep can run
description:
  - Runs on the controller, touches nothing. Fails with one line for each thing that forbids the benchmark.
options:
  plan:
    description: The package's plan of the sweep.
    type: dict
    required: true
  look:
    description: The look of M(specrig.host.host_look).
    type: dict
    required: true
  serving:
    description: The look of M(specrig.host.serving_look).
    type: dict
    required: true
  profiles:
    description: The profile table.
    type: dict
    required: true
  take_over:
    description: Whether production may be stopped.
    type: bool
    default: false
  guest:
    description: The guest's name; processes of another guest are foreign whatever their profile's name.
    type: str
  guest_gpus:
    description: Host indices of the GPUs that the guest has; all of them when left out.
    type: list
    elements: int
  confirm_above_s:
    description: Refuse a plan that takes longer than this many seconds; 0 never refuses.
    type: int
    default: 0
author: specrig developers (@specrig)
"""

EXAMPLES = r"""
- name: Decide whether and where it can run
  specrig.host.bench_plan:
    plan: "{{ planned.answer }}"
    look: "{{ host.look }}"
    serving: "{{ serving.look }}"
    profiles: "{{ sglang_server_profiles }}"
"""

RETURN = r"""
decision:
  description: Where each profile goes, what has to stop for it, and what still runs for this run.
  type: dict
  returned: success
  sample: {placements: {}, stop: [chat], leftovers: [], client_cpus: "0-1", attached: null}
"""
