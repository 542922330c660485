"""``specrig explain`` on every recorded file, and on files as they come: other line ends, colours, garbage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrig.cli import main
from specrig.facts.explain import NotRecognised, explain

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
FILES = sorted(
    path.relative_to(SAMPLES).as_posix()
    for folder in ("topo", "smi", "proc", "pve", "numa")
    for path in (SAMPLES / folder).rglob("*")
    if path.is_file()
)
KINDS = {
    "topo/": "topo",
    "numa/": "numa",
    "pve/": "guest-config",
    "proc/devices": "proc-devices",
    "proc/ls_": "dev-listing",
    "proc/version": "driver-version",
    "proc/gpus": "gpu-information",
    "smi/01": "smi-q",
    "smi/08": "smi-list",
    "smi/": "smi-csv",
}


def kind_of(name: str) -> str:
    return next(kind for start, kind in KINDS.items() if name.startswith(start))


def told(name: str) -> dict:
    return explain((SAMPLES / name).read_text(), name)


@pytest.mark.parametrize("name", FILES)
def test_every_sample_is_recognised_whatever_its_line_ends(name):
    text = (SAMPLES / name).read_text()
    facts = explain(text, name)
    assert facts["kind"] == kind_of(name)
    assert explain(text.replace("\n", "\r\n"), name) == facts
    assert explain("\ufeff" + text, name) == facts
    assert explain("\x1b[1m" + text.replace("\n", "\x1b[0m\n", 1), name) == facts


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_expected_answers(name):
    facts, right = told(name), EXPECTED[name]
    gpus = {str(gpu["index"]): gpu for gpu in facts.get("gpus", [])}
    checked = 0
    if "gpus" in right:
        assert len(gpus) == right["gpus"]
    if "numa" in right:
        assert {index: gpu["numa_nodes"] for index, gpu in gpus.items()} == right["numa"]
        checked += 1
    if "nics" in right:
        assert facts["nics"] == right["nics"]
    for index, cpus in right.get("cpus", {}).items():
        assert gpus[index]["cpus"] == cpus
    for index, cpu in right.get("cpus_first", {}).items():
        assert gpus[index]["cpus"].split(",")[0] == str(cpu)
    for index, node in right.get("gpu_numa_id", {}).items():
        assert gpus[index]["gpu_numa_id"] == node
    if "index_to_minor" in right:
        assert {index: gpu["minor"] for index, gpu in gpus.items()} == right["index_to_minor"]
        assert {index: gpu["bus_id"] for index, gpu in gpus.items()} == right["index_to_bus"]
        checked += 1
    if "uvm" in right:
        assert facts["majors"] == {
            "nvidia": right["nvidia_major"],
            "nvidia-uvm": right["uvm"],
            "nvidia-caps": right["caps"],
        }
        checked += 1
    for driver in ("nvlink", "nvswitch"):
        if driver in right:
            assert facts["other_nvidia"]["nvidia-" + driver] == right[driver]
    assert checked, "this sample's answer was not compared with anything"


def test_all_is_well_has_no_problems():
    for name in (
        "topo/01_rtxpro6000_8gpu_2numa_ansi_tabs.txt",
        "pve/08_dev_entries.lines",
        "numa/02_lscpu_numa_lines_epyc9575f.txt",
        "proc/devices_01_full_frontend_gdrcopy.txt",
        "pve/01_two_snapshots_pve_testsuite.conf",
    ):
        assert told(name)["problems"] == []


def test_guest_configs():
    plain = told("pve/07_plain_lxc_equals_sign.conf")
    assert plain["style"] == "lxc"
    assert [(rule["text"], rule["major"], rule["stale"]) for rule in plain["device_rules"]] == [
        ("c 195:* rwm", 195, None),
        ("c 234:* rwm", 234, None),
    ]
    assert plain["problems"] == ["GPUs are handed over without /dev/nvidia-uvm: CUDA cannot start"]
    landed = told("pve/02_lines_landed_in_first_snapshot.conf")
    assert landed["style"] == "pve"
    assert landed["sections"] == ["fresh", "tailscale"]
    assert landed["device_rules"] == []
    assert len(landed["problems"]) == 2
    source = told("pve/05_role_readme_major_mismatch_and_bad_source.lines")
    assert len(source["problems"]) == 1
    assert "no leading slash" in source["problems"][0]
    v1 = explain("lxc.cgroup.devices.allow = c 195:* rwm\n")
    assert v1["v1_keys"] == ["lxc.cgroup.devices.allow = c 195:* rwm"]
    assert "no effect on cgroup v2" in v1["problems"][0]


def test_a_failure_of_the_tool_is_a_problem_not_an_empty_box():
    facts = explain("No devices were found\n")
    assert facts["problems"] == ["No devices were found"]


def test_facts_that_a_file_does_not_hold_are_null():
    gpu = told("topo/01_rtxpro6000_8gpu_2numa_ansi_tabs.txt")["gpus"][0]
    assert [gpu[key] for key in ("bus_id", "minor", "uuid", "memory_used_mib", "healthy")] == [None] * 5
    gpu = told("smi/02_csv_index_uuid_bus_DERIVED_from_01.csv")["gpus"][0]
    assert gpu["memory_used_mib"] == 0
    assert [gpu[key] for key in ("numa_nodes", "minor", "healthy", "mig")] == [None] * 4


@pytest.mark.parametrize("garbage", ["", "\n \n", "hello\nworld\n", "{}", "a: b\n", "\x00\x01", "GPU0\n", "1,2,3\n"])
def test_garbage_is_refused_in_one_line(garbage):
    with pytest.raises(NotRecognised) as refusal:
        explain(garbage, "x.txt")
    assert str(refusal.value).startswith("x.txt: ")
    assert "expected" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_command_line(tmp_path, capsys):
    assert main(["explain", str(SAMPLES / "proc" / "devices_04_uvm_234_caps_506.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["majors"]["nvidia-uvm"] == 234
    assert main(["explain", str(SAMPLES / "smi" / "06_csv_gpu_requires_reset.csv")]) == 0
    assert "problem: GPU 0: GPU requires reset" in capsys.readouterr().out
    bad = tmp_path / "bad"
    bad.write_bytes(bytes(range(256)))
    for source in (bad, tmp_path / "missing", tmp_path):
        assert main(["explain", str(source)]) == 2
        seen = capsys.readouterr()
        assert seen.out == ""
        assert seen.err.count("\n") == 1
    wide = tmp_path / "wide.txt"
    wide.write_bytes((SAMPLES / "topo" / "10_5gpu_gpu0_on_numa1.txt").read_text().encode("utf-16"))
    assert main(["explain", str(wide), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["numa_nodes"] == [1]
