"""Into an LXC guest through its host's SSH."""

from __future__ import annotations

DOCUMENTATION = r"""
name: lxc_ssh
author: specrig developers
short_description: enter an LXC or Proxmox VE guest through SSH to its host
description:
  - Reaches the host exactly as M(ansible.builtin.ssh) does (address, port, user, key, multiplexing) and runs every
    command inside the guest with C(lxc-attach) or C(pct exec).
  - The guest needs no sshd, no address and no network, only C(/bin/sh), C(dd) and a Python for the modules.
  - Pipelining works; files are copied in pieces of bounded size.
extends_documentation_fragment:
  - connection_pipelining
  - specrig.host.ssh_options
  - specrig.host.guest_options
"""

EXAMPLES = r"""
# inventory: a guest has its host's address, and its own name
# gpu_guests:
#   hosts:
#     box1-gpu:
#       ansible_connection: specrig.host.lxc_ssh
#       ansible_host: 192.0.2.10
#       ansible_user: root
#       lxc_guest_name: gpu
#       lxc_guest_host: box1
"""

from ansible.plugins.connection.ssh import Connection as SshConnection
from ansible_collections.specrig.host.plugins.plugin_utils.guest import GuestConnection


class Connection(GuestConnection, SshConnection):
    transport = "specrig.host.lxc_ssh"
    has_tty = False
