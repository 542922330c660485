"""Serving in the nested guest: units as planned, restarts only for a reason, failures told with their cause."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]


def converge(
    lab: Any, folder: Path, *arguments: str, entry: str = "main", variables: dict[str, Any] | None = None
) -> Any:
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
    return lab.play(str(path), "-e", json.dumps(values), *arguments)


def profiles(**changes: dict[str, Any]) -> dict[str, Any]:
    """The lab's two production profiles, with changes by name."""
    table = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())["sglang_server_profiles"]
    served = {name: dict(table[name]) for name in ("chat", "agent")}
    for name, change in changes.items():
        served.setdefault(name, {}).update(change)
    return served


def told(done: Any) -> str:
    """What a play printed, in one line of single blanks."""
    return " ".join(done.stdout.split())


def soon(holds: Callable[[], Any], seconds: float = 60) -> Any:
    """What ``holds`` returns as soon as that is true, or its last answer when the time is up."""
    deadline = time.monotonic() + seconds
    while not (answer := holds()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return answer


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
    assert {"KillMode=mixed", "TimeoutStartUSec=1min", "UnitFileState=enabled", "Restart=on-failure"} <= set(shown)
    mode = serving.guest("stat -c '%a %U' /etc/specrig/profiles/chat.env", check=True).stdout.strip()
    assert mode == "600 root"


PROBE = """
import ctypes, mmap, os
from multiprocessing import shared_memory

memory = shared_memory.SharedMemory(create=True, size=4096)
memory.buf[0] = 1
memory.unlink()
libc = ctypes.CDLL(None, use_errno=True)
set_mempolicy, pidfd_getfd, swapon = 238, 438, 167
assert libc.syscall(set_mempolicy, 0, None, 0) == 0, os.strerror(ctypes.get_errno())
assert libc.syscall(pidfd_getfd, os.pidfd_open(os.getpid()), 0, 0) >= 0, os.strerror(ctypes.get_errno())
os.sched_setaffinity(0, os.sched_getaffinity(0))
mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
program = os.environ["CACHE_DIRECTORY"] + "/probe"
with open(program, "w") as stream:
    stream.write("#!/bin/sh\\necho compiled\\n")
os.chmod(program, 0o755)
print(os.popen(program).read().strip())
os.unlink(program)
# One that is filtered is refused, and kills nobody.
assert libc.syscall(swapon, b"/x", 0) == -1
print(os.strerror(ctypes.get_errno()))
"""
"""What an engine does in its unit: shares memory, binds itself, passes descriptors, runs what it compiled."""


def test_the_unit_is_hardened_as_far_as_a_gpu_engine_allows(serving: Any) -> None:
    # 40 of 100: an exposure of 4.0.
    done = serving.guest("systemd-analyze security --no-pager --threshold=40 specrig-sglang@chat.service")
    assert done.returncode == 0, done.stdout + done.stderr
    # And what an engine needs is left: system calls of ranks that bind themselves, lock memory, share it, compile.
    for limit in ("locked memory", "open files"):
        read = f"awk '/^Max {limit}/ {{print $(NF-1)}}' /proc/%s/limits"
        mine = serving.guest(read % main_pid(serving, "chat"), check=True).stdout.strip()
        # A container's own limit is as far as its systemd can go.
        assert mine in ("unlimited", "1048576", serving.guest(read % 1, check=True).stdout.strip()), limit
    # The same template, with a command of its own for this one start.
    unit = "specrig-sglang@probe"
    folder = f"/run/systemd/system/{unit}.service.d"
    command = "[Service]\\nType=oneshot\\nRestart=no\\nExecStart=/usr/bin/python3 /run/specrig-probe.py\\n"
    serving.guest(
        f"cat > /run/specrig-probe.py <<'END'\n{PROBE}\nEND\n"
        f"echo CUDA_VISIBLE_DEVICES=0 > /etc/specrig/profiles/probe.env; mkdir -p {folder}"
        f" && printf '{command}' > {folder}/probe.conf && systemctl daemon-reload",
        check=True,
    )
    try:
        started = serving.guest(f"systemctl start {unit}")
        log = f"journalctl -q --no-pager -o cat -n 20 -u {unit}"
        # The journal takes a unit's last lines in when it comes to them.
        soon(lambda: "Operation not permitted" in serving.guest(log).stdout, 20)
        shown = serving.guest(log, check=True).stdout
        assert "compiled" in shown, shown + started.stderr
        assert "Operation not permitted" in shown
    finally:
        serving.guest(
            f"rm -rf {folder} /run/specrig-probe.py /etc/specrig/profiles/probe.env;"
            f" systemctl daemon-reload; systemctl reset-failed {unit}"
        )


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


def test_a_leftover_environment_restarts_its_server_and_a_key_is_on_no_command_line(
    serving: Any, tmp_path: Path
) -> None:
    """The file that set them is gone, the server still runs with both."""
    folder = "/run/systemd/system/specrig-sglang@chat.service.d"
    serving.guest(
        f"mkdir -p {folder} && printf '[Service]\\nEnvironment=SGLANG_SIMULATE_ACC_LEN=4\\n' > {folder}/by-hand.conf"
        " && sed -i s/CUDA_VISIBLE_DEVICES=.*/CUDA_VISIBLE_DEVICES=7/ /etc/specrig/profiles/chat.env"
        f" && systemctl daemon-reload && systemctl restart specrig-sglang@chat && rm -r {folder}"
        " && systemctl daemon-reload",
        check=True,
    )
    key = "lab-key-4711"
    done = converge(serving, tmp_path, variables={"sglang_server_api_key": key})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA_VISIBLE_DEVICES is '7', planned" in done.stdout
    assert "SGLANG_SIMULATE_ACC_LEN is '4', not planned: left from before" in told(done)
    assert "restarted chat" in done.stdout
    assert key not in done.stdout + done.stderr + serving.journal.read_text()
    # The whole machine's command lines, as any user sees them.
    seen = serving.guest("runuser -u nobody -- sh -c 'cat /proc/[0-9]*/cmdline' | tr '\\0' ' '").stdout
    assert "--config /etc/specrig/profiles/chat.secrets.yaml" in seen
    assert key not in seen
    for path, mode in (("profiles/chat.secrets.yaml", "640 root specrig"), ("client.env", "600 root root")):
        assert serving.guest(f"stat -c '%a %U %G' /etc/specrig/{path}", check=True).stdout.strip() == mode
    ask = (
        "import urllib.error, urllib.request\n"
        "try:\n    print(urllib.request.urlopen('http://127.0.0.1:31001/v1/models').status)\n"
        "except urllib.error.HTTPError as error:\n    print(error.code)\n"
    )
    assert serving.guest(shlex.join(["python3", "-c", ask]), check=True).stdout.strip() == "401"
    again = converge(serving, tmp_path, variables={"sglang_server_api_key": key})
    assert "changed=0" in again.stdout
    back = converge(serving, tmp_path)
    assert back.returncode == 0, back.stdout + back.stderr
    assert serving.guest("ls /etc/specrig/client.env || ls /etc/specrig/profiles/*.secrets.yaml").returncode != 0


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


FAILING = {
    "broken": {"model": "No-Such-Model", "extra_args": []},
    "fragile": {"extra_args": ["--sim-fault", "dies-at-first-request"]},
    "stranger": {"extra_args": ["--sim-fault", "stale-server=Llama-3"]},
    "short": {"extra_args": ["--sim-fault", "short-completion=3"]},
    "loading": {"extra_args": ["--sim-fault", "never-ready"], "start_timeout_s": 20},
}


def test_every_way_of_not_getting_ready_is_told_by_its_own_words_and_the_unit_s_log(
    serving: Any, tmp_path: Path
) -> None:
    base = {"model": "Qwen3.6-27B", "tp": 1, "method": "auto", "context_length": 4096}
    table = profiles(
        **{name: {**base, "port": 31020 + n, **change} for n, (name, change) in enumerate(FAILING.items())}
    )
    # Each on a GPU of its own, on node 1.
    for number, name in enumerate(list(FAILING)[1:]):
        table[name]["gpus"] = [4 + number]
    values = {
        "sglang_server_profiles": table,
        "sglang_server_names": list(FAILING),
        # A crash loop ends by itself, and soon.
        "sglang_server_restart_delay_s": 1,
        "sglang_server_restart_limit": 2,
    }
    before = [main_pid(serving, name) for name in ("chat", "agent")]
    try:
        done = converge(serving, tmp_path, entry="start", variables=values)
        assert done.returncode != 0
        text = told(done)
        for words in (
            "broken: specrig-sglang@broken.service",
            "/srv/models/No-Such-Model is not a folder",
            "fragile: specrig-sglang@fragile.service ended at its first request, having said that it was ready: "
            "exited with status 1",
            "died; the server goes down with it",
            "stranger: port 31022 answers for model Llama-3, expected Qwen3.6-27B",
            "short: its first completion has 3 tokens, expected 8; it ended with a stop although ignore_eos",
            "loading: no completion within its start timeout of 20 s",
            "/ready answers 503, it is loading; the last line of its log is",
            "Load weight begin.",
            "raise start_timeout_s of the profile",
            # Shown while it was waited for, too.
            "of 20 s: ",
        ):
            assert words in text, f"{words!r} is not in {text}"
        # What is broken from the start is tried so often and no more.
        show = "systemctl show -p ActiveState,NRestarts specrig-sglang@broken"
        assert soon(lambda: "ActiveState=failed" in serving.guest(show).stdout), serving.guest(show).stdout
        assert [main_pid(serving, name) for name in ("chat", "agent")] == before
    finally:
        stopped = converge(serving, tmp_path, entry="stop", variables=values)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def test_somebody_else_s_server_on_the_port_is_not_taken_for_ours(serving: Any, tmp_path: Path) -> None:
    serving.guest(
        "systemctl stop specrig-sglang@chat && systemd-run -q --unit=squatter python3 -m http.server 31001", check=True
    )
    try:
        done = converge(serving, tmp_path)
        assert done.returncode != 0
        # By its pid, its command, its user and its unit.
        assert "python3 -m http.server 31001, user root, squatter.service)" in told(done)
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


RANK = """
import os, signal, socket, sys, time
os.open("/dev/nvidia%s" % sys.argv[1], os.O_PATH)
port = int(sys.argv[2])
if port:
    listener = socket.create_server(("127.0.0.1", port))
if os.fork():
    os._exit(0)
os.setsid()
with open(sys.argv[3], "w") as stream:
    stream.write(str(os.getpid()))
time.sleep(3600)
"""


def test_orphans_of_ours_are_stopped_and_look_alikes_are_named_and_live(serving: Any, tmp_path: Path) -> None:
    """One that outlived its unit, one started by hand with a profile's environment, and two that only look so."""
    unit = "specrig-sglang@tp4-autoregressive"
    environ = "/etc/specrig/profiles/tp4-autoregressive.env"
    serving.guest(
        f"cat > /run/specrig-rank.py <<'END'\n{RANK}\nEND\nmkdir -m 1777 -p /dev/shm/specrig-ranks", check=True
    )
    dropin = f"/run/systemd/system/{unit}.service.d"
    rank = "exec -a sglang::scheduler_TP0 python3 /run/specrig-rank.py"

    def start(user: str, name: str, minor: int, port: int = 0, env: str = "") -> None:
        script = f"{env} {rank} {minor} {port} /dev/shm/specrig-ranks/{name}"
        who = f"setpriv --reuid {user} --regid {user} --clear-groups"
        serving.guest(f"{who} bash -c {shlex.quote(script)} </dev/null >/dev/null 2>&1", check=True)

    # As KillMode=process leaves it: the main process ends, its child stays in the unit's group.
    serving.guest(
        f"printf 'SPECRIG_PROFILE=tp4-autoregressive\\n' > {environ}; mkdir -p {dropin};"
        f"printf '[Service]\\nKillMode=process\\nRestart=no\\nExecStart=\\nExecStart=/bin/bash -c \"{rank} 4 31401"
        f" /dev/shm/specrig-ranks/outlived\"\\n' > {dropin}/z.conf; systemctl daemon-reload; systemctl start {unit}",
        check=True,
    )
    start("specrig", "by-hand", 5, env="SPECRIG_PROFILE=tp4-autoregressive")
    start("specrig", "unproven", 6)
    start("root", "of-root", 7, env="SPECRIG_PROFILE=tp4-autoregressive")

    def pid(name: str) -> str:
        return str(soon(lambda: serving.guest(f"cat /dev/shm/specrig-ranks/{name}").stdout.strip()))

    pids = {name: pid(name) for name in ("outlived", "by-hand", "unproven", "of-root")}
    assert all(pids.values()), pids
    inactive = f"systemctl show -p ActiveState --value {unit}"
    assert soon(lambda: serving.guest(inactive).stdout.strip() == "inactive")
    serving.guest(f"rm -r {dropin}; systemctl daemon-reload", check=True)
    before = [main_pid(serving, name) for name in ("chat", "agent")]
    try:
        checked = converge(serving, tmp_path, "--check")
        assert serving.guest(f"kill -0 {pids['outlived']} {pids['by-hand']}").returncode == 0, checked.stdout
        done = converge(serving, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        text = told(done)
        # pid, user, GPU, memory and port, and why nobody answers for it.
        assert f"tp4-autoregressive: orphaned sglang::scheduler_TP0 (pid {pids['outlived']}, user specrig," in text
        assert "MiB, port 31401): its unit specrig-sglang@tp4-autoregressive.service is inactive" in text
        assert f"stopped orphan {pids['outlived']} of tp4-autoregressive" in text
        assert f"stopped orphan {pids['by-hand']} of tp4-autoregressive" in text
        assert f"sglang::scheduler_TP0 (pid {pids['unproven']}, user specrig," in text
        assert "left alone, not ours: neither its control group nor its environment names one of our profiles" in text
        assert "left alone, not ours: its user is not the service user" in text
        for name in ("outlived", "by-hand"):
            assert serving.guest(f"kill -0 {pids[name]}").returncode != 0, name
        for name in ("unproven", "of-root"):
            assert serving.guest(f"kill -0 {pids[name]}").returncode == 0, name
        assert [main_pid(serving, name) for name in ("chat", "agent")] == before
    finally:
        serving.guest(f"kill -9 {' '.join(pids.values())}; rm -rf /dev/shm/specrig-ranks /run/specrig-rank.py {dropin}")
