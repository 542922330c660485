#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Wait until servers answer a real completion, all at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_ready
short_description: Wait until SGLang servers answer a real completion
description:
  - Polls all targets at the same time. Ready means that the unit's own processes own the port, that the server answers
    for the profile's model, and that one completion comes back with exactly the tokens asked for. A health check is
    not enough, a server can pass it and hang at its first request.
  - A unit that ends is not waited for any longer. The message of a failure holds the unit's last log lines.
options:
  targets:
    description: Unit plans, as M(specrig.host.serving_state) returns them.
    type: list
    elements: dict
    required: true
  problems:
    description: Lines on profiles that could not be started; they fail the module when all targets were waited for.
    type: list
    elements: str
    default: []
  tokens:
    description: Tokens of the completion.
    type: int
    default: 8
  api_key:
    description: Sent as a bearer token where the servers ask for one.
    type: str
  log_lines:
    description: Log lines that a failure shows.
    type: int
    default: 12
  patience_s:
    description:
      - Come back after this many seconds with what is known by then; C(pending) names those that are still starting.
        The action plugin of this name asks again and shows their progress in between. 0 waits until all are decided.
    type: float
    default: 0
  waited_s:
    description: Seconds that earlier calls have waited.
    type: float
    default: 0
  rows:
    description: Rows of an earlier call; those that are decided are kept.
    type: list
    elements: dict
    default: []
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: It changes nothing. In check mode, a server that would have been started is not waited for.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the first completion of each
  specrig.host.engine_ready:
    targets: "{{ state.targets }}"
"""

RETURN = r"""
rows:
  description: One row a target.
  returned: always
  type: list
  elements: dict
  sample: [{profile: tp4, ready: true, seconds: 41.2, tokens_per_s: 88.1, problem: null, seen: null, asked: 1, log: []}]
pending:
  description: Profiles that are still starting; only with O(patience_s).
  returned: success
  type: list
  elements: str
specrig:
  description: The serving rows of the end-of-run summary.
  returned: always
  type: dict
"""

import http.client
import json
import os
import pwd
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import procfs, readiness, serving

POLL_S = 0.2
REQUEST_S = 120.0
CALL_S = 10.0
BODY_BYTES = 16 << 20
# A server that is up for long is not held to the time since its start, but to this.
GRACE_S = 60.0
PROPERTIES = (
    "ActiveState,SubState,Result,MainPID,ExecMainStatus,ExecMainCode,NRestarts,ControlGroup,InvocationID,"
    "ActiveEnterTimestampMonotonic,ExecMainStartTimestampMonotonic,Job"
)
EMPTY = {
    "ready": False,
    "seconds": 0.0,
    "tokens_per_s": None,
    "problem": None,
    "seen": None,
    "asked": 0,
    "restarts": None,
}
# No proxy of the environment may stand between a check and a server on this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NotYet(Exception):
    """The server is still starting."""


class Refused(NotYet):
    """It did not take the request."""


class Wrong(Exception):
    """Waiting longer will not help."""


def call(url, api_key, body=None, timeout=None):
    timeout = timeout or CALL_S
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = "Bearer " + api_key
    data = None if body is None else json.dumps(body).encode("utf-8")
    request = urllib.request.Request(url, data=data, headers=headers)
    deadline = time.monotonic() + timeout
    try:
        try:
            answer = OPENER.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.code, read_until(answer, deadline)
    except http.client.HTTPException as error:
        raise NotYet("what listens there speaks no HTTP: {0!r}".format(error)[:200]) from None
    except (OSError, ValueError) as error:
        # Also one that stops in the middle of an answer.
        raise NotYet("no answer: {0}".format(getattr(error, "reason", None) or repr(error))) from None


def read_until(answer, deadline):
    """An answer's body; a socket's own timeout starts anew with every byte, and would wait for ever on a slow one."""
    pieces, size = [], 0
    while True:
        piece = answer.read1(65536)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > BODY_BYTES:
            raise Wrong("its answer is longer than {0} bytes: no engine is on that port".format(BODY_BYTES))
        if time.monotonic() > deadline:
            raise OSError("it was still sending when its time was up")
    if answer.length:
        raise OSError("the answer ends {0} bytes early".format(answer.length))
    return b"".join(pieces)


def unit_show(unit):
    done = subprocess.run(
        ["systemctl", "show", "-p", PROPERTIES, unit],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return dict(line.split("=", 1) for line in done.stdout.decode("utf-8", "replace").splitlines() if "=" in line)


def unit_log(unit, invocation, lines):
    """The last log lines of this very start, as ``(age in s, text)``; of the unit where a start left none."""
    matches = [["--unit", unit]]
    if invocation:
        matches.insert(0, ["_SYSTEMD_INVOCATION_ID=" + invocation, "+", "INVOCATION_ID=" + invocation])
    for match in matches:
        try:
            done = subprocess.run(
                ["journalctl", "--no-pager", "--output=json", "--lines", str(lines), *match],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=CALL_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        shown = [entry for entry in map(log_entry, done.stdout.splitlines()) if entry]
        if shown:
            return shown
    return []


def log_entry(line):
    try:
        row = json.loads(line.decode("utf-8", "replace"))
        text = row["MESSAGE"]
        age = time.time() - int(row["__REALTIME_TIMESTAMP"]) / 1e6
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(text, list):
        # Bytes that are no UTF-8, such as a bar of progress, come as numbers.
        text = bytes(text).decode("utf-8", "replace")
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", (text or "").replace("\r", "\n")).strip()
    return (max(0.0, age), readiness.masked(text.splitlines()[-1])) if text else None


def pids_of_cgroup(cgroup):
    """Processes of a control group and of those below it; empty where it can't be read."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
        base = root + cgroup
        if os.path.isdir(base):
            pids = set()
            for folder, _folders, files in os.walk(base):
                if "cgroup.procs" in files:
                    try:
                        with open(os.path.join(folder, "cgroup.procs")) as handle:
                            pids.update(int(line) for line in handle if line.strip())
                    except OSError:
                        continue
            return pids
    return set()


