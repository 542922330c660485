# SPDX-License-Identifier: Apache-2.0
"""Say in a few lines what a benchmark came to, and fail where part of it did not run."""

from __future__ import annotations

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The action behind ``specrig.host.bench_outcome``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            {
                "path": {"type": "path", "required": True},
                "outcome": {"type": "dict", "default": {}},
                "report": {"type": "str", "default": ""},
            }
        )
        outcome = arguments["outcome"]
        label = outcome.get("label") or "unknown"
        lines = ["run {0}: {1}".format(arguments["path"], label)]
        if outcome.get("missing"):
            lines.append("{0} cells of it have not ended: specrig runs resume continues it".format(outcome["missing"]))
        failed = outcome.get("failed") or []
        result.update(
            changed=False,
            run=arguments["path"],
            label=label,
            missing=outcome.get("missing"),
            specrig={"notes": lines + failed, "report": arguments["report"].splitlines(), "runs": [arguments["path"]]},
        )
        if failed:
            result.update(failed=True, msg="; ".join(failed))
        return result
