"""Preflight in the nested lab: the incident that this program began with, and the faults of a reboot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.lab

PROFILE = "tp4-autoregressive"
UNIT = f"specrig-sglang@{PROFILE}"
OVERRIDE = f"/etc/systemd/system/{UNIT}.service.d/zz-by-hand.conf"


@pytest.fixture(scope="module")
def serving(lab: Any) -> Any:
    """The lab, provisioned."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def profile(lab: Any, folder: Path, entry: str) -> Any:
    """Start or stop the benchmark profile through the serving role."""
    task = {"name": entry, "ansible.builtin.include_role": {"name": "specrig.host.sglang_server", "tasks_from": entry}}
    play = [{"name": entry, "hosts": "gpu_guests", "gather_facts": False, "tasks": [task]}]
    path = folder / f"{entry}.yml"
    path.write_text(yaml.safe_dump(play, sort_keys=False))
    return lab.play(str(path), "-e", json.dumps({"sglang_server_names": [PROFILE]}))


@pytest.fixture
def tampered(serving: Any, tmp_path: Path) -> Iterator[Any]:
    """A TP4 server started with GPUs 1-5 visible by a drop-in that somebody left: its ranks really are on 1-4."""
    started = profile(serving, tmp_path, "start")
    assert started.returncode == 0, started.stdout + started.stderr
    variables = "CUDA_VISIBLE_DEVICES=1,2,3,4,5 CUDA_DEVICE_ORDER=PCI_BUS_ID SPT_NOENV=1"
    text = f"[Service]\\nEnvironmentFile=\\nEnvironment={variables}\\n"
    serving.guest(
        f"printf '{text}' > {OVERRIDE} && systemctl daemon-reload && systemctl restart {UNIT}"
        " && for i in $(seq 100); do"
        " python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:31401/ready')\" 2>/dev/null && exit 0;"
        " sleep 0.2; done; exit 1",
        check=True,
    )
    try:
        yield serving
    finally:
        serving.guest(f"rm -f {OVERRIDE}; systemctl daemon-reload; systemctl stop {UNIT}", check=True)


def gates(lab: Any) -> list[dict[str, Any]]:
    """The gates of the last run in the journal."""
    rows = [json.loads(line) for line in lab.journal.read_text().splitlines()]
    run = rows[-1]["run"]
    return [row for row in rows if row["run"] == run and row["event"] == "gate"]


