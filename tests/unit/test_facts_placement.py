"""Placement: what is planned, what is refused, and what the host's view of the processes says about it."""

from __future__ import annotations

import collections
import copy
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrig.facts import cpulist, numa, placement, topo

BOX_CPUS = {0: "0-63,128-191", 1: "64-127,192-238,240-255"}
PIX = {"0-1": "PIX", "2-3": "PIX", "4-5": "PIX", "6-7": "PIX"}


def gpu(index, node, **facts):
    row = {
        "index": index,
        "bus_id": f"0000:{index + 1:02x}:00.0",
        "minor": (index + 2) % 8,
        "numa_node": node,
        "numa_nodes": None if node is None else [node],
        "healthy": True,
        "reason": None,
        "mig": False,
        "memory_used_mib": 0,
    }
    return {**row, **facts}


def host(nodes, cpus=None, links=None, **more):
    """A host from the node of each GPU and the CPU list of each node."""
    cpus = BOX_CPUS if cpus is None else cpus
    rows = [
        {**numa.node_row(node, cpulist.parse(text)), "memory_policy": True, "siblings": []}
        for node, text in cpus.items()
    ]
    facts = {"gpus": [gpu(i, node) for i, node in enumerate(nodes)], "numa": rows, "links": links or {}}
    return {**facts, "processes": [], "unknown": {}, **more}


def rank(pid, index, profile, **facts):
    return {"pid": pid, "name": f"sglang::scheduler_TP{pid % 10}", "gpu_index": index, "profile": profile, **facts}


TARGET = [0, 0, 0, 0, 1, 1, 1, 1]
FIVE_THREE = [0, 0, 0, 0, 0, 1, 1, 1]


def gpus_of(plan):
    return {name: row["gpus"] for name, row in plan["profiles"].items()}


def test_production_first_best_fit_then_benchmarks_against_what_is_left():
    profiles = {
        "tp4-dflash": {"tp": 4},
        "chat": {"tp": 1, "serve": True},
        "tp1-dflash": {"tp": 1},
        "agent": {"tp": 2, "serve": True},
        "tp8-dflash": {"tp": 8, "numa": "span"},
    }
    plan = placement.plan(host(TARGET), profiles)
    assert gpus_of(plan) == {"chat": [0], "agent": [1, 2], "tp4-dflash": [4, 5, 6, 7], "tp1-dflash": [4]}
    assert plan["profiles"]["agent"]["numa_nodes"] == [0]
    assert plan["profiles"]["agent"]["minors"] == [3, 4]
    assert list(plan["refused"]) == ["tp8-dflash"]
    assert "GPU 0 serves chat" in plan["refused"]["tp8-dflash"]
    alone = placement.plan(host(TARGET), profiles, take_over=True)
    assert alone["profiles"]["tp8-dflash"]["gpus"] == list(range(8))
    assert alone["profiles"]["tp8-dflash"]["numa"] == "span"
    assert alone["profiles"]["tp8-dflash"]["numa_nodes"] == [0, 1]
    assert alone["profiles"]["tp4-dflash"]["gpus"] == [0, 1, 2, 3]


def test_close_links_are_preferred_inside_the_node():
    profiles = {"chat": {"tp": 1, "serve": True}, "agent": {"tp": 2, "serve": True}}
    assert gpus_of(placement.plan(host(TARGET, links=PIX), profiles)) == {"chat": [0], "agent": [2, 3]}
    nvlink = {"0-1": "SYS", "0-2": "SYS", "0-3": "NV4", "1-2": "SYS", "1-3": "SYS", "2-3": "SYS"}
    assert gpus_of(placement.plan(host(TARGET[:4], links=nvlink), {"a": {"tp": 2}})) == {"a": [0, 3]}


def test_a_group_that_fits_no_node_needs_span():
    plan = placement.plan(host(TARGET), {"tp8": {"tp": 8}})
    line = plan["refused"]["tp8"]
    assert plan["profiles"] == {}
    assert "needs 8 GPUs of one NUMA node" in line
    assert "4 on NUMA node 0, 4 on NUMA node 1" in line
    assert "numa: span" in line
    assert "\n" not in line
    assert "tp9 needs 9 GPUs, free are 8 of 8" in placement.plan(host(TARGET), {"tp9": {"tp": 9}})["refused"]["tp9"]


def test_span_is_a_permission_not_an_order():
    plan = placement.plan(host(TARGET), {"tp4": {"tp": 4, "numa": "span"}})
    assert (plan["profiles"]["tp4"]["gpus"], plan["profiles"]["tp4"]["numa"]) == ([0, 1, 2, 3], "local")


