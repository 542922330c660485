"""A server that dies under a load, and a process that may not open enough files."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specrig.cli import main
from specrig.errors import UsageError
from specrig.runs import measure
from specrig.sim.testing import running_sim

MODEL = "Qwen3.6-27B"


def sweep(path: Path, more: str) -> Path:
    path.write_text(
        f"name: t\nmodel: {MODEL}\nworkloads:\n  - {{name: a, prompts: questions, prompt_tokens: 64, {more}}}\n"
    )
    return path


def test_a_server_that_dies_fails_its_cell_and_resume_makes_it_again(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(tmp_path / "s.yml", "output_tokens: 64, requests: 30, concurrency: 2, cache: unique")
    out = tmp_path / "run"
    line = ["load", str(file), "--tokenizer", str(tokenizer_dir), "--out", str(out)]

    def kill_after_the_first(pid: int) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if (out / "requests.jsonl").is_file() and (out / "requests.jsonl").stat().st_size:
                break
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2) as sim:
        killer = threading.Thread(target=kill_after_the_first, args=(sim.pid,))
        killer.start()
        assert main([*line, "--url", sim.url]) == 1
        killer.join()
    (cell,) = [json.loads(text) for text in (out / "cells.jsonl").read_text().splitlines()]
    assert cell["state"] == "failed"
    assert cell["reason"].startswith("the server does not answer any more; ")
    assert 0 < cell["ok"] < 30
    assert json.loads((out / "manifest.json").read_text())["label"] == "partial"
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2) as sim:
        assert main([*line, "--url", sim.url, "--resume"]) == 0
    requests = [json.loads(text) for text in (out / "requests.jsonl").read_text().splitlines()]
    assert sorted(request["index"] for request in requests) == list(range(30))
    assert json.loads((out / "manifest.json").read_text())["label"] == "complete"


def test_more_connections_than_files_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: asked.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (256, 1024))
    measure._allow_files(100)
    assert asked == []
    measure._allow_files(500)
    assert asked == [(500 + measure._OWN_FILES, 1024)]
    with pytest.raises(UsageError, match=r"5000 connections at once need 5064 open files .* may have 1024; raise"):
        measure._allow_files(5000)


def test_a_load_raises_its_own_limit(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(tmp_path / "s.yml", "output_tokens: 4, requests: 80, concurrency: 80, cache: unique")
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.2) as sim:
        command = [sys.executable, "-m", "specrig.cli", "load", str(file), "--url", sim.url]
        command += ["--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "run")]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -Sn 64; exec "$@"', "bash", *command], capture_output=True, text=True, timeout=60
        )
    assert "Too many open files" not in done.stderr
    requests = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert len(requests) == 80
    assert all(json.loads(text)["ok"] for text in requests)
