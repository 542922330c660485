# SPDX-License-Identifier: Apache-2.0
"""Files of the controller: the inventory of a host that is its own controller, and a text as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml
from ansible.errors import AnsibleFilterError

_TRANSPORT = ("ansible_host", "ansible_port", "ansible_user", "ansible_password", "ansible_connection")


def _in_order(value, like):
    """Return a value with the keys of its mappings in the order that they have in a like value."""
    if isinstance(value, dict) and isinstance(like, Mapping):
        places = {key: place for place, key in enumerate(like)}
        keys = sorted(value, key=lambda key: places.get(key, len(places)))
        return {key: _in_order(value[key], like.get(key)) for key in keys}
    return value


def local_inventory(text, host, declared=None):
    """Return the inventory of one host and its guests, reached from that host itself.

    Args:
        text: what ``ansible-inventory --list`` printed.
        host: the host's inventory name.
        declared: the hostvars of the play. ansible-inventory sorts all keys, but the order in which profiles are
            declared decides where they are placed: it is taken from here.

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
        like = _raw(declared, name)
        return {
            key: _in_order(values[key], like.get(key))
            for key in sorted(values)
            if key not in _TRANSPORT and not key.startswith("ansible_ssh_")
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


def _raw(declared, name):
    """Return a host's variables as they are written, without evaluating what else is in them."""
    if declared is None or name not in declared:
        return {}
    return declared.raw_get(name) if hasattr(declared, "raw_get") else declared[name]


def file_text(path):
    """Return the text of a file of the controller."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise AnsibleFilterError("{0} cannot be read: {1}".format(path, error)) from error


def sweep_files(text):
    """Return the names of the files that a sweep reads besides itself: prompts and traces, relative to its folder."""
    try:
        sweep = yaml.safe_load(text)
        named = [workload.get(key) for workload in sweep["workloads"] for key in ("prompts", "trace")]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []  # who reads the sweep for what it is says what is wrong with it
    names = sorted({name for name in named if isinstance(name, str) and name.endswith((".jsonl", ".csv"))})
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise AnsibleFilterError("{0}: the files of a sweep have to lie in its folder or below it".format(name))
    return names


class FilterModule:
    def filters(self):
        return {"local_inventory": local_inventory, "file_text": file_text, "sweep_files": sweep_files}
