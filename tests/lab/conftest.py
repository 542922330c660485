"""The lab as a session fixture: brought up once, and removed whatever happens."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.ops.lab import lifecycle, state
from specrig.ops.lab.model import DEFAULT_SIZE_MB

REPOSITORY = Path(__file__).resolve().parents[2]
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the lab's tests, with the reason, where no lab can run; in CI they fail instead."""
    marked = [item for item in items if item.get_closest_marker("lab")]
    if marked and not IN_CI and (problem := lifecycle.missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


_COMPLETION = """python3 - <<'END'
import json, urllib.request
body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
kind = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:%d/generate", json.dumps(body).encode(), kind)
try:
    print(urllib.request.urlopen(request, timeout=20).read().decode())
except OSError as problem:
    print(json.dumps({"error": str(problem)}))
END"""
_OPEN = """python3 - <<'END'
import errno, os, stat
path = "/dev/.test-%(major)d"
os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(%(major)d, %(minor)d))
try:
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    print("opened")
except OSError as problem:
    print(errno.errorcode[problem.errno])
finally:
    os.unlink(path)
END"""


class Lab:
    """A running lab and the ways to reach into it."""

    def __init__(self, name: str, journal: Path) -> None:
        self.name = name
        self.journal = journal
        """The journal that plays write."""

    @property
    def state(self) -> state.LabState:
        """The lab's record: address, subnet, keys."""
        return lifecycle.existing(self.name)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which commands find this lab."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        # What a command that a test kills leaves in its scratch folder goes with the test's own.
        scratch = self.journal.parent / "tmp"
        scratch.mkdir(exist_ok=True)
        extra = {
            "SPECRIG_LAB": self.name,
            "TMPDIR": str(scratch),
            "SPECRIG_JOURNAL": str(self.journal),
            "ANSIBLE_NOCOLOR": "1",
            "PATH": path,
        }
        return {**os.environ, **extra}

    def host(self, command: str, *, check: bool = False, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the host; with ``check`` a failure fails the test with its output."""
        return _checked(lifecycle.on_host(self.state, command, timeout_s), check)

    def guest(self, command: str, *, check: bool = False, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the guest; with ``check`` a failure fails the test with its output."""
        return _checked(lifecycle.in_guest(self.state, command, timeout_s), check)

    def completion(self, port: int) -> dict[str, Any]:
        """The answer of the guest's server to a request for 8 tokens, from inside, past all that playbooks verified."""
        done = self.guest(_COMPLETION % port)
        answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}
        return answer

    def tokens(self, port: int) -> int | str:
        """How many of 8 tokens it gave, or the error."""
        answer = self.completion(port)
        return str(answer["error"]) if "error" in answer else int(answer["meta_info"]["completion_tokens"])

    def opens(self, major: int, minor: int = 0, guest: str | None = None) -> str:
        """What a guest gets who opens a device by number, through a node of its own: ``opened``, or an error's name.

        A device that is allowed but has no driver gives ENXIO, a forbidden one EPERM.
        """
        script = _OPEN % {"major": major, "minor": minor}
        done = self.guest(script) if guest is None else self.host(f"lxc-attach -n {guest} -- {script}")
        return done.stdout.strip()

    def reboot(self, driver: lifecycle.driver.Load = "all") -> None:
        """Stop and start the host."""
        lifecycle.reboot(self.name, driver, _quiet)

    def bare(self) -> None:
        """Throw the lab away and bring up a new one, bare."""
        lifecycle.down(self.name, _quiet)
        lifecycle.up(self.name, DEFAULT_SIZE_MB, _quiet)

    def run(self, *command: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine, from the checkout, in this lab's environment; it ends with this process."""
        return subprocess.run(
            ["setpriv", "--pdeathsig", "TERM", *command],
            cwd=REPOSITORY,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def play(self, playbook: str, *args: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a playbook of the checkout (``recover`` or ``playbooks/recover.yml``) on this lab."""
        path = playbook if playbook.endswith(".yml") else f"playbooks/{playbook}.yml"
        return self.run("ansible-playbook", "-i", "inventory/lab", path, *args, timeout_s=timeout_s)


def _quiet(_line: str) -> None:
    """Say nothing."""


def _checked(done: subprocess.CompletedProcess[str], check: bool) -> subprocess.CompletedProcess[str]:
    if check and done.returncode:
        pytest.fail(
            f"exit {done.returncode} from {shlex.join(done.args[-1:])}\n{done.stdout}{done.stderr}", pytrace=False
        )
    return done


@contextlib.contextmanager
def running_lab(name: str, journal: Path) -> Iterator[Lab]:
    """A lab that is bare at first and gone at the end: also after a failure, Ctrl-C or SIGTERM."""
    state.STATE_ROOT.mkdir(parents=True, exist_ok=True)
    lock_path = state.STATE_ROOT / f".{name}.session"
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pytest.fail(f"another test session uses lab {name}: wait for it, or set SPECRIG_LAB", pytrace=False)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            lifecycle.down(name, _quiet)

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    atexit.register(remove)
    try:
        lifecycle.require()
        remove()  # what a session that was killed left
        lifecycle.up(name, DEFAULT_SIZE_MB, _quiet)
        yield Lab(name, journal)
    finally:
        try:
            remove()
            atexit.unregister(remove)
        finally:
            signal.signal(signal.SIGTERM, before)
            lock_path.unlink(missing_ok=True)
            os.close(lock)
    left = lifecycle.leftovers(name)
    assert not left, f"the lab left behind: {left}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab of this test session, bare at the start of the session."""
    journal = tmp_path_factory.mktemp("lab") / "journal.jsonl"
    with running_lab(f"{state.default_name()}-t", journal) as found:
        yield found
