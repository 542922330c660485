"""Whole run folders: every figure against the model that the folder was written from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specrig.analysis.frames import merge_runs, read_run
from specrig.analysis.losslessness import divergence, first_difference
from specrig.analysis.percentiles import carries, distribution, weighted
from specrig.analysis.summary import summarise
from specrig.report.markdown import markdown
from specrig.report.terminal import screen
from specrig.report.view import view


def pick(rows: list[dict[str, Any]], **want: Any) -> dict[str, Any]:
    found = [row for row in rows if all(row[k] == v for k, v in want.items())]
    assert len(found) == 1, f"{len(found)} rows for {want}"
    return found[0]


def test_the_three_speedups_of_an_exact_run(make_run: Any) -> None:
    summary = summarise(read_run(make_run(concurrency=(8,), reads=(65,))))
    want = {"method": "dflash", "length": 257}
    # decode: tau / step against 1 / step = 4 * 20 / 25
    decode = pick(summary["speedups"], metric="decode", **want)
    assert decode["speedup"] == pytest.approx(3.2)
    assert decode["ratio_of_sums"] == pytest.approx(3.2)
    assert (decode["low"], decode["high"]) == (pytest.approx(3.2), pytest.approx(3.2))
    assert (decode["verdict"], decode["launches"], decode["prompts"], decode["pairs"]) == ("faster", 3, 4, 12)
    # end to end: 0.5 s TTFT + 256 tokens at 50/s = 5.62 s against 0.5 + 256 / 160 = 2.1 s
    assert pick(summary["speedups"], metric="end_to_end", **want)["speedup"] == pytest.approx(5.62 / 2.1)
    # the filler's windows are load * rate * 0.9 each
    assert pick(summary["speedups"], metric="throughput", **want)["speedup"] == pytest.approx(3.2)
    # 64 tokens after the first: 0.5 + 64/50 = 1.78 against 0.5 + 64/160 = 0.9
    short = pick(summary["speedups"], metric="end_to_end", method="dflash", length=65)
    assert short["speedup"] == pytest.approx(1.78 / 0.9)


def test_one_in_flight_has_no_throughput_speedup(make_run: Any) -> None:
    summary = summarise(read_run(make_run()))
    assert {row["metric"] for row in summary["speedups"]} == {"decode", "end_to_end"}


def test_geometric_mean_ratio_of_sums_and_maximum_differ(builder: Any) -> None:
    base, fast = (builder.cell(m, requests=2, output_tokens=101) for m in ("autoregressive", "dflash"))
    for launch, (cell, rates) in enumerate([(base, (50, 50)), (fast, (100, 400))]):
        for i, rate in enumerate(rates):
            builder.request(cell, launch, 0, i, decode_rate=rate, tau=4)
        builder.close(cell, launch)
    row = pick(summarise(read_run(builder.write()))["speedups"], metric="decode")
    assert row["speedup"] == pytest.approx(4.0)  # sqrt(2 * 8)
    assert row["maximum"] == pytest.approx(8.0)
    assert row["maximum_prompt"] == "q001"
    # 200 tokens in 4 s against 200 tokens in 1 + 0.25 s
    assert row["ratio_of_sums"] == pytest.approx(3.2)
    assert (row["label"], row["verdict"]) == ("within one launch", None)


def test_only_common_prompts_are_paired(builder: Any) -> None:
    base, fast = (builder.cell(m, requests=2) for m in ("autoregressive", "dflash"))
    for cell, launch, indexes, rate in ((base, 0, (0, 1), 50), (fast, 1, (1, 2), 100)):
        for i in indexes:
            builder.request(cell, launch, 0, i, decode_rate=rate * (1 + (i == 2)), tau=4)
        builder.close(cell, launch)
    row = pick(summarise(read_run(builder.write()))["speedups"], metric="decode")
    assert (row["pairs"], row["speedup"]) == (1, pytest.approx(2.0))


def test_a_method_of_another_context_or_tp_is_never_paired(builder: Any) -> None:
    for launch, (method, tp, context) in enumerate(
        [("autoregressive", 1, 4096), ("dflash", 1, 8192), ("dflash", 4, 4096)]
    ):
        cell = builder.cell(method, tp=tp, prompt_tokens=context, requests=1)
        builder.request(cell, launch, 0, 0, decode_rate=100, tau=4)
        builder.close(cell, launch)
    summary = summarise(read_run(builder.write()))
    assert summary["speedups"] == []
    assert any("tp 1: no prompt was answered by two methods" in line for line in summary["problems"])
    assert any("tp 4: the baseline autoregressive has no valid cell" in line for line in summary["problems"])


def test_the_decomposition_is_exact_with_noise(make_run: Any) -> None:
    summary = summarise(read_run(make_run(prompts=8, launch_sd=0.02, prompt_sd=0.3, noise_sd=0.05)))
    rows = [row for row in summary["speedups"] if row["metric"] == "decode"]
    assert len(rows) == 2
    for row in rows:
        parts = row["decomposition"]
        assert parts["log_tau"] + parts["log_step"] == pytest.approx(math.log(row["speedup"]), abs=1e-12)
        assert parts["tokens_per_step"] / parts["break_even"] == pytest.approx(row["speedup"])


def test_the_decomposition_by_hand(make_run: Any) -> None:
    summary = summarise(read_run(make_run()))
    parts = pick(summary["speedups"], metric="decode", method="dflash")["decomposition"]
    assert parts["tokens_per_step"] == pytest.approx(4.0)  # 256 tokens in 64 steps
    assert parts["step_ms"] == pytest.approx(25.0)
    assert parts["base_step_ms"] == pytest.approx(20.0)
    assert parts["break_even"] == pytest.approx(1.25)


def test_acceptance_three_ways(builder: Any) -> None:
    cell = builder.cell("dflash", requests=2)
    # 10 steps with 30 correct, and 90 steps with 90: 1 + 120/100 = 2.2; mean of 4 and 2 = 3
    for i, (verify, correct) in enumerate(((10, 30), (90, 90))):
        builder.request(cell, 0, 0, i, decode_rate=100, verify_steps=verify, correct_drafts=correct)
    builder.close(cell, 0)
    got = summarise(read_run(builder.write()))["cells"][0]["acceptance"]
    assert got["sum_over_sum"] == pytest.approx(2.2)
    assert got["mean_over_requests"] == pytest.approx(3.0)
    assert got["tokens_per_verify"] == pytest.approx(514 / 100)
    assert got["server"] is None


def test_tokens_after_the_end_of_sequence_do_not_count(builder: Any) -> None:
    """100 tokens, EOS at index 79; the last 20 tokens came four times as fast. Up to it: 80 tokens, 79 in 7.9 s."""
    base, fast = (builder.cell(m, requests=1, output_tokens=100) for m in ("autoregressive", "dflash"))
    builder.request(base, 0, 0, 0, decode_rate=5.0)
    builder.close(base, 0)
    times = [0.1 * i for i in range(80)] + [7.9 + 0.025 * (i + 1) for i in range(20)]
    builder.request(fast, 1, 0, 0, decode_rate=99 / times[-1], first_eos=79, verify_steps=100, correct_drafts=0)
    builder.close(fast, 1)
    builder.chunks.append({"cell": fast["id"], "launch": 1, "index": 0, "t": times, "k": [1] * 100})
    row = pick(summarise(read_run(builder.write()))["speedups"], metric="decode")
    assert row["speedup"] == pytest.approx(2.0)  # 10 tokens/s against 5


def test_a_sample_past_the_end_without_a_trace_is_left_out_and_said(builder: Any) -> None:
    cell = builder.cell("dflash", requests=1, output_tokens=100)
    builder.request(cell, 0, 0, 0, decode_rate=5.0, first_eos=79)
    builder.close(cell, 0)
    summary = summarise(read_run(builder.write()))
    assert summary["cells"][0]["decode_tokens_per_s"] is None
    assert any("no chunk trace" in line for line in summary["problems"])


def test_an_agentic_session_is_tokens_over_wall_without_tools(builder: Any) -> None:
    """Two turns of 100 tokens in 2 s each with 1 s of tool between: 200 tokens, 5 s wall, 4 s without the tool."""
    for launch, (method, turn_s) in enumerate((("autoregressive", 2.0), ("dflash", 1.0))):
        cell = builder.cell(method, workload="agent", requests=1, output_tokens=100, cache="shared", turns=2)
        for turn in range(2):
            at = turn * (turn_s + 1)
            builder.request(
                cell,
                launch,
                0,
                turn,
                decode_rate=99 / (turn_s - 0.5),
                tau=4,
                session=0,
                turn=turn,
                tool_s=1.0 if turn else 0.0,
                sent_s=at,
                finished_s=at + turn_s,
                prompt_tokens=1000 * (turn + 1),
                prompt_tokens_asked=1000 * (turn + 1),
            )
        builder.close(cell, launch)
    summary = summarise(read_run(builder.write()))
    base, fast = (pick(summary["agentic"], method=m) for m in ("autoregressive", "dflash"))
    assert (base["tokens_per_s"], base["tokens_per_s_with_tools"]) == (pytest.approx(50), pytest.approx(40))
    assert (base["wall_s"], base["tool_s"], base["turns"], base["sessions"]) == (5.0, 1.0, 2, 1)
    assert fast["tokens_per_s"] == pytest.approx(100)
    assert fast["speedup"]["speedup"] == pytest.approx(2.0)
    assert fast["last_prompt_tokens"] == 2000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ok": False, "error": "HTTP 400", "server_message": "too long"}, "1 of 4 failed (too long)"),
        ({"finish_reason": "stop"}, "finish reason is length: saw stop"),
        ({"output_tokens": 200, "output_tokens_asked": 257}, "output tokens as asked: saw 200, expected 257"),
        ({"prompt_tokens": 4000}, "prompt tokens as asked: saw 4000, expected 4096"),
        ({"verify_steps": 0, "correct_drafts": 0}, "speculation was on: saw 1 of 4 requests without a verify step"),
        ({"cached_tokens": 4000}, "prompt not served from the cache: saw 4000 cached tokens, expected at most 64"),
        ({"output_ids": [1, 2, 3]}, "output ids match the token count: saw 3, expected 257"),
        ({"first_eos": 10}, "share of tokens after the first end of sequence"),
    ],
)
def test_each_rule_invalidates_and_says_why(builder: Any, changes: dict[str, Any], words: str) -> None:
    cell = builder.cell("dflash")
    for i in range(4):
        limit = {"first_eos": 10} if "first_eos" in changes else {}
        builder.request(cell, 0, 0, i, decode_rate=100, tau=4, **(changes if i == 0 else limit))
    builder.close(cell, 0)
    got = summarise(read_run(builder.write()))["cells"][0]
    assert got["valid"] is False
    assert words in got["reason"]
    assert got["decode_tokens_per_s"] is None


def test_a_sound_cell_is_valid_and_lists_what_it_cannot_know(builder: Any) -> None:
    cell = builder.cell("dflash", concurrency=8)
    for i in range(4):
        builder.request(cell, 0, 0, i, decode_rate=100, tau=4, cached_tokens=None)
    builder.close(cell, 0)
    got = summarise(read_run(builder.write()))["cells"][0]
    assert (got["valid"], got["reason"]) == (True, None)
    assert "prompt not served from the cache" in got["launches"][0]["unknown"]
    assert "concurrency reached on the server" in got["launches"][0]["unknown"]


@pytest.mark.parametrize(
    ("method", "close", "words"),
    [
        ("autoregressive", {"state": "failed", "reason": "server exited with 1"}, "server exited with 1"),
        ("autoregressive", {"state": "aborted"}, "state is aborted"),
        (
            "autoregressive",
            {"checks": [{"rule": "client kept up", "ok": False, "seen": "9 ms", "expected": "1 ms"}]},
            "client kept up: saw 9 ms, expected 1 ms",
        ),
        ("dflash", {"window": {"tokens_per_s": 10, "running_mean": 3.0}}, "concurrency reached on the server: saw 3"),
    ],
)
def test_the_cells_own_word_counts(builder: Any, method: str, close: dict[str, Any], words: str) -> None:
    cell = builder.cell(method, concurrency=8)
    for i in range(4):
        builder.request(cell, 0, 0, i, decode_rate=100, tau=4)
    builder.close(cell, 0, **close)
    got = summarise(read_run(builder.write()))["cells"][0]
    assert got["valid"] is False
    assert words in got["reason"]


def test_a_baseline_that_speculates_is_invalid(builder: Any) -> None:
    cell = builder.cell("autoregressive")
    for i in range(4):
        builder.request(cell, 0, 0, i, decode_rate=100, verify_steps=5)
    builder.close(cell, 0)
    assert "no speculation in the baseline" in summarise(read_run(builder.write()))["cells"][0]["reason"]


def test_acceptance_above_the_block_size_is_impossible(builder: Any) -> None:
    cell = builder.cell("dflash")
    for i in range(4):
        builder.request(cell, 0, 0, i, decode_rate=100, verify_steps=10, correct_drafts=247)
    builder.close(cell, 0)
    info = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}
    builder.manifest["launches"] = [{"launch": 0, "profile": "tp1-dflash", "block": 0, "server_info": info}]
    assert "acceptance length within its bound" in summarise(read_run(builder.write()))["cells"][0]["reason"]


def test_one_bad_launch_is_left_out_and_the_verdict_with_it(make_run: Any) -> None:
    folder = make_run()
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    lines[-1].update(ok=False, error="stream ended without a terminal event")
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    summary = summarise(read_run(folder))
    cell = pick(summary["cells"], method="ddtree-b15")
    assert (cell["valid"], sum(p["valid"] for p in cell["launches"])) == (True, 2)
    assert "left out" in cell["reason"]
    row = pick(summary["speedups"], metric="decode", method="ddtree-b15")
    assert (row["launches"], row["verdict"]) == (2, None)


def test_the_choice_is_made_on_one_half_and_estimated_on_the_other(builder: Any) -> None:
    """Blocks 0 and 2 favour dflash (4x), block 1 shows 2x: the winner's estimate is 2, not the mean."""
    cells = {m: builder.cell(m, requests=1) for m in ("autoregressive", "dflash", "ddtree-b15")}
    rates = {"autoregressive": (50, 50, 50), "dflash": (200, 100, 200), "ddtree-b15": (150, 150, 150)}
    launch = 0
    for block in range(3):
        for method, cell in cells.items():
            builder.request(cell, launch, block, 0, decode_rate=rates[method][block], tau=4)
            builder.close(cell, launch)
            launch += 1
    summary = summarise(read_run(builder.write()))
    choice = pick(summary["best"], metric="decode")
    assert (choice["method"], choice["runner_up"]) == ("dflash", "ddtree-b15")
    assert choice["speedup"] == pytest.approx(2.0)
    assert choice["over_runner_up"] == pytest.approx(100 / 150)
    assert choice["optimistic"] == pytest.approx((4 * 2 * 4) ** (1 / 3))
    losses = {row["method"]: row["loss"] for row in summary["regret"]}
    assert losses["dflash"] == pytest.approx(0.0)
    assert losses["autoregressive"] == pytest.approx(0.5)  # on the held-out block 50 against 100