def listening_inodes(port):
    inodes = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as handle:
                rows = handle.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add("socket:[{0}]".format(fields[9]))
    return inodes


def owner_of(inodes):
    """Process ids that hold one of the sockets."""
    owners = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        folder = "/proc/{0}/fd".format(entry)
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                if os.readlink(os.path.join(folder, name)) in inodes:
                    owners.add(int(entry))
                    break
            except OSError:
                continue
    return owners


def about_process(pid):
    """``{pid, command, user, unit}`` of a process; None for what can't be read."""
    about = {"pid": pid, "command": None, "user": None, "unit": None}
    try:
        with open("/proc/{0}/cmdline".format(pid), "rb") as handle:
            words = handle.read().decode("utf-8", "replace").split("\0")
        about["command"] = " ".join(serving.mask_argv(words)).strip()[:100] or None
        about["user"] = pwd.getpwuid(os.stat("/proc/{0}".format(pid)).st_uid).pw_name
    except (OSError, KeyError):
        pass
    try:
        with open("/proc/{0}/cgroup".format(pid)) as handle:
            about["unit"] = procfs.parse_cgroup(handle.read())["unit"]
    except OSError:
        pass
    return about


def strangers(port, members):
    """Who holds a port and is none of these processes, as text; None where nobody is."""
    owners = owner_of(listening_inodes(port))
    if not owners or owners & members:
        return None
    return readiness.holder_text([about_process(pid) for pid in sorted(owners)])


def check_owner(target, state):
    if not listening_inodes(target["port"]):
        raise NotYet("nothing listens on port {0}".format(target["port"]))
    members = pids_of_cgroup(state.get("ControlGroup") or "/nonexistent")
    if not members:
        return
    holder = strangers(target["port"], members)
    if holder:
        raise Wrong(
            "port {0} belongs to {1}, which is not of {2}: another server listens there; stop it, or give the "
            "profile another port".format(target["port"], holder, target["unit"])
        )


def check_started(url, api_key):
    """A server that says itself that it is loading is not asked for a completion; older versions have no /ready."""
    for path in ("/ready", "/health"):
        status, _body = call(url + path, api_key, timeout=3 * CALL_S)
        if status == 503:
            raise NotYet("{0} answers 503, it is loading".format(path))
        if status not in (404, 405):
            return


