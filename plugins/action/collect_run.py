# SPDX-License-Identifier: Apache-2.0
"""Fetch a run folder from a guest, streamed, with every path in it checked before anything is written."""

from __future__ import annotations

import os
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


def unpack(archive, name, dest):
    """Unpack a run's archive below ``dest/name``; returns how many files came.

    Raises:
        ValueError: a member that is neither file nor folder, or whose path is not below ``name``; nothing was written.
    """
    root = Path(dest) / name
    with tarfile.open(archive, "r:*") as tar:
        members = tar.getmembers()
        for member in members:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not path.parts or path.parts[0] != name:
                raise ValueError("{0!r} leads out of the run folder".format(member.name))
            if not (member.isreg() or member.isdir()):
                raise ValueError("{0!r} is neither a file nor a folder".format(member.name))
        count = 0
        for member in members:
            target = Path(dest).joinpath(*PurePosixPath(member.name).parts)
            for parent in [target, *target.parents]:
                if parent.is_symlink():
                    raise ValueError("{0} is a link on the controller".format(parent))
                if parent == root:
                    break
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".collect-", delete=False) as scratch:
                shutil.copyfileobj(tar.extractfile(member), scratch)
                os.fchmod(scratch.fileno(), 0o644)
            os.replace(scratch.name, target)
            count += 1
    return count


class ActionModule(ActionBase):
    """The action behind ``specrig.host.collect_run``."""

    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp=None, task_vars=None):
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(
            {"src": {"type": "path", "required": True}, "dest": {"type": "path", "required": True}}
        )
        source = arguments["src"].rstrip("/")
        name = os.path.basename(source)
        dest = os.path.abspath(os.path.expanduser(arguments["dest"]))
        result.update(changed=True, path=os.path.join(dest, name))
        result["specrig"] = {"changed": ["collected the run into {0}".format(result["path"])]}
        if self._task.check_mode:
            return result
        packed = "/tmp/specrig-collect-{0}.tar.gz".format(os.urandom(8).hex())
        command = "umask 077; tar -C {0} -czf {1} -- {2}".format(
            shlex.quote(os.path.dirname(source)), packed, shlex.quote(name)
        )
        done = self._low_level_execute_command(command)
        try:
            # 1: a file changed while it was read, which appended journals may do
            if done["rc"] not in (0, 1):
                raise AnsibleActionFail("{0} could not be packed: {1}".format(source, done["stderr"].strip()))
            os.makedirs(dest, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=dest, prefix=".collect-") as scratch:
                archive = os.path.join(scratch, "run.tar.gz")
                self._connection.fetch_file(packed, archive)
                result["files"] = unpack(archive, name, dest)
        except (OSError, tarfile.TarError, ValueError) as error:
            raise AnsibleActionFail("{0} could not be collected into {1}: {2}".format(source, dest, error)) from error
        finally:
            self._low_level_execute_command("rm -f {0}".format(packed))
        return result
