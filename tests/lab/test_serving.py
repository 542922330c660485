"""Serving in the nested guest: units as planned, restarts only for a reason, failures told with their cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]


def converge(lab: Any, folder: Path, *, entry: str = "main", variables: dict[str, Any] | None = None) -> Any:
    """Run the serving role's entry point alone, without installing."""
    play = [
        {
            "name": "Serve",
            "hosts": "gpu_guests",
            "gather_facts": False,
            "tasks": [
                {
                    "name": "Serve",
                    "ansible.builtin.include_role": {"name": "specrig.host.sglang_server", "tasks_from": entry},
                }
            ],
        }
    ]
    path = folder / "serve.yml"
    path.write_text(yaml.safe_dump(play, sort_keys=False))
    values = {"sglang_server_install": False, **(variables or {})}
    return lab.play(str(path), "-e", json.dumps(values))


def profiles(**changes: dict[str, Any]) -> dict[str, Any]:
    """The lab's two production profiles, with changes by name."""
    table = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())["sglang_server_profiles"]
    served = {name: dict(table[name]) for name in ("chat", "agent")}
    for name, change in changes.items():
        served.setdefault(name, {}).update(change)
    return served


def main_pid(lab: Any, profile: str) -> int:
    return int(lab.guest(f"systemctl show -p MainPID --value specrig-sglang@{profile}", check=True).stdout)


@pytest.fixture(scope="module")
def serving(lab: Any) -> Any:
    """The lab, provisioned."""
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def test_units_run_as_the_service_user_on_the_planned_gpus(serving: Any) -> None:
    for profile, ranks in (("chat", 1), ("agent", 2)):
        pid = main_pid(serving, profile)
        status = serving.guest(f"cat /proc/{pid}/status", check=True).stdout
        uid = serving.guest("id -u specrig", check=True).stdout.strip()
        assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        environ = serving.guest(f"tr '\\0' '\\n' < /proc/{pid}/environ", check=True).stdout.splitlines()
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in environ
        (visible,) = [line.split("=")[1] for line in environ if line.startswith("CUDA_VISIBLE_DEVICES=")]
        assert len(visible.split(",")) == ranks
    shown = serving.guest(
        "systemctl show -p KillMode,TimeoutStartUSec,UnitFileState,Restart specrig-sglang@chat", check=True
    ).stdout.splitlines()
    assert {"KillMode=control-group", "TimeoutStartUSec=1min", "UnitFileState=enabled", "Restart=on-failure"} <= set(
        shown
    )
    mode = serving.guest("stat -c '%a %U' /etc/specrig/profiles/chat.env", check=True).stdout.strip()
    assert mode == "600 root"


