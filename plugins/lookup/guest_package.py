# SPDX-License-Identifier: Apache-2.0
"""What a guest should have of the specrig package, as the controller has it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: guest_package
author: specrig developers (@specrig)
short_description: Hashes of the specrig package that belongs into a guest
description:
  - Returns the version, and hashes of the package and of the guest's lock file. Nothing is built, so that an unchanged
    guest is told quickly.
options:
  _terms:
    description: Not used.
"""

EXAMPLES = r"""
- name: Show what a guest should have
  ansible.builtin.debug:
    msg: "{{ lookup('specrig.host.guest_package') }}"
"""

RETURN = r"""
_raw:
  description: One dictionary with C(version), C(package) and C(lock).
  type: list
  elements: dict
"""

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

from ..plugin_utils import package


class LookupModule(LookupBase):
    def run(self, terms, variables=None, **kwargs):  # noqa: ARG002 (the base class's signature)
        """Returns one dictionary in a list."""
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [package.record()]
        except OSError as error:
            raise AnsibleError("the specrig package can't be read: {0}".format(error)) from error