def test_explicit_gpus():
    plan = placement.plan(
        host(TARGET),
        {
            "auto": {"tp": 1, "serve": True},
            "fixed": {"tp": 2, "gpus": [0, 1], "serve": True},
            "crossing": {"tp": 2, "gpus": [3, 4]},
            "taken": {"tp": 1, "gpus": [1]},
            "few": {"tp": 4, "gpus": [4, 5]},
            "gone": {"tp": 1, "gpus": [9]},
            "twice": {"tp": 2, "gpus": [4, 4]},
            "words": {"tp": 1, "gpus": "4"},
        },
    )
    assert gpus_of(plan) == {"fixed": [0, 1], "auto": [2]}
    refused = plan["refused"]
    assert "GPUs 3-4 are on NUMA nodes 0,1 (3 on node 0, 4 on node 1), expected one known node" in refused["crossing"]
    assert "GPU 1 serves fixed" in refused["taken"]
    assert "names 2 (4-5) but tp is 4" in refused["few"]
    assert "GPU 9 asked for, the host has GPUs 0-7" in refused["gone"]
    assert "names a GPU twice" in refused["twice"]
    assert "expected auto or a list" in refused["words"]


@pytest.mark.parametrize("tp", [0, -1, None, "4", True, 2.0])
def test_an_impossible_tp_is_refused_in_a_line(tp):
    plan = placement.plan(host(TARGET), {"x": {"tp": tp}})
    assert "expected a whole number of GPUs" in plan["refused"]["x"]


def test_sick_mig_and_busy_gpus_are_avoided_and_named():
    facts = host(TARGET)
    facts["gpus"][0].update(healthy=False, reason="GPU requires reset", memory_used_mib=None)
    facts["gpus"][1]["mig"] = True
    facts["gpus"][2]["memory_used_mib"] = 30000
    facts["processes"] = [
        {"pid": 77, "name": "python", "gpu_index": 3, "guest": "other", "profile": None},
        rank(80, 4, "chat"),
    ]
    plan = placement.plan(facts, {"chat": {"tp": 1, "gpus": [4], "serve": True}, "tp4": {"tp": 4}})
    line = plan["refused"]["tp4"]
    assert gpus_of(plan) == {"chat": [4]}
    for words in (
        "GPU 0 is unhealthy (GPU requires reset)",
        "GPU 1 is in MIG mode",
        "GPU 2 has 30000 MiB in use by no process",
        "GPU 3 is used by pid 77 (python) in guest other",
        "GPU 4 serves chat",
    ):
        assert words in line
    assert gpus_of(placement.plan(facts, {"tp3": {"tp": 3}, "chat": {"tp": 1}}))["tp3"] == [4, 5, 6]


def test_our_own_leftover_does_not_make_a_gpu_busy():
    facts = host(TARGET, processes=[rank(5, 0, "tp1")])
    facts["gpus"][0]["memory_used_mib"] = 80000
    assert gpus_of(placement.plan(facts, {"tp1": {"tp": 1}})) == {"tp1": [0]}


def test_a_server_of_ours_that_the_tool_does_not_list_keeps_its_place():
    facts = host(TARGET)
    facts["gpus"][0]["memory_used_mib"] = 80000
    assert gpus_of(placement.plan(facts, {"chat": {"tp": 1}})) == {"chat": [1]}
    facts["units"] = [{"guest": "gpu", "unit": "specrig-sglang@chat.service", "pids": [9], "listed": False}]
    assert gpus_of(placement.plan(facts, {"chat": {"tp": 1}})) == {"chat": [0]}


def test_unknown_nodes_are_never_made_up():
    facts = host([None, None], {0: "0-7"})
    plan = placement.plan(facts, {"one": {"tp": 1}, "two": {"tp": 2}, "wide": {"tp": 2, "numa": "span"}})
    assert plan["profiles"]["one"]["numa_nodes"] == [None]
    assert plan["profiles"]["one"]["cpus"] is None
    assert plan["profiles"]["one"]["memory_nodes"] == []
    assert plan["profiles"]["one"]["memory_policy"] is None
    assert "one, wide: the NUMA node of its GPUs is not known, so no CPUs are its own" in plan["notes"][0]
    assert plan["profiles"]["wide"]["gpus"] == [0, 1]
    assert plan["profiles"]["wide"]["numa_nodes"] == [None]
    assert "does not know the node of GPUs 0-1" in plan["refused"]["two"]
    assert "numa: span" in plan["refused"]["two"]
    asked = placement.plan(facts, {"two": {"tp": 2, "gpus": [0, 1]}})
    assert "expected one known node" in asked["refused"]["two"]


