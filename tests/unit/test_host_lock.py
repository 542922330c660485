"""The host's lock: who gets it, who is told what, and when it is taken over."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

basic = pytest.importorskip("ansible.module_utils.basic")
PLUGINS = "ansible_collections.specrig.host.plugins."

HERE = {"controller": "m1", "boot": "b1", "controller_name": "desk", "pid": 100, "started": "5", "who": "ann@desk"}
ANN = {**HERE, "run": "r1", "playbook": "recover.yml", "reason": "reboot"}
BOB = {**HERE, "run": "r2", "playbook": "provision.yml", "reason": None, "pid": 200, "who": "bob@desk"}


@pytest.fixture
def lock(tmp_path: Path, repository: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    module = importlib.import_module(PLUGINS + "modules.host_lock")
    now = {"s": 1000.0}
    monkeypatch.setattr(module, "clock_s", lambda: now["s"])

    def call(owner: dict[str, Any], check: bool = False, **more: Any) -> dict[str, Any]:
        parameters = {"path": str(tmp_path / "run" / "lock"), "owner": owner, "ttl_s": 600, **more}
        arguments = {"ANSIBLE_MODULE_ARGS": {**parameters, "_ansible_check_mode": check}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    call.file = tmp_path / "run" / "lock"
    call.now = now
    return call


@pytest.fixture
def action(repository: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    return importlib.import_module(PLUGINS + "action.host_lock")


def test_the_second_is_told_who_since_when_and_what_to_do(lock):
    assert lock(ANN)["holder"]["who"] == "ann@desk"
    lock.now["s"] += 90
    done = lock(BOB)
    assert done["failed"] is True
    assert done["msg"].startswith("this host is locked by ann@desk with recover.yml since 20")
    assert "(90 s ago), process 100, reason: reboot: wait for it to end" in done["msg"]
    assert f"remove {lock.file} on the host" in done["msg"]
    assert "\n" not in done["msg"]
    assert json.loads(lock.file.read_text())["run"] == "r1"


def test_it_is_free_again_after_the_first_gives_it_back(lock):
    lock(ANN)
    assert lock(ANN, state="free")["holder"] is None
    assert not lock.file.exists()
    assert lock(BOB)["holder"]["run"] == "r2"


def test_taking_it_twice_and_giving_back_what_one_has_not_is_harmless(lock):
    first = lock(ANN)["holder"]
    lock.now["s"] += 30
    second = lock(ANN)
    assert second["changed"] is False
    assert second["holder"]["clock_s"] == first["clock_s"]
    lock(BOB, state="free")
    assert json.loads(lock.file.read_text())["run"] == "r1"


def test_a_lock_of_a_controller_that_is_gone_is_taken_over_and_said_so(lock):
    lock(ANN)
    done = lock(BOB, gone_run="r1")
    assert done["holder"]["run"] == "r2"
    assert done["taken_over"]["run"] == "r1"
    assert done["specrig"]["notes"][0].startswith("took over the lock of ann@desk with recover.yml")
    # Only the run that was seen to be gone: not one that took the lock meanwhile.
    assert lock(ANN, gone_run="r1")["failed"] is True


def test_an_old_lock_is_taken_over_by_what_its_holder_allowed(lock):
    lock(ANN)
    lock.now["s"] += 600
    assert lock(BOB, ttl_s=1)["failed"] is True
    lock.now["s"] += 1
    done = lock(BOB)
    assert "it is 10 min old and was given 10 min" in done["specrig"]["notes"][0]


def test_a_file_that_makes_no_sense_does_not_lock_for_ever(lock):
    lock.file.parent.mkdir()
    lock.file.write_text("{")
    assert lock(BOB)["holder"]["run"] == "r2"


def test_a_check_takes_nothing_and_is_not_stopped(lock):
    assert lock(ANN, check=True)["holder"] is None
    assert not lock.file.parent.exists()
    lock(ANN)
    done = lock(BOB, check=True)
    assert "failed" not in done
    assert done["specrig"]["notes"][0].startswith("the host is locked by ann@desk")


def test_a_process_is_gone_only_where_that_is_known(action, monkeypatch):
    here = {**action.controller(), "pid": os.getpid(), "started": action.process_started(os.getpid())}
    assert action.is_gone(here) is False
    # The same number with another start time is another process.
    assert action.is_gone({**here, "started": "1"}) is True
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        record = {**here, "pid": child.pid, "started": action.process_started(child.pid)}
        assert action.is_gone(record) is False
    assert action.is_gone(record) is True
    assert action.is_gone({**record, "boot": "an earlier one"}) is True
    assert action.is_gone({**record, "controller": "another machine", "controller_name": "elsewhere"}) is False
    assert action.is_gone({**record, "started": None}) is False
    assert action.is_gone({}) is False
    monkeypatch.setattr(action, "_read", lambda path: None)
    assert action.is_gone(record) is False


@pytest.mark.parametrize(
    "damage",
    [{"clock_s": "x"}, {"ttl_s": []}, {"ttl_s": True}, {"run": 7}, {"run": None}],
    ids=["clock", "ttl", "ttl-bool", "run", "no-run"],
)
def test_a_record_of_wrong_types_is_taken_over_as_unreadable(lock, damage):
    lock(ANN)
    lock.file.write_text(json.dumps({**json.loads(lock.file.read_text()), **damage}))
    done = lock(BOB)
    assert done["holder"]["run"] == "r2"
    assert done["specrig"]["notes"] == ["took over the lock of an unknown run: its file could not be read"]


@pytest.mark.parametrize("state", ["held", "free"])
def test_something_else_in_the_locks_place_is_one_line(lock, state):
    lock.file.mkdir(parents=True)
    done = lock(ANN, state=state)
    assert done["failed"] is True
    assert done["msg"].startswith(f"the lock {lock.file} cannot be written (Is a directory)")


def test_a_process_that_ended_and_that_nobody_waited_for_is_gone(action):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = {**action.controller(), "pid": child.pid, "started": action.process_started(child.pid)}
    assert action.is_gone(record) is False
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it ended, and stays a zombie
    try:
        assert Path(f"/proc/{child.pid}").exists()
        assert action.is_gone(record) is True
    finally:
        child.communicate()
