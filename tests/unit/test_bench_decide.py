"""What forbids a benchmark, what it stops, and how its units are named; no machine needed."""

from __future__ import annotations

from typing import Any

import pytest

from specrig.facts import benchmark

PROFILES: dict[str, Any] = {
    "chat": {"tp": 1, "serve": True},
    "agent": {"tp": 2, "serve": True},
    "tp4-dflash": {"tp": 4},
    "tp8-dflash": {"tp": 8, "numa": "span"},
}


def look(processes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Eight GPUs, four a node."""
    return {
        "gpus": [
            {"index": i, "bus_id": f"0000:{i:02x}:00.0", "minor": i, "numa_node": i // 4, "healthy": True}
            for i in range(8)
        ],
        "numa": [
            {"node": n, "cpus": f"{8 * n}-{8 * n + 7}", "cpu_list": list(range(8 * n, 8 * n + 8))} for n in (0, 1)
        ],
        "processes": processes or [],
    }


def plan(*profiles: str, run: str | None = None) -> dict[str, Any]:
    return {"run": run, "profiles": list(profiles)}


def test_a_profile_that_fits_beside_production_stops_nothing() -> None:
    decision = benchmark.decide(plan("tp4-dflash"), look(), {}, PROFILES)
    assert decision["refused"] == []
    assert decision["stop"] == []
    assert decision["placements"]["tp4-dflash"]["gpus"] == [4, 5, 6, 7]
    assert decision["placements"]["tp4-dflash"]["numa_nodes"] == [1]


def test_taking_over_must_be_asked_for() -> None:
    decision = benchmark.decide(plan("tp8-dflash"), look(), {}, PROFILES)
    assert decision["placements"] == {}
    assert decision["refused"] == [
        "tp8-dflash needs GPUs 0-7, where chat and agent serve; "
        "--take-over stops them for the benchmark and puts them back"
    ]


def test_taking_over_stops_what_stands_there_and_nothing_else() -> None:
    beside = benchmark.decide(plan("tp4-dflash"), look(), {}, PROFILES, take_over=True)
    assert beside["stop"] == []
    decision = benchmark.decide(plan("tp4-dflash", "tp8-dflash"), look(), {}, PROFILES, take_over=True)
    assert decision["refused"] == []
    assert decision["stop"] == ["chat", "agent"]
    assert decision["placements"]["tp8-dflash"]["numa"] == "span"
    assert decision["placements"]["tp4-dflash"]["gpus"] == [4, 5, 6, 7]


def test_another_tenant_is_never_taken_over() -> None:
    tenant = {"pid": 99, "name": "train.py", "gpu_index": 5, "profile": None, "guest": None}
    decision = benchmark.decide(plan("tp4-dflash"), look([tenant]), {}, PROFILES, take_over=True)
    assert "tp4-dflash" in decision["placements"]
    assert 5 not in decision["placements"]["tp4-dflash"]["gpus"]
    eight = benchmark.decide(plan("tp8-dflash"), look([tenant]), {}, PROFILES, take_over=True)
    assert eight["placements"] == {}
    assert "GPU 5 is used by pid 99 (train.py)" in eight["refused"][0]


def test_a_production_profile_is_not_benchmarked() -> None:
    decision = benchmark.decide(plan("chat"), look(), {}, PROFILES, take_over=True)
    assert "production profile" in decision["refused"][0]


def test_a_benchmark_that_runs_is_named_and_ones_own_is_waited_for() -> None:
    other = benchmark.unit_name("nightly-1", 3)
    decision = benchmark.decide(plan("tp4-dflash", run="quick-1"), look(), {"benchmarks": [other]}, PROFILES)
    assert other in decision["refused"][0]
    own = benchmark.decide(plan("tp4-dflash", run="nightly-1"), look(), {"benchmarks": [other]}, PROFILES)
    assert own["refused"] == []
    assert own["attached"] == other


def test_leftover_servers_of_benchmarks_are_found_and_production_is_not_among_them() -> None:
    units = {"tp4-dflash": {"active": "active"}, "chat": {"active": "active"}, "tp8-dflash": {"active": "inactive"}}
    decision = benchmark.decide(plan("tp4-dflash"), look(), {"units": units}, PROFILES)
    assert decision["leftovers"] == ["tp4-dflash"]


@pytest.mark.parametrize(("one", "other"), [("nightly-1", "nightly_1"), ("a-b", "a.b"), ("x", "x-1"), ("a_2d_", "a-")])
def test_two_runs_never_share_units(one: str, other: str) -> None:
    assert benchmark.unit_stem(one) != benchmark.unit_stem(other)
    assert not benchmark.unit_name(other, 1).startswith(benchmark.unit_stem(one) + "-")


@pytest.mark.parametrize(
    ("seconds", "text"), [(40, "40 s"), (119.6, "2 min"), (3600, "60 min"), (12000, "3 h 20 min"), (None, "0 s")]
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert benchmark.duration(seconds) == text


def test_an_estimate_says_what_it_assumes() -> None:
    planned = plan("tp4-dflash") | {
        "name": "x",
        "cells": 2,
        "launches": [{}, {}],
        "estimate_s": 90.0,
        "infeasible": [],
        "pace": {"prefill_tokens_per_s": 4000.0, "decode_tokens_per_s": 40.0, "launch_s": 120.0},
    }
    lines = benchmark.describe(planned, benchmark.decide(planned, look(), {}, PROFILES))
    assert lines[0] == "x: 2 cells in 2 launches to do, about 90 s"
    assert lines[1] == "assumed: prefill 4000 tok/s, decode 40 tok/s a stream, 120 s a launch"