def test_the_unit_is_hardened_as_far_as_a_gpu_engine_allows(serving: Any) -> None:
    # 40 of 100: an exposure of 4.0.
    done = serving.guest("systemd-analyze security --no-pager --threshold=40 specrig-sglang@chat.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_run_changes_nothing_and_restarts_nothing(serving: Any, tmp_path: Path) -> None:
    before = [main_pid(serving, name) for name in ("chat", "agent")]
    done = converge(serving, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout
    assert [main_pid(serving, name) for name in ("chat", "agent")] == before


def test_a_touched_file_is_put_right_and_the_right_server_is_left_alone(serving: Any, tmp_path: Path) -> None:
    before = main_pid(serving, "chat")
    serving.guest("sed -i s/CUDA_VISIBLE_DEVICES=.*/CUDA_VISIBLE_DEVICES=7/ /etc/specrig/profiles/chat.env", check=True)
    done = converge(serving, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rewrote the unit of chat" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=7" not in serving.guest("cat /etc/specrig/profiles/chat.env", check=True).stdout
    assert main_pid(serving, "chat") == before


def test_a_changed_profile_restarts_that_server_only_and_says_why(serving: Any, tmp_path: Path) -> None:
    chat, agent = main_pid(serving, "chat"), main_pid(serving, "agent")
    table = profiles(chat={"context_length": 16384})
    done = converge(serving, tmp_path, variables={"sglang_server_profiles": table})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--context-length: has '32768', planned '16384'" in done.stdout
    assert main_pid(serving, "chat") != chat
    assert main_pid(serving, "agent") == agent
    answer = serving.guest(
        "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:31001/v1/models').read().decode())\"",
        check=True,
    )
    assert json.loads(answer.stdout)["data"][0]["max_model_len"] == 16384
    back = converge(serving, tmp_path, variables={"sglang_server_profiles": profiles()})
    assert back.returncode == 0, back.stdout + back.stderr


def test_a_server_that_was_started_with_another_environment_is_restarted(serving: Any, tmp_path: Path) -> None:
    serving.guest(
        "sed -i s/CUDA_VISIBLE_DEVICES=.*/CUDA_VISIBLE_DEVICES=7/ /etc/specrig/profiles/chat.env"
        " && systemctl restart specrig-sglang@chat",
        check=True,
    )
    done = converge(serving, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA_VISIBLE_DEVICES is '7', planned" in done.stdout
    assert "restarted chat" in done.stdout


def test_a_leftover_drop_in_is_named_and_no_server_is_restarted_over_it(serving: Any, tmp_path: Path) -> None:
    before = main_pid(serving, "chat")
    folder = "/etc/systemd/system/specrig-sglang@chat.service.d"
    serving.guest(f"printf '[Service]\\nCPUAffinity=0-1\\n' > {folder}/zz-mine.conf", check=True)
    try:
        done = converge(serving, tmp_path)
        assert done.returncode != 0
        assert (
            f"chat: {folder}/zz-mine.conf sets CPUAffinity=0-1 over the planned unit; remove that file" in done.stdout
        )
        assert main_pid(serving, "chat") == before
    finally:
        serving.guest(f"rm {folder}/zz-mine.conf && systemctl daemon-reload", check=True)


def test_a_server_that_dies_is_not_waited_for_and_its_last_words_are_shown(serving: Any, tmp_path: Path) -> None:
    table = profiles(
        broken={"model": "No-Such-Model", "tp": 1, "method": "auto", "context_length": 4096, "port": 31009}
    )
    done = converge(
        serving,
        tmp_path,
        entry="start",
        variables={"sglang_server_profiles": table, "sglang_server_names": ["broken"]},
    )
    assert done.returncode != 0
    assert "broken: specrig-sglang@broken.service" in done.stdout
    assert "/srv/models/No-Such-Model is not a folder" in done.stdout
    stopped = converge(
        serving,
        tmp_path,
        entry="stop",
        variables={"sglang_server_profiles": table, "sglang_server_names": ["broken"]},
    )
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def test_somebody_else_s_server_on_the_port_is_not_taken_for_ours(serving: Any, tmp_path: Path) -> None:
    serving.guest(
        "systemctl stop specrig-sglang@chat && systemd-run -q --unit=squatter python3 -m http.server 31001", check=True
    )
    try:
        done = converge(serving, tmp_path)
        assert done.returncode != 0
        assert "chat: " in done.stdout
        assert "address already in use" in done.stdout.lower() or "another server listens there" in done.stdout
    finally:
        serving.guest("systemctl stop squatter", check=True)
    done = converge(serving, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_benchmark_s_leftover_server_is_stopped(serving: Any, tmp_path: Path) -> None:
    started = converge(serving, tmp_path, entry="start", variables={"sglang_server_names": ["tp4-autoregressive"]})
    assert started.returncode == 0, started.stdout + started.stderr
    done = converge(serving, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp4-autoregressive: a benchmark left its server running" in done.stdout
    state = serving.guest("systemctl is-active specrig-sglang@tp4-autoregressive").stdout.strip()
    assert state == "inactive"
