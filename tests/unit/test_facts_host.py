"""The host's faults, each told from what the host says: driver, versions, settings, and what lies between the GPUs."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import gpusettings, look, nodes, pci, placement, probe, smi
from specrig.facts.explain import explain
from specrig.facts.text import clean
from specrig.ops import capture, inspection

BUSES = ["0000:06:00.0", "0000:07:00.0", "0000:75:00.0", "0000:76:00.0"]
HEADER = (
    "index, uuid, pci.bus_id, name, memory.total [MiB], memory.used [MiB], temperature.gpu, mig.mode.current, "
    "driver_version, gpu_recovery_action, persistence_mode, power.limit [W], power.default_limit [W], "
    "power.min_limit [W], power.max_limit [W], clocks.current.sm [MHz], clocks.max.sm [MHz]\n"
)


def row(index: int, **change: str) -> str:
    cells = {
        "index": str(index),
        "uuid": f"GPU-0000000{index}-1111-4222-8333-444444444444",
        "bus": "0000" + BUSES[index].upper(),
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "total": "97887 MiB",
        "used": "0 MiB",
        "temperature": "29",
        "mig": "Disabled",
        "driver": "595.58.03",
        "recovery": "None",
        "persistence": "Enabled",
        "power": "600.00 W",
        "default": "600.00 W",
        "least": "300.00 W",
        "most": "600.00 W",
        "clock": "180 MHz",
        "top": "3090 MHz",
    }
    return ", ".join({**cells, **change}.values()) + "\n"


def answer(out: str, rc: int | None = 0, reason: str | None = None, err: str = "") -> dict:
    return {"argv": ["nvidia-smi"], "rc": rc, "out": out, "err": err, "reason": reason}


@pytest.fixture
def raw(samples: Path) -> dict:
    """Four GPUs of one node, all well."""
    files = {
        "/proc/devices": "Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n",
        "/proc/driver/nvidia/version": (samples / "proc" / "version_01.txt").read_text(),
        "/proc/sys/kernel/osrelease": "6.8.12-4-pve\n",
        "/proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 quiet iommu=pt\n",
        "/sys/devices/system/node/node0/cpulist": "0-15\n",
    }
    for number, bus in enumerate(BUSES):
        files[f"/sys/bus/pci/devices/{bus}/numa_node"] = "0\n"
        files[f"/proc/driver/nvidia/gpus/{bus}/information"] = (
            f"Model: \t\t NVIDIA RTX PRO 6000\nGPU Firmware: \t 595.58.03\nBus Location: \t {bus}\n"
            f"Device Minor: \t {number}\n"
        )
    names = [f"GPU{number}" for number in range(4)]
    p2p = "\t" + "\t".join(names) + "\n"
    for name in names:
        p2p += name + "\t" + "\t".join("X" if other == name else "OK" for other in names) + "\n"
    return {
        "schema": 1,
        "files": files,
        "commands": {
            "smi-gpus": answer(HEADER + "".join(row(number) for number in range(4))),
            "smi-topo": answer("", reason="not asked here"),
            "smi-p2p": answer(p2p),
            "smi-apps": answer("gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"),
            "guest:gpu": answer("State:          RUNNING\nPID:            812\n"),
        },
        "nodes": [],
        "guests": {
            "gpu": {"kind": "lxc", "config": "/x", "cgroup": "0::/lxc.payload.gpu\n", "libraries": ["595.58.03"]}
        },
        "libraries": ["595.58.03"],
        "library_version": "595.58.03",
        "module_kernels": None,
        "pci": {
            "iommu": True,
            "gpus": {bus: {"group": str(number), "type": "identity"} for number, bus in enumerate(BUSES)},
            "bridges": {"0000:00:01.1": {"control": 0, "reason": None}},
        },
        "failed": {},
    }


def told(raw: dict) -> dict:
    return look.assemble(raw)


def test_a_host_that_is_well_has_nothing_to_tell(raw):
    facts = told(raw)
    assert facts["problems"] == []
    assert facts["notes"] == []
    assert facts["unknown"] == {"links": "not asked here"}
    gpu = facts["gpus"][0]
    assert (gpu["healthy"], gpu["mig"], gpu["persistence"], gpu["clock_lock_mhz"]) == (True, False, True, None)
    assert [gpu[f"power_{which}_w"] for which in ("limit", "default", "min", "max")] == [600, 600, 300, 600]
    assert (gpu["clock_sm_mhz"], gpu["clock_max_mhz"]) == (180, 3090)
    assert facts["p2p"] == dict.fromkeys(["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"], "OK")
    assert facts["pci"]["flags"] == {"iommu": "pt"}


# -- GPUs that are not to be used, and what to do about them --


def test_mig_is_said_and_the_gpu_is_left_alone(raw):
    raw["commands"]["smi-gpus"]["out"] = HEADER + row(0, mig="Enabled") + row(1) + row(2) + row(3)
    facts = told(raw)
    assert facts["notes"] == [
        "GPU 0 is in MIG mode: no profile is placed on it; 'nvidia-smi -i 0 -mig 0' and a reset give it back"
    ]
    assert placement.plan(facts, {"a": {"tp": 2}})["profiles"]["a"]["gpus"] == [1, 2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"used": "[GPU requires reset]", "temperature": "[GPU requires reset]"},
            "GPU 1: GPU requires reset: stop what runs on it, then nvidia-smi --gpu-reset -i 1, or reboot the host",
        ),
        ({"temperature": "[GPU is lost]"}, "GPU 1: GPU is lost: see dmesg for Xid and reboot the host"),
        (
            {"recovery": "Drain and Reset"},
            "GPU 1: recovery action: Drain and Reset: stop what runs on it, then nvidia-smi --gpu-reset -i 1, "
            "or reboot the host",
        ),
        ({"recovery": "Reboot"}, "GPU 1: recovery action: Reboot: see dmesg for Xid and reboot the host"),
        (
            {"temperature": "[Unknown Error]"},
            "GPU 1: Unknown Error: see dmesg for Xid; reset the GPU or reboot the host",
        ),
    ],
)
def test_a_sick_gpu_is_one_line_that_says_what_to_do(raw, change, problem):
    raw["commands"]["smi-gpus"]["out"] = HEADER + row(0) + row(1, **change) + row(2) + row(3)
    facts = told(raw)
    assert facts["problems"] == [problem]
    assert [gpu["healthy"] for gpu in facts["gpus"]] == [True, False, True, True]
    assert facts["gpus"][1]["memory_used_mib"] is None
    assert placement.plan(facts, {"a": {"tp": 3}})["profiles"]["a"]["gpus"] == [0, 2, 3]


def test_a_setting_that_a_healthy_card_does_not_have_does_not_make_it_sick(raw):
    raw["commands"]["smi-gpus"]["out"] = (
        HEADER + row(0, power="[Unknown Error]", clock="[N/A]") + row(1) + row(2) + row(3)
    )
    facts = told(raw)
    assert facts["problems"] == []
    assert [facts["gpus"][0][key] for key in ("healthy", "power_limit_w", "clock_sm_mhz")] == [True, None, None]


# -- driver --


def test_versions_that_differ_are_told_apart_by_where_they_lie(raw):
    raw["guests"]["gpu"]["libraries"] = ["590.48.01"]
    assert told(raw)["problems"] == [
        "guest gpu has the driver's libraries 590.48.01, the kernel module is 595.58.03: install the same in the "
        "guest, without a kernel module"
    ]
    raw["library_version"], raw["libraries"] = None, ["590.48.01", "595.58.03"]
    raw["guests"]["gpu"]["libraries"] = ["1.2", "3.4"]
    facts = told(raw)
    assert facts["unknown"]["library"] == "libraries of 590.48.01, 595.58.03 lie side by side"
    assert facts["unknown"]["library of guest gpu"] == "libraries of 1.2, 3.4 lie side by side"
    assert (facts["driver"]["library_version"], facts["guests"][0]["library_version"]) == (None, None)
    assert facts["problems"] == []


def test_a_kernel_without_the_module_is_named_as_such(raw):
    raw["files"]["/proc/devices"] = "Character devices:\n  1 mem\n\nBlock devices:\n"
    raw["module_kernels"] = ["6.8.12-1-pve"]
    assert told(raw)["problems"][0] == (
        "the nvidia driver is not loaded and kernel 6.8.12-4-pve has no module of it (DKMS did not build one): there "
        "is one for 6.8.12-1-pve; see 'dkms status', install this kernel's headers and run "
        "'dkms autoinstall -k 6.8.12-4-pve', or boot the other kernel"
    )
    raw["module_kernels"] = ["6.8.12-4-pve"]
    assert told(raw)["problems"][0] == "the nvidia driver is not loaded: run recover, which loads it"


@pytest.mark.parametrize(
    ("said", "facts", "words"),
    [
        ("modprobe: FATAL: Module nvidia not found", {"kernels": []}, "kernel 6.8 has no module of it (DKMS"),
        ("modprobe: ERROR: could not insert: Key was rejected by service", {"kernels": []}, "Secure Boot refuses"),
        (
            "modprobe: ERROR: could not insert: No such device",
            {"modules": ["ext4", "nouveau"]},
            "nouveau holds the GPUs",
        ),
        ("No such device", {"drivers": {"0000:06:00.0": "vfio-pci"}}, "vfio-pci holds the GPUs for a virtual machine"),
        ("No such device", {"drivers": {}}, "the PCI bus shows no NVIDIA device"),
        ("could not insert: Exec format error", {}, "run 'dkms autoinstall -k 6.8'"),
        ("modprobe did not answer within 60 s", {}, "see dmesg"),
    ],
)
def test_why_a_module_does_not_load(said, facts, words):
    line = nodes.cannot_load("nvidia", said, "6.8", **{"kernels": ["6.8"], **facts})
    assert words in line
    assert "\n" not in line
    assert line.startswith("the module nvidia does not load")


def test_blackwell_under_the_proprietary_module(raw):
    raw["files"]["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  Tue\n"
    for bus in BUSES:
        raw["files"][f"/proc/driver/nvidia/gpus/{bus}/information"] += "GPU Firmware: N/A\n"
    raw["commands"]["smi-gpus"] = answer("No devices were found\n", rc=6)
    facts = told(raw)
    assert facts["driver"]["flavor"] == "proprietary"
    assert facts["problems"] == [
        "nvidia-smi finds no GPU under the proprietary kernel module although the driver lists 4: Blackwell cards need "
        "the open kernel module; install it (nvidia-open) and reboot"
    ]
    assert len(facts["gpus"]) == 4


def test_uvm_that_is_not_loaded_is_one_line_and_not_three(raw):
    raw["files"]["/proc/devices"] = "Character devices:\n195 nvidia\n\nBlock devices:\n511 nvidia-uvm\n"
    raw["nodes"] = [{"path": "/dev/nvidia-uvm", "kind": "missing", "major": None, "minor": None}]
    assert told(raw)["problems"] == ["nvidia-uvm is not loaded: CUDA cannot start; run nvidia-modprobe -u -c 0"]


# -- the probe, with tools that misbehave --


def tool(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text("#!/bin/sh\n" + script)
    (folder / "nvidia-smi").chmod(0o755)


def alive(pid: str) -> bool:
    """Whether it still runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_tool_that_hangs_with_children_costs_one_time_limit(path):
    tool(path, f"sleep 61 & echo $! >> {path}/children; trap '' TERM; wait\n")
    began = time.monotonic()
    facts = look.assemble(probe.gather(0.3, guests=[]))
    assert time.monotonic() - began < 30  # neither a minute, nor one limit after the other for ever
    children = (path / "children").read_text().split()
    assert children
    while left := [pid for pid in children if alive(pid)]:
        assert time.monotonic() - began < 30, f"still there: {left}"
        time.sleep(0.05)
    for key in ("gpus", "links", "p2p", "processes"):
        assert facts["unknown"][key] == "nvidia-smi did not answer within 0.3 s"