def matrix(samples: Path, name: str) -> dict:
    told = topo.parse((samples / "topo" / name).read_text())
    cpus: dict[int, str] = {}
    for row in told["gpus"]:
        row.update(numa_node=None, bus_id=None, minor=None)
        if row["numa_nodes"] and len(row["numa_nodes"]) == 1 and row["cpus"]:
            cpus[row["numa_nodes"][0]] = row["cpus"]
    return {**host([], cpus), "gpus": told["gpus"], "links": told["links"]}


def test_five_gpus_with_the_first_on_node_one(samples: Path):
    facts = matrix(samples, "10_5gpu_gpu0_on_numa1.txt")
    plan = placement.plan(facts, {"tp4": {"tp": 4}, "tp2": {"tp": 2}, "tp1": {"tp": 1}, "tp5": {"tp": 5}})
    assert gpus_of(plan) == {"tp4": [1, 2, 3, 4], "tp2": [1, 2], "tp1": [0]}
    assert plan["profiles"]["tp4"]["numa_nodes"] == [0]
    assert "4 on NUMA node 0, 1 on NUMA node 1" in plan["refused"]["tp5"]


def test_list_affinities_count_the_member_with_cpus(samples: Path):
    facts = matrix(samples, "05_gb200_4gpu_8nic_gpu_numa_id.txt")
    assert placement.plan(facts, {"tp2": {"tp": 2}})["profiles"] == {}, "a list alone does not tell the node"
    facts["numa"] = host([], {0: "0-71", 1: "72-143", 2: "", 10: "", 18: "", 26: ""})["numa"]
    assert [placement.gpu_node(g, facts) for g in facts["gpus"]] == [0, 0, 1, 1]
    plan = placement.plan(facts, {"a": {"tp": 2, "serve": True}, "b": {"tp": 2, "serve": True}, "c": {"tp": 4}})
    assert gpus_of(plan) == {"a": [0, 1], "b": [2, 3]}
    assert plan["profiles"]["b"]["numa_nodes"] == [1]


def test_the_guest_counts_its_own_gpus():
    plan = placement.plan(host(TARGET), {"a": {"tp": 2}}, guest_gpus=[2, 4, 6, 7])
    assert plan["profiles"]["a"]["gpus"] == [4, 6]
    assert plan["profiles"]["a"]["guest_gpus"] == [1, 2]
    assert gpus_of(placement.plan(host(TARGET), {"a": {"tp": 4}}, reserved=[0])) == {"a": [4, 5, 6, 7]}


def test_which_gpus_a_guest_has_is_told_by_its_nodes():
    facts = host(TARGET, majors={"nvidia": 195})
    seen = [
        {"path": "/dev/nvidiactl", "kind": "char", "major": 195, "minor": 255},
        {"path": "/dev/nvidia6", "kind": "char", "major": 195, "minor": 6},
        {"path": "/dev/nvidia7", "kind": "char", "major": 195, "minor": 7},
        {"path": "/dev/nvidia2", "kind": "file", "major": None, "minor": None},
        {"path": "/dev/nvidia3", "kind": "missing", "major": None, "minor": None},
        {"path": "/dev/nvidia4", "kind": "char", "major": 240, "minor": 4},
        {"path": "/dev/nvidia-uvm", "kind": "char", "major": 511, "minor": 0},
    ]
    facts["guests"] = [{"name": "gpu", "nodes": seen}, {"name": "stopped", "nodes": None}]
    # The minor is (index + 2) % 8 in these facts: the number in a node's name is not the index.
    assert placement.guest_gpus(facts, "gpu") == [4, 5]
    assert placement.guest_gpus(facts, "stopped") is None
    assert placement.guest_gpus(facts, "stopped", given=[7, 0]) == [0, 7]
    assert placement.guest_gpus(facts, "nobody") is None
    # A node that was left in a running guest is denied there, and CUDA does not count it.
    assert placement.guest_gpus(facts, "gpu", given=[5, 6]) == [5]
    assert placement.guest_gpus(facts, "gpu", nodes=[{"path": "/dev/nvidia1", "major": 195, "minor": 1}]) == [7]
    plan = placement.plan(facts, {"a": {"tp": 1, "gpus": [5]}, "b": {"tp": 4}}, guest_gpus=[4, 5], guest="gpu")
    assert plan["profiles"]["a"]["guest_gpus"] == [1]
    assert "GPU 0 is not given to the guest" in plan["refused"]["b"]


