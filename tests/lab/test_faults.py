"""Faults between two runs: each is healed, or ends in one line; the lock is free again and the next run works."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.lab

UNITS = "specrig-sglang@chat.service specrig-sglang@agent.service"
CONFIG = "/var/lib/lxc/gpu/config"
LOCK = "/run/specrig/lock"


@pytest.fixture(scope="module")
def served(lab: Any) -> Iterator[Any]:
    """A lab that serves."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout[-3000:]
    yield lab
    # What a failed test may have left.
    lab.host(f"lxc-unfreeze -n gpu; rm -rf {LOCK}; umount -l /etc/systemd/system; true")
    lab.guest("umount -l /etc/specrig; rm -f /etc/systemd/system/specrig-sglang@chat.service; systemctl daemon-reload")


def screen(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout[done.stdout.rindex("recover.yml:") :]


def refused(lab: Any) -> str:
    """A recovery that ends in a line of its own: no traceback, no lock left. Returns its screen."""
    done = lab.play("recover", timeout_s=120)
    assert done.returncode == 2, done.stdout[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert lab.host(f"test -f {LOCK}").returncode != 0
    return screen(done)


def healed(lab: Any) -> str:
    done = lab.play("recover", timeout_s=120)
    assert done.returncode == 0, done.stdout[-3000:]
    assert lab.host(f"test -e {LOCK}").returncode != 0
    return screen(done)


def test_a_server_that_was_starting_when_it_was_looked_at_passes_its_gate(served: Any) -> None:
    def invocations() -> list[str]:
        return served.guest(f"systemctl show -p InvocationID --value {UNITS}", check=True).stdout.split()

    before = invocations()
    served.guest(f"systemctl restart --no-block {UNITS}", check=True)
    # --no-block returns while the old ones still stop: what recovery may not restart is what comes after them.
    deadline = time.monotonic() + 60
    while not (len(started := invocations()) == 2 and not set(started) & set(before)):
        assert time.monotonic() < deadline, started
    said = healed(served)
    assert "gates      all" in said
    if "nothing to change" in said:
        assert invocations() == started


def test_a_frozen_guest_is_told_at_once_and_works_when_thawed(served: Any) -> None:
    served.host("lxc-freeze -n gpu", check=True)
    try:
        assert "guest 'gpu' is frozen" in refused(served)
    finally:
        served.host("lxc-unfreeze -n gpu", check=True)
    assert "nothing to change" in healed(served)


def test_a_lock_that_makes_no_sense_is_taken_over(served: Any) -> None:
    served.host(f'echo \'{{"clock_s": "x", "run": 7, "who": null}}\' > {LOCK}', check=True)
    assert "took over the lock of an unknown run: its file could not be read" in healed(served)


def test_a_config_with_carriage_returns_and_foreign_bytes_is_converged_and_starts(served: Any) -> None:
    before = served.host(f"cp {CONFIG} /root/config.good; sha256sum < {CONFIG}", check=True).stdout
    try:
        served.host(
            r"cd /var/lib/lxc/gpu && sed -i 's/$/\r/; /c 195:3 rw/d' config && printf '# \xff\xfe\r\n' >> config",
            check=True,
        )
        assert "config, added: device rules c 195:3 rw" in healed(served)
        assert served.host(rf"grep -c $'c 195:3 rw\r' {CONFIG}").stdout.strip() == "1"
        assert served.host(rf"grep -ac $'^# \xff\xfe\r$' {CONFIG}").stdout.strip() == "1"
    finally:
        served.host(f"cat /root/config.good > {CONFIG}", check=True)
    assert served.host(f"sha256sum < {CONFIG}", check=True).stdout == before


def test_a_masked_unit_is_named_and_the_others_serve(served: Any) -> None:
    unit = "/etc/systemd/system/specrig-sglang@chat.service"
    served.guest(f"systemctl stop specrig-sglang@chat; ln -s /dev/null {unit}; systemctl daemon-reload", check=True)
    try:
        said = refused(served)
    finally:
        served.guest(f"rm {unit}; systemctl daemon-reload", check=True)
    assert "systemctl unmask specrig-sglang@chat.service" in said
    assert "agent: GPU 2,3 · NUMA node 0 · CPUs 0 · port 31002 · ddtree-b15 · serving" in said
    assert "started chat" in healed(served)


def test_a_full_disk_in_the_guest_is_named_with_the_file(served: Any) -> None:
    served.guest(
        "mkdir -p /mnt/s && mount -t tmpfs -o size=64k t /mnt/s && cp -a /etc/specrig/. /mnt/s/ && "
        "mount --bind /mnt/s /etc/specrig && rm /etc/specrig/profiles/chat.env && cat /dev/zero > /mnt/s/fill",
    )
    try:
        assert "/etc/specrig/profiles/chat.env cannot be written in the guest: No space left on device" in refused(
            served
        )
    finally:
        served.guest("umount -l /etc/specrig; umount -l /mnt/s", check=True)
    assert "nothing to change" in healed(served)
