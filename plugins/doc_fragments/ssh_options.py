"""The options of Ansible's own ssh connection, for connections that go through it."""

from __future__ import annotations

import yaml
from ansible.plugins.connection import ssh


def _options() -> str:
    options = yaml.safe_load(ssh.DOCUMENTATION)["options"]
    # A terminal on the way would reach into the guest as well and mix stdout with stderr.
    options["use_tty"]["default"] = False
    return yaml.safe_dump({"options": options})


class ModuleDocFragment:
    DOCUMENTATION = _options()
