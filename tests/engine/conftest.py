"""The lab with the real engine's wheels, a tiny model and stand-ins for kernels: once a session, gone at its end."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specrig.ops.lab import lifecycle, state
from specrig.ops.lab.rootfs import cached

HERE = Path(__file__).resolve().parent
INVENTORY = HERE / "inventory"
STUBS = "/opt/specrig/engine-stubs"


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


lab_tests = _module("specrig_lab_conftest", HERE.parent / "lab" / "conftest.py")
wheels = _module("specrig_engine_wheels", HERE / "wheels.py")
tiny_model = _module("specrig_tiny_model", HERE / "tiny_model.py")


def model_folder() -> Path:
    """The tiny model, made once a machine."""
    made: Path = cached(f"{tiny_model.NAME}-{tiny_model.FORMAT}", tiny_model.build, lambda line: None, "the tiny model")
    return made


class EngineLab(lab_tests.Lab):  # type: ignore[name-defined,misc]
    """A running lab in which the real engine can be installed and served."""

    def plays(self, playbook: str, *args: str, timeout_s: float = 1200) -> subprocess.CompletedProcess[str]:
        """Run a playbook with this folder's inventory."""
        path = playbook if playbook.endswith(".yml") else f"playbooks/{playbook}.yml"
        return self.run("ansible-playbook", "-i", str(INVENTORY), path, *args, timeout_s=timeout_s)

    def put(self, folder: Path, target: str, *, guest: bool) -> None:
        """Copy a folder's files to the host or into the guest."""
        text = f"mkdir -p {shlex.quote(target)} && tar -x --no-same-owner -C {shlex.quote(target)}"
        command = lifecycle.ssh_command(self.state, lifecycle.guest_command(text) if guest else text)
        pack = subprocess.Popen(["tar", "-c", "--exclude=__pycache__", "-C", str(folder), "."], stdout=subprocess.PIPE)
        with pack:
            subprocess.run(command, stdin=pack.stdout, check=True, capture_output=True, timeout=120)
        assert pack.returncode == 0

    def python(self, program: str, python: str = "/opt/specrig/venv/bin/python") -> Any:
        """What a program prints as JSON when a Python in the guest, the package's own unless told, runs it."""
        done = self.guest(shlex.join([python, "-c", program]), check=True)
        return json.loads(done.stdout)

    def requests(self, profile: str) -> list[dict[str, Any]]:
        """What the engine itself wrote down of every request that ended, oldest first."""
        text = self.guest(f"cat /var/lib/specrig/engine-requests/{profile}/*", check=True).stdout
        rows = [json.loads(line[line.index("{") :]) for line in text.splitlines()]
        return [row for row in rows if row["event"] == "request.finished"]


def prepare(lab: EngineLab) -> None:
    """Put into a bare lab what the inventory counts on: the model on the host, the stand-ins in the guest."""
    lab.put(model_folder(), f"/srv/models/{tiny_model.NAME}", guest=False)
    lab.put(HERE / "stubs", STUBS, guest=True)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    """The lab of this session; skipped with the reason where it, or the engine's wheels, can't be had."""
    problem = lifecycle.missing()
    if problem is None:
        try:
            wheels.fetch()
        except wheels.NotHere as error:
            problem = str(error)
    if problem is not None:
        (pytest.fail if lab_tests.IN_CI else pytest.skip)(problem)
    journal = tmp_path_factory.mktemp("engine") / "journal.jsonl"
    with lab_tests.running_lab(f"{state.default_name()}-e", journal) as found:
        engine = EngineLab(found.name, found.journal)
        prepare(engine)
        yield engine


if __name__ == "__main__":
    wheels.fetch()
    prepare(EngineLab(state.default_name(), Path("/dev/null")))
