"""How units are stopped and started: all at once where their GPUs are free, and each when its models are there."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$SYSTEMCTL_LOG"
"""
PROFILES = {
    "chat": {"model": "Draft", "tp": 1, "method": "autoregressive", "port": 31001, "serve": True},
    "agent": {
        "model": "Big",
        "tp": 2,
        "method": "dflash",
        "draft_model": "/srv/models/Draft",
        "port": 31002,
        "serve": True,
    },
    "tp1-old": {"model": "Big", "tp": 1, "method": "autoregressive", "port": 31101},
}
for _row in PROFILES.values():
    _row["context_length"] = 32768
SETTINGS = {
    "engine": {"kind": "sglang", "command": ["/opt/engine/bin/python", "-m", "sglang.launch_server"]},
    "model_root": "/srv/models",
}


def placed(**gpus: list[int]) -> dict[str, Any]:
    rows = {
        name: {"gpus": which, "guest_gpus": which, "numa_nodes": [0], "cpus": "", "memory_nodes": [], "numa": "local"}
        for name, which in gpus.items()
    }
    return {"profiles": rows, "refused": {}}


def looked(active: dict[str, str], failed: tuple[str, ...] = ()) -> dict[str, Any]:
    """What serving_look saw: running servers with the GPUs of their environment, in another state than planned."""
    units = {
        name: {"load": "loaded", "active": "active", "sub": "running", "main_pid": 100 + number, "enabled": "enabled"}
        for number, name in enumerate(active)
    }
    units.update({name: {"load": "loaded", "active": "failed", "enabled": "enabled"} for name in failed})
    processes = {
        name: {"pid": units[name]["main_pid"], "environ": {"CUDA_VISIBLE_DEVICES": seen}, "cmdline": ["other"]}
        for name, seen in active.items()
    }
    return {"units": units, "processes": processes, "benchmarks": []}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A systemctl that does nothing; returns what it was asked, without what only looks or reloads."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "systemctl").write_text(SYSTEMCTL)
    (folder / "systemctl").chmod(0o755)
    log = tmp_path / "systemctl.log"
    log.write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SYSTEMCTL_LOG", str(log))

    def read() -> list[str]:
        lines = [line.replace("specrig-sglang@", "").replace(".service", "") for line in log.read_text().splitlines()]
        return [line for line in lines if line.split()[0] in ("--no-block", "stop", "start", "restart")]

    return read


@pytest.fixture
def state(run: Any, calls: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs serving_state with unit files in a folder of the test."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module("ansible_collections.specrig.host.plugins.modules.serving_state")
    monkeypatch.setattr(module, "SYSTEM", str(tmp_path / "system"))
    monkeypatch.setattr(module.serving, "CLIENT_ENV", str(tmp_path / "client.env"))

    def call(**more: Any) -> dict[str, Any]:
        unit = {"config_dir": str(tmp_path / "profiles")}
        return run("serving_state", profiles=PROFILES, settings={**SETTINGS, "unit": unit}, **more)

    return call


def test_servers_that_are_down_start_in_one_call(state: Any, calls: Any) -> None:
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({}))
    assert calls() == ["--no-block start chat agent"]
    assert result["started"] == ["chat", "agent"]
    assert result["waiting"] == {}