def test_a_guest_is_given_the_nodes_of_its_gpus_and_the_common_ones():
    facts = host(TARGET)
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *(f"nvidia{minor}" for minor in range(8))]
    nodes = [{"path": f"/dev/{name}", "minor": int(name[6:]) if name[6:].isdigit() else 0} for name in names]
    assert placement.nodes_for_guest(nodes, facts, []) == nodes
    some = [node["path"] for node in placement.nodes_for_guest(nodes, facts, [0, 7])]
    assert some == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia1", "/dev/nvidia2"]
    with pytest.raises(ValueError, match="lxc_guest_gpus names GPU 9, the host has GPUs 0-7"):
        placement.nodes_for_guest(nodes, facts, [9])
    with pytest.raises(ValueError, match="expected a list of GPU indices"):
        placement.nodes_for_guest(nodes, facts, ["4"])


def test_a_profile_of_another_guest_is_foreign_though_its_name_is_the_same():
    facts = host(TARGET, processes=[rank(31, 0, "chat", guest="second"), rank(32, 1, "agent", guest="first")])
    profiles = {"chat": {"tp": 1, "serve": True}, "agent": {"tp": 1, "gpus": [1], "serve": True}}
    plan = placement.plan(facts, profiles, guest="first")
    assert gpus_of(plan) == {"chat": [2], "agent": [1]}
    taken = placement.plan(facts, {"chat": {"tp": 1, "gpus": [0]}}, guest="first")
    assert "GPU 0 is used by pid 31 (sglang::scheduler_TP1) in guest second" in taken["refused"]["chat"]
    row = placement.verify(plan["profiles"]["chat"], facts, "chat", guest="first")
    assert row["status"] == "fail"
    assert "none of its processes is on any GPU" in row["message"]


def test_production_stays_where_it_was_put_while_that_is_right():
    profiles = {"chat": {"tp": 1, "serve": True}, "agent": {"tp": 2, "serve": True}, "tp1": {"tp": 1}}
    facts = host(TARGET, links=PIX)
    first = placement.plan(facts, profiles, guest="gpu")
    assert gpus_of(first) == {"chat": [0], "agent": [2, 3], "tp1": [4]}
    record = placement.record(first, profiles)
    assert record == {"chat": ["0000:01:00.0"], "agent": ["0000:03:00.0", "0000:04:00.0"]}
    facts["guests"] = [{"name": "gpu", "placement": record}]
    # nvidia-smi is silent, so links are unknown: "agent" would go to 1,2, and a server that is right be restarted.
    silent = {**facts, "links": {}, "unknown": {"links": "nvidia-smi did not answer within 5 s"}}
    assert gpus_of(placement.plan({**silent, "guests": []}, profiles, guest="gpu"))["agent"] == [1, 2]
    assert gpus_of(placement.plan(silent, profiles, guest="gpu")) == gpus_of(first)
    # Nor does a profile that is declared before the others take their place.
    added = placement.plan(facts, {"new": {"tp": 2, "serve": True}, **profiles}, guest="gpu")
    assert gpus_of(added) == {"chat": [0], "agent": [2, 3], "new": [4, 5], "tp1": [6]}
    # Another guest's record is not ours.
    assert gpus_of(placement.plan(silent, profiles, guest="other"))["agent"] == [1, 2]


@pytest.mark.parametrize(
    ("change", "agent"),
    [
        ({"tp": 1}, [0]),
        ({"gpus": [4, 5]}, [4, 5]),
        ({"sick": 3}, [0, 1]),
        ({"stranger": 2}, [0, 1]),
        ({"node": None}, [0, 1]),
        ({}, [2, 3]),
    ],
)
def test_a_place_that_is_not_right_any_more_is_planned_anew(change, agent):
    facts = host(TARGET)
    facts["guests"] = [{"name": "gpu", "placement": {"agent": ["0000:03:00.0", "0000:04:00.0"]}}]
    profile = {"tp": 2, "serve": True, **{key: change[key] for key in ("tp", "gpus") if key in change}}
    if "sick" in change:
        facts["gpus"][change["sick"]]["healthy"] = False
    if "stranger" in change:
        facts["processes"] = [{"pid": 7, "name": "python", "gpu_index": change["stranger"], "profile": None}]
    if "node" in change:
        facts["gpus"][3].update(numa_node=None, numa_nodes=None)
    plan = placement.plan(facts, {"agent": profile}, guest="gpu")
    assert gpus_of(plan) == {"agent": agent}
    assert len(plan["avoided"]) == len({"sick", "stranger"} & set(change))


