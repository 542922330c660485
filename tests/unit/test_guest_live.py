"""What a running guest calls for, nodes and units: the pure parts."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import guestconf, guestlive, guestprobe, nodes, units

basic = pytest.importorskip("ansible.module_utils.basic")
UVM = {"path": "/dev/nvidia-uvm", "major": 511, "minor": 0}
GPU = {"path": "/dev/nvidia0", "major": 195, "minor": 0}


def node(**more: Any) -> dict[str, Any]:
    return {"path": "/dev/nvidia-uvm", "kind": "char", "major": 511, "minor": 0, "mode": "0666", "errno": 0, **more}


@pytest.mark.parametrize(
    ("seen", "simulated", "status", "words"),
    [
        (node(), False, "pass", None),
        (node(errno=errno.ENXIO), True, "pass", None),
        (node(errno=errno.ENXIO), False, "fail", "has no driver behind it"),
        (node(errno=errno.EPERM), True, "fail", "no device rule allows it"),
        (node(errno=0, user_errno=errno.EACCES, mode="0660"), False, "fail", "opens for root and not for user specrig"),
        (node(major=234), False, "fail", "is device 234:0, the driver has 511:0"),
        ({"kind": "file", "mode": "0644"}, False, "fail", "is a regular file, not a device"),
        ({"kind": "missing"}, False, "fail", "is missing"),
    ],
)
def test_a_node_in_the_guest_is_judged_by_what_its_open_gives(seen, simulated, status, words):
    found, wrong = guestlive.judge_node(UVM, seen, "specrig", simulated)
    assert found == status
    assert (wrong is None) == (words is None)
    assert words is None or words in wrong


def test_the_error_of_an_open_tells_a_device_rule_from_a_mode():
    mapped = node(errno=errno.EACCES, mode="0660", uid=guestlive.NOBODY)
    assert guestlive.judge_node(UVM, mapped, "specrig", True)[1] == (
        "opens for nobody in the guest but its owner (EACCES, mode 0660, owner nobody, an id that the guest does not "
        "have)"
    )


def test_a_node_of_the_guest_s_own_is_measured_against_the_host_s():
    assert guestlive.narrow(node(mode="0600", user_errno=errno.EACCES), 0o666) == ("has mode 0600, the host's has 0666")
    # Open all the same (by a group, say), or as narrow as the host's own: showing the host's node changes nothing.
    assert guestlive.narrow(node(mode="0600", user_errno=0), 0o666) is None
    assert guestlive.narrow(node(mode="0660", user_errno=errno.EACCES), 0o660) is None


@pytest.mark.parametrize(
    ("driver", "library", "wrong"),
    [
        ("580.95.05", "580.95.05", False),
        ("580.95.05", "580.82.07", True),
        ("580.95.05", None, False),
        (None, "580.95.05", False),
    ],
)
def test_versions_have_to_be_the_same_and_unknown_is_not_wrong(driver, library, wrong):
    said = guestlive.versions(driver, library)
    assert (said is not None) is wrong
    assert said is None or "install 580.95.05 in the guest" in said


def test_what_opens_nodes_that_are_too_narrow_depends_on_the_guest():
    rows = [node(user_errno=errno.EACCES)]
    assert guestlive.mode_hint([node()], False, True) is None
    assert guestlive.mode_hint(rows, True, True) == 'set gpu_host_node_mode "0666" on the host'
    assert "devN lines with mode=0666" in str(guestlive.mode_hint(rows, False, True))
    assert "devN" not in str(guestlive.mode_hint(rows, False, False))


def test_leftovers_are_what_neither_we_nor_the_config_call_for():
    permitted = {(511, 0), (195, 0), (510, 0), (510, 1), (226, 0), (508, 3)}
    assert guestlive.excess(permitted, [UVM, GPU], ["c 226:* rwm", "c 508:* r"]) == [(508, 3), (510, 0), (510, 1)]
    assert guestlive.excess(permitted, [UVM, GPU], ["a"]) == []


def test_another_guest_s_gpus_are_asked_for_and_named_one_by_one():
    withheld = [{"path": "/dev/nvidia1", "major": 195, "minor": 1}]
    pairs = guestlive.probe_list([GPU, UVM], (), withheld)
    assert (195, 1) in pairs
    assert (195, guestlive.WILD_MINOR) in pairs
    assert (195, 1) not in guestlive.probe_list([GPU, UVM])
    left = guestlive.excess({(195, 0), (195, 1), (510, 3), (511, 0)}, [GPU, UVM], [])
    assert guestlive.named(left, [GPU, UVM]) == ["device 195:1", "major 510"]
    assert guestlive.named([(195, 1), (195, guestlive.WILD_MINOR)], [GPU]) == ["major 195"]


def test_a_guest_that_may_open_everything_has_no_leftovers():
    everything = set(guestlive.probe_list([UVM]))
    assert guestlive.excess(everything, [UVM], []) is None


def test_a_rule_is_revoked_with_the_text_that_granted_it_first():
    wild = guestlive.WILD_MINOR
    assert guestlive.revoke_texts(510, [(510, 0), (510, wild)], ["c 510:* rwm", "c 509:* rwm"])[0] == "c 510:* rwm"
    texts = guestlive.revoke_texts(510, [(510, 0)], ["c 510:0 rw"])
    assert texts == ["c 510:0 rw", "c 510:0 rwm"]
    assert guestlive.revoke_texts(510, [(510, 0), (510, wild)], [])[:2] == ["c 510:* rwm", "c 510:* rw"]


@given(st.integers(1, 4095), st.integers(0, 1048575))
def test_what_is_granted_first_covers_the_node_and_nothing_else(major, minor):
    text = guestlive.grant_texts({"major": major, "minor": minor})[0]
    rule = guestconf.rule(text)
    assert guestlive.covered((major, minor), [rule])
    assert not guestlive.covered((major, (minor + 1) % 1048576), [rule])
    assert not guestlive.covered((major + 1, minor), [rule])


def test_the_probe_asks_for_every_dynamic_major_and_for_what_the_config_named():
    pairs = guestlive.probe_list([GPU], ["c 333:* rwm", "a"])
    assert (195, 0) in pairs
    assert (333, guestlive.WILD_MINOR) in pairs
    assert {major for major, _minor in pairs} >= set(range(384, 512)) | set(range(234, 255))


def test_the_probe_that_is_sent_is_a_program(capsys, monkeypatch, tmp_path):
    regular = tmp_path / "nvidia-uvm"
    regular.write_text("")
    ask = {"nodes": [str(regular), "/dev/null", "/dev/no"], "rules": [], "folders": [str(tmp_path)], "user": ""}
    monkeypatch.setattr(sys, "argv", ["probe", json.dumps(ask)])
    exec(compile(guestprobe.SOURCE, "probe", "exec"), {"__name__": "probe"})
    seen = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in seen["nodes"]] == ["file", "char", "missing"]
    assert (seen["nodes"][1]["major"], seen["nodes"][1]["minor"], seen["nodes"][1]["errno"]) == (1, 3, 0)
    assert seen["folders"][0]["device"] == tmp_path.stat().st_dev


def test_the_nodes_follow_from_the_drivers_numbers_alone():
    majors = {"nvidia": 195, "nvidia-uvm": 508, "nvidia-caps": None}
    assert [(row["path"], row["major"], row["minor"]) for row in nodes.wanted(majors, [2, 0])] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia0", 195, 0),
        ("/dev/nvidia2", 195, 2),
        ("/dev/nvidia-uvm", 508, 0),
        ("/dev/nvidia-uvm-tools", 508, 1),
    ]
    # No number is made up for a driver that is not loaded.
    assert nodes.wanted({"nvidia": None, "nvidia-uvm": None}, [0]) == []


def test_a_mode_has_to_include_what_the_user_needs():
    assert nodes.fault(UVM, node(mode="0666"), "0666") is None
    assert nodes.fault(UVM, node(mode="0777"), "0666") is None
    assert nodes.fault(UVM, node(mode="0660"), "0666") == "has mode 0660, the service user needs 0666"


@pytest.mark.parametrize(
    ("path", "name"),
    # As systemd-escape --path of systemd 252 prints them.
    [
        ("/srv/specrig/ram", "srv-specrig-ram"),
        ("/", "-"),
        ("/srv/a-b/.c d", "srv-a\\x2db-.c\\x20d"),
        ("//srv//x/", "srv-x"),
        ("/.x/é", "\\x2ex-\\xc3\\xa9"),
    ],
)
def test_unit_names_are_escaped_as_systemd_does(path, name):
    assert units.escape_path(path) == name


@pytest.mark.parametrize("path", ["srv/x", "", "/srv/../etc"])
def test_a_path_that_names_no_unit_is_refused(path):
    with pytest.raises(ValueError, match="is no absolute path"):
        units.escape_path(path)


# The module driver_nodes, on a /dev and a /proc of this test.


class Box:
    """Stands for the host's driver: what its programs do to the majors and nodes."""

    def __init__(self, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.majors: dict[str, int | None] = {"nvidia": 195, "nvidia-uvm": None, "nvidia-caps": None}
        self.calls: list[str] = []
        monkeypatch.setattr(module, "read_majors", lambda: dict(self.majors))
        monkeypatch.setattr(module, "read_minors", lambda _timeout: ([0], None))
        monkeypatch.setattr(module.Driver, "load", lambda driver, name: self.load(name))
        monkeypatch.setattr(module.Driver, "make", lambda driver, minors: self.calls.append("make"))
        self.seen: dict[str, dict[str, Any]] = {}
        monkeypatch.setattr(module, "see", lambda path: self.seen.get(path, {"path": path, "kind": "missing"}))
        monkeypatch.setattr(module.os, "mknod", self.mknod)
        monkeypatch.setattr(module.os, "chmod", lambda path, mode: self.seen[path].update(mode=f"{mode:04o}"))
        monkeypatch.setattr(module.os, "unlink", lambda path: self.seen.pop(path))
        self.os = module.os
        self.problem: str | None = None

    def load(self, name: str) -> str | None:
        self.calls.append(name)
        if self.problem is None:
            self.majors[name] = 508
        return self.problem

    def mknod(self, path: str, mode: int, device: int) -> None:
        # The umask takes the group's and others' right to write.
        row = {"path": path, "kind": "char", "mode": f"{mode & 0o755:04o}"}
        self.seen[path] = {**row, "major": self.os.major(device), "minor": self.os.minor(device)}


@pytest.fixture
def driver(tmp_path, repository, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.driver_nodes")
    box = Box(module, tmp_path, monkeypatch)

    def call(check: bool = False, **more: Any) -> dict[str, Any]:
        arguments = {"ANSIBLE_MODULE_ARGS": {**more, "_ansible_check_mode": check}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return call, box


def test_a_check_of_an_unloaded_driver_calls_its_nodes_unknown(driver):
    call, box = driver
    done = call(check=True)
    assert done["changed"] is True
    assert "would load nvidia-uvm; its major and nodes are unknown until loaded" in done["specrig"]["changed"]
    assert done["majors"]["nvidia-uvm"] is None
    assert box.calls == []
    assert box.seen == {}


def test_the_driver_is_loaded_and_its_nodes_are_made_whatever_the_umask(driver):
    call, box = driver
    done = call()
    assert done["changed"] is True
    assert box.calls[0] == "nvidia-uvm"
    assert box.seen["/dev/nvidia-uvm"] == {
        "path": "/dev/nvidia-uvm",
        "kind": "char",
        "major": 508,
        "minor": 0,
        "mode": "0666",
    }
    again = call()
    assert again["changed"] is False
    assert again["nodes"] == done["nodes"]


def test_a_file_in_a_nodes_place_is_replaced(driver):
    call, box = driver
    call()
    box.seen["/dev/nvidia0"] = {"path": "/dev/nvidia0", "kind": "file", "mode": "0644"}
    done = call()
    assert "/dev/nvidia0 on the host is a regular file, not a device" in done["specrig"]["found"]
    assert box.seen["/dev/nvidia0"]["kind"] == "char"


def test_a_kernel_without_the_module_is_named(driver):
    call, box = driver
    box.problem = "modprobe: FATAL: Module nvidia-uvm not found in directory /lib/modules/6.8.0"
    done = call()
    assert done["failed"] is True
    assert "the module nvidia-uvm does not load: kernel" in done["msg"]
    assert "see 'dkms status'" in done["msg"]
    assert "\n" not in done["msg"]


def test_a_mode_that_is_none_is_refused(driver):
    call, _box = driver
    assert "is no octal mode" in call(mode="rw-rw-rw-")["msg"]
