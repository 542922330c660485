# SPDX-License-Identifier: Apache-2.0
"""Files of the controller: the inventory of a host that is its own controller, and a text as it stands."""

from __future__ import annotations

import json

from ansible.errors import AnsibleFilterError

_TRANSPORT = ("ansible_host", "ansible_port", "ansible_user", "ansible_password", "ansible_connection")


def local_inventory(text, host):
    """Return the inventory of one host and its guests, reached from that host itself.

    Args:
        text: what ``ansible-inventory --list`` printed.
        host: the host's inventory name.

    How the controller reached them (addresses, users, keys) is left out; every other variable stays as it is written.
    """
    try:
        listed = json.loads(text)
        hostvars = listed["_meta"]["hostvars"]
    except (ValueError, KeyError, TypeError) as error:
        raise AnsibleFilterError("local_inventory: expected the output of ansible-inventory --list") from error
    if host not in listed.get("gpu_hosts", {}).get("hosts", []):
        raise AnsibleFilterError("local_inventory: {0} is not in the group gpu_hosts".format(host))
    guests = [
        name
        for name in listed.get("gpu_guests", {}).get("hosts", [])
        if hostvars.get(name, {}).get("lxc_guest_host") == host
    ]

    def kept(name):
        values = hostvars.get(name, {})
        return {
            key: values[key] for key in sorted(values) if key not in _TRANSPORT and not key.startswith("ansible_ssh_")
        }

    return {
        "all": {
            "children": {
                "gpu_hosts": {"hosts": {host: dict(kept(host), ansible_connection="local")}},
                "gpu_guests": {
                    "hosts": {name: dict(kept(name), ansible_connection="specrig.host.lxc_local") for name in guests}
                },
            }
        }
    }


def file_text(path):
    """Return the text of a file of the controller."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError("{0} cannot be read: {1}".format(path, error)) from error


class FilterModule:
    def filters(self):
        return {"local_inventory": local_inventory, "file_text": file_text}
