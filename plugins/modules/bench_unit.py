#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Run one launch's cells in a transient unit of the guest, and wait for it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bench_unit
short_description: Run the cells of one launch in a transient systemd unit, and wait for it
description:
  - Starts a program under C(systemd-run) and waits for its end. The unit belongs to the guest's service manager, so it
    outlives the connection and the controller; when the module is called again while the unit still runs, it waits for
    that one instead of starting another.
  - With O(state=absent) it stops the units of a run with SIGINT, so that the program can keep what it has, and waits.
options:
  run:
    description: The run's id; part of the unit's name.
    type: str
    required: true
  launch:
    description: Number of the launch. Needed with O(state=finished).
    type: int
  argv:
    description: The program and its arguments. Needed with O(state=finished).
    type: list
    elements: str
  folder:
    description: The run folder; cells.jsonl in it tells what was finished.
    type: path
    required: true
  user:
    description: Who the program runs as.
    type: str
    default: specrig
  cpus:
    description: CPU list that the program may use; empty means any.
    type: str
    default: ""
  cells:
    description: Ids of the cells that this call is about; empty means all of the launch. Others were told of before.
    type: list
    elements: str
    default: []
  timeout_s:
    description: The longest to wait for the program's end, in seconds.
    type: int
    default: 86400
  state:
    description: Run to the end, or make sure that nothing of the run is running.
    type: str
    choices: [finished, absent]
    default: finished
author: specrig developers
attributes:
  check_mode:
    support: full
    description: Says what would be started or stopped.
"""

EXAMPLES = r"""
- name: Run the cells of launch 3
  specrig.host.bench_unit:
    run: "{{ decode_bench_run }}"
    launch: 3
    folder: /var/lib/specrig/runs/nightly-1
    argv: [/opt/specrig/venv/bin/specrig, load, sweep.yml, --url, "http://127.0.0.1:31001", --out, nightly-1]
"""

RETURN = r"""
exit_status:
  description: The program's exit code, or null where it is not known.
  type: int
  returned: always
cells:
  description: >-
    Rows of cells.jsonl that this launch wrote; with state absent, those of launches whose end no controller has seen.
  type: list
  elements: dict
  returned: always
log:
  description: The last lines that the program wrote.
  type: list
  elements: str
  returned: always
stopped:
  description: Units that were stopped.
  type: list
  elements: str
  returned: with state absent
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import benchmark, serving


def properties(module, unit, names):
    """Properties of a unit as systemctl shows them."""
    argv = ["systemctl", "show", unit] + ["-p" + name for name in names]
    _rc, out, _err = module.run_command(argv)
    return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)


def running(module, unit):
    return properties(module, unit, ["ActiveState"]).get("ActiveState") in (
        "active",
        "activating",
        "deactivating",
        "reloading",
    )


def units_of(module, stem):
    _rc, out, _err = module.run_command(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", stem + "-*.service"]
    )
    return [line.split()[0] for line in out.splitlines() if line.split()]


def wait_for_end(module, unit, seconds, status_file=None):
    """Wait until the unit has ended; False where it has not in time.

    The file that a unit leaves at its end is looked for often, which costs the measurement beside it nothing; the
    service manager is asked once in two seconds.
    """
    deadline = time.monotonic() + seconds
    while running(module, unit):
        if time.monotonic() > deadline:
            return False
        ask_again = time.monotonic() + (2.0 if status_file else 0.2)
        while time.monotonic() < ask_again and not (status_file and os.path.exists(status_file)):
            time.sleep(0.05)
        if status_file and os.path.exists(status_file):
            time.sleep(0.05)
    return True


def finished_cells(folder, launch):
    """The last row of each cell that this launch wrote; a cut-off line is passed over."""
    rows = {}
    try:
        with open(os.path.join(folder, "cells.jsonl"), "rb") as file:
            for line in file:
                try:
                    row = json.loads(line.decode("utf-8"))
                except ValueError:
                    continue
                if row.get("launch") == launch:
                    rows[row.get("cell")] = row
    except OSError:
        return []
    return list(rows.values())


def told(rows):
    """The rows as the journal and the summary take them."""
    names = ("cell", "launch", "profile", "workload", "state", "reason", "requests", "ok", "wall_s")
    outcomes = {"done": "ok"}
    return [
        dict({name: row.get(name) for name in names}, outcome=outcomes.get(row.get("state"), row.get("state")))
        for row in rows
    ]


def untold_launches(folder):
    """Launches in the manifest whose end no controller has noted: it was killed, or interrupted."""
    try:
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            entries = json.loads(file.read().decode("utf-8")).get("launches") or []
    except (OSError, ValueError, AttributeError):
        return []
    return [entry["launch"] for entry in entries if "launch" in entry and not entry.get("noted")]


def log_lines(module, unit, count=25):
    _rc, out, _err = module.run_command(["journalctl", "-u", unit, "-n", str(count), "-o", "cat", "--no-pager"])
    return out.splitlines()


