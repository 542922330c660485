"""The repository as a collection: what ansible-galaxy builds of it holds what it should and can be installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TOPS = {
    *("CHANGELOG.md", "FILES.json", "LICENSE", "MANIFEST.json", "README.md"),
    *("callback_plugins", "docs", "inventory", "meta", "playbooks", "plugins", "roles", "sweeps"),
}


def ansible(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of ansible-core, away from the checkout and from this user's settings."""
    own = {"HOME": str(tmp_path), "ANSIBLE_HOME": str(tmp_path / "home"), "ANSIBLE_NOCOLOR": "1"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")} | own
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("galaxy")
    ansible(folder, "ansible-galaxy", "collection", "build", str(repository), "--output-path", str(folder / "out"))
    (made,) = (folder / "out").iterdir()
    return made


def test_it_holds_the_collection_and_nothing_of_the_checkout(built: Path, repository: Path) -> None:
    with tarfile.open(built) as archive:
        names = {member.name for member in archive.getmembers()}
    assert {name.split("/")[0] for name in names} <= TOPS
    for name in (
        "MANIFEST.json",
        "README.md",
        "LICENSE",
        "meta/runtime.yml",
        "playbooks/recover.yml",
        "playbooks/benchmark.yml",
        "plugins/modules/host_look.py",
        "plugins/module_utils/placement.py",
        "plugins/connection/lxc_ssh.py",
        "callback_plugins/journal.py",
        "roles/gpu_host/tasks/main.yml",
        "inventory/rtxpro6000x8/hosts.yml",
    ):
        assert name in names, name
    roles = {path.name for path in (repository / "roles").iterdir() if path.is_dir()}
    assert {name.split("/")[1] for name in names if name.startswith("roles/")} >= roles
    assert not [name for name in names if name.endswith((".pyc", ".lock", ".cfg")) or "__pycache__" in name]


def test_installed_its_plugins_have_their_full_names(built: Path, tmp_path: Path) -> None:
    place = tmp_path / "collections"
    ansible(tmp_path, "ansible-galaxy", "collection", "install", str(built), "-p", str(place), "--offline", "--force")
    for kind, plugin in (("callback", "journal"), ("connection", "lxc_ssh"), ("module", "host_look")):
        name = f"specrig.host.{plugin}"
        done = ansible(tmp_path, "ansible-doc", "--playbook-dir", str(tmp_path), "-t", kind, "-j", name)
        assert json.loads(done.stdout)[name]["doc"]["short_description"]
