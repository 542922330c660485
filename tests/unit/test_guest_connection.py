"""The connections into a guest: under real Ansible, with a stand-in for lxc-attach that stays on this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ATTACH = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = --clear-env ] && [ "$2" = -n ] && [ "$4" = -- ] || {{ echo "unexpected: $*" >&2; exit 99; }}
case "$3" in
gpu) shift 4; exec "$@" ;;
*) echo "lxc-attach: $3: ../src/lxc/attach.c: get_attach_context: 406 Connection refused - Failed to get init pid" >&2
   exit 1 ;;
esac
"""
INFO = """#!/bin/sh
[ "$3" = stopped ] && {{ echo "State:          STOPPED"; exit 0; }}
echo "$3 doesn't exist" >&2
exit 1
"""
PCT = """#!/bin/sh
echo "pct $@" >> {log}
[ "$1" = exec ] && [ "$2" = 101 ] && [ "$3" = -- ] && {{ shift 3; exec "$@"; }}
echo "CT $2 not running" >&2
exit 255
"""
# Stands for ssh as far as a connection can tell: the last argument is what the host's shell gets.
SSH = """#!/bin/sh
for last; do :; done
exec /bin/sh -c "$last"
"""


TEXT = """it's "$HOME" `id` \\ & | ; <ü>"""
# 70000 is the size of a piece here: nothing, less than one, exactly one, more than three.
SIZES = (0, 1, 70000, 210001)
PLAY = """
- name: In and out
  hosts: good
  gather_facts: false
  tasks:
    - name: Ping
      ansible.builtin.ping:
    - name: Quote
      ansible.builtin.shell:
        cmd: "printf '%s' {text} > {{{{ out }}}}.text; env > {{{{ out }}}}.env"
      vars:
        out: "{{{{ folder }}}}/{{{{ inventory_hostname }}}}"
      changed_when: true
    - name: Fail by itself
      ansible.builtin.shell:
        cmd: "echo 'service is not running' >&2; exit 3"
      register: own
      changed_when: false
      failed_when: own.rc != 3 or own.stderr != 'service is not running'
    - name: In
      ansible.builtin.copy:
        src: "{{{{ folder }}}}/source-{{{{ item }}}}"
        dest: "{{{{ folder }}}}/{{{{ inventory_hostname }}}} in {{{{ item }}}}"
        mode: "0600"
      loop: {sizes}
    - name: Out
      ansible.builtin.fetch:
        src: "{{{{ folder }}}}/source-{{{{ item }}}}"
        dest: "{{{{ folder }}}}/{{{{ inventory_hostname }}}} out {{{{ item }}}}"
        flat: true
      loop: {sizes}
"""
GOOD = ("local", "remote", "pve")


class Guests:
    """An inventory of guests whose attach command stays on this machine."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder, self.repository = folder, repository
        self.log = folder / "attach.log"
        tools = folder / "bin"
        tools.mkdir()
        for name, text in {"lxc-attach": ATTACH, "lxc-info": INFO, "pct": PCT, "ssh": SSH}.items():
            (tools / name).write_text(text.format(log=self.log) if "{log}" in text or "{{" in text else text)
            (tools / name).chmod(0o755)
        common = {"ansible_python_interpreter": sys.executable, "lxc_guest_piece_bytes": 70000}
        local = {**common, "ansible_connection": "specrig.host.lxc_local"}
        remote = {
            **common,
            "ansible_connection": "specrig.host.lxc_ssh",
            "ansible_host": "192.0.2.1",
            "ansible_ssh_executable": str(tools / "ssh"),
        }
        good = {
            "local": {**local, "lxc_guest_name": "gpu"},
            "remote": {**remote, "lxc_guest_name": "gpu"},
            "pve": {**local, "lxc_guest_name": "101", "lxc_guest_attach": "pct"},
        }
        broken = {
            "stopped": {**remote, "lxc_guest_name": "stopped"},
            "none": {**local, "lxc_guest_name": "nosuch"},
            "pve-stopped": {**local, "lxc_guest_name": "102", "lxc_guest_attach": "pct"},
        }
        groups = {"good": {"hosts": good}, "broken": {"hosts": broken}}
        (folder / "inventory.json").write_text(
            json.dumps({"all": {"children": groups, "vars": {"folder": str(folder)}}})
        )
        self.env = {
            **os.environ,
            "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{tools}:{os.environ.get('PATH', os.defpath)}",
        }

    def run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of Ansible's commands on this inventory."""
        return subprocess.run(
            [sys.executable, "-m", f"ansible.cli.{tool}", "-i", str(self.folder / "inventory.json"), *arguments],
            cwd=self.repository,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Guests:
    return Guests(tmp_path_factory.mktemp("guests"), repository)


@pytest.fixture(scope="module")
def played(guests: Guests) -> Guests:
    """After one play on all good guests."""
    for size in SIZES:
        (guests.folder / f"source-{size}").write_bytes((bytes(range(256)) * (size // 256 + 1))[:size])
    text = shlex.quote(TEXT).replace("\\", "\\\\").replace('"', '\\"')
    book = guests.folder / "book.yml"
    book.write_text(PLAY.format(text=text, sizes=json.dumps(SIZES)))
    done = guests.run("playbook", str(book))
    assert done.returncode == 0, done.stdout + done.stderr
    return guests


def test_a_module_runs_in_the_guest_in_one_step(guests):
    before = len(guests.log.read_text().splitlines()) if guests.log.exists() else 0
    done = guests.run("adhoc", "local", "-m", "ansible.builtin.ping")
    assert done.returncode == 0, done.stdout + done.stderr
    # Pipelined: one entry into the guest for the whole module.
    assert len(guests.log.read_text().splitlines()) == before + 1


@pytest.mark.parametrize("host", GOOD)
def test_quoting_survives_and_the_environment_is_clean(played, host):
    assert (played.folder / f"{host}.text").read_text() == TEXT
    variables = dict(line.split("=", 1) for line in (played.folder / f"{host}.env").read_text().splitlines())
    assert variables["HOME"] == "/root"
    assert "ANSIBLE_CONFIG" not in variables


@pytest.mark.parametrize("host", GOOD)
@pytest.mark.parametrize("size", SIZES)
def test_files_go_in_and_come_out_whole(played, host, size):
    source = (played.folder / f"source-{size}").read_bytes()
    assert len(source) == size
    assert (played.folder / f"{host} in {size}").read_bytes() == source
    assert (played.folder / f"{host} out {size}").read_bytes() == source


def test_a_guest_that_cannot_be_entered_is_one_clear_line(guests):
    done = guests.run("adhoc", "broken", "-m", "ansible.builtin.ping")
    assert done.returncode == 4
    assert done.stdout.count("UNREACHABLE") == 3
    for line in (
        "guest 'stopped' on host 192.0.2.1 is not running: run recover.yml, which starts it",
        "host (this machine) has no guest 'nosuch': correct lxc_guest_name in the inventory",
        "guest '102' on host (this machine) is not running: run recover.yml, which starts it",
    ):
        assert line in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["specrig.host.lxc_ssh", "specrig.host.lxc_local"])
def test_the_options_are_documented(name, repository):
    command = [sys.executable, "-m", "ansible.cli.doc", "-t", "connection", "--json", name]
    env = {**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg")}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=True)
    options = json.loads(done.stdout)[name]["doc"]["options"]
    assert options["guest_name"]["required"] is True
    assert ("private_key_file" in options) == name.endswith("ssh")
