# SPDX-License-Identifier: Apache-2.0
"""Report gate rows, and stop the play where one is not passed."""

from __future__ import annotations

from ansible.plugins.action import ActionBase

from ..module_utils import serving


class ActionModule(ActionBase):
    """Runs on the controller; nothing is sent anywhere."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("rows", "allow_unknown"))

    def run(self, tmp=None, task_vars=None):
        """Returns all rows under ``specrig.gates``; fails with one line for each that is not passed."""
        result = super().run(tmp, task_vars)
        _validation, args = self.validate_argument_spec(
            argument_spec={
                "rows": {"type": "list", "elements": "dict", "required": True},
                "allow_unknown": {"type": "list", "elements": "str", "default": []},
            }
        )
        rows = args["rows"]
        lines = serving.verdict(rows, args["allow_unknown"])
        result.update(changed=False, specrig={"gates": rows}, not_passed=lines)
        if lines:
            count = "1 gate is" if len(lines) == 1 else "{0} gates are".format(len(lines))
            result.update(failed=True, msg="\n".join(["{0} not passed".format(count), *lines]))
        return result
