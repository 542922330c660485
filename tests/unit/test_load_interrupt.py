"""Ctrl-C, SIGTERM and SIGKILL in the middle: finished cells are kept, the run says so, resume does the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.sim.testing import RunningSim, running_sim

SWEEP = """name: t
model: Qwen3.6-27B
workloads:
  - {name: fast, prompts: questions, prompt_tokens: 64, output_tokens: 4, requests: 2}
  - {name: slow, prompts: questions, prompt_tokens: 64, output_tokens: 100, requests: 4, concurrency: 2}
timeouts: {first_token_s: 5, idle_s: 5, request_s: 60}
"""


@pytest.fixture(scope="module")
def sim(tokenizer_dir: Path) -> Iterator[RunningSim]:
    with running_sim(model_path=tokenizer_dir, served_model_name="Qwen3.6-27B", sim_time_scale=0.4) as server:
        yield server


def start(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> tuple[subprocess.Popen[str], list[str], Path]:
    """Start a load and wait until its second cell runs."""
    (tmp_path / "s.yml").write_text(SWEEP)
    out = tmp_path / "run"
    line = ["load", str(tmp_path / "s.yml"), "--url", sim.url, "--tokenizer", str(tokenizer_dir), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "specrig.cli", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        # the first look at the server in the second cell's measured part
        if (out / "cells.jsonl").is_file() and (out / "telemetry.jsonl").is_file():
            first = rows(out, "cells")[0]["cell"]
            if any(look["cell"] != first for look in rows(out, "telemetry")):
                return process, line, out
        time.sleep(0.02)
    raise AssertionError(f"the second cell never ran: {process.communicate(timeout=5)}")


def _running(sim: RunningSim) -> int:
    import httpx

    loads = httpx.get(sim.url + "/v1/loads").json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_finished_cells_and_resume_does_the_rest(
    number: int, code: int, sim: RunningSim, tmp_path: Path, tokenizer_dir: Path
) -> None:
    process, line, out = start(sim, tmp_path, tokenizer_dir)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    states = {cell["workload"]: cell["state"] for cell in rows(out, "cells")}
    assert states == {"fast": "done", "slow": "aborted"}
    assert json.loads((out / "manifest.json").read_text())["label"] == "aborted"
    kept = [record for record in rows(out, "requests") if record["error"] == "aborted"]
    assert kept
    assert all(0 < record["output_tokens"] < 100 for record in kept)
    until = time.monotonic() + 5
    while _running(sim) and time.monotonic() < until:
        time.sleep(0.05)
    assert _running(sim) == 0  # stopped on the server too
    assert main([*line, "--resume"]) == 0
    assert {cell["workload"]: cell["state"] for cell in rows(out, "cells")} == {"fast": "done", "slow": "done"}
    assert len(rows(out, "requests")) == 6
    assert json.loads((out / "manifest.json").read_text())["label"] == "complete"


def test_the_second_interrupt_is_immediate(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    process, _, _ = start(sim, tmp_path, tokenizer_dir)
    os.kill(process.pid, signal.SIGSTOP)  # both are pending when it goes on
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=20)
    assert process.returncode in (130, 143)


def test_a_kill_leaves_a_folder_that_resumes(sim: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    process, line, out = start(sim, tmp_path, tokenizer_dir)
    process.kill()
    process.communicate(timeout=20)
    assert json.loads((out / "manifest.json").read_text())["label"] == "running"
    assert main([*line, "--resume"]) == 0
    assert {cell["workload"]: cell["state"] for cell in rows(out, "cells")} == {"fast": "done", "slow": "done"}
    assert len(rows(out, "requests")) == 6