def test_the_driver_s_files_are_read_with_a_time_limit(tmp_path):
    stuck = tmp_path / "stuck"
    os.mkfifo(stuck)
    began = time.monotonic()
    texts, reason = probe.guarded_texts([str(stuck)], 0.3)
    assert time.monotonic() - began < 30
    assert texts == {}
    assert reason == "the driver's files in /proc did not answer within 0.3 s"
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("==> a\nb\n\n")
    two.write_text("no end of line")
    texts, reason = probe.guarded_texts([str(one), str(two), str(tmp_path / "none")], 20)
    assert reason is None
    assert texts == {str(one): "==> a\nb\n\n", str(two): "no end of line"}


def test_every_field_that_a_driver_does_not_know_is_left_out(path):
    tool(
        path,
        """for field in gpu_recovery_action clocks.max.sm; do
  case "$*" in *$field*) echo "Field \\"$field\\" is not a valid field to query."; echo; exit 2;; esac
done
case "$*" in
  *query-gpu*persistence_mode*) echo "index, uuid, persistence_mode, power.limit [W]"
    echo "0, GPU-00000000-1111-4222-8333-444444444444, Enabled, 449.99 W";;
  *) exit 3;;
esac
""",
    )
    facts = look.assemble(probe.gather(20, guests=[]))
    assert [(gpu["persistence"], gpu["power_limit_w"]) for gpu in facts["gpus"]] == [(True, 449.99)]
    assert "gpus" not in facts["unknown"]