def test_the_baseline_can_be_the_best(make_run: Any) -> None:
    summary = summarise(read_run(make_run(scale={"dflash": 0.2, "ddtree-b15": 0.2})))
    choice = pick(summary["best"], metric="decode")
    assert (choice["method"], choice["speedup"]) == ("autoregressive", 1.0)


def test_divergence_by_hand() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 3]) is None
    # one pair differs at index 2 (3 tokens compared), one is identical over 5: hazard 1 / 8
    got = divergence([([1, 2, 3, 9], [1, 2, 4, 9]), ([1] * 5, [1] * 5)])
    assert got is not None
    assert (got.pairs, got.identical, got.diverged, got.tokens) == (2, 1, 1, 8)
    assert got.hazard == pytest.approx(0.125)
    # Garwood for a count of 1: 0.02532 to 5.5716
    assert got.hazard_low == pytest.approx(0.02532 / 8, abs=1e-5)
    assert got.hazard_high == pytest.approx(5.5716 / 8, abs=1e-4)
    assert divergence([]) is None


def test_losslessness_has_the_baselines_own_floor(builder: Any) -> None:
    same, other = list(range(257)), [*range(256), 999]
    for launch, method in enumerate(("autoregressive", "dflash")):
        for load in (1, 8):
            cell = builder.cell(method, concurrency=load, requests=1)
            ids = other if (method, load) in (("dflash", 1), ("autoregressive", 8)) else same
            builder.request(cell, launch, 0, 0, decode_rate=100, tau=4, output_ids=ids)
            builder.close(cell, launch)
    found = summarise(read_run(builder.write()))["losslessness"]
    row = pick(found["rows"], concurrency=1)
    assert (row["against_baseline"]["diverged"], row["against_baseline"]["tokens"]) == (1, 257)
    assert (row["floor"]["diverged"], row["floor_from"]) == (1, "the baseline at concurrency 8")
    assert row["mcnemar_p"] == 1.0


