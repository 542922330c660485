"""Which engine processes nobody answers for, and which of them are proven to be ours."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specrig.facts import engineprocs, orphans

UNIT = "specrig-sglang@agent.service"
USER = {"uid": 999}
RUNNING = {"agent": {"active": "active", "main_pid": 100}}


def process(pid=200, **changes):
    return {
        "pid": pid,
        "guest_pid": None,
        "ppid": 1,
        "uid": 999,
        "title": "sglang::scheduler",
        "command": "sglang::scheduler",
        "guest": None,
        "unit": UNIT,
        "profile": "agent",
        "named_profile": "agent",
        "visible": "1",
        "cpus_allowed": "0",
        "mems_allowed": "0",
        "memory_policy": None,
        "minors": [3],
        "ports": [],
        "started": 5000,
        "age_s": 7300.0,
        **changes,
    }


def loose(pid=200, **changes):
    """One outside of our units: started by hand, with the environment file of a profile."""
    return process(pid, **{"unit": None, "profile": None, **changes})


MAIN = process(100, command="/opt/specrig/venv/bin/python /opt/specrig/venv/bin/specrig sim", title="specrig sim")


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        (["sglang::scheduler_TP0"], True),
        (["sglang::detokenizer"], True),
        (["/opt/sglang/bin/python", "-m", "sglang.launch_server", "--port", "1"], True),
        (["/opt/sglang/bin/python", "/opt/sglang/bin/sglang", "serve"], True),
        (["/opt/sglang/bin/sglang", "serve"], True),
        (["/opt/specrig/venv/bin/python3", "/opt/specrig/venv/bin/specrig", "sim", "--port"], True),
        (["python", "-m", "specrig.sim"], True),
        (["/opt/specrig/venv/bin/specrig", "load"], False),
        (["vim", "sglang.launch_server.txt"], False),
        (["grep", "sglang::scheduler"], False),
        (["bash"], False),
        ([""], False),
        ([], False),
    ],
)
def test_an_engine_is_known_by_its_title_or_its_command(words, engine):
    assert orphans.is_engine(words) is engine


def test_the_processes_of_a_running_unit_are_nobody_s_orphans():
    rank = process(101, ppid=100)
    # A helper that lost its parent, but came after the server's own start.
    helper = process(102, ppid=1, started=6000)
    assert orphans.find([MAIN, rank, helper], RUNNING, USER) == []


@pytest.mark.parametrize("active", ["inactive", "failed", None])
def test_a_rank_that_outlived_its_unit_is_an_orphan_of_ours(active):
    units = {"agent": {"active": active, "main_pid": None}} if active else {}
    (row,) = orphans.find([process()], units, USER)
    assert row["ours"]
    assert row["profile"] == "agent"
    assert row["why"] == f"its unit {UNIT} is {active or 'gone'}"


def test_a_rank_from_before_the_server_s_own_start_is_one_too():
    """KillMode=process left it, and systemd started the unit again around it."""
    old = process(90, started=4000)
    child = process(91, ppid=90, started=4001)
    found = orphans.find([MAIN, old, child], RUNNING, USER)
    assert [row["pid"] for row in found if row["ours"]] == [90, 91]
    assert found[0]["why"] == "it is older than the server of its unit"


@pytest.mark.parametrize("unit", [None, "session-3.scope", "init.scope"])
def test_a_server_started_by_hand_with_our_environment_whose_parent_is_gone(unit):
    (row,) = orphans.find([loose(unit=unit)], RUNNING, USER)
    assert row["ours"]
    assert row["why"] == "no unit started it and its parent is gone"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (process(uid=0), "its user is not the service user"),
        (loose(uid=1000), "its user is not the service user"),
        (loose(named_profile=None), "neither its control group nor its environment names one of our profiles"),
        (loose(unit="mytest.service"), "it belongs to mytest.service"),
        (loose(unit="docker-12.scope"), "it belongs to docker-12.scope"),
        (loose(command="python3 train.py"), "it is no engine's process"),
        # Its parent lives: somebody sits before it.
        (loose(ppid=77), "somebody runs it"),
    ],
)
def test_what_is_not_proven_to_be_ours_is_named_and_left_alone(row, why):
    (found,) = orphans.find([row], {}, USER)
    assert not found["ours"]
    assert found["why"] == why


def test_where_systemd_gives_no_answer_no_server_is_taken_for_an_orphan():
    """It may serve: that its unit runs can't be told. One that no unit started is told without systemd."""
    served, by_hand = orphans.find([MAIN, loose(300, ppid=1)], None, USER)
    assert (served["ours"], by_hand["ours"]) == (None, True)
    assert "systemd in the guest cannot be asked" in served["why"]
    row = orphans.gate([served], [])
    assert row["status"] == "unknown"
    assert "orphans are not told from servers" in row["message"]
    assert orphans.gate([served, by_hand], [])["status"] == "fail"


