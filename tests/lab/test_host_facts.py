"""What a host can do wrong, on the lab: nvidia-smi that fails, no driver module, settings that a reboot loses."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.lab

SETTINGS = json.dumps({"gpu_host_power_limit_w": {"all": 450, "3": 400}, "gpu_host_lock_clocks_mhz": [1200, 2400]})
STATE = "nvidia-smi --query-gpu=persistence_mode,power.limit,clocks.sm --format=csv,noheader,nounits | sort | uniq -c"
RIGHT = ["1 Enabled, 400.00, 1200", "7 Enabled, 450.00, 1200"]
SMI = "/usr/bin/nvidia-smi"


def look(lab) -> dict:
    """The look that the roles decide from."""
    done = lab.run("specrig", "topology", "-i", "inventory/lab", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["hosts"]["lab-host"]["look"]


def state(lab) -> list[str]:
    return [" ".join(line.split()) for line in lab.host(STATE, check=True).stdout.splitlines()]


def changed(output: str) -> int:
    return int(re.findall(r"^lab-host\s+: ok=\d+\s+changed=(\d+)", output, re.M)[-1])


@pytest.fixture
def smi(lab):
    """Put a script in the place of nvidia-smi; the real one is nvidia-smi.real meanwhile."""

    def put(script: str) -> None:
        lab.host(f"mv {SMI} {SMI}.real && cat > {SMI} <<'END'\n#!/bin/sh\n{script}\nEND\nchmod 755 {SMI}", check=True)

    yield put
    lab.host(f"test ! -e {SMI}.real || mv {SMI}.real {SMI}", check=True)


def host_play(lab, *arguments: str):
    """The host's part of a recovery."""
    return lab.play("recover", "--limit", "lab-host", "--tags", "gpu_host", *arguments)


@pytest.fixture(scope="module")
def ready(lab):
    """The host's part is converged; its guests are not needed here."""
    done = host_play(lab)
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def test_the_look_takes_well_under_a_second_and_knows_everything(ready):
    seconds = []
    for _attempt in range(3):
        facts = look(ready)
        seconds.append(facts["seconds"])
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1, seconds
    assert facts["problems"] == []
    assert {gpu["healthy"] for gpu in facts["gpus"]} == {True}
    assert {gpu["persistence"] for gpu in facts["gpus"]} == {True}
    assert facts["driver"]["library_version"] == facts["driver"]["module_version"]
    assert facts["guests"][0]["library_version"] == facts["driver"]["module_version"]
    assert set(facts["p2p"].values()) == {"OK"}
    assert len(facts["p2p"]) == 28


def test_settings_come_back_at_boot_and_by_recovery(ready):
    assert state(ready) == ["8 Enabled, 600.00, 180"]
    done = host_play(ready, "-e", SETTINGS)
    assert "GPU 0-7: clocks locked to 1200-2400 MHz" in done.stdout
    assert state(ready) == RIGHT

    ready.reboot()
    assert state(ready) == RIGHT, "the unit at boot puts them back"
    assert changed(host_play(ready, "-e", SETTINGS).stdout) == 0

    ready.host("systemctl disable specrig-gpu-nodes", check=True)
    ready.reboot("none")
    host_play(ready, "-e", SETTINGS)
    assert state(ready) == RIGHT, "recovery puts them back where the boot did not"

    refused = host_play(ready, "-e", '{"gpu_host_power_limit_w": 900}')
    assert refused.returncode != 0
    assert "gpu_host_power_limit_w is 900 for GPU 0; expected 300 to 600 W" in refused.stdout
    host_play(ready)


