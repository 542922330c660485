#!/usr/bin/python
"""Converges whole files and the systemd units among them in one go."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_files
short_description: Converge unit files, what they run, and their state
author: specrig developers
description:
  - Writes files that belong to specrig as a whole, reloads systemd once if a unit changed, enables and starts units.
  - One task where template, systemd and handler tasks would be many; nothing that is right is restarted.
  - A changed C(.mount) unit of a mounted tmpfs is remounted in place, so what lies on it stays.
options:
  files:
    description: Path to content, of files of mode 0644, or 0755 where the content starts with C(#!).
    type: dict
    default: {}
  enabled:
    description: Units that have to be enabled.
    type: list
    elements: str
    default: []
  started:
    description: Units that have to be active.
    type: list
    elements: str
    default: []
  mount_point:
    description: Where the mount unit of O(mount_content) mounts; it is enabled and started.
    type: path
  mount_content:
    description: Content of the mount unit for O(mount_point); its file name follows from the path.
    type: str
  subject:
    description: What to call these files in the summary.
    type: str
    required: true
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: Mount the model store
  specrig.host.unit_files:
    subject: tmpfs of the model store
    mount_point: /srv/specrig/ram
    mount_content: "{{ lookup('ansible.builtin.template', 'ram.mount.j2') }}"
"""

RETURN = r"""
mount_unit:
  description: Name of the mount unit, where a mount point was given.
  returned: always
  type: str
"""

import contextlib
import os
import re

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import units

UNIT_FOLDER = "/etc/systemd/system"


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None


def write(path, content, mode):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = "%s.specrig-%d" % (path, os.getpid())
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.write(content)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def states(module, names):
    """({unit: (active, enabled)}, whether systemd has to read some unit's file again) in one call."""
    if not names:
        return {}, False
    argv = ["systemctl", "show", "-p", "Id,ActiveState,UnitFileState,NeedDaemonReload,Result", *names]
    code, out, err = module.run_command(argv)
    if code != 0:
        module.fail_json(msg="systemctl cannot be asked (%s); systemd has to run on the host" % err.strip())
    found, stale = {}, False
    for part in out.strip().split("\n\n"):
        row = dict(re.findall(r"^(\w+)=(.*)$", part, re.M))
        found[row.get("Id")] = (row.get("ActiveState") == "active", row.get("UnitFileState") == "enabled")
        stale = stale or row.get("NeedDaemonReload") == "yes"
    return found, stale


def systemctl(module, *words):
    code, out, err = module.run_command(["systemctl", *words])
    if code != 0:
        _c, journal, _e = module.run_command(["journalctl", "-n", "5", "--no-pager", "-o", "cat", "-u", words[-1]])
        said = " / ".join((err or out).strip().splitlines()[:2])
        last = " / ".join(line for line in journal.strip().splitlines() if line)
        module.fail_json(
            msg="systemctl %s failed: %s%s" % (" ".join(words), said, "; its journal ends: %s" % last if last else "")
        )


def mount_options(content):
    return ",".join(re.findall(r"^Options=(.*)$", content, re.M))


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "enabled": {"type": "list", "elements": "str", "default": []},
            "started": {"type": "list", "elements": "str", "default": []},
            "mount_point": {"type": "path"},
            "mount_content": {"type": "str"},
            "subject": {"type": "str", "required": True},
        },
        required_together=[("mount_point", "mount_content")],
        supports_check_mode=True,
    )
    params = module.params
    files, enabled, started = dict(params["files"]), list(params["enabled"]), list(params["started"])
    mount = None
    if params["mount_point"]:
        try:
            mount = units.escape_path(params["mount_point"]) + ".mount"
        except ValueError as problem:
            module.fail_json(msg="mount point %s" % problem)
        files[os.path.join(UNIT_FOLDER, mount)] = params["mount_content"]
        enabled.append(mount)
        started.append(mount)

    subject, diff, told = params["subject"], [], []
    written = []
    for path in sorted(files):
        content = files[path] if files[path].endswith("\n") else files[path] + "\n"
        mode = 0o755 if content.startswith("#!") else 0o644
        old = read(path)
        right_mode = old is not None and os.stat(path).st_mode & 0o7777 == mode
        if old == content and right_mode:
            continue
        diff.append({"before_header": path, "after_header": path, "before": old or "", "after": content})
        written.append(path)
        if not module.check_mode:
            try:
                write(path, content, mode)
            except OSError as problem:
                module.fail_json(
                    msg="%s cannot be written: %s; make it writable, or free some space, and run again"
                    % (path, problem.strerror or problem)
                )
    if written:
        told.append(("would write %s" if module.check_mode else "wrote %s") % ", ".join(written))
    reload = any(path.startswith(UNIT_FOLDER) for path in written)
    if reload and not module.check_mode:
        systemctl(module, "daemon-reload")

    now, stale = states(module, sorted(set(enabled + started)))
    if stale and not module.check_mode:
        # Someone wrote a unit and did not get to the reload: a run that was killed in between, for one.
        systemctl(module, "daemon-reload")
    enable = [name for name in enabled if not now.get(name, (False, False))[1]]
    start = [name for name in started if not now.get(name, (False, False))[0]]
    if enable:
        told.append(("would enable %s" if module.check_mode else "enabled %s") % ", ".join(enable))
    if start:
        told.append(("would start %s" if module.check_mode else "started %s") % ", ".join(start))
    remount = bool(mount and os.path.join(UNIT_FOLDER, mount) in written and mount not in start)
    if remount:
        told.append(("would remount %s" if module.check_mode else "remounted %s") % params["mount_point"])
    if enable or start:
        before = ["%s %s" % (name, "disabled") for name in enable] + ["%s %s" % (name, "inactive") for name in start]
        after = ["%s %s" % (name, "enabled") for name in enable] + ["%s %s" % (name, "active") for name in start]
        diff.append(
            {
                "before_header": "systemd",
                "after_header": "systemd",
                "before": "\n".join(before) + "\n",
                "after": "\n".join(after) + "\n",
            }
        )
    if not module.check_mode:
        if enable:
            systemctl(module, "enable", *enable)
        if remount:
            options = "remount,%s" % mount_options(params["mount_content"])
            code, _out, err = module.run_command(["mount", "-o", options, params["mount_point"]])
            if code != 0:
                module.fail_json(
                    msg="%s cannot be remounted with %s: %s" % (params["mount_point"], options, err.strip())
                )
        for name in start:
            systemctl(module, "start", name)
    changed = bool(told)
    said = {"changed": ["%s: %s" % (subject, text) for text in told]}
    if params["mount_point"] and mount in start:
        said["found"] = ["%s is not mounted on the host" % params["mount_point"]]
    module.exit_json(changed=changed, mount_unit=mount, specrig=said, diff=diff)


if __name__ == "__main__":
    main()
