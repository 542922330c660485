#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""How far a staging in the background is: waits a little for news, then says it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_wait
short_description: Wait for models that are staged in the background, showing how far it is
author: specrig developers
description:
  - Waits for an asynchronous M(specrig.host.model_stage), and shows bytes, rate and time left every few seconds, on the
    screen and in the journal. What the job changed and reported becomes this task's own result.
  - The action of this name asks the module of this name again and again, each time for a few seconds at most; so it
    works over every connection, and is to run on the machine that stages.
options:
  job:
    description: The job's id, C(ansible_job_id).
    type: str
    required: true
  models:
    description: Names of the models that the job stages.
    type: list
    elements: str
    required: true
  wanted:
    description: Names of those that are waited for; left out, all.
    type: list
    elements: str
  until:
    description: V(any) is content with one more of O(wanted) than O(have).
    type: str
    choices: [any, all]
    default: all
  have:
    description: What an earlier task has waited for.
    type: list
    elements: str
    default: []
  fail:
    description: Whether a staging that failed fails this task; it is in RV(lost) anyhow.
    type: bool
    default: true
  timeout_s:
    description: The job's own limit in seconds, to tell a job that ran into it from one that was killed.
    type: int
    default: 0
  folder:
    description: Where the stagings of a machine say how far they are.
    type: path
    default: /run/specrig/staging
  hold_s:
    description: How long one question waits for news; set by the action.
    type: float
    default: 3.0
  async_dir:
    description: Where the results of jobs are; set by the action.
    type: path
    default: ~/.ansible_async
attributes:
  check_mode:
    description: It changes nothing.
    support: full
  diff_mode:
    description: It shows what the job changed.
    support: full
"""

EXAMPLES = r"""
- name: Wait for the models
  specrig.host.model_wait:
    job: "{{ model_store_job.ansible_job_id }}"
    models: [Qwen3.6-27B, Qwen3.6-27B-DFlash]
"""

RETURN = r"""
staged:
  description: Models that are there, those of O(have) included.
  returned: always
  type: list
  elements: str
lost:
  description: Model to one line on why it will not be there.
  returned: always
  type: dict
finished:
  description: Whether the job has ended, so that its result is in this one.
  returned: always
  type: bool
progress:
  description: Model to what its progress file says.
  returned: always
  type: dict
"""

import contextlib
import json
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import stageprogress

POLL_S = 0.1
# Between the last byte and the job's own end lie milliseconds: whoever waits for the last model gets the result too.
GRACE_S = 1.0
# A job whose process is not to be seen and whose result may be on its way.
ORPHAN_S = 2.0


def read_json(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None


def alive(job):
    """Whether the job's wrapper still runs; it carries the job's name among its arguments."""
    name = job.partition(".")[0].encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/cmdline" % entry, "rb") as handle:
                if name in handle.read().split(b"\0"):
                    return True
        except OSError:
            continue
    return False


def foreign(pid, job):
    """Who stages, where another run does: ``run RUN (process PID)``; None for this job, or a process that is gone."""
    if not isinstance(pid, int):
        return None
    name, seen = job.partition(".")[0].encode(), pid
    while seen > 1:
        try:
            with open("/proc/%d/cmdline" % seen, "rb") as handle:
                if name in handle.read().split(b"\0"):
                    return None
            with open("/proc/%d/stat" % seen, encoding="utf-8", errors="replace") as handle:
                seen = int(handle.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    run = None
    with contextlib.suppress(OSError), open("/proc/%d/environ" % pid, "rb") as handle:
        pairs = dict(item.partition(b"=")[::2] for item in handle.read().split(b"\0"))
        run = pairs.get(b"SPECRIG_RUN", b"").decode("utf-8", "replace") or None
    return "run %s (process %d)" % (run, pid) if run else "another run (process %d)" % pid


def job_of(path):
    """``(result or None, when it began or ended)`` of a job; a result that is half written is none."""
    record = read_json(path)
    try:
        stamp = os.stat(path).st_mtime
    except OSError:
        stamp = None
    if not isinstance(record, dict) or ("finished" in record and not record["finished"]):
        return None, stamp
    return record, stamp


def far(progress):
    """`` at 1.0 of 2.0 GB``, or nothing where that is not known."""
    if progress is None:
        return ""
    return " at " + stageprogress.amount_text(progress["bytes_done"], progress["bytes_total"])


def of_job(about, row, result):
    """Whether a progress file belongs to a job that has ended, and not to one before it."""
    if about is None:
        return False
    if about["state"] == "done":
        return "seconds" in row and bool(row.get("complete"))
    return bool(result.get("failed")) and (about["message"] or "") in str(result.get("msg"))


class Staging:
    """What is known of one job's models at a time."""

    def __init__(self, params):
        self.params = params
        self.path = os.path.join(os.path.expanduser(params["async_dir"]), params["job"])
        self.unseen = None

    def look(self):
        """``(staged, lost, progress, result)``; result is None while the job runs."""
        params = self.params
        result, stamp = job_of(self.path)
        begun = None if result is not None or stamp is None else stamp - 1.0
        rows = (result or {}).get("models") or {}
        progress = {}
        for name in params["models"]:
            record = read_json(os.path.join(params["folder"], name.replace("/", "--") + ".json"))
            progress[name] = stageprogress.parse(record, begun)
            # One of another run counts as long as it lives, also where it is stuck and has said nothing for long.
            about = stageprogress.parse(record)
            if result is None and about and about["state"] == "running":
                other = foreign(about["pid"], params["job"])
                if other:
                    progress[name] = stageprogress.waiting_for(about, other)
            if result is not None and not of_job(progress[name], rows.get(name) or {}, result):
                progress[name] = None
        staged = [name for name in params["models"] if name in params["have"]]
        lost = {}
        for name in params["models"]:
            about = progress[name]
            if name in staged:
                continue
            whole = result is not None and (not result.get("failed") or (rows.get(name) or {}).get("complete"))
            if whole or (about and about["state"] == "done"):
                staged.append(name)
            elif about and about["state"] == "failed":
                lost[name] = stageprogress.text(about).partition(": ")[2]
        message = self.ended_badly(result, stamp, progress)
        if message:
            for name in params["models"]:
                if name not in staged:
                    lost.setdefault(name, message)
        return staged, lost, progress, result

    def ended_badly(self, result, stamp, progress):
        """One line on a job that failed, was killed or ran out of time; None for one that runs or ended well."""
        running = next(
            (about for about in progress.values() if about and about["state"] in ("running", "waiting")), None
        )
        limit = self.params["timeout_s"]
        hub = any(name.endswith("@hub") for name in self.params["models"])
        late = "it was not done within %d s%s; raise model_store_%stimeout_s, or look why the source is slow" % (
            limit,
            far(running),
            "hub_" if hub else "",
        )
        if result is not None:
            if not result.get("failed"):
                return None
            if "child_pid" in result:
                return late
            if result.get("models") is not None or "cmd" not in result:
                return " ".join(str(result.get("msg") or "its staging failed").split())
        elif alive(self.params["job"]):
            self.unseen = None
            return None
        else:
            self.unseen = self.unseen or time.monotonic()
            if time.monotonic() - self.unseen < ORPHAN_S:
                return None
            if limit and stamp is not None and time.time() - stamp >= limit:
                return late
        return "its staging was killed%s; whole files are kept, run it again" % far(running)


