# SPDX-License-Identifier: Apache-2.0
"""The specrig package as the controller has it: what a guest should have, and the wheel to bring it there."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

from ansible.errors import AnsibleError

LOCKS = {"guest": "requirements-guest.lock", "host": "requirements-host.lock"}


def _module(name):
    """A module of the specrig package: the installed one, or that of the checkout in which this collection lies."""
    try:
        return importlib.import_module(name)
    except ImportError:
        source = Path(__file__).resolve().parents[2] / "src"
        if not (source / "specrig" / "__init__.py").is_file():
            raise AnsibleError(
                "the Python package specrig can't be imported by {0}, which runs Ansible; install it there, it has "
                "to be carried into the guest".format(sys.executable)
            ) from None
        sys.path.insert(0, str(source))
        return importlib.import_module(name)


def package_hash(root):
    """A hash over the names and contents of what runs in a guest; a changed playbook is none of the guest's."""
    files = {}
    for folder in (root, root / "facts"):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts:
                files[path.relative_to(root).as_posix()] = path
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith("sweeps/") or name.endswith(".lock"):
            continue
        content = files[name].read_bytes()
        digest.update("{0}\0{1}\0".format(name, len(content)).encode())
        digest.update(content)
    return digest.hexdigest()


def lock_path(kind="guest"):
    """The lock file on the controller: of a guest, or of a host that is its own controller."""
    return Path(_module("specrig.ops.bundle").lock_file(LOCKS[kind]))


def record(kind="guest"):
    """What a virtual environment should say of itself: version, package and lock hashes."""
    package = _module("specrig")
    return {
        "version": package.__version__,
        "package": package_hash(Path(package.__file__).resolve().parent),
        "lock": hashlib.sha256(lock_path(kind).read_bytes()).hexdigest(),
    }


def build_wheel(folder):
    """The wheel, built into a folder of the controller."""
    return Path(_module("specrig.ops.bundle").build_wheel(folder))
