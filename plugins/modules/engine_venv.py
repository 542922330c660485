#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Build an engine's virtual environment beside the one that serves, and switch to it when it is whole."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_venv
short_description: Build an engine's virtual environment beside the one that serves, and switch
description:
  - O(path) is a link to the folder that was built last. A new build lies in a folder of its own beside it
    (C(PATH.d/ID)), and the link is switched by rename when the build is whole, so that a server that runs keeps what it
    was started from and a failed installation changes nothing.
  - A build that is there already, whole and with the wanted record, is switched to without running pip.
  - Used by M(specrig.host.engine_install), which brings the wheels.
options:
  step:
    description:
      - V(look) says what an installation would meet; V(accept) checks and keeps wheels that arrived; V(install) builds
        and switches.
    type: str
    choices: [look, accept, install]
    default: install
  path:
    description: The environment, a link.
    type: path
    required: true
  name:
    description: The engine's name.
    type: str
    default: engine
  record:
    description: What identifies the content, with an C(id).
    type: dict
    default: {}
  python:
    description: The interpreter to make the environment with, a path or a name.
    type: str
    default: /usr/bin/python3
  python_min:
    description: The oldest version of Python that will do.
    type: str
    default: "3.8"
  steps:
    description:
      - Runs of pip, each C(requirements), C(args), C(constraints) (the files' texts). In C(requirements) the word
        C(wheel:NAME) stands for a file of O(wheels), C(secret:N) for a text of O(secrets).
    type: list
    elements: dict
    default: []
  environments:
    description: Environment of each run of pip, for its indexes. Hidden, since it may hold credentials.
    type: list
    elements: dict
  secrets:
    description: Requirements that hold credentials. Hidden.
    type: list
    elements: str
  wheels:
    description: Files to install from, each with C(name), C(size), C(sha256), and C(bound) where it lies in O(bound).
    type: list
    elements: dict
    default: []
  bound:
    description: A folder in which the files of O(wheels) were shown to the guest.
    type: path
  store:
    description: Where files that were copied into the guest are kept.
    type: path
    default: /opt/specrig/wheels
  offline:
    description: Whether pip asks no index.
    type: bool
    default: false
  remove_wheels:
    description: Whether files that were copied are removed afterwards.
    type: bool
    default: false
  paths:
    description: Paths in the guest whose contents' hashes V(look) returns.
    type: list
    elements: path
    default: []
  keep:
    description: How many earlier builds are kept beside the current one. One that a process uses is kept in any case.
    type: int
    default: 1
  cache_root:
    description: Where the kernels of a removed build are removed as well.
    type: path
author: specrig developers (@specrig)
attributes:
  check_mode:
    description: Says whether it would install.
    support: full
  diff_mode:
    description: It shows the record before and after.
    support: full
"""

EXAMPLES = r"""
- name: Build and switch
  specrig.host.engine_venv:
    path: /opt/specrig/engines/fork
    name: fork
    record: {id: 5c0ffee}
    steps:
      - {requirements: [torch==2.13.0]}
      - {requirements: [sglang==0.5.23], args: [--no-deps]}
"""

RETURN = r"""
real:
  description: The folder that O(path) links to afterwards.
  returned: after V(install)
  type: str
packages:
  description: Name and version of every installed distribution.
  returned: after V(install)
  type: dict
requested:
  description: Those that pip was asked for, in the order of their installation.
  returned: after V(install)
  type: list
  elements: str
removed:
  description: Earlier builds that were removed.
  returned: after V(install)
  type: list
  elements: str
facts:
  description: Python's version, machine, C library, free space, whether git is there, which wheels the guest has.
  returned: after V(look)
  type: dict
"""

import ctypes
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import engines, venvs

PIECE = 4 * 1024 * 1024
SAFE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$")


class InstallError(Exception):
    """One line."""


# ---- the look ----------------------------------------------------------------------------------------------------


def find_python(python):
    """The interpreter's path, or None."""
    return python if "/" in python and os.access(python, os.X_OK) else shutil.which(python)


def python_problem(python, minimum):
    """``(path, version, one line or None)`` of the interpreter that the environment is to be made with."""
    path = find_python(python)
    version = venvs.python_version(path) if path else None
    expected = "expected Python {0} or newer".format(minimum)
    remedy = "install one in the guest, or name another by install.python"
    if version is None:
        return path, None, "the guest has no {0} that runs, {1}; {2}".format(python, expected, remedy)
    found = "{0}.{1}.{2}".format(*version)
    if version[:2] < [int(part) for part in minimum.split(".")]:
        return path, version, "{0} is Python {1}, {2}; {3}".format(python, found, expected, remedy)
    check = [path, "-I", "-c", "import venv, ensurepip"]
    if subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
        name = "python{0}.{1}-venv".format(*version)
        line = "{0} (Python {1}) can't make virtual environments: install {2} in the guest".format(python, found, name)
        return path, version, line
    return path, version, None


def libc_version():
    """``glibc 2.36``'s numbers as ``[2, 36]``, or None where it is another C library."""
    try:
        text = ctypes.CDLL(None).gnu_get_libc_version
        text.restype = ctypes.c_char_p
        return [int(part) for part in text().decode().split(".")[:2]]
    except (OSError, AttributeError, ValueError):
        return None


def existing(path):
    """The nearest folder on the way to a path that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def free_bytes(path):
    about = os.statvfs(existing(path))
    return about.f_bavail * about.f_frsize


def file_hash(path):
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while True:
            piece = handle.read(PIECE)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)


def content_hash(path):
    """The hash of a file, or of a folder's names and contents; None where nothing is there."""
    if os.path.isfile(path):
        return file_hash(path)
    if not os.path.isdir(path):
        return None
    digest = hashlib.sha256()
    for base, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not engines.left_out(name))
        for name in sorted(names):
            full = os.path.join(base, name)
            if os.path.isfile(full) and not engines.left_out(name):
                line = "{0}\0{1}\0".format(os.path.relpath(full, path), file_hash(full))
                digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def stored(store, wheel):
    """Where a copied file lies: under its hash, so that two wheelhouses share what they have in common."""
    if not SAFE_NAME.match(wheel["name"]) or not re.match(r"^[0-9a-f]{64}$", wheel["sha256"]):
        raise InstallError("{0!r} can't be a file to install from".format(wheel["name"]))
    return os.path.join(store, wheel["sha256"], wheel["name"])