def test_libraries_are_told_by_their_names_and_never_outside_a_guest(tmp_path):
    inside = tmp_path / "usr/lib/x86_64-linux-gnu"
    inside.mkdir(parents=True)
    assert probe.library_versions(str(tmp_path)) == []
    (inside / "libcuda.so.590.48.01").touch()
    (inside / "libnvidia-ml.so.595.58.03").touch()
    assert probe.library_versions(str(tmp_path)) == ["590.48.01", "595.58.03"]
    (inside / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.595.58.03")
    assert probe.library_versions(str(tmp_path)) == ["595.58.03"]
    outer = tmp_path / "outer"
    (outer / "usr").mkdir(parents=True)
    (outer / "usr/lib").symlink_to(tmp_path / "usr/lib")
    assert probe.library_versions(str(outer)) == []


# -- settings that a reboot loses --


def gpus(**change) -> list[dict]:
    base = {"healthy": True, "persistence": True, "power_limit_w": 600.0, "power_min_w": 300.0, "power_max_w": 600.0}
    return [
        {"index": i, "uuid": f"GPU-{i}", "bus_id": bus, **base, "clock_lock_mhz": None, **change}
        for i, bus in enumerate(BUSES)
    ]


def test_what_was_asked_for_is_due_once_and_in_an_order_that_holds():
    want = gpusettings.wanted(True, {"all": 450, "0000:75:00.0": "400"}, [1200, 2400])
    rows, notes = gpusettings.due(want, gpus(persistence=False))
    assert notes == []
    assert [call["argv"] for call in gpusettings.commands(rows)] == [
        ["nvidia-smi", "-i", "GPU-0,GPU-1,GPU-2,GPU-3", "-pm", "1"],
        ["nvidia-smi", "-i", "GPU-0,GPU-1,GPU-3", "-pl", "450"],
        ["nvidia-smi", "-i", "GPU-2", "-pl", "400"],
        ["nvidia-smi", "-i", "GPU-0,GPU-1,GPU-2,GPU-3", "-lgc", "1200,2400"],
    ]
    done = gpus(power_limit_w=450.0, clock_lock_mhz=[1200, 2400])
    done[2]["power_limit_w"] = 400.0
    assert gpusettings.due(want, done) == ([], [])
    assert gpusettings.boot_lines(want) == [
        "smi -pm 1",
        "smi -pl 450",
        "smi -i 0000:75:00.0 -pl 400",
        "smi -lgc 1200,2400 && echo 'all 1200,2400' >>/run/specrig/gpu-clocks",
    ]


def test_nothing_asked_for_is_nothing_due():
    want = gpusettings.wanted(False, None, None)
    assert gpusettings.due(want, gpus(persistence=False)) == ([], [])
    assert gpusettings.boot_lines(want) == []
    assert gpusettings.wanted(True, {}, "") == {"persistence": True, "power": {}, "clocks": {}}


@given(st.floats(300, 600), st.floats(-0.99, 0.99))
def test_a_power_limit_that_was_rounded_is_right(asked, rounding):
    want = gpusettings.wanted(True, asked)
    cell = f"{asked + rounding:.4f} W"
    assert gpusettings.due(want, gpus(power_limit_w=smi.watts(cell))) == ([], [])
    far = gpusettings.due(want, gpus(power_limit_w=asked + (2 if asked < 450 else -2)))[0]
    assert [entry["setting"] for entry in far] == ["power_limit_w"] * 4


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((True, "much", None), "gpu_host_power_limit_w is 'much'; expected watts such as 450"),
        ((True, True, None), "expected watts"),
        ((True, -5, None), "expected watts"),
        ((True, {"first": 450}, None), "names 'first'; expected a GPU's index, bus id or UUID, or all"),
        ((True, None, [2400, 1200]), "gpu_host_lock_clocks_mhz is [2400, 1200]; expected MHz"),
        ((True, None, [1, 2, 3]), "expected MHz"),
        ((False, 450, None), "hold with persistence mode only"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_one_line(asked, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        gpusettings.wanted(*asked)
    assert "\n" not in str(refusal.value)


def test_a_power_limit_that_the_card_does_not_take_is_refused_with_its_range():
    with pytest.raises(ValueError, match="is 700 for GPU 0; expected 300 to 600 W"):
        gpusettings.due(gpusettings.wanted(True, 700), gpus())


def test_unknown_is_noted_and_not_set_and_a_gpu_that_is_gone_is_named():
    rows, notes = gpusettings.due(gpusettings.wanted(True, {"0": 450, "9": 450}), gpus(power_limit_w=None))
    assert rows == []
    assert notes == [
        "GPU 0: its power limit is not known, 450 W were asked for",
        "gpu_host_power_limit_w names GPU 9, which this host does not have",
    ]
    sick = gpus(healthy=False, power_limit_w=600.0)
    assert gpusettings.due(gpusettings.wanted(True, 450), sick) == ([], [])


def test_a_clock_lock_holds_as_long_as_nothing_speaks_against_it(raw):
    raw["files"][gpusettings.RECORD] = "all 1200,1500\n0000:06:00.0 1200,2400\n"
    raw["commands"]["smi-gpus"]["out"] = (
        HEADER + row(0) + row(1, clock="1515 MHz") + row(2, clock="2400 MHz") + row(3, persistence="Disabled")
    )
    facts = told(raw)
    assert [gpu["clock_lock_mhz"] for gpu in facts["gpus"]] == [[1200, 2400], [1200, 1500], None, None]
    assert facts["notes"] == [
        "GPU 2 runs at 2400 MHz, above its clock lock of 1500 MHz",
        "GPU 3: persistence is off, the clock lock set since boot may be lost",
    ]
    want = gpusettings.wanted(True, None, {"all": [1200, 1500], "0": [1200, 2400]})
    rows, _notes = gpusettings.due(want, facts["gpus"])
    assert [(entry["gpu"], entry["setting"]) for entry in rows] == [
        (3, "persistence"),
        (2, "lock_clocks_mhz"),
        (3, "lock_clocks_mhz"),
    ]


# -- between the GPUs --


def space(*capabilities: tuple[int, int, bytes]) -> bytes:
    """A PCI configuration space with extended capabilities (id, place, body)."""
    made = bytearray(4096)
    for number, (which, place, body) in enumerate(capabilities):
        after = capabilities[number + 1][1] if number + 1 < len(capabilities) else 0
        struct.pack_into("<I", made, place, which | 1 << 16 | after << 20)
        made[place + 4 : place + 4 + len(body)] = body
    return bytes(made)


def test_acs_is_found_wherever_it_stands_in_the_list():
    acs = struct.pack("<HH", 0x5F, 0x1D)
    assert pci.acs_control(space((0x1, 0x100, b""), (0xD, 0x148, acs))) == (0x1D, None)
    assert pci.redirects(0x1D) == ["request redirect", "completion redirect"]
    assert pci.redirects(0x01) == []
    assert pci.acs_control(space((0x1, 0x100, b""))) == (None, None)
    assert pci.acs_control(bytes(4096)) == (None, None)
    control, reason = pci.acs_control(bytes(64))
    assert control is None
    assert reason == "only 64 bytes of the configuration space can be read; that takes root on the host"


@given(st.binary(max_size=4096))
def test_any_configuration_space_is_read_to_an_end(content):
    control, reason = pci.acs_control(content)
    assert control is None or 0 <= control <= 0xFFFF
    assert reason is None or len(content) <= 256


def test_groups_and_bridges_are_read_from_sysfs(tmp_path):
    gpu = tmp_path / "sys/devices/pci0000:00/0000:00:01.1/0000:05:00.0/0000:06:00.0"
    gpu.mkdir(parents=True)
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for folder in (gpu, gpu.parent, gpu.parent.parent):
        (devices / folder.name).symlink_to(folder)
    (gpu.parent.parent / "config").write_bytes(space((0xD, 0x100, struct.pack("<HH", 0x5F, 0x1D))))
    (gpu.parent / "config").write_bytes(bytes(64))
    group = tmp_path / "sys/kernel/iommu_groups/31"
    group.mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    (gpu / "iommu_group").symlink_to(group)
    told_ = probe.pci_facts(["0000:06:00.0"], str(tmp_path))
    assert told_["iommu"] is True
    assert told_["gpus"] == {"0000:06:00.0": {"group": "31", "type": "DMA-FQ"}}
    assert told_["bridges"]["0000:00:01.1"] == {"control": 0x1D, "reason": None}
    assert "only 64 bytes" in told_["bridges"]["0000:05:00.0"]["reason"]
    nothing = probe.pci_facts(["0000:06:00.0"], str(tmp_path / "none"))
    assert nothing["iommu"] is None
    assert nothing["iommu_reason"] == "/sys/kernel/iommu_groups: No such file or directory"


def test_what_is_known_to_hang_or_slow_a_group_is_reported(raw):
    for about in raw["pci"]["gpus"].values():
        about["type"] = "DMA-FQ"
    raw["pci"]["bridges"] = {
        "0000:00:01.1": {"control": 0x1D, "reason": None},
        "0000:60:01.1": {"control": 0, "reason": None},
    }
    raw["commands"]["smi-p2p"]["out"] = raw["commands"]["smi-p2p"]["out"].replace("OK", "CNS", 1)
    iommu, acs, p2p = told(raw)["notes"]
    assert iommu.startswith(
        "IOMMU translates for GPU 0-3 (group type DMA-FQ): the first all-reduce of a tp group may hang"
    )
    assert "boot with iommu=pt" in iommu
    assert acs.startswith(
        "ACS is on (completion redirect, request redirect) at 1 bridges above the GPUs (0000:00:01.1)"
    )
    assert p2p == (
        "no peer-to-peer between GPUs of one NUMA node (0-1: the chipset does not support it): NCCL goes through host "
        "memory, slower"
    )


def test_an_iommu_that_sysfs_does_not_show_is_told_from_the_command_line(raw):
    raw["pci"] = {
        "iommu": None,
        "iommu_reason": "/sys/kernel/iommu_groups: Permission denied",
        "gpus": {},
        "bridges": {},
    }
    raw["files"]["/proc/cmdline"] = 'root=/dev/sda1 intel_iommu=on "dyndbg=file x +p" nvidia.NVreg_Reg="a b"\n'
    facts = told(raw)
    assert facts["pci"]["iommu"]["enabled"] is None
    assert facts["unknown"]["iommu"] == "/sys/kernel/iommu_groups: Permission denied"
    assert facts["unknown"]["acs"] == "no bridge above the GPUs is shown in /sys/bus/pci/devices"
    assert facts["pci"]["acs"]["redirecting"] is None
    assert facts["pci"]["flags"] == {"intel_iommu": "on", "nvidia.NVreg_Reg": "a b"}
    assert len(facts["notes"]) == 1
    assert "booted with intel_iommu=on and without iommu=pt" in facts["notes"][0]
    raw["files"]["/proc/cmdline"] = "root=/dev/sda1 intel_iommu=on iommu=pt\n"
    assert told(raw)["notes"] == []


def test_one_gpu_has_nothing_between(raw):
    for about in raw["pci"]["gpus"].values():
        about["type"] = "DMA"
    raw["commands"]["smi-gpus"]["out"] = HEADER + row(0)
    raw["files"] = {path: text for path, text in raw["files"].items() if "/gpus/" not in path or BUSES[0] in path}
    assert told(raw)["notes"] == []


# -- explain, topology, capture on all of it --


def test_explain_knows_the_new_kinds(raw):
    facts = explain("\x1b[4m" + raw["commands"]["smi-p2p"]["out"].replace("OK", "NS", 1).replace("\n", "\r\n"))
    assert facts["kind"] == "p2p"
    assert facts["problems"] == ["no peer-to-peer between 0-1: not supported"]
    facts = explain("BOOT_IMAGE=/vmlinuz root=UUID=1 amd_iommu=on pcie_acs_override=downstream\n")
    assert facts["kind"] == "kernel-cmdline"
    assert facts["flags"] == {"amd_iommu": "on", "pcie_acs_override": "downstream"}
    assert len(facts["problems"]) == 2
    facts = explain(HEADER + row(0) + row(1, mig="Enabled"))
    assert [(gpu["power_limit_w"], gpu["mig"]) for gpu in facts["gpus"]] == [(600, False), (600, True)]
    assert "power_limit_w" in inspection.facts_text(facts)


def test_explain_reads_settings_from_a_full_report_of_either_age():
    for section, key in (("GPU Power Readings", "Current Power Limit"), ("Power Readings", "Power Limit")):
        text = (
            "==============NVSMI LOG==============\nAttached GPUs : 1\nGPU 00000000:06:00.0\n"
            "    Persistence Mode : Disabled\n    Clocks\n        SM : 180 MHz\n    Max Clocks\n        SM : 3090 MHz\n"
            f"    {section}\n        {key} : 450.00 W\n        Min Power Limit : N/A\n"
        )
        gpu = explain(text)["gpus"][0]
        assert (gpu["persistence"], gpu["power_limit_w"], gpu["power_min_w"]) == (False, 450.0, None)
        assert (gpu["clock_sm_mhz"], gpu["clock_max_mhz"]) == (180, 3090)


def test_topology_shows_what_decides(raw):
    raw["commands"]["smi-gpus"]["out"] = HEADER + row(0, power="450.00 W") + row(1) + row(2) + row(3, mig="Enabled")
    raw["commands"]["smi-topo"] = answer("", reason="nvidia-smi did not answer within 5 s")
    raw["commands"]["smi-apps"] = answer("", reason="nvidia-smi did not answer within 5 s")
    text = inspection.topology_text("box", told(raw), None)
    assert "GPU 0: persistence on, power limit 450 W, clocks not locked" in text
    assert "GPUs 1-3: persistence on, power limit 600 W, clocks not locked" in text
    assert "driver: module 595.58.03 (open), library of the host 595.58.03, of guest gpu 595.58.03" in text
    assert "between GPUs: IOMMU on (identity), ACS off, peer-to-peer 6 of 6 pairs" in text
    assert "note: GPU 3 is in MIG mode" in text
    assert "unknown: links, processes: nvidia-smi did not answer within 5 s" in text


def test_a_capture_holds_all_that_a_look_is_made_of(raw, tmp_path):
    raw["files"][gpusettings.RECORD] = "GPU-00000001-1111-4222-8333-444444444444 1200,2400\n"
    raw["pci"]["bridges"]["0000:00:01.1"]["control"] = 0x1D
    before = told(raw)
    capture.write(raw, tmp_path / "it")
    again = look.assemble(capture.read(tmp_path / "it"))
    assert [gpu["clock_lock_mhz"] for gpu in again["gpus"]] == [None, [1200, 2400], None, None]
    for facts in (before, again):
        for gpu in facts["gpus"]:
            del gpu["uuid"]
    assert again == before
    assert len(again["notes"]) == 1


HEX = st.text("0123456789abcdef", min_size=12, max_size=12)


@given(HEX, st.integers(10**11, 10**13), st.sampled_from(["CUDA_VISIBLE_DEVICES=GPU-%s", "root=UUID=%s", "x %s y"]))
def test_no_serial_and_no_uuid_stays_wherever_it_stands(digits, serial, place):
    uuid = f"9{digits[:7]}-{digits[7:11]}-4abc-8abc-{digits}"
    report = f"==============NVSMI LOG==============\n    Serial Number : {serial}\n    GPU UUID : GPU-{uuid}\n"
    dirty = {
        "schema": 1,
        "commands": {
            "smi-q": answer(report),
            "csv": answer(f"index, serial, uuid\n0, 77{serial}, GPU-{uuid.upper()}\n"),
            "other": answer(place % uuid, err=f"GPU-{uuid[:8]} of board 77{serial}, {serial}"),
        },
        "files": {f"/media/{uuid}": f"{serial} {uuid}", "/proc/cmdline": place % uuid},
        "mounts": {f"/media/{uuid}": {"options": f"uid={serial}"}},
        "processes": {"7": {"visible": f"GPU-{uuid[:8]}", "title": f"run-{uuid}"}},
    }
    clean_, count = capture.redacted(dirty)
    text = json.dumps(clean_).lower()
    for secret in (uuid, uuid[:8], str(serial)):
        assert secret not in text
    assert count == 3
    assert clean_["processes"]["7"]["visible"] == "GPU-00000000-0000-4000-8000-000000000000"


def test_clean_text_is_what_parsers_of_matrices_get():
    assert pci.parse_p2p(clean("\x1b[4m\tGPU0\tGPU1\x1b[0m\r\nGPU0\tX\tOK\r\nGPU1\tDR\tX\r\n")) == {"0-1": "DR"}
    with pytest.raises(ValueError, match="not the output of nvidia-smi topo -p2p"):
        pci.parse_p2p("\tGPU0\tGPU1\n")
