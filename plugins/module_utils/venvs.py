# SPDX-License-Identifier: Apache-2.0
"""Virtual environments: the record of what was put into them, and whether it still holds.  Reads and writes files."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tempfile

# What identifies an installation; written last, so that half an installation has none.
RECORD = "specrig-installed.json"
# What the installation left behind, against which a later look tells damage.
CONTENTS = "specrig-contents.json"
_OURS = frozenset([RECORD, CONTENTS])
_SITE = re.compile(r"^lib/python[0-9.]+/site-packages$")
_DIST_INFO = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)\.dist-info$")
# What every environment starts with.
_TOOLS = ("pip", "setuptools", "wheel")
_SHOWN = 3


def read_json(path):
    """A JSON object of a file, or None where there is none."""
    try:
        with open(path, encoding="utf-8") as handle:
            value = json.load(handle)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(folder, name, value):
    """Writes a file by rename, so that a reader sees the old one or the whole new one."""
    handle, scratch = tempfile.mkstemp(dir=folder, prefix=".specrig-")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1, sort_keys=True)
        os.fchmod(stream.fileno(), 0o644)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(scratch, os.path.join(folder, name))


def groups(path):
    """What lies in an environment: ``{group: [files, bytes]}``.

    A group is an entry of site-packages (a package's folder, its dist-info, a single module), or ``.`` for the rest of
    the environment. Compiled Python (``__pycache__``) is left out: the interpreter writes and drops it as it likes.
    """
    found = {}

    def add(group, about):
        counted = found.setdefault(group, [0, 0])
        counted[0] += 1
        counted[1] += about.st_size if stat.S_ISREG(about.st_mode) else 0

    def walk(folder, relative, group):
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == "__pycache__" or entry.name.startswith(".specrig-"):
                    continue
                below = relative + "/" + entry.name if relative else entry.name
                if not relative and entry.name in _OURS:
                    continue
                inside = entry.name if relative and _SITE.match(relative) else group
                if entry.is_dir(follow_symlinks=False):
                    walk(entry.path, below, inside)
                else:
                    add(inside, entry.stat(follow_symlinks=False))

    walk(path, "", ".")
    return found


def packages(path):
    """Name and version of every installed distribution, from the names of the dist-info folders."""
    found = {}
    root = os.path.join(path, "lib")
    try:
        pythons = sorted(os.listdir(root))
    except OSError:
        return found
    for python in pythons:
        try:
            entries = os.listdir(os.path.join(root, python, "site-packages"))
        except OSError:
            continue
        for entry in entries:
            match = _DIST_INFO.match(entry)
            if match:
                found[normal(match.group("name"))] = match.group("version")
    return found


def requested(path):
    """The distributions that pip was asked for by name or path, in the order of their installation."""
    found = []
    root = os.path.join(path, "lib")
    for python in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        folder = os.path.join(root, python, "site-packages")
        for entry in os.listdir(folder) if os.path.isdir(folder) else []:
            match = _DIST_INFO.match(entry)
            marker = os.path.join(folder, entry, "REQUESTED")
            if match and normal(match.group("name")) not in _TOOLS and os.path.isfile(marker):
                found.append((os.stat(marker).st_mtime_ns, normal(match.group("name"))))
    return [name for _stamp, name in sorted(found)]


def normal(name):
    """A distribution's name as it is compared: lower case, runs of ``-_.`` as one ``-``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_version(python):
    """``[3, 11, 2]`` of an interpreter, or None where it does not run."""
    code = "import sys; print('.'.join(str(n) for n in sys.version_info[:3]))"
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.decode("ascii", "replace").strip()
    return [int(part) for part in text.split(".")] if re.match(r"^\d+\.\d+\.\d+$", text) else None


def write_contents(path, **more):
    """Notes what an installation left behind; returns the note."""
    note = {
        "python": python_version(os.path.join(path, "bin", "python")),
        "packages": packages(path),
        "requested": requested(path),
        "groups": groups(path),
    }
    note.update(more)
    write_json(path, CONTENTS, note)
    return note


def damage(path, contents):
    """One line on how an environment differs from what its installation left, or None.

    Seen are an interpreter that does not run or is another Python, and files that are missing, added, cut or grown.
    Not seen is a file whose content changed and whose size did not. An environment without a note passes if its
    interpreter runs.
    """
    version = python_version(os.path.join(path, "bin", "python"))
    if version is None:
        return "its interpreter {0}/bin/python does not run".format(path)
    if not contents:
        return None
    before = contents.get("python")
    if before and before[:2] != version[:2]:
        return "it was made with Python {0}.{1}, its interpreter is {2}.{3} now".format(*(before[:2] + version[:2]))
    try:
        seen = groups(path)
    except OSError as error:
        return "{0}: {1}".format(error.filename, error.strerror)
    wanted = contents.get("groups") or {}
    lines = []
    for group in sorted(set(seen) | set(wanted)):
        have, want = seen.get(group), wanted.get(group)
        if have == want:
            continue
        name = "the environment's own files" if group == "." else group
        if have is None:
            lines.append("{0} is missing".format(name))
        elif want is None:
            lines.append("{0} was added".format(name))
        else:
            lines.append("{0} has {1} files, {2} bytes instead of {3}, {4}".format(name, *(have + want)))
    if not lines:
        return None
    shown = "; ".join(lines[:_SHOWN])
    return shown + ("; and {0} more".format(len(lines) - _SHOWN) if len(lines) > _SHOWN else "")


def look(path):
    """What an environment is: ``{record, id, damaged, real, packages, requested, wheels}``.

    ``record`` is None where nothing whole was installed or it is damaged; ``damaged`` says how; ``id`` is the record's
    in either case; ``real`` is the folder behind the path.
    """
    real = os.path.realpath(path)
    record = read_json(os.path.join(real, RECORD))
    about = {"record": record, "id": None, "damaged": None, "real": None}
    about.update(packages={}, requested=[], wheels={})
    if record is None:
        return about
    about["id"], about["real"] = record.get("id"), real
    contents = read_json(os.path.join(real, CONTENTS)) or {}
    about["packages"] = contents.get("packages") or {}
    about["requested"] = contents.get("requested") or []
    about["wheels"] = contents.get("wheels") or {}
    about["damaged"] = damage(real, contents)
    if about["damaged"]:
        about["record"] = None
    return about