def enough(params, staged, lost, result):
    wanted = params["models"] if params["wanted"] is None else params["wanted"]
    open_ones = [name for name in wanted if name not in staged and name not in lost]
    news = [name for name in wanted if name in lost or (name in staged and name not in params["have"])]
    return result is not None or not open_ones or (params["until"] == "any" and bool(news))


def chain(staged, have, progress, result):
    """What bounded each model that came meanwhile, for the run's critical path."""
    rows = []
    for name in staged:
        about = progress.get(name)
        if name in have or about is None:
            continue
        of_job = ((result or {}).get("models") or {}).get(name) or {}
        seconds = about["updated_unix"] - about["started_unix"]
        rate = of_job.get("rate_bytes_s") or (about["bytes_total"] / seconds if seconds >= 0.1 else None)
        detail = stageprogress.rate_text(rate) if rate else None
        rows.append(
            {
                "name": "model " + name,
                "kind": "model",
                "started_unix": about["started_unix"],
                "seconds": seconds,
                "detail": detail,
            }
        )
    for row in rows:
        ends = [(one["started_unix"] + one["seconds"], one["name"]) for one in rows if one is not row]
        row["after"] = [name for end, name in ends if end <= row["started_unix"] + 0.05]
    return rows


def main():
    module = AnsibleModule(
        argument_spec={
            "job": {"type": "str", "required": True},
            "models": {"type": "list", "elements": "str", "required": True},
            "wanted": {"type": "list", "elements": "str"},
            "until": {"type": "str", "choices": ["any", "all"], "default": "all"},
            "have": {"type": "list", "elements": "str", "default": []},
            "fail": {"type": "bool", "default": True},
            "timeout_s": {"type": "int", "default": 0},
            "folder": {"type": "path", "default": stageprogress.FOLDER},
            "hold_s": {"type": "float", "default": 3.0},
            "async_dir": {"type": "path", "default": "~/.ansible_async"},
        },
        supports_check_mode=True,
    )
    params = module.params
    staging = Staging(params)
    deadline = time.monotonic() + params["hold_s"]
    over_since = None
    while True:
        staged, lost, progress, result = staging.look()
        over = enough(params, staged, lost, result)
        all_there = all(name in staged or name in lost for name in params["models"])
        if over and over_since is None:
            over_since = time.monotonic()
        if over and (result is not None or not all_there or lost or time.monotonic() - over_since >= GRACE_S):
            break
        if not over and time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    answer = {
        "changed": False,
        "over": over,
        "staged": staged,
        "lost": lost,
        "progress": progress,
        "finished": result is not None,
        "job_result": None,
        "specrig": {"chain": chain(staged, params["have"], progress, result), "clock_unix": time.time()},
    }
    if result is not None:
        keys = ("changed", "failed", "msg", "specrig", "diff", "models", "warnings")
        answer["job_result"] = {key: result[key] for key in keys if key in result}
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
