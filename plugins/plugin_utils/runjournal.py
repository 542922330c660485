# SPDX-License-Identifier: Apache-2.0
"""Lets an action write into the journal of its run, while it works."""

from __future__ import annotations

import sys

CALLBACK = "ansible_collections.specrig.host.plugins.callback.journal"


def write(event, outcome, **extra):
    """Appends an event to the journal that the callback of this run keeps; nothing where there is none.

    An action runs in a fork of the process that loaded the callback, so it finds it, with all that it knows of the run.
    """
    current = getattr(sys.modules.get(CALLBACK), "CURRENT", None)
    if current is not None:
        current.write(event, outcome, **extra)