def test_a_record_that_is_none_is_no_record():
    for text in (None, "", "{", "[]", '{"a": "0000:01:00.0"}', '{"a": [1]}'):
        assert placement.parse_record(text) == {}
    assert placement.parse_record('{"a": ["0000:01:00.0"]}') == {"a": ["0000:01:00.0"]}
    profiles = {"a": {"tp": 1, "serve": True}, "b": {"tp": 1, "serve": True, "gpus": [1]}}
    before = {"a": ["0000:01:00.0"], "b": ["0000:02:00.0"], "gone": ["0000:03:00.0"]}
    nothing = placement.plan(host([]), profiles)
    assert placement.record(nothing, profiles, before) == {"a": before["a"], "b": before["b"]}
    assert placement.record(placement.plan(host(TARGET), profiles), profiles, before) == {"a": ["0000:01:00.0"]}


def test_ranks_on_other_gpus_than_planned_are_named_for_recovery():
    facts = host(TARGET)
    plan = placement.plan(facts, {"chat": {"tp": 1, "serve": True}, "agent": {"tp": 2, "serve": True}})
    facts["processes"] = [rank(1, 3, "chat"), rank(2, 1, "agent"), rank(3, 2, "agent")]
    assert placement.misplaced(plan, facts) == {"chat": "its ranks run on GPU 3, planned GPU 0"}
    assert placement.misplaced(plan, {**facts, "unknown": {"processes": "nvidia-smi hangs"}, "processes": []}) == {}


def test_three_and_one():
    facts = host([0, 0, 0, 1])
    plan = placement.plan(facts, {"tp1": {"tp": 1}, "tp2": {"tp": 2}, "tp3": {"tp": 3}, "tp4": {"tp": 4}})
    assert gpus_of(plan) == {"tp1": [3], "tp2": [0, 1], "tp3": [0, 1, 2]}
    assert "free are 3 on NUMA node 0, 1 on NUMA node 1" in plan["refused"]["tp4"]
    assert "numa: span" in plan["refused"]["tp4"]


def test_profiles_that_fit_only_together_are_arranged_together():
    # One after the other "one" would take a GPU of node 1 (the fewest that holds it), and "four" would find no node.
    profiles = {
        "one": {"tp": 1, "serve": True},
        "three": {"tp": 3, "serve": True},
        "four": {"tp": 4, "serve": True},
    }
    plan = placement.plan(host(FIVE_THREE), profiles)
    assert plan["refused"] == {}
    assert gpus_of(plan) == {"one": [0], "three": [5, 6, 7], "four": [1, 2, 3, 4]}
    # What cannot be done at all leaves the others where they were.
    plan = placement.plan(host(FIVE_THREE), {**profiles, "more": {"tp": 1, "serve": True}})
    assert gpus_of(plan)["one"] == [5]
    assert "GPU 5 is planned for one" in plan["refused"]["four"]


def test_no_gpu_twice_unless_shared_on_purpose():
    profiles = {
        "embed": {"tp": 1, "serve": True, "shared_with": "chat"},
        "chat": {"tp": 2, "serve": True},
        "rank": {"tp": 2, "serve": True, "shared_with": ["chat", "embed"]},
        "tp4": {"tp": 4},
        "beside": {"tp": 2, "shared_with": ["chat", "embed", "rank"]},
    }
    plan = placement.plan(host(TARGET), profiles)
    assert gpus_of(plan) == {"chat": [0, 1], "embed": [0], "rank": [0, 1], "tp4": [4, 5, 6, 7], "beside": [0, 1]}
    rows = plan["profiles"]
    assert rows["chat"]["shared_with"] == ["embed", "rank"]
    assert rows["beside"]["shared_with"] == ["embed", "chat", "rank"]
    assert rows["tp4"]["shared_with"] == []
    assert [rows[name]["cpus_shared"] for name in ("chat", "embed", "tp4")] == [True, True, False]
    # The gate knows a partner from a stranger.
    processes = [rank(10, 0, "chat"), rank(11, 1, "chat"), rank(12, 0, "embed"), rank(13, 0, None)]
    message = placement.verify(rows["chat"], host(TARGET, processes=processes), "chat")["message"]
    assert message.endswith("also on these GPUs: pid 13 (sglang::scheduler_TP3) of somebody else")


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"tp": 1, "shared_with": "gone"}, "shared_with names gone, expected another profile"),
        ({"tp": 1, "shared_with": "x"}, "shared_with names x, expected another profile"),
        ({"tp": 1, "shared_with": "bench"}, "names bench, which has serve: false and runs alone"),
        ({"tp": 1, "shared_with": 3}, "shared_with is 3; expected the name of a profile"),
        ({"tp": 3, "shared_with": "chat"}, "offers GPUs 0-1 that nobody else shares, tp is 3"),
        ({"tp": 1, "shared_with": "huge"}, "names huge, which got no GPU itself"),
        ({"tp": 1, "gpus": [2], "shared_with": "chat"}, "GPU 2 is planned for other"),
        ({"tp": 1, "gpus": [0]}, None),
    ],
)
def test_sharing_that_cannot_be_is_refused_in_a_line(profile, words):
    profiles = {
        "chat": {"tp": 2, "gpus": [0, 1], "serve": True},
        "other": {"tp": 1, "gpus": [2], "serve": True},
        "huge": {"tp": 9, "serve": True},
        "bench": {"tp": 1},
        "x": {**profile, "serve": True},
    }
    line = placement.plan(host(TARGET), profiles)["refused"]["x"]
    assert (words or "GPU 0 is planned for chat") in line
    assert "\n" not in line