def check_model(target, url, api_key):
    status, body = call(url + "/v1/models", api_key)
    if status in (401, 403):
        raise Wrong(
            "{0}/v1/models answers {1}: it asks for another key than sglang_server_api_key, which the checks send; set "
            "that one, and leave --api-key out of the profile's extra_args".format(url, status)
        )
    if status != 200:
        raise NotYet("/v1/models answers {0}".format(status))
    try:
        names = [row.get("id") for row in json.loads(body.decode("utf-8")).get("data", [])]
    except (ValueError, AttributeError, TypeError):
        raise NotYet("/v1/models gave no list") from None
    if target["served_model_name"] not in names:
        raise Wrong(
            "port {0} answers for model {1}, expected {2}: another server listens there, or the profile's model "
            "changed".format(
                target["port"], ", ".join(str(name) for name in names) or "none", target["served_model_name"]
            )
        )


def complete(url, api_key, tokens):
    """Tokens per second of one completion with the exact number of tokens."""
    body = {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    begun = time.monotonic()
    status, answer = call(url + "/generate", api_key, body, REQUEST_S)
    seconds = time.monotonic() - begun
    if status == 503:
        raise Refused("/generate answers 503")
    text = answer.decode("utf-8", "replace")
    if status != 200:
        raise Wrong("its first completion answers {0}: {1}".format(status, " ".join(text.split())[:300]))
    try:
        meta = json.loads(text)["meta_info"]
        count = meta["completion_tokens"]
        finish = meta.get("finish_reason")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Wrong("its first completion is not SGLang's: {0}".format(" ".join(text.split())[:200])) from None
    if count != tokens:
        raise Wrong(readiness.short(tokens, count, finish))
    return count / seconds if seconds > 0 else None


def started_at(state, fallback):
    """When a unit's main process was started, by this machine's monotonic clock."""
    for name in ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"):
        stamp = state.get(name) or ""
        if stamp.isdigit() and int(stamp):
            return int(stamp) / 1e6
    return fallback


def poll(target, params, row):
    begun = time.monotonic()
    until = begun + params["patience_s"] if params["patience_s"] else None
    began_waiting = begun - params["waited_s"]
    limit = float(target.get("start_timeout_s") or 900)
    url = "http://127.0.0.1:{0}".format(target["port"])
    last = "nothing happened yet"
    next_unit_check = 0.0
    started = began_waiting
    state, unsettled = {}, None
    while True:
        now = time.monotonic()
        try:
            if now >= next_unit_check:
                state = unit_show(target["unit"])
                unsettled = unsettled_line(state)
                next_unit_check = now + (0.0 if unsettled else 1.0)
                started = began_waiting if unsettled else started_at(state, began_waiting)
                if unsettled is None:
                    check_alive(target, state, row)
                    if row["restarts"] is None:
                        row["restarts"] = state.get("NRestarts")
            check_settled(unsettled)
            check_owner(target, state)
            check_started(url, params["api_key"])
            check_model(target, url, params["api_key"])
            row["asked"] += 1
            row["tokens_per_s"] = complete(url, params["api_key"], params["tokens"])
            row["ready"] = True
            row["ready_unix"] = time.time()
            row["started_unix"] = row["ready_unix"] - (time.monotonic() - started)
            # One that answers the first question was ready before, nobody saw when.
            row["at_once"] = row["asked"] == 1 and params["waited_s"] < 1.0 and now - begun < POLL_S
            break
        except NotYet as error:
            row["asked"] -= isinstance(error, Refused)
            last = str(error)
            if row["asked"]:
                # It may have died of the request: that is seen before systemd starts it again.
                next_unit_check = 0.0
        except Wrong as error:
            row["problem"] = str(error)
            break
        except Exception as error:
            # A thread that dies would leave its server looking as if nobody had asked.
            row["problem"] = "it could not be asked: {0!r}".format(error)
            break
        now = time.monotonic()
        if now > max(started + limit, began_waiting + min(limit, GRACE_S)):
            log = unit_log(target["unit"], state.get("InvocationID"), 1)
            row["problem"] = readiness.late(limit, now - started, last, log, row["asked"])
            break
        if until is not None and now > until:
            log = unit_log(target["unit"], state.get("InvocationID"), 1)
            row["seen"] = "{0:.0f} of {1:g} s: {2}".format(now - started, limit, readiness.progress(last, log))
            break
        time.sleep(POLL_S)
    row["seconds"] = round(time.monotonic() - began_waiting, 2)
    if row["problem"]:
        # Of the start that it died in, not of one that systemd has made since.
        invocation = state.get("InvocationID") if row["restarts"] in (None, state.get("NRestarts")) else None
        row["log"] = [text for _age, text in unit_log(target["unit"], invocation, params["log_lines"])]


def unsettled_line(state):
    """Why a unit is neither asked nor judged yet, or None.

    What ran before answers until it has stopped, and a unit that systemd still has to start has not ended.
    """
    if state.get("ActiveState") == "deactivating":
        return "what ran before is still being stopped"
    if (state.get("Job") or "0") != "0":
        return "systemd has its start still to do"
    return None


def check_settled(line):
    if line is not None:
        raise NotYet(line)


def check_alive(target, state, row):
    line = readiness.ended(target["unit"], state, row["asked"], row["restarts"])
    if line is not None:
        members = pids_of_cgroup(state.get("ControlGroup") or "/nonexistent")
        raise Wrong(
            readiness.ended(target["unit"], state, row["asked"], row["restarts"], strangers(target["port"], members))
        )


def chain(targets, rows):
    """What bounded each server that was started in this run, for the run's critical path."""
    return [
        {
            "name": row["profile"] + ": start to completion",
            "kind": "server",
            "started_unix": row["started_unix"],
            "seconds": row["ready_unix"] - row["started_unix"],
            "at_most": row["at_once"],
        }
        for target, row in zip(targets, rows)  # noqa: B905 (strict= needs Python 3.10)
        if target.get("fresh") and row["ready"]
    ]


def pollable(target):
    try:
        with socket.create_connection(("127.0.0.1", target["port"]), timeout=1):
            return True
    except OSError:
        return False


def main():
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "dict", "required": True},
            "problems": {"type": "list", "elements": "str", "default": []},
            "tokens": {"type": "int", "default": 8},
            "api_key": {"type": "str", "no_log": True},
            "log_lines": {"type": "int", "default": 12},
            "patience_s": {"type": "float", "default": 0},
            "waited_s": {"type": "float", "default": 0},
            "rows": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    targets = params["targets"]
    known = {row["profile"]: row for row in params["rows"]}
    rows = [{**EMPTY, "profile": one["name"], "log": [], **known.get(one["name"], {})} for one in targets]
    threads = []
    for target, row in zip(targets, rows):  # noqa: B905 (strict= needs Python 3.10)
        if row["ready"] or row["problem"]:
            continue
        row["seen"] = None
        if module.check_mode and (target.get("fresh") or not pollable(target)):
            continue
        threads.append(threading.Thread(target=poll, args=(target, params, row), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    pending = [row["profile"] for row in rows if row["seen"]]
    serving_rows = []
    for target, row in zip(targets, rows):  # noqa: B905 (strict= needs Python 3.10)
        status = "serving" if row["ready"] else "failed" if row["problem"] else "would be started"
        status = "starting" if row["seen"] else status
        rate = None if row["tokens_per_s"] is None else round(row["tokens_per_s"], 1)
        serving_rows.append(serving.summary_row(target, status, rate, row["problem"] or ""))
    if pending:
        module.exit_json(changed=False, rows=rows, pending=pending, specrig={"serving": serving_rows})
    failed = [row for row in rows if row["problem"]]
    if failed or (params["problems"] and not module.check_mode):
        lines = list(params["problems"])
        for row in failed:
            lines.append("{0}: {1}".format(row["profile"], row["problem"]))
            lines += ["    " + line for line in row.pop("log")]
        module.fail_json(msg="\n".join(lines), rows=rows, specrig={"serving": serving_rows})
    said = {"serving": serving_rows, "chain": chain(targets, rows), "clock_unix": time.time()}
    module.exit_json(changed=False, rows=rows, pending=[], specrig=said)


if __name__ == "__main__":
    main()
