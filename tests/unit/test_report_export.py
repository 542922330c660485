"""Exports: other tools' keys, our definitions; every value worked out by hand from two short streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.model.record import CellRow, ChunkTrace, Request, Window
from specrig.report.export import quantile
from specrig.runs.folder import RunFolder


def request(index: int, **known: Any) -> Request:
    return Request(run="one", cell="c1", prompt_id=f"p{index}", index=index, **known)


def row(cell: str = "c1", **known: Any) -> CellRow:
    base: dict[str, Any] = {
        "launch": 0, "workload": "decode", "title": "tp1-dflash/decode p100 n9", "profile": "tp1-dflash",
        "method": "dflash", "tp": 1, "prompt_tokens": 100, "output_tokens": 9, "concurrency": 2, "prompts": "questions",
        "cache": "flush", "state": "done", "started_at": "2026-12-01T10:05:46Z",
    }  # fmt: skip
    return CellRow(cell=cell, **{**base, **known})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two good requests, one that failed, and an invalid cell."""
    folder = tmp_path / "one"
    manifest = {
        "name": "one",
        "engine": {"kind": "simulated", "hardware": "simulated", "time_scale": 0.5},
        "cells": [{"id": "c1", "model": "Qwen3.6-27B", "api": "sglang"}],
    }
    with RunFolder.create(folder, manifest) as opened:
        # sent at 0, chunks of 1, 4, 4 tokens at 1, 2, 4: ITL 0.25 x 4, 0.5 x 4; decode 8 tokens in 3 s
        opened.append_request(
            request(
                0, ok=True, prompt_tokens=100, output_tokens=9, sent_s=0.0, first_s=1.0, finished_s=4.0, ttft_s=1.0,
                e2e_s=4.0, tpot_s=0.375, decode_tokens_per_s=8 / 3, verify_steps=2, correct_drafts=6,
            )
        )  # fmt: skip
        opened.append_chunks(ChunkTrace(cell="c1", launch=0, index=0, t=[1.0, 2.0, 4.0], k=[1, 4, 4]))
        # sent at 1, chunks of 3, 6 tokens at 4, 5: ITL 1/6 x 6
        opened.append_request(
            request(
                1, ok=True, prompt_tokens=100, output_tokens=9, sent_s=1.0, first_s=4.0, finished_s=5.0, ttft_s=3.0,
                e2e_s=4.0, tpot_s=1 / 6, decode_tokens_per_s=6.0, verify_steps=2, correct_drafts=5,
            )
        )  # fmt: skip
        opened.append_chunks(ChunkTrace(cell="c1", launch=0, index=1, t=[4.0, 5.0], k=[3, 6]))
        opened.append_request(
            request(2, ok=False, error="http", server_message="too long", status=400, prompt_tokens=500, sent_s=0.0)
        )
        window = Window(start_s=4.0, end_s=5.0, tokens=6, tokens_per_s=6.0)
        made = row(requests=3, ok=2, simulated=True, time_scale=0.5, window=window, peak_tokens_per_s=7.0)
        opened.finish_cell(json.loads(json.dumps(_plain(made))))
        opened.finish_cell(_plain(row("c2", state="invalid", reason="a prompt came from the cache", simulated=True)))
        opened.set_label("complete")
    return folder


def _plain(made: CellRow) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(made)  # type: ignore[no-any-return]


def exported(run: Path, form: str, tmp_path: Path, *more: str) -> list[Path]:
    out = tmp_path / form
    assert main(["export", str(run), "--format", form, "--out", str(out), *more]) == 0
    return sorted(path for path in out.rglob("*") if path.is_file())


def test_vllm_keys(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = exported(run, "vllm", tmp_path)
    found = json.loads(path.read_text())
    assert found["label"] == "tp1-dflash (SIMULATED)"
    assert found["date"] == "20261201-100546"
    assert (found["num_prompts"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["duration"] == 5.0
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (200, 18)
    assert (found["output_throughput"], found["total_token_throughput"]) == (18 / 5, 218 / 5)
    assert (found["mean_ttft_ms"], found["median_ttft_ms"], found["std_ttft_ms"]) == (2000, 2000, 1000)
    assert found["p99_ttft_ms"] == pytest.approx(2980)
    # fourteen tokens after the first chunks, in 4 s altogether
    assert found["mean_itl_ms"] == pytest.approx(4000 / 14)
    assert found["mean_tpot_ms"] == pytest.approx((375 + 1000 / 6) / 2)
    assert found["ttfts"] == [1.0, 3.0, 0.0]
    assert found["itls"] == [[0.25] * 4 + [0.5] * 4, pytest.approx([1 / 6] * 6), []]
    assert found["errors"] == ["", "", "too long"]
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 7.0
    assert found["spec_decode_acceptance_length"] == 1 + 11 / 4
    assert found["specrig"]["simulated"] is True
    said = capsys.readouterr()
    assert "not GPU performance" in said.out
    assert "left out: tp1-dflash/decode p100 n9, launch 0: invalid, a prompt came from the cache" in said.err


def test_sglang_lines(run: Path, tmp_path: Path) -> None:
    (path,) = exported(run, "sglang", tmp_path, "--all")
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["accept_length"] == 1 + 11 / 4
    assert first["concurrency"] == 8 / 5
    assert first["input_throughput"] == 40
    assert first["p99_e2e_latency_ms"] == 4000
    assert first["max_itl_ms"] == 500
    assert first["specrig"]["valid"] is True
    assert second["specrig"]["valid"] is False
    assert (second["completed"], second["mean_ttft_ms"], second["output_throughput"]) == (0, None, None)


def test_aiperf_blocks(run: Path, tmp_path: Path) -> None:
    (path,) = exported(run, "aiperf", tmp_path)
    assert path.name == "profile_export_aiperf.json"
    found = json.loads(path.read_text())
    assert found["schema_version"] == "1.1"
    assert found["request_count"] == {"unit": "requests", "avg": 2.0}
    assert found["error_request_count"]["avg"] == 1
    block = found["time_to_first_token"]
    assert (block["unit"], block["avg"], block["min"], block["max"], block["count"]) == ("ms", 2000, 1000, 3000, 2)
    assert block["std"] == pytest.approx(1414.2135623)
    assert block["p25"] == 1500
    assert found["output_token_throughput"] == {"unit": "tokens/sec", "avg": 18 / 5}
    assert found["output_token_throughput_per_user"]["max"] == 6.0
    assert found["specrig"]["hardware"] == "simulated"


def test_nothing_valid_and_no_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), "--format", "vllm"]) == 2
    assert "no run there" in capsys.readouterr().err
    lines = (run / "cells.jsonl").read_text().splitlines()
    (run / "cells.jsonl").write_text(lines[1] + "\n")
    assert main(["export", str(run), "--format", "vllm"]) == 1
    assert "no valid cell to export" in capsys.readouterr().err
    (run / "cells.jsonl").write_text('{"cell": 7}\n')
    assert main(["export", str(run), "--format", "vllm"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_output_that_cannot_be_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "--format", "vllm", "--out", str(tmp_path / "file")]) == 2
    assert "name another folder with --out" in capsys.readouterr().err


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (0.5, 2.5), (0.9, 3.7), (1, 4.0)])
def test_quantiles_interpolate(q: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(value)
    assert quantile([], q) is None
