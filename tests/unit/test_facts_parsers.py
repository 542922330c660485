"""The parsers of recorded output, against values read off the recordings by eye."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import cpulist, numa, procfs, smi, text, topo

NUMBERS = st.sets(st.integers(0, 5000), max_size=60)


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("0 1 2\n", [0, 1, 2]),
        ("0-0,8-8,16-16", [0, 8, 16]),
        ("0-11:2/4", [0, 1, 4, 5, 8, 9]),
        ("", []),
        ("  \n", []),
    ],
)
def test_cpulist_reads_the_ways_lists_are_written(written, numbers):
    assert cpulist.parse(written) == numbers


@pytest.mark.parametrize("written", ["3-1", "a", "0-", "-1", "1;2", "0-99999999", "0-3:0/2", "0-3:3/2"])
def test_cpulist_refuses_what_is_no_list(written):
    with pytest.raises(ValueError, match="not a CPU list"):
        cpulist.parse(written)


def test_cpulist_writes_the_shortest_form():
    assert cpulist.format([128, 1, 0, 2, 129, 7, 7]) == "0-2,7,128-129"
    assert cpulist.format([]) == ""


@given(NUMBERS)
def test_cpulist_survives_the_round_trip(numbers):
    assert cpulist.parse(cpulist.format(numbers)) == sorted(numbers)


@pytest.mark.parametrize(
    ("written", "sysfs"),
    [
        ("00000000:F4:00.0", "0000:f4:00.0"),
        ("0000:06:00.0", "0000:06:00.0"),
        ("06:00.0", "0000:06:00.0"),
        ("00010000:01:00.1", "10000:01:00.1"),
        ("GPU0", None),
        ("", None),
        (None, None),
    ],
)
def test_bus_id_has_one_form(written, sysfs):
    assert text.bus_id(written) == sysfs


def test_topo_of_the_target_box(samples: Path):
    facts = topo.parse((samples / "topo" / "01_rtxpro6000_8gpu_2numa_ansi_tabs.txt").read_text())
    assert [g["numa_nodes"] for g in facts["gpus"]] == [[0]] * 4 + [[1]] * 4
    assert facts["links"]["0-1"] == "PIX"
    assert facts["links"]["1-2"] == "NODE"
    assert facts["links"]["3-4"] == "SYS"
    assert len(facts["links"]) == 28
    assert facts["problems"] == []


def test_topo_link_words_do_not_tell_the_node(samples: Path):
    facts = topo.parse((samples / "topo" / "02_rtx4090_8gpu_2nic_allsys_tabs.txt").read_text())
    assert set(facts["links"].values()) == {"SYS"}
    assert [g["numa_nodes"] for g in facts["gpus"]] == [[0]] * 4 + [[1]] * 4
    assert facts["nics"] == 2


def test_topo_keeps_list_affinities_and_the_gpus_own_node(samples: Path):
    facts = topo.parse((samples / "topo" / "05_gb200_4gpu_8nic_gpu_numa_id.txt").read_text())
    assert facts["gpus"][0]["numa_nodes"] == [0, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17]
    assert [g["gpu_numa_id"] for g in facts["gpus"]] == [2, 10, 18, 26]
    assert facts["links"]["0-3"] == "NV18"
    assert facts["nics"] == 8


def test_topo_without_the_column_or_with_na_is_unknown_not_zero(samples: Path):
    power = topo.parse((samples / "topo" / "07_power8_4gpu_SOC_no_numa_column.txt").read_text())
    assert [g["numa_nodes"] for g in power["gpus"]] == [None] * 4
    assert power["gpus"][2]["cpus"] == "80,88,96,104,112,120,128,136,144,152"
    vm = topo.parse((samples / "topo" / "08_vm_1gpu_numa_NA_tabs.txt").read_text())
    assert vm["gpus"] == [{"index": 0, "numa_nodes": None, "cpus": "0-7", "gpu_numa_id": None}]


def test_topo_an_empty_cell_does_not_shift_the_others():
    text_ = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t1\t\tN/A\n"
    assert topo.parse(text_)["gpus"] == [{"index": 0, "numa_nodes": [1], "cpus": None, "gpu_numa_id": None}]


def test_topo_cut_off_names_the_rows(samples: Path):
    whole = (samples / "topo" / "10_5gpu_gpu0_on_numa1.txt").read_text().split("\n")
    cut = "\n".join([*whole[:3], whole[3][:20]])
    facts = topo.parse(cut)
    assert [g["numa_nodes"] for g in facts["gpus"]] == [[1], [0], None]
    assert any("row of GPU 2 is cut off" in problem for problem in facts["problems"])
    assert any("GPUs 3-4, but they have no row" in problem for problem in facts["problems"])


def test_smi_q_minor_is_not_the_index(samples: Path):
    facts = smi.parse_q((samples / "smi" / "01_q_rtxpro6000_8gpu_minor_ne_index_excerpt.txt").read_text())
    assert [g["minor"] for g in facts["gpus"]] == [2, 3, 0, 1, 6, 7, 4, 5]
    assert facts["gpus"][6]["bus_id"] == "0000:f4:00.0"
    assert facts["gpus"][0]["memory_total_mib"] == 97887
    assert {g["healthy"] for g in facts["gpus"]} == {True}
    assert {g["mig"] for g in facts["gpus"]} == {False}
    assert facts["driver_version"] == "595.58.03"


def test_smi_q_a_recovery_action_is_a_sick_gpu_without_memory():
    text_ = (
        "==============NVSMI LOG==============\nAttached GPUs : 2\nGPU 00000000:06:00.0\n"
        "    GPU Recovery Action : Reset\n    FB Memory Usage\n        Used : 0 MiB\n"
    )
    facts = smi.parse_q(text_)
    assert facts["gpus"][0]["healthy"] is False
    assert facts["gpus"][0]["memory_used_mib"] is None
    assert "2 GPUs are attached, the text holds 1" in facts["problems"]


def test_smi_csv_requires_reset_is_not_zero_memory(samples: Path):
    gpus, problems = smi.gpus_of_csv(smi.parse_csv((samples / "smi" / "06_csv_gpu_requires_reset.csv").read_text()))
    assert gpus[0]["healthy"] is False
    assert gpus[0]["memory_used_mib"] is None
    assert problems == [
        "GPU 0: GPU requires reset: stop what runs on it, then nvidia-smi --gpu-reset -i 0, or reboot the host"
    ]


def test_smi_csv_na_is_unknown(samples: Path):
    gpus, _ = smi.gpus_of_csv(smi.parse_csv((samples / "smi" / "05_csv_NA_mig_mode.csv").read_text()))
    assert [g["mig"] for g in gpus] == [None] * 4
    assert [g["memory_total_mib"] for g in gpus] == [16376] * 4
    assert [g["bus_id"] for g in gpus] == [None] * 4


def test_smi_compute_apps_as_recorded(samples: Path):
    text_ = (samples / "sglang" / "constructed_nvidia_smi_compute_apps.csv").read_text()
    parsed = smi.parse_csv(text_, ["gpu_uuid", "pid", "process_name", "used_memory"])
    rows = smi.processes_of_csv(parsed)
    assert [(row["pid"], row["name"]) for row in rows] == [(4310, "sglang::scheduler_TP0"), (918273, None)]
    assert rows[0]["memory_mib"] == 81234


def test_smi_csv_a_comma_in_a_process_name_stays_in_it():
    text_ = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 7, python a, b, 100 MiB\nGPU-2, 8\n"
    parsed = smi.parse_csv(text_)
    assert parsed["rows"][0]["process_name"] == "python a, b"
    assert smi.processes_of_csv(parsed)[0]["memory_mib"] == 100
    assert parsed["problems"] == ["a line has 2 of 4 cells: 'GPU-2, 8'"]


def test_smi_list(samples: Path):
    facts = smi.parse_list((samples / "smi" / "08_L_mixed.txt").read_text())
    assert [g["name"] for g in facts["gpus"]] == ["NVIDIA A10", "NVIDIA A10", "Tesla T4", "Tesla T4"]
    assert facts["gpus"][2]["uuid"] == "GPU-00000000-0000-4000-8000-000000000012"
    sliced = "GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.5gb     Device  0: (UUID: MIG-2)\n"
    assert smi.parse_list(sliced)["gpus"][0]["mig"] is True


@pytest.mark.parametrize(
    "said",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.58",
        "No devices were found",
        'Field "nope" is not a valid field to query.',
        "Unable to determine the device handle for GPU0000:06:00.0: GPU is lost.",
    ],
)
def test_smi_failures_printed_on_stdout_are_failures(said):
    assert smi.failure(said) is not None
    with pytest.raises(ValueError, match=r".+"):
        smi.parse_csv(said)


def test_smi_library_version_is_named_by_the_mismatch():
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.58"
    assert smi.library_version(said) == "595.58"
    assert smi.library_version("nothing of the kind") is None


def test_proc_devices_only_the_character_section_counts(samples: Path):
    folder = samples / "proc"
    first = procfs.parse_devices((folder / "devices_01_full_frontend_gdrcopy.txt").read_text())
    assert first == {"nvidia": 195, "nvidia-uvm": 510, "nvidia-caps": 235}
    early = procfs.parse_devices((folder / "devices_03_before_uvm_loaded_CONSTRUCTED.txt").read_text())
    assert early == {"nvidia": 195, "nvidia-uvm": None, "nvidia-caps": 240}
    other = procfs.parse_devices((folder / "devices_04_uvm_234_caps_506.txt").read_text())
    assert other == {"nvidia": 195, "nvidia-uvm": 234, "nvidia-caps": 506}
    trap = "Character devices:\n195 nvidia\n\nBlock devices:\n511 nvidia-uvm\n"
    assert procfs.parse_devices(trap)["nvidia-uvm"] is None


def test_driver_version_and_flavor(samples: Path):
    facts = procfs.parse_version((samples / "proc" / "version_01.txt").read_text())
    assert facts == {"module_version": "595.58.03", "flavor": "open"}
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    assert procfs.parse_version(closed) == {"module_version": "535.183.01", "flavor": "proprietary"}


def test_gpu_information(samples: Path):
    facts = procfs.parse_information((samples / "proc" / "gpus_information_01_a10g.txt").read_text())
    assert (facts["bus_id"], facts["minor"], facts["name"]) == ("0000:00:1e.0", 3, "NVIDIA A10G")


def test_listing_of_dev(samples: Path):
    nodes = procfs.parse_ls((samples / "proc" / "ls_dev_nvidia_01_host_pve.txt").read_text())
    assert [(n["path"], n["major"], n["minor"], n["mode"]) for n in nodes] == [
        ("/dev/nvidia0", 195, 0, "0666"),
        ("/dev/nvidiactl", 195, 255, "0666"),
        ("/dev/nvidia-modeset", 195, 254, "0666"),
        ("/dev/nvidia-uvm", 511, 0, "0666"),
        ("/dev/nvidia-uvm-tools", 511, 1, "0666"),
    ]


@pytest.mark.parametrize(
    ("cgroup", "where"),
    [
        (
            "0::/lxc.payload.gpu/system.slice/system-specrig\\x2dsglang.slice/specrig-sglang@tp4.service",
            ("gpu", "specrig-sglang@tp4.service", "tp4"),
        ),
        ("0::/lxc/101/ns/system.slice/specrig-sglang@a.service", ("101", "specrig-sglang@a.service", "a")),
        ("0::/a.slice/specrig-sglang@a\\x2db.service", (None, "specrig-sglang@a\\x2db.service", "a-b")),
        ("0::/lxc.payload.gpu/init.scope", ("gpu", None, None)),
        ("12:pids:/x\n0::/../lxc.payload.other/user.slice/session-3.scope", ("other", "session-3.scope", None)),
        ("", (None, None, None)),
    ],
)
def test_cgroup_names_guest_unit_and_profile(cgroup, where):
    facts = procfs.parse_cgroup(cgroup)
    assert (facts["guest"], facts["unit"], facts["profile"]) == where


def test_status_of_a_process():
    status = (
        "Name:\tsglang::schedul\nState:\tS (sleeping)\nPid:\t918273\nPPid:\t918001\nUid:\t999\t999\t999\t999\n"
        "NSpid:\t918273\t4310\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\n"
    )
    assert procfs.parse_status(status) == {
        "name": "sglang::schedul",
        "state": "S",
        "pid": 918273,
        "ppid": 918001,
        "uid": 999,
        "guest_pid": 4310,
        "cpus_allowed": "0-3",
        "mems_allowed": "0-1",
    }
    assert procfs.parse_status("Pid:\t7\nNSpid:\t7\n")["guest_pid"] is None


def test_numactl_lscpu_and_sysfs_of_the_target_box(samples: Path):
    folder = samples / "numa"
    told = numa.parse((folder / "01_numactl_H_epyc9575f_offline_cpu239.txt").read_text())
    assert [n["cpus"] for n in told["numa"]] == ["0-63,128-191", "64-127,192-238,240-255"]
    assert [n["memory_mib"] for n in told["numa"]] == [773676, 774030]
    told = numa.parse((folder / "02_lscpu_numa_lines_epyc9575f.txt").read_text())
    assert [n["cpus"] for n in told["numa"]] == ["0-63,128-191", "64-127,192-238,240-255"]
    assert told["offline_cpus"] == "239"
    told = numa.parse((folder / "05_sysfs_gpu_numa_map_rtxpro6000.txt").read_text())
    assert [g["numa_node"] for g in told["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_numa_in_another_language_and_odd_nodes():
    german = "NUMA-Knoten:  2\nNUMA-Knoten0 CPU(s):   0-3\nNUMA-Knoten1 CPU(s):\n"
    assert [(n["node"], n["cpu_list"]) for n in numa.parse(german)["numa"]] == [(0, [0, 1, 2, 3]), (1, [])]
    unknown = numa.parse("/sys/bus/pci/devices/0000:06:00.0/numa_node -1\n")
    assert unknown["gpus"] == [{"bus_id": "0000:06:00.0", "numa_node": None}]
    assert len(unknown["problems"]) == 1
    memory_only = "node 0 cpus: 0 1\nnode 0 size: 10 MB\nnode 1 cpus:\nnode 1 size: 20 MB\n"
    assert numa.parse(memory_only)["numa"][1]["cpu_list"] == []


@given(st.text(max_size=300))
def test_parsers_refuse_or_answer_but_never_break(said):
    refusals = []
    for read in (
        topo.parse,
        smi.parse_csv,
        smi.parse_q,
        smi.parse_list,
        procfs.parse_devices,
        procfs.parse_version,
        procfs.parse_information,
        procfs.parse_ls,
        numa.parse,
    ):
        try:
            read(said)
        except ValueError as error:
            refusals.append(str(error))
    assert not [line for line in refusals if "\n" in line]
    procfs.parse_cgroup(said)
    procfs.parse_status(said)
