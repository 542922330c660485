"""The journal callback, under real ansible-playbook runs on this machine and by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ANSIBLE = [sys.executable, "-m", "ansible.cli.playbook"]

PLAY = """
- name: A play
  hosts: all
  gather_facts: false
  tasks:
    - name: Stay as it is
      ansible.builtin.command: {argv: ["true"]}
      changed_when: false
    - name: Change a thing
      ansible.builtin.command: {argv: ["true"]}
      changed_when: true
    - name: Change a secret
      ansible.builtin.command: {argv: [echo, hunter2]}
      changed_when: true
      no_log: true
    - name: Be skipped
      ansible.builtin.command: {argv: ["true"]}
      when: false
    - name: Wait
      ansible.builtin.pause: {seconds: "{{ wait | default(0) }}"}
    - name: Fail
      ansible.builtin.command: {argv: [sh, -c, "echo first >&2; echo the disk is full >&2; exit 3"]}
      changed_when: false
      when: broken | default(false) | bool
"""


@pytest.fixture
def play(tmp_path: Path, repository: Path):
    book = tmp_path / "book.yml"
    book.write_text(PLAY)
    journal = tmp_path / "log" / "journal.jsonl"
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
        "SPECRIG_JOURNAL": str(journal),
        "ANSIBLE_NOCOLOR": "1",
    }
    env.pop("SPECRIG_RUN", None)
    command = [*ANSIBLE, "-i", "localhost,", "-c", "local", str(book)]

    def run(*arguments: str, start: bool = False, **more: str):
        settings = {"env": {**env, **more}, "cwd": repository, "text": True}
        if start:
            return subprocess.Popen(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings
            )
        return subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False, **settings
        )

    run.journal = journal
    return run


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_changed_and_failed_is_journaled_and_nothing_else(play):
    done = play("-e", "broken=true", "-e", "specrig_reason='a test'")
    assert done.returncode == 2
    lines = read(play.journal)
    assert [(line["event"], line["task"], line["outcome"]) for line in lines] == [
        ("start", None, "ok"),
        ("play", None, "ok"),
        ("task", "Change a thing", "changed"),
        ("task", "Change a secret", "changed"),
        ("task", "Fail", "failed"),
        ("end", None, "failed"),
    ]
    assert {line["schema"] for line in lines} == {1}
    assert len({line["run"] for line in lines}) == 1
    assert {line["playbook"] for line in lines} == {"book.yml"}
    assert {line["reason"] for line in lines} == {"a test"}
    assert lines[4]["host"] == "localhost"
    assert lines[4]["message"] == "first the disk is full"
    assert "hunter2" not in play.journal.read_text()
    assert "hunter2" not in done.stdout + done.stderr
    screen = done.stdout[done.stdout.rindex("book.yml: FAILED") :]
    assert "changed    Change a thing (localhost)\n           Change a secret (localhost)\n" in screen
    assert "failed     localhost: Fail: first the disk is full\n" in screen


def test_reason_and_run_from_the_environment_after_a_line_that_a_crash_cut_off(play):
    play.journal.parent.mkdir()
    play.journal.write_text('{"schema": 1, "event": "ta')
    done = play(SPECRIG_REASON="because", SPECRIG_RUN="run-1")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = play.journal.read_text().splitlines()
    assert first == '{"schema": 1, "event": "ta'
    lines = [json.loads(line) for line in others]
    assert [line["event"] for line in lines] == ["start", "play", "task", "task", "end"]
    assert {(line["reason"], line["run"]) for line in lines} == {("because", "run-1")}
    assert lines[-1]["outcome"] == "changed"
    assert lines[-1]["changed"] == 2


def test_a_journal_that_cannot_be_written_costs_one_warning_and_no_play(play, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = play(SPECRIG_JOURNAL=str(blocked / "journal.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    warnings = (done.stdout + done.stderr).count("could not be written")
    assert warnings == 1
    assert "journal    not written" in done.stdout


def test_the_screen_is_kept_in_a_file_where_nobody_watches(play, tmp_path):
    kept = tmp_path / "var" / "last.txt"
    for _run in range(2):
        done = play(SPECRIG_SUMMARY=str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    screen = done.stdout[done.stdout.rindex("book.yml: done") :]
    lines = kept.read_text().splitlines()
    assert lines[0].startswith("at 2")
    assert "\n".join(lines[2:]).strip() == screen.strip(), "the last run's, as it was shown"
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = play(SPECRIG_SUMMARY=str(blocked / "last.txt"))
    assert done.returncode == 0
    assert "could not be written" in done.stderr + done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_in_the_journal_as_aborted(play, number):
    process = play("-e", "wait=30", start=True)
    try:
        deadline = time.monotonic() + 20
        while not play.journal.exists() or "Change a secret" not in play.journal.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    lines = read(play.journal)
    assert (lines[-1]["event"], lines[-1]["outcome"]) == ("end", "aborted")
    assert sum(line["event"] == "end" for line in lines) == 1


def test_two_runs_at_once_write_whole_lines(play):
    runs = [play(start=True, SPECRIG_RUN=f"run-{number}") for number in range(2)]
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode == 0
    lines = read(play.journal)
    for number in range(2):
        events = [line["event"] for line in lines if line["run"] == f"run-{number}"]
        assert events == ["start", "play", "task", "task", "end"]


def test_under_ansible_runner_the_same_journal_is_written(play, tmp_path, repository):
    ansible_runner = pytest.importorskip("ansible_runner")
    env = {
        "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(repository / ".collections"),
        "ANSIBLE_CALLBACKS_ENABLED": "specrig.host.journal",
        "SPECRIG_JOURNAL": str(play.journal),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    scratch = tmp_path / "runner"
    scratch.mkdir()
    shutil.copy(tmp_path / "book.yml", scratch / "book.yml")
    result = ansible_runner.run(
        private_data_dir=str(scratch),
        project_dir=str(scratch),
        playbook="book.yml",
        inventory="localhost ansible_connection=local",
        envvars=env,
        quiet=True,
    )
    assert result.rc == 0
    assert [line["event"] for line in read(play.journal)] == ["start", "play", "task", "task", "end"]
    with result.stdout as output:
        assert "book.yml: done" in output.read()


# The pieces by themselves.


@pytest.fixture
def module(repository, monkeypatch):
    """The callback's module, as Ansible loads it."""
    import importlib.util

    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    spec = importlib.util.spec_from_file_location("specrig_journal", repository / "callback_plugins" / "journal.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_where_the_journal_is(module, monkeypatch):
    assert module.journal_path("/x/y.jsonl") == Path("/x/y.jsonl")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert module.journal_path(None) == Path("/var/log/specrig/journal.jsonl")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/.state")
    assert module.journal_path(None) == Path("/home/me/.state/specrig/journal.jsonl")


def test_a_serving_line_says_unknown_and_never_a_number_for_it(module):
    row = {"profile": "tp4", "gpus": [4, 5], "numa_nodes": [None], "cpus": None, "port": 31404, "status": "serving"}
    assert module.serving_line(row) == "tp4: GPU 4,5 · NUMA node unknown · CPUs unknown · port 31404 · serving"


def test_one_line_is_one_line(module):
    assert module.one_line("a\n  b\tc") == "a b c"
    assert module.one_line("x" * 50, 10) == "x" * 9 + "…"


def test_a_ctrl_c_that_python_dropped_ends_the_run_at_the_next_task(module, monkeypatch):
    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: signal.SIG_DFL}
    monkeypatch.setattr(module.signal, "getsignal", lambda number: handlers[number])
    monkeypatch.setattr(module.signal, "signal", handlers.__setitem__)
    callback = module.CallbackModule()
    callback._watch_signals()
    callback.v2_playbook_on_task_start(None, False)
    handlers[signal.SIGINT](signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        callback.v2_playbook_on_task_start(None, False)


@pytest.mark.parametrize(
    ("inventory", "code", "words"),
    [
        ("all: {hosts: {}}", 1, "Could not match supplied host pattern, ignoring: gpu_hosts"),
        ("[broken", 1, "No inventory was parsed"),
        (
            "gpu_hosts: {hosts: {one: }}\ngpu_guests: {hosts: {two: {lxc_guest_host: one}}}",
            2,
            "two: Refuse guests without their host: its host one is not in this run (--limit two)",
        ),
    ],
    ids=["no-group", "garbage", "limited-to-guests"],
)
def test_a_play_without_hosts_is_no_success(
    repository: Path, tmp_path: Path, inventory: str, code: int, words: str
) -> None:
    (tmp_path / "hosts.yml").write_text(inventory)
    done = subprocess.run(
        [
            *ANSIBLE,
            "-i",
            str(tmp_path / "hosts.yml"),
            "playbooks/recover.yml",
            *(["--limit", "two"] if code == 2 else []),
        ],
        cwd=repository,
        env={**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code
    assert words in " ".join((done.stdout + done.stderr).split())
    assert "nothing to change" not in done.stdout


class Task:
    """A task as a callback gets it."""

    delegate_to = None
    no_log = False

    def __init__(self, name, role=None):
        self._name = name
        self._role = SimpleNamespace(get_name=lambda: role) if role else None

    def get_name(self):
        return self._name


def outcome(task, host, **result):
    return SimpleNamespace(
        task=task, task_name=task.get_name(), host=SimpleNamespace(get_name=lambda: host), result=result
    )


@pytest.fixture
def recovery(module, monkeypatch, tmp_path):
    """A recovery of 20 s under a clock of the test: 3 s of look, a model staged from 3 to 11 s, gates from 18 s on."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    callback = module.CallbackModule()
    callback._begin("recover.yml")
    callback._file = tmp_path / "journal.jsonl"
    callback._run, callback._reason, callback._by, callback._version, callback._check = "r", None, "me", "0", False
    look = Task("specrig.host.gpu_host : Look", "specrig.host.gpu_host")
    stage = Task("specrig.host.model_store : Stage", "specrig.host.model_store")
    wait = Task("specrig.host.sglang_server : Wait for the next model", "specrig.host.sglang_server")
    wait.delegate_to = "box"
    ready = Task("specrig.host.sglang_server : Wait for a completion of each", "specrig.host.sglang_server")
    gates = Task("specrig.host.preflight : Ask", "specrig.host.preflight")

    def go(guests=("guest",)):
        for at, task in ((100.0, look), (103.0, stage), (104.0, wait)):
            now[0] = at
            callback.v2_playbook_on_task_start(task, False)
        now[0] = 112.0
        # That machine's clock is an hour ahead; its result came at once.
        staged = {"name": "model M", "kind": "model", "started_unix": 3703.0, "seconds": 8.0, "detail": "4.9 GB/s"}
        draft = {"name": "model D", "kind": "model", "started_unix": 3703.5, "seconds": 1.5}
        callback.v2_runner_on_ok(outcome(wait, "guest", specrig={"chain": [staged, draft], "clock_unix": 3712.0}))
        callback.v2_playbook_on_task_start(ready, False)
        now[0] = 118.0
        for place, guest in enumerate(guests):
            row = {"name": "agent: start to completion", "kind": "server", "started_unix": 51.0, "seconds": 5.5 - place}
            callback.v2_runner_on_ok(outcome(ready, guest, specrig={"chain": [row], "clock_unix": 57.0}))
        callback.v2_playbook_on_task_start(gates, False)
        now[0] = 120.0
        return callback._path(20.0)

    return go


def test_what_was_waited_for_bounds_the_run_whatever_that_machine_s_clock_says(recovery):
    lines, record = recovery()
    assert lines == [
        "host 3.0 s > model M 8.0 s (4.9 GB/s) > servers 1.0 s > agent: start to completion 5.5 s > gates 2.0 s"
        " = 19.5 s of 20.0 s",
        "beside it: model D 1.5 s (6.0 s to spare)",
    ]
    assert [(row["name"], row["host"], row["start_s"], row["critical"]) for row in record["beside"]] == [
        ("model D", "box", 3.5, False),
        ("model M", "box", 3.0, True),
        ("agent: start to completion", "guest", 12.0, True),
    ]
    assert [task["task"] for task in record["tasks"]][-1] == "specrig.host.preflight : Ask"


def test_servers_of_several_guests_carry_their_guest(recovery):
    lines, _record = recovery(("one", "two"))
    assert "one agent: start to completion 5.5 s" in lines[0]
    assert "two agent: start to completion 4.5 s (1.0 s to spare)" in lines[1]


def test_a_run_that_waited_for_nothing_has_no_path(play):
    assert "critical path" not in play().stdout
    assert "path" not in {line["event"] for line in read(play.journal)}


def test_a_role_s_tasks_are_one_part_of_the_path(module):
    look = "specrig.host.gpu_host : Look once at the host"
    assert module.part_of(Task(look, "specrig.host.gpu_host")) == "host"
    assert module.part_of(Task("x : y", "somebody.else.their_role")) == "their_role"
    assert module.part_of(Task("Keep other operators away")) == "Keep other operators away"
