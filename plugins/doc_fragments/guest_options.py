"""The options of a connection into a guest through its host."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  guest_name:
    description: Name of the LXC container, or its number on Proxmox VE.
    type: string
    required: true
    vars:
      - name: lxc_guest_name
  guest_attach:
    description:
      - How the host enters the guest.
      - V(lxc-attach) works for plain LXC and on Proxmox VE alike; V(pct) goes through C(pct exec).
    type: string
    choices: [lxc-attach, pct]
    default: lxc-attach
    vars:
      - name: lxc_guest_attach
  guest_sudo:
    description: Whether the host's login user needs C(sudo -n) to enter the guest.
    type: boolean
    default: false
    vars:
      - name: lxc_guest_sudo
  guest_piece_bytes:
    description: Files are copied in pieces of this size, so that a file is never in memory as a whole.
    type: integer
    default: 8388608
    vars:
      - name: lxc_guest_piece_bytes
"""