def test_cpus_stay_on_the_node_disjoint_and_do_not_move_when_a_profile_is_added():
    few = placement.plan(host(TARGET), {"chat": {"tp": 1, "serve": True}})
    plan = placement.plan(
        host(TARGET), {"chat": {"tp": 1, "serve": True}, "agent": {"tp": 2, "serve": True}, "tp4": {"tp": 4}}
    )
    assert few["profiles"]["chat"]["cpus"] == plan["profiles"]["chat"]["cpus"] == "0-24"
    sets = {name: set(cpulist.parse(row["cpus"])) for name, row in plan["profiles"].items()}
    client = set(cpulist.parse(plan["client_cpus"]))
    assert sets["chat"] | sets["agent"] <= set(cpulist.parse(BOX_CPUS[0]))
    assert sets["tp4"] <= set(cpulist.parse(BOX_CPUS[1]))
    everything = [*sets.values(), client]
    assert sum(len(part) for part in everything) == len(set.union(*everything))
    assert plan["notes"] == []


def test_two_threads_of_a_core_are_never_shared_out_to_two():
    facts = host([0, 0], {0: "0-7"})
    facts["numa"][0]["siblings"] = ["0,4", "1,5", "2,6", "3,7"]
    plan = placement.plan(facts, {"a": {"tp": 1, "serve": True}, "b": {"tp": 1, "serve": True}})
    assert {name: row["cpus"] for name, row in plan["profiles"].items()} == {"a": "0,4", "b": "1,5"}
    assert plan["client_cpus"] == "2-3,6-7"


def test_few_cpus_are_shared_out_among_the_profiles_at_hand_and_a_single_one_is_shared():
    four = placement.plan(host(TARGET, {0: "0-3", 1: "4-7"}), {"a": {"tp": 1, "serve": True}, "b": {"tp": 4}})
    assert four["profiles"]["a"]["cpus"] == "0-1"
    assert four["profiles"]["b"]["cpus"] == "4-5"
    assert four["client_cpus"] == "2-3,6-7"
    assert four["notes"] == []
    one = placement.plan(host(TARGET, {0: "0", 1: "1"}), {"a": {"tp": 1, "serve": True}, "b": {"tp": 2, "serve": True}})
    assert [row["cpus"] for row in one["profiles"].values()] == ["0", "0"]
    assert [row["cpus_shared"] for row in one["profiles"].values()] == [True, True]
    assert len(one["notes"]) == 1
    assert "NUMA node 0 has too few CPU cores (1)" in one["notes"][0]


def test_memory_policy_is_what_the_kernel_answered():
    facts = host(TARGET)
    facts["numa"][1]["memory_policy"] = False
    plan = placement.plan(facts, {"a": {"tp": 4, "gpus": [0, 1, 2, 3]}, "b": {"tp": 4, "gpus": [4, 5, 6, 7]}})
    assert [plan["profiles"][name]["memory_policy"] for name in "ab"] == [True, False]


# The incident: four ranks with GPUs 1-5 visible, really on 1-4, where one node's GPUs were meant.


