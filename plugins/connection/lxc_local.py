"""Into an LXC guest from its host, where the host is its own controller."""

from __future__ import annotations

DOCUMENTATION = r"""
name: lxc_local
author: specrig developers
short_description: enter an LXC or Proxmox VE guest of the machine that runs Ansible
description:
  - Runs every command inside the guest with C(lxc-attach) or C(pct exec), started on this machine.
  - For a host that is its own controller (C(ansible_connection=local) for the host itself).
  - Pipelining works; files are copied in pieces of bounded size.
extends_documentation_fragment:
  - connection_pipelining
  - specrig.host.guest_options
options:
  become_success_timeout:
    type: int
    default: 10
    description: Number of seconds to wait for become to succeed when enabled.
    vars:
      - name: ansible_local_become_success_timeout
  become_strip_preamble:
    type: bool
    default: true
    description: Strip internal become output preceding command execution.
    vars:
      - name: ansible_local_become_strip_preamble
"""

EXAMPLES = r"""
# box1-gpu:
#   ansible_connection: specrig.host.lxc_local
#   lxc_guest_name: gpu
#   lxc_guest_host: box1
"""

from ansible.plugins.connection.local import Connection as LocalConnection
from ansible_collections.specrig.host.plugins.plugin_utils.guest import GuestConnection


class Connection(GuestConnection, LocalConnection):
    transport = "specrig.host.lxc_local"
    has_tty = False
