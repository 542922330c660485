# SPDX-License-Identifier: Apache-2.0
"""Bring the specrig package into a guest: nothing is sent where the guest has it already."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..plugin_utils import package


class ActionModule(ActionBase):
    """Builds the wheel on the controller, sends it with its lock, and lets the module guest_venv install both."""

    TRANSFERS_FILES = True
    _VALID_ARGS = frozenset(("path", "installed", "python", "lock"))

    def run(self, tmp=None, task_vars=None):
        """Returns ``record``, what the guest has afterwards."""
        result = super().run(tmp, task_vars)
        _validation, args = self.validate_argument_spec(
            argument_spec={
                "path": {"type": "path", "required": True},
                "installed": {"type": "dict"},
                "python": {"type": "path", "default": "/usr/bin/python3"},
                "lock": {"type": "str", "choices": ["guest", "host"], "default": "guest"},
            }
        )
        wanted = package.record(args["lock"])
        if args["installed"] == wanted:
            result.update(changed=False, record=wanted)
            return result
        if self._task.check_mode:
            text = "would install specrig {0} into {1}".format(wanted["version"], args["path"])
            result.update(changed=True, record=wanted, specrig={"changed": [text]})
            return result
        result.update(self._install(args, wanted, task_vars))
        if not result.get("failed"):
            text = "installed specrig {0} into {1}".format(wanted["version"], args["path"])
            result.update(changed=True, record=wanted, specrig={"changed": [text]})
        return result

    def _install(self, args, wanted, task_vars):
        scratch = tempfile.mkdtemp(prefix="specrig-wheel-")
        try:
            try:
                wheel = package.build_wheel(scratch)
            except Exception as error:
                raise AnsibleActionFail("the wheel of specrig can't be built: {0}".format(error)) from error
            remote = self._make_tmp_path()
            sent = {}
            for name, path in (("wheel", wheel), ("lock", package.lock_path(args["lock"]))):
                sent[name] = self._connection._shell.join_path(remote, Path(path).name)
                self._transfer_file(str(path), sent[name])
            self._fixup_perms2((remote, *sent.values()))
            return self._execute_module(
                module_name="specrig.host.guest_venv",
                module_args={
                    "path": args["path"],
                    "python": args["python"],
                    "record": wanted,
                    "wheel": sent["wheel"],
                    "lock": sent["lock"],
                },
                task_vars=task_vars,
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            self._remove_tmp_path(self._connection._shell.tmpdir)
