#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action of this name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: collect_run
short_description: Bring a run folder from a guest to the controller
description:
  - The folder is packed on the remote side, streamed, and unpacked into O(dest). Regular files and folders below the
    run folder are taken; anything else in the archive (a link, a device, a path that leads elsewhere) ends the task
    with nothing unpacked. Files are replaced one by one by rename, so an interrupted collection leaves whole files.
options:
  src:
    description: The run folder on the remote side.
    type: path
    required: true
  dest:
    description: The folder on the controller that gets the run's folder.
    type: path
    required: true
author: specrig developers (@specrig)
"""

EXAMPLES = r"""
- name: Bring the run home
  specrig.host.collect_run:
    src: /var/lib/specrig/runs/nightly-1
    dest: runs
"""

RETURN = r"""
path:
  description: The run folder on the controller.
  type: str
  returned: success
files:
  description: How many files came.
  type: int
  returned: success
"""