def size_of(path):
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def look(params):
    path, version, problem = python_problem(params["python"], params["python_min"])
    have, parts = [], {}
    files = {wheel["name"]: wheel["sha256"] for wheel in params["wheels"]}
    for wheel in params["wheels"]:
        place = stored(params["store"], wheel)
        if size_of(place) == wheel["size"]:
            have.append(wheel["name"])
        elif size_of(place + ".part") is not None:
            parts[wheel["name"]] = size_of(place + ".part")
    return {
        "python": path,
        "version": version,
        "problem": problem,
        # What the distribution calls what is missing to make environments with it.
        "needs": ["python{0}.{1}-venv".format(*version)] if problem and "can't make" in problem else [],
        "machine": platform.machine(),
        "libc": libc_version(),
        "git": shutil.which("git") is not None,
        "free_bytes": free_bytes(params["path"]),
        "reuse": bool(params["record"]) and reusable(params["path"], params["record"].get("id"), files) is not None,
        "have": have,
        "parts": parts,
        "hashes": {path: content_hash(path) for path in params["paths"]},
    }


def accept(params):
    """Keeps the files that arrived whole; names of those that did not."""
    wrong = []
    for wheel in params["wheels"]:
        place = stored(params["store"], wheel)
        if os.path.isfile(place):
            continue
        part = place + ".part"
        if not os.path.isfile(part) or file_hash(part) != wheel["sha256"]:
            wrong.append(wheel["name"])
            if os.path.exists(part):
                os.unlink(part)
            continue
        os.chmod(part, 0o644)
        os.rename(part, place)
    return wrong


# ---- the installation --------------------------------------------------------------------------------------------


def links(params, folder):
    """Fills a folder with links to the files to install from, each of which is proven by its hash."""
    for wheel in params["wheels"]:
        place = stored(params["store"], wheel)
        if wheel.get("bound"):
            place = os.path.join(params["bound"], wheel["name"])
        if not os.path.isfile(place):
            raise InstallError("{0} is not in the guest, expected in {1}".format(wheel["name"], os.path.dirname(place)))
        if file_hash(place) != wheel["sha256"]:
            if not wheel.get("bound"):
                os.unlink(place)
            raise InstallError(
                "{0} in the guest is not the controller's file (its sha256 differs): run again".format(wheel["name"])
            )
        os.symlink(place, os.path.join(folder, wheel["name"]))


