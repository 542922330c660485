"""provision.yml: from the bare lab to serving, once; then nothing to change; checks that change nothing."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.lab

SERVED = {"chat": 31001, "agent": 31002}

HOST_STATE = (
    "sha256sum /var/lib/lxc/gpu/config /etc/systemd/system/* 2>/dev/null | sort;"
    " ls -lR /etc/systemd/system /usr/local/lib /var/lib/specrig 2>/dev/null;"
    " ls -l /dev | grep nvidia; grep specrig /proc/mounts; ls -a /run/specrig /srv 2>/dev/null; lxc-info -n gpu -s -p"
)
GUEST_STATE = (
    "cat /etc/passwd; sha256sum /etc/systemd/system/*.service 2>/dev/null;"
    " ls -R /etc/systemd/system /etc/specrig 2>/dev/null;"
    " ls -l /dev | grep nvidia; ls -a /dev /srv /opt; systemctl show -p MainPID,ActiveState specrig-sglang@chat"
    " specrig-sglang@agent"
)


def recap(output: str) -> dict[str, dict[str, int]]:
    """The counts of Ansible's recap by host."""
    rows = re.findall(r"^(\S+)\s+: (ok=.*)$", output, re.M)
    return {host: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in rows}


def state(lab) -> str:
    return lab.host(HOST_STATE).stdout + "\n---\n" + lab.guest(GUEST_STATE).stdout


@pytest.fixture(scope="module")
def bare(lab):
    lab.bare()
    return lab


def test_check_of_the_bare_lab_shows_the_work_and_does_none(bare):
    before = state(bare)
    done = bare.play("provision", "--check", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert state(bare) == before
    # The diff is of the real files: the rule for the major that the driver has now, in the guest's config.
    major = bare.host("awk '$2 == \"nvidia-uvm\" {print $1}' /proc/devices").stdout.strip()
    assert f"+lxc.cgroup2.devices.allow = c {major}:0 rw" in done.stdout
    assert "would stage model Qwen3.6-27B" in done.stdout
    assert recap(done.stdout)["lab-host"]["changed"] > 0
    assert recap(done.stdout)["lab-guest"]["changed"] > 0


def test_the_bare_lab_serves_afterwards(bare):
    init = bare.host("lxc-info -n gpu -p -H").stdout
    done = bare.play("provision", "-e", "specrig_reason='first set-up'")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, port in SERVED.items():
        answer = bare.completion(port)
        assert answer["meta_info"]["completion_tokens"] == 8, name
    # Nodes and models were shown to the running guest; it was not restarted for them.
    assert bare.host("lxc-info -n gpu -p -H").stdout == init
    assert "serving    chat: GPU" in done.stdout
    lines = [json.loads(line) for line in bare.journal.read_text().splitlines()]
    run = [line for line in lines if line["run"] == lines[-1]["run"]]
    assert [line["event"] for line in (run[0], run[-1])] == ["start", "end"]
    assert {line["reason"] for line in run} == {"first set-up"}
    assert any(line["event"] == "gate" and line["outcome"] == "ok" for line in run)
    assert bare.host("test -e /run/specrig/lock").returncode != 0


def test_the_model_is_read_only_in_the_guest_and_lies_in_ram(bare):
    assert bare.host("findmnt -no FSTYPE /srv/specrig/ram").stdout.strip() == "tmpfs"
    assert "Read-only" in bare.guest("touch /srv/models/x").stderr
    check = "cd /srv/specrig/ram/Qwen3.6-27B && sha256sum --quiet -c /srv/models/Qwen3.6-27B/MANIFEST.sha256"
    done = bare.host(check)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_run_changes_nothing(bare):
    done = bare.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {host: counts["changed"] for host, counts in recap(done.stdout).items()} == {"lab-host": 0, "lab-guest": 0}


def test_check_of_the_finished_lab_changes_nothing_and_says_so(bare):
    before = state(bare)
    done = bare.play("provision", "--check", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {host: counts["changed"] for host, counts in recap(done.stdout).items()} == {"lab-host": 0, "lab-guest": 0}
    assert "\n+++ " not in done.stdout
    assert state(bare) == before
