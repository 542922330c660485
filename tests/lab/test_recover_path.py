"""Staging overlaps with everything that does not need it, is seen while it runs, and the summary says what bounded it.

The staging of the large model is held back by stopping its processes again and again, and then for good until the test
lets it go: what happens meanwhile is what the order of the playbook allows, on a machine of any speed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lab

PORTS = {"chat": 31001, "agent": 31002}
BIG, DRAFT = "Big-27B", "Draft-1B"
BIG_FILE_MB = 1400
MODELS = {name: {"source": f"/srv/models/{name}"} for name in (BIG, DRAFT)}
PROFILES = {
    "chat": {"model": DRAFT, "tp": 1, "method": "dflash", "draft_model": f"/srv/models/{DRAFT}", "port": 31001},
    "agent": {"model": BIG, "tp": 2, "method": "dflash", "draft_model": f"/srv/models/{DRAFT}", "port": 31002},
}
for _profile in PROFILES.values():
    _profile.update(context_length=32768, gpus="auto", serve=True)
VARIABLES = {"model_store_models": MODELS, "model_store_size": "3G", "sglang_server_profiles": PROFILES}
MAKE = f"""set -e
cd /srv/models
cp -r Qwen3.6-27B {DRAFT}
cp -r Qwen3.6-27B {BIG}
cd {BIG}
head -c {BIG_FILE_MB}M /dev/zero > weights.bin
sha256sum weights.bin >> MANIFEST.sha256
"""
# Runs on the host. Slows the staging of the large model down until the small one is there, stops it until it is let go,
# or ends it. `running` and `done` are states that its progress file tells.
HOLD = """
import json, os, signal, sys, time
how, big, draft = sys.argv[1:]
deadline = time.time() + 500

def tells(name):
    try:
        with open("/run/specrig/staging/%s.json" % name) as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return {"state": None, "bytes_done": 0, "updated_unix": 0}

begun = time.time()
def row(name):
    about = tells(name)
    return about if about["updated_unix"] >= begun else {"state": None, "bytes_done": 0}

while row(big)["state"] != "running":
    assert time.time() < deadline, "the staging never began"
    time.sleep(0.005)
group = os.getpgid(row(big)["pid"])
try:
    while how == "hold" and (row(draft)["state"] != "done" or not row(big)["bytes_done"]):
        assert time.time() < deadline, "the small model never came"
        os.killpg(group, signal.SIGSTOP)
        time.sleep(0.1)
        os.killpg(group, signal.SIGCONT)
        time.sleep(0.02)
    os.killpg(group, signal.SIGSTOP)
    print(json.dumps(row(big)), flush=True)
    while not os.path.exists("/run/let-go"):
        assert time.time() < deadline, "nobody let it go"
        time.sleep(0.05)
finally:
    os.killpg(group, signal.SIGKILL if how == "kill" else signal.SIGCONT)
"""


class Held:
    """A play whose staging of the large model is held back, or one beside it."""

    def __init__(self, lab: Any, playbook: str, how: str | None, variables: Path) -> None:
        self.lab = lab
        self.holder: subprocess.CompletedProcess[str] | None = None
        self.thread: threading.Thread | None = None
        if how is not None:
            lab.host("rm -f /run/let-go", check=True)
            lab.host(f"cat > /root/hold.py <<'END'\n{HOLD}\nEND", check=True)
            self.thread = threading.Thread(target=self._hold, args=(how,))
            self.thread.start()
        self.process = subprocess.Popen(
            ["ansible-playbook", "-i", "inventory/lab", f"playbooks/{playbook}.yml", "-e", f"@{variables}"],
            cwd=Path(__file__).resolve().parents[2],
            env=lab.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _hold(self, how: str) -> None:
        self.holder = self.lab.host(f"python3 /root/hold.py {how} {BIG} {DRAFT}", timeout_s=600)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)

    def until(self, what: str, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while not seen():
            assert self.process.poll() is None, f"it ended before: {what}\n" + "".join(self.lines)
            assert time.monotonic() < deadline, f"never: {what}\n" + "".join(self.lines)
            time.sleep(0.2)

    def let_go(self) -> int:
        """Lets the staging go on (or end), and the play to its own end; returns its exit code."""
        self.lab.host("touch /run/let-go", check=True)
        code = self.process.wait(timeout=400)
        self.reader.join()
        if self.thread is not None:
            self.thread.join()
            assert self.holder is not None
            assert self.holder.returncode == 0, self.holder.stderr
        return code

    def kill(self) -> None:
        """Ends the play as the loss of its controller would; what it began goes on."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        self.kill()
        self.lab.host("touch /run/let-go")
        if self.thread is not None:
            self.thread.join()
        self.reader.join()

    @property
    def output(self) -> str:
        return "".join(self.lines)


@pytest.fixture(scope="module")
def hold(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Held]]:
    """Starts a play on the lab, bare at first, whose large model is held back."""
    lab.bare()
    lab.host(MAKE, check=True)
    variables = tmp_path_factory.mktemp("vars") / "vars.json"
    variables.write_text(json.dumps(VARIABLES))
    started: list[Held] = []

    def start(playbook: str, how: str | None) -> Held:
        started.append(Held(lab, playbook, how, variables))
        return started[-1]

    start.variables = variables  # type: ignore[attr-defined]
    yield start
    for held in started:
        held.stop()


def run_of(lab: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in lab.journal.read_text().splitlines()]
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def serves(lab: Any, name: str) -> bool:
    return lab.tokens(PORTS[name]) == 8


def active(lab: Any, name: str) -> str:
    return str(lab.guest(f"systemctl is-active specrig-sglang@{name}").stdout.strip())


def screen_of(output: str, playbook: str) -> list[str]:
    return output[output.rindex(f"{playbook}.yml: ") :].splitlines()


