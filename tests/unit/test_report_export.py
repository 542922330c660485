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
        "launches": [{"launch": 0, "t0_unix": 1_796_000_000.0}],
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
    path = next(path for path in exported(run, "vllm", tmp_path) if path.name != "summary.json")
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
    path, records = sorted(exported(run, "aiperf", tmp_path), reverse=True)
    assert (path.name, records.name) == ("profile_export_aiperf.json", "profile_export.jsonl")
    found = json.loads(path.read_text())
    assert found["schema_version"] == "1.4"
    assert found["request_count"] == {"unit": "requests", "avg": 2.0}
    assert found["error_request_count"]["avg"] == 1
    block = found["time_to_first_token"]
    assert (block["unit"], block["avg"], block["min"], block["max"], block["count"]) == ("ms", 2000, 1000, 3000, 2)
    assert block["std"] == 1000
    assert block["p25"] == 1500
    assert found["output_token_throughput"] == {"unit": "tokens/sec", "avg": 18 / 5}
    assert found["output_token_throughput_per_user"]["max"] == 6.0
    assert found["specrig"]["hardware"] == "simulated"


SAMPLES = Path(__file__).resolve().parent.parent / "samples" / "clients"
LEFT_OUT = {
    # what a run folder does not have, or no dashboard asks for
    "vllm": {"queue_times", "generated_texts", "rtfx"},
    "sglang": {"protocol", "random_range_ratio", "server_info", "total_output_tokens_retokenized", "generated_texts"},
    "aiperf": {
        "aiperf_version", "benchmark_id", "run_info", "output_token_count", "time_to_first_output_token",
        "decode_duration", "request_error_rate", "completed_request_count", "input_token_throughput",
    },
}  # fmt: skip
OURS = {
    "vllm": {"spec_decode_acceptance_length", "spec_decode_num_drafts", "spec_decode_accepted_tokens"},
    "sglang": {"max_itl_ms"},
    "aiperf": {"error_request_count"},
}
"""Keys that these tools write in other cases than the sample's: with drafts, with errors, in an earlier version."""


def kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_keys_types_and_units_are_those_of_the_tools_themselves(run: Path, tmp_path: Path) -> None:
    for form, sample in (
        ("vllm", "vllm-0.32.0.json"),
        ("sglang", "sglang-0.5.23.jsonl"),
        ("aiperf", "aiperf-0.13.0.json"),
    ):
        text = (SAMPLES / sample).read_text()
        theirs = json.loads(text.splitlines()[-1] if sample.endswith("l") else text)
        files = [
            path for path in exported(run, form, tmp_path) if path.name not in ("summary.json", "profile_export.jsonl")
        ]
        mine = json.loads(files[0].read_text())
        assert set(theirs) - set(mine) == LEFT_OUT[form]
        assert set(mine) - set(theirs) == OURS[form] | {"specrig"}
        for key in set(mine) & set(theirs):
            if theirs[key] is not None and key not in ("input_config",):
                assert kind(mine[key]) == kind(theirs[key]), key
            if isinstance(theirs[key], list) and theirs[key] and mine[key] and form != "aiperf":
                assert {kind(value) for value in mine[key]} == {kind(theirs[key][0])}, key
            if isinstance(theirs[key], dict) and "unit" in theirs[key]:
                assert mine[key]["unit"] == theirs[key]["unit"], key
                assert list(mine[key]) == list(theirs[key]), key


def test_aiperf_config_and_records(run: Path, tmp_path: Path) -> None:
    records, document = exported(run, "aiperf", tmp_path)
    mine = json.loads(document.read_text())
    theirs = json.loads((SAMPLES / "aiperf-0.13.0.json").read_text())
    assert set(mine["input_config"]) == set(theirs["input_config"])
    (phase,) = mine["input_config"]["phases"]
    assert set(phase) == set(theirs["input_config"]["phases"][0]) - {"kind"}
    assert (phase["type"], phase["requests"], phase["concurrency"]) == ("concurrency", 3, 2)
    assert mine["error_summary"] == [{"error_details": {"message": "too long"}, "count": 1}]
    assert mine["start_time"] == "2026-11-30T00:53:20+00:00"
    assert mine["end_time"] == "2026-11-30T00:53:25+00:00"
    assert mine["time_to_second_token"]["avg"] == 1000
    # gaps of 1 and 2 s, and of 1 s
    assert (mine["inter_chunk_latency"]["count"], mine["inter_chunk_latency"]["sum"]) == (3, 4000)
    line = json.loads((SAMPLES / "aiperf-0.13.0-record.json").read_text())
    first, second = [json.loads(text) for text in records.read_text().splitlines()]
    assert set(first["metadata"]) < set(line["metadata"])
    assert {name: block["unit"] for name, block in first["metrics"].items()}.items() < {
        name: block["unit"] for name, block in line["metrics"].items()
    }.items()
    assert first["metadata"]["request_start_ns"] == 1_796_000_000 * 10**9
    assert second["metadata"]["request_end_ns"] - second["metadata"]["request_start_ns"] == 4 * 10**9
    assert {name: block["value"] for name, block in first["metrics"].items()} == {
        "request_latency": 4000, "time_to_first_token": 1000, "inter_token_latency": 375,
        "inter_chunk_latency": [1000, 2000], "output_token_throughput_per_user": pytest.approx(8 / 3),
        "output_sequence_length": 9, "input_sequence_length": 100,
    }  # fmt: skip


def test_vllm_sweep_summary_has_numbers_only(run: Path, tmp_path: Path) -> None:
    summary = next(path for path in exported(run, "vllm", tmp_path) if path.name == "summary.json")
    (row,) = json.loads(summary.read_text())
    assert (row["max_concurrency"], row["mean_ttft_ms"]) == (2, 2000)
    assert not [key for key, value in row.items() if isinstance(value, list | dict)]


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