def start(module, unit, status_file):
    parameters = module.params
    argv = [
        "systemd-run",
        "--unit=" + unit,
        "--collect",
        "--quiet",
        "--description=specrig: launch {0} of {1}".format(parameters["launch"], parameters["run"]),
        "--uid=" + parameters["user"],
        "--property=KillMode=mixed",
        "--property=KillSignal=SIGINT",
        "--property=TimeoutStopSec=60",
        "--property=NoNewPrivileges=yes",
        "--property=ProtectSystem=strict",
        "--property=ProtectHome=yes",
        "--property=ReadWritePaths=" + parameters["folder"],
        "--property=LimitNOFILE=1048576",
        "--property=EnvironmentFile=-" + serving.CLIENT_ENV,
        # $EXIT_STATUS is set by the service manager for ExecStopPost; the unit itself is collected when it ends.
        "--property=ExecStopPost=+/bin/sh -c 'echo $EXIT_STATUS >{0}'".format(status_file),
    ]
    if parameters["cpus"]:
        argv.append("--property=CPUAffinity=" + parameters["cpus"].replace(",", " "))
    rc, _out, err = module.run_command(argv + ["--"] + parameters["argv"])
    if rc:
        module.fail_json(
            msg="the unit {0} could not be started: {1}; see journalctl -u {0} in the guest".format(unit, err.strip())
        )


def read_status(path):
    try:
        with open(path) as file:
            return int(file.read().strip())
    except (OSError, ValueError):
        return None


def run_to_end(module):
    parameters = module.params
    for name in ("launch", "argv"):
        if parameters[name] in (None, []):
            module.fail_json(msg="{0} is needed with state=finished".format(name))
    unit = benchmark.unit_name(parameters["run"], parameters["launch"])
    if module.check_mode:
        module.exit_json(changed=True, exit_status=None, cells=[], log=[], unit=unit)
    os.makedirs("/run/specrig", exist_ok=True)
    status_file = "/run/specrig/{0}.exit".format(unit)
    attached = running(module, unit)
    if not attached:
        if os.path.exists(status_file):
            os.unlink(status_file)
        start(module, unit, status_file)
    ended = wait_for_end(module, unit, parameters["timeout_s"], status_file)
    status = read_status(status_file)
    cells = [
        row
        for row in finished_cells(parameters["folder"], parameters["launch"])
        if not parameters["cells"] or row.get("cell") in parameters["cells"]
    ]
    result = {"changed": True, "exit_status": status, "cells": cells, "unit": unit, "attached": attached}
    result["log"] = log_lines(module, unit)
    result["specrig"] = {
        "cells": told(cells),
        "steps": ["{0} the cells of launch {1}".format("waited for" if attached else "ran", parameters["launch"])],
    }
    if not ended:
        module.fail_json(
            msg="{0} still ran after {1} s; it goes on in the guest: wait for it with the same command, or stop it "
            "with specrig runs abort {2}".format(unit, parameters["timeout_s"], parameters["run"]),
            **result,
        )
    if status not in (0, 1) or (status == 1 and not cells):
        # 1: a cell is invalid or failed, which its own row tells; where there is no row, the log has to
        last = [line for line in result["log"] if line.startswith("specrig ")] or result["log"][-1:]
        module.fail_json(
            msg="the load client ended with {0}: {1}".format(
                "an unknown status" if status is None else "exit code {0}".format(status), (last or ["no log"])[-1]
            ),
            **result,
        )
    module.exit_json(**result)


def stop_all(module):
    found = units_of(module, benchmark.unit_stem(module.params["run"]))
    active = [unit for unit in found if running(module, unit)]
    if active and not module.check_mode:
        module.run_command(["systemctl", "stop", *active])
        still = [unit for unit in active if not wait_for_end(module, unit, 90)]
        if still:
            module.fail_json(msg="{0} did not stop in 90 s; look at it in the guest".format(", ".join(still)))
    cells = []
    for launch in untold_launches(module.params["folder"]):
        cells += finished_cells(module.params["folder"], launch)
    module.exit_json(
        changed=bool(active),
        stopped=active,
        cells=cells,
        log=[],
        exit_status=None,
        specrig={"changed": ["stopped {0}".format(unit) for unit in active], "cells": told(cells)},
    )


def main():
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "str", "required": True},
            "launch": {"type": "int"},
            "argv": {"type": "list", "elements": "str"},
            "folder": {"type": "path", "required": True},
            "user": {"type": "str", "default": "specrig"},
            "cpus": {"type": "str", "default": ""},
            "cells": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 86400},
            "state": {"type": "str", "choices": ["finished", "absent"], "default": "finished"},
        },
        supports_check_mode=True,
    )
    if module.params["state"] == "absent":
        stop_all(module)
    run_to_end(module)


if __name__ == "__main__":
    main()