def test_a_small_model_s_server_is_installed_and_serves_while_the_large_one_is_staged(lab: Any, hold: Any) -> None:
    held = hold("provision", "hold")
    # The whole guest is set up, software and all, with half a model in RAM; chat serves, agent has to wait.
    held.until("chat serves", lambda: serves(lab, "chat"))
    held.until("progress is shown", lambda: len(re.findall(rf"model {BIG}: [\d.]+ of", held.output)) >= 2)
    assert active(lab, "agent") == "inactive"
    assert not lab.host(f"ls /srv/specrig/ram/{BIG}/weights.bin").stdout
    assert held.let_go() == 0, held.output
    assert serves(lab, "agent")

    # Lines for people, one every few seconds.
    lines = [line.strip() for line in held.output.splitlines() if f"model {BIG}: " in line]
    assert re.match(rf"model {BIG}: [\d.]+ of 1\.7 GB, (\d+ MB/s|[\d.]+ GB/s|rate unknown)", lines[0])
    assert any(re.fullmatch(rf"model {BIG}: staged, 1\.7 GB in [\d.]+ s, [\d.]+ \wB/s", line) for line in lines)

    # The order of events, from the journal alone.
    run = run_of(lab)
    told = [(line["event"], line.get("model") or line["task"], line["outcome"]) for line in run]
    staged = {line["model"]: line for line in run if line["event"] == "progress" and line["outcome"] == "ok"}
    assert set(staged) == {BIG, DRAFT}
    assert staged[BIG]["bytes_done"] == staged[BIG]["bytes_total"] > 1_400_000_000
    assert staged[BIG]["seconds"] > 0
    assert staged[BIG]["rate_bytes_s"] is not None
    before = told[: told.index(("progress", BIG, "ok"))]
    assert ("progress", BIG, "running") in before
    assert ("progress", DRAFT, "ok") in before
    for task in ("Install the package", "Converge the units", "Start what has its models now"):
        assert ("task", task, "changed") in before
    started = [line["changes"] for line in run if "Start what has its models now" in str(line["task"])]
    assert started == [["started chat"], ["started agent"]]

    # What bounded it: the model, then the server that waited for it. The other server had time to spare.
    (path,) = [line for line in run if line["event"] == "path"]
    names = [step["name"] for step in path["path"]]
    assert names.index(f"model {BIG}") < names.index("gates")
    assert path["seconds"] <= path["wall_s"] + 0.2
    beside = {row["name"]: row for row in path["beside"]}
    assert set(beside) == {f"model {BIG}", f"model {DRAFT}", "chat: start to completion", "agent: start to completion"}
    assert beside[f"model {BIG}"]["critical"]
    assert beside[f"model {BIG}"]["host"] == "lab-host"
    assert not beside["chat: start to completion"]["critical"]
    # On a slow machine both answer the first question: then nobody knows since when.
    agent = beside["agent: start to completion"]
    assert agent["at_most"] or names.index(f"model {BIG}") < names.index(agent["name"]) < names.index("gates")
    assert beside["chat: start to completion"]["start_s"] < (
        beside[f"model {BIG}"]["start_s"] + beside[f"model {BIG}"]["seconds"]
    )
    screen = screen_of(held.output, "provision")
    assert len(screen) <= 45
    place = screen.index("critical path")
    assert re.search(rf" > model {BIG} [\d.]+ s \(.*\) > .* = \d.* s of \d.* s$", screen[place + 1])
    assert re.match(rf" +beside it: model {DRAFT} .* s \([\d.]+ s to spare\)", screen[place + 2])


def test_a_staging_that_is_killed_is_said_and_what_serves_is_left_alone(lab: Any, hold: Any) -> None:
    pid = lab.guest("systemctl show -p MainPID --value specrig-sglang@chat", check=True).stdout
    lab.guest("systemctl stop specrig-sglang@agent", check=True)
    lab.host(f"rm -rf /srv/specrig/ram/{BIG}", check=True)
    held = hold("recover", "kill")
    held.until("it is staged", lambda: f"model {BIG}: " in held.output)
    assert held.let_go() == 2, held.output
    screen = "\n".join(screen_of(held.output, "recover"))
    assert re.search(
        rf"agent: its model {BIG} is not there: its staging was killed at [\d.]+ of 1\.7 GB; whole files are kept",
        screen,
    )
    assert "critical path" not in screen
    assert "Traceback" not in held.output
    assert active(lab, "agent") == "inactive"
    assert serves(lab, "chat")
    assert lab.guest("systemctl show -p MainPID --value specrig-sglang@chat", check=True).stdout == pid
    assert lab.host("test -e /run/specrig/lock").returncode != 0


def test_the_next_run_waits_for_the_staging_of_one_that_died_and_one_after_that_has_no_path(
    lab: Any, hold: Any
) -> None:
    held = hold("recover", "stop")
    held.until("it is staged", lambda: f"model {BIG}: " in held.output)
    first = run_of(lab)[-1]["run"]
    held.kill()
    second = hold("recover", None)
    words = f"model {BIG}: waiting for the staging of run {first} (process "
    second.until("it says for whom it waits", lambda: words in second.output)
    assert active(lab, "agent") == "inactive"
    assert second.let_go() == 0, second.output
    assert run_of(lab)[-1]["run"] != first
    assert serves(lab, "agent")
    screen = screen_of(second.output, "recover")
    assert "critical path" in screen
    assert len(screen) <= 40
    again = lab.play("recover", "-e", f"@{hold.variables}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing to change" in again.stdout
    assert "critical path" not in again.stdout
    assert "progress" not in {line["event"] for line in run_of(lab)}
    assert "Wait for" not in again.stdout