def test_keys_of_a_profile_are_in_no_log_of_the_machine_and_in_nothing_that_is_returned(
    state: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ansible logs a module's arguments where it runs, and returns them: a profile's env and extra_args too."""
    basic = pytest.importorskip("ansible.module_utils.basic")
    logged: list[str] = []
    monkeypatch.setattr(basic.AnsibleModule, "log", lambda _self, text, *_, **__: logged.append(str(text)))
    monkeypatch.setitem(PROFILES["chat"], "env", {"HF_TOKEN": "hf_4711471147", "TOKENIZERS_PARALLELISM": "true"})
    monkeypatch.setitem(PROFILES["chat"], "extra_args", ["--api-key", "sk-08150815"])
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({}))
    assert result["started"] == ["chat", "agent"]
    assert result["invocation"]["module_args"]["profiles"]["chat"]["env"]["TOKENIZERS_PARALLELISM"] == "true"
    for secret in ("hf_4711471147", "sk-08150815"):
        assert secret not in json.dumps(result)
        assert secret not in str(logged)


def test_a_server_whose_gpu_is_taken_waits_for_the_stop_and_the_other_does_not(state: Any, calls: Any) -> None:
    # The leftover of a benchmark sits on agent's GPU 3.
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({"tp1-old": "3"}))
    assert calls() == [
        "--no-block stop tp1-old",
        "--no-block start chat",
        "stop tp1-old",
        "--no-block restart agent",
    ]
    assert result["stopped"] == ["tp1-old"]


def test_servers_that_change_places_both_stop_before_one_starts(state: Any, calls: Any) -> None:
    state(placement=placed(chat=[2], agent=[0, 1]), look=looked({"chat": "0", "agent": "2,3"}))
    assert calls() == ["--no-block stop chat agent", "stop chat agent", "--no-block restart chat agent"]


def test_one_that_takes_a_gpu_and_gives_none_is_restarted_too(state: Any, calls: Any) -> None:
    # agent is to have chat's GPU 1; nobody wants agent's, so it runs until chat has stopped.
    state(placement=placed(chat=[0], agent=[1, 2]), look=looked({"chat": "1", "agent": "2,3"}))
    assert calls() == ["--no-block stop chat", "stop chat", "--no-block restart chat agent"]


def test_servers_that_stay_where_they_are_restart_in_one_call(state: Any, calls: Any) -> None:
    state(placement=placed(chat=[0], agent=[2, 3]), look=looked({"chat": "0", "agent": "2,3"}))
    assert calls() == ["--no-block restart chat agent"]


def test_what_is_being_staged_is_waited_for_by_those_that_need_it(state: Any, calls: Any, run: Any) -> None:
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({}, ("agent",)), missing_models=["Big"])
    assert calls() == ["--no-block start chat"]
    assert result["waiting"] == {"agent": {"models": ["Big"], "verb": "started"}}
    assert [target["name"] for target in result["targets"] if target["fresh"]] == ["chat", "agent"]
    assert "started agent" not in result["specrig"]["changed"]

    early = run("serving_release", waiting=result["waiting"], staged=["Draft"])
    assert (early["changed"], early["started"]) == (False, [])
    assert early["waiting"] == result["waiting"]
    assert calls() == ["--no-block start chat"]
    late = run("serving_release", waiting=early["waiting"], staged=["Draft", "Big"])
    assert (late["changed"], late["started"], late["waiting"], late["given_up"]) == (True, ["agent"], {}, {})
    assert late["specrig"] == {"changed": ["started agent"]}
    assert calls() == ["--no-block start chat", "--no-block restart agent"]


def test_the_draft_is_waited_for_as_the_target_is(state: Any, calls: Any) -> None:
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({}), missing_models=["Big", "Draft"])
    assert calls() == []
    assert {name: row["models"] for name, row in result["waiting"].items()} == {
        "chat": ["Draft"],
        "agent": ["Big", "Draft"],
    }


def test_who_waits_for_a_model_lets_go_of_a_gpu_that_another_needs(state: Any, calls: Any) -> None:
    # agent sits on chat's GPU and may not start again before its model is there.
    result = state(placement=placed(chat=[0], agent=[2, 3]), look=looked({"agent": "0,1"}), missing_models=["Big"])
    assert calls() == ["--no-block stop agent", "stop agent", "--no-block restart chat"]
    assert result["waiting"] == {"agent": {"models": ["Big"], "verb": "restarted"}}


def test_a_model_that_will_not_come_is_a_line_for_each_that_needs_it(run: Any, calls: Any) -> None:
    waiting = {
        "agent": {"models": ["Big"], "verb": "started"},
        "other": {"models": ["Huge", "Big"], "verb": "restarted"},
    }
    lost = run(
        "serving_release", waiting=waiting, lost={"Big": "its source is gone"}, given_up={"first": "first: gone"}
    )
    assert lost["waiting"] == {}
    assert lost["given_up"] == {
        "first": "first: gone",
        "agent": "agent: its model Big is not there: its source is gone",
        "other": "other: its model Big is not there: its source is gone",
    }
    assert (lost["changed"], calls()) == (False, [])


def test_check_mode_starts_nothing_and_says_what_it_would(run: Any, calls: Any) -> None:
    waiting = {"agent": {"models": ["Big"], "verb": "restarted"}}
    result = run("serving_release", check=True, waiting=waiting, staged=["Big"])
    assert result["specrig"] == {"changed": ["would restart agent"]}
    assert calls() == []


# what waits for it knows where it goes on


def test_the_staging_is_that_of_the_guest_or_of_its_host(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    staging = importlib.import_module("ansible_collections.specrig.host.plugins.filter.model_staging").model_staging
    models = {"A": {"complete": True}, "C": {"complete": False}, "B": {"complete": False}}
    job = {"model_store_job": {"ansible_job_id": "j1.2"}, "__model_store_look": {"models": models}}
    skipped = {"model_store_job": {"skipped": True}, "__model_store_look": {"models": models}}
    assert staging({"host": job, "guest": {}}, ["guest", "host"], 60) == {
        "job": "j1.2",
        "machine": "host",
        "models": ["B", "C"],
        "timeout_s": 60,
    }
    assert staging({"host": skipped, "guest": job}, ["guest", "host"], 60)["machine"] == "guest"
    nothing = staging({"host": skipped, "guest": {}}, ["guest", "host"])
    assert (nothing["job"], nothing["models"]) == ("", [])
    assert json.dumps(nothing)