def run(argv, env=None):
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            env=dict(os.environ, **(env or {})),
        )
    except OSError as error:
        raise InstallError("{0}: {1}".format(argv[0], error.strerror)) from None
    if done.returncode:
        lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
        # What went wrong stands in pip's lines that say so; its hints and notices come after.
        errors = [line for line in lines if line.lstrip().lower().startswith("error")]
        shown = [" ".join(line.split()) for line in (errors or lines)[-4:] if line.strip()]
        raise InstallError(engines.masked(" | ".join(shown)) or "exit {0}".format(done.returncode))


def pip_argv(folder, params, step, scratch, number):
    argv = [
        *(os.path.join(folder, "bin", "python"), "-m", "pip", "install", "--no-input"),
        *("--disable-pip-version-check", "--root-user-action=ignore", "--progress-bar=off"),
    ]
    if params["offline"]:
        argv.append("--no-index")
    if params["wheels"]:
        argv += ["--find-links", os.path.join(scratch, "wheels")]
    for place, text in enumerate(step.get("constraints") or []):
        path = os.path.join(scratch, "constraints-{0}-{1}.txt".format(number, place))
        with open(path, "w", encoding="utf-8") as handle:
            handle.write(text)
        argv += ["--constraint", path]
    argv += step.get("args") or []
    # In a file, so that what a URL holds is in no process's command line.
    path = os.path.join(scratch, "requirements-{0}.txt".format(number))
    with open(path, "w", encoding="utf-8") as handle:
        for word in step["requirements"]:
            if word.startswith("wheel:"):
                word = os.path.join(scratch, "wheels", word[len("wheel:") :])
            elif word.startswith("secret:"):
                word = (params["secrets"] or [])[int(word[len("secret:") :])]
            handle.write(word + "\n")
    return [*argv, "--requirement", path]