@pytest.mark.parametrize("answer", [OSError("none"), subprocess.TimeoutExpired("systemctl", 30), 1])
def test_systemd_that_cannot_be_asked_is_not_systemd_without_units(monkeypatch, answer):
    def ask(*_args, **_more):
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess([], answer, stdout=b"")

    monkeypatch.setattr(engineprocs.subprocess, "run", ask)
    assert engineprocs.units() is None
    monkeypatch.setattr(
        engineprocs.subprocess,
        "run",
        lambda *_args, **_more: subprocess.CompletedProcess(
            [], 0, stdout=f"Id={UNIT}\nActiveState=active\nMainPID=100\n".encode()
        ),
    )
    assert engineprocs.units() == RUNNING


def test_without_a_service_user_nothing_is_ours():
    (found,) = orphans.find([process()], {}, None)
    assert not found["ours"]
    assert found["why"] == "the guest has no service user"


def test_a_loop_of_parents_ends():
    rows = [loose(5, ppid=6), loose(6, ppid=5)]
    assert [row["ours"] for row in orphans.find(rows, {}, USER)] == [False, False]


LOOK = {
    "gpus": [{"index": 0, "minor": 2}, {"index": 1, "minor": 3}],
    "processes": [
        {"pid": 91234, "guest_pid": 200, "guest": "gpu", "gpu_index": 1, "memory_mib": 71230},
        {"pid": 95555, "guest_pid": 200, "guest": "other", "gpu_index": 0, "memory_mib": 5},
    ],
}


def test_an_orphan_is_named_with_pid_user_age_gpu_memory_and_port():
    (row,) = orphans.on_gpus([process(ports=[31002])], LOOK, "gpu")
    assert (row["gpus"], row["memory_mib"]) == ([1], 71230)
    assert orphans.text(row, {999: "specrig"}) == (
        "sglang::scheduler (pid 200, user specrig, 2 h old, GPU 1, 71230 MiB, port 31002)"
    )


def test_memory_that_the_host_does_not_list_is_unknown_and_not_0():
    (row,) = orphans.on_gpus([process()], {**LOOK, "processes": []}, "gpu")
    assert row["memory_mib"] is None
    assert orphans.text(row) == "sglang::scheduler (pid 200, user 999, 2 h old, GPU 1, GPU memory unknown)"
    # Without a host's look it is the node's own number that is known.
    assert "/dev/nvidia3" in orphans.text(process())


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.4, "5 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h"), (200000, "2 d")]
)
def test_an_age_in_words(seconds, text):
    assert orphans.age_text(seconds) == text


def test_the_gate_fails_for_ours_and_names_a_stranger_in_the_way():
    ours, stranger, harmless = orphans.find([process(), loose(201, uid=0), loose(202, uid=0, minors=[])], {}, USER)
    row = orphans.gate([ours, stranger, harmless], [31002])
    assert row["status"] == "fail"
    assert row["seen"] == [200, 201]
    assert "run recover, which stops ours" in row["message"]
    alone = orphans.gate([stranger], [31002])
    assert alone["status"] == "pass"
    assert "not ours: its user is not the service user" in alone["message"]
    assert orphans.gate([], [])["message"] == "none"


# ---- from /proc, and stopping ----


