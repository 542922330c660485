# SPDX-License-Identifier: Apache-2.0
"""The package that a guest needs, as the controller has it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: guest_package
author: specrig developers (@specrig)
short_description: What of the specrig package belongs into a guest
description:
  - Returns hashes of the package and of the guest's lock file, and with O(build=true) also the paths of a wheel built
    from this very checkout or installation. Without it nothing is built, so that an unchanged guest is told quickly.
options:
  _terms:
    description: Not used; give an empty list.
  build:
    description: Whether to build the wheel.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Show what a guest should have
  ansible.builtin.debug:
    msg: "{{ lookup('specrig.host.guest_package') }}"
"""

RETURN = r"""
_raw:
  description:
    - One dictionary with C(record) (C(version), C(package), C(lock)), and after a build C(wheel) and C(lock_path).
  type: list
  elements: dict
"""

import hashlib
import sys
import tempfile
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase


def import_package():
    """The specrig package: the installed one, or the checkout that this collection lies in."""
    try:
        import specrig
    except ImportError:
        source = Path(__file__).resolve().parents[2] / "src"
        if not (source / "specrig" / "__init__.py").is_file():
            raise AnsibleError(
                "the Python package specrig is not installed for {0}, which runs Ansible; install specrig there, it "
                "has to be carried into the guest".format(sys.executable)
            ) from None
        sys.path.insert(0, str(source))
        import specrig
    return specrig


def package_hash(root):
    """A hash over the names and contents of what runs in a guest; a change of a playbook is none of the guest's."""
    digest = hashlib.sha256()
    files = {}
    for folder in (root, root / "facts"):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts:
                files[path.relative_to(root).as_posix()] = path
    for name in sorted(files):
        if name.startswith("sweeps/") or name.endswith(".lock"):
            continue
        content = files[name].read_bytes()
        digest.update("{0}\0{1}\0".format(name, len(content)).encode())
        digest.update(content)
    return digest.hexdigest()


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):  # noqa: ARG002 (the base class's signature)
        """Returns one dictionary in a list."""
        self.set_options(var_options=variables, direct=kwargs)
        specrig = import_package()
        from specrig.errors import SpecrigError
        from specrig.ops import bundle

        try:
            lock = bundle.lock_file("requirements-guest.lock")
            result = {
                "record": {
                    "version": specrig.__version__,
                    "package": package_hash(Path(specrig.__file__).resolve().parent),
                    "lock": hashlib.sha256(lock.read_bytes()).hexdigest(),
                }
            }
            if self.get_option("build"):
                result["wheel"] = str(bundle.build_wheel(tempfile.mkdtemp(prefix="specrig-wheel-")))
                result["lock_path"] = str(lock)
        except SpecrigError as error:
            raise AnsibleError(str(error)) from error
        return [result]
