"""Waiting for a staging in the background: what the module sees, what the action shows and returns."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

JOB = "j731.4242"
SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]


class Staging:
    """A job's files as the staging and Ansible's wrapper leave them."""

    def __init__(self, folder: Path) -> None:
        self.jobs, self.folder = folder / "jobs", folder / "staging"
        self.jobs.mkdir()
        self.folder.mkdir()
        self.result({"started": True, "finished": False, "ansible_job_id": JOB})
        self.began = time.time()

    def result(self, content: dict[str, Any]) -> None:
        (self.jobs / "scratch").write_text(json.dumps(content))
        (self.jobs / "scratch").rename(self.jobs / JOB)

    def tell(self, name: str, state: str, done: float, **more: Any) -> None:
        row = {
            "schema": 1,
            "model": name,
            "pid": None,
            "started_unix": self.began,
            "updated_unix": time.time(),
            "bytes_total": 2_000_000_000,
            "bytes_done": done,
            "files_total": 4,
            "files_done": 1,
            "rate_bytes_s": 5e8,
            "eta_s": 3.0,
            "state": state,
            "message": None,
            **more,
        }
        scratch = self.folder / f".{name}"
        scratch.write_text(json.dumps(row))
        scratch.rename(self.folder / f"{name}.json")


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path)


@pytest.fixture
def wrapper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the job's name, as the wrapper of an asynchronous task does."""
    with subprocess.Popen([*SLEEP, JOB.partition(".")[0]]) as process:
        yield process
        process.kill()


@pytest.fixture
def wait(run: Callable[..., dict[str, Any]], staging: Staging) -> Callable[..., dict[str, Any]]:
    def call(models: list[str], **more: Any) -> dict[str, Any]:
        more.setdefault("hold_s", 0.2)
        return run(
            "model_wait", job=JOB, models=models, folder=str(staging.folder), async_dir=str(staging.jobs), **more
        )

    return call


def test_a_staging_that_runs_is_reported_when_the_time_is_up(wait, staging, wrapper) -> None:
    staging.tell("A", "running", 5e8, pid=wrapper.pid)
    answer = wait(["A", "B"])
    assert (answer["over"], answer["finished"], answer["staged"], answer["lost"]) == (False, False, [], {})
    assert (answer["progress"]["A"]["state"], answer["progress"]["A"]["bytes_done"]) == ("running", 5e8)
    assert answer["progress"]["B"] is None
    assert answer["specrig"]["chain"] == []


def test_one_more_model_is_enough_for_whoever_waits_for_any(wait, staging, wrapper) -> None:
    staging.tell("A", "done", 2e9, started_unix=staging.began, updated_unix=staging.began + 4)
    staging.tell("B", "running", 5e8)
    answer = wait(["A", "B"], until="any", hold_s=60)
    assert (answer["over"], answer["finished"], answer["staged"]) == (True, False, ["A"])
    (row,) = answer["specrig"]["chain"]
    assert (row["name"], row["kind"], row["detail"]) == ("model A", "model", "500 MB/s")
    assert (row["started_unix"], row["seconds"]) == (staging.began, pytest.approx(4))
    assert answer["specrig"]["clock_unix"] == pytest.approx(time.time(), abs=30)
    # What an earlier wait was content with is not news.
    assert wait(["A", "B"], until="any", have=["A"])["over"] is False
    # Nor is what nobody waits for.
    assert wait(["A", "B"], until="any", wanted=["B"])["over"] is False


def test_a_model_that_comes_while_the_module_waits_ends_the_wait_at_once(wait, staging, wrapper) -> None:
    staging.tell("A", "running", 5e8)
    timer = threading.Timer(0.5, staging.tell, ("A", "done", 2e9))
    timer.start()
    begun = time.monotonic()
    answer = wait(["A", "B"], wanted=["A"], hold_s=300)
    timer.join()
    assert answer["staged"] == ["A"]
    assert time.monotonic() - begun < 100


def test_the_job_s_own_result_comes_with_the_last_model(wait, staging, wrapper) -> None:
    result = {
        "changed": True,
        "complete": False,
        "models": {"A": {"complete": True, "seconds": 4.0, "rate_bytes_s": 6e8}},
        "specrig": {"changed": ["staged model A"], "found": [], "gates": [], "notes": []},
    }
    staging.tell("A", "done", 2e9, updated_unix=staging.began + 4)
    # The result is there a moment after the last byte: the module waits for it.
    timer = threading.Timer(0.3, staging.result, (result,))
    timer.start()
    answer = wait(["A"], hold_s=60)
    timer.join()
    assert (answer["over"], answer["finished"], answer["staged"]) == (True, True, ["A"])
    assert answer["job_result"]["specrig"]["changed"] == ["staged model A"]
    assert answer["specrig"]["chain"][0]["detail"] == "600 MB/s"


