"""Staging that is interrupted: by SIGKILL at every step and any time, a full disk, a source or target that goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def shards(source: Path, folders) -> Path:
    """Three more files, each of a few segments as the killer sees them."""
    for number in (3, 4, 5):
        (source / f"part-{number}.bin").write_bytes(os.urandom(150_000 + number))
    folders.manifest(source)
    return source


def killer(repository: Path, stage, what: str) -> dict:
    command = [sys.executable, str(Path(__file__).parent / "kill.py"), str(repository / ".collections")]
    done = subprocess.run(
        [*command, json.dumps(stage.parameters), what], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_killed_at_every_step_the_next_run_finishes_from_what_is_proven(shards, stage, repository, with_manifest):
    if not with_manifest:
        (shards / "MANIFEST.sha256").unlink()
    done = killer(repository, stage, "steps")
    assert done["wrong"] == []
    # 7 files: each is at least a write, a proof and a rename, twice over.
    assert done["kills"] > 2 * 7 * 3


def test_killed_at_any_time_no_half_file_is_ever_seen(shards, stage, repository):
    done = killer(repository, stage, "25")
    assert done["wrong"] == []
    assert done["kills"] >= 25
    assert done["hits"] > done["kills"] // 3
    assert done["looks"] > done["kills"]
