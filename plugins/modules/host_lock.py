#!/usr/bin/python
"""Keeps two operators of one GPU host apart."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_lock
short_description: Take or give back the lock of a GPU host
author: specrig developers
description:
  - One run at a time works on a host. The lock is a file under /run, so a reboot clears it.
  - A second run gets one line that says who holds the lock, since when, and what to do.
  - A lock is taken over, and that is reported, where its controller process is known to be gone (same controller,
    same boot, no such process) or where it is older than the time its holder set.
  - Runs as an action that adds who runs it; one task costs one module call.
  - Taking and giving back is bookkeeping and never counts as a change.
options:
  state:
    description: V(held) takes the lock (again, if this run has it), V(free) gives back the one of this run.
    type: str
    choices: [held, free]
    default: held
  path:
    description: The lock file on the host.
    type: path
    default: /run/specrig/lock
  ttl_s:
    description: After how many seconds another run may take the lock over even if nothing is known of its controller.
    type: int
    default: 43200
  purpose:
    description: What the run is for, shown to whoever finds the lock held.
    type: str
    default: ""
  owner:
    description: Who asks; filled in by the action.
    type: dict
  gone_run:
    description: The run whose controller process the action found to be gone; filled in by the action.
    type: str
attributes:
  check_mode:
    support: full
    description: A check neither takes the lock nor is stopped by it; it says who holds it.
"""

EXAMPLES = r"""
- name: Keep other operators away
  specrig.host.host_lock:
    purpose: recover

- name: Let other operators in again
  specrig.host.host_lock:
    state: free
"""

RETURN = r"""
holder:
  description: The lock's record as it is now, or null.
  returned: always
  type: dict
taken_over:
  description: The record of a lock that was taken over, or null.
  returned: always
  type: dict
"""

import fcntl
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

SCHEMA = 1


def clock_s():
    """Returns seconds since boot, sleep included: no one sets this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read(path):
    """Returns the lock's record, None where there is none, and an empty one where the file makes no sense."""
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and is_whole(record) else {}


def is_whole(record):
    """Tells whether a record can be judged: a run's name, and numbers where there have to be some."""
    numbers = [record.get("clock_s", 0), 0 if record.get("ttl_s") is None else record["ttl_s"]]
    return isinstance(record.get("run"), str) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers
    )


def write(path, record):
    temporary = "%s.%d" % (path, os.getpid())
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(record, handle)
        handle.write("\n")
    os.rename(temporary, path)


def same_owner(record, owner):
    keys = ("controller", "boot", "pid", "started")
    return bool(record) and all(record.get(key) == owner.get(key) for key in keys)


def age_text(seconds):
    if seconds < 120:
        return "%d s" % seconds
    if seconds < 7200:
        return "%d min" % (seconds // 60)
    return "%.1f h" % (seconds / 3600)


def describe(record, now):
    """Returns who holds the lock, in words."""
    purpose = record.get("playbook") or record.get("purpose") or "an unknown run"
    reason = ", reason: %s" % record["reason"] if record.get("reason") else ""
    age = age_text(max(0, now - record.get("clock_s", now)))
    return "%s with %s since %s (%s ago), process %s%s" % (
        record.get("who", "someone"),
        purpose,
        record.get("since", "an unknown time"),
        age,
        record.get("pid", "unknown"),
        reason,
    )


def decide(record, owner, gone_run, now):
    """Returns (may the asker have it, why it is taken over or None)."""
    if record is None or same_owner(record, owner):
        return True, None
    if not record:
        return True, "its file could not be read"
    if gone_run and record.get("run") == gone_run:
        return True, "that process is gone"
    ttl = record.get("ttl_s")
    age = now - record.get("clock_s", now)
    if ttl and age > ttl:
        return True, "it is %s old and was given %s" % (age_text(age), age_text(ttl))
    return False, None


def give_back(module, path, owner, result):
    record = read(path)
    if record is not None and (same_owner(record, owner) or not record):
        os.unlink(path)
        record = None
    module.exit_json(holder=record, **result)


def take(module, path, owner, result):
    record, now = read(path), clock_s()
    granted, why = decide(record, owner, module.params["gone_run"], now)
    if not granted:
        module.fail_json(
            msg="this host is locked by %s: wait for it to end; if it is gone for good, remove %s on the host"
            % (describe(record, now), path),
            holder=record,
            **result,
        )
    if why:
        result["taken_over"] = record
        before = describe(record, now) if record else "an unknown run"
        result["specrig"]["notes"] = ["took over the lock of %s: %s" % (before, why)]
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fresh = dict(
        owner, schema=SCHEMA, since=since, clock_s=now, ttl_s=module.params["ttl_s"], purpose=module.params["purpose"]
    )
    if same_owner(record, owner):
        fresh["since"], fresh["clock_s"] = record.get("since", since), record.get("clock_s", now)
    write(path, fresh)
    module.exit_json(holder=fresh, **result)


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "path": {"type": "path", "default": "/run/specrig/lock"},
            "ttl_s": {"type": "int", "default": 43200},
            "purpose": {"type": "str", "default": ""},
            "owner": {"type": "dict"},
            "gone_run": {"type": "str"},
        },
        supports_check_mode=True,
    )
    path, owner = module.params["path"], module.params["owner"] or {}
    if not owner.get("run"):
        module.fail_json(msg="host_lock got no owner: it has to run as the action specrig.host.host_lock")
    result = {"changed": False, "taken_over": None, "specrig": {}}
    if module.check_mode:
        record = read(path)
        if record and not same_owner(record, owner):
            result["specrig"]["notes"] = ["the host is locked by %s" % describe(record, clock_s())]
        module.exit_json(holder=record, **result)

    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        guard = open(path + ".guard", "w", encoding="utf-8")
    except OSError as problem:
        module.fail_json(msg="the lock %s cannot be written (%s): become root on the host" % (path, problem.strerror))
    with guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        try:
            if module.params["state"] == "free":
                give_back(module, path, owner, result)
            take(module, path, owner, result)
        except OSError as problem:
            module.fail_json(
                msg="the lock %s cannot be written (%s): make room in its file system, or remove what is at that path"
                % (path, problem.strerror)
            )


if __name__ == "__main__":
    main()
