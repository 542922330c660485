#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Look once at everything the serving role decides on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_look
short_description: What is installed and what is serving in a guest
description:
  - One look that returns what the role C(specrig.host.sglang_server) needs to decide. Changes nothing.
options:
  user:
    description: The service user.
    type: str
    default: specrig
  venvs:
    description:
      - Virtual environments whose record of what was installed is wanted. One that is damaged has none, and the damage
        is told.
    type: list
    elements: path
    default: []
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: It only reads.
    support: full
  diff_mode:
    description: It only reads.
    support: none
"""

EXAMPLES = r"""
- name: See what serves
  specrig.host.serving_look:
    venvs: [/opt/specrig/venv]
  register: serving
"""

RETURN = r"""
look:
  description: What was seen. Values that could not be read are null; secret values are shown as a hash.
  returned: success
  type: dict
  sample:
    user: {uid: 997, gid: 997, home: /var/lib/specrig}
    ensurepip: true
    venvs: {/opt/specrig/venv: {fingerprint: 5c0ffee}}
    builds:
      /opt/specrig/venv:
        {record: {fingerprint: 5c0ffee}, id: null, damaged: null, real: /opt/specrig/venv, packages: {}, wheels: {}}
    units: {tp4: {active: active, sub: running, main_pid: 812, enabled: enabled, result: success, restarts: 0}}
    processes: {tp4: {pid: 812, cmdline: [/opt/specrig/venv/bin/specrig, sim], environ: {}, cpus_allowed: [0, 1]}}
    benchmarks: []
    orphans: [{pid: 911, title: "sglang::scheduler", profile: tp4, ours: true, why: its unit is inactive}]
"""

import os
import pwd
import subprocess

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import cpulist, engineprocs, orphans, serving, venvs

PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,MainPID,UnitFileState,Result,NRestarts,NeedDaemonReload,DropInPaths,"
    "ControlGroup,ExecMainStatus,ExecMainCode,FragmentPath"
)


def run(argv):
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace")


def read(path):
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError:
        return None


def user_of(name):
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"uid": entry.pw_uid, "gid": entry.pw_gid, "home": entry.pw_dir}


def has_ensurepip():
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return False
    return True


def known_profiles():
    """Profiles of which a file, a drop-in or a unit in systemd's memory exists."""
    names = set()
    for folder in ("/etc/systemd/system", "/run/systemd/system"):
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".d"):
                names.add(serving.profile_of(entry[:-2]))
    listed = run(["systemctl", "list-units", "--all", "--plain", "--no-legend", serving.UNIT_PREFIX + "*"]) or ""
    for line in listed.splitlines():
        if line.split():
            names.add(serving.profile_of(line.split()[0]))
    return sorted(name for name in names if name)


def units_of(names):
    if not names:
        return {}
    text = run(["systemctl", "show", "-p", PROPERTIES] + [serving.unit_name(name) for name in names])
    units = {}
    for block in (text or "").split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        name = serving.profile_of(fields.get("Id", ""))
        if name:
            units[name] = {
                "load": fields.get("LoadState"),
                "active": fields.get("ActiveState"),
                "sub": fields.get("SubState"),
                "main_pid": int(fields.get("MainPID") or 0) or None,
                "enabled": fields.get("UnitFileState") or None,
                "result": fields.get("Result"),
                "restarts": int(fields.get("NRestarts") or 0),
                "exit_code": int(fields.get("ExecMainCode") or 0),
                "exit_status": int(fields.get("ExecMainStatus") or 0),
                "need_reload": fields.get("NeedDaemonReload") == "yes",
                "dropins": fields.get("DropInPaths", "").split(),
                "cgroup": fields.get("ControlGroup") or None,
                "fragment": fields.get("FragmentPath") or None,
            }
    return units


def manager_variables():
    """Names of the variables that systemd gives to every unit, by 'systemctl set-environment' or DefaultEnvironment."""
    text = run(["systemctl", "show-environment"]) or ""
    return [line.partition("=")[0] for line in text.splitlines() if "=" in line]


def process_of(pid, inherited):
    environ = read("/proc/{0}/environ".format(pid))
    cmdline = read("/proc/{0}/cmdline".format(pid))
    status = read("/proc/{0}/status".format(pid))
    allowed = None
    for line in (status or b"").decode("utf-8", "replace").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            allowed = cpulist.parse(line.split(":", 1)[1])
    variables = None
    if environ is not None:
        pairs = [item.partition("=") for item in environ.decode("utf-8", "replace").split("\0") if "=" in item]
        variables = serving.mask_env({name: value for name, _equals, value in pairs})
    words = None
    if cmdline:
        words = serving.mask_argv(cmdline.decode("utf-8", "replace").rstrip("\0").split("\0"))
    return {
        "pid": pid,
        "environ": variables,
        "cmdline": words,
        "cpus_allowed": allowed,
        "memory_policy": engineprocs.policies("/proc/{0}".format(pid)),
        "inherited": inherited,
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "default": "specrig"},
            "venvs": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    units = units_of(known_profiles())
    built = {path: venvs.look(path) for path in module.params["venvs"]}
    running = run(["systemctl", "list-units", "--plain", "--no-legend", "--state=running,activating", "specrig-bench*"])
    inherited = manager_variables()
    look = {
        "user": user_of(module.params["user"]),
        "ensurepip": has_ensurepip(),
        "venvs": {path: about["record"] for path, about in built.items()},
        "builds": built,
        "units": units,
        "processes": {
            name: process_of(unit["main_pid"], inherited) for name, unit in units.items() if unit["main_pid"]
        },
        "benchmarks": [line.split()[0] for line in (running or "").splitlines() if line.split()],
    }
    # Asked again after the processes were read, and told apart from no units: no server must be taken for an orphan.
    processes, now = engineprocs.gather(), engineprocs.units()
    look["orphans"] = orphans.find(processes, None if now is None else {**units, **now}, look["user"])
    damaged = [
        "{0} is damaged: {1}".format(path, about["damaged"]) for path, about in built.items() if about["damaged"]
    ]
    module.exit_json(changed=False, look=look, specrig={"found": damaged})


if __name__ == "__main__":
    main()
