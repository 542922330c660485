"""A test session that is interrupted leaves no lab behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specrig.ops.lab import lifecycle, state

pytestmark = pytest.mark.lab

SLEEPER = """
import time
import pytest

pytestmark = pytest.mark.lab


def test_sleeps(lab):
    assert lab.guest("true").returncode == 0
    print("sleeping", flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
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
        assert lifecycle.leftovers(f"{base}-t") != []
        time.sleep(0.2)
        session.send_signal(how)
        rest = session.communicate(timeout=60)[0]
    assert session.returncode != 0, rest
    assert lifecycle.leftovers(f"{base}-t") == [], rest