def test_losslessness_needs_temperature_zero(make_run: Any) -> None:
    folder = make_run()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sweep"]["sampling"]["temperature"] = 0.7
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert summarise(read_run(folder))["losslessness"]["applies"] is False


def test_percentiles_print_only_where_ten_values_lie_beyond() -> None:
    assert carries(100, 0.9)
    assert not carries(99, 0.9)
    assert carries(1000, 0.99)
    item = distribution([float(i) for i in range(1, 101)])
    assert item is not None
    assert item.percentiles == {"p50": 50.0, "p90": 90.0}
    assert distribution([1.0] * 19).percentiles == {}  # type: ignore[union-attr]


def test_latency_is_weighted_by_tokens() -> None:
    # a gap of 8 ms over 4 tokens is four times 2 ms
    item = weighted([(0.002, 4), (0.010, 1)])
    assert item is not None
    assert (item.n, item.mean) == (5, pytest.approx(0.0036))


def test_folders_of_single_loads_pair_in_order(tmp_path: Path, make_run: Any) -> None:
    runs = [
        read_run(make_run(f"r{i}-{m}", methods=(m,), launches=1))
        for i in range(3)
        for m in ("autoregressive", "dflash")
    ]
    summary = summarise(merge_runs(runs))
    row = pick(summary["speedups"], metric="decode")
    assert (row["launches"], row["verdict"], row["speedup"]) == (3, "faster", pytest.approx(3.2))


