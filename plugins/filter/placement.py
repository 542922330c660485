# SPDX-License-Identifier: Apache-2.0
"""Filters over the pure planning functions: no decision is made in Jinja."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError

from ..module_utils import dialects, placement


def plan_placement(look, profiles, reserved=(), take_over=False, guest_gpus=None, guest=None):
    """Place all profiles on the host that was looked at; see ``placement.plan``."""
    if not isinstance(look, dict) or not isinstance(profiles, dict):
        raise AnsibleFilterError("plan_placement: expected the look of host_look and a mapping of profiles")
    return placement.plan(look, dict(profiles), tuple(reserved), bool(take_over), guest_gpus or None, guest)


def guest_gpus(look, guest, nodes=None, given=None):
    """Host indices of the GPUs that a guest has, or None where that is not known; see ``placement.guest_gpus``."""
    return placement.guest_gpus(look or {}, guest, nodes or None, given or None)


def placement_record(plan, profiles, look, guest):
    """What the host is to remember of this guest's placement, or nothing where it does; see ``placement.record``."""
    before = placement.recorded(look or {}, guest)
    after = placement.record(plan or {}, dict(profiles), before)
    return {} if after == before else after


def misplaced(plan, look, guest=None):
    """Profiles whose ranks are on other GPUs than planned, each with a line; see ``placement.misplaced``."""
    return placement.misplaced(plan or {}, look or {}, guest)


def guest_nodes(nodes, look, given=None):
    """The nodes that belong in a guest that is given these GPUs; see ``placement.nodes_for_guest``."""
    try:
        return placement.nodes_for_guest(nodes, look or {}, given)
    except ValueError as error:
        raise AnsibleFilterError(str(error)) from error


def engine_command(profile, model_path, host="127.0.0.1", overrides=None):
    """Return the arguments after the engine's own command; see ``dialects.command``."""
    try:
        return dialects.command(dict(profile), model_path, host, dict(overrides or {}))
    except dialects.DialectError as error:
        raise AnsibleFilterError(str(error)) from error


def resolve_method(profile, overrides=None):
    """Return the method's facts (label, env, draft tokens, reserved tokens); see ``dialects.resolve``."""
    try:
        return dialects.resolve(profile.get("method"), profile.get("budget"), dict(overrides or {}))
    except dialects.DialectError as error:
        raise AnsibleFilterError(str(error)) from error


def verify_placement(planned_profile, look, profile_name, guest=None):
    """Return the placement gate's row; see ``placement.verify``."""
    return placement.verify(planned_profile, look, profile_name, guest)


class FilterModule:
    def filters(self):
        return {
            "plan_placement": plan_placement,
            "guest_gpus": guest_gpus,
            "guest_nodes": guest_nodes,
            "misplaced": misplaced,
            "placement_record": placement_record,
            "engine_command": engine_command,
            "resolve_method": resolve_method,
            "verify_placement": verify_placement,
        }
