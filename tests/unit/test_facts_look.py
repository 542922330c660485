"""The look: facts made of recorded texts, and the probe that brings them, with tools that fail and hang."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path

import pytest

from specrig.cli import main
from specrig.facts import look, placement, probe
from specrig.ops import capture

CGROUP = "0::/lxc.payload.gpu/system.slice/system-specrig\\x2dsglang.slice/specrig-sglang@tp4.service\n"

P2P = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tOK\n GPU1\tOK\tX\tOK\n GPU2\tOK\tOK\tX\n\nLegend:\n\n  X    = Self\n"


def answer(text: str, rc: int = 0, reason: str | None = None) -> dict:
    return {"argv": ["nvidia-smi"], "rc": rc, "out": text, "err": "", "reason": reason}


@pytest.fixture
def raw(samples: Path) -> dict:
    """The recorded box: eight GPUs, and four ranks that really run on GPUs 1-4."""
    csv = (samples / "smi" / "02_csv_index_uuid_bus_DERIVED_from_01.csv").read_text()
    rows = [line.split(", ") for line in csv.strip().split("\n")[1:]]
    files = {
        "/proc/devices": (samples / "proc" / "devices_04_uvm_234_caps_506.txt").read_text(),
        "/proc/driver/nvidia/version": (samples / "proc" / "version_01.txt").read_text(),
        "/sys/devices/system/node/node0/cpulist": "0-63,128-191\n",
        "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       792244224 kB\n",
        "/sys/devices/system/node/node1/cpulist": "64-127,192-238,240-255\n",
        "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0,128\n",
        "/sys/devices/system/cpu/cpu128/topology/thread_siblings_list": "0,128\n",
    }
    for line in (samples / "numa" / "05_sysfs_gpu_numa_map_rtxpro6000.txt").read_text().strip().split("\n"):
        path, node = line.split(" ")
        files[path] = node + "\n"
    for (_, uuid, bus, *_rest), minor in zip(rows, [2, 3, 0, 1, 6, 7, 4, 5], strict=True):
        files[f"/proc/driver/nvidia/gpus/{bus[4:].lower()}/information"] = (
            f"Model: \t\t NVIDIA RTX PRO 6000\nGPU UUID: \t {uuid}\n"
            f"Bus Location: \t {bus[4:].lower()}\nDevice Minor: \t {minor}\n"
        )
    apps = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
    processes = {}
    for place in range(4):
        apps += f"{rows[1 + place][1]}, {9000 + place}, [Not Found], 81234 MiB\n"
        processes[str(9000 + place)] = {
            "status": f"Name:\tsglang::schedul\nPid:\t{9000 + place}\nNSpid:\t{9000 + place}\t{40 + place}\n"
            "Cpus_allowed_list:\t0-255\n",
            "cgroup": CGROUP,
            "title": f"sglang::scheduler_TP{place}",
            "visible": "1,2,3,4,5",
        }
    return {
        "schema": 1,
        "files": files,
        "commands": {
            "smi-gpus": answer(csv),
            "smi-topo": answer((samples / "topo" / "01_rtxpro6000_8gpu_2numa_ansi_tabs.txt").read_text()),
            "smi-apps": answer(apps),
            "smi-p2p": answer(P2P),
            "guest:gpu": answer("State:          RUNNING\nPID:            812\n"),
        },
        "nodes": [
            {"path": "/dev/nvidia0", "kind": "char", "major": 195, "minor": 0, "mode": "0666", "uid": 0, "gid": 0},
            {"path": "/dev/nvidia-uvm", "kind": "char", "major": 234, "minor": 0, "mode": "0666", "uid": 0, "gid": 0},
        ],
        "memory_policy": {"0": {"works": True, "reason": None}, "1": {"works": False, "reason": "Invalid argument"}},
        "processes": processes,
        "guests": {
            "gpu": {"kind": "lxc", "config": "/var/lib/lxc/gpu/config", "cgroup": "0::/lxc.payload.gpu/init.scope\n"}
        },
        "mounts": {"/srv/specrig/ram": {"fstype": "tmpfs", "size_bytes": 10, "used_bytes": 5, "options": "rw"}},
        "library_version": "595.58.03",
        "pci": {
            "iommu": True,
            "gpus": {row[2][4:].lower(): {"group": "7", "type": "identity"} for row in rows},
            "bridges": {"0000:00:01.1": {"control": 0, "reason": None}},
        },
        "failed": {},
        "seconds": 0.1,
    }


def test_the_recorded_box(raw):
    facts = look.assemble(raw, simulated=True)
    assert facts["schema"] == 1
    assert facts["simulated"] is True
    assert facts["driver"] == {"module_version": "595.58.03", "library_version": "595.58.03", "flavor": "open"}
    assert facts["majors"] == {"nvidia": 195, "nvidia-uvm": 234, "nvidia-caps": 506}
    assert [g["minor"] for g in facts["gpus"]] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert [g["numa_node"] for g in facts["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert facts["gpus"][6]["bus_id"] == "0000:f4:00.0"
    assert facts["links"]["0-1"] == "PIX"
    assert [(n["node"], n["cpus"], n["memory_policy"]) for n in facts["numa"]] == [
        (0, "0-63,128-191", True),
        (1, "64-127,192-238,240-255", False),
    ]
    assert facts["numa"][0]["memory_mib"] == 773676
    assert facts["numa"][0]["siblings"] == ["0,128"]
    assert facts["guests"][0] == {
        "name": "gpu",
        "kind": "lxc",
        "config": "/var/lib/lxc/gpu/config",
        "state": "running",
        "init_pid": 812,
        "cgroup": "/lxc.payload.gpu/init.scope",
        "nodes": None,
        "library_version": None,
        "placement": {},
    }
    assert facts["unknown"] == {"memory policy of node 1": "Invalid argument"}
    assert facts["problems"] == []
    assert facts["notes"] == []


TOP = (
    "driver engines gpus guests kernel links major_names majors mounts nodes notes numa p2p pci problems processes "
    "schema seconds simulated units unknown"
)
GPU = (
    "bus_id clock_lock_mhz clock_max_mhz clock_sm_mhz healthy index memory_total_mib memory_used_mib mig minor name "
    "numa_node numa_nodes persistence power_default_w power_limit_w power_max_w power_min_w reason uuid"
)


@pytest.mark.parametrize("lost", ["nothing", "nvidia-smi", "everything"])
def test_the_schema_is_the_same_whatever_could_be_read(raw, lost):
    """Fields may be added, which this test then names; none goes, and what is unknown is null and not left out."""
    if lost != "nothing":
        raw["commands"] = {name: answer("", rc=None, reason="it hangs") for name in raw["commands"]}
    if lost == "everything":
        raw = {"schema": 1, "files": {}, "commands": raw["commands"]}
    facts = look.assemble(raw)
    assert " ".join(sorted(facts)) == TOP
    assert len(facts["gpus"]) == (0 if lost == "everything" else 8)
    assert {" ".join(sorted(gpu)) for gpu in facts["gpus"]} <= {GPU}
    assert set(facts["driver"]) == {"module_version", "library_version", "flavor"}
    assert set(facts["majors"]) == {"nvidia", "nvidia-uvm", "nvidia-caps"}
    assert bool({"gpus", "processes"} & set(facts["unknown"])) == (lost != "nothing")
    assert json.loads(json.dumps(facts)) == facts


def test_processes_are_mapped_to_gpu_guest_unit_and_profile(raw):
    ranks = look.assemble(raw)["processes"]
    assert [r["gpu_index"] for r in ranks] == [1, 2, 3, 4]
    assert ranks[0] == {
        "pid": 9000,
        "name": "sglang::scheduler_TP0",
        "gpu_index": 1,
        "bus_id": "0000:07:00.0",
        "guest": "gpu",
        "guest_pid": 40,
        "unit": "specrig-sglang@tp4.service",
        "profile": "tp4",
        "cpus_allowed": "0-255",
        "visible": "1,2,3,4,5",
        "memory_mib": 81234,
    }


def test_units_are_found_without_nvidia_smi(raw):
    raw["units"] = {"8999": CGROUP, "9000": CGROUP, "700": CGROUP.replace("tp4", "chat"), "1": "0::/init.scope\n"}
    assert look.assemble(raw)["units"] == [
        {"guest": "gpu", "unit": "specrig-sglang@chat.service", "profile": "chat", "pids": [700], "listed": False},
        {"guest": "gpu", "unit": "specrig-sglang@tp4.service", "profile": "tp4", "pids": [8999, 9000], "listed": True},
    ]


def test_the_incident_from_the_hosts_own_words(raw):
    facts = look.assemble(raw)
    planned = placement.plan(facts, {"tp4": {"tp": 4}})["profiles"]["tp4"]
    row = placement.verify(planned, facts, "tp4")
    assert row["status"] == "fail"
    assert "GPUs 1-4 (NUMA nodes 0,1)" in row["message"]
    assert "planned GPUs 0-3 (NUMA node 0)" in row["message"]


def test_a_dead_tool_is_unknown_with_its_reason_and_the_driver_still_tells(raw):
    for name in ("smi-gpus", "smi-topo", "smi-apps"):
        raw["commands"][name] = answer("", reason="nvidia-smi did not answer within 5 s")
    facts = look.assemble(raw)
    assert facts["unknown"]["gpus"] == "nvidia-smi did not answer within 5 s"
    assert facts["unknown"]["processes"] == "nvidia-smi did not answer within 5 s"
    assert [g["bus_id"] for g in facts["gpus"]][-1] == "0000:f5:00.0"
    assert [g["numa_node"] for g in facts["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {g["healthy"] for g in facts["gpus"]} == {None}
    assert {g["memory_used_mib"] for g in facts["gpus"]} == {None}
    planned = placement.plan(facts, {"tp4": {"tp": 4}})["profiles"]["tp4"]
    assert placement.verify(planned, facts, "tp4")["status"] == "unknown"


def test_an_error_on_stdout_with_exit_code_0_is_an_error(raw):
    raw["commands"]["smi-gpus"] = answer("Unable to determine the device handle for GPU0000:06:00.0: GPU is lost.\n")
    assert "GPU is lost" in look.assemble(raw)["unknown"]["gpus"]


def test_versions_that_differ(raw):
    raw["library_version"] = "595.71.05"
    assert any("595.58.03" in text and "595.71.05" in text for text in look.assemble(raw)["problems"])
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.99\n"
    raw["commands"]["smi-gpus"] = answer(said, rc=18)
    facts = look.assemble(raw)
    assert facts["driver"]["library_version"] == "595.99"
    assert "NVML library 595.99" in facts["unknown"]["gpus"]


def test_blackwell_under_the_proprietary_module_is_called_so(raw):
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  Tue Mar 17 2026\n"
    raw["files"]["/proc/driver/nvidia/version"] = version
    raw["commands"]["smi-gpus"] = answer("No devices were found\n", rc=6)
    facts = look.assemble(raw)
    assert any("need the open kernel module" in text for text in facts["problems"])


def test_uvm_not_loaded_wrong_node_and_lost_gpu(raw, samples):
    facts = copy.deepcopy(raw)
    facts["files"]["/proc/devices"] = (samples / "proc" / "devices_03_before_uvm_loaded_CONSTRUCTED.txt").read_text()
    assert "nvidia-uvm is not loaded" in look.assemble(facts)["problems"][0]
    facts = copy.deepcopy(raw)
    facts["nodes"] = [
        {"path": "/dev/nvidia-uvm", "kind": "char", "major": 511, "minor": 0},
        {"path": "/dev/nvidiactl", "kind": "file", "major": None, "minor": None},
        {"path": "/dev/nvidia0", "kind": "missing", "major": None, "minor": None},
    ]
    assert look.assemble(facts)["problems"] == [
        "/dev/nvidia-uvm has major 511, nvidia-uvm has 234 now",
        "/dev/nvidiactl is a file, expected a character device",
        "/dev/nvidia0 is missing",
    ]
    facts = copy.deepcopy(raw)
    facts["commands"]["smi-gpus"]["out"] = "\n".join(facts["commands"]["smi-gpus"]["out"].split("\n")[:8]) + "\n"
    assert look.assemble(facts)["problems"] == ["the driver has a GPU at 0000:f5:00.0 that nvidia-smi does not list"]


def test_a_vm_says_unknown(raw):
    for path in list(raw["files"]):
        if path.endswith("/numa_node"):
            raw["files"][path] = "-1\n"
    raw["commands"]["smi-topo"] = answer("", rc=1)
    facts = look.assemble(raw)
    assert {g["numa_node"] for g in facts["gpus"]} == {None}
    assert {json.dumps(g["numa_nodes"]) for g in facts["gpus"]} == {"null"}
    assert "the NUMA node of GPU 0-7 is not known" in facts["problems"]


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)


def test_a_hanging_tool_does_not_hold_the_look_up(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", "sleep 60\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    facts = look.assemble(probe.gather(0.3, guests=[]))
    assert time.monotonic() - began < 30  # not the minute that the tool sleeps
    assert facts["unknown"]["gpus"] == "nvidia-smi did not answer within 0.3 s"
    assert facts["unknown"]["processes"] == "nvidia-smi did not answer within 0.3 s"


def test_an_unknown_field_is_left_out_and_asked_again(tmp_path, monkeypatch, samples):
    csv = samples / "smi" / "02_csv_index_uuid_bus_DERIVED_from_01.csv"
    tool(
        tmp_path,
        "nvidia-smi",
        f"""case "$*" in
*mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
*query-gpu*) cat {csv};;
*) echo nothing to say >&2; exit 3;;
esac
""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = look.assemble(probe.gather(5, guests=[]))
    assert [g["index"] for g in facts["gpus"]] == list(range(8))
    assert "gpus" not in facts["unknown"]
    assert facts["unknown"]["links"] == "nvidia-smi topo ended with 3: nothing to say"


def test_a_missing_tool_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = look.assemble(probe.gather(5, guests=[]))
    assert facts["unknown"]["gpus"] == "nvidia-smi is not installed"
    assert facts["numa"], "this machine's own nodes are there without any tool"


def test_memory_policy_is_asked_of_the_kernel():
    works, reason = probe.memory_policy(0)
    assert (works is True) == (reason is None)
    works, reason = probe.memory_policy(1023)
    assert works is not True
    assert reason


def test_nodes_are_told_by_kind(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia-uvm").touch(mode=0o644)
    (tmp_path / "dev" / "nvidia0").symlink_to("/dev/null")
    rows = {row["path"]: row for row in probe.nodes_below(str(tmp_path), minors=[1])}
    assert {path: row["kind"] for path, row in rows.items()} == {
        "/dev/nvidia-uvm": "file",
        "/dev/nvidia-uvm-tools": "missing",
        "/dev/nvidia0": "link",
        "/dev/nvidia1": "missing",
        "/dev/nvidiactl": "missing",
    }
    null = probe.node_facts("/dev/null")
    assert (null["kind"], null["major"], null["minor"]) == ("char", 1, 3)


def test_a_capture_gives_the_same_look_again_without_identities(raw, tmp_path, samples, capsys):
    q = (samples / "smi" / "01_q_rtxpro6000_8gpu_minor_ne_index_excerpt.txt").read_text()
    q = q.replace("1000000000000", "1654321098765")
    raw["commands"]["smi-q"] = answer(q)
    raw["files"]["/etc/pve/lxc/101.conf"] = (
        "net0: name=eth0,hwaddr=BC:24:11:00:00:0A,ip=203.0.113.7/24,gw=203.0.113.1,ip6=fd12:3456::a/64\n"
        "lxc.environment: TOKEN=secret\n"
    )
    raw["files"]["/proc/cmdline"] = "root=UUID=0a1b2c3d-1111-2222-3333-444455556666 iommu=pt\n"
    folder = tmp_path / "captured"
    capture.write(raw, folder)
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    for secret in ("6c27d11d", "1654321098765", "BC:24:11", "203.0.113", "fd12:3456", "secret", "0a1b2c3d"):
        assert secret not in text, secret
    assert "595.58.03" in text
    assert "iommu=pt" in text
    again = look.assemble(capture.read(folder))
    before = look.assemble(raw)
    assert [p["gpu_index"] for p in again["processes"]] == [1, 2, 3, 4]
    for key in ("majors", "links", "numa", "problems", "driver", "guests", "nodes"):
        assert again[key] == before[key]
    assert len({g["uuid"] for g in again["gpus"]}) == 8
    assert main(["topology", "--from", str(folder), "--tp", "4"]) == 0
    shown = capsys.readouterr().out
    assert "NUMA node 1: GPUs 4-7, CPUs 64-127,192-238,240-255" in shown
    assert "tp4 (9000)" in shown
    assert main(["explain", str(folder / "files/proc/devices")]) == 0
    capsys.readouterr()
    assert main(["capture", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_topology_command_line(samples, tmp_path, capsys):
    odd = str(samples / "topo" / "10_5gpu_gpu0_on_numa1.txt")
    assert main(["topology", "--from", odd, "--tp", "4", "--json"]) == 0
    group = json.loads(capsys.readouterr().out)["hosts"][odd]["group"]
    assert (group["gpus"], group["numa_nodes"]) == ([1, 2, 3, 4], [0])
    assert main(["topology", "--from", odd, "--tp", "5"]) == 1
    assert "needs 5 GPUs of one NUMA node" in capsys.readouterr().out
    for bad in (
        [odd, "--tp", "0"],
        [str(tmp_path)],
        [str(tmp_path / "no")],
        [str(samples / "proc" / "version_01.txt")],
    ):
        assert main(["topology", "--from", *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