def test_a_result_without_a_word_on_progress_is_a_result(wait, staging) -> None:
    staging.result({"changed": True, "models": {"A": {"complete": True}}, "specrig": {}})
    answer = wait(["A"])
    assert (answer["finished"], answer["staged"], answer["specrig"]["chain"]) == (True, ["A"], [])


def test_progress_of_an_earlier_staging_counts_for_nothing(wait, staging, wrapper) -> None:
    staging.tell("A", "done", 2e9, updated_unix=staging.began - 60)
    assert wait(["A"])["staged"] == []


def test_a_failed_job_loses_what_it_did_not_get_to_and_keeps_the_rest(wait, staging) -> None:
    staging.tell("A", "done", 2e9)
    staging.tell("B", "failed", 1e9, message="b.bin has sha256 1, the manifest says 2")
    models = {"A": {"complete": True, "seconds": 1.0}, "B": {"complete": False}, "C": {"complete": False}}
    message = "b.bin has sha256 1, the manifest says 2; get it again"
    staging.result({"failed": True, "msg": message, "models": models, "specrig": {"found": ["model A is not in RAM"]}})
    answer = wait(["A", "B", "C"])
    assert answer["staged"] == ["A"]
    assert answer["lost"] == {"B": "b.bin has sha256 1, the manifest says 2", "C": message}


def test_a_killed_staging_says_so_and_how_far_it_was(wait, staging) -> None:
    # No process carries the job's name, and its result will never come.
    staging.tell("A", "running", 1e9)
    answer = wait(["A"], hold_s=300)
    assert answer["over"] is True
    assert answer["lost"] == {"A": "its staging was killed at 1.0 of 2.0 GB; whole files are kept, run it again"}


def test_a_module_that_was_killed_under_its_wrapper_says_so_too(wait, staging) -> None:
    staging.result({"failed": True, "cmd": "python3 x", "msg": "Traceback (most recent call last): ...", "data": ""})
    assert wait(["A"])["lost"] == {"A": "its staging was killed; whole files are kept, run it again"}


@pytest.mark.parametrize("told", [True, False], ids=["by-the-wrapper", "by-nobody"])
def test_a_staging_that_ran_out_of_time_is_one_line(wait, staging, told: bool) -> None:
    staging.tell("A", "running", 1.5e9)
    if told:
        staging.result({"failed": True, "msg": "Timeout exceeded", "child_pid": 7})
    else:
        os.utime(staging.jobs / JOB, (staging.began - 31, staging.began - 31))
    lost = wait(["A"], timeout_s=30, hold_s=300)["lost"]["A"]
    assert lost.startswith("it was not done within 30 s")
    assert lost.endswith("raise model_store_timeout_s, or look why the source is slow")


def test_a_download_that_ran_out_of_time_names_its_own_limit(wait, staging) -> None:
    staging.tell("A@hub", "running", 1.5e9)
    staging.result({"failed": True, "msg": "Timeout exceeded", "child_pid": 7})
    lost = wait(["A@hub"], timeout_s=30)["lost"]["A@hub"]
    assert lost.startswith("it was not done within 30 s")
    assert "; raise model_store_hub_timeout_s, or look" in lost


def test_another_run_s_staging_is_waited_for_by_name(wait, staging, wrapper) -> None:
    with subprocess.Popen(SLEEP, env={**os.environ, "SPECRIG_RUN": "5f0c"}) as other:
        # It is stuck since before this job began.
        staging.tell("A", "running", 1e9, pid=other.pid, updated_unix=staging.began - 60)
        try:
            # Between fork and exec a child still looks like its parent.
            deadline = time.monotonic() + 60
            while "5f0c" not in (line := str(wait(["A"])["progress"]["A"]["message"])):
                assert time.monotonic() < deadline, line
        finally:
            other.send_signal(signal.SIGKILL)
    assert line == f"waiting for the staging of run 5f0c (process {other.pid}): 1.0 of 2.0 GB, 500 MB/s, 3 s left"


# the action