@pytest.mark.parametrize("meant", [[0, 1, 2, 3], [4, 5, 6, 7]])
def test_the_incident_fails_with_both_lists_and_both_nodes(meant):
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp4": {"tp": 4, "gpus": meant}})["profiles"]["tp4"]
    facts["processes"] = [rank(4310 + i, 1 + i, "tp4", visible="1,2,3,4,5", cpus_allowed="0-255") for i in range(4)]
    row = placement.verify(planned, facts, "tp4")
    assert row["gate"] == "placement"
    assert row["status"] == "fail"
    assert row["seen"]["gpus"] == [1, 2, 3, 4]
    assert row["seen"]["numa_nodes"] == [0, 1]
    assert row["seen"]["pids"] == [4310, 4311, 4312, 4313]
    assert row["expected"]["gpus"] == meant
    message = row["message"]
    assert "GPUs 1-4 (NUMA nodes 0,1)" in message
    assert f"planned GPUs {meant[0]}-{meant[-1]} (NUMA node {TARGET[meant[0]]})" in message
    assert "CUDA_VISIBLE_DEVICES=1,2,3,4,5" in message
    assert "crosses NUMA nodes" in message
    assert "\n" not in message


def test_one_to_four_is_right_on_a_five_plus_three_box():
    facts = host(FIVE_THREE)
    planned = placement.plan(facts, {"tp4": {"tp": 4, "gpus": [1, 2, 3, 4]}})["profiles"]["tp4"]
    assert planned["numa"] == "local"
    facts["processes"] = [rank(10 + i, 1 + i, "tp4", cpus_allowed=planned["cpus"]) for i in range(4)]
    row = placement.verify(planned, facts, "tp4")
    assert row["status"] == "pass"
    assert row["seen"]["numa_nodes"] == [0]
    assert "1-5" in placement.plan(facts, {"x": {"tp": 5, "gpus": [1, 2, 3, 4, 5]}})["refused"]["x"]


def test_a_group_across_nodes_fails_without_span_though_it_was_planned_there():
    facts = host(TARGET)
    planned = {"gpus": [1, 2, 3, 4], "numa_nodes": [0, 1], "numa": "local", "cpus": None}
    facts["processes"] = [rank(30 + i, 1 + i, "tp4") for i in range(4)]
    row = placement.verify(planned, facts, "tp4")
    assert row["status"] == "fail"
    assert "which crosses NUMA nodes" in row["message"]
    assert placement.verify({**planned, "numa": "span"}, facts, "tp4")["status"] == "pass"


def test_right_gpus_on_the_wrong_cpus_fail():
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp4": {"tp": 4, "gpus": [4, 5, 6, 7]}})["profiles"]["tp4"]
    for allowed, status in (
        ("64-100", "pass"),
        (planned["cpus"], "pass"),
        ("0-63", "fail"),
        ("0-255", "fail"),
        (None, "pass"),
    ):
        facts["processes"] = [rank(20 + i, 4 + i, "tp4", cpus_allowed=allowed) for i in range(4)]
        assert placement.verify(planned, facts, "tp4")["status"] == status, allowed


def test_a_missing_rank_fails_and_nothing_running_fails():
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp4": {"tp": 4}})["profiles"]["tp4"]
    facts["processes"] = [rank(i, i, "tp4") for i in range(3)]
    assert placement.verify(planned, facts, "tp4")["status"] == "fail"
    facts["processes"] = []
    row = placement.verify(planned, facts, "tp4")
    assert row["status"] == "fail"
    assert "is specrig-sglang@tp4.service running?" in row["message"]
    assert placement.verify(None, facts, "tp4")["status"] == "fail"


def test_what_the_host_cannot_see_is_unknown():
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp4": {"tp": 4}})["profiles"]["tp4"]
    hung = {**facts, "unknown": {"processes": "nvidia-smi did not answer within 5 s"}}
    row = placement.verify(planned, hung, "tp4")
    assert row["status"] == "unknown"
    assert "did not answer" in row["message"]
    silent = copy.deepcopy(facts)
    for card in silent["gpus"][:4]:
        card["memory_used_mib"] = 81234
    assert placement.verify(planned, silent, "tp4")["status"] == "unknown"
    nowhere = {**facts, "processes": [rank(1, None, "tp4")]}
    assert placement.verify(planned, nowhere, "tp4")["status"] == "unknown"


def test_strangers_on_the_gpus_are_told():
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp1": {"tp": 1}})["profiles"]["tp1"]
    facts["processes"] = [rank(1, 0, "tp1"), {"pid": 9, "name": "python", "gpu_index": 0, "profile": None}]
    row = placement.verify(planned, facts, "tp1")
    assert row["status"] == "pass"
    assert "pid 9" in row["message"]


