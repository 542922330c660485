"""``specrig load`` against the simulated engine, which writes down what it really did."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrig.cli import main
from specrig.sim.testing import RunningSim, running_sim

MODEL = "Qwen3.6-27B"
TOLERANCE = 0.02
Undisturbed = Callable[[Callable[[Path], None]], None]


def sweep(path: Path, *workloads: str, api: str = "sglang", timeouts: str = "") -> Path:
    lines = "\n".join(f"  - {{{workload}}}" for workload in workloads)
    path.write_text(f"name: t\nmodel: {MODEL}\napi: {api}\n{timeouts}\nworkloads:\n{lines}\n")
    return path


def load(file: Path, sim: RunningSim | str, tokenizer: Path, out: Path, *more: str) -> int:
    url = sim if isinstance(sim, str) else sim.url
    return main(["load", str(file), "--url", url, "--tokenizer", str(tokenizer), "--out", str(out), *more])


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def typical(pairs: list[tuple[float, float]]) -> float:
    """How far measured is from true for the typical request."""
    return statistics.median(measured / true - 1 for measured, true in pairs)


@pytest.mark.parametrize("method", ["autoregressive", "dflash"])
def test_figures_are_the_engines_own(method: str, undisturbed: Undisturbed, tokenizer_dir: Path) -> None:
    undisturbed(lambda folder: figures_are_the_engines_own(method, folder, tokenizer_dir))


def figures_are_the_engines_own(method: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(
        tmp_path / "s.yml",
        "name: one, prompts: questions, prompt_tokens: 1024, output_tokens: 64, read_at: [32, 64], requests: 4",
        "name: many, prompts: questions, prompt_tokens: 1024, output_tokens: 64, read_at: [32, 64], concurrency: 8, "
        "requests: 8",
    )
    flags: dict[str, Any] = {}
    if method == "dflash":
        flags = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "draft"}
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.3, sim_seed=3, **flags) as sim:
        code = load(file, sim, tokenizer_dir, tmp_path / "run")
        truth = {row["rid"]: row for row in sim.truth()}
    records = rows(tmp_path / "run", "requests")
    cells = rows(tmp_path / "run", "cells")
    assert [cell["reason"] for cell in cells] == [None, None]
    assert code == 0
    assert sorted(cell["concurrency"] for cell in cells) == [1, 8]
    for cell in cells:
        own = [record for record in records if record["cell"] == cell["cell"]]
        assert len(own) == {1: 4, 8: 8}[cell["concurrency"]]
        pairs = [(record, truth[record["rid"]]) for record in own]
        assert abs(typical([(r["decode_tokens_per_s"], t["decode_tokens_per_s"]) for r, t in pairs])) < TOLERANCE
        assert abs(typical([(r["ttft_s"], t["ttft_s"]) for r, t in pairs])) < TOLERANCE
        for record, true in pairs:
            assert (record["prompt_tokens"], record["output_tokens"]) == (1024, 64)
            assert record["verify_steps"] == (true["verify_steps"] if method == "dflash" else None)
            assert record["method"] == method
        if method == "dflash":
            steps = sum(record["verify_steps"] for record in own)
            drafts = sum(record["correct_drafts"] for record in own)
            measured = 1 + drafts / steps
            real = 1 + sum(t["correct_drafts"] for _, t in pairs) / sum(t["verify_steps"] for _, t in pairs)
            assert measured == pytest.approx(real, rel=TOLERANCE)
        # the shorter length: what the truth's own chunks say up to 32 tokens
        for record, true in pairs:
            total, index = 0, 0
            while total < 32:
                total += true["chunk_tokens"][index]
                index += 1
            span = true["chunk_times"][index - 1] - true["chunk_times"][0]
            real = (32 - true["chunk_tokens"][0]) / span
            assert record["reads"]["32"]["decode_tokens_per_s"] == pytest.approx(real, rel=0.1)
            assert record["reads"]["64"]["decode_tokens_per_s"] == pytest.approx(record["decode_tokens_per_s"])
        if cell["concurrency"] == 8:
            # a single wave: the last first token to the first finish, by the engine's own clock
            start = max(t["first_token_unix"] for _, t in pairs)
            end = min(t["last_token_unix"] for _, t in pairs)
            tokens = 0
            for _, t in pairs:
                for at, k in zip(t["chunk_times"], t["chunk_tokens"], strict=True):
                    tokens += k if start < t["arrived_unix"] + at <= end + 1e-6 else 0
            real = tokens / (end - start)
            assert cell["window"]["tokens_per_s"] == pytest.approx(real, rel=0.05)
            assert cell["window"]["waves"] == 1.0
        assert cell["simulated"] is True
        assert cell["time_scale"] == 0.3
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["label"] == "complete"
    assert manifest["engine"]["hardware"] == "simulated"
    assert manifest["launches"][0]["server_info"]["served_model_name"] == MODEL


def test_prompts_that_cannot_be_made_fail_their_cell_only(
    plain: RunningSim, tmp_path: Path, tokenizer_dir: Path
) -> None:
    file = sweep(
        tmp_path / "s.yml",
        "name: bad, prompts: prose, prompt_tokens: 2, output_tokens: 8, requests: 1",
        "name: good, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 1",
    )
    assert load(file, plain, tokenizer_dir, tmp_path / "run") == 1
    cells = {cell["workload"]: cell for cell in rows(tmp_path / "run", "cells")}
    assert cells["bad"]["state"] == "failed"
    assert "its prompts cannot be made: prompt_tokens: 2 asked for prompts prose" in cells["bad"]["reason"]
    assert cells["good"]["state"] == "done"


def test_a_server_that_runs_fewer_at_once_skips_the_cell(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(
        tmp_path / "s.yml",
        "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 4, concurrency: [2, 4]",
    )
    with running_sim(
        model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.3, sim_fault=["concurrency-cap=2"]
    ) as sim:
        assert load(file, sim, tokenizer_dir, tmp_path / "run") == 1
    cells = {cell["concurrency"]: cell for cell in rows(tmp_path / "run", "cells")}
    assert cells[2]["state"] == "done"
    assert cells[4]["state"] == "skipped"
    assert "4 at once is over the 2 requests the server runs at once" in cells[4]["reason"]


def test_a_flush_that_is_refused_fails_the_cell(tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 2")
    with running_sim(
        model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.3, sim_fault=["flush-refused"]
    ) as sim:
        assert load(file, sim, tokenizer_dir, tmp_path / "run") == 1
    cell = rows(tmp_path / "run", "cells")[0]
    assert cell["state"] == "failed"
    assert "Flush cache failed." in cell["reason"]


def test_another_server_on_the_port_is_refused(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 2")
    with running_sim(model_path=tokenizer_dir, served_model_name="Other-7B", sim_time_scale=0.3) as sim:
        assert load(file, sim, tokenizer_dir, tmp_path / "run") == 1
    words = capsys.readouterr().err.strip().splitlines()
    assert len(words) == 1
    assert "served_model_name Other-7B, expected served_model_name Qwen3.6-27B; nothing was measured" in words[0]


def test_nothing_listens(tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweep(tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 2")
    assert load(file, "http://127.0.0.1:9", tokenizer_dir, tmp_path / "run") == 1
    words = capsys.readouterr().err.strip().splitlines()
    assert len(words) == 1
    assert "127.0.0.1:9" in words[0]
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def plain(tokenizer_dir: Path) -> Any:
    with running_sim(model_path=tokenizer_dir, served_model_name=MODEL, sim_time_scale=0.3, context_length=4096) as sim:
        yield sim


def test_an_agentic_session_counts_its_tool_time_apart(plain: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(
        tmp_path / "s.yml",
        "name: a, prompts: agentic, prompt_tokens: 1024, output_tokens: 16, requests: 2, turns: 3, tool_s: 0.2",
    )
    code = load(file, plain, tokenizer_dir, tmp_path / "run")
    cell = rows(tmp_path / "run", "cells")[0]
    assert (code, cell["reason"]) == (0, None)
    records = sorted(rows(tmp_path / "run", "requests"), key=lambda record: record["index"])
    assert [(r["session"], r["turn"]) for r in records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    lengths = [record["prompt_tokens"] for record in records[:3]]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 1024
    assert records[1]["cached_tokens"] > 0  # the turn before is still in the prefix cache
    assert records[1]["sent_s"] - records[0]["finished_s"] == pytest.approx(0.2, abs=0.1)
    seconds = sum(records[i + 2]["finished_s"] - records[i]["sent_s"] - 0.4 for i in (0, 3))
    assert cell["sessions"] == 2
    assert cell["session_tokens_per_s"] == pytest.approx(6 * 16 / seconds)


def test_open_loop_sends_when_due(plain: RunningSim, tmp_path: Path, tokenizer_dir: Path) -> None:
    file = sweep(
        tmp_path / "s.yml",
        "name: o, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 6, arrival: constant, rate: 10",
    )
    load(file, plain, tokenizer_dir, tmp_path / "run")
    records = sorted(rows(tmp_path / "run", "requests"), key=lambda record: record["index"])
    due = [record["scheduled_s"] for record in records]
    assert [round(b - a, 3) for a, b in itertools.pairwise(due)] == [0.1] * 5
    assert all(0 <= record["sent_s"] - record["scheduled_s"] < 0.08 for record in records)


def test_a_cell_that_does_not_fit_is_skipped_and_the_rest_run(
    plain: RunningSim, tmp_path: Path, tokenizer_dir: Path
) -> None:
    file = sweep(
        tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: [64, 5000], output_tokens: 8, requests: 1"
    )
    assert load(file, plain, tokenizer_dir, tmp_path / "run") == 1
    cells = {cell["prompt_tokens"]: cell for cell in rows(tmp_path / "run", "cells")}
    assert cells[64]["state"] == "done"
    assert cells[5000]["state"] == "skipped"
    assert "4096" in cells[5000]["reason"].replace(",", "")


def test_a_wrong_claim_of_a_phrase_s_length_is_caught_before_a_request_is_sent(
    plain: RunningSim, tmp_path: Path, tokenizer_dir: Path
) -> None:
    # 12 repetitions of 77 are under 1,000 tokens as claimed, and are 1,212 in truth.
    claim = "prompts: repeat, prompt_tokens: 1000, output_tokens: 8, requests: 1, tokens_per_repetition: 77"
    file = sweep(
        tmp_path / "s.yml",
        f'name: believed, {claim}, phrase: "{" the" * 101}"',
        "name: sound, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 1",
    )
    before = len(plain.truth())
    assert load(file, plain, tokenizer_dir, tmp_path / "run") == 1
    cells = {cell["workload"]: cell for cell in rows(tmp_path / "run", "cells")}
    assert (cells["believed"]["state"], cells["sound"]["state"]) == ("skipped", "done")
    assert (
        "12 repetitions are 1,212 tokens, 1,000 were asked (101 tokens a repetition, 77 claimed)"
        in (cells["believed"]["reason"])
    )
    sent = plain.truth(at_least=before + 1)[before:]
    assert sent
    assert {row["prompt_tokens"] for row in sent} == {64}


def test_resume_does_what_is_missing_and_nothing_else(
    plain: RunningSim, tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(
        tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: [8, 16], requests: 2"
    )
    out = tmp_path / "run"
    assert load(file, plain, tokenizer_dir, out, "--only", "*n16*") == 0
    first = rows(out, "cells")
    assert json.loads((out / "manifest.json").read_text())["label"] == "partial"
    assert load(file, plain, tokenizer_dir, out) == 2
    assert "--resume" in capsys.readouterr().err
    # what a killed process may leave: records of a cell without its row, and a line cut off
    missing = next(c["id"] for c in json.loads((out / "manifest.json").read_text())["cells"] if c["output_tokens"] == 8)
    with (out / "requests.jsonl").open("a") as handle:
        handle.write(json.dumps({"cell": missing, "launch": 0, "index": 0, "ok": True}) + '\n{"cell": "cut')
    # an older version's manifest lacks keys that sweeps have got since
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["sweep"]["headroom"], manifest["sweep"]["workloads"][0]["trace_speed"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert load(file, plain, tokenizer_dir, out, "--resume") == 0
    cells = rows(out, "cells")
    assert cells[: len(first)] == first
    assert sorted(cell["output_tokens"] for cell in cells) == [8, 16]
    records = rows(out, "requests")
    assert len(records) == 4
    assert sorted((r["cell"], r["index"]) for r in records) == sorted((c["cell"], i) for c in cells for i in (0, 1))
    assert json.loads((out / "manifest.json").read_text())["label"] == "complete"
    assert load(file, plain, tokenizer_dir, out, "--resume") == 0
    assert len(rows(out, "requests")) == 4


def test_json_lines_for_machines(
    plain: RunningSim, tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 1")
    assert load(file, plain, tokenizer_dir, tmp_path / "run", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["cell", "end"]
    assert lines[0]["state"] == "done"
    assert (lines[1]["label"], lines[1]["simulated"]) == ("complete", True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["cells"][0]["valid"] is True


BAD: list[tuple[str, Callable[[Path], list[str]], str]] = [
    ("resume of nothing", lambda out: ["--resume"], "no run there to resume"),
    ("a glob of nothing", lambda out: ["--only", "zzz"], "names no cell"),
    ("an unknown cell", lambda out: ["--cells", "abc"], "no such cell"),
    ("a profile without a plan", lambda out: ["--profile", "tp4"], "specrig bench"),
    ("a launch below 0", lambda out: ["--launch", "-1"], "from 0"),
]


@pytest.mark.parametrize(("name", "more", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad_input_is_one_line(
    name: str,
    more: Callable[[Path], list[str]],
    words: str,
    plain: RunningSim,
    tmp_path: Path,
    tokenizer_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = sweep(tmp_path / "s.yml", "name: d, prompts: questions, prompt_tokens: 64, output_tokens: 8, requests: 1")
    assert load(file, plain, tokenizer_dir, tmp_path / "run", *more(tmp_path / "run")) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
