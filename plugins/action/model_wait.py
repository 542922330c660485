# SPDX-License-Identifier: Apache-2.0
"""Waits for a staging in the background, and shows how far it is."""

from __future__ import annotations

import os
import time

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ..module_utils import stageprogress
from ..plugin_utils import runjournal

# How long one question waits on the machine that stages. A model that is there ends it at once.
HOLD_S = 3.0
# A short staging needs no lines; of a long one there are fewer with time.
FIRST_LINE_S = 1.5
PART_BETWEEN_LINES = 0.04
JOURNAL_EVERY_S = 10.0
# How often in a row the machine may be out of reach, while its staging goes on.
TRIES = 3


class Reporter:
    """Shows lines not more often than they can be read, and keeps the journal smaller still."""

    def __init__(self, show, journal, host, redraw=False, clock=time.monotonic):
        self._show, self._journal, self._host, self._clock = show, journal, host, clock
        self._begun = clock()
        self._redraw = redraw
        self._line_at = self._journal_at = None
        self._told = {}
        self._ended = set()

    def news(self, progress, have):
        """Takes one answer: model to progress or None."""
        now = self._clock()
        ended = [
            name
            for name in sorted(progress)
            if progress[name] and progress[name]["state"] in ("done", "failed") and name not in have
        ]
        for name in ended:
            if name not in self._ended:
                self._ended.add(name)
                self._show(stageprogress.text(progress[name]))
                outcome = "ok" if progress[name]["state"] == "done" else "failed"
                self._journal("progress", outcome, host=self._host, **stageprogress.row(progress[name]))
        going = [progress[name] for name in sorted(progress) if progress[name] and name not in ended]
        going = [row for row in going if row["state"] in ("running", "waiting")]
        if not going:
            return
        since = now - self._begun
        if since >= FIRST_LINE_S and (self._redraw or self._line_at is None or self._due(now, since)):
            self._line_at = now
            self._show(" · ".join(stageprogress.text(row) for row in going))
        if self._journal_at is None or now - self._journal_at >= JOURNAL_EVERY_S:
            self._journal_at = now
            for row in going:
                self._journal("progress", row["state"], host=self._host, **stageprogress.row(row))

    def _due(self, now, since):
        return now - self._line_at >= max(HOLD_S - 0.5, PART_BETWEEN_LINES * since)


class ActionModule(ActionBase):
    """Asks the module of the same name until it has what is waited for."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        """Returns ``staged``, ``lost``, ``finished``, and the job's own result once it has one."""
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = dict(self._task.args)
        args.setdefault("async_dir", self.get_shell_option("async_dir", default="~/.ansible_async"))
        hold = float(args.pop("hold_s", HOLD_S))
        reporter = Reporter(
            lambda line: Display().display("  " + line),
            runjournal.write,
            self._host(task_vars),
            redraw=os.environ.get("SPECRIG_REDRAW") == "1",
        )
        missed = 0
        while True:
            try:
                answer = self._execute_module(
                    "specrig.host.model_wait", module_args={**args, "hold_s": hold}, task_vars=task_vars
                )
                missed = 0
            except AnsibleConnectionFailure:
                missed += 1
                if missed >= TRIES:
                    raise
                time.sleep(1.0)
                continue
            if "over" not in answer:
                result.update(answer)
                result.setdefault("failed", True)
                return result
            reporter.news(answer["progress"], args.get("have") or [])
            if answer["over"]:
                break
        self._finish(result, answer, bool(args.get("fail", True)))
        return result

    def _host(self, task_vars):
        return self._task.delegate_to or task_vars.get("inventory_hostname")

    @staticmethod
    def _finish(result, answer, fail):
        """Puts the module's last answer and the job's own result together."""
        job = answer.pop("job_result") or {}
        said = dict(job.get("specrig") or {})
        if job.get("failed") and not fail:
            # Whoever goes on without these models reports it; what was found is true all the same.
            said = {key: said[key] for key in ("found",) if key in said}
        said.update(answer.get("specrig") or {})
        for key in ("over",):
            answer.pop(key, None)
        result.update(answer)
        result["specrig"] = said
        for key in ("diff", "models", "warnings"):
            if key in job:
                result[key] = job[key]
        result["changed"] = bool(job.get("changed"))
        if answer["lost"] and fail:
            lines = []
            for name in sorted(answer["lost"]):
                line = answer["lost"][name]
                if line not in lines:
                    lines.append(line if name in line else "model {0}: {1}".format(name, line))
            result.update(failed=True, msg="; ".join(lines))
