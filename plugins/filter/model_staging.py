# SPDX-License-Identifier: Apache-2.0
"""What is being staged in the background, for whoever waits for it."""

from __future__ import annotations


def model_staging(hostvars, machines, timeout_s=0):
    """The staging job of the first of these machines that has one.

    Args:
        hostvars: as Ansible has it.
        machines: inventory names; where the models are staged by the guest itself, it is asked before its host.
        timeout_s: the job's limit in seconds.

    Returns:
        ``{job, machine, models, timeout_s}``: ``models`` are those that were not there when it began. ``job`` is empty
        where nothing is staged.
    """
    for machine in machines:
        known = hostvars.get(machine) or {}
        job = (known.get("model_store_job") or {}).get("ansible_job_id")
        if job:
            looked = (known.get("__model_store_look") or {}).get("models") or {}
            models = sorted(name for name in looked if not looked[name].get("complete"))
            return {"job": job, "machine": machine, "models": models, "timeout_s": int(timeout_s)}
    return {"job": "", "machine": machines[0], "models": [], "timeout_s": int(timeout_s)}


class FilterModule:
    def filters(self):
        return {"model_staging": model_staging}
