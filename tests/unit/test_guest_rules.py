"""Whether device rules can have any effect on a host, asked of the kernel itself under the rights that it may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASK = "from specrig.facts import guestmount; print(guestmount.{name}())"


def rights() -> bool:
    """Whether this process has what the tests take away: root of the machine, with sys_admin."""
    status = Path("/proc/self/status").read_text()
    effective = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    mapped = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    return os.geteuid() == 0 and bool(effective >> 21 & 1) and not mapped


pytestmark = pytest.mark.skipif(not rights(), reason="takes rights away, so it has to have them: run as the real root")


def asked(name: str, *under: str) -> str:
    """What a function of guestmount says in a process that was started by another command."""
    command = [*under, sys.executable, "-c", ASK.format(name=name)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_real_root_has_device_programs():
    assert asked("is_mapped") == "False"
    assert asked("device_programs") == "None"


def test_without_its_rights_root_has_none_and_the_line_says_so():
    bare = ("setpriv", "--bounding-set", "-sys_admin,-bpf", "--inh-caps", "-sys_admin,-bpf")
    assert asked("device_programs", *bare) == "Operation not permitted"


def test_an_unprivileged_container_is_told_apart():
    said = asked("rules_impossible", "unshare", "--user", "--map-root-user")
    assert said.startswith("this host is itself an unprivileged container (its ids are mapped)")
    assert "\n" not in said


def test_the_ids_of_a_mapped_guest_are_read():
    assert asked("id_map") == "(0, 0)"
    assert asked("id_map", "unshare", "--user", "--map-root-user") == "(0, 0)"
    assert asked("id_map", "unshare", "--user") == "(None, None)"
