"""Loads against the simulated engine, one route at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrig.cli import main
from specrig.sim.testing import RunningSim, running_sim

MODEL = "Qwen3.6-27B"


def load(
    folder: Path, sim: RunningSim, tokenizer: Path, route: str, *workloads: str, top: str = ""
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a sweep and keep texts; its exit code, cells and records in order of index."""
    api = "sglang" if route.startswith("native") else route
    times = "" if top else "timeouts: {first_token_s: 1, idle_s: 0.5, request_s: 30}"
    folder.mkdir(exist_ok=True)
    lines = "".join(f"  - {{prompts: questions, {workload}}}\n" for workload in workloads)
    (folder / "s.yml").write_text(f"name: t\nmodel: {MODEL}\napi: {api}\n{times}\n{top}\nworkloads:\n{lines}")
    command = ["load", str(folder / "s.yml"), "--url", sim.url, "--tokenizer", str(tokenizer), "--keep-text"]
    code = main([*command, "--out", str(folder / "run")])
    return code, rows(folder, "cells"), sorted(rows(folder, "requests"), key=lambda record: record["index"])


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "run" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(cell: dict[str, Any], rule: str) -> dict[str, Any]:
    return next(row for row in cell["checks"] if row["rule"] == rule)


def engine(route: str, tokenizer: Path, **flags: Any) -> Any:
    incremental = {"incremental_streaming_output": True} if route == "native incremental" else {}
    return running_sim(
        model_path=tokenizer, served_model_name=MODEL, sim_seed=5, context_length=4096, enable_cache_report=True,
        **{"sim_time_scale": 0.3, **incremental, **flags},
    )  # fmt: skip
