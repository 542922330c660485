"""The host as its own controller: it recovers by itself after a boot, and enters its guest as a controller does."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SERVED = {"chat": 31001, "agent": 31002}
# Runs a command and prints the most memory that it, or one of its children, ever had.
MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)
print("peak_kib", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""
LARGE_MIB = 192
Run = Callable[..., subprocess.CompletedProcess[str]]


def init(lab: Any) -> str:
    """Process id and start time of the guest's init: another guest start changes them."""
    return str(lab.host("pid=$(lxc-info -n gpu -p -H); cut -d' ' -f1,22 /proc/$pid/stat", check=True).stdout)


def settings(lab: Any) -> str:
    return str(lab.guest("cat /etc/specrig/profiles/chat.env /etc/specrig/profiles/agent.env", check=True).stdout)


def shown(lab: Any, unit: str, *names: str) -> list[str]:
    text = lab.host(f"systemctl show {unit} -p {','.join(names)}", check=True).stdout
    values = dict(line.split("=", 1) for line in text.splitlines())
    return [values[name] for name in names]


@pytest.fixture(scope="module")
def own(lab: Any) -> Iterator[Any]:
    """The lab, provisioned with recovery at boot; afterwards boots are as they were."""
    done = lab.play("provision", "-e", '{"boot_recovery_enabled": true}')
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        yield lab
    finally:
        lab.play("boot", "-e", '{"boot_recovery_enabled": false}')


def test_a_reboot_and_waiting_bring_everything_back(own: Any) -> None:
    before = settings(own)
    # Nothing is loaded: the host's own unit has to do that, before the guest starts and before the recovery.
    own.reboot("none")
    deadline = time.monotonic() + 180
    while (state := shown(own, "specrig-recover", "SubState", "Result"))[0] not in ("exited", "failed"):
        assert time.monotonic() < deadline, f"still {state}"
        time.sleep(1)
    log = own.host("journalctl -b -u specrig-recover -o cat --no-pager", check=True).stdout
    assert state == ["exited", "success"], log

    for name, port in SERVED.items():
        assert own.tokens(port) == 8, name
    assert settings(own) == before, "profiles are where the other controller put them"

    # The screen is on disk and in the system's journal, the recovery's journal says why.
    told = own.host("cat /var/log/specrig/recover-at-boot.txt", check=True).stdout
    assert told.startswith("at 2")
    for text in (
        "recover.yml: done",
        "model Qwen3.6-27B is not in RAM",
        "chat: GPU 0 · ",
        r"gates      all \d+ passed",
    ):
        assert re.search(text, told), told
        assert re.search(text, log), log
    lines = [
        json.loads(line) for line in own.host("cat /var/log/specrig/journal.jsonl", check=True).stdout.splitlines()
    ]
    assert (lines[-1]["event"], lines[-1]["outcome"], lines[-1]["reason"]) == ("end", "changed", "the host booted")
    assert lines[-1]["by"] == "root@lab-host"

    # After the driver and the guests, and nothing waited for it.
    began, ended = shown(own, "specrig-recover", "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic")
    for unit in ("specrig-gpu-nodes", "lxc"):
        (ready,) = shown(own, unit, "ActiveEnterTimestampMonotonic")
        assert 0 < int(ready) < int(began), unit
    # The nodes were there before the first guest started, and on Proxmox VE they will be too.
    (nodes,) = shown(own, "specrig-gpu-nodes", "ActiveEnterTimestampMonotonic")
    (guests,) = shown(own, "lxc", "InactiveExitTimestampMonotonic")
    assert 0 < int(nodes) <= int(guests)
    assert "pve-guests.service" in shown(own, "specrig-gpu-nodes", "Before")[0].split()
    assert own.guest("stat -c %F /dev/nvidia-uvm", check=True).stdout.strip() == "character special file"
    (booted,) = shown(own, "multi-user.target", "ActiveEnterTimestampMonotonic")
    assert 0 < int(booted) < int(ended)

    # To stop the unit takes nothing away again.
    guest = init(own)
    own.host("systemctl stop specrig-recover", check=True)
    assert init(own) == guest


def test_a_recovery_that_fails_is_tried_again_and_one_that_cannot_work_is_not(own: Any) -> None:
    folder = "/run/systemd/system/specrig-recover.service.d"
    for code, ends in ((1, ["exited", "success"]), (2, ["failed", "exit-code"])):
        line = f"test -e /run/specrig-tried || {{ touch /run/specrig-tried; exit {code}; }}"
        dropin = f'[Service]\nRestartSec=100ms\nExecStart=\nExecStart=/bin/sh -c "{line}"\n'
        try:
            own.host(f"mkdir -p {folder} && printf %s {shlex.quote(dropin)} > {folder}/zz-test.conf", check=True)
            own.host("systemctl daemon-reload && systemctl restart specrig-recover", check=True)
            deadline = time.monotonic() + 30
            while (state := shown(own, "specrig-recover", "SubState", "Result")) != ends:
                assert time.monotonic() < deadline, f"exit code {code}: still {state}"
                time.sleep(0.2)
        finally:
            own.host(f"rm -rf {folder} /run/specrig-tried; systemctl daemon-reload; systemctl stop specrig-recover")
            own.host("systemctl reset-failed specrig-recover")


