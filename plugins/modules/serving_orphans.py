#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Stop the engine processes that nobody answers for any more, if they are ours."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_orphans
short_description: Stop orphaned engine processes of a guest that are proven to be ours
description:
  - An engine's rank that outlived its unit keeps its GPU memory and its port. Those that run as the service user and
    that our unit or our environment file started are stopped; all others are named and left alone.
  - What is stopped is looked at again right before; a pid that means another process by then is not touched.
options:
  rows:
    description: C(orphans) of M(specrig.host.serving_look).
    type: list
    elements: dict
    required: true
  user:
    description: The service user.
    type: str
    default: specrig
  ports:
    description: Ports of the profiles; a stranger on one of them is named.
    type: list
    elements: int
    default: []
  host_look:
    description: The host's facts, by which a process's GPUs and memory are named.
    type: dict
    default: {}
  guest:
    description: The guest's name in those facts.
    type: str
  grace_s:
    description: Seconds to end by itself, before it is killed.
    type: float
    default: 10
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says what would be stopped.
    support: full
  diff_mode:
    description: There is no file to show.
    support: none
"""

EXAMPLES = r"""
- name: Stop orphaned servers
  specrig.host.serving_orphans:
    rows: "{{ serving.look.orphans }}"
"""

RETURN = r"""
stopped:
  description: Process ids that were stopped (in check mode, that would be).
  returned: success
  type: list
  elements: int
strangers:
  description: Process ids that hold a GPU or a port and are not ours.
  returned: success
  type: list
  elements: int
specrig:
  description: Lines for the end-of-run summary.
  returned: success
  type: dict
"""

import os
import pwd
import signal
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import engineprocs, orphans

POLL_S = 0.05
KILLED_S = 15.0


def still_ours(row, user):
    """Whether the pid is still the same process, and still an orphan of ours."""
    now = orphans.find(engineprocs.gather(), engineprocs.units(), user)
    return any(one["pid"] == row["pid"] and one["started"] == row["started"] and one["ours"] for one in now)


def alive(row):
    """Whether the very process is there and no zombie."""
    try:
        with open("/proc/{0}/stat".format(row["pid"]), "rb") as handle:
            fields = handle.read().decode("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and int(fields[19]) == row["started"]


def send(row, number):
    """Sends a signal to the very process, by a descriptor where Python knows them."""
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            descriptor = os.pidfd_open(row["pid"])
            try:
                if alive(row):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
        elif alive(row):
            os.kill(row["pid"], number)
    except OSError:
        # It has ended meanwhile, which is what is wanted; one that has not is seen to live on.
        return


def wait(rows, seconds):
    """The rows that live on after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        left = [row for row in rows if alive(row)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(POLL_S)


def user_of(name):
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"uid": entry.pw_uid}


def names_of(rows):
    names = {}
    for row in rows:
        try:
            names[row["uid"]] = pwd.getpwuid(row["uid"]).pw_name
        except (KeyError, TypeError):
            continue
    return names


def main():
    module = AnsibleModule(
        argument_spec={
            "rows": {"type": "list", "elements": "dict", "required": True},
            "user": {"type": "str", "default": "specrig"},
            "ports": {"type": "list", "elements": "int", "default": []},
            "host_look": {"type": "dict", "default": {}},
            "guest": {"type": "str"},
            "grace_s": {"type": "float", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params
    user = user_of(params["user"])
    rows = orphans.on_gpus(params["rows"], params["host_look"], params["guest"])
    names = names_of(rows)
    ours = [row for row in rows if row["ours"]]
    others = [row for row in rows if row["ours"] is False and orphans.matters(row, params["ports"])]
    found = ["{0}: orphaned {1}: {2}".format(row["profile"], orphans.text(row, names), row["why"]) for row in ours]
    found += ["{0}, left alone, not ours: {1}".format(orphans.text(row, names), row["why"]) for row in others]
    if any(row["ours"] is None for row in rows):
        found.append(orphans.UNASKED_GATE)
    verb = "would stop" if module.check_mode else "stopped"
    if not module.check_mode:
        ours = [row for row in ours if still_ours(row, user)]
        for row in ours:
            send(row, signal.SIGTERM)
        for row in wait(ours, params["grace_s"]):
            send(row, signal.SIGKILL)
        left = wait(ours, KILLED_S)
        if left:
            shown = ", ".join(orphans.text(row, names) for row in left)
            module.fail_json(
                msg="{0} can't be killed: the driver holds it in the kernel; nvidia-smi -q shows a GPU that needs a "
                "reset, else the host has to be rebooted".format(shown),
                specrig={"found": found},
            )
    changed = ["{0} orphan {1} of {2}".format(verb, row["pid"], row["profile"]) for row in ours]
    module.exit_json(
        changed=bool(ours),
        stopped=[row["pid"] for row in ours],
        strangers=[row["pid"] for row in others],
        specrig={"found": found, "changed": changed},
    )


if __name__ == "__main__":
    main()
