"""Takes the host's lock in this controller's name, and recognises a lock whose controller process is gone."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from pathlib import Path

from ansible.plugins.action import ActionBase


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def process_started(pid: int) -> str | None:
    """Returns the start time of a process in clock ticks since boot, or None if there is no such process.

    One that has ended and that nobody has waited for yet is none any more.
    """
    text = _read(f"/proc/{pid}/stat")
    # The name in parentheses may hold spaces and parentheses itself; after it come the state and, as 20th, the start.
    fields = text.rpartition(")")[2].split() if text else []
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def controller() -> dict[str, str | None]:
    """Returns what tells this machine, and this boot of it, from any other."""
    return {
        "controller": _read("/etc/machine-id") or socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "controller_name": socket.gethostname(),
    }


def is_gone(record: dict) -> bool:
    """Tells whether the lock's controller process is known to be gone; not knowing is False."""
    here = controller()
    pid, started = record.get("pid"), record.get("started")
    if not here["boot"] or not isinstance(pid, int) or not started:
        return False
    if record.get("controller") != here["controller"] or record.get("controller_name") != here["controller_name"]:
        return False
    return record.get("boot") != here["boot"] or process_started(pid) != started


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        # An action runs in a worker that the controller process forked.
        pid = os.getppid()
        try:
            user = os.environ.get("SUDO_USER") or getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        where = controller()
        owner = {
            **where,
            "run": os.environ.get("SPECRIG_RUN") or str(uuid.uuid4()),
            "who": f"{user}@{where['controller_name']}",
            "pid": pid,
            "started": process_started(pid),
            "playbook": self._playbook(),
            "reason": str(task_vars.get("specrig_reason") or os.environ.get("SPECRIG_REASON") or "") or None,
        }
        arguments = {**self._task.args, "owner": owner}
        answer = self._ask(arguments, task_vars)
        holder = answer.get("holder")
        if answer.get("failed") and isinstance(holder, dict) and holder.get("run") and is_gone(holder):
            answer = self._ask({**arguments, "gone_run": holder["run"]}, task_vars)
        result.update(answer)
        return result

    def _ask(self, arguments, task_vars):
        return self._execute_module("specrig.host.host_lock", module_args=arguments, task_vars=task_vars)

    def _playbook(self) -> str | None:
        path = self._task.get_path()
        return os.path.basename(path.rpartition(":")[0]) if path else None
