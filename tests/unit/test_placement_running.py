"""What runs against the plan where nvidia-smi shows no processes, and the memory and environment of the processes."""

from __future__ import annotations

import pytest

from specrig.facts import cpulist, look, numa, placement

HIDDEN = "nvidia-smi lists none of its processes"


def host(used=(4, 5, 6, 7), **more):
    """Eight GPUs on two nodes, memory in use on some; minors differ from the indices."""
    gpus = [
        {
            "index": i,
            "bus_id": f"0000:{i + 1:02x}:00.0",
            "minor": (i + 2) % 8,
            "numa_node": i // 4,
            "numa_nodes": [i // 4],
            "healthy": True,
            "reason": None,
            "mig": False,
            "memory_used_mib": 81234 if i in used else 4,
        }
        for i in range(8)
    ]
    nodes = [
        {**numa.node_row(node, cpulist.parse(text)), "memory_policy": True, "siblings": []}
        for node, text in ((0, "0-63"), (1, "64-127"))
    ]
    return {"gpus": gpus, "numa": nodes, "links": {}, "processes": [], "engines": [], "unknown": {}, **more}


def planned():
    return placement.plan(host(used=()), {"tp4": {"tp": 4, "gpus": [4, 5, 6, 7]}})["profiles"]["tp4"]


def member(pid, held=(), **changes):
    return {
        "pid": pid,
        "profile": "tp4",
        "guest": "gpu",
        "title": "sglang::scheduler_TP0",
        "visible": "4,5,6,7",
        "held": list(held),
        "cpus_allowed": "64-70",
        "mems_allowed": "0-1",
        "memory_policy": ["bind:1"],
        **changes,
    }


def ranks(*held, **changes):
    main = member(10, title="sglang.launch_server", **changes)
    return [main, *(member(11 + n, gpus, **changes) for n, gpus in enumerate(held))]


def verify(facts):
    return placement.verify(planned(), facts, "tp4", "gpu")


def test_open_nodes_that_are_the_planned_ones_prove_the_place():
    row = verify(host(engines=ranks([4], [5], [6], [7])))
    assert row["status"] == "pass"
    assert row["seen"]["gpus"] == [4, 5, 6, 7]
    assert row["seen"]["numa_nodes"] == [1]
    assert "ranks run on GPUs 4-7 (NUMA node 1) with CUDA_VISIBLE_DEVICES=4,5,6,7" in row["message"]
    assert "by the nodes that they hold open (" + HIDDEN + ") as planned" in row["message"]


@pytest.mark.parametrize(
    ("held", "status", "words"),
    [
        (([4], [5], [6], [7]), "unknown", "ranks seem to run on GPUs 4-7 by the nodes that they hold open, planned"),
        (([], []), "fail", "none of its processes has opened a GPU"),
        (([1], [2], [3], [4]), "fail", "its processes hold GPUs 1-4 open, planned GPUs 4-7 (NUMA node 1)"),
    ],
)
def test_a_tool_that_fails_stays_a_doubt_and_what_contradicts_the_plan_is_told_all_the_same(held, status, words):
    reason = "nvidia-smi did not answer within 5 s"
    row = verify(host(engines=ranks(*held), unknown={"processes": reason}))
    assert row["status"] == status
    assert words in row["message"]
    if status == "unknown":
        assert reason in row["message"]
        assert "repair nvidia-smi and look again" in row["message"]


def test_the_incident_is_found_by_open_nodes_too():
    facts = host(engines=ranks([1], [2], [3], [4], visible="4,5,6,7"))
    row = verify(facts)
    assert row["status"] == "fail"
    assert "its processes hold GPUs 1-4 open, planned GPUs 4-7 (NUMA node 1)" in row["message"]


def test_the_incident_is_found_by_the_environment_where_every_node_is_open():
    facts = host(engines=ranks(*[range(8)] * 4, visible="1,2,3,4,5"))
    row = verify(facts)
    assert row["status"] == "fail"
    assert "CUDA_VISIBLE_DEVICES is 1,2,3,4,5, planned 4,5,6,7: an environment of before" in row["message"]


def test_more_open_nodes_than_planned_are_settled_by_the_environment_and_the_memory():
    row = verify(host(engines=ranks(*[range(8)] * 4)))
    assert row["status"] == "pass"
    assert "by CUDA_VISIBLE_DEVICES and the memory in use (" + HIDDEN in row["message"]
    # Without memory on a planned GPU, or without the environment, nothing proves it.
    row = verify(host(used=(4, 5, 6), engines=ranks(*[range(8)] * 4)))
    assert row["status"] == "unknown"
    assert "no memory is in use on GPU 7" in row["message"]
    row = verify(host(engines=ranks(*[range(8)] * 4, visible=None)))
    assert row["status"] == "unknown"
    assert "their environment can't be read" in row["message"]


def test_descriptors_that_can_t_be_read_prove_nothing():
    row = verify(host(engines=[member(10, visible=None) | {"held": None}]))
    assert row["status"] == "unknown"
    assert "what its processes hold open can't be read" in row["message"]


def test_a_server_that_opened_no_gpu_fails():
    row = verify(host(engines=ranks([], [])))
    assert row["status"] == "fail"
    assert "none of its processes has opened a GPU" in row["message"]


def test_processes_of_another_guest_s_profile_prove_nothing_here():
    row = verify(host(engines=ranks([4], [5], [6], [7], guest="other"), used=()))
    assert row["status"] == "fail"
    assert "none of its processes is on any GPU" in row["message"]


def test_a_gpu_in_mig_mode_is_unknown():
    facts = host(engines=ranks([4], [5], [6], [7]))
    facts["gpus"][5]["mig"] = True
    row = verify(facts)
    assert row["status"] == "unknown"
    assert "GPU 5 is in MIG mode" in row["message"]


def listed(**changes):
    """nvidia-smi lists the four ranks on the planned GPUs."""
    processes = [
        {"pid": 11 + n, "name": "x", "gpu_index": 4 + n, "profile": "tp4", "guest": "gpu", "visible": "4,5,6,7"}
        for n in range(4)
    ]
    return host(processes=processes, engines=ranks([4], [5], [6], [7], **changes))


def test_right_gpus_with_the_planned_memory_policy_pass():
    row = verify(listed())
    assert row["status"] == "pass"
    assert row["expected"]["memory_policy"] == "bind:1"
    assert row["seen"]["memory_policy"] == ["bind:1"]
    assert " by " not in row["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_policy": ["default"]}, "pid 10 has the memory policy default, planned bind:1"),
        ({"memory_policy": ["bind:0"]}, "pid 10 has the memory policy bind:0, planned bind:1"),
        ({"memory_policy": ["bind:1", "interleave:0-1"]}, "pid 10 has the memory policy interleave:0-1, planned"),
        ({"mems_allowed": "0"}, "pid 10 may take memory of node 0 only, planned bind:1"),
        # The main process is on no GPU, and is held to its CPUs all the same.
        ({"cpus_allowed": "0-3"}, "may run on CPUs 0-3, planned CPUs"),
        ({"visible": "3,4,5,6,7"}, "CUDA_VISIBLE_DEVICES is 3,4,5,6,7, planned 4,5,6,7: an environment of before"),
    ],
)
def test_memory_cpus_and_environment_of_every_process_are_held_against_the_plan(changes, words):
    row = verify(listed(**changes))
    assert row["status"] == "fail"
    assert words in row["message"]
    assert "start specrig-sglang@tp4.service by recover.yml" in row["message"]