def test_the_banner_follows_the_engine(make_run: Any) -> None:
    folder = make_run()
    assert summarise(read_run(folder))["banner"] == "SIMULATED ENGINE, time scale 0.2: not GPU performance"
    manifest = json.loads((folder / "manifest.json").read_text())
    cells = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    for row in cells:
        row.update(simulated=False, time_scale=None)
    (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cells))
    for hardware, banner in (
        ("cpu", "CPU ENGINE: not GPU performance"),
        ("unknown", "HARDWARE UNKNOWN: not to be read as GPU performance"),
        ("gpu", None),
    ):
        manifest["engine"] = {"kind": "sglang", "hardware": hardware}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert summarise(read_run(folder))["banner"] == banner


@pytest.mark.parametrize(
    ("chunks", "verify", "correct", "steps"),
    [
        (65, 64, 192, 64),  # 257 = 1 + 64 + 192: the prefill's chunk is no verify step
        (64, 64, 193, 63),  # 257 = 64 + 193: it is one
        (65, 64, 200, 64),  # trimmed at the end: the chunks tell
        (20, 64, 193, 63),  # coalesced chunks: the tokens tell
        (20, 64, 192, 64),
    ],
)
def test_steps_after_the_first_chunk(builder: Any, chunks: int, verify: int, correct: int, steps: int) -> None:
    base, fast = (builder.cell(m, requests=1) for m in ("autoregressive", "dflash"))
    for launch, (cell, more) in enumerate(
        ((base, {}), (fast, {"chunks": chunks, "verify_steps": verify, "correct_drafts": correct}))
    ):
        builder.request(cell, launch, 0, 0, decode_rate=128, **more)
        builder.close(cell, launch)
    parts = pick(summarise(read_run(builder.write()))["speedups"], metric="decode")["decomposition"]
    assert parts["step_ms"] == pytest.approx(2000 / steps)  # 256 tokens at 128/s are 2 s


