"""A test session that is interrupted leaves no lab behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specrig.ops.lab import lifecycle, network, state

pytestmark = pytest.mark.lab

SLEEPER = """
import pytest

pytestmark = pytest.mark.lab


def test_sleeps(lab):
    # Ansible keeps the connection of this open for a while.
    done = lab.run("ansible", "-i", "inventory/lab", "lab-host", "-m", "ansible.builtin.raw", "-a", "true")
    assert done.returncode == 0, done.stdout + done.stderr
    print("sleeping", lab.state.address, flush=True)
    lab.run("ansible", "-i", "inventory/lab", "lab-guest", "-m", "ansible.builtin.raw", "-a", "sleep 119.5")
"""


def mentioned(text: str) -> list[int]:
    """Processes whose command line has `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def gone(look: Callable[[], list[int]], within_s: float = 20) -> bool:
    until = time.monotonic() + within_s
    while look() and time.monotonic() < until:
        time.sleep(0.1)
    return not look()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "sigkill"])
def test_an_interrupted_session_removes_its_lab(how: signal.Signals, tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py")
    (tmp_path / "conftest.py").write_text(
        f"import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('lab_conftest', {str(conftest)!r})\n"
        f"module = importlib.util.module_from_spec(spec)\nsys.modules['lab_conftest'] = module\n"
        f"spec.loader.exec_module(module)\nlab = module.lab\n"
    )
    (tmp_path / "test_sleeps.py").write_text(SLEEPER)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = lab\n")
    base = f"{state.default_name()}-i"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "SPECRIG_LAB": base},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as session:
        assert session.stdout is not None
        seen = ""
        while "sleeping" not in seen:
            line = session.stdout.readline()
            assert line, f"the session ended early: {seen}"
            seen += line
        address = seen.split("sleeping", 1)[1].split()[0]
        assert lifecycle.leftovers(f"{base}-t") != []
        while not mentioned("sleep 119.5"):
            assert session.poll() is None
            time.sleep(0.1)
        assert network.ssh_sessions(address) != []
        if how == signal.SIGINT:
            os.killpg(session.pid, how)  # as a terminal does
        else:
            session.send_signal(how)
        rest = session.communicate(timeout=60)[0]
    assert session.returncode != 0, rest
    if how == signal.SIGKILL:
        # Nothing can clean up then; the next session, or this, does.
        assert lifecycle.leftovers(f"{base}-t") != []
        lifecycle.down(f"{base}-t", lambda _line: None)
        (state.STATE_ROOT / f".{base}-t.session").unlink()
    assert lifecycle.leftovers(f"{base}-t") == [], rest
    assert gone(lambda: network.ssh_sessions(address))
    assert gone(lambda: mentioned("sleep 119.5"))