@pytest.mark.parametrize(
    "changes",
    [
        # A rank that was given its one GPU is within the plan, and a mapping without a policy of its own is no fault.
        {"visible": "5"},
        {"memory_policy": ["bind:1", "default"]},
        {"memory_policy": None},
        {"mems_allowed": None},
        {"cpus_allowed": None},
    ],
)
def test_what_is_within_the_plan_or_unread_is_no_fault(changes):
    assert verify(listed(**changes))["status"] == "pass"


def test_a_policy_that_the_kernel_refused_is_not_asked_for():
    facts = listed(memory_policy=["default"], mems_allowed="0")
    row = placement.verify(dict(planned(), memory_policy=False), facts, "tp4", "gpu")
    assert row["status"] == "pass"
    assert row["expected"]["memory_policy"] is None


def test_a_stranger_on_the_gpus_is_named():
    facts = listed()
    stranger = {"pid": 99, "name": "python3", "gpu_index": 5, "profile": None, "guest": None, "memory_mib": 512}
    facts["processes"].append(stranger)
    row = verify(facts)
    assert row["status"] == "pass"
    assert "also on these GPUs: pid 99 (python3, 512 MiB) of somebody else" in row["message"]


def test_open_nodes_are_told_as_gpus_by_their_minors():
    gpus = [{"index": 0, "minor": 2}, {"index": 1, "minor": 0}, {"index": 2, "minor": None}]
    raw = {"engines": [{"pid": 1, "minors": [0, 7]}, {"pid": 2, "minors": None}]}
    rows = look._engines(raw, gpus)
    assert [row["held"] for row in rows] == [[1], None]
    assert look._engines({}, gpus) == []
