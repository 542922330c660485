"""recover.yml: each fault is shown first, then recover runs alone, then what serves is asked from outside of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import pytest

pytestmark = pytest.mark.lab

SERVED = {"chat": 31001, "agent": 31002}
UNITS = " ".join(f"specrig-sglang@{name}.service" for name in SERVED)
ENGINE = (
    "mkdir -p /tmp/empty-model; set -a; . /etc/specrig/profiles/chat.env; set +a;"
    " timeout 20 /opt/specrig/venv/bin/specrig sim --model-path /tmp/empty-model --tp-size 1 --port 31999"
)


def uvm_major(lab) -> int:
    return int(lab.host("awk '$2 == \"nvidia-uvm\" {print $1}' /proc/devices").stdout)


def init(lab) -> str:
    """Process id and start time of the guest's init: another guest start changes them."""
    return lab.host("pid=$(lxc-info -n gpu -p -H); cut -d' ' -f1,22 /proc/$pid/stat").stdout


def changed(output: str) -> dict[str, int]:
    return {host: int(count) for host, count in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", output, re.M)}


def last_run(lab) -> list[dict]:
    lines = [json.loads(line) for line in lab.journal.read_text().splitlines()]
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def assert_serving(lab) -> None:
    for name, port in SERVED.items():
        assert lab.tokens(port) == 8, name


def recover(lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = lab.play("recover", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def ping(lab) -> float:
    """Seconds that Ansible takes for the least it can do to host and guest."""
    begun = time.monotonic()
    done = lab.run("ansible", "-i", "inventory/lab", "all", "-m", "ansible.builtin.ping")
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def served(lab):
    """The lab, provisioned; a second provision of the finished lab changes nothing."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_serving(lab)
    return lab


def test_after_a_reboot_one_command_brings_everything_back(served):
    old = uvm_major(served)
    served.reboot()
    new = uvm_major(served)
    assert new != old

    # The fault: the engine cannot open the device, the model is gone, nothing answers.
    engine = served.guest(ENGINE)
    assert engine.returncode != 0
    assert "open /dev/nvidia-uvm: EPERM" in engine.stdout + engine.stderr
    assert served.opens(new) == "EPERM"
    assert served.guest("ls /srv/models").stdout.strip() == ""
    assert "active" not in served.guest(f"systemctl is-active {UNITS}").stdout.split()
    for port in SERVED.values():
        assert served.tokens(port) != 8
    before = init(served)

    done = recover(served, "-e", "specrig_reason='the machine rebooted'")

    assert_serving(served)
    # The guest was opened live, and the old major closed: ENXIO is "allowed, no driver behind it".
    assert init(served) == before
    assert served.opens(new) == "ENXIO"
    assert served.opens(old) == "EPERM"
    assert f"c {new}:0 rw" in served.host("cat /var/lib/lxc/gpu/config").stdout
    assert f"c {old}:" not in served.host("cat /var/lib/lxc/gpu/config").stdout
    # One screen says what was wrong, what was done, and what serves where.
    screen = done.stdout[done.stdout.rindex("recover.yml:") :]
    assert len(screen.splitlines()) <= 40
    for text in (
        "open denied (EPERM) by the device rules: nvidia-uvm nvidia-uvm-tools",
        f"stale device rules still open major {old}",
        "model Qwen3.6-27B is not in RAM",
        f"opened live: c {new}:0 rw, c {new}:1 rw",
        "staged model Qwen3.6-27B",
    ):
        assert text in screen
    assert re.search(r"chat: GPU \d · NUMA node 0 · CPUs \S+ · port 31001 · dflash · serving", screen)
    assert re.search(r"agent: GPU \d,\d · NUMA node 0 · CPUs \S+ · port 31002 · ddtree-b15 · serving", screen)
    run = last_run(served)
    assert {line["reason"] for line in run} == {"the machine rebooted"}
    assert run[-1]["event"] == "end"
    assert run[-1]["outcome"] == "changed"


def test_recovering_again_changes_nothing_in_seconds(served):
    before = init(served)
    pids = served.guest(f"systemctl show -p MainPID --value {UNITS}").stdout
    # At most 8 s on a machine that pings both in a second, warm; where others use it, all of it takes longer alike. The
    # whole suite has another lab at work on the same cores, of which a ping, that mostly waits, sees little.
    limit = 12 if "SPECRIG_TEST_BESIDE" in os.environ else 8
    tries = []
    for _attempt in range(3):
        pinged = ping(served)
        done = recover(served)
        assert changed(done.stdout) == {"lab-host": 0, "lab-guest": 0}
        slowness = max(1.0, (pinged + ping(served)) / 2)
        tries.append((last_run(served)[-1]["seconds"], slowness))
        if tries[-1][0] <= limit * slowness:
            break
    assert any(seconds <= limit * slowness for seconds, slowness in tries), tries
    assert init(served) == before
    assert served.guest(f"systemctl show -p MainPID --value {UNITS}").stdout == pids


def test_check_of_a_rebooted_lab_names_the_work_and_does_none(served):
    served.reboot()
    config = served.host("cat /var/lib/lxc/gpu/config").stdout
    new = uvm_major(served)
    done = recover(served, "--check", "--diff")
    assert f"+lxc.cgroup2.devices.allow = c {new}:0 rw" in done.stdout
    assert "would stage model Qwen3.6-27B" in done.stdout
    # On a slow machine it has used up its starts by now.
    assert re.search("would (re)?start chat", done.stdout)
    assert served.host("cat /var/lib/lxc/gpu/config").stdout == config
    assert served.opens(new) == "EPERM"
    assert served.host("test -e /run/specrig/lock").returncode != 0


def test_a_driver_that_nothing_loaded_is_loaded_first(served):
    served.host("systemctl disable specrig-gpu-nodes", check=True)
    served.reboot("none")
    assert served.host("grep -c nvidia-uvm /proc/devices").stdout.strip() == "0"
    assert served.host("test -e /dev/nvidia-uvm").returncode != 0
    check = recover(served, "--check")
    assert "unknown until loaded" in check.stdout
    assert served.host("grep -c nvidia-uvm /proc/devices").stdout.strip() == "0"

    done = recover(served)

    assert "nvidia-uvm is not loaded on the host" in done.stdout
    assert_serving(served)
    assert served.host("systemctl is-enabled specrig-gpu-nodes").stdout.strip() == "enabled"


def test_a_regular_file_in_place_of_a_node_is_healed_in_the_running_guest(served):
    # What bind,optional,create=file leaves where the guest started before the node was there.
    served.guest("systemctl stop " + UNITS, check=True)
    served.guest("umount /dev/nvidia-uvm && test -f /dev/nvidia-uvm", check=True)
    before = init(served)
    done = recover(served)
    assert "/dev/nvidia-uvm is a regular file, not a device" in done.stdout
    assert served.guest("stat -c %F /dev/nvidia-uvm").stdout.strip() == "character special file"
    assert init(served) == before
    assert_serving(served)


def test_a_stopped_guest_is_started(served):
    served.host("lxc-stop -n gpu -t 20", check=True)
    done = recover(served)
    assert "guest gpu is stopped" in done.stdout
    assert_serving(served)


def test_a_damaged_model_is_staged_again(served):
    path = "/srv/specrig/ram/Qwen3.6-27B"
    shard = served.host(f"ls {path}/*.safetensors | head -1").stdout.strip()
    served.host(f"truncate -s -1000 {shard}", check=True)
    recover(served)
    done = served.host(f"cd {path} && sha256sum --quiet -c /srv/models/Qwen3.6-27B/MANIFEST.sha256")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_serving(served)


def test_two_operators_are_kept_apart(served):
    other = {
        "schema": 1,
        "run": "another",
        "who": "someone@elsewhere",
        "playbook": "recover.yml",
        "since": "2026-01-01T00:00:00Z",
        "clock_s": float(served.host("cut -d' ' -f1 /proc/uptime").stdout),
        "ttl_s": 3600,
        "controller": "another machine",
        "controller_name": "elsewhere",
        "boot": "another boot",
        "pid": 4242,
        "started": "1",
    }
    served.host(f"mkdir -p /run/specrig && echo '{json.dumps(other)}' > /run/specrig/lock", check=True)
    try:
        done = served.play("recover")
        assert done.returncode != 0
        assert "locked by someone@elsewhere with recover.yml since 2026-01-01T00:00:00Z" in done.stdout + done.stderr
        # It is still theirs.
        assert "another" in served.host("cat /run/specrig/lock").stdout
    finally:
        served.host("rm -f /run/specrig/lock")


def test_a_failure_lets_other_operators_in_and_says_one_line(served):
    done = served.play("recover", "-e", '{"model_store_models": {"absent": {"source": "/srv/models/absent"}}}')
    assert done.returncode != 0
    screen = done.stdout[done.stdout.rindex("recover.yml: FAILED") :]
    assert "the source /srv/models/absent of model absent is not there" in screen
    assert served.host("test -e /run/specrig/lock").returncode != 0
    assert last_run(served)[-1]["outcome"] == "failed"


def test_an_interrupted_run_is_journaled_and_its_lock_taken_over(served):
    command = ["ansible-playbook", "-i", "inventory/lab", "playbooks/recover.yml"]
    with subprocess.Popen(command, env=served.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while served.host("test -e /run/specrig/lock").returncode != 0:
            assert time.monotonic() < deadline, "the run never took the lock"
            assert process.poll() is None, "the run ended before it was interrupted"
        os.kill(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    assert process.returncode != 0
    assert last_run(served)[-1]["event"] == "end"
    assert last_run(served)[-1]["outcome"] == "aborted"
    assert served.host("test -e /run/specrig/lock").returncode == 0
    done = recover(served)
    assert "took over the lock of" in done.stdout
    assert served.host("test -e /run/specrig/lock").returncode != 0
    assert_serving(served)
