"""From a wheel in a folder that knows nothing of a checkout the same recovery runs, and writes the same journal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from specrig import __version__
from specrig.ops import bundle

pytestmark = pytest.mark.lab

REASON = "the same in every way"
CHAT = "specrig-sglang@chat.service"
# Ansible's own, and what would make an installed package find the checkout again.
FORGOTTEN = ("ANSIBLE_", "SPECRIG_", "PYTHON", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and an unrelated folder to work from."""

    venv: Path
    work: Path
    wheel: Path

    def environment(self, lab, journal: Path, **more: str) -> dict[str, str]:
        checkout = str(Path(sys.executable).parent)
        path = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != checkout]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
        own = {"PATH": os.pathsep.join(path), "SPECRIG_LAB": lab.name, "SPECRIG_JOURNAL": str(journal)}
        return {**kept, **own, **more}

    def run(self, env: dict[str, str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's programs from the unrelated folder."""
        return subprocess.run(
            ["setpriv", "--pdeathsig", "TERM", str(self.venv / "bin" / program), *arguments],
            cwd=self.work,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    @property
    def collection(self) -> Path:
        (found,) = self.venv.glob("lib/python3*/site-packages/ansible_collections/specrig/host")
        return found


def install(folder: Path, python: str, lock: Path, wheel: Path) -> Installed:
    """A new environment with what the lock pins and the wheel."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True, capture_output=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for arguments in (["--require-hashes", "-r", str(lock)], ["--no-deps", "--no-index", str(wheel)]):
        done = subprocess.run([*pip, "--no-compile", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    work = folder / "elsewhere"
    work.mkdir()
    return Installed(folder / "venv", work, wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle.build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    lock = repository / "requirements-host.lock"
    return install(tmp_path_factory.mktemp("installed"), sys.executable, lock, wheel)


@pytest.fixture(scope="module")
def served(lab):
    done = lab.play("provision")
    assert done.returncode == 0, done.stdout + done.stderr
    return lab


def break_chat(lab) -> None:
    """The fault that each recovery finds: a server is down."""
    lab.guest(f"systemctl stop {CHAT}", check=True)


def entries(journal: Path) -> list[dict]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def shape(journal: Path) -> Counter:
    """What a journal says, without when and by which run, and which fields it says it in."""
    told = (
        "event",
        "playbook",
        "play",
        "host",
        "task",
        "outcome",
        "reason",
        "by",
        "version",
        "check",
        "gate",
        "subject",
    )
    return Counter((*(entry.get(name) for name in told), tuple(sorted(entry))) for entry in entries(journal))


def assert_recovered(lab, done: subprocess.CompletedProcess[str], journal: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert lab.guest(f"systemctl is-active {CHAT}").stdout == "active\n"
    lines = entries(journal)
    assert (lines[0]["event"], lines[-1]["event"], lines[-1]["outcome"]) == ("start", "end", "changed")
    assert len({line["run"] for line in lines}) == 1


def test_three_ways_to_recover_write_the_same_journal(served, installed: Installed, tmp_path: Path) -> None:
    journals = {name: tmp_path / f"{name}.jsonl" for name in ("specrig", "collection", "checkout")}

    break_chat(served)
    env = installed.environment(served, journals["specrig"])
    done = installed.run(env, "specrig", "recover", "--reason", REASON)
    assert_recovered(served, done, journals["specrig"])
    assert "chat: GPU 0 · NUMA node 0" in done.stdout

    break_chat(served)
    callbacks = {"ANSIBLE_CALLBACKS_ENABLED": "specrig.host.journal"}
    env = installed.environment(served, journals["collection"], **callbacks)
    inventory = str(installed.collection / "inventory" / "lab")
    arguments = ("-i", inventory, "specrig.host.recover", "-e", f"specrig_reason='{REASON}'")
    done = installed.run(env, "ansible-playbook", *arguments)
    assert_recovered(served, done, journals["collection"])
    assert "chat: GPU 0 · NUMA node 0" in done.stdout

    break_chat(served)
    command = ("ansible-playbook", "-i", "inventory/lab", "playbooks/recover.yml", "-e", f"specrig_reason='{REASON}'")
    done = served.run("env", f"SPECRIG_JOURNAL={journals['checkout']}", *command)
    assert_recovered(served, done, journals["checkout"])

    shapes = {name: shape(journal) for name, journal in journals.items()}
    assert sum(shapes["checkout"].values()) > 5
    assert shapes["specrig"] == shapes["checkout"]
    assert shapes["collection"] == shapes["checkout"]
    assert list(installed.work.iterdir()) == []  # nothing was left in the folder that it was run from


def test_the_commands_work_where_no_checkout_is(served, installed: Installed, tmp_path: Path) -> None:
    env = installed.environment(served, tmp_path / "journal.jsonl")
    assert installed.run(env, "specrig", "--version").stdout == f"specrig {__version__}\n"
    script = "import specrig, specrig.facts as f; print(specrig.__file__); print(f.__file__)"
    done = installed.run(env, "python", "-c", script)
    assert [Path(line).is_relative_to(installed.venv) for line in done.stdout.splitlines()] == [True, True], done.stderr
    done = installed.run(env, "specrig", "lab", "status", "--json")
    assert json.loads(done.stdout)["state"] == "up", done.stderr
    done = installed.run(env, "specrig", "recover", "-i", "nowhere")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "(lab, rtxpro6000x8)" in done.stderr


def test_an_installed_wheel_brings_itself_into_a_guest(served, installed: Installed, tmp_path: Path) -> None:
    env = installed.environment(served, tmp_path / "journal.jsonl")
    script = "import sys; from specrig.ops.bundle import build_wheel; print(build_wheel(sys.argv[1]))"
    done = installed.run(env, "python", "-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    again = Path(done.stdout.strip())
    with zipfile.ZipFile(again) as made, zipfile.ZipFile(installed.wheel) as first:
        assert made.testzip() is None
        assert sorted(made.namelist()) == sorted(first.namelist())
        same = [name for name in made.namelist() if made.read(name) == first.read(name)]
        assert sorted(same) == sorted(name for name in made.namelist() if not name.endswith("/RECORD"))
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "target"), str(again))
    done = installed.run(env, "python", *pip)  # pip checks the hashes of RECORD
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "ansible_collections/specrig/host/playbooks/recover.yml").is_file()

    # The guest forgets what it has: the controller's own wheel goes there, and the guest is as from a checkout.
    record = "/opt/specrig/venv/specrig-installed.json"
    before = json.loads(served.guest(f"cat {record}", check=True).stdout)
    served.guest(f"rm {record}", check=True)
    done = installed.run(env, "specrig", "provision", "--reason", "bring it again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"installed specrig {__version__} into /opt/specrig/venv" in done.stdout
    assert json.loads(served.guest(f"cat {record}", check=True).stdout) == before
    assert served.guest("/opt/specrig/venv/bin/specrig --version").stdout == f"specrig {__version__}\n"


def newer_python() -> str | None:
    """A Python that the newest ansible-core runs on: named, on the path, or one that pyenv keeps."""
    names = [os.environ.get("SPECRIG_NEWER_PYTHON"), *(shutil.which(f"python3.{minor}") for minor in (14, 13, 12))]
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    names += sorted(str(path) for path in kept.glob("*/bin/python"))
    check = "import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 15))"
    for name in filter(None, names):
        done = subprocess.run([name, "-c", check], capture_output=True, check=False)
        if done.returncode == 0:
            return name
    return None


def test_the_newest_ansible_core_recovers_as_well(
    served, wheel: Path, repository: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = newer_python()
    if python is None:
        pytest.skip("no Python 3.12 to 3.14 here, which the newest ansible-core needs (SPECRIG_NEWER_PYTHON names one)")
    lock = repository / "requirements-newest.lock"
    newest = install(tmp_path_factory.mktemp("newest"), python, lock, wheel)
    journal = tmp_path / "journal.jsonl"
    env = newest.environment(served, journal)
    pinned = lock.read_text().split("ansible-core==", 1)[1].split()[0]
    assert f"[core {pinned}]" in newest.run(env, "ansible-playbook", "--version").stdout

    break_chat(served)
    done = newest.run(env, "specrig", "recover", "--reason", REASON)
    assert_recovered(served, done, journal)
    assert "DEPRECATION" not in done.stdout + done.stderr
    again = newest.run(env, "specrig", "recover", "--reason", REASON)
    assert again.returncode == 0, again.stdout + again.stderr
    assert entries(journal)[-1]["outcome"] == "ok"