@pytest.fixture
def engine():
    """A live process that looks like an engine's: named so, with our variable."""
    code = "import sys, time; print('up', flush=True); time.sleep(600)"
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        executable=sys.executable,
        env={**os.environ, "SPECRIG_PROFILE": "agent", "CUDA_VISIBLE_DEVICES": "4,5"},
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    started.stdout.readline()
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def test_a_process_is_read_with_what_its_placement_is_told_by(engine):
    (row,) = [row for row in engineprocs.gather() if row["pid"] == engine.pid]
    assert (row["named_profile"], row["visible"]) == ("agent", "4,5")
    assert row["uid"] == os.getuid()
    assert row["ppid"] == os.getpid()
    assert row["started"] > 0
    assert 0 <= row["age_s"] < 600
    assert row["minors"] == []
    assert row["profile"] is None


def test_a_listening_port_is_read(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inode = str(Path(f"/proc/self/fd/{listener.fileno()}").readlink())[8:-1]
        assert engineprocs._listening("/proc")[inode] == listener.getsockname()[1]
        assert inode in engineprocs._descriptors("/proc/self", 195)[1]


def test_the_policies_of_the_first_mappings(tmp_path: Path):
    lines = [f"{n:08x} bind:1 file=/x mapped=3 N1=3" for n in range(4)] + ["00ff0000 default anon=1"]
    (tmp_path / "numa_maps").write_text("\n".join(lines) + "\n7fff")
    assert engineprocs.policies(str(tmp_path)) == ["bind:1", "default"]
    assert engineprocs.policies(str(tmp_path / "nowhere")) is None


def test_a_pid_that_means_another_process_by_now_is_not_touched(run, engine):
    pytest.importorskip("ansible.module_utils.basic")
    row = {**loose(engine.pid), "ours": True, "why": "x", "started": 1, "uid": os.getuid()}
    done = run("serving_orphans", rows=[row], user="root")
    assert done["stopped"] == []
    assert not done["changed"]
    assert engine.poll() is None


def test_one_that_somebody_runs_is_not_touched_either(run, engine):
    """Its parent lives, so it is no orphan whatever an older look said."""
    pytest.importorskip("ansible.module_utils.basic")
    (seen,) = [row for row in engineprocs.gather() if row["pid"] == engine.pid]
    done = run("serving_orphans", rows=[{**seen, "profile": "agent", "ours": True, "why": "x"}], user="root")
    assert done["stopped"] == []
    assert engine.poll() is None


ORPHAN = """
import os, signal, subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen(
    ["sglang::scheduler", "-c", code], executable=sys.executable, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    start_new_session=True, env={**os.environ, "SPECRIG_PROFILE": "agent"},
)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.mark.timeout(120)
def test_an_orphan_of_ours_is_stopped_also_where_it_does_not_hear_sigterm(run, monkeypatch):
    pytest.importorskip("ansible.module_utils.basic")
    done = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    pid = int(done.stdout)
    try:
        (seen,) = [row for row in engineprocs.gather() if row["pid"] == pid]
        assert seen["title"] == "sglang::scheduler"
        # Where this test runs, a reaper may stand in for pid 1, and the tests' own unit may be one.
        if seen["ppid"] != 1:
            pytest.skip("orphans of this machine are not handed to pid 1")
        monkeypatch.setattr(orphans, "_SESSION", re.compile(".*"))
        me = {"uid": os.getuid()}
        (row,) = [row for row in orphans.find(engineprocs.gather(), {}, me) if row["pid"] == pid]
        assert row["ours"], row["why"]
        told = run("serving_orphans", check=True, rows=[row], user=pwd.getpwuid(os.getuid()).pw_name, grace_s=0.2)
        assert told["stopped"] == [pid]
        os.kill(pid, 0)
        told = run("serving_orphans", rows=[row], user=pwd.getpwuid(os.getuid()).pw_name, grace_s=0.2)
        assert told["stopped"] == [pid]
        assert told["changed"]
        assert told["specrig"]["changed"] == [f"stopped orphan {pid} of agent"]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(one["pid"] == pid for one in engineprocs.gather()):
            time.sleep(0.05)
        assert not any(one["pid"] == pid for one in engineprocs.gather())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
