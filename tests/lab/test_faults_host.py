"""What goes wrong on the host: each fault is shown, then recover heals it or says in one line what to do."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.lab

SERVED = {"chat": 31001, "agent": 31002}
UNITS = " ".join(f"specrig-sglang@{name}.service" for name in SERVED)
# What rmmod of nvidia-uvm leaves: no major, no nodes.
UNLOAD = """python3 - <<'END'
import json, sys
sys.path.insert(0, "/usr/local/libexec/specrig-lab")
import driver
now = driver.loaded()
del now["nvidia-uvm"]
driver.rewrite(driver.RUN / "majors.json", json.dumps(now))
driver.show()
END
rm -f /dev/nvidia-uvm /dev/nvidia-uvm-tools"""
SMI = "/usr/bin/nvidia-smi"


def uvm_major(lab: Any) -> int | None:
    text = lab.host("awk '$2 == \"nvidia-uvm\" {print $1}' /proc/devices", check=True).stdout.strip()
    return int(text) if text else None


def init(lab: Any) -> str:
    """Process id and start time of the guest's init: another guest start changes them."""
    return str(lab.host("pid=$(lxc-info -n gpu -p -H); cut -d' ' -f1,22 /proc/$pid/stat", check=True).stdout)


def main_pids(lab: Any) -> str:
    return str(lab.guest(f"systemctl show -p MainPID --value {UNITS}", check=True).stdout)


def assert_serving(lab: Any) -> None:
    for name, port in SERVED.items():
        assert lab.tokens(port) == 8, name


def screen(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[done.stdout.rindex("recover.yml:") :]


def recover(lab: Any) -> str:
    """Recover, and return the screen at the end."""
    done = lab.play("recover")
    assert done.returncode == 0, done.stdout + done.stderr
    return screen(done)


@pytest.fixture(scope="module")
def served(lab: Any) -> Any:
    """The lab, provisioned."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def test_a_cold_boot_with_no_major_and_a_guest_that_started_before_the_nodes(served: Any) -> None:
    served.host("systemctl disable specrig-gpu-nodes", check=True)
    served.reboot("none")
    # Nothing is loaded, so there is no major to be read, and the guest came up all the same.
    assert uvm_major(served) is None
    assert served.host("ls /dev/nvidia*").returncode != 0
    assert "RUNNING" in served.host("lxc-info -n gpu -s", check=True).stdout
    assert served.guest("test -c /dev/nvidia-uvm").returncode != 0
    before = init(served)

    told = recover(served)

    assert "nvidia is not loaded on the host" in told
    assert "nvidia-uvm is not loaded on the host" in told
    assert re.search(r"guest gpu: .*nvidiactl.*(regular file|missing|not there)", told), told
    assert_serving(served)
    assert init(served) == before, "the guest was healed while it ran"
    rdev = served.host("stat -c %t:%T /dev/nvidia-uvm", check=True).stdout
    assert served.guest("stat -c %t:%T /dev/nvidia-uvm", check=True).stdout == rdev


def test_uvm_alone_is_not_loaded(served: Any) -> None:
    old = uvm_major(served)
    served.host(UNLOAD, check=True)
    assert uvm_major(served) is None
    told = recover(served)
    assert "nvidia-uvm is not loaded on the host" in told
    new = uvm_major(served)
    assert new is not None
    assert new != old
    assert f"opened live: c {new}:0 rw, c {new}:1 rw" in told
    assert_serving(served)
    assert int(served.guest("stat -c %t /dev/nvidia-uvm", check=True).stdout, 16) == new


def test_a_node_that_is_a_regular_file_and_one_of_a_wrong_mode(served: Any) -> None:
    before = init(served), main_pids(served)
    served.host("rm -f /dev/nvidia-uvm && touch /dev/nvidia-uvm && chmod 0600 /dev/nvidia0", check=True)
    told = recover(served)
    assert "/dev/nvidia-uvm on the host is a regular file, not a device" in told
    assert "/dev/nvidia0 on the host has mode 0600, the service user needs 0666" in told
    seen = served.host("stat -c '%F %a' /dev/nvidia-uvm /dev/nvidia0", check=True).stdout
    assert seen == "character special file 666\n" * 2
    assert (init(served), main_pids(served)) == before, "nothing that was right was restarted"
    assert_serving(served)


@pytest.fixture
def stranger(served: Any) -> Iterator[int]:
    """A process on the host that is none of ours, on the GPU of chat while chat is down; its pid."""
    bus = json.loads(served.host("cat /var/lib/specrig/guests/gpu.placement.json", check=True).stdout)["chat"][0]
    minor = served.host(f"awk '/Device Minor/ {{print $3}}' /proc/driver/nvidia/gpus/{bus}/information").stdout.strip()
    hold = f"import os, time; os.open('/dev/nvidia{minor}', os.O_PATH); time.sleep(600)"
    served.guest("systemctl stop specrig-sglang@chat.service", check=True)
    served.host(f'systemd-run -q --unit stranger python3 -c "{hold}"', check=True)
    pid = int(served.host("systemctl show -p MainPID --value stranger", check=True).stdout)
    try:
        yield pid
    finally:
        served.host("systemctl stop stranger", check=True)


def test_a_foreign_process_on_a_gpu_is_avoided_and_named(served: Any, stranger: int) -> None:
    agent = served.guest("systemctl show -p MainPID --value specrig-sglang@agent", check=True).stdout
    told = recover(served)
    named = re.search(rf"left alone: GPU (\d) is used by pid {stranger} \(\S*python3\)", told)
    assert named, told
    chat = re.search(r"chat: GPU (\d) · NUMA node", told)
    assert chat, told
    assert chat[1] != named[1]
    assert served.host(f"kill -0 {stranger}").returncode == 0, "it is somebody's, so it is left alone"
    assert served.guest("systemctl show -p MainPID --value specrig-sglang@agent", check=True).stdout == agent
    assert_serving(served)


LOST = "Unable to determine the device handle for GPU0000:06:00.0: GPU is lost."


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        # As on a GPU that fell off the bus.
        ("exec sleep 1000", "nvidia-smi did not answer within 5 s"),
        (None, "nvidia-smi is not installed"),
        (f"echo {LOST}", "GPU is lost"),
    ],
    ids=["hangs", "missing", "error-on-stdout"],
)
def test_an_nvidia_smi_that_fails_holds_nothing_up_and_moves_nothing(
    served: Any, script: str | None, reason: str
) -> None:
    before = init(served), main_pids(served)
    started = time.monotonic()
    served.host(f"mv {SMI} {SMI}.real", check=True)
    try:
        if script is not None:
            served.host(f"printf '#!/bin/sh\\n{script}\\n' > {SMI} && chmod 755 {SMI}", check=True)
        done = served.play("recover")
    finally:
        served.host(f"mv {SMI}.real {SMI}", check=True)
    assert time.monotonic() - started < 90
    assert done.returncode != 0, "what could not be seen is not passed"
    lines = [line.strip() for line in screen(done).splitlines()]
    (line,) = [text for text in lines if text.startswith("placement chat: unknown: ")]
    assert reason in line
    assert "repair nvidia-smi and look again" in line
    assert (init(served), main_pids(served)) == before, "servers that are right go on"
    assert_serving(served)