def test_the_host_is_captured_for_a_bug_report_that_names_no_card(own: Any) -> None:
    specrig = "/opt/specrig/controller/bin/specrig"
    uuids = own.host("nvidia-smi --query-gpu=uuid --format=csv,noheader", check=True).stdout.split()
    assert len(set(uuids)) == 8
    try:
        own.host(f"{specrig} capture /tmp/report", check=True)
        told = own.host(f"{specrig} topology --from /tmp/report --tp 4", check=True).stdout
        kinds = own.host(f"{specrig} explain /tmp/report/files/proc/devices", check=True).stdout
        for uuid in uuids:
            assert own.host(f"grep -rli -e {uuid.removeprefix('GPU-')} /tmp/report").stdout == ""
    finally:
        own.host("rm -rf /tmp/report")
    assert "NUMA node 1: GPUs 4-7" in told
    assert "chat" in told, "the process that serves is seen, with its profile"
    assert "nvidia-uvm" in kinds


@pytest.fixture(params=["lxc_ssh", "lxc_local"])
def ad_hoc(own: Any, request: pytest.FixtureRequest) -> Run:
    """Runs one of Ansible's commands on the guest: from this machine by SSH, or on the host by itself."""

    def by_ssh(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return own.run(*before, "ansible", "-i", "inventory/lab", "lab-guest", *arguments, timeout_s=120)

    def by_itself(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = ["/opt/specrig/controller/bin/ansible", "-i", "/etc/specrig/inventory/hosts.json", "lab-guest"]
        before = ("python3", *before[1:]) if before else ()
        return own.host(f"cd /tmp && ANSIBLE_PIPELINING=1 {shlex.join([*before, *command, *arguments])}")

    return by_ssh if request.param == "lxc_ssh" else by_itself


def test_a_module_goes_through_one_pipe(ad_hoc: Run) -> None:
    done = ad_hoc("-m", "ansible.builtin.ping", "-vvv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"pong"' in done.stdout
    # Without pipelining a folder is made for the module's file first.
    assert "ansible-tmp" not in done.stdout


def test_become_another_user(ad_hoc: Run) -> None:
    flags = json.dumps({"ansible_become_flags": "-s /bin/sh"})
    become = ["-b", "--become-method", "su", "--become-user", "daemon", "-e", flags]
    done = ad_hoc("-m", "ansible.builtin.command", "-a", "id -un", *become)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "daemon"


def test_files_stream_in_and_out_in_bounded_memory(ad_hoc: Run, own: Any, request: pytest.FixtureRequest) -> None:
    here = "lxc_ssh" in request.node.name
    folder = Path("/tmp") / f"specrig-{own.name}"
    local = (lambda command: own.run("sh", "-c", command)) if here else own.host
    assert local(f"mkdir -p {folder} && head -c {LARGE_MIB}M /dev/urandom > {folder}/large").returncode == 0
    try:

        def peak_mib(*arguments: str) -> float:
            done = ad_hoc(*arguments, before=(sys.executable, "-c", MEASURED))
            assert done.returncode == 0, done.stdout + done.stderr
            return int(done.stdout.split("peak_kib")[1].split()[0]) / 1024

        least = peak_mib("-m", "ansible.builtin.ping")
        into = f"src={folder}/large dest=/tmp/large mode=0600"
        assert peak_mib("-m", "ansible.builtin.copy", "-a", into) < least + LARGE_MIB / 2
        out = f"src=/tmp/large dest={folder}/back flat=true"
        assert peak_mib("-m", "ansible.builtin.fetch", "-a", out) < least + LARGE_MIB / 2
        assert local(f"cmp {folder}/large {folder}/back").returncode == 0
    finally:
        local(f"rm -rf {folder}")
        own.guest("rm -f /tmp/large")


def refused(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    assert "Traceback" not in text
    return text


def test_a_guest_that_cannot_be_entered_is_said_in_a_line(ad_hoc: Run, own: Any) -> None:
    absent = refused(ad_hoc("-m", "ansible.builtin.ping", "-e", "lxc_guest_name=absent"))
    assert "has no guest 'absent': correct lxc_guest_name in the inventory" in absent
    own.host("lxc-freeze -n gpu", check=True)
    try:
        frozen = refused(ad_hoc("-m", "ansible.builtin.ping"))
    finally:
        own.host("lxc-unfreeze -n gpu", check=True)
    assert "guest 'gpu' on host" in frozen
    assert "is frozen, so nothing in it can answer: thaw it on the host (lxc-unfreeze -n gpu" in frozen
    own.host("lxc-stop -n gpu -t 20", check=True)
    try:
        stopped = refused(ad_hoc("-m", "ansible.builtin.ping"))
    finally:
        own.host("lxc-start -n gpu", check=True)
    assert "is not running: run recover.yml, which starts it" in stopped


def test_it_is_taken_away_again(own: Any) -> None:
    done = own.play("boot", "-e", '{"boot_recovery_enabled": false}')
    assert done.returncode == 0, done.stdout + done.stderr
    assert own.host("systemctl cat specrig-recover").returncode != 0
    assert own.host("ls /etc/systemd/system/multi-user.target.wants | grep -c recover").stdout.strip() == "0"
    again = own.play("boot", "-e", '{"boot_recovery_enabled": false}')
    assert again.returncode == 0, again.stdout + again.stderr
    assert "changed=0" in again.stdout
