# SPDX-License-Identifier: Apache-2.0
"""Ask the module engine_ready again and again, and show in between how far each server is."""

from __future__ import annotations

import time

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

FIRST_S, EACH_S = 5.0, 15.0


class ActionModule(ActionBase):
    """The action behind ``specrig.host.engine_ready``."""

    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        own = "patience_s" in arguments
        begun = time.monotonic()
        patience, rows = FIRST_S, []
        while True:
            if not own:
                arguments.update(patience_s=patience, waited_s=time.monotonic() - begun, rows=rows)
            answer = self._execute_module(
                module_name="specrig.host.engine_ready", module_args=arguments, task_vars=task_vars
            )
            rows = answer.get("rows") or []
            if own or answer.get("failed") or not answer.get("pending"):
                result.update(answer)
                return result
            for row in rows:
                if row["seen"]:
                    Display().display("  {0}: {1}".format(row["profile"], row["seen"]))
            patience = EACH_S
