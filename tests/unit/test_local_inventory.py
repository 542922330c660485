"""The inventory of a host that is its own controller."""

from __future__ import annotations

import json
import sys

import pytest

from specrig.ops.runner import collection_root

sys.path.insert(0, str(collection_root() / ".collections"))
from ansible.errors import AnsibleFilterError
from ansible_collections.specrig.host.plugins.filter import inventory

LISTED = {
    "_meta": {
        "hostvars": {
            "box": {"ansible_host": "192.0.2.1", "ansible_ssh_private_key_file": "/k", "model_store_size": "1G"},
            "gpu": {
                "ansible_connection": "specrig.host.lxc_ssh",
                "ansible_python_interpreter": "/usr/bin/python3",
                "lxc_guest_host": "box",
                "sglang_server_profiles": {"agent": {"tp": 2}, "chat": {"port": 1, "tp": 1}},
            },
            "far": {"lxc_guest_host": "other"},
        }
    },
    "gpu_hosts": {"hosts": ["box", "other"]},
    "gpu_guests": {"hosts": ["gpu", "far"]},
}


def test_it_is_reached_from_itself_with_its_own_guests_only():
    made = inventory.local_inventory(json.dumps(LISTED), "box")["all"]["children"]
    assert made["gpu_hosts"]["hosts"] == {"box": {"ansible_connection": "local", "model_store_size": "1G"}}
    assert list(made["gpu_guests"]["hosts"]) == ["gpu"]
    guest = made["gpu_guests"]["hosts"]["gpu"]
    assert guest["ansible_connection"] == "specrig.host.lxc_local"
    assert guest["ansible_python_interpreter"] == "/usr/bin/python3"


def test_profiles_keep_the_order_in_which_they_are_declared():
    declared = {"gpu": {"sglang_server_profiles": {"chat": {"tp": 1, "port": 1}, "agent": {"tp": 2}}}}
    made = inventory.local_inventory(json.dumps(LISTED), "box", declared)["all"]["children"]
    profiles = made["gpu_guests"]["hosts"]["gpu"]["sglang_server_profiles"]
    assert list(profiles) == ["chat", "agent"]
    assert list(profiles["chat"]) == ["tp", "port"]


@pytest.mark.parametrize(("text", "host"), [("no JSON", "box"), ("{}", "box"), (json.dumps(LISTED), "gpu")])
def test_what_is_no_inventory_is_said(text, host):
    with pytest.raises(AnsibleFilterError, match="local_inventory: "):
        inventory.local_inventory(text, host)