def test_span_runs_across_as_planned():
    facts = host(TARGET)
    planned = placement.plan(facts, {"tp8": {"tp": 8, "numa": "span"}})["profiles"]["tp8"]
    facts["processes"] = [rank(i, i, "tp8") for i in range(8)]
    assert placement.verify(planned, facts, "tp8")["status"] == "pass"


NODES = st.lists(st.sampled_from([0, 1, 2, None]), min_size=1, max_size=8)
PROFILE = st.fixed_dictionaries(
    {"tp": st.integers(1, 5), "numa": st.sampled_from(["local", "span"]), "serve": st.booleans()},
    optional={
        "shared_with": st.lists(st.sampled_from([f"p{i}" for i in range(5)]), min_size=1, max_size=2, unique=True),
        "gpus": st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True),
    },
)
INDICES = st.sets(st.integers(0, 7), max_size=3)


@given(
    nodes=NODES,
    rows=st.lists(PROFILE, min_size=1, max_size=5),
    sick=INDICES,
    hidden=INDICES,
    take_over=st.booleans(),
    links=st.dictionaries(
        st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]),
        st.sampled_from(["PIX", "PHB", "NODE", "SYS", "NV4"]),
        max_size=10,
    ),
)
def test_never_crosses_never_invents_never_gives_twice(nodes, rows, sick, hidden, take_over, links):
    facts = host(nodes, {0: "0-7", 1: "8-15", 2: "16"}, {f"{a}-{b}": word for (a, b), word in links.items()})
    for index in sick:
        if index < len(nodes):
            facts["gpus"][index]["healthy"] = False
    has = [index for index in range(len(nodes)) if index not in hidden]
    profiles = {f"p{i}": row for i, row in enumerate(rows)}
    plan = placement.plan(facts, profiles, take_over=take_over, guest_gpus=has)
    assert plan == placement.plan(copy.deepcopy(facts), copy.deepcopy(profiles), take_over=take_over, guest_gpus=has)
    assert set(plan["profiles"]) | set(plan["refused"]) == set(profiles)
    assert not set(plan["profiles"]) & set(plan["refused"])
    serving = {name: set(row["gpus"]) for name, row in plan["profiles"].items() if profiles[name]["serve"]}
    for name, row in plan["profiles"].items():
        group = row["gpus"]
        assert len(group) == len(set(group)) == profiles[name]["tp"]
        assert not set(group) & (sick | hidden)
        # As the guest counts: its place among the GPUs that the guest has, in order of bus id.
        assert [has[place] for place in row["guest_gpus"]] == group
        if "gpus" in profiles[name]:
            assert sorted(profiles[name]["gpus"]) == group
        there = {nodes[index] for index in group}
        assert set(row["numa_nodes"]) == there
        if profiles[name]["numa"] == "local" and len(group) > 1:
            assert len(there) == 1
            assert None not in there
        assert (row["numa"] == "local") == (len(there) == 1)
        if row["cpus"] is not None:
            allowed = {cpu for n in facts["numa"] if n["node"] in there for cpu in n["cpu_list"]}
            assert set(cpulist.parse(row["cpus"])) <= allowed
            assert not set(cpulist.parse(row["cpus"])) & set(cpulist.parse(plan["client_cpus"])) or row["cpus_shared"]
        else:
            assert None in there
        # A GPU has two owners only where one of them said so, by name.
        for other, gpus in serving.items():
            if other == name or not gpus & set(group) or (take_over and name not in serving):
                continue
            named = [profiles[name].get("shared_with", []), profiles[other].get("shared_with", [])]
            assert other in named[0] or name in named[1]
            assert other in row["shared_with"]
    unshared = [row for name, row in plan["profiles"].items() if name in serving and row["cpus"]]
    unshared = [row for row in unshared if not row["cpus_shared"]]
    for i, row in enumerate(unshared):
        for other in unshared[i + 1 :]:
            assert not set(cpulist.parse(row["cpus"])) & set(cpulist.parse(other["cpus"]))
    for line in plan["refused"].values():
        assert "\n" not in line


@given(
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=8), st.lists(st.integers(1, 4), min_size=1, max_size=4)
)
def test_what_can_be_placed_together_is(nodes, sizes):
    plan = placement.plan(host(nodes), {f"p{i}": {"tp": tp, "serve": True} for i, tp in enumerate(sizes)})
    room = collections.Counter(nodes)
    possible = any(
        all(sum(tp for tp, at in zip(sizes, where, strict=True) if at == node) <= room[node] for node in set(where))
        for where in itertools.product(sorted(room), repeat=len(sizes))
    )
    assert (plan["refused"] == {}) == possible