@pytest.fixture
def action(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The action's module."""
    monkeypatch.setattr(sys, "path", [str(repository / ".collections"), *sys.path])
    return importlib.import_module("ansible_collections.specrig.host.plugins.action.model_wait")


def going(done: float, **more: Any) -> dict[str, Any]:
    return {
        "model": "A",
        "state": "running",
        "bytes_done": done,
        "bytes_total": 60e9,
        "files_done": 1,
        "files_total": 4,
        "rate_bytes_s": 1e9,
        "eta_s": (60e9 - done) / 1e9,
        "started_unix": 100.0,
        "updated_unix": 100.0 + done / 1e9,
        "message": None,
        **more,
    }


def shown(action: Any, seconds: int, redraw: bool = False) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Lines and journal events of a staging at 1 GB/s that is asked about once a second."""
    now = [0.0]
    lines: list[str] = []
    events: list[tuple[Any, ...]] = []
    reporter = action.Reporter(
        lines.append,
        lambda event, outcome, **row: events.append((event, outcome, row["bytes_done"], row["seconds"])),
        "box",
        redraw,
        clock=lambda: now[0],
    )
    for second in range(seconds + 1):
        now[0] = float(second)
        reporter.news({"A": going(second * 1e9), "B": None}, [])
    reporter.news({"A": going(60e9, state="done", updated_unix=100.0 + seconds), "B": None}, [])
    reporter.news({"A": going(60e9, state="done"), "B": None}, [])
    return lines, events


def test_lines_come_every_few_seconds_and_the_journal_gets_fewer(action) -> None:
    lines, events = shown(action, 30)
    assert lines[0] == "model A: 2.0 of 60.0 GB, 1.0 GB/s, 58 s left"
    assert len(lines) == 11
    assert lines[-1] == "model A: staged, 60.0 GB in 30.0 s, 2.0 GB/s"
    assert events == [
        ("progress", "running", 0.0, 0.0),
        ("progress", "running", 10e9, 10.0),
        ("progress", "running", 20e9, 20.0),
        ("progress", "running", 30e9, 30.0),
        ("progress", "ok", 60e9, 30.0),
    ]


def test_a_long_staging_does_not_fill_the_screen(action) -> None:
    assert len(shown(action, 600)[0]) < 90
    assert len(shown(action, 600, redraw=True)[0]) == 600


def test_a_short_staging_has_one_line(action) -> None:
    assert shown(action, 1)[0] == ["model A: staged, 60.0 GB in 1.0 s, 60.0 GB/s"]


PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Wait for the models
      specrig.host.model_wait:
        job: {job}
        models: [A, B]
        folder: {folder}
        async_dir: {jobs}
        fail: {fail}
      register: waited
    - name: Show it
      ansible.builtin.copy:
        content: "{{{{ waited | to_json }}}}"
        dest: {out}
        mode: "0600"
"""


def play(staging: Staging, repository: Path, tmp_path: Path, fail: bool) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Run the action in a real play on this machine; returns the process, its registered result, the journal."""
    book, out, journal = tmp_path / "book.yml", tmp_path / "out.json", tmp_path / "journal.jsonl"
    book.write_text(PLAY.format(job=JOB, folder=staging.folder, jobs=staging.jobs, fail=fail, out=out))
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", "-c", "local", str(book)],
        cwd=repository,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
            "SPECRIG_JOURNAL": str(journal),
            "ANSIBLE_NOCOLOR": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return done, json.loads(out.read_text()) if out.is_file() else None, lines


def test_in_a_play_the_job_s_report_is_the_task_s_own(staging, wrapper, repository, tmp_path) -> None:
    said = {"changed": ["staged model A"], "gates": [{"gate": "model", "subject": "A", "status": "pass"}]}
    models = {name: {"complete": True, "seconds": 1.0} for name in "AB"}

    journal = tmp_path / "journal.jsonl"

    def go() -> None:
        deadline = time.monotonic() + 60
        part = 0
        while time.monotonic() < deadline and not (journal.is_file() and '"event": "progress"' in journal.read_text()):
            part += 1
            staging.tell("A", "running", part * 1e6)
            time.sleep(0.1)
        for name in "AB":
            staging.tell(name, "done", 2e9)
        staging.result({"changed": True, "models": models, "specrig": said})

    thread = threading.Thread(target=go)
    thread.start()
    done, result, lines = play(staging, repository, tmp_path, True)
    thread.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["staged"] == ["A", "B"]
    assert result["finished"] is True
    assert result["changed"] is True
    assert "  model A: staged, 2.0 GB in " in done.stdout
    assert "changed    staged model A" in done.stdout
    events = [(line["outcome"], line["model"]) for line in lines if line["event"] == "progress"]
    assert events[0] == ("running", "A")
    assert sorted(events[-2:]) == [("ok", "A"), ("ok", "B")]
    assert {line["run"] for line in lines} == {lines[0]["run"]}
    (path,) = [line for line in lines if line["event"] == "path"]
    assert {row["name"] for row in path["beside"]} == {"model A", "model B"}


@pytest.mark.parametrize("fail", [True, False])
def test_in_a_play_a_failed_job_is_its_own_line(staging, repository, tmp_path, fail: bool) -> None:
    models = {"A": {"complete": True, "seconds": 1.0}, "B": {"complete": False}}
    staging.tell("A", "done", 2e9)
    staging.result(
        {"failed": True, "msg": "model B: its source is gone", "models": models, "specrig": {"found": ["x"]}}
    )
    done, result, _lines = play(staging, repository, tmp_path, fail)
    assert done.returncode == (2 if fail else 0), done.stdout + done.stderr
    if fail:
        assert "localhost: Wait for the models: model B: its source is gone" in done.stdout
    else:
        assert result["lost"] == {"B": "model B: its source is gone"}
        assert result["staged"] == ["A"]
    assert "Traceback" not in done.stdout + done.stderr
