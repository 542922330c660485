"""The modules host_look and guest_config as Ansible runs them, on files of this test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible.module_utils.basic")


@pytest.fixture
def guest(tmp_path: Path, samples: Path) -> dict[str, Any]:
    config = tmp_path / "config"
    config.write_bytes((samples / "pve" / "07_plain_lxc_equals_sign.conf").read_bytes())
    config.chmod(0o640)
    return {
        "name": "gpu",
        "path": str(config),
        "state_dir": str(tmp_path / "state"),
        "nodes": [
            {"path": "/dev/nvidia0", "major": 195, "minor": 0, "kind": "char"},
            {"path": "/dev/nvidia-uvm", "major": 511, "minor": 0, "kind": "char"},
        ],
        "folders": [{"source": "/srv/specrig/ram", "target": "/srv/models"}],
        "majors": {"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": None},
        "major_names": {"195": ["nvidia"], "234": ["gdrdrv"], "511": ["nvidia-uvm"]},
    }


def moved(guest: dict[str, Any], major: int) -> dict[str, Any]:
    nodes = [guest["nodes"][0], {**guest["nodes"][1], "major": major}]
    names = {**guest["major_names"], str(major): ["nvidia-uvm"]}
    del names["511"]
    return {**guest, "nodes": nodes, "majors": {**guest["majors"], "nvidia-uvm": major}, "major_names": names}


def test_check_mode_tells_exactly_what_a_run_does(run, guest):
    config = Path(guest["path"])
    before = config.read_bytes()
    told = run("guest_config", check=True, **guest)
    assert told["changed"] is True
    assert config.read_bytes() == before
    assert not Path(guest["state_dir"]).exists()
    done = run("guest_config", **guest)
    assert done["changed"] is True
    assert done["diff"] == told["diff"]
    assert config.read_text() == told["diff"]["after"]
    assert config.stat().st_mode & 0o7777 == 0o640
    assert [path.name for path in config.parent.iterdir() if path.name.startswith(".config")] == []
    again = run("guest_config", **guest)
    assert again["changed"] is False
    assert again["specrig"]["changed"] == []


def test_a_moved_major_takes_our_old_rule_with_it_and_leaves_the_others(run, guest):
    run("guest_config", **guest)
    after = run("guest_config", **moved(guest, 508))
    assert after["added"] == [["lxc.cgroup2.devices.allow", "c 508:0 rw"]]
    assert after["revoked_rules"] == ["c 511:0 rw"]
    assert after["rules"] == ["c 195:0 rw", "c 508:0 rw"]
    text = Path(guest["path"]).read_text()
    assert "511" not in text
    assert "lxc.cgroup2.devices.allow = c 234:* rwm\n" in text
    assert after["problems"] == [
        "guest gpu: rule c 234:* rwm allows a major that is not NVIDIA's (now gdrdrv)",
    ]


def test_without_a_record_a_stale_rule_is_reported_not_removed(run, guest):
    run("guest_config", **guest)
    (Path(guest["state_dir"]) / "gpu.json").unlink()
    after = run("guest_config", **moved(guest, 508))
    assert after["revoked_rules"] == []
    assert [rule["text"] for rule in after["stale"]] == ["c 234:* rwm", "c 511:0 rw"]


def test_killed_between_record_and_config_nothing_is_forgotten(run, guest):
    run("guest_config", **guest)
    state = Path(guest["state_dir"]) / "gpu.json"
    record = json.loads(state.read_text())
    record["lines"].append(["lxc.cgroup2.devices.allow", "c 508:0 rw"])
    state.write_text(json.dumps(record))
    after = run("guest_config", **guest)
    assert after["changed"] is False
    assert "508" not in state.read_text()


def test_proxmox_files_are_written_in_place(run, guest, samples):
    config = Path(guest["path"])
    config.write_bytes((samples / "pve" / "rewritten" / "a.after").read_bytes())
    inode = config.stat().st_ino
    after = run("guest_config", **{**guest, "kind": "pve"})
    assert after["written"] == "in-place"
    assert config.stat().st_ino == inode
    text = config.read_text()
    assert text.split("\n[")[1] == (samples / "pve" / "rewritten" / "a.after").read_text().split("\n[")[1]
    assert "lxc.cgroup2.devices.allow: c 511:0 rw\n" in text.split("\n[")[0]
    shorter = run("guest_config", **{**guest, "kind": "pve", "nodes": [], "folders": []})
    assert shorter["changed"] is True
    assert config.read_bytes() == (samples / "pve" / "rewritten" / "a.after").read_bytes()


def test_bytes_that_are_no_text_survive(run, guest):
    config = Path(guest["path"])
    config.write_bytes(b"# \xff\xfe caf\xe9\n")
    run("guest_config", **guest)
    assert config.read_bytes().startswith(b"# \xff\xfe caf\xe9\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/nowhere/config"}, "there is no guest gpu of kind lxc here"),
        ({"name": "../x"}, "expected the name or ID of a guest"),
        ({"nodes": [{"path": "/dev/nvidia0"}]}, "expected path, major and minor"),
        (
            {"nodes": [{"path": "/dev/nvidia0", "major": 1, "minor": 1, "kind": "file"}]},
            "is a file, not a character device",
        ),
        ({"folders": [{"source": "relative", "target": "/x"}]}, "expected source and target, absolute paths"),
    ],
)
def test_bad_input_is_one_line(run, guest, change, words):
    told = run("guest_config", **{**guest, **change})
    assert told["failed"] is True
    assert words in told["msg"]
    assert "\n" not in told["msg"]


def test_an_unreadable_record_is_said(run, guest):
    Path(guest["state_dir"]).mkdir(parents=True)
    (Path(guest["state_dir"]) / "gpu.json").write_text("{cut")
    assert "move it away" in run("guest_config", **guest)["msg"]


def test_host_look_changes_nothing_and_answers_without_any_tool(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = run("host_look", check=True, simulated=True)
    assert told["changed"] is False
    assert told["look"]["schema"] == 1
    assert told["look"]["simulated"] is True
    assert told["look"]["unknown"]["gpus"] == "nvidia-smi is not installed"
    assert run("host_look", timeout=0)["failed"] is True