def test_a_kernel_without_the_module_is_named(ready):
    ready.reboot("no-module")
    done = host_play(ready)
    assert done.returncode != 0
    screen = done.stdout[done.stdout.rindex("recover.yml: FAILED") :]
    assert "the module nvidia does not load: kernel" in screen
    assert "has no module of it (DKMS did not build one)" in screen
    assert ready.host("test -e /run/specrig/lock").returncode != 0
    assert "has no module of it" in look(ready)["problems"][0]
    ready.reboot()
    assert host_play(ready).returncode == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sleep 300", "nvidia-smi did not answer within 5 s"),
        ("echo 'Unable to determine the device handle for GPU0000:06:00.0: GPU is lost.'", "GPU is lost"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
    ],
)
def test_a_tool_that_fails_or_hangs_leaves_its_facts_unknown(ready, smi, script, reason):
    smi(script)
    facts = look(ready)
    assert facts["seconds"] < 30
    for key in ("gpus", "links", "p2p", "processes"):
        assert reason in facts["unknown"][key]
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1], "the driver's own list stands in"
    assert {gpu["healthy"] for gpu in facts["gpus"]} == {None}
    if "sleep" in script:
        done = host_play(ready)
        assert done.returncode == 0, done.stdout
        assert changed(done.stdout) == 0


def test_a_tool_that_is_missing_is_named(ready):
    ready.host(f"mv {SMI} {SMI}.real", check=True)
    try:
        assert look(ready)["unknown"]["gpus"] == "nvidia-smi is not installed"
        done = host_play(ready)
        assert (done.returncode, changed(done.stdout)) == (0, 0), done.stdout
    finally:
        ready.host(f"mv {SMI}.real {SMI}", check=True)


def test_mig_and_a_gpu_that_needs_a_reset_are_left_out_of_the_plan(ready, smi):
    smi(
        f"{SMI}.real \"$@\" | sed -e '/^0, GPU/s/, Disabled, 595/, Enabled, 595/'"
        " -e '/^1, GPU/s/, [0-9]* MiB, 29,/, [GPU requires reset], [GPU requires reset],/'"
    )
    facts = look(ready)
    assert facts["problems"] == [
        "GPU 1: GPU requires reset: stop what runs on it, then nvidia-smi --gpu-reset -i 1, or reboot the host"
    ]
    assert len(facts["notes"]) == 1
    assert facts["notes"][0].startswith("GPU 0 is in MIG mode: no profile is placed on it")
    # A recovery says both in a line each, and what to do.
    screen = host_play(ready).stdout
    assert facts["problems"][0].split(":")[0] in screen
    assert "nvidia-smi --gpu-reset -i 1" in screen
    assert "GPU 0 is in MIG mode: no profile is placed on it" in screen
    group = ready.run("specrig", "topology", "-i", "inventory/lab", "--tp", "2")
    assert group.returncode == 0
    assert "tp 2: GPUs 2,3 (NUMA node 0)" in group.stdout or "tp 2: GPUs 2-3 (NUMA node 0)" in group.stdout


def test_a_driver_too_old_for_some_fields_still_tells_the_rest(ready, smi):
    smi(
        'for field in gpu_recovery_action power.min_limit; do case "$*" in *$field*)'
        ' echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac; done\n'
        f'exec {SMI}.real "$@"'
    )
    facts = look(ready)
    assert "gpus" not in facts["unknown"]
    assert {gpu["power_limit_w"] for gpu in facts["gpus"]} == {600.0}
    assert {gpu["power_min_w"] for gpu in facts["gpus"]} == {None}


def test_another_library_in_the_guest_is_named(ready):
    folder = "/usr/lib/$(uname -m)-linux-gnu"
    ready.guest(f"cd {folder}; for l in libcuda libnvidia-ml; do mv $l.so.595.58.03 $l.so.590.48.01; done", check=True)
    try:
        assert look(ready)["problems"] == [
            "guest gpu has the driver's libraries 590.48.01, the kernel module is 595.58.03: install the same in the "
            "guest, without a kernel module"
        ]
    finally:
        ready.guest(
            f"cd {folder}; for l in libcuda libnvidia-ml; do mv $l.so.590.48.01 $l.so.595.58.03; done", check=True
        )
