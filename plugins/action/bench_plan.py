# SPDX-License-Identifier: Apache-2.0
"""Read the package's plan of a sweep, decide whether and where it can run, and say so in a few lines."""

from __future__ import annotations

from ansible.plugins.action import ActionBase

from ..module_utils import benchmark

SPEC = {
    "plan": {"type": "dict", "required": True},
    "look": {"type": "dict", "required": True},
    "serving": {"type": "dict", "required": True},
    "profiles": {"type": "dict", "required": True},
    "take_over": {"type": "bool", "default": False},
    "guest": {"type": "str"},
    "guest_gpus": {"type": "list", "elements": "int"},
    "confirm_above_s": {"type": "int", "default": 0},
}


class ActionModule(ActionBase):
    """The action behind ``specrig.host.bench_plan``."""

    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(SPEC)
        plan = arguments["plan"]
        decision = benchmark.decide(
            plan,
            arguments["look"],
            arguments["serving"],
            arguments["profiles"],
            arguments["take_over"],
            arguments["guest_gpus"],
            arguments["guest"],
        )
        lines = benchmark.describe(plan, decision)
        report = {"notes": lines, "plan": [dict(plan, placements=decision["placements"], refused=decision["refused"])]}
        result.update(changed=False, decision=decision, specrig=report)
        limit = arguments["confirm_above_s"]
        if decision["refused"]:
            result.update(failed=True, msg="; ".join(decision["refused"]))
        elif limit and plan["estimate_s"] > limit:
            result.update(
                failed=True,
                msg="the plan takes about {0}, more than {1}; say yes to it with --yes (decode_bench_yes=true), or "
                "take part of it with --only".format(benchmark.duration(plan["estimate_s"]), benchmark.duration(limit)),
            )
        return result
