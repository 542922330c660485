"""The whole way: simulated engine, measured load, report; held against what the engine says it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.sim.testing import running_sim

SWEEP = """
name: truth
model: Qwen3.6-27B
sampling: {temperature: 0, thinking: false}
workloads:
  - {name: decode, prompts: questions, prompt_tokens: 2048, output_tokens: 128, read_at: [64, 128], concurrency: 4,
     requests: 4, cache: flush}
"""
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "dflash": {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": "draft",
        "speculative_num_draft_tokens": 16,
    },
}


@pytest.mark.slow
def test_the_report_agrees_with_the_engine(
    tokenizer_dir: Path, undisturbed: Callable[[Callable[[Path], None]], None], capsys: Any
) -> None:
    undisturbed(lambda folder: the_report_agrees_with_the_engine(tokenizer_dir, folder, capsys))


def the_report_agrees_with_the_engine(tokenizer_dir: Path, tmp_path: Path, capsys: Any) -> None:
    sweep = tmp_path / "sweep.yml"
    sweep.write_text(SWEEP)
    runs: list[str] = []
    options = ["--json", "--out", str(tmp_path / "all")]
    for method, flags in METHODS.items():
        truth = tmp_path / f"{method}.truth"
        with running_sim(
            model_path=tokenizer_dir,
            served_model_name="Qwen3.6-27B",
            context_length=32768,
            sim_time_scale=0.5,
            sim_seed=3,
            sim_truth=truth,
            **flags,
        ) as sim:
            out = tmp_path / method
            code = main(["load", str(sweep), "--url", sim.url, "--tokenizer", str(tokenizer_dir), "--out", str(out)])
            assert code == 0, capsys.readouterr()
        runs.append(str(out))
        options += ["--truth", str(truth)]
    capsys.readouterr()
    code = main(["report", *runs, *options])
    summary = json.loads(capsys.readouterr().out)
    truth_rows = summary["truth"]["rows"]
    assert code == 0, [row for row in truth_rows if not row["ok"]]
    assert summary["simulated"] is True
    assert summary["time_scale"] == 0.5
    figures = {row["figure"] for row in truth_rows}
    assert figures == {
        "decode rate, tokens/s",
        "TTFT, s",
        "acceptance length",
        "decode speed-up",
        "end-to-end speed-up",
    }
    # both lengths, and the speed-up is one: a chain of 16 with the simulation's acceptance
    speedups = [row for row in summary["speedups"] if row["metric"] == "decode"]
    assert sorted(row["length"] for row in speedups) == [64, 128]
    assert all(row["speedup"] > 1.5 for row in speedups)
    # the text of the two methods is the same by the simulation's design
    assert all(row["against_baseline"]["diverged"] == 0 for row in summary["losslessness"]["rows"])