def test_everything_passes_where_all_is_well(serving: Any) -> None:
    done = serving.play("preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = gates(serving)
    assert {row["status"] for row in rows} == {"pass"}
    for subject in ("chat", "agent"):
        assert {row["gate"] for row in rows if row["subject"] == subject} == {"placement", "server", "budget", "smoke"}
        # One short request and one of the full shape.
        assert len([row for row in rows if row["gate"] == "smoke" and row["subject"] == subject]) == 2
    told = {row["subject"]: row for row in rows if row["gate"] == "server"}
    assert (told["chat"]["seen"]["context"], told["agent"]["seen"]["budget"]) == (32768, 15)
    # Read from the environment of the server's process, and from nothing that it answers.
    assert "no token cap" in told["chat"]["message"]
    (device,) = [row for row in rows if row["gate"] == "device"]
    assert "simulated driver" in device["message"]


def test_the_incident_tp4_with_1_to_5_visible_fails_with_both_lists_and_nodes(tampered: Any) -> None:
    done = tampered.play("preflight", "-e", json.dumps({"preflight_profiles": [PROFILE]}))
    assert done.returncode != 0
    (row,) = [row for row in gates(tampered) if row["gate"] == "placement"]
    assert row["status"] == "fail"
    assert row["seen"]["gpus"] == [1, 2, 3, 4]
    assert row["seen"]["numa_nodes"] == [0, 1]
    assert row["expected"]["gpus"] == [4, 5, 6, 7]
    assert row["expected"]["numa_nodes"] == [1]
    message = " ".join(done.stdout.split())
    assert "ranks run on GPUs 1-4 (NUMA nodes 0,1)" in message
    assert "planned GPUs 4-7 (NUMA node 1)" in message
    assert "crosses NUMA nodes" in message


def test_the_incident_is_found_where_nvidia_smi_lists_no_process(tampered: Any) -> None:
    """As in some guests and under some drivers: the GPUs are told by the device nodes that the ranks hold open.

    It is found without being named, too: the profile's server is looked at because it runs.
    """
    smi = "/usr/bin/nvidia-smi"
    only_the_header = f'case "$1" in --query-compute-apps=*) "{smi}.real" "$@" | head -1; exit 0;; esac'
    blind = f'#!/bin/sh\n{only_the_header}\nexec "{smi}.real" "$@"'
    tampered.host(f"mv {smi} {smi}.real && cat > {smi} <<'END'\n{blind}\nEND\nchmod 755 {smi}", check=True)
    try:
        done = tampered.play("preflight", "-e", '{"preflight_smoke": "none"}')
    finally:
        tampered.host(f"mv {smi}.real {smi}", check=True)
    assert done.returncode != 0
    rows = {row["subject"]: row for row in gates(tampered) if row["gate"] == "placement"}
    assert rows[PROFILE]["status"] == "fail"
    assert rows[PROFILE]["seen"]["opened"] == [1, 2, 3, 4]
    assert "its processes hold GPUs 1-4 open" in rows[PROFILE]["message"] or (
        "CUDA_VISIBLE_DEVICES is 1,2,3,4,5, planned 4,5,6,7" in rows[PROFILE]["message"]
    )
    for name in ("chat", "agent"):
        assert rows[name]["status"] == "pass", rows[name]
        assert "by the nodes that they hold open (nvidia-smi lists none of its processes)" in rows[name]["message"]


def test_the_incident_no_benchmark_starts_on_it(tampered: Any, tmp_path: Path) -> None:
    sweep = tmp_path / "one.yml"
    workload = {"name": "decode", "prompts": "questions", "prompt_tokens": 256, "output_tokens": 16, "requests": 1}
    sweep.write_text(
        yaml.safe_dump(
            {"name": "one", "model": "Qwen3.6-27B", "profiles": [PROFILE], "launches": 1, "workloads": [workload]}
        )
    )
    values = {
        "decode_bench_sweep": str(sweep),
        "decode_bench_yes": True,
        "decode_bench_collect_to": str(tmp_path / "runs"),
    }
    done = tampered.play("benchmark", "-e", json.dumps(values))
    assert done.returncode != 0
    assert f"{PROFILE}: {OVERRIDE} sets" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=1,2,3,4,5" in done.stdout
    (run,) = (tmp_path / "runs").glob("one-*")
    assert not (run / "requests.jsonl").exists() or not (run / "requests.jsonl").read_text()
    # Production served all the while.
    for name in ("chat", "agent"):
        assert tampered.guest(f"systemctl is-active specrig-sglang@{name}").stdout.strip() == "active"


def test_a_shape_that_does_not_fit_is_refused_before_it_is_sent(serving: Any) -> None:
    shapes = {"chat": [{"prompt_tokens": 32724, "max_tokens": 256, "at_least": 1000, "at_once": 1000}]}
    done = serving.play("preflight", "-e", json.dumps({"preflight_profiles": ["chat"], "preflight_shapes": shapes}))
    assert done.returncode != 0
    rows = [row for row in gates(serving) if row["status"] != "pass"]
    assert [row["gate"] for row in rows] == ["server", "budget"]
    assert "requests at once, and 1000 will be sent" in rows[0]["message"]
    # 32,724 + 256 = 32,980, which is 212 more than the window.
    assert "32,980 is 212 over the context length 32,768" in rows[1]["message"]


def test_after_a_reboot_every_gate_says_what_is_wrong_and_recovery_makes_all_pass(serving: Any) -> None:
    serving.reboot()
    done = serving.play("preflight")
    assert done.returncode != 0
    failed = {row["gate"]: row for row in gates(serving) if row["status"] == "fail"}
    assert "/dev/nvidia-uvm: EPERM" in failed["device"]["message"]
    assert {"device", "model", "placement", "smoke"} <= set(failed)
    assert {row["subject"] for row in gates(serving) if row["gate"] == "placement"} == {"chat", "agent"}
    recovered = serving.play("recover")
    assert recovered.returncode == 0, recovered.stdout + recovered.stderr
    assert serving.play("preflight").returncode == 0
