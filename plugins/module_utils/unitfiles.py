# SPDX-License-Identifier: Apache-2.0
"""Files written whole, and systemd's word on units: what the modules that converge units share.

This reads and writes files and runs ``systemctl``; each failure ends the module with one line.
"""

from __future__ import annotations

import contextlib
import os
import re


def read(path):
    """A file's text, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None


def write(path, content, mode):
    """Replaces a file whole, durably; raises OSError and leaves no temporary file then."""
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


def write_or_fail(module, path, content, mode):
    """As ``write``; what goes wrong ends the module."""
    try:
        write(path, content, mode)
    except OSError as problem:
        module.fail_json(
            msg="%s cannot be written: %s; make it writable, or free some space, and run again"
            % (path, problem.strerror or problem)
        )


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
    """Runs it; a failure ends the module with what it and the unit's journal say."""
    code, out, err = module.run_command(["systemctl", *words])
    if code != 0:
        _c, journal, _e = module.run_command(["journalctl", "-n", "5", "--no-pager", "-o", "cat", "-u", words[-1]])
        said = " / ".join((err or out).strip().splitlines()[:2])
        last = " / ".join(line for line in journal.strip().splitlines() if line)
        module.fail_json(
            msg="systemctl %s failed: %s%s" % (" ".join(words), said, "; its journal ends: %s" % last if last else "")
        )


def units_diff(enable, start):
    """The diff of units that get enabled and started."""
    before = ["%s disabled" % name for name in enable] + ["%s inactive" % name for name in start]
    after = ["%s enabled" % name for name in enable] + ["%s active" % name for name in start]
    return {
        "before_header": "systemd",
        "after_header": "systemd",
        "before": "\n".join(before) + "\n",
        "after": "\n".join(after) + "\n",
    }
