"""The driver of playbooks, on a tiny playbook of this machine: which settings, which inventory, and an orderly end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from specrig.errors import UsageError
from specrig.ops import runner

PLAY = """
- name: A tiny play
  hosts: all
  gather_facts: false
  tasks:
    - name: Look
      ansible.builtin.set_fact:
        specrig: {found: [a thing], gates: [{gate: device, subject: chat, status: pass, message: fine}]}
    - name: Change a thing
      ansible.builtin.command: {argv: ["true"]}
      changed_when: true
    - name: Say when it is here
      ansible.builtin.copy: {content: here, dest: "{{ mark }}", mode: "0600"}
      when: mark is defined
    - name: Take long
      ansible.builtin.command: {argv: [sleep, "{{ seconds }}"]}
      changed_when: false
      when: seconds is defined
    - name: Fail
      ansible.builtin.fail: {msg: "first\\n  second"}
      when: broken is defined
"""
# Not what a play of ours must be run with: nothing of it may be taken.
FOREIGN = "[defaults]\ncallbacks_enabled = ansible.posix.absent\ncollections_path = /nonexistent\nforks = 1\n"
DRIVER = """
import dataclasses, json, sys
from pathlib import Path
from specrig.ops import runner
root, inventory, extra = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
runner.collection_root = lambda: root
result = runner.run_playbook("tiny", inventory, extra, quiet=True)
print(json.dumps(dataclasses.asdict(result)))
"""


@pytest.fixture
def root(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A collection with one playbook, and the settings and plugins of the real one."""
    folder = tmp_path / "root"
    (folder / "playbooks").mkdir(parents=True)
    (folder / "playbooks" / "tiny.yml").write_text(PLAY)
    for name in ("ansible.cfg", ".collections", "inventory"):
        (folder / name).symlink_to(repository / name)
    monkeypatch.setattr(runner, "collection_root", lambda: folder)
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    monkeypatch.delenv("SPECRIG_RUN", raising=False)
    monkeypatch.setenv("SPECRIG_JOURNAL", str(tmp_path / "journal.jsonl"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An inventory of this machine."""
    path = tmp_path / "here.yml"
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    path.write_text(json.dumps({"all": {"hosts": {"box": variables}}}))
    return path


def journal(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]


def test_an_inventory_is_a_path_an_embedded_name_or_the_lab(
    root: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runner.inventory_path(None).resolve() == repository / "inventory" / "lab"
    assert runner.inventory_path("rtxpro6000x8").resolve() == repository / "inventory" / "rtxpro6000x8"
    (tmp_path / "mine.ini").write_text("box\n")
    assert runner.inventory_path("mine.ini") == tmp_path / "mine.ini"
    assert runner.inventory_path(str(tmp_path / "mine.ini")) == tmp_path / "mine.ini"
    # A path that is there comes before an embedded name.
    (tmp_path / "lab").mkdir()
    assert runner.inventory_path("lab") == tmp_path / "lab"


@pytest.mark.parametrize("given", ["nowhere", "sub/lab", "../lab"])
def test_an_inventory_that_is_neither_is_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as problem:
        runner.inventory_path(given)
    line = str(problem.value)
    assert given in line
    assert "(lab, rtxpro6000x8)" in line
    assert "\n" not in line


def test_an_unknown_playbook_is_one_line(root: Path, here: Path) -> None:
    with pytest.raises(UsageError, match="no playbook 'absent'"):
        runner.run_playbook("absent", here)


def test_settings_are_the_collections_unless_the_operator_names_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = runner.environment()
    assert settings["ANSIBLE_CONFIG"] == str(root / "ansible.cfg")
    assert settings["ANSIBLE_COLLECTIONS_PATH"] == str(root / ".collections")
    assert settings["ANSIBLE_CALLBACKS_ENABLED"] == "specrig.host.journal"
    assert settings["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    monkeypatch.setenv("ANSIBLE_CONFIG", "/etc/ansible/own.cfg")
    assert runner.environment()["ANSIBLE_CONFIG"] == "/etc/ansible/own.cfg"


@pytest.mark.parametrize(
    ("terminal", "no_color", "wanted"), [(True, None, True), (True, "1", False), (False, None, False)]
)
def test_colours_are_for_terminals(
    root: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    settings = runner.environment()
    assert ("ANSIBLE_FORCE_COLOR" in settings, "ANSIBLE_NOCOLOR" in settings) == (wanted, not wanted)


def test_a_run_is_journaled_and_its_reports_collected(root: Path, here: Path, tmp_path: Path) -> None:
    result = runner.run_playbook("tiny", here, {"specrig_reason": "to see"}, quiet=True)
    assert (result.rc, result.interrupted, result.changed, result.failures) == (0, False, 1, [])
    assert 0 < result.seconds < 60
    lines = journal(tmp_path)
    assert [line["event"] for line in lines] == ["start", "play", "task", "end"]
    assert {line["reason"] for line in lines} == {"to see"}
    assert lines[-2]["task"] == "Change a thing"
    assert (lines[-1]["outcome"], lines[-1]["playbook"]) == ("changed", "tiny.yml")
    assert list(tmp_path.glob("specrig-*")) == []


def test_an_inventory_without_a_host_of_ours_is_bad_input_and_no_success(root: Path, tmp_path: Path) -> None:
    empty = tmp_path / "hosts.yml"
    empty.write_text("all: {hosts: {}}\n")
    with pytest.raises(UsageError, match="names no host that tiny works on, so nothing was done"):
        runner.run_playbook("tiny", empty, quiet=True)


def test_a_failed_task_is_a_line_and_no_exception(root: Path, here: Path, tmp_path: Path) -> None:
    result = runner.run_playbook("tiny", here, {"broken": True}, quiet=True)
    assert result.rc == 2
    assert not result.interrupted
    assert result.failures == ["box: Fail: first second"]
    assert journal(tmp_path)[-1]["outcome"] == "failed"


def test_arguments_and_events_are_passed_on(root: Path, here: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    result = runner.run_playbook(
        "tiny",
        here,
        arguments=["--check", "--limit", "bo*", "-e", "note=two words"],
        quiet=True,
        on_event=lambda event: seen.append(event["event"]),
    )
    assert result.rc == 0
    assert "playbook_on_stats" in seen
    assert {line["check"] for line in journal(tmp_path)} == {True}
    assert journal(tmp_path)[0]["subset"] == "bo*"


@pytest.mark.parametrize("mode", [0o777, 0o755], ids=["world-writable", "another-ansible.cfg"])
def test_a_working_folder_changes_nothing(
    root: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "ansible.cfg").write_text(FOREIGN)
    work.chmod(mode)
    monkeypatch.chdir(work)
    result = runner.run_playbook("tiny", here, quiet=True)
    assert (result.rc, result.changed) == (0, 1)
    assert [line["event"] for line in journal(tmp_path)] == ["start", "play", "task", "end"]


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        current = todo.pop()
        for path in Path(f"/proc/{current}/task").glob("*/children"):
            try:
                below = {int(word) for word in path.read_text().split()}
            except OSError:
                continue
            todo += below - found
            found |= below
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_ends_the_play_and_leaves_no_process(
    root: Path, here: Path, tmp_path: Path, how: signal.Signals
) -> None:
    mark = tmp_path / "mark"
    extra = json.dumps({"mark": str(mark), "seconds": "300.25"})
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(root), str(here), extra],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        started: set[int] = set()
        try:
            deadline = time.monotonic() + 60
            while not any(runner._command(pid) == b"sleep\x00300.25\x00" for pid in started):
                assert driver.poll() is None, driver.communicate()
                assert time.monotonic() < deadline, "the play never got to its long task"
                time.sleep(0.05)
                started = descendants(driver.pid)
            assert any(b"ansible-playbook" in runner._command(pid) for pid in started)
            driver.send_signal(how)
            out, err = driver.communicate(timeout=60)
        except BaseException:
            for pid in started | {driver.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    assert driver.returncode == 0, err
    assert list(tmp_path.glob("specrig-*")) == []
    result = json.loads(out)
    assert result["interrupted"] is True
    assert result["rc"] != 0
    assert result["changed"] is None
    assert result["seconds"] < 200  # it did not wait for the task
    end = journal(tmp_path)[-1]
    assert (end["event"], end["outcome"]) == ("end", "aborted")
    deadline = time.monotonic() + 10
    while left := {pid for pid in started if alive(pid)}:
        assert time.monotonic() < deadline, [runner._command(pid) for pid in left]
        time.sleep(0.05)


# what is shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events(*lines: str) -> list[dict[str, str]]:
    return [{"event": "verbose", "stdout": line} for line in lines]


PROGRESS = ["  model Big: 1.0 of 9.0 GB, 1.0 GB/s, 8 s left", "  model Big: 4.0 of 9.0 GB, 1.0 GB/s, 5 s left"]


def test_a_pipe_gets_plain_lines_and_all_of_them() -> None:
    out = io.StringIO()
    screen = runner.Screen(out)
    for event in [
        {"event": "playbook_on_play_start", "stdout": "\r\nPLAY [A play] ****"},
        {"event": "playbook_on_task_start", "stdout": ""},
        *events(*PROGRESS, "", "done\r"),
        {"event": "EOF"},
    ]:
        screen.show(event)
    screen.end()
    assert out.getvalue() == "\nPLAY [A play] ****\n" + "\n".join(PROGRESS) + "\n\ndone\n"


def test_a_terminal_shows_the_last_line_of_progress_only() -> None:
    out = Terminal()
    screen = runner.Screen(out, columns=80)
    for event in events("first", *PROGRESS, "last"):
        screen.show(event)
    assert out.getvalue() == f"first\n\r\x1b[K{PROGRESS[0]}\r\x1b[K{PROGRESS[1]}\r\x1b[Klast\n"


def test_a_line_that_would_not_fit_is_cut_and_an_interrupt_leaves_a_whole_line() -> None:
    out = Terminal()
    screen = runner.Screen(out, columns=21)
    screen.show(events(PROGRESS[0])[0])
    screen.end()
    screen.end()
    assert out.getvalue() == "\r\x1b[K  model Big: 1.0 of…\n"


def test_lines_come_out_as_they_are_printed(root: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = runner.run_playbook("tiny", here, {"specrig_reason": "to see"})
    shown = capfd.readouterr().out
    assert result.rc == 0
    assert "\r" not in shown
    lines = shown.splitlines()
    assert [line.partition("]")[0] for line in lines if line.startswith(("PLAY [", "TASK ["))] == [
        "PLAY [A tiny play",
        "TASK [Change a thing",
    ]
    assert "changed: [box]" in lines
    assert any(line.startswith("tiny.yml: done · changed=1 · ") for line in lines)
    assert lines[-1].startswith("journal    ")


@pytest.mark.parametrize(("terminal", "wanted"), [(True, "1"), (False, "0")])
def test_progress_comes_more_often_where_it_is_written_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, wanted: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert runner.environment()["SPECRIG_REDRAW"] == wanted
