# SPDX-License-Identifier: Apache-2.0
"""Ask the package in the guest about a run, and read its answer."""

from __future__ import annotations

import json

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..module_utils import serving

SPEC = {
    "ask": {"type": "str", "choices": ["plan", "launch", "label"], "required": True},
    "request": {"type": "dict", "required": True},
    "python": {"type": "path", "default": "/opt/specrig/venv/bin/python"},
    "user": {"type": "str", "default": "specrig"},
}


def plain(profile):
    """A profile without its environment and keys: a run's plan needs neither, and arguments are shown and logged."""
    if not isinstance(profile, dict):
        return profile
    kept = {key: value for key, value in profile.items() if key != "env"}
    if isinstance(kept.get("extra_args"), list):
        kept["extra_args"] = serving.mask_argv([str(word) for word in kept["extra_args"]])
    return kept


class ActionModule(ActionBase):
    """The action behind ``specrig.host.guest_bench``; it never runs anything that writes in check mode."""

    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(SPEC)
        request = arguments["request"]
        if isinstance(request.get("profiles"), dict):
            request = dict(request, profiles={name: plain(row) for name, row in request["profiles"].items()})
        writes = arguments["ask"] != "plan" or bool(request.get("create"))
        result["changed"] = writes
        if writes and self._task.check_mode:
            result["skipped"] = True
            return result
        program = [arguments["python"], "-m", "specrig.ops.guest_bench", arguments["ask"]]
        done = self._execute_module(
            module_name="ansible.builtin.command",
            module_args={
                "argv": ["runuser", "-u", arguments["user"], "--", *program],
                "stdin": json.dumps(request),
                "_uses_shell": False,
            },
            task_vars=task_vars,
        )
        if done.get("rc") != 0:
            lines = str(done.get("stderr") or done.get("msg") or "").strip().splitlines()
            raise AnsibleActionFail(lines[-1] if lines else "the package ended without an answer or a reason")
        try:
            result["answer"] = json.loads(done["stdout"])
        except ValueError as error:
            raise AnsibleActionFail("the package's answer is not JSON ({0})".format(error)) from error
        if request.get("create"):
            answer = result["answer"]
            verb = "went on with" if request.get("run") else "made"
            result["specrig"] = {
                "started_runs": [answer["run"]],
                "changed": ["{0} the run {1} in the guest".format(verb, answer["folder"])],
            }
        elif arguments["ask"] == "launch":
            result["specrig"] = {"steps": ["noted launch {0} in the run".format(request.get("launch"))]}
        elif arguments["ask"] == "label":
            result["specrig"] = {"changed": ["labelled the run {0}".format(result["answer"]["label"])]}
        return result
