# SPDX-License-Identifier: Apache-2.0
"""Which GPUs, NUMA nodes and CPUs a profile gets, and whether it really sits there."""

from __future__ import annotations


def plan(look, profiles, reserved=(), take_over=False, guest_gpus=None):
    """Return {"profiles": {...}, "refused": {...}, "client_cpus": list text, "notes": [...]}."""
    raise NotImplementedError


def verify(planned_profile, look, profile_name):
    """Return the placement gate's row for one profile."""
    raise NotImplementedError
