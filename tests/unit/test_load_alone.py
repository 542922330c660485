"""What docs/load.md shows works where no lab can: no root's rights, no lxc, no checkout as the working folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from specrig.model.manifest import Manifest

# Root without a single capability: what it may still do, anybody may with files of his own.
POWERLESS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def example(repository: Path) -> str:
    """The first indented block of the page."""
    text = (repository / "docs" / "load.md").read_text()
    block = re.search(r"(?:^    .*\n)+", text, re.MULTILINE)
    assert block is not None
    return re.sub(r"^    ", "", block.group(), flags=re.MULTILINE)


@pytest.mark.slow
def test_the_example_runs_without_lab_root_and_gpu(repository: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = example(repository).replace("30000", str(port))
    assert script.count(str(port)) == 2
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    # Its code is the report's: a busy machine may make a cell invalid, which the load tells with 1.
    command = ["sh", "-uc", f"trap 'kill $!; wait' EXIT\n{script}"]
    if os.geteuid() == 0:
        command = [*POWERLESS, *command]
        seen = subprocess.run([*POWERLESS, "cat", "/proc/self/status"], capture_output=True, text=True, check=True)
        assert "CapEff:\t0000000000000000" in seen.stdout
    env = {"PATH": path, "HOME": str(tmp_path), "SPECRIG_LAB": "no-such-lab"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "runs" / "first" / "manifest.json").read_text())
    assert msgspec.convert(manifest, Manifest).label == "complete"
    assert (manifest["engine"]["kind"], manifest["engine"]["time_scale"]) == ("simulated", 0.3)
    rows = [json.loads(row) for row in (tmp_path / "runs" / "first" / "requests.jsonl").read_text().splitlines()]
    assert [(row["ok"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [(True, 1024, 64)] * 12
    assert "SIMULATED" in done.stdout
