"""A guest that has a part of the host's GPUs counts these alone, in recover, preflight and benchmark alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.lab

GIVEN = [3, 4, 5, 6, 7]
SHARE = json.dumps({"lxc_guest_gpus": GIVEN})


@pytest.fixture
def sharing(lab: Any) -> Iterator[Any]:
    """The lab, provisioned with all GPUs and then given five of them."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        yield lab
    finally:
        lab.host("rm -f /var/lib/specrig/guests/gpu.placement.json", check=True)
        done = lab.play("recover")
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_guest_counts_the_gpus_that_it_has(sharing: Any) -> None:
    done = sharing.play("recover", "-e", SHARE)
    assert done.returncode == 0, done.stdout + done.stderr
    # GPU 3 alone is left on node 0: the first fits there, the pair goes to node 1.
    assert "chat: GPU 3 · NUMA node 0" in done.stdout
    assert "agent: GPU 4,5 · NUMA node 1" in done.stdout
    files = "/etc/specrig/profiles/chat.env /etc/specrig/profiles/agent.env"
    counted = sharing.guest(f"grep -h ^CUDA_VISIBLE_DEVICES= {files}", check=True)
    assert counted.stdout.splitlines() == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1,2"]
    opened = sharing.guest("nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader", check=True).stdout.split()
    listed = sharing.host("nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader", check=True).stdout.split()
    assert opened == [listed[index] for index in GIVEN]

    # The gates see, from the host, the ranks on those very GPUs.
    gates = sharing.play("preflight", "-e", SHARE)
    assert gates.returncode == 0, gates.stdout + gates.stderr
    again = sharing.play("recover", "-e", SHARE)
    assert "done, nothing to change" in again.stdout, again.stdout

    plan = {"decode_bench_sweep": "quick", "decode_bench_plan_only": True, "lxc_guest_gpus": GIVEN}
    told = sharing.play("benchmark", "-e", json.dumps({**plan, "decode_bench_only": ["tp1-*"]}))
    assert told.returncode == 0, told.stdout + told.stderr
    assert "tp1-autoregressive on GPU 6, NUMA node 1" in told.stdout
    refused = sharing.play("benchmark", "-e", json.dumps({**plan, "decode_bench_only": ["tp4-*"]}))
    assert refused.returncode != 0
    assert "--take-over" in refused.stdout + refused.stderr