def test_a_stream_cut_inside_a_chunk_is_trimmed_to_the_end_of_sequence(builder: Any) -> None:
    """Chunks of 1, 4, 4, 4, 3 at 0..4 s, EOS is token 7 (index 6): it came with chunk 2, so 6 tokens in 2 s."""
    cell = builder.cell("dflash", requests=1, output_tokens=16)
    builder.request(cell, 0, 0, 0, decode_rate=15 / 4, first_eos=6, chunks=5, verify_steps=4, correct_drafts=11)
    builder.close(cell, 0)
    builder.chunks.append({"cell": cell["id"], "launch": 0, "index": 0, "t": [0, 1, 2, 3, 4], "k": [1, 4, 4, 4, 3]})
    run = read_run(builder.write())
    got = summarise(run, max_post_eos=0.9)["cells"][0]
    assert got["decode_tokens_per_s"]["mean"] == pytest.approx(3.0)
    # two verify steps brought 8 tokens: 1 + 6 / 2
    assert got["acceptance"]["sum_over_sum"] == pytest.approx(4.0)


def test_a_launch_that_sat_elsewhere_does_not_count(make_run: Any) -> None:
    """The incident's case, found after the cells: the launch's figures are left out, and the verdict with them."""
    folder = make_run()
    manifest = json.loads((folder / "manifest.json").read_text())
    message = "tp1-dflash: planned GPU 4 (node 1), saw GPU 1 (node 0)"
    manifest["launches"][1]["gates"] = [
        {"gate": "placement", "status": "pass", "message": "as planned"},
        {"gate": "placement", "status": "fail", "message": message, "when": "after"},
    ]
    manifest["launches"][2]["gates"] = [{"gate": "budget", "status": "fail", "message": "one cell does not fit"}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    summary = summarise(read_run(folder))
    assert message in pick(summary["cells"], method="dflash")["reason"]
    assert pick(summary["speedups"], metric="decode", method="dflash")["launches"] == 2
    assert pick(summary["speedups"], metric="decode", method="ddtree-b15")["launches"] == 3


def test_a_launch_that_failed_is_said(make_run: Any) -> None:
    folder = make_run()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["launches"].append({"launch": 9, "profile": "tp8-dflash", "error": "Start: no GPU left"})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "launch 9 of tp8-dflash did not run: Start: no GPU left" in summarise(read_run(folder))["problems"]


def test_plain_loads_of_two_methods_share_cell_ids_and_stay_apart(builder: Any, tmp_path: Path, make_run: Any) -> None:
    """Cells that know no profile have the same id in every folder; their methods come from the server."""
    runs = []
    for method in ("autoregressive", "dflash"):
        folder = make_run(f"load-{method}", methods=(method,), launches=1)
        for name in ("manifest.json", "requests.jsonl", "cells.jsonl"):
            content = (folder / name).read_text().replace(f"tp1-{method}-decode-4096-257-c1", "cafe00000001")
            (folder / name).write_text(content)
        runs.append(read_run(folder))
    summary = summarise(merge_runs(runs))
    assert [cell["method"] for cell in summary["cells"]] == ["autoregressive", "dflash"]
    assert pick(summary["speedups"], metric="decode")["speedup"] == pytest.approx(3.2)


def test_a_tree_over_the_chain_is_the_ratio_of_their_speedups(make_run: Any) -> None:
    """ddtree 5 / 28 ms against dflash 4 / 25 ms: 1.11607; in one direction only, and not among the speed-ups."""
    summary = summarise(read_run(make_run()))
    row = pick(summary["pairs"], metric="decode")
    assert (row["method"], row["baseline"], row["verdict"]) == ("ddtree-b15", "dflash", "faster")
    assert row["speedup"] == pytest.approx(5 / 28 / (4 / 25))
    assert {row["baseline"] for row in summary["speedups"]} == {"autoregressive"}
    # the decomposition of a method over a method: 256 tokens in 51 steps against 64
    assert row["decomposition"]["base_tokens_per_step"] == pytest.approx(4.0)
    assert row["decomposition"]["tokens_per_step"] == pytest.approx(256 / 51)


def test_the_load_of_a_trace_and_of_a_ramp_is_named(builder: Any) -> None:
    shapes = {"trace": {"concurrency": None}, "ramp": {"concurrency": None, "rate": 2.0}}
    for arrival, keys in shapes.items():
        cell = builder.cell("autoregressive", workload=f"as-{arrival}", arrival=arrival, **keys)
        for index in range(4):
            builder.request(cell, 0, 0, index, decode_rate=50.0)
        builder.close(cell, 0)
    summary = summarise(read_run(builder.write()))
    shown = screen(summary)
    assert "as-trace · 4,096 prompt tokens · trace" in shown
    assert "as-ramp · 4,096 prompt tokens · ramp from 2 req/s" in shown
    assert {row["load"] for row in view(summary)["cells"]} == {"trace", "ramp from 2 req/s"}


def test_an_open_loop_shows_the_scheduled_ttft_first(builder: Any) -> None:
    open_loop = builder.cell("autoregressive", arrival="constant", rate=2.0, concurrency=8)
    closed = builder.cell("autoregressive", workload="closed")
    for cell, late in ((open_loop, 0.25), (closed, 0.0)):
        for index in range(4):
            sent = 10.0 + index
            builder.request(cell, 0, 0, index, decode_rate=50.0, ttft_s=0.5, scheduled_s=sent - late)
        window = {"start_s": 5.0, "end_s": 15.0, "tokens": 100, "tokens_per_s": 10.0, "running_mean": 1.0}
        builder.close(cell, 0, window=window)
    summary = summarise(read_run(builder.write()))
    rows = {row["workload"]: row for row in summary["cells"]}
    assert rows["decode"]["scheduled_ttft_s"]["mean"] == pytest.approx(0.75)
    assert rows["decode"]["ttft_s"]["mean"] == pytest.approx(0.5)
    assert rows["decode"]["valid"]  # eight may run at once; they need not
    assert rows["closed"]["scheduled_ttft_s"] is None
    names = list(view(summary)["columns"])
    assert names.index("scheduled TTFT mean, ms") < names.index("TTFT mean, ms")
    for shown in (screen(summary), markdown(summary)):
        (line,) = [line for line in shown.splitlines() if "decode autoregressive" in line and "2 req/s" in line]
        assert line.index("750") < line.index("500")
