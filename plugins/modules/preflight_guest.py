#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The gates that are asked inside the guest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight_guest
short_description: Device, model, budget and smoke gates of a guest
description:
  - Opens the device nodes as the service user, initialises CUDA where its library is there, looks for the model's
    marker, reads from the environment of each server's process what none of its endpoints tells, and lets the package
    ask the servers what they are and send the smoke requests. Returns gate rows; it fails for none of them.
options:
  user:
    description: The service user; the gates are asked with its rights.
    type: str
    default: specrig
  devices:
    description: Device nodes that have to open.
    type: list
    elements: path
    default: []
  simulated:
    description: The inventory declares the simulated driver; permission to open is then all there is to test.
    type: bool
    default: false
  models:
    description: Models by name, with C(path) and C(marker).
    type: dict
    default: {}
  cases:
    description: Smoke requests, from the filter P(specrig.host.smoke_cases#filter).
    type: list
    elements: dict
    default: []
  ports:
    description: Ports of the profiles; a stranger on one of them is named.
    type: list
    elements: int
    default: []
  python:
    description: The interpreter that has the package.
    type: path
    default: /opt/specrig/venv/bin/python
  timeout_s:
    description: Limit for all smoke requests together.
    type: int
    default: 900
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: It changes nothing.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Ask the guest
  specrig.host.preflight_guest:
    devices: [/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0]
  register: gates
"""

RETURN = r"""
rows:
  description: Gate rows.
  returned: success
  type: list
  elements: dict
  sample: [{gate: device, subject: guest, status: pass, seen: {}, expected: {}, message: 3 nodes open}]
"""

import ctypes
import errno
import json
import os
import pwd
import stat
import subprocess
import threading

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import engineprocs, orphans, serverinfo, serving


def kind_of(path):
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    if stat.S_ISCHR(mode):
        return "char"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def open_error(path):
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return None


def cuda_init():
    """``None`` without the library, else ``{"code": int, "gpus": int|None}``."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(-1)
    code = library.cuInit(0)
    if code == 0 and library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        count.value = -1
    return {"code": code, "gpus": count.value if count.value >= 0 else None}


def as_user(entry, work):
    """What ``work`` returns when the given user does it, in a process of its own; None where that process died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            if os.geteuid() == 0:
                os.initgroups(entry.pw_name, entry.pw_gid)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
            with os.fdopen(writer, "w") as stream:
                json.dump(work(), stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    try:
        return json.loads(text)
    except ValueError:
        return None


def device_rows(params, entry):
    paths = params["devices"]
    if not paths:
        return []
    seen = as_user(entry, lambda: {path: {"kind": kind_of(path), "error": open_error(path)} for path in paths})
    if seen is None:
        return [row("device", "guest", "unknown", None, None, "the probe as user {0} died".format(entry.pw_name))]
    judged = [(path, *serving.judge_open(path, seen[path], params["simulated"])) for path in paths]
    bad = [text for _path, status, text in judged if status == "fail"]
    status = "fail" if bad else "pass"
    if bad:
        message = "; ".join(bad)
    else:
        permitted = any(item["error"] for item in seen.values())
        message = "{0} nodes open as {1}{2}".format(
            len(paths), entry.pw_name, " (permitted, simulated driver)" if permitted else ""
        )
    rows = [row("device", "guest", status, seen, "each opens as {0}".format(entry.pw_name), message)]
    if not params["simulated"]:
        rows.append(cuda_row(as_user(entry, cuda_init), entry))
    return rows


def cuda_row(seen, entry):
    if seen is None:
        text = (
            "libcuda.so.1 can't be loaded in the guest; install the driver's user-space libraries of the host's version"
        )
        return row("cuda", "guest", "unknown", None, "cuInit returns 0", text)
    if seen["code"] != 0:
        text = "cuInit returns {0} as user {1}; 999 means that /dev/nvidia-uvm can't be used".format(
            seen["code"], entry.pw_name
        )
        return row("cuda", "guest", "fail", seen, "cuInit returns 0", text)
    return row("cuda", "guest", "pass", seen, "cuInit returns 0", "CUDA initialises, {0} GPUs".format(seen["gpus"]))


def row(gate, subject, status, seen, expected, message):
    return {
        "gate": gate,
        "subject": subject,
        "status": status,
        "seen": seen,
        "expected": expected,
        "message": message,
    }


def model_row(name, model):
    path, marker = model["path"], model.get("marker")
    if not os.path.isdir(path):
        text = "{0} is not there; run recover, which stages it".format(path)
        return row("model", name, "fail", "missing", path, text)
    if marker and not os.path.isfile(os.path.join(path, marker)):
        text = "{0} has no {1}: it is staged in part or not checked; run recover".format(path, marker)
        return row("model", name, "fail", sorted(os.listdir(path))[:8], marker, text)
    return row("model", name, "pass", path, path, "{0} is whole".format(path))


def server_env(profile, method_env):
    """What of the environment of a profile's server changes its answers; None where it can't be read."""
    show = ["systemctl", "show", "-p", "MainPID", "--value", serving.unit_name(profile)]
    try:
        done = subprocess.run(show, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=30)
        pid = int(done.stdout.decode("ascii", "replace").strip() or 0)
        if pid <= 0:
            return None
        with open("/proc/{0}/environ".format(pid), "rb") as stream:
            words = stream.read().decode("utf-8", "replace").split("\0")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    # A server that takes its title over its environment leaves nothing to read there.
    if not pairs:
        return None
    wanted = (*serverinfo.ENVIRONMENT, *method_env)
    return {key: pairs[key] for key in wanted if key in pairs}


def with_environments(cases):
    """The cases, each with the environment of its server."""
    seen = {}
    for case in cases:
        expect = case.get("expect") or {}
        if expect.get("environment") and case["profile"] not in seen:
            seen[case["profile"]] = server_env(case["profile"], expect.get("method_env") or {})
    return [dict(case, env=seen.get(case["profile"])) for case in cases]


def orphan_row(params, entry):
    found = orphans.find(engineprocs.gather(), engineprocs.units(), {"uid": entry.pw_uid})
    return orphans.gate(found, params["ports"], {entry.pw_uid: entry.pw_name, 0: "root"})


def demote(entry):
    def change():
        if os.geteuid() == 0:
            os.initgroups(entry.pw_name, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)

    return change


def smoke_rows(params, entry, rows):
    cases = with_environments(params["cases"])
    if not cases:
        return
    subject = ",".join(sorted({case["profile"] for case in cases}))
    try:
        done = subprocess.run(
            [params["python"], "-m", "specrig.engine.smoke", "--cases", "-", "--json"],
            input=json.dumps(cases).encode("utf-8"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
            timeout=params["timeout_s"],
            preexec_fn=demote(entry),
            cwd="/",
        )
        rows += json.loads(done.stdout.decode("utf-8"))["rows"]
    except subprocess.TimeoutExpired:
        text = "the smoke requests did not end within {0} s".format(params["timeout_s"])
        rows.append(row("smoke", subject, "fail", None, None, text))
    except (OSError, ValueError, KeyError) as error:
        text = "the smoke requests could not be sent: {0}".format(error)
        if isinstance(error, ValueError):
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["exit status %d" % done.returncode]
            text = "the smoke requests could not be sent: " + lines[-1][:300]
        rows.append(row("smoke", subject, "fail", None, None, text))


def main():
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "default": "specrig"},
            "devices": {"type": "list", "elements": "path", "default": []},
            "simulated": {"type": "bool", "default": False},
            "models": {"type": "dict", "default": {}},
            "cases": {"type": "list", "elements": "dict", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "python": {"type": "path", "default": "/opt/specrig/venv/bin/python"},
            "timeout_s": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        entry = pwd.getpwnam(params["user"])
    except KeyError:
        text = "user {0} is not there; run provision".format(params["user"])
        missing = [row("device", "guest", "fail", None, params["user"], text)]
        module.exit_json(changed=False, rows=missing)
    smoke = []
    sender = threading.Thread(target=smoke_rows, args=(params, entry, smoke))
    # Forking for the device probe comes first: a fork beside running threads is not safe.
    rows = device_rows(params, entry)
    sender.start()
    rows.append(orphan_row(params, entry))
    rows += [model_row(name, params["models"][name]) for name in sorted(params["models"])]
    sender.join()
    module.exit_json(changed=False, rows=rows + smoke)


if __name__ == "__main__":
    main()