def build(params, folder):
    """Makes the environment in a folder of its own."""
    path, _version, problem = python_problem(params["python"], params["python_min"])
    if problem:
        raise InstallError(problem)
    os.makedirs(os.path.dirname(folder), mode=0o755, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="specrig-install-")
    try:
        os.mkdir(os.path.join(scratch, "wheels"))
        links(params, os.path.join(scratch, "wheels"))
        run([path, "-m", "venv", folder])
        environments = params["environments"] or []
        for number, step in enumerate(params["steps"]):
            env = environments[number] if number < len(environments) else {}
            try:
                run(pip_argv(folder, params, step, scratch, number), env)
            except InstallError as error:
                which = "pip"
                if len(params["steps"]) > 1:
                    which += ", step {0} of {1}".format(number + 1, len(params["steps"]))
                raise InstallError("{0}: {1}".format(which, error)) from None
        present = venvs.packages(folder)
        files = {wheel["name"]: wheel["sha256"] for wheel in params["wheels"]}
        venvs.write_contents(folder, wheels=engines.wheels_used(files, present))
        venvs.write_json(folder, venvs.RECORD, params["record"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def builds(path):
    """The folders built beside a path, the newest first, each with its record's id or None."""
    root = path + ".d"
    found = []
    try:
        names = os.listdir(root)
    except OSError:
        return []
    for name in names:
        folder = os.path.join(root, name)
        if name.startswith(".") or not os.path.isdir(folder) or os.path.islink(folder):
            continue
        record = os.path.join(folder, venvs.RECORD)
        identity = (venvs.read_json(record) or {}).get("id")
        stamp = os.stat(record).st_mtime_ns if identity else 0
        found.append((stamp, folder, identity))
    return [(folder, identity) for _stamp, folder, identity in sorted(found, reverse=True)]


def reusable(path, wanted, files):
    """A build beside a path that is what is wanted and whole, or None."""
    for folder, identity in builds(path):
        if identity == wanted and not engines.why_not(wanted, venvs.look(folder), files):
            return folder
    return None


def users(folders):
    """Those of the folders that a process uses: by its command line, or by what it has mapped."""
    used = set()
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        for name in ("cmdline", "maps"):
            try:
                with open("/proc/{0}/{1}".format(pid, name), "rb") as handle:
                    text = handle.read().decode("utf-8", "replace")
            except OSError:
                continue
            used.update(folder for folder in folders if folder + "/" in text)
    return used


def switch(path, folder):
    """Points the link at a build; a folder of ours that stands in its place becomes a build of its own."""
    if os.path.isdir(path) and not os.path.islink(path):
        if os.listdir(path) and not os.path.isfile(os.path.join(path, venvs.RECORD)):
            raise InstallError(
                "{0} is a folder that specrig did not make; remove it, or name another by install.venv".format(path)
            )
        os.rename(path, os.path.join(path + ".d", "before-{0}".format(os.getpid())))
    scratch = "{0}.{1}".format(path, os.getpid())
    if os.path.lexists(scratch):
        os.unlink(scratch)
    os.symlink(folder, scratch)
    try:
        os.rename(scratch, path)
    except OSError as error:
        os.unlink(scratch)
        raise InstallError("{0} can't be switched: {1}".format(path, error.strerror)) from None


def install(params):
    """``(changed, result)``."""
    path, wanted = params["path"], params["record"].get("id")
    here = venvs.look(path)
    if os.path.isdir(path) and not os.path.islink(path) and os.listdir(path) and not here["id"]:
        raise InstallError(
            "{0} is a folder that specrig did not make; remove it, or name another by install.venv".format(path)
        )
    target = reusable(path, wanted, {wheel["name"]: wheel["sha256"] for wheel in params["wheels"]})
    reused = target is not None
    if target is None:
        target, number = os.path.join(path + ".d", str(wanted)), 1
        while os.path.lexists(target):
            if venvs.read_json(os.path.join(target, venvs.RECORD)) is None and not users([target]):
                # What an interrupted installation left.
                shutil.rmtree(target, ignore_errors=True)
                if not os.path.lexists(target):
                    break
            number += 1
            target = os.path.join(path + ".d", "{0}-{1}".format(wanted, number))
        build(params, target)
    switch(path, target)
    removed = prune(params, target, here["real"])
    if params["remove_wheels"]:
        for wheel in params["wheels"]:
            shutil.rmtree(os.path.dirname(stored(params["store"], wheel)), ignore_errors=True)
    after = venvs.look(path)
    return {
        "real": target,
        "packages": after["packages"],
        "requested": after["requested"],
        "reused": reused,
        "removed": removed,
    }


def prune(params, current, before):
    """Removes builds beyond those that are kept, never the current one, its predecessor, or one that a process uses."""
    others = [(folder, identity) for folder, identity in builds(params["path"]) if folder != current]
    whole = [folder for folder, identity in others if identity]
    kept = set(whole[: params["keep"]])
    used = users([folder for folder, _identity in others])
    left = {identity for folder, identity in others if folder in kept | used} | {params["record"].get("id")}
    removed = []
    for folder, identity in others:
        if folder in kept or folder in used or folder == before:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
        kernels = os.path.join(params["cache_root"] or "", "{0}-{1}".format(params["name"], identity))
        if params["cache_root"] and identity and identity not in left and os.path.isdir(kernels):
            shutil.rmtree(kernels, ignore_errors=True)
    return removed


def main():
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "choices": ["look", "accept", "install"], "default": "install"},
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "default": "engine"},
            "record": {"type": "dict", "default": {}},
            "python": {"type": "str", "default": "/usr/bin/python3"},
            "python_min": {"type": "str", "default": "3.8"},
            "steps": {"type": "list", "elements": "dict", "default": []},
            "environments": {"type": "list", "elements": "dict", "no_log": True},
            "secrets": {"type": "list", "elements": "str", "no_log": True},
            "wheels": {"type": "list", "elements": "dict", "default": []},
            "bound": {"type": "path"},
            "store": {"type": "path", "default": "/opt/specrig/wheels"},
            "offline": {"type": "bool", "default": False},
            "remove_wheels": {"type": "bool", "default": False},
            "paths": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": 1},
            "cache_root": {"type": "path"},
        },
        supports_check_mode=True,
    )
    params = module.params
    os.umask(0o022)
    try:
        if params["step"] == "look":
            module.exit_json(changed=False, facts=look(params))
        if params["step"] == "accept":
            module.exit_json(changed=False, wrong=accept(params))
        here = venvs.look(params["path"])
        diff = {
            "before": json.dumps(here["record"], indent=1, sort_keys=True) + "\n",
            "after": json.dumps(params["record"], indent=1, sort_keys=True) + "\n",
            "before_header": params["path"],
            "after_header": params["path"],
        }
        if module.check_mode:
            module.exit_json(changed=True, diff=diff)
        module.exit_json(changed=True, diff=diff, **install(params))
    except InstallError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        full = "; free some space" if error.errno == errno.ENOSPC else ""
        module.fail_json(msg="{0}: {1}{2}".format(error.filename or params["path"], error.strerror, full))


if __name__ == "__main__":
    main()
